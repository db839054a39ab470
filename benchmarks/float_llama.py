"""A Llama in float32 and NumPy: the yardstick that an engine of 4 and 8 bits cannot be for itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardline.stage import Checkpoint, LayerSpec, ModelSpec, matrix_shapes, vector_shapes
from shardline.stage.huggingface.families import MODEL
from shardline.stage.huggingface.families.family import ATTENTION, MLP
from shardline.stage.huggingface.folder import Folder
from shardline.stage.huggingface.formats.scheme import widened
from shardline.stage.huggingface.storage import float_info, whole

Floats = NDArray[np.float32]
Weights = dict[tuple[str, int | None], Floats]
"""By role and layer (None: the model's own): matrices [N, K], vectors [N]."""


def load(checkpoint: Checkpoint) -> Weights:
    """All weights: a GGUF file's as what its integers stand for, a folder's floats as they are.

    Raises ValueError: it is no plain Llama, or a folder's tensor is not of floats.
    """
    spec, folder = checkpoint.spec, checkpoint.text_folder
    check(spec)
    files = Folder(folder) if folder is not None else None
    weights: Weights = {}
    for layer in (None, *range(spec.num_layers)):
        for role in vector_shapes(spec, layer):
            weights[role, layer] = checkpoint.vector(role, layer)
        for role in matrix_shapes(spec, layer):
            if files is None:
                weights[role, layer] = checkpoint.matrix(role, layer).dequantize()
            else:
                name = _name(role, layer)
                float_info(files, name)
                weights[role, layer] = widened(name, whole(files, name))
    if files is not None:
        files.close()
    if spec.tied_embeddings:
        weights["head", None] = weights["embed", None]
    return weights


def check(spec: ModelSpec) -> None:
    """Raises ValueError: something is asked of the decoder that is not done here."""
    rope = spec.ropes[0]
    if spec.architecture != "llama" or spec.experts or spec.qkv_bias or spec.output_bias or spec.mlp_bias:
        raise ValueError("only Llamas without biases and experts are computed here")
    if set(spec.layers) != {LayerSpec()} or rope.long_factors or rope.rotary_dim != spec.head_dim:
        raise ValueError("only rotary embeddings over whole heads, without windows, are computed here")


def logits(spec: ModelSpec, weights: Weights, token_ids: Sequence[int]) -> Floats:
    """float32 [tokens, vocab] of one sequence from its beginning."""
    x = weights["embed", None][list(token_ids)]
    for layer in range(spec.num_layers):
        x = x + _attention(spec, weights, layer, _norm(spec, x, weights["attention_norm", layer]))
        normed = _norm(spec, x, weights["mlp_norm", layer])
        gate, up = (normed @ weights[role, layer].T for role in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["down", layer].T
    return _norm(spec, x, weights["final_norm", None]) @ weights["head", None].T


def _name(role: str, layer: int | None) -> str:
    if role == "head":
        return "lm_head.weight"
    module = MODEL[role].module if layer is None else f"layers.{layer}.{(ATTENTION | MLP)[role].module}"
    return f"model.{module}.weight"


def _norm(spec: ModelSpec, x: Floats, weight: Floats) -> Floats:
    size = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(spec.norm_eps))
    return x / size * weight


def _attention(spec: ModelSpec, weights: Weights, layer: int, normed: Floats) -> Floats:
    count = len(normed)
    q, k, v = ((normed @ weights[role, layer].T).reshape(count, -1, spec.head_dim).transpose(1, 0, 2) for role in "qkv")
    q, k = _turned(spec, q), _turned(spec, k)
    shared = spec.num_heads // spec.num_kv_heads
    k, v = (np.repeat(part, shared, axis=0) for part in (k, v))
    scores = q @ k.transpose(0, 2, 1) * np.float32(spec.attention_scale or spec.head_dim**-0.5)
    scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    attended = (shares @ v).transpose(1, 0, 2).reshape(count, -1)
    return attended @ weights["o", layer].T


def _turned(spec: ModelSpec, heads: Floats) -> Floats:
    """[heads, tokens, head_dim], each token turned by its place."""
    rope = spec.ropes[0]
    half = rope.rotary_dim // 2
    frequencies = rope.base ** (-np.arange(half) / half) / np.array(rope.factors or (1.0,))
    angles = np.arange(heads.shape[1])[:, None] * frequencies
    cos, sin = (np.float32(rope.attention_factor) * f(angles).astype(np.float32) for f in (np.cos, np.sin))
    first, second = (slice(0, None, 2), slice(1, None, 2)) if rope.interleaved else (slice(half), slice(half, None))
    a, b = heads[..., first], heads[..., second]
    out = np.empty_like(heads)
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out
