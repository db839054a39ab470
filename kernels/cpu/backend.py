"""The CPU backend: ops become records of a command list, which a team of threads runs when a result is wanted.

Calling compiled code once an op would cost more than most ops of a decode step take. So an op only checks its arguments
and appends a record (addresses and sizes) to the list, as to a CUDA stream; `read`, `synchronize` and `sample` run it.
`replay` keeps a list under a key, as a CUDA graph, and enqueues it again without calling the ops.
"""

from __future__ import annotations

import platform
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Backend, KVCache, KVLayout, RopeTable, Rows, Weight
from shardline.kernels.cpu import linear, operations, rope, sample
from shardline.kernels.cpu.attention import attention_scratch_bytes
from shardline.kernels.cpu.executor import RECORD_WORDS, Team
from shardline.kernels.cpu.jit import Operation, target_features
from shardline.kernels.cpu.resident import GatedMatrix, Matrix, aligned_empty, aligned_zeros, pack
from shardline.kernels.errors import UnsupportedOperationError, UnsupportedProcessorError
from shardline.kernels.experts import Activation, Expert, RouterRule
from shardline.kernels.matrix import GroupedMatrix
from shardline.kernels.sampling import SampleOutput, SamplingBatch

MAX_PROGRAMS = 128
"""Recorded programs that a backend keeps; the longest unused is forgotten."""

SHARES_A_THREAD = 2
"""Of an op with enough work: more even out threads that run at different speeds, fewer cost less to hand out."""

SHARE_WORK = 100_000
"""Multiply-adds that are worth a share of their own: some microseconds."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CpuKVCache:
    """A pool: keys and values, one array a layer; `rope.kv_shapes` says how they lie."""

    layout: KVLayout
    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CpuWeight:
    """A resident matrix (or a gate and an up matrix) and what the compiled code knows of it."""

    matrix: Matrix | GatedMatrix
    parts: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes resident."""
        return self.matrix.nbytes

    @property
    def channels(self) -> int:
        """N."""
        return self.matrix.gate.channels if isinstance(self.matrix, GatedMatrix) else self.matrix.channels

    @property
    def inputs(self) -> int:
        """K."""
        return self.matrix.gate.inputs if isinstance(self.matrix, GatedMatrix) else self.matrix.inputs


@dataclass(frozen=True, slots=True)
class _Program:
    records: NDArray[np.int64]
    arrays: tuple[Any, ...]
    """What the records point to."""


