"""Sampling of the CUDA backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import checks
from shardline.kernels.backend import Array, Pending
from shardline.kernels.cuda.core import CudaCore, address, int32
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.sampling import SampleOutput, SamplingBatch

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("position", np.uint32),
        ("top_k", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("logprobs", np.int32),
        ("place", np.int32),
        ("bias_start", np.int32),
        ("bias_end", np.int32),
        ("history_start", np.int32),
        ("history_end", np.int32),
    ]
)
"""`Row` of sample.cu: of each row's position what the noise looks at, and its entries by their numbers."""

_COLUMNS = tuple(str(name) for name in ROW.fields or () if name in SamplingBatch.__dataclass_fields__)
"""Those that are a `SamplingBatch`'s own arrays."""

_NO_PLACE = -1


class SamplingOps(CudaCore):
    """`Backend.sample_later`."""

    def _start(self, cubin_cache: Path | None) -> None:
        super()._start(cubin_cache)
        self._packing = _Packing()

    def sample_later(
        self,
        logits: Array,
        batch: SamplingBatch,
        last_tokens: Array | None = None,
        places: NDArray[np.int32] | None = None,
    ) -> Pending[SampleOutput]:
        checks.sample(logits, batch, last_tokens, places)
        rows, vocab = batch.rows, logits.shape[1]
        width = max(int(batch.logprobs.max()), 0)
        # One copy to the device and one back: each costs more than a small step's work.
        packed = self._packing.pack(batch, places)
        adjusts = len(packed) > rows * ROW.itemsize
        work = self._scratch("adjusted logits", rows * vocab if adjusts else 1, "float32")
        inputs = self._scratch("sampling", len(packed), "uint8")
        size = 2 * rows * (1 + width)
        sampled = self._scratch("sampled", size, "int32")
        self._uploads.send(inputs.data.ptr, packed)
        counts = (len(batch.bias_ids), len(batch.history_ids), width)
        arguments = (logits, work, int32(vocab), inputs, sampled, address(last_tokens), *map(int32, counts))
        self._launch(("sample", "sample"), (rows,), 1024, arguments)
        return _Sampled(self._downloads.later(sampled[:size]), rows, width)

    def _scratch(self, name: str, size: int, dtype: str) -> Array:
        """A flat array for this op alone, which is never recorded: it may grow without a record being lost.

        A step that is still under way may use the array that goes. Its memory comes back to this backend's own, all of
        which is used on one stream: who takes it next writes to it after that step. And if it goes back to the driver,
        that waits for the device (cudaFree does).
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            # Twice as much, so that steps that grow by a row or a token each do not each allocate.
            grown = size if dtype == "float32" else max(2 * size, 1 << 12)
            buffer = self._buffers[name] = cupy.empty(grown, dtype)
        return buffer


class _Sampled:
    """A `Pending` of what sample.cu writes."""

    __slots__ = ("_pending", "_rows", "_width")

    def __init__(self, pending: Pending[NDArray[np.int32]], rows: int, width: int) -> None:
        self._pending, self._rows, self._width = pending, rows, width

    @property
    def ready(self) -> bool:
        return self._pending.ready

    def wait(self) -> SampleOutput:
        words, rows, width = self._pending.wait(), self._rows, self._width
        numbers = words.view(np.float32)
        listed = 2 * rows + rows * width
        return SampleOutput(
            words[:rows],
            numbers[rows : 2 * rows],
            words[2 * rows : listed].reshape(rows, width),
            numbers[listed:].reshape(rows, width),
        )


class _Packing:
    """A table of rows on the host that each step fills anew, and its columns, which are slow to make."""

    def __init__(self) -> None:
        self._grow(64)

    def pack(self, batch: SamplingBatch, places: NDArray[np.int32] | None) -> NDArray[np.uint8]:
        """What sample.cu takes: the rows, then the biases' ids and values, the histories' ids and counts.

        It stays as it is until the next call.
        """
        rows = batch.rows
        if rows > self._rows:
            self._grow(2 * rows)
        for name, column in self._columns:
            column[:rows] = getattr(batch, name)
        self._place[:rows] = _NO_PLACE if places is None else places
        for start, end, offsets in zip(
            self._starts, self._ends, (batch.bias_offsets, batch.history_offsets), strict=True
        ):
            start[:rows] = offsets[:-1]
            end[:rows] = offsets[1:]
        table = self._bytes[: rows * ROW.itemsize]
        if not len(batch.bias_ids) and not len(batch.history_ids):
            return table
        entries = (batch.bias_ids, batch.bias_values, batch.history_ids, batch.history_counts)
        return np.concatenate([table, *(part.view(np.uint8) for part in entries)])

    def _grow(self, rows: int) -> None:
        self._rows = rows
        self._bytes = np.zeros(rows * ROW.itemsize, np.uint8)
        table = self._bytes.view(ROW)
        self._columns: list[tuple[str, NDArray[Any]]] = [(name, table[name]) for name in _COLUMNS]
        self._place = table["place"]
        self._starts, self._ends = (
            [table[f"{kind}_{side}"] for kind in ("bias", "history")] for side in ("start", "end")
        )
