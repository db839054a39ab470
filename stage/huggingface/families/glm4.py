"""GLM-4: dense with norms around each part and interleaved rotary pairs, and GLM-4-MoE with neither."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage.huggingface.families.family import (
    ATTENTION,
    EXPERTS,
    FUSED_MLP,
    MLP,
    Family,
    Place,
    Sizes,
    places,
    silu,
)
from shardline.stage.huggingface.families.qwen import chosen
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec


def _glm4(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    return sizes.spec(
        keys,
        "glm4",
        (read_rope(keys, sizes.head_dim, partial=0.5, interleaved=True),),
        [LayerSpec()] * sizes.num_layers,
        qkv_bias=keys.flag("attention_bias", True),
        post_norms=True,
    )


def _glm4_moe(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    keys.only("scoring_func", lambda value: value == "sigmoid", "another router than a sigmoid here")
    keys.only("topk_method", lambda value: value == "noaux_tc", "another choice of experts than noaux_tc here")
    count, width = keys.same_size("n_routed_experts", "num_local_experts"), keys.size("moe_intermediate_size")
    groups = keys.size("n_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        raise keys.error("n_group", f"{count} experts are not {groups} groups of two and more")
    kept = keys.size("topk_group", 1, most=groups)
    rule = RouterRule(
        chosen(keys, count // groups * kept),
        "sigmoid",
        normalise=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        groups_kept=kept,
    )
    dense = keys.size("first_k_dense_replace", 1, least=0)
    return sizes.spec(
        keys,
        "glm4_moe",
        (read_rope(keys, sizes.head_dim, partial=0.5),),
        [LayerSpec(experts=layer >= dense) for layer in range(sizes.num_layers)],
        qkv_bias=keys.flag("attention_bias", False),
        qk_norm="head" if keys.flag("use_qk_norm", False) else None,
        experts=ExpertsSpec(
            count, width, rule, choice_bias=True, shared_size=width * keys.size("n_shared_experts", 1, least=0)
        ),
    )


def _next_token_layers(keys: Keys, spec: ModelSpec) -> tuple[str, ...]:
    """Layers after the last that guess further tokens."""
    count = keys.size("num_nextn_predict_layers", 0, least=0, most=64)
    return tuple(f"model.layers.{spec.num_layers + index}." for index in range(count))


_NORMS = places(
    {
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }
)
_EXPERTS = EXPERTS | places(
    {
        "shared_gate": "mlp.shared_experts.gate_proj",
        "shared_up": "mlp.shared_experts.up_proj",
        "shared_down": "mlp.shared_experts.down_proj",
    }
)
_EXPERTS["choice_bias"] = Place("mlp.gate", "e_score_correction_bias")

GLM4 = Family("Glm4ForCausalLM", "glm4", _glm4, ATTENTION | FUSED_MLP | _NORMS, {"head_dim": 128})
GLM4_MOE = Family("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, ATTENTION | MLP | _EXPERTS, unused=_next_token_layers)
