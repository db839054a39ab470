"""The CUDA backend: `Backend` on one NVIDIA GPU with our own kernels."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cupy
import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Backend, KVCache, KVLayout, RopeTable, Rows, Weight
from shardline.kernels.cuda import tables, weights
from shardline.kernels.cuda.device import OLDEST_ARCH
from shardline.kernels.cuda.modules import Launcher, Modules
from shardline.kernels.cuda.pack import pad_to
from shardline.kernels.errors import UnsupportedOperationError
from shardline.kernels.experts import Activation, Expert, RouterRule
from shardline.kernels.matrix import GroupedMatrix
from shardline.kernels.sampling import SampleOutput, SamplingBatch

LOG2_E = 1.4426950408889634
SAMPLING_INPUTS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "seed",
    "position",
    "logprobs",
    "bias_offsets",
    "bias_ids",
    "bias_values",
    "history_offsets",
    "history_ids",
    "history_counts",
)
"""Arrays of `SamplingBatch`, in the order of sample.cu's arguments."""

MAX_GRAPHS = 64
"""Recorded steps that a backend keeps; the longest unused is forgotten."""

_int = np.int32
_float = np.float32


@dataclass(frozen=True, slots=True)
class Activations:
    """Rows that a matrix product reads: as float32 where an op writes them so, and as the tiles of linear.cu.

    rms_norm and most attention write the tiles at once; of what gated_linear writes they are made right after, with the
    rows' largest magnitudes that it found (`largest`; `done` counts blocks; both are zero between ops).
    """

    values: Any
    fragments: Any
    scales: Any
    sums: Any
    largest: Any
    done: Any
    blocks: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, channels)."""
        rows, channels = self.values.shape
        return int(rows), int(channels)


@dataclass(frozen=True, slots=True)
class CudaKVCache:
    """A pool: half-precision keys and values [layers, blocks, Hkv, block size, D]."""

    layout: KVLayout
    keys: Any
    values: Any


class CudaBackend(Backend):
    """See `Backend`. Arrays are CuPy's; one device, one stream, one thread."""

    name: ClassVar[str] = "cuda"

    def __init__(self, device: int, cubin_cache: Path | None) -> None:
        self._device = cupy.cuda.Device(device)
        self._device.use()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.arch = int(self._device.compute_capability)
        assert self.arch >= OLDEST_ARCH, f"sm_{self.arch}: cuda_device refuses it"
        self._processors = int(self._device.attributes["MultiProcessorCount"])
        self._modules = Modules(self.arch, cubin_cache)
        self._launcher = Launcher(self.arch)
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._capturing = False
        self._resident_bytes = 0
        with self._stream:
            self._tiles = cupy.zeros((0, 2), cupy.int32)
            self._partial = cupy.zeros(0, cupy.float32)
            self._slice_sums = cupy.zeros(0, cupy.float32)
            self._arrived = cupy.zeros(1 << 14, cupy.uint32)
            self._work = cupy.zeros(0, cupy.float32)
            self._sampling = cupy.zeros(1 << 12, cupy.uint8)
            self._sampled = cupy.zeros(1 << 10, cupy.int32)
        self._closed = False

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return cupy.empty(shape, dtype)

    def activations(self, rows: int, channels: int) -> Array:
        blocks = weights.blocks_of(channels)
        tokens = pad_to(rows, tables.PADDED_TOKENS)
        with self._stream:
            return Activations(
                cupy.empty((rows, channels), cupy.float32),
                cupy.zeros((tokens // 8, blocks, 2, 32, 4), cupy.uint32),
                cupy.ones(tokens, cupy.float32),
                cupy.zeros((tokens // 8, blocks, 2, 8), cupy.float32),
                cupy.zeros(tokens, cupy.uint32),
                cupy.zeros(tokens, cupy.uint32),
                blocks,
            )

    def upload(self, host: NDArray[Any]) -> Array:
        with self._stream:
            return cupy.asarray(host)

    def write(self, target: Array, host: NDArray[Any]) -> None:
        assert not self._capturing, "write inside replay: what changes from step to step is written outside"
        if isinstance(target, Activations):
            self.write(target.values, host)
            self._make_fragments(target, len(host))
            return
        fits = target.dtype == host.dtype and target.shape[1:] == host.shape[1:] and len(host) <= len(target)
        assert fits, f"{host.dtype} {host.shape} does not fit into {target.dtype} {target.shape}"
        # From pageable memory the copy has read all of `host` when this returns.
        source = np.ascontiguousarray(host)
        target[: len(source)].set(source, stream=self._stream)

    def read(self, source: Array) -> NDArray[Any]:
        if isinstance(source, Activations):
            return self._values_of(source)
        assert source.flags.c_contiguous, "read wants a contiguous array"
        host: NDArray[Any] = source.get(stream=self._stream, blocking=True)
        return host

    def load_matrix(self, parts: Sequence[GroupedMatrix]) -> Weight:
        with self._stream:
            return self._keep(weights.load(parts))

    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        with self._stream:
            return self._keep(weights.load_gated(gate, up))

    def allocate_kv(self, layout: KVLayout) -> KVCache:
        assert layout.dtype == "float16", f"a CUDA pool is float16, not {layout.dtype}"
        shape = (layout.num_layers, layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
        with self._stream:
            cache = CudaKVCache(layout, cupy.zeros(shape, cupy.uint16), cupy.zeros(shape, cupy.uint16))
        self._resident_bytes += cache.keys.nbytes + cache.values.nbytes
        return cache

    def resident_bytes(self) -> int:
        return self._resident_bytes

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stream.synchronize()
        self._graphs.clear()

    # -- running -----------------------------------------------------------------------------------------------------

    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.launch(self._stream)
            return
        if key not in self._seen:
            # The first time everything is compiled, loaded and allocated, which a capture does not allow.
            self._seen.add(key)
            issue()
            return
        self._capturing = True
        try:
            self._stream.begin_capture()
            try:
                issue()
            finally:
                graph = self._stream.end_capture()
        finally:
            self._capturing = False
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        graph.launch(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    # -- ops ---------------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, cache: KVCache, query_heads: int) -> None:
        most = 16 // (query_heads // cache.layout.num_kv_heads)
        tiles = self._tile_buffer(rows.positions.shape[0])
        self._launch(
            ("attention", "query_tiles"),
            (1,),
            1024,
            (rows.positions, rows.sequences, tiles, _int(rows.count), _int(most), _int(rows.count)),
            HEAD_DIM=cache.layout.head_dim,
        )

    def embedding(self, token_ids: Array, weight: Weight, out: Array, rows: int, *, scale: float = 1.0) -> None:
        if scale != 1.0:
            raise UnsupportedOperationError("scaled embeddings", self.name)
        checks.embedding(token_ids, weight.channels, weight.inputs, out, rows)
        (part,) = weight.parts
        arguments = (token_ids, part.integers, part.scale, part.minimum, out, _int(weight.inputs), _int(part.blocks))
        self._launch(("rows", "embedding"), (rows,), 256, arguments, **part.defines)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        size = weight.shape[0]
        arguments = (x, weight, _float(eps), out.fragments, out.scales, out.sums, _int(size), _int(out.blocks))
        threads = tables.row_threads(size)
        self._launch(
            ("activation", "rms_norm_rows"), (rows,), threads, arguments, shared=out.blocks * 256, THREADS=threads
        )

    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        assert not weight.gated, "linear wants a weight of load_matrix"
        checks.table("out", out, rows, weight.channels)
        self._multiply(x, weight, out, rows, bias, accumulate)

    def gated_linear(
        self,
        x: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        activation: Activation = "silu",
        bias: Array | None = None,
    ) -> None:
        if activation != "silu" or bias is not None:
            raise UnsupportedOperationError(f"an MLP with {activation} or biases", self.name)
        assert weight.gated, "gated_linear wants a weight of load_gated"
        self._multiply(x, weight, out.values, rows, None, False, out.largest)
        self._launch(
            ("activation", "prepare_gated"),
            (rows, -(-out.blocks * 16 // 256)),
            256,
            (
                out.values,
                out.fragments,
                out.scales,
                out.sums,
                out.largest,
                out.done,
                _int(out.shape[1]),
                _int(out.blocks),
            ),
            THREADS=256,
        )

    def rope_kv_write(
        self,
        qkv: Array,
        rows: Rows,
        rope: RopeTable | None,
        cache: KVCache,
        layer: int,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None:
        if rope is None:
            raise UnsupportedOperationError("layers without rotation", self.name)
        layout = cache.layout
        query_heads = checks.heads(qkv, rows, layout, layer)
        norm = q_norm if q_norm is not None else rope.cos  # never read without norms
        self._launch(
            ("rope_kv_write", "rope_kv_write"),
            (rows.count, query_heads + 2 * layout.num_kv_heads),
            32,
            (
                qkv,
                rows.positions,
                rows.slots,
                rope.cos,
                rope.sin,
                cache.keys[layer],
                cache.values[layer],
                norm,
                norm if k_norm is None else k_norm,
                _float(eps),
                _int(query_heads),
                _int(layout.num_kv_heads),
                _int(2 * rope.cos.shape[1]),
                _int(_shift(layout)),
            ),
            HEAD_DIM=layout.head_dim,
            INTERLEAVED=int(rope.interleaved),
            NORMS=int(q_norm is not None),
        )

    def paged_attention(
        self,
        qkv: Array,
        rows: Rows,
        cache: KVCache,
        layer: int,
        scale: float,
        out: Array,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
    ) -> None:
        if window or softcap or sinks is not None:
            raise UnsupportedOperationError("sliding windows, soft caps or attention sinks", self.name)
        layout = cache.layout
        group = checks.heads(qkv, rows, layout, layer) // layout.num_kv_heads
        assert group <= 16, f"{group} query heads share a KV head; at most 16 may"
        max_splits = -(-rows.block_tables.shape[1] * layout.block_size // tables.ATTENTION_SPLIT)
        # Both ways give the same bits; splits over blocks where rows alone would not fill the device.
        whole = rows.count * layout.num_kv_heads >= 4 * self._processors * (16 // group)
        partial = self._partial
        if not whole:
            need = rows.count * layout.num_kv_heads * group * max_splits * (layout.head_dim + 2)
            partial = self._partial = self._grown(partial, need)
        head_dim = layout.head_dim
        width = min(max_splits, max(1, -(-4 * self._processors // (rows.count * layout.num_kv_heads))))
        self._launch(
            ("attention", "attend_rows" if whole else "attend_splits"),
            (1 if whole else width, layout.num_kv_heads, rows.count),
            128,
            (
                qkv,
                cache.keys[layer],
                cache.values[layer],
                self._tiles,
                rows.positions,
                rows.sequences,
                rows.block_tables,
                partial,
                self._arrived,
                out.values,
                out.fragments,
                out.sums,
                _int(out.blocks),
                _int(rows.block_tables.shape[1]),
                _int(_shift(layout)),
                _int(group),
                _int(layout.num_kv_heads),
                _int(max_splits),
                _float(scale * LOG2_E),
            ),
            shared=tables.attention_shared_bytes(head_dim),
            HEAD_DIM=head_dim,
        )
        if head_dim % 32:
            self._make_fragments(out, rows.count, unit=True)

    def load_experts(
        self,
        experts: Iterable[Expert],
        *,
        activation: Activation = "silu",
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Weight:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def add_rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        raise UnsupportedOperationError("a norm after a sublayer", self.name)

    def route(
        self,
        x: Array,
        router: Array,
        rule: RouterRule,
        expert_ids: Array,
        shares: Array,
        rows: int,
        *,
        bias: Array | None = None,
        choice_bias: Array | None = None,
    ) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def expert_mlp(self, x: Array, experts: Weight, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def add_gated(self, x: Array, gate: Array, y: Array, out: Array, rows: int) -> None:
        raise UnsupportedOperationError("a mixture of experts", self.name)

    def soft_cap(self, x: Array, cap: float, rows: int) -> None:
        raise UnsupportedOperationError("a soft cap", self.name)

    def gather_rows(self, x: Array, indices: Array, out: Array, count: int) -> None:
        checks.gather_rows(x, indices, out, count)
        self._launch(
            ("rows", "gather_rows"),
            (count,),
            256,
            (x, indices, out, _int(x.shape[1])),
            BITS=4,
            GROUP=32,
            HAS_MIN=0,
            SCALE_F32=0,
        )

    def sample(self, logits: Array, batch: SamplingBatch) -> SampleOutput:
        checks.sample(logits, batch)
        rows, vocab = batch.rows, logits.shape[1]
        width = max(int(batch.logprobs.max(initial=0)), 0)
        adjusts = batch.bias_offsets[-1] > 0 or batch.history_offsets[-1] > 0
        if adjusts and self._work.size < rows * vocab:
            self._work = cupy.empty(rows * vocab, cupy.float32)
        # One copy to the device and one back: each costs more than a small step's work.
        inputs = [np.ascontiguousarray(getattr(batch, name)) for name in SAMPLING_INPUTS]
        starts = list(itertools.accumulate((pad_to(array.nbytes, 8) for array in inputs), initial=0))
        packed = np.zeros(starts[-1], np.uint8)
        for array, start in zip(inputs, starts, strict=False):
            packed[start : start + array.nbytes] = array.view(np.uint8)
        sizes = (rows, rows, rows * width, rows * width)
        places = list(itertools.accumulate(sizes, initial=0))
        if self._sampling.nbytes < len(packed):
            self._sampling = cupy.empty(2 * len(packed), cupy.uint8)
        if self._sampled.size < places[-1]:
            self._sampled = cupy.empty(2 * places[-1], cupy.int32)
        sampled = self._sampled[: places[-1]]
        self.write(self._sampling, packed)
        given = (np.uint64(self._sampling.data.ptr + start) for start in starts[:-1])
        taken = (np.uint64(sampled.data.ptr + 4 * place) for place in places[:-1])
        arguments = (logits, self._work, _int(vocab), *given, *taken, _int(width))
        self._launch(("sample", "sample"), (rows,), 1024, arguments)
        token_ids, logprobs, top_ids, top_logprobs = np.split(self.read(sampled), places[1:-1])
        return SampleOutput(
            token_ids,
            logprobs.view(np.float32),
            top_ids.reshape(rows, width),
            top_logprobs.view(np.float32).reshape(rows, width),
        )

    # -- launches ----------------------------------------------------------------------------------------------------

    def _launch(
        self,
        kernel: tuple[str, str],
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        *,
        shared: int = 0,
        **defines: int,
    ) -> None:
        function = self._modules.function(kernel[0], kernel[1], shared, defines)
        self._launcher(function, grid, threads, arguments, shared, self._stream)

    def _multiply(
        self,
        x: Activations,
        weight: weights.CudaWeight,
        out: Array,
        rows: int,
        bias: Array | None,
        accumulate: bool,
        largest: Array | None = None,
    ) -> None:
        assert x.blocks == weight.blocks, f"x has {x.shape[1]} channels, the weight takes {weight.inputs}"
        num_slices = tables.slices(weight.blocks)
        for part in weight.parts:
            launch = tables.linear_launch(
                rows,
                part.tiles * weights.TILE,
                part.blocks,
                part.bits,
                part.group_size,
                self.arch,
                self._processors,
                gated=weight.gated,
            )
            self._slice_sums = self._grown(self._slice_sums, num_slices * launch.partial_floats)
            arguments = (
                part.integers,
                part.scale,
                part.minimum,
                x.fragments,
                x.sums,
                x.scales,
                np.uint64(0 if bias is None else bias.data.ptr + 4 * part.first),
                np.uint64(out.data.ptr + 4 * part.first),
                _int(rows),
                _int(part.channels),
                _int(out.shape[1]),
                _int(part.tiles),
                _int(part.blocks),
                _int(accumulate),
                self._slice_sums,
                self._arrived,
                _int(num_slices),
                np.uint64(0 if largest is None else largest.data.ptr),
            )
            name = ("gated_" if weight.gated else "") + launch.variant.name
            shared = launch.variant.shared_bytes(part.bits)
            self._launch(
                ("linear", name), launch.grid, launch.variant.threads, arguments, shared=shared, **part.defines
            )

    def _make_fragments(self, x: Activations, rows: int, *, unit: bool = False) -> None:
        channels = x.shape[1]
        arguments = (x.values, x.fragments, x.scales, x.sums, _int(channels), _int(x.blocks), _int(unit))
        threads = tables.row_threads(channels)
        self._launch(
            ("activation", "prepare_rows"), (rows,), threads, arguments, shared=x.blocks * 256, THREADS=threads
        )

    def _values_of(self, x: Activations) -> NDArray[np.float32]:
        """What the fragments hold, float32 [rows, channels]: what a product sees."""
        words: NDArray[np.uint32] = x.fragments.get(stream=self._stream, blocking=True)
        scales: NDArray[np.float32] = x.scales.get(stream=self._stream, blocking=True)
        tiles, blocks = words.shape[:2]
        # tile, block, eight channels, token, channel
        halves = words.view(np.float16).reshape(tiles, blocks, 8, 8, 8)
        rows = halves.transpose(0, 3, 1, 2, 4).reshape(tiles * 8, blocks * tables.BLOCK_K)
        values = rows.astype(np.float32) * scales[:, None]
        return np.ascontiguousarray(values[: x.shape[0], : x.shape[1]])

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _keep(self, weight: weights.CudaWeight) -> weights.CudaWeight:
        self._resident_bytes += weight.nbytes
        return weight

    def _grown(self, buffer: Any, size: int) -> Any:
        if buffer.size >= size:
            return buffer
        assert not self._capturing, "a buffer grows while a step is recorded"
        # A recorded step may still name the old buffer: it goes with the graphs.
        self._stream.synchronize()
        self._graphs.clear()
        return cupy.empty(size, cupy.float32)

    def _tile_buffer(self, rows: int) -> Any:
        if len(self._tiles) < rows:
            assert not self._capturing, "a buffer grows while a step is recorded"
            self._graphs.clear()
            self._tiles = cupy.zeros((rows, 2), cupy.int32)
        return self._tiles


def _shift(layout: KVLayout) -> int:
    return layout.block_size.bit_length() - 1
