"""Sampling of the CUDA backend."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Arrived, Pending
from shardline.kernels.cuda.core import CudaCore, int32
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.pack import pad_to
from shardline.kernels.sampling import SampleOutput, SamplingBatch

INPUTS = (
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


class SamplingOps(CudaCore):
    """`Backend.sample`."""

    def sample_later(
        self,
        logits: Array,
        batch: SamplingBatch,
        last_tokens: Array | None = None,
        places: NDArray[np.int32] | None = None,
    ) -> Pending[SampleOutput]:
        checks.sample(logits, batch, last_tokens, places)
        assert last_tokens is None, "last tokens are not written yet"
        rows, vocab = batch.rows, logits.shape[1]
        width = max(int(batch.logprobs.max(initial=0)), 0)
        adjusts = batch.bias_offsets[-1] > 0 or batch.history_offsets[-1] > 0
        work = self._scratch("adjusted logits", rows * vocab if adjusts else 1, "float32")
        # One copy to the device and one back: each costs more than a small step's work.
        inputs = [np.ascontiguousarray(getattr(batch, name)) for name in INPUTS]
        starts = list(itertools.accumulate((pad_to(array.nbytes, 8) for array in inputs), initial=0))
        packed = np.zeros(starts[-1], np.uint8)
        for array, start in zip(inputs, starts, strict=False):
            packed[start : start + array.nbytes] = array.view(np.uint8)
        sizes = (rows, rows, rows * width, rows * width)
        places = list(itertools.accumulate(sizes, initial=0))
        sampling = self._scratch("sampling", len(packed), "uint8")
        sampled = self._scratch("sampled", places[-1], "int32")[: places[-1]]
        self.write(sampling, packed)
        given = (np.uint64(sampling.data.ptr + start) for start in starts[:-1])
        taken = (np.uint64(sampled.data.ptr + 4 * place) for place in places[:-1])
        arguments = (logits, work, int32(vocab), *given, *taken, int32(width))
        self._launch(("sample", "sample"), (rows,), 1024, arguments)
        token_ids, logprobs, top_ids, top_logprobs = np.split(self.read(sampled), places[1:-1])
        output = SampleOutput(
            token_ids,
            logprobs.view(np.float32),
            top_ids.reshape(rows, width),
            top_logprobs.view(np.float32).reshape(rows, width),
        )
        return Arrived(output)

    def _scratch(self, name: str, size: int, dtype: str) -> Array:
        """A flat array for this op alone, which is never recorded: it may grow without a record being lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            # Twice as much, so that steps that grow by a row or a token each do not each allocate.
            grown = size if dtype == "float32" else max(2 * size, 1 << 12)
            buffer = self._buffers[name] = cupy.empty(grown, dtype)
        return buffer
