"""Shapes of models that are measured with random weights, and a tiny one of each kind for tests."""

from __future__ import annotations

from shardline.kernels import RouterRule
from shardline.stage import LayerSpec, ModelSpec, RopeSpec
from shardline.stage.spec import ExpertsSpec

QWEN3_8B = ModelSpec(
    architecture="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    context_length=4096,
    norm_eps=1e-6,
    layers=(LayerSpec(),) * 36,
    ropes=(RopeSpec(1e6, 128, False),),
    qk_norm="head",
    tied_embeddings=False,
)
QWEN3_30B_A3B = ModelSpec(
    architecture="qwen3moe",
    num_layers=48,
    hidden_size=2048,
    intermediate_size=0,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    context_length=4096,
    norm_eps=1e-6,
    layers=(LayerSpec(experts=True),) * 48,
    ropes=(RopeSpec(1e6, 128, False),),
    qk_norm="head",
    tied_embeddings=False,
    experts=ExpertsSpec(128, 768, RouterRule(8)),
)
TINY = ModelSpec(
    architecture="qwen3",
    num_layers=6,
    hidden_size=128,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1024,
    context_length=2048,
    norm_eps=1e-6,
    layers=(LayerSpec(),) * 6,
    ropes=(RopeSpec(1e6, 32, False),),
    qk_norm="head",
    tied_embeddings=False,
)
TINY_EXPERTS = ModelSpec(
    architecture="qwen3moe",
    num_layers=6,
    hidden_size=128,
    intermediate_size=0,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1024,
    context_length=2048,
    norm_eps=1e-6,
    layers=(LayerSpec(experts=True),) * 6,
    ropes=(RopeSpec(1e6, 32, False),),
    qk_norm="head",
    tied_embeddings=False,
    experts=ExpertsSpec(16, 128, RouterRule(4)),
)
MODELS = {"qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B, "tiny": TINY, "tiny-experts": TINY_EXPERTS}
