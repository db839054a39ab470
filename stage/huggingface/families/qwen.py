"""Qwen2 and Qwen3, dense and with experts, and OLMoE, whose experts are Qwen's."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage.huggingface.families.family import (
    ATTENTION,
    EXPERTS,
    MLP,
    Family,
    Place,
    Sizes,
    places,
    silu,
    sliding_layers,
    window_of_all,
)
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec


def _windowed_from(keys: Keys, sizes: Sizes) -> list[LayerSpec]:
    """Layers of the dense ones: those from `max_window_layers` on have the window, if it is used."""
    given = keys.get("sliding_window") is not None
    used = keys.flag("use_sliding_window", False) and given
    window = keys.size("sliding_window") if used else 0
    first = keys.size("max_window_layers", 28, least=0)
    slides = sliding_layers(keys, sizes.num_layers, lambda layer: used and layer >= first)
    if any(slides) and not used:
        raise keys.error("layer_types", "has sliding windows, but use_sliding_window is false")
    return [LayerSpec(window=window if slide else 0) for slide in slides]


def _qwen2(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    return sizes.spec(keys, "qwen2", (read_rope(keys, sizes.head_dim),), _windowed_from(keys, sizes), qkv_bias=True)


def _qwen3(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        "qwen3",
        (read_rope(keys, sizes.head_dim),),
        _windowed_from(keys, sizes),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
    )


def expert_layers(keys: Keys, num_layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`th, but not those of `mlp_only_layers`."""
    step = keys.size("decoder_sparse_step", 1)
    dense = keys.integers("mlp_only_layers", 0, num_layers - 1) or ()
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def chosen(keys: Keys, num_experts: int) -> int:
    """How many experts a token goes to. Raises CheckpointError."""
    return keys.size("num_experts_per_tok", most=num_experts)


def _softmax_experts(keys: Keys, width: str, shared_size: int = 0) -> ExpertsSpec:
    count = keys.same_size("num_experts", "num_local_experts")
    rule = RouterRule(chosen(keys, count), "softmax", normalise=keys.flag("norm_topk_prob", False))
    return ExpertsSpec(count, keys.size(width), rule, shared_size=shared_size, shared_gate=shared_size > 0)


def _qwen2_moe(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    # Where it is not used it may be 0.
    keys.get("sliding_window")
    used = keys.flag("use_sliding_window", False)
    window = keys.size("sliding_window") if used else 0
    end = keys.size("max_window_layers", 28, least=0)
    slides = sliding_layers(keys, sizes.num_layers, lambda layer: used and layer % 2 == 0 and layer < end)
    if any(slides) and not used:
        raise keys.error("layer_types", "has sliding windows, but use_sliding_window is false")
    layers = [
        LayerSpec(window=window if slide else 0, experts=experts)
        for slide, experts in zip(slides, expert_layers(keys, sizes.num_layers), strict=True)
    ]
    return sizes.spec(
        keys,
        "qwen2_moe",
        (read_rope(keys, sizes.head_dim),),
        layers,
        qkv_bias=keys.flag("qkv_bias", True),
        experts=_softmax_experts(keys, "moe_intermediate_size", keys.size("shared_expert_intermediate_size")),
    )


def _qwen3_moe(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    keys.get("max_window_layers")
    window = 0
    if keys.flag("use_sliding_window", False):
        window = window_of_all(keys, sizes)
    elif any(sliding_layers(keys, sizes.num_layers, lambda layer: False)):
        raise keys.error("layer_types", "has sliding windows, but use_sliding_window is false")
    keys.get("sliding_window")
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        "qwen3_moe",
        (read_rope(keys, sizes.head_dim),),
        [LayerSpec(window=window, experts=experts) for experts in expert_layers(keys, sizes.num_layers)],
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        experts=_softmax_experts(keys, "moe_intermediate_size"),
    )


def _olmoe(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    keys.only("clip_qkv", lambda value: False, "a clamp on queries, keys and values")
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        "olmoe",
        (read_rope(keys, sizes.head_dim),),
        [LayerSpec(experts=True)] * sizes.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="row",
        experts=_softmax_experts(keys, "intermediate_size"),
    )


_SHARED = places(
    {
        "shared_gate": "mlp.shared_expert.gate_proj",
        "shared_up": "mlp.shared_expert.up_proj",
        "shared_down": "mlp.shared_expert.down_proj",
    }
) | {"shared_expert_gate": Place("mlp.shared_expert_gate")}

QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _qwen2, ATTENTION | MLP)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _qwen3, ATTENTION | MLP, defaults={"head_dim": 128})
QWEN2_MOE = Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe, ATTENTION | MLP | EXPERTS | _SHARED)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, ATTENTION | MLP | EXPERTS)
OLMOE = Family("OlmoeForCausalLM", "olmoe", _olmoe, ATTENTION | EXPERTS)
