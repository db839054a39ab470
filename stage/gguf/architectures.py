"""From a GGUF file's keys and tensors to a `ModelSpec`, by what `families` says of its family.

A file is accepted when every key of its family is understood and every tensor of it is used. What would change the
arithmetic and is not implemented is refused by key and value: to ignore it would be to run another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.stage.errors import shown
from shardline.stage.gguf.experts import read_experts
from shardline.stage.gguf.families import FAMILIES, Family
from shardline.stage.gguf.header import TensorInfo
from shardline.stage.gguf.keys import MAX_CONTEXT, MAX_SIZE, Keys, UnsupportedError
from shardline.stage.gguf.rope import ReadFloats, read_ropes
from shardline.stage.gguf.tensors import Source, embedding, find_sources, has, has_head
from shardline.stage.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The model that a file holds, and where each role of it lies."""

    spec: ModelSpec
    sources: Mapping[tuple[str, int | None], Source]


def read_model(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read_floats: ReadFloats) -> GgufModel:
    """`read_floats` reads a small tensor of a float type. Raises UnsupportedError."""
    family = _family(metadata)
    keys = Keys(metadata, family.name)
    unused_layers = keys.size("nextn_predict_layers", 0, least=0, most=16) if family.may_predict else 0
    num_layers = keys.size("block_count") - unused_layers
    if num_layers < 1:
        raise keys.refuse("nextn_predict_layers", "leaves no layer")
    if num_layers > len(tensors):
        raise UnsupportedError(
            keys.name("block_count"), f"{num_layers} layers, but the file has {len(tensors)} tensors"
        )
    hidden_size, num_heads, num_kv_heads, head_dim = _head_sizes(keys)
    context_length = keys.size("context_length", most=MAX_CONTEXT)
    experts = read_experts(keys, family)
    dense_layers = num_layers
    if experts is not None:
        dense_layers = keys.size("leading_dense_block_count", 0, least=0, most=num_layers)
    whole, local = read_ropes(keys, family, head_dim, context_length, tensors, read_floats)
    window, windowed = _windows(keys, family, num_layers, context_length)
    ropes = (whole, local) if local != whole and any(windowed) else (whole,)
    if family.head_required and not has_head(tensors):
        raise UnsupportedError("tensor output.weight", "is missing")

    spec = ModelSpec(
        architecture=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_dense_width(keys, dense_layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(keys, metadata, tensors),
        context_length=context_length,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        layers=tuple(
            LayerSpec(
                window=window if has_window else 0,
                rope=_rope_of(family, layer, len(ropes) - 1 if has_window else 0),
                experts=layer >= dense_layers,
            )
            for layer, has_window in enumerate(windowed)
        ),
        ropes=ropes,
        tied_embeddings=not has_head(tensors),
        qkv_bias=_present(family.qkv_bias, tensors, "q_bias", "k_bias", "v_bias"),
        output_bias=_present(family.output_bias, tensors, "o_bias"),
        mlp_bias=_present(family.mlp_bias, tensors, "gate_bias", "up_bias", "down_bias"),
        qk_norm=family.qk_norm if not family.qk_norm_depends or has(tensors, "q_norm", "k_norm") else None,
        sinks=family.sinks,
        attention_scale=_attention_scale(keys, family, num_layers, hidden_size // num_heads, head_dim),
        attention_softcap=keys.optional_number("attn_logit_softcapping", family.softcaps[0]),
        final_softcap=keys.optional_number("final_logit_softcapping", family.softcaps[1]),
        post_norms=family.post_norms,
        activation=family.activation,
        embedding_scale=math.sqrt(hidden_size) if family.scales_embedding else 1.0,
        experts=experts,
    )
    _refuse_other_arithmetic(keys, family)
    return GgufModel(spec, find_sources(spec, family, tensors, unused_layers))


def _family(metadata: Mapping[str, Any]) -> Family:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError("general.type", f"{shown(kind)} is not a model")
    version = metadata.get("general.quantization_version", 2)
    if version != 2:
        raise UnsupportedError("general.quantization_version", f"{shown(version)} is not supported; 2 is")
    name = metadata.get("general.architecture")
    if name is None:
        raise UnsupportedError("general.architecture", "the key is missing")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedError("general.architecture", f"{shown(name)} is not supported; {', '.join(FAMILIES)} are")
    return family


def _head_sizes(keys: Keys) -> tuple[int, int, int, int]:
    """Hidden size, query heads, key heads, channels of a head."""
    hidden_size = keys.size("embedding_length")
    num_heads = keys.size("attention.head_count")
    num_kv_heads = keys.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedError(
            keys.name("attention.head_count_kv"), f"{num_kv_heads} does not divide the {num_heads} query heads"
        )
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise UnsupportedError(
            keys.name("attention.head_count"), f"{num_heads} does not divide embedding_length {hidden_size}"
        )
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    keys.only("attention.value_length", lambda v: v == head_dim, f"a value length other than the key length {head_dim}")
    return hidden_size, num_heads, num_kv_heads, head_dim


def _vocab_size(keys: Keys, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    vocab_size = keys.size("vocab_size", embedding(tensors).shape[0])
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        raise UnsupportedError("tokenizer.ggml.tokens", f"{len(tokens)} tokens, but the vocabulary has {vocab_size}")
    return vocab_size


def _dense_width(keys: Keys, dense_layers: int) -> int:
    """Of the layers without experts; where there is none, the file's number says nothing of the model."""
    if dense_layers:
        return keys.size("feed_forward_length")
    keys.get("feed_forward_length")
    return 0


def _present(rule: bool | None, tensors: Mapping[str, TensorInfo], *roles: str) -> bool:
    return has(tensors, *roles) if rule is None else rule


def _attention_scale(keys: Keys, family: Family, num_layers: int, mean_head: int, head_dim: int) -> float:
    """0 for the usual one, which a file's number in float32 may be too."""
    usual = head_dim**-0.5
    default = max(1, mean_head) ** -0.5 if num_layers in family.scale_of_mean_head else usual
    scale = keys.optional_number("attention.scale", default)
    return 0.0 if math.isclose(scale, usual, rel_tol=1e-6) else scale


def _windows(keys: Keys, family: Family, num_layers: int, context_length: int) -> tuple[int, list[bool]]:
    """The window, 0 where it is no shorter than the context, and which layers are those with a window: they may turn in
    another way even then."""
    window = keys.size("attention.sliding_window", 0, least=0, most=MAX_SIZE)
    rule = family.windows
    if rule is None:
        if window and window < context_length:
            raise keys.refuse("attention.sliding_window", f"is a window of a {family.name} model: not supported")
        return 0, [False] * num_layers
    window = window or rule.default
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        # A file with layers that predict further tokens has entries for them too.
        if len(pattern) < num_layers or not all(isinstance(entry, bool) for entry in pattern):
            raise keys.refuse("attention.sliding_window_pattern", f"is not {num_layers} truth values")
        windowed = pattern[:num_layers]
    else:
        period = keys.size("attention.sliding_window_pattern", rule.period, least=0)
        windowed = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    if window == 0:
        return 0, [False] * num_layers
    return 0 if window >= context_length else window, windowed


def _rope_of(family: Family, layer: int, rope: int) -> int | None:
    return None if family.nope_period and (layer + 1) % family.nope_period == 0 else rope


def _refuse_other_arithmetic(keys: Keys, family: Family) -> None:
    zero = lambda value: value == 0  # noqa: E731
    one = lambda value: value == 1  # noqa: E731
    keys.only("attention.causal", lambda value: value is True, "attention that is not causal")
    keys.only("pooling_type", zero, "an embedding model")
    keys.only("attention.clamp_kqv", zero, "a clamp")
    keys.only("attention.max_alibi_bias", zero, "ALiBi")
    keys.only("logit_scale", one, "a logit scale")
    keys.only("residual_scale", one, "a residual scale")
    keys.only("embedding_scale", one, "an embedding scale")
    keys.only("use_parallel_residual", lambda value: value is False, "a parallel residual")
    keys.only("tensor_data_layout", lambda value: value == "Meta AI original pth", "another tensor layout")
    keys.refuse_unread()