class CpuBackend(Backend):
    """See `Backend`. Arrays are NumPy's, on this machine's memory."""

    name: ClassVar[str] = "cpu"

    def __init__(self, num_threads: int) -> None:
        """Start the threads. Raises UnsupportedProcessorError, and ValueError if num_threads is not positive."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; the CPU backend needs at least one")
        check_processor(platform.machine(), target_features())
        self.num_threads = num_threads
        self._team = Team(num_threads)
        self._records: list[tuple[int, ...]] = []
        self._arrays: list[Any] = []
        self._queue: list[_Program] = []
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()
        self._recording = False
        self._workspace = aligned_empty((num_threads, linear.WORKSPACE_BYTES), "uint8")
        self._attention_scratch = aligned_empty((num_threads, 0), "uint8")
        self._sample_scratch = aligned_empty((num_threads, 0), "uint8")
        self._held: weakref.WeakSet[CpuWeight | CpuKVCache] = weakref.WeakSet()
        self._closed = False

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return aligned_empty(shape, dtype)

    def activations(self, rows: int, channels: int) -> Array:
        return self.empty((rows, channels), "float32")

    def upload(self, host: NDArray[Any]) -> Array:
        array = aligned_empty(host.shape, host.dtype)
        array[...] = host
        return array

    def write(self, target: Array, host: NDArray[Any]) -> None:
        assert not self._recording, "write inside replay: what changes from step to step is written outside"
        fits = target.dtype == host.dtype and target.shape[1:] == host.shape[1:] and len(host) <= len(target)
        assert fits, f"{host.dtype} {host.shape} does not fit into {target.dtype} {target.shape}"
        # What is enqueued may still read the target.
        self.synchronize()
        target[: len(host)] = host

    def read(self, source: Array) -> NDArray[Any]:
        self.synchronize()
        return np.array(source)

    def load_matrix(self, parts: Sequence[GroupedMatrix]) -> Weight:
        matrix = pack(parts)
        return self._keep(matrix, linear.describe(matrix))

    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        assert gate.shape == up.shape, f"gate is {gate.shape}, up is {up.shape}"
        pair = GatedMatrix(pack([gate]), pack([up]))
        return self._keep(pair, np.concatenate([linear.describe(pair.gate), linear.describe(pair.up)]))

    def allocate_kv(self, layout: KVLayout) -> KVCache:
        key_shape, value_shape = rope.kv_shapes(layout)
        dtype = rope.kv_dtype(layout)
        cache = CpuKVCache(
            layout,
            aligned_zeros((layout.num_layers, *key_shape), dtype),
            aligned_zeros((layout.num_layers, *value_shape), dtype),
        )
        self._held.add(cache)
        scratch = -(-attention_scratch_bytes(layout.head_dim) // 64) * 64
        if scratch > self._attention_scratch.shape[1]:
            self._attention_scratch = aligned_empty((self.num_threads, scratch), "uint8")
        return cache

    def resident_bytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._team.close()
        self._records.clear()
        self._arrays.clear()
        self._queue.clear()
        self._programs.clear()

    # -- running -----------------------------------------------------------------------------------------------------

    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        assert not self._recording, "replay inside replay"
        program = self._programs.get(key)
        if program is None:
            self._seal()
            self._recording = True
            try:
                issue()
            except BaseException:
                self._records.clear()
                self._arrays.clear()
                raise
            finally:
                self._recording = False
            if not self._records:
                return
            program = self._seal()
            self._programs[key] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
            return
        self._programs.move_to_end(key)
        self._seal()
        self._queue.append(program)

    def synchronize(self) -> None:
        assert not self._recording, "a wait inside replay"
        assert not self._closed, "the backend is closed"
        self._seal()
        queue, self._queue = self._queue, []
        for program in queue:
            self._team.run(program.records)

    # -- ops ---------------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, cache: KVCache, query_heads: int) -> None:
        pass  # the attention of this backend shares nothing between layers

    def embedding(self, token_ids: Array, weight: Weight, out: Array, rows: int, *, scale: float = 1.0) -> None:
        if scale != 1.0:
            raise UnsupportedOperationError("scaled embeddings", self.name)
        checks.embedding(token_ids, weight.channels, weight.inputs, out, rows)
        self._enqueue(
            linear.embedding,
            self._shares(rows, 32 * weight.inputs),
            (_address(weight.parts), len(weight.parts), _address(token_ids), _address(out), weight.inputs, rows),
            (weight, token_ids, out),
        )

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        checks.rms_norm(x, weight, out, rows)
        self._enqueue(
            operations.rms_norm_operation,
            self._shares(rows, 8 * x.shape[1]),
            (_address(x), _address(weight), _float_bits(eps), _address(out), x.shape[1], rows),
            (x, weight, out),
        )

    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        checks.linear(x, weight.channels, weight.inputs, out, rows, bias)
        assert isinstance(weight.matrix, Matrix), "linear wants a weight of load_matrix"
        for part in weight.parts:
            self._enqueue(
                linear.linear,
                self._shares(linear.tasks(weight.channels, rows), linear.task_work(weight.inputs, rows)),
                (
                    _address(part),
                    _address(x),
                    weight.inputs,
                    _address(out),
                    weight.channels,
                    rows,
                    0 if bias is None else _address(bias),
                    accumulate,
                    _address(self._workspace),
                ),
                (x, weight, out, bias, self._workspace),
            )

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
        checks.linear(x, weight.channels, weight.inputs, out, rows, None)
        assert isinstance(weight.matrix, GatedMatrix), "gated_linear wants a weight of load_gated"
        gate, up = weight.parts
        self._enqueue(
            linear.gated_linear,
            self._shares(linear.tasks(weight.channels, rows), 2 * linear.task_work(weight.inputs, rows)),
            (
                _address(gate),
                _address(up),
                _address(x),
                weight.inputs,
                _address(out),
                weight.channels,
                rows,
                _address(self._workspace),
            ),
            (x, weight, out, self._workspace),
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
        checks.rope_kv_write(qkv, rows, rope, cache.layout, layer, q_norm, k_norm)
        half = cache.layout.dtype == "float16"
        self._enqueue(
            operations.rope_kv_write_float16 if half else operations.rope_kv_write_float32,
            self._shares(rows.count, 16 * qkv.shape[1]),
            (
                _address(qkv),
                qkv.shape[1],
                rows.count,
                _address(rows.positions),
                _address(rows.slots),
                _address(rope.cos),
                _address(rope.sin),
                *rope.cos.shape,
                rope.interleaved,
                *_pool_words(cache, layer),
                0 if q_norm is None else _address(q_norm),
                0 if k_norm is None else _address(k_norm),
                0 if q_norm is None else cache.layout.head_dim,
                _float_bits(eps),
            ),
            (qkv, rows, rope, cache, q_norm, k_norm),
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
        checks.paged_attention(qkv, rows, cache.layout, layer, out)
        half = cache.layout.dtype == "float16"
        self._enqueue(
            operations.paged_attention_float16 if half else operations.paged_attention_float32,
            # How long the sequences are is not known here, and may differ each time that the record runs.
            self._shares(rows.count * (out.shape[1] // cache.layout.head_dim), SHARE_WORK),
            (
                _address(qkv),
                qkv.shape[1],
                rows.count,
                _address(rows.positions),
                _address(rows.sequences),
                _address(rows.block_tables),
                *rows.block_tables.shape,
                *_pool_words(cache, layer),
                _float_bits(scale),
                _address(out),
                _address(self._attention_scratch),
                self._attention_scratch.shape[1],
            ),
            (qkv, rows, cache, out, self._attention_scratch),
        )

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
        self._enqueue(
            linear.gather_rows,
            self._shares(count, x.shape[1]),
            (_address(x), x.shape[0], _address(indices), _address(out), x.shape[1], count),
            (x, indices, out),
        )

    def sample(self, logits: Array, batch: SamplingBatch) -> SampleOutput:
        checks.sample(logits, batch)
        needed = -(-sample.sample_scratch_bytes(logits.shape[1]) // 64) * 64
        if needed > self._sample_scratch.shape[1]:
            self._sample_scratch = aligned_empty((self.num_threads, needed), "uint8")
        output = sample.new_output(batch)
        words = sample.describe(logits, batch, output, self._sample_scratch)
        shares = self._shares(batch.rows, logits.shape[1])
        self._enqueue(sample.sample_operation, shares, (_address(words),), (words,))
        self.synchronize()
        return output

    # -- the command list --------------------------------------------------------------------------------------------

    def _shares(self, tasks: int, work: int) -> int:
        """Into how many shares to cut an op of so many tasks, each worth `work` multiply-adds."""
        return max(1, min(tasks, self.num_threads * SHARES_A_THREAD, tasks * work // SHARE_WORK))

    def _enqueue(self, operation: Operation, shares: int, words: tuple[int, ...], arrays: tuple[Any, ...]) -> None:
        assert not self._closed, "the backend is closed"
        self._records.append((operation.address, shares, *words))
        self._arrays.append(arrays)

    def _seal(self) -> _Program:
        """Turn the open records into a program at the end of the queue."""
        records = np.zeros((len(self._records), RECORD_WORDS), np.int64)
        for index, words in enumerate(self._records):
            records[index, : len(words)] = words
        program = _Program(records, tuple(self._arrays))
        self._records.clear()
        self._arrays.clear()
        if len(records):
            self._queue.append(program)
        return program

    def _keep(self, matrix: Matrix | GatedMatrix, parts: NDArray[np.int64]) -> CpuWeight:
        weight = CpuWeight(matrix, parts)
        self._held.add(weight)
        return weight


def _address(array: NDArray[Any]) -> int:
    return array.ctypes.data


def check_processor(machine: str, features: frozenset[str]) -> None:
    """Refuse a processor for which LLVM would call functions that no library here has, or one scalar at a time.

    Raises UnsupportedProcessorError.
    """
    missing = sorted({"avx", "f16c", "fma"} - features) if machine in ("x86_64", "AMD64") else []
    if missing:
        raise UnsupportedProcessorError(
            f"the CPU backend needs an x86 processor with AVX, F16C and FMA (Intel since 2013, AMD since 2012); this"
            f" one lacks {', '.join(missing)}. In a virtual machine, give it the host's model (QEMU: -cpu host)."
        )


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


def _pool_words(cache: CpuKVCache, layer: int) -> tuple[int, ...]:
    """One layer's keys and values, blocks, Hkv, block size, D, value stride."""
    layout = cache.layout
    return (
        _address(cache.keys[layer]),
        _address(cache.values[layer]),
        layout.num_blocks,
        layout.num_kv_heads,
        layout.block_size,
        layout.head_dim,
        cache.values.shape[-1],
    )
