"""Phi-3 and Phi-4: Llama with fused matrices, LongRoPE and, in some, a part of each head that turns."""

from __future__ import annotations

from shardline.stage.huggingface.families.family import ATTENTION, FUSED_MLP, Family, Place, Sizes, silu, window_of_all
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import LayerSpec, ModelSpec


def _phi3(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    window = window_of_all(keys, sizes)
    # Early files call LongRoPE "su", and some "yarn".
    rope = read_rope(keys, sizes.head_dim, aliases={"su": "longrope", "yarn": "longrope"})
    return sizes.spec(keys, "phi3", (rope,), [LayerSpec(window=window)] * sizes.num_layers)


_QKV = {role: Place("self_attn.qkv_proj", parts=("q", "k", "v")) for role in "qkv"}

PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    _phi3,
    ATTENTION | FUSED_MLP | _QKV,
    defaults={
        "original_max_position_embeddings": 4096,
    },
)
