"""The rotary embedding that a config.json asks for, in transformers' older keys and in those of its version 5.

Older: `rope_theta`, `rope_scaling` (with `type` or `rope_type`) and `partial_rotary_factor` of their own. Version 5:
one object `rope_parameters` with all of them, or one a kind of layer (Gemma 3).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardline.stage import rope_scaling
from shardline.stage.errors import shown
from shardline.stage.huggingface.keys import MAX_SIZE, Keys
from shardline.stage.spec import RopeSpec

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(
    keys: Keys,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    aliases: Mapping[str, str] | None = None,
    theta_key: str = "rope_theta",
    scaling: Keys | None = None,
    scaled: bool = True,
) -> RopeSpec:
    """One rotary embedding of a model.

    Args:
        keys: The model's.
        head_dim: Of a head.
        theta, partial: Where the file does not say them.
        interleaved: See `RopeSpec`.
        aliases: Kinds of scaling that the family means others by.
        theta_key: Where an older file has the base.
        scaling: The object of version 5, if it is not the whole of `rope_parameters`.
        scaled: Whether an older file's `rope_scaling` is this embedding's.

    Raises:
        CheckpointError: a key is missing, unknown or has a value that is not supported.
    """
    older = keys.section("rope_scaling") if scaled else None
    section = scaling or keys.section("rope_parameters") or older or Keys(keys.path, {}, "rope_parameters.")
    if older is not None and older is not section and keys.get("rope_scaling") != keys.get("rope_parameters"):
        raise keys.error("rope_scaling", "is there beside rope_parameters, and is another")

    base = _one_of(section, "rope_theta", keys, theta_key, theta)
    share = _one_of(section, "partial_rotary_factor", keys, "partial_rotary_factor", partial)
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise keys.error("partial_rotary_factor", f"{share} of a head's {head_dim} channels is no even part of them")

    kinds = {section.text(key) for key in ("rope_type", "type") if section.get(key) is not None} or {"default"}
    if len(kinds) > 1:
        raise section.error("rope_type", f"{shown(sorted(kinds))}: type and rope_type say different things")
    kind = kinds.pop()
    kind = (aliases or {}).get(kind, kind)
    if kind not in SUPPORTED:
        why = ": it makes a token's place depend on how long its sequence is" if kind == "dynamic" else ""
        raise section.error("rope_type", f"{shown(kind)} is not supported{why}; {', '.join(SUPPORTED)} are")
    try:
        rope = _scaled(kind, RopeSpec(base, rotary_dim, interleaved), section, keys)
    except ValueError as error:
        raise section.error("rope_type", f"{kind}: {error}") from None
    section.refuse_unread()
    return rope


def extended_context(keys: Keys, context: int) -> int:
    """How far YaRN takes a model: by the file's custom `max_position_embeddings` need not say it."""
    section = keys.section("rope_parameters") or keys.section("rope_scaling")
    if section is None or "yarn" not in (section.get("rope_type"), section.get("type")):
        return context
    if section.get("factor") is None:
        return context
    return max(context, min(int(section.number("factor") * _original_context(section, keys)), MAX_SIZE))


def _scaled(kind: str, plain: RopeSpec, section: Keys, keys: Keys) -> RopeSpec:
    base, rotary_dim, interleaved = plain.base, plain.rotary_dim, plain.interleaved
    pairs = rotary_dim // 2
    if kind in ("default", "linear"):
        # What the model was trained with; it has no part in either.
        section.get("original_max_position_embeddings")
        keys.get("original_max_position_embeddings")
        if kind == "default":
            return plain
        return RopeSpec(base, rotary_dim, interleaved, rope_scaling.linear(section.number("factor"), pairs))
    original = _original_context(section, keys)
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        factors = rope_scaling.llama3(base, rotary_dim, section.number("factor"), low, high, original)
        return RopeSpec(base, rotary_dim, interleaved, factors)
    factor = section.number("factor", keys.size("max_position_embeddings") / original)
    if kind == "longrope":
        grown = section.number("attention_factor", rope_scaling.longrope_attention_factor(factor, original))
        short, long = section.numbers("short_factor", pairs), section.numbers("long_factor", pairs)
        return RopeSpec(base, rotary_dim, interleaved, short, long, original, grown)
    mscale, mscale_all = section.cap("mscale"), section.cap("mscale_all_dim")
    factors = rope_scaling.yarn(
        base,
        rotary_dim,
        factor,
        original,
        section.number("beta_fast", 32.0),
        section.number("beta_slow", 1.0),
        section.flag("truncate", True),
    )
    grown = section.number("attention_factor", rope_scaling.yarn_attention_factor(factor, mscale, mscale_all))
    return RopeSpec(base, rotary_dim, interleaved, factors, attention_factor=grown)


def _original_context(section: Keys, keys: Keys) -> int:
    """Tokens of the context that the model was first trained with: some files have it beside the object."""
    names = ("original_max_position_embeddings", "initial_context_length")
    found = {keys.size(name) for name in names if keys.get(name) is not None}
    if section.get(names[0]) is not None:
        found.add(section.size(names[0]))
    if len(found) > 1:
        raise section.error(names[0], f"{sorted(found)}: it is said twice, and differently")
    return found.pop() if found else keys.size("max_position_embeddings")


def _one_of(section: Keys, name: str, keys: Keys, other: str, default: float) -> float:
    """A number that may be in the object, beside it, or both, but then the same."""
    found = {section.number(name)} if section.get(name) is not None else set()
    if keys.get(other) is not None:
        found.add(keys.number(other))
    if len(found) > 1:
        raise section.error(name, f"{sorted(found)}: it is said twice, and differently")
    return found.pop() if found else default
