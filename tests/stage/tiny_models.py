"""Tiny random models of every family and block type, written with the gguf package; no code of the room under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)

Tensors = dict[str, tuple[np.ndarray, Kind]]


def random_blocks(rng: np.random.Generator, kind: Kind, n: int, k: int, std: float) -> np.ndarray:
    """Random weights of roughly that deviation as the bytes of a tensor, uint8 [n, bytes a row].

    Quantized types get random bits in every field but the float16 ones, so that each corner of a format occurs.
    """
    if kind in FLOATS:
        values = rng.normal(0, std, (n, k)).astype(np.float32)
        if kind == Kind.F32:
            return values.view(np.uint8)
        if kind == Kind.F16:
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n * k // block_size, block_bytes), np.uint8)

    def put(offset: int, value: float) -> None:
        halves = (value * rng.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)

    # The deviation of the integers under a scale, and where the float16 fields lie.
    if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0):
        put(0, std / {Kind.Q4_0: 4.6, Kind.Q5_0: 9.2, Kind.Q8_0: 74}[kind])
    elif kind in (Kind.Q4_1, Kind.Q5_1):
        deviation = {Kind.Q4_1: 4.6, Kind.Q5_1: 9.2}[kind]
        put(0, std / deviation)
        put(2, -1.63 * std)
    elif kind in (Kind.Q4_K, Kind.Q5_K):
        deviation = {Kind.Q4_K: 4.6, Kind.Q5_K: 9.2}[kind] * 37
        put(0, std / deviation)
        put(2, 1.63 * std / 37)
    elif kind in (Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS):
        at = {Kind.Q2_K: 80, Kind.Q3_K: 108, Kind.IQ4_NL: 0, Kind.IQ4_XS: 0}[kind]
        put(at, std / {Kind.Q2_K: 9.9, Kind.Q3_K: 42, Kind.IQ4_NL: 65, Kind.IQ4_XS: 1200}[kind])
        if kind == Kind.Q2_K:
            put(82, std / 6)
    elif kind == Kind.MXFP4:
        blocks[:, 0] = 128 + round(np.log2(std / 5.9)) + rng.integers(-1, 2, len(blocks))
    else:
        assert kind == Kind.Q6_K, kind
        put(208, std / (18.5 * 74))
    return blocks.reshape(n, -1)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts to write.

    Attributes:
        count, used, ffn: How many, of how many a token, their width.
        shared: The shared expert's width.
        dense_layers: Leading layers without experts.
        apart: One tensor an expert, as older files have them.
        together: Gate and up in one tensor.
    """

    count: int = 8
    used: int = 2
    ffn: int = 32
    shared: int = 64
    dense_layers: int = 0
    apart: bool = False
    together: bool = False


