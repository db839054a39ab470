"""gpt-oss: experts with biases in one tensor, attention sinks, windows in every other layer, YaRN."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage.huggingface.families.family import ATTENTION, Family, Place, Sizes, places, silu, sliding_layers
from shardline.stage.huggingface.families.qwen import chosen
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec


def _gpt_oss(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    # What the activation "clamped_swiglu" has.
    keys.only("swiglu_alpha", lambda value: value == 1.702, "another gain than 1.702")
    keys.only("swiglu_limit", lambda value: value == 7, "another limit than 7")
    count = keys.same_size("num_local_experts", "num_experts")
    per_token = chosen(keys, count)
    keys.only("experts_per_token", lambda value: value == per_token, "a number that num_experts_per_tok contradicts")
    window = keys.size("sliding_window")
    if keys.get("rope_scaling") is None and keys.get("rope_parameters") is None:
        raise keys.error("rope_scaling", "the key is missing, and this class scales its rotary embedding")
    bias = keys.flag("attention_bias", True)
    return sizes.spec(
        keys,
        "gpt_oss",
        (read_rope(keys, sizes.head_dim, theta=150000.0),),
        [
            LayerSpec(window=window if slide else 0, experts=True)
            for slide in sliding_layers(keys, sizes.num_layers, lambda layer: layer % 2 == 0)
        ],
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        activation="clamped_swiglu",
        experts=ExpertsSpec(
            count,
            keys.size("intermediate_size"),
            RouterRule(per_token, "softmax_of_chosen"),
            router_bias=True,
            biases=True,
        ),
    )


def _of_all(module: str, *parts: str) -> Place:
    return Place(module, "", parts, interleaved=bool(parts), stacked=True)


_GATE_UP, _BIASES = ("expert_gate", "expert_up"), ("expert_gate_bias", "expert_up_bias")
_EXPERTS = {
    **places({"router": "mlp.router"}, {"router_bias": "mlp.router"}),
    "sinks": Place("self_attn.sinks", ""),
    **{role: _of_all("mlp.experts.gate_up_proj", *_GATE_UP) for role in _GATE_UP},
    "expert_down": _of_all("mlp.experts.down_proj"),
    **{role: _of_all("mlp.experts.gate_up_proj_bias", *_BIASES) for role in _BIASES},
    "expert_down_bias": _of_all("mlp.experts.down_proj_bias"),
}

GPT_OSS = Family(
    "GptOssForCausalLM", "gpt_oss", _gpt_oss, ATTENTION | _EXPERTS, {"head_dim": 64, "sliding_window": 128}
)
