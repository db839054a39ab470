"""Gemma 2 and Gemma 3 (text): norms of 1 + w before and after each part, windows in most layers."""

from __future__ import annotations

import math
from collections.abc import Callable

from shardline.kernels import Activation
from shardline.stage.errors import shown
from shardline.stage.huggingface.families.family import ATTENTION, MLP, Family, Sizes, places, sliding_layers
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import LayerSpec, ModelSpec, RopeSpec

_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")


def _gemma(
    keys: Keys,
    name: str,
    ropes: Callable[[Keys, int], tuple[RopeSpec, ...]],
    slides: Callable[[int], bool],
    qk_norm: str | None,
) -> ModelSpec:
    sizes = Sizes.read(keys)
    activation: Activation = "gelu_tanh"
    for key in ("hidden_activation", "hidden_act"):
        keys.only(key, lambda value: value in _GELU_TANH, "another activation than gelu_pytorch_tanh here")
    keys.only("use_bidirectional_attention", lambda value: value is False, "attention that is not causal")
    window = keys.size("sliding_window")
    keys.only("sliding_window_size", lambda value: value == window, "a second window")
    found = ropes(keys, sizes.head_dim)
    layers = [
        LayerSpec(window=window if slide else 0, rope=len(found) - 1 if slide else 0)
        for slide in sliding_layers(keys, sizes.num_layers, slides)
    ]
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        name,
        found,
        layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=keys.cap("attn_logit_softcapping"),
        final_softcap=keys.cap("final_logit_softcapping"),
        post_norms=True,
        activation=activation,
        embedding_scale=math.sqrt(sizes.hidden_size),
    )


def _gemma2(keys: Keys) -> ModelSpec:
    return _gemma(
        keys, "gemma2", lambda keys, head_dim: (read_rope(keys, head_dim),), lambda layer: layer % 2 == 0, None
    )


def _gemma3(keys: Keys) -> ModelSpec:
    pattern = {keys.size(key) for key in ("sliding_window_pattern", "_sliding_window_pattern") if keys.get(key)} or {6}
    if len(pattern) > 1:
        raise keys.error("sliding_window_pattern", f"{sorted(pattern)}: it is said twice, and differently")
    period = pattern.pop()
    return _gemma(keys, "gemma3", _two_ropes, lambda layer: (layer + 1) % period != 0, "head")


def _two_ropes(keys: Keys, head_dim: int) -> tuple[RopeSpec, ...]:
    """The embedding of layers without a window, which alone is scaled in older files, and of those with one."""
    parameters = keys.section("rope_parameters")
    if parameters is None:
        return (
            read_rope(keys, head_dim, theta=1e6),
            read_rope(keys, head_dim, theta=1e4, theta_key="rope_local_base_freq", scaled=False),
        )
    full, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    parameters.refuse_unread()
    if full is None or local is None:
        raise keys.error("rope_parameters", f"{shown(keys.get('rope_parameters'))} lacks one of the two kinds of layer")
    return (
        read_rope(keys, head_dim, theta=1e6, scaling=full),
        read_rope(keys, head_dim, theta=1e4, theta_key="rope_local_base_freq", scaling=local, scaled=False),
    )


_NORMS = places(
    {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
_GEMMA2_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Of Gemma 3's larger models the text model's own object says only what differs from these.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_LAYER = ATTENTION | MLP | _NORMS

GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", _gemma2, _LAYER, _GEMMA2_DEFAULTS, norm_offset=1.0)
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", _gemma3, _LAYER, _GEMMA3_DEFAULTS, norm_offset=1.0)
GEMMA3_WITH_IMAGES = Family(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    _gemma3,
    _LAYER,
    _GEMMA3_DEFAULTS,
    section="text_config",
    beside=("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    prefixes=(("language_model.model.", "language_model.lm_head"), ("model.language_model.", "lm_head")),
    norm_offset=1.0,
    unused=lambda keys, spec: (
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    ),
)
