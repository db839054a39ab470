"""Llama, Mistral and SmolLM3: a decoder with rotary embeddings and a gated MLP, with or without a window."""

from __future__ import annotations

from shardline.stage.huggingface.families.family import (
    ATTENTION,
    MLP,
    Family,
    Sizes,
    silu,
    sliding_layers,
    window_of_all,
)
from shardline.stage.huggingface.families.rope import read_rope
from shardline.stage.huggingface.keys import Keys
from shardline.stage.spec import LayerSpec, ModelSpec


def _llama(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    keys.only(
        "sliding_window",
        lambda value: type(value) is int and value >= sizes.context,
        "LlamaForCausalLM has no window (MistralForCausalLM has): a sliding window shorter than the context",
    )
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        "llama",
        (read_rope(keys, sizes.head_dim),),
        [LayerSpec()] * sizes.num_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def _mistral(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    window = window_of_all(keys, sizes)
    return sizes.spec(
        keys, "mistral", (read_rope(keys, sizes.head_dim),), [LayerSpec(window=window)] * sizes.num_layers
    )


def _smollm3(keys: Keys) -> ModelSpec:
    sizes = Sizes.read(keys)
    silu(keys)
    keys.get("max_window_layers")
    every = keys.size("no_rope_layer_interval", 4)
    turns = keys.integers("no_rope_layers", 0, 1)
    if turns is None:
        turns = tuple(int((layer + 1) % every != 0) for layer in range(sizes.num_layers))
    if len(turns) < sizes.num_layers:
        raise keys.error("no_rope_layers", f"has {len(turns)} entries for {sizes.num_layers} layers")
    given = keys.get("sliding_window") is not None
    windowed = keys.flag("use_sliding_window", False) and given
    window = keys.size("sliding_window") if windowed else 0
    slides = sliding_layers(keys, sizes.num_layers, lambda layer: windowed and not turns[layer])
    layers = [
        LayerSpec(window=window if slides[layer] else 0, rope=0 if turns[layer] else None)
        for layer in range(sizes.num_layers)
    ]
    bias = keys.flag("attention_bias", False)
    return sizes.spec(
        keys,
        "smollm3",
        (read_rope(keys, sizes.head_dim, theta=2000000.0),),
        layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


LLAMA = Family("LlamaForCausalLM", "llama", _llama, ATTENTION | MLP)
MISTRAL = Family("MistralForCausalLM", "mistral", _mistral, ATTENTION | MLP, defaults={"sliding_window": 4096})
SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", _smollm3, ATTENTION | MLP, defaults={"tie_word_embeddings": True})
