"""Mixtral: Mistral with experts, under names of its own."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage.huggingface.families.family import ATTENTION, Family, Sizes, places, silu, window_of_all
from shardline.stage.huggingface.families.qwen import chosen
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec


def _mixtral(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    window = window_of_all(keys, sizes)
    count = keys.same_size("num_local_experts", "num_experts")
    return sizes.spec(
        keys,
        "mixtral",
        (read_rope(keys, sizes.head_dim, theta=1000000.0),),
        [LayerSpec(window=window, experts=True)] * sizes.num_layers,
        experts=ExpertsSpec(count, keys.size("intermediate_size"), RouterRule(chosen(keys, count), "softmax")),
    )


_EXPERTS = places(
    {
        "router": "block_sparse_moe.gate",
        "expert_gate": "block_sparse_moe.experts.{}.w1",
        "expert_up": "block_sparse_moe.experts.{}.w3",
        "expert_down": "block_sparse_moe.experts.{}.w2",
    }
)

MIXTRAL = Family("MixtralForCausalLM", "mixtral", _mixtral, ATTENTION | _EXPERTS)
