"""A GGUF file's mixture of experts as an `ExpertsSpec`."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage.gguf.families import ExpertRule, Family, Scoring
from shardline.stage.gguf.keys import Keys, UnsupportedError
from shardline.stage.spec import ExpertsSpec

MAX_EXPERTS = 4096

# The file's numbers for how logits become scores; 0 leaves it to the family.
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}


def read_experts(keys: Keys, family: Family) -> ExpertsSpec | None:
    """None for a model without experts. Raises UnsupportedError."""
    rule = family.experts
    count = keys.size("expert_count", 0, least=0, most=MAX_EXPERTS)
    if rule is None or (count == 0 and not rule.required):
        keys.only("expert_count", lambda value: value == 0, f"a mixture of experts in a {family.name} model")
        keys.only("expert_used_count", lambda value: value == 0, f"a mixture of experts in a {family.name} model")
        return None
    if count == 0:
        raise UnsupportedError(keys.name("expert_count"), f"a {family.name} model without experts is not supported")
    used = keys.size("expert_used_count", most=count)
    width = _width(keys, rule, used)
    shared_size = _shared_size(keys, rule, width)
    return ExpertsSpec(
        num_experts=count,
        intermediate_size=width,
        rule=_router_rule(keys, rule, count, used),
        router_bias=rule.router_bias,
        choice_bias=rule.choice_bias,
        biases=rule.biases,
        shared_size=shared_size,
        shared_gate=rule.shared == "gated" and shared_size > 0,
    )


def _width(keys: Keys, rule: ExpertRule, used: int) -> int:
    if keys.get("expert_feed_forward_length") is not None:
        return keys.size("expert_feed_forward_length")
    dense = keys.size("feed_forward_length")
    return max(1, dense // used) if rule.width_is_shared_out else dense


def _shared_size(keys: Keys, rule: ExpertRule, width: int) -> int:
    if rule.shared == "gated":
        # An older file has no key: its dense width is the shared expert's.
        return keys.size("expert_shared_feed_forward_length", keys.size("feed_forward_length"), least=0)
    if rule.shared == "plain":
        return width * keys.size("expert_shared_count", least=0, most=MAX_EXPERTS)
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        keys.only(key, lambda value: value == 0, "a shared expert")
    return 0


def _router_rule(keys: Keys, rule: ExpertRule, count: int, used: int) -> RouterRule:
    scoring = rule.scoring
    code = keys.get("expert_gating_func")
    if code not in (None, 0):
        if isinstance(code, bool) or code not in _SCORINGS:
            raise keys.refuse("expert_gating_func", f"is not one of {', '.join(map(str, _SCORINGS))}")
        scoring = _SCORINGS[code]
    groups = keys.size("expert_group_count", 1, most=count)
    kept = keys.size("expert_group_used_count", 1, most=groups)
    if count % groups:
        raise UnsupportedError(keys.name("expert_group_count"), f"{groups} does not divide the {count} experts")
    if groups > 1 and count // groups < 2:
        raise UnsupportedError(keys.name("expert_group_count"), f"{groups} groups of one expert are not supported")
    if used > kept * (count // groups):
        raise UnsupportedError(
            keys.name("expert_used_count"),
            f"{used} experts a token, but {kept} groups of {count // groups} are chosen from",
        )
    return RouterRule(
        experts_per_token=used,
        scoring=scoring,
        normalise=keys.flag("expert_weights_norm", rule.normalise),
        scale=keys.optional_number("expert_weights_scale", 1.0),
        num_groups=groups,
        groups_kept=kept,
    )
