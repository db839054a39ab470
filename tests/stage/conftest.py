"""Tiny models of every family and block type, written with the gguf package, and a float64 reference that reads them
with the gguf package: neither uses any code of the room under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan, StepResult
from shardline.stage import Stage, StageSpec, open_checkpoint

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)


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
    else:
        assert kind == Kind.Q6_K, kind
        put(208, std / (18.5 * 74))
    return blocks.reshape(n, -1)


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
        tied: bool = True,
        bias: bool | None = None,
        rope_factors: bool = False,
        keys: dict[str, Any] | None = None,
        edit: Callable[[dict[str, tuple[np.ndarray, Kind]]], None] | None = None,
        seed: int = 0,
    ) -> Path:
        """`kinds` go round over the layers' matrices; `keys` are set (None: left out); `edit` changes the tensors."""
        rng = np.random.default_rng(seed)
        bias = architecture == "qwen2" if bias is None else bias
        tensors: dict[str, tuple[np.ndarray, Kind]] = {}
        turn = 0

        def matrix(name: str, n: int, k: int, kind: Kind | None = None) -> None:
            nonlocal turn
            if kind is None:
                kind = kinds[turn % len(kinds)]
                turn += 1
            tensors[name] = (random_blocks(rng, kind, n, k, k**-0.5), kind)

        def vector(name: str, values: np.ndarray) -> None:
            tensors[name] = (values.astype(np.float32), Kind.F32)

        matrix("token_embd.weight", vocab, hidden, embed)
        for layer in range(layers):
            prefix = f"blk.{layer}."
            vector(prefix + "attn_norm.weight", rng.uniform(0.5, 1.5, hidden))
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                matrix(f"{prefix}attn_{part}.weight", count * head_dim, hidden)
                if bias:
                    vector(f"{prefix}attn_{part}.bias", rng.normal(0, 0.5, count * head_dim))
            if architecture == "qwen3":
                vector(prefix + "attn_q_norm.weight", rng.uniform(0.5, 1.5, head_dim))
                vector(prefix + "attn_k_norm.weight", rng.uniform(0.5, 1.5, head_dim))
            matrix(prefix + "attn_output.weight", hidden, heads * head_dim)
            vector(prefix + "ffn_norm.weight", rng.uniform(0.5, 1.5, hidden))
            matrix(prefix + "ffn_gate.weight", ffn, hidden)
            matrix(prefix + "ffn_up.weight", ffn, hidden)
            matrix(prefix + "ffn_down.weight", hidden, ffn)
        vector("output_norm.weight", rng.uniform(0.5, 1.5, hidden))
        if not tied:
            matrix("output.weight", vocab, hidden)
        if rope_factors:
            vector("rope_freqs.weight", rng.uniform(1, 8, (rotary_dim or head_dim) // 2))
        if edit:
            edit(tensors)

        metadata: dict[str, Any] = {
            "block_count": layers,
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
        values = {f"{architecture}.{key}": value for key, value in metadata.items()} | (keys or {})
        self._count += 1
        path = self._folder / f"{architecture}-{self._count}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
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
        return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Makes tiny models."""
    return TinyModels(tmp_path_factory.mktemp("tiny"))


class Reference:
    """A decoder in float64 over a GGUF file, written from the families' definitions. One sequence, no cache."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._keys = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = self._keys["general.architecture"]
        self._tensors = {tensor.name: self._weights(tensor) for tensor in reader.tensors}

    @staticmethod
    def _weights(tensor: gguf.ReaderTensor) -> np.ndarray:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type in FLOATS and values.ndim == 2:
            # The reader's documented rounding of float matrices.
            values = gguf.dequantize(gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)
        return values.astype(np.float64)

    def _key(self, name: str, default: Any = None) -> Any:
        return self._keys.get(f"{self._architecture}.{name}", default)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self._key("attention.layer_norm_rms_epsilon")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self._tensors[name]

    def _turn(self, x: np.ndarray) -> np.ndarray:
        """x [tokens, heads, head_dim]."""
        size = self._key("rope.dimension_count", x.shape[-1])
        frequencies = self._key("rope.freq_base") ** (-2 * np.arange(size // 2) / size)
        if "rope_freqs.weight" in self._tensors:
            frequencies = frequencies / self._tensors["rope_freqs.weight"]
        frequencies = frequencies / self._key("rope.scaling.factor", 1.0)
        turn = np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None, :]
        out = x.copy()
        if self._architecture == "llama":
            first, second = slice(0, size, 2), slice(1, size, 2)
        else:
            first, second = slice(0, size // 2), slice(size // 2, size)
        turned = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float64 [tokens, vocab]."""
        tensors, heads, kv_heads = (
            self._tensors,
            self._key("attention.head_count"),
            self._key("attention.head_count_kv"),
        )
        head_dim = self._key("attention.key_length")
        count = len(token_ids)
        causal = np.where(np.tri(count, dtype=bool), 0.0, -np.inf)
        x = tensors["token_embd.weight"][list(token_ids)]
        for layer in range(self._key("block_count")):
            prefix = f"blk.{layer}."
            normed = self._norm(x, prefix + "attn_norm.weight")
            parts = []
            for part in "qkv":
                value = normed @ tensors[f"{prefix}attn_{part}.weight"].T + tensors.get(
                    f"{prefix}attn_{part}.bias", 0.0
                )
                parts.append(value.reshape(count, -1, head_dim))
            q, k, v = parts
            if self._architecture == "qwen3":
                q, k = self._norm(q, prefix + "attn_q_norm.weight"), self._norm(k, prefix + "attn_k_norm.weight")
            q, k = self._turn(q), self._turn(k)
            k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim) + causal
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            attended = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
            x = x + attended @ tensors[prefix + "attn_output.weight"].T
            normed = self._norm(x, prefix + "ffn_norm.weight")
            gate = normed @ tensors[prefix + "ffn_gate.weight"].T
            x = (
                x
                + (gate / (1 + np.exp(-gate)) * (normed @ tensors[prefix + "ffn_up.weight"].T))
                @ tensors[prefix + "ffn_down.weight"].T
            )
        return self._norm(x, "output_norm.weight") @ tensors.get("output.weight", tensors["token_embd.weight"]).T


@pytest.fixture(scope="session")
def reference() -> type[Reference]:
    """The float64 reference's class."""
    return Reference


class Row:
    """Stages in a row, and the plans of a test, whose block ids are taken in ascending order."""

    def __init__(self, path: Path, cuts: Sequence[int] = (), **changes: Any) -> None:
        """Cut before the layers `cuts`; a cut before 0 or behind the last layer leaves a stage without layers."""
        checkpoint = open_checkpoint(path)
        self.model = checkpoint.spec
        bounds = [0, *cuts, self.model.num_layers]
        base = StageSpec(
            index=0,
            first_layer=0,
            end_layer=0,
            has_embed=False,
            has_head=False,
            num_blocks=64,
            block_size=16,
            kv_dtype="float32",
            max_step_tokens=128,
            max_sequences=8,
            max_context=self.model.context_length,
            num_threads=2,
        )
        base = replace(base, **changes)
        self.specs = [
            replace(
                base,
                index=index,
                first_layer=bounds[index],
                end_layer=bounds[index + 1],
                has_embed=index == 0,
                has_head=index == len(cuts),
            )
            for index in range(len(cuts) + 1)
        ]
        self.stages = [Stage(spec, checkpoint, cpu_backend(spec.num_threads)) for spec in self.specs]
        checkpoint.close()
        self._block_size = base.block_size
        self._next_step = 0
        self._next_block = 0
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self.forget: list[int] = []

    def plan(
        self,
        tokens: dict[int, Sequence[int]],
        *,
        samples: bool = False,
        params: SamplingParams | None = None,
        prompt: Sequence[int] = (),
    ) -> StepPlan:
        """Run these tokens of these sequences next; unknown ones are started."""
        starts, runs = [], []
        for seq_id, token_ids in tokens.items():
            if seq_id not in self._lengths:
                self._lengths[seq_id], self._tables[seq_id] = 0, []
                asked = params or SamplingParams(seed=seq_id)
                known = tuple(prompt or token_ids)
                starts.append(SequenceStart(seq_id, asked, len(known), known, ()))
            position = self._lengths[seq_id]
            table = self._tables[seq_id]
            needed = -(-(position + len(token_ids)) // self._block_size) - len(table)
            new = tuple(range(self._next_block, self._next_block + needed))
            self._next_block += needed
            table.extend(new)
            self._lengths[seq_id] = position + len(token_ids)
            runs.append(SequenceRun(seq_id, position, tuple(token_ids), new, samples))
        self._next_step += 1
        forget, self.forget = tuple(self.forget), []
        return StepPlan(self._next_step - 1, forget, tuple(starts), tuple(runs))

    def logits(self, plan: StepPlan) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits of every row, and the hidden states that went from stage to stage."""
        hidden, passed = None, []
        for stage in self.stages[:-1]:
            hidden = stage.run(plan, hidden).hidden
            assert hidden is not None
            passed.append(hidden)
        return self.stages[-1].logits(plan, hidden), passed

    def run(self, plan: StepPlan) -> StepResult:
        """What the last stage made of a plan."""
        hidden = None
        for stage in self.stages:
            output = stage.run(plan, hidden)
            hidden = output.hidden
        assert output.result is not None
        return output.result

    def close(self) -> None:
        """Give back every stage's memory and threads."""
        for stage in self.stages:
            stage.close()


@pytest.fixture
def stage_row() -> Iterator[Callable[..., Row]]:
    """Makes rows of stages, closed at the test's end."""
    rows: list[Row] = []

    def make(path: Path, cuts: Sequence[int] = (), **changes: Any) -> Row:
        rows.append(Row(path, cuts, **changes))
        return rows[-1]

    yield make
    for row in rows:
        row.close()