class TinyModels:
    """Writes models; a call returns the file's path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        architecture: str = "llama",
        *,
        kinds: Sequence[Kind] = (Kind.Q4_1,),
        embed: Kind = Kind.Q8_0,
        layers: int = 3,
        hidden: int = 64,
        ffn: int = 96,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        rotary_dim: int | None = None,
        vocab: int = 101,
        context: int = 512,
        tied: bool | None = None,
        bias: bool | None = None,
        qk_norm: bool = True,
        fused_qkv: bool | None = None,
        rope_factors: bool = False,
        long_factors: bool = False,
        experts: Experts | None = None,
        predicts: int = 0,
        keys: dict[str, Any] | None = None,
        edit: Callable[[Tensors], None] | None = None,
        tensors_a_part: int = 0,
        seed: int = 0,
    ) -> Path:
        """`kinds` go round over the layers' matrices; `keys` are set (None: left out); `edit` changes the tensors.

        predicts: Layers behind the model's that predict further tokens. tensors_a_part: Write several files of so many
        tensors each and return the first one's path.
        """
        if tied is None:
            tied = architecture not in ("gpt-oss", "olmoe", "qwen2moe")
        if experts is None and architecture in ("qwen2moe", "qwen3moe", "olmoe", "glm4moe", "gpt-oss"):
            experts = Experts()
        writer = _Layers(np.random.default_rng(seed), kinds)
        writer.architecture, writer.experts = architecture, experts
        writer.hidden, writer.ffn, writer.head_dim = hidden, ffn, head_dim
        writer.heads, writer.kv_heads = heads, kv_heads
        writer.bias = architecture in ("qwen2", "qwen2moe", "gpt-oss") if bias is None else bias
        writer.qk_norm = qk_norm
        writer.fused_qkv = architecture == "phi3" if fused_qkv is None else fused_qkv
        writer.matrix("token_embd.weight", vocab, hidden, embed)
        for layer in range(layers + predicts):
            writer.write(layer)
        for layer in range(layers, layers + predicts):
            writer.norm(f"blk.{layer}.nextn.enorm.weight", hidden)
        writer.norm("output_norm.weight", hidden)
        if not tied:
            writer.matrix("output.weight", vocab, hidden)
        pairs = (rotary_dim or head_dim) // 2
        if rope_factors:
            writer.vector("rope_freqs.weight", writer.rng.uniform(1, 8, pairs))
        if long_factors:
            writer.vector("rope_factors_short.weight", writer.rng.uniform(1, 2, pairs))
            writer.vector("rope_factors_long.weight", writer.rng.uniform(2, 8, pairs))
        if edit:
            edit(writer.tensors)

        metadata: dict[str, Any] = {
            "block_count": layers + predicts,
            "context_length": context,
            "embedding_length": hidden,
            "feed_forward_length": ffn,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        if rotary_dim:
            metadata["rope.dimension_count"] = rotary_dim
        if predicts:
            metadata["nextn_predict_layers"] = predicts
        if experts is not None:
            metadata |= {"expert_count": experts.count, "expert_used_count": experts.used}
            if architecture in ("llama", "olmoe"):
                metadata["feed_forward_length"] = experts.ffn
            else:
                metadata["expert_feed_forward_length"] = experts.ffn
            if architecture == "qwen2moe":
                metadata["expert_shared_feed_forward_length"] = experts.shared
            if architecture == "glm4moe":
                metadata |= {
                    "expert_shared_count": experts.shared // experts.ffn,
                    "leading_dense_block_count": experts.dense_layers,
                    "expert_gating_func": 2,
                    "expert_weights_norm": True,
                    "expert_weights_scale": 1.5,
                }
        values = {f"{architecture}.{key}": value for key, value in metadata.items()} | (keys or {})
        self._count += 1
        path = self._folder / f"{architecture}-{self._count}.gguf"
        _write_file(path, architecture, values, writer.tensors, tensors_a_part)
        if tensors_a_part:
            return min(self._folder.glob(f"{path.stem}-*-of-*.gguf"))
        return path


class _Layers:
    """Makes a layer's tensors, in the shapes that llama.cpp's loaders name."""

    architecture: str
    experts: Experts | None
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    qk_norm: bool
    fused_qkv: bool

    def __init__(self, rng: np.random.Generator, kinds: Sequence[Kind]) -> None:
        self.rng = rng
        self.tensors: Tensors = {}
        self._kinds = kinds
        self._turn = 0

    def matrix(self, name: str, n: int, k: int, kind: Kind | None = None, count: int = 0) -> None:
        """[n, k], or `count` of them in one tensor."""
        if kind is None:
            kind = self._kinds[self._turn % len(self._kinds)]
            self._turn += 1
        data = random_blocks(self.rng, kind, max(1, count) * n, k, k**-0.5)
        self.tensors[name] = (data.reshape(count, n, -1) if count else data, kind)

    def vector(self, name: str, values: np.ndarray) -> None:
        self.tensors[name] = (values.astype(np.float32), Kind.F32)

    def norm(self, name: str, size: int) -> None:
        self.vector(name, self.rng.uniform(0.5, 1.5, size))

    def noise(self, name: str, *shape: int, std: float = 0.5) -> None:
        self.vector(name, self.rng.normal(0, std, shape))

    def write(self, layer: int) -> None:
        prefix, architecture = f"blk.{layer}.", self.architecture
        self.norm(prefix + "attn_norm.weight", self.hidden)
        self._attention(prefix)
        if architecture in ("gemma2", "gemma3", "glm4"):
            self.norm(prefix + "post_attention_norm.weight", self.hidden)
            self.norm(prefix + "post_ffw_norm.weight", self.hidden)
        behind_attention = architecture in ("glm4moe", "gpt-oss")
        self.norm(prefix + ("post_attention_norm.weight" if behind_attention else "ffn_norm.weight"), self.hidden)
        if self.experts is not None and layer >= self.experts.dense_layers:
            self._experts(prefix, self.experts)
        elif architecture in ("phi3", "glm4"):
            self.matrix(prefix + "ffn_up.weight", 2 * self.ffn, self.hidden)
            self.matrix(prefix + "ffn_down.weight", self.hidden, self.ffn)
        else:
            self.matrix(prefix + "ffn_gate.weight", self.ffn, self.hidden)
            self.matrix(prefix + "ffn_up.weight", self.ffn, self.hidden)
            self.matrix(prefix + "ffn_down.weight", self.hidden, self.ffn)

    def _attention(self, prefix: str) -> None:
        rows = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "v": self.kv_heads * self.head_dim}
        if self.fused_qkv:
            self.matrix(prefix + "attn_qkv.weight", sum(rows.values()), self.hidden)
            if self.bias:
                self.noise(prefix + "attn_qkv.bias", sum(rows.values()))
        else:
            for part, count in rows.items():
                self.matrix(f"{prefix}attn_{part}.weight", count, self.hidden)
                if self.bias:
                    self.noise(f"{prefix}attn_{part}.bias", count)
        if self.architecture in ("qwen3", "qwen3moe", "gemma3", "glm4moe") and self.qk_norm:
            self.norm(prefix + "attn_q_norm.weight", self.head_dim)
            self.norm(prefix + "attn_k_norm.weight", self.head_dim)
        if self.architecture == "olmoe":
            self.norm(prefix + "attn_q_norm.weight", rows["q"])
            self.norm(prefix + "attn_k_norm.weight", rows["k"])
        self.matrix(prefix + "attn_output.weight", self.hidden, self.heads * self.head_dim)
        if self.architecture == "gpt-oss":
            self.noise(prefix + "attn_output.bias", self.hidden)
            self.noise(prefix + "attn_sinks.weight", self.heads, std=2.0)

    def _experts(self, prefix: str, experts: Experts) -> None:
        count, ffn, hidden = experts.count, experts.ffn, self.hidden
        self.noise(prefix + "ffn_gate_inp.weight", count, hidden, std=hidden**-0.5)
        if experts.apart:
            for expert in range(count):
                for part, n, k in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
                    self.matrix(f"{prefix}ffn_{part}.{expert}.weight", n, k)
        else:
            if experts.together:
                self.matrix(prefix + "ffn_gate_up_exps.weight", 2 * ffn, hidden, count=count)
            else:
                self.matrix(prefix + "ffn_gate_exps.weight", ffn, hidden, count=count)
                self.matrix(prefix + "ffn_up_exps.weight", ffn, hidden, count=count)
            self.matrix(prefix + "ffn_down_exps.weight", hidden, ffn, count=count)
        if self.architecture == "gpt-oss":
            self.noise(prefix + "ffn_gate_inp.bias", count)
            self.noise(prefix + "ffn_gate_exps.bias", count, ffn)
            self.noise(prefix + "ffn_up_exps.bias", count, ffn)
            self.noise(prefix + "ffn_down_exps.bias", count, hidden)
        if self.architecture == "glm4moe":
            self.noise(prefix + "exp_probs_b.bias", count, std=0.1)
        if self.architecture in ("qwen2moe", "glm4moe"):
            self.matrix(prefix + "ffn_gate_shexp.weight", experts.shared, hidden)
            self.matrix(prefix + "ffn_up_shexp.weight", experts.shared, hidden)
            self.matrix(prefix + "ffn_down_shexp.weight", hidden, experts.shared)
        if self.architecture == "qwen2moe":
            self.noise(prefix + "ffn_gate_inp_shexp.weight", hidden, std=hidden**-0.5)


def _write_file(path: Path, architecture: str, values: dict[str, Any], tensors: Tensors, tensors_a_part: int) -> None:
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
