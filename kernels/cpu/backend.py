"""The CPU backend: ops become records of a command list, which a team of threads runs when a result is wanted.

Calling compiled code once an op would cost more than most ops of a decode step take. So an op only checks its arguments
and appends a record (addresses and sizes) to the list, as to a CUDA stream; what reads a result runs it, at once.
`replay` keeps a list under a key, as a CUDA graph, and enqueues it again without calling the ops.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import (
    Array,
    Arrived,
    KVCache,
    KVLayout,
    Pending,
    RopeTable,
    Rows,
    StepShape,
    Weight,
)
from shardline.kernels.cpu import linear, operations, pool, sample
from shardline.kernels.cpu.attention import attention_scratch_bytes
from shardline.kernels.cpu.commands import address, float_bits
from shardline.kernels.cpu.expert_ops import ExpertOps
from shardline.kernels.cpu.jit import Operation, check_processor, target_features
from shardline.kernels.cpu.ops import SHARE_WORK
from shardline.kernels.cpu.product_ops import ProductOps
from shardline.kernels.cpu.resident import aligned_empty
from shardline.kernels.sampling import SampleOutput, SamplingBatch


class CpuBackend(ProductOps, ExpertOps):
    """See `Backend`. Arrays are NumPy's, on this machine's memory."""

    name: ClassVar[str] = "cpu"

    def __init__(self, num_threads: int) -> None:
        """Start the threads. Raises UnsupportedProcessorError, and ValueError if num_threads is not positive."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; the CPU backend needs at least one")
        check_processor(platform.machine(), target_features())
        super().__init__(num_threads)
        self._attention_scratch = aligned_empty((num_threads, 0), "uint8")
        self._sample_scratch = aligned_empty((num_threads, 0), "uint8")

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
        assert not self._commands.recording, "write inside replay: what changes from step to step is written outside"
        fits = target.dtype == host.dtype and target.shape[1:] == host.shape[1:] and len(host) <= len(target)
        assert fits, f"{host.dtype} {host.shape} does not fit into {target.dtype} {target.shape}"
        # What is enqueued may still read the target.
        self.synchronize()
        target[: len(host)] = host

    def read_later(self, source: Array) -> Pending[NDArray[Any]]:
        self.synchronize()
        return Arrived(np.array(source))

    def allocate_kv(self, layout: KVLayout) -> KVCache:
        cache = pool.allocate(layout)
        self._held.add(cache)
        scratch = -(-attention_scratch_bytes(layout.head_dim) // 64) * 64
        if scratch > self._attention_scratch.shape[1]:
            self._attention_scratch = aligned_empty((self.num_threads, scratch), "uint8")
        return cache

    def reserve(self, step: StepShape) -> None:
        if step.sampled_rows:
            self._reserve_sampling(step.vocab)

    def _reserve_sampling(self, vocab: int) -> None:
        needed = -(-sample.sample_scratch_bytes(vocab) // 64) * 64
        if needed > self._sample_scratch.shape[1]:
            self._sample_scratch = aligned_empty((self.num_threads, needed), "uint8")

    def resident_bytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def close(self) -> None:
        self._commands.close()

    # -- running -----------------------------------------------------------------------------------------------------

    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        self._commands.replay(key, issue)

    def synchronize(self) -> None:
        self._commands.run()

    # -- ops ---------------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, cache: KVCache, query_heads: int) -> None:
        pass  # the attention of this backend shares nothing between layers

    def embedding(
        self,
        token_ids: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        scale: float = 1.0,
        last_tokens: Array | None = None,
    ) -> None:
        checks.embedding(token_ids, weight.inputs, out, rows, last_tokens)
        self._enqueue(
            linear.embedding,
            self._shares(rows, 32 * weight.inputs),
            (
                address(weight.parts),
                len(weight.parts),
                address(token_ids),
                address(out),
                weight.inputs,
                rows,
                float_bits(scale),
                address(last_tokens),
                0 if last_tokens is None else len(last_tokens),
            ),
            (weight, token_ids, out, last_tokens),
        )

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        self._rms_norm(operations.rms_norm_operation, x, weight, eps, out, rows)

    def add_rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        self._rms_norm(operations.add_rms_norm_operation, x, weight, eps, out, rows)

    def _rms_norm(self, operation: Operation, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        checks.rms_norm(x, weight, out, rows)
        self._enqueue(
            operation,
            self._shares(rows, 8 * x.shape[1]),
            (address(x), address(weight), float_bits(eps), address(out), x.shape[1], rows),
            (x, weight, out),
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
        checks.rope_kv_write(qkv, rows, rope, cache.layout, layer, q_norm, k_norm)
        self._enqueue(
            operations.ROPE_KV_WRITE[cache.layout.dtype],
            self._shares(rows.count, 16 * qkv.shape[1]),
            (
                address(qkv),
                qkv.shape[1],
                rows.count,
                address(rows.positions),
                address(rows.slots),
                *((0, 0, 0, 0, 0) if rope is None else _rope_words(rope)),
                *cache.words(layer),
                address(q_norm),
                address(k_norm),
                0 if q_norm is None else len(q_norm),
                float_bits(eps),
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
        checks.paged_attention(qkv, rows, cache.layout, layer, out, window=window, softcap=softcap, sinks=sinks)
        self._enqueue(
            operations.PAGED_ATTENTION[cache.layout.dtype],
            # How long the sequences are is not known here, and may differ each time that the record runs.
            self._shares(rows.count * (out.shape[1] // cache.layout.head_dim), SHARE_WORK),
            (
                address(qkv),
                qkv.shape[1],
                rows.count,
                address(rows.positions),
                address(rows.sequences),
                address(rows.block_tables),
                *rows.block_tables.shape,
                *cache.words(layer),
                float_bits(scale),
                address(out),
                address(self._attention_scratch),
                self._attention_scratch.shape[1],
                window,
                float_bits(softcap),
                address(sinks),
            ),
            (qkv, rows, cache, out, sinks, self._attention_scratch),
        )

    def soft_cap(self, x: Array, cap: float, rows: int) -> None:
        checks.soft_cap(x, cap, rows)
        self._enqueue(
            operations.soft_cap_operation,
            self._shares(rows, 4 * x.shape[1]),
            (address(x), rows * x.shape[1], float_bits(cap)),
            (x,),
        )

    def gather_rows(self, x: Array, indices: Array, out: Array, count: int) -> None:
        checks.gather_rows(x, indices, out, count)
        self._enqueue(
            linear.gather_rows,
            self._shares(count, x.shape[1]),
            (address(x), x.shape[0], address(indices), address(out), x.shape[1], count),
            (x, indices, out),
        )

    def sample_later(
        self,
        logits: Array,
        batch: SamplingBatch,
        last_tokens: Array | None = None,
        places: NDArray[np.int32] | None = None,
    ) -> Pending[SampleOutput]:
        checks.sample(logits, batch, last_tokens, places)
        self._reserve_sampling(logits.shape[1])
        output = sample.new_output(batch)
        words = sample.describe(logits, batch, output, self._sample_scratch)
        shares = self._shares(batch.rows, logits.shape[1])
        self._enqueue(sample.sample_operation, shares, (address(words),), (words,))
        self.synchronize()
        if last_tokens is not None:
            last_tokens[places] = output.token_ids
        return Arrived(output)


def _rope_words(rope: RopeTable) -> tuple[int, ...]:
    """Of a record: cos, sin, max positions, R / 2, interleaved."""
    return address(rope.cos), address(rope.sin), *rope.cos.shape, rope.interleaved
