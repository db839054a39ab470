"""What every op of the CUDA backend stands on: one device, one stream, its memory, recorded steps and launches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import Array, Arrived, Backend, KVCache, KVLayout, Pending, StepShape
from shardline.kernels.cuda import entry, tables
from shardline.kernels.cuda.arrays import Activations, new_activations, new_pool
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.device import OLDEST_ARCH, class_of
from shardline.kernels.cuda.memory import DeviceMemory
from shardline.kernels.cuda.modules import Launcher, Modules
from shardline.kernels.cuda.pack import Packer
from shardline.kernels.cuda.transfers import Downloads, Uploads
from shardline.kernels.cuda.workspace import ARRIVALS, WeightShapes, step_workspace
from shardline.kernels.errors import UnsupportedOperationError

MAX_GRAPHS = 64
"""Recorded steps that a backend keeps; the longest unused is forgotten."""

MOST_HEAD_DIM = 256

PREPARE_THREADS = 256
"""Of kernels that make tiles of rows whose scales are known; any number gives the same bits."""

int32 = np.int32
float32 = np.float32


class CudaCore(Backend):
    """Memory and running of `Backend`. Arrays are CuPy's; one device, one stream, one thread at a time."""

    def __init__(self, device: int, cubin_cache: Path | None, memory_limit: int | None = None) -> None:
        """memory_limit: See `DeviceMemory`. Raises DeviceMemoryError."""
        self._index = device
        self._closed = False
        self._device = cupy.cuda.Device(device)
        with self._device:
            self._memory = DeviceMemory(device, memory_limit)
            self._stream = cupy.cuda.Stream(non_blocking=True)
        with self.here():
            self._start(cubin_cache)

    def _start(self, cubin_cache: Path | None) -> None:
        self.arch = int(self._device.compute_capability)
        assert self.arch >= OLDEST_ARCH, f"sm_{self.arch}: cuda_device refuses it"
        self._processors = int(self._device.attributes["MultiProcessorCount"])
        self._modules = Modules(self.arch, cubin_cache)
        self._launcher = Launcher(self.arch)
        self._uploads, self._downloads = Uploads(self._stream), Downloads(self._stream, self._index)
        self._packer = Packer(self._launch, self.upload)
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._capturing = False
        self._resident_bytes = 0
        self._shapes = WeightShapes()
        self._buffers: dict[str, Any] = {}
        self._between: dict[tuple[str, int], Activations] = {}
        self._arrived = cupy.zeros(ARRIVALS, cupy.uint32)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Make the backend's device, stream and memory those of the calling thread; see entry.py."""
        assert not self._closed, "the backend is closed"
        with self._device, self._stream, cupy.cuda.using_allocator(self._memory.allocate):
            yield

    def entered(self) -> AbstractContextManager[None]:
        return entry.entered(self)

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return cupy.empty(shape, dtype)

    def activations(self, rows: int, channels: int) -> Array:
        self._modules.start("activation", THREADS=tables.row_threads(channels))
        return new_activations(rows, channels, self.arch)

    def upload(self, host: NDArray[Any]) -> Array:
        array = cupy.empty(host.shape, host.dtype)
        self._uploads.send(array.data.ptr, host)
        return array

    def write(self, target: Array, host: NDArray[Any]) -> None:
        assert not self._capturing, "write inside replay: what changes from step to step is written outside"
        if isinstance(target, Activations):
            self.write(target.values, host)
            self._make_fragments(target, len(host))
            return
        fits = target.dtype == host.dtype and target.shape[1:] == host.shape[1:] and len(host) <= len(target)
        assert fits, f"{host.dtype} {host.shape} does not fit into {target.dtype} {target.shape}"
        assert target.flags.c_contiguous, "write wants a contiguous array"
        self._uploads.send(target.data.ptr, host)

    def read_later(self, source: Array) -> Pending[NDArray[Any]]:
        if isinstance(source, Activations):
            return Arrived(source.read(self._stream))
        assert source.flags.c_contiguous, "read wants a contiguous array"
        return self._downloads.later(source)

    def allocate_kv(self, layout: KVLayout) -> KVCache:
        if layout.dtype not in ("float16", "int8"):
            raise UnsupportedOperationError(f"keys and values in {layout.dtype} (float16 and int8 are)", "cuda")
        if layout.head_dim % 16 or layout.head_dim > MOST_HEAD_DIM:
            what = f"attention heads of {layout.head_dim} channels (multiples of 16 up to {MOST_HEAD_DIM})"
            raise UnsupportedOperationError(what, "cuda")
        cache = new_pool(layout)
        self._modules.start("attention", **cache.defines)
        self._resident_bytes += cache.nbytes
        return cache

    def reserve(self, step: StepShape) -> None:
        self._stream.synchronize()
        self._memory.trim()
        workspace = step_workspace(step, self._shapes, self.arch, self._processors)
        for name, (size, dtype) in workspace.flat.items():
            self._buffer(name, size, dtype)
        for (name, channels), rows in workspace.rows.items():
            self._rows_between(name, rows, channels)
        self._memory.running = True

    @property
    def numeric_class(self) -> str:
        """See `class_of`."""
        return class_of(self.arch)

    def resident_bytes(self) -> int:
        return self._resident_bytes

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._modules.close()
        # A device that has failed refuses even this, and whoever used it last was told.
        with suppress(cupy.cuda.runtime.CUDARuntimeError), self._device:
            self._stream.synchronize()
            self._graphs.clear()
            self._buffers.clear()
            self._between.clear()
            self._downloads.close()
            self._memory.close()
        self._resident_bytes = 0

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

    # -- launches ----------------------------------------------------------------------------------------------------

    def _launch(
        self,
        kernel: tuple[str, str],
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        *,
        shared: int = 0,
        cluster: int = 1,
        **defines: int,
    ) -> None:
        function = self._modules.function(kernel[0], kernel[1], shared, defines)
        self._launcher(function, grid, threads, arguments, shared, self._stream, cluster)

    def _make_fragments(self, x: Activations, rows: int, *, unit: bool = False) -> None:
        """The tiles of the first rows of x.values; `unit`: they are in the range of halves by their nature."""
        channels = x.shape[1]
        arguments = (x.values, x.fragments, x.scales, x.sums, int32(channels), int32(x.blocks), int32(unit))
        threads = tables.row_threads(channels)
        self._launch(
            ("activation", "prepare_rows"), (rows,), threads, arguments, shared=x.blocks * 256, THREADS=threads
        )

    def _make_gated_fragments(self, x: Activations, rows: int) -> None:
        """The same, for rows whose largest magnitudes are in x.largest."""
        self._launch(
            ("activation", "prepare_gated"),
            (rows, -(-x.blocks * 16 // PREPARE_THREADS)),
            PREPARE_THREADS,
            (x.values, x.fragments, x.scales, x.sums, x.largest, x.done, int32(x.shape[1]), int32(x.blocks)),
            THREADS=PREPARE_THREADS,
        )

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _keep(self, weight: Any) -> Any:
        self._resident_bytes += weight.nbytes
        weight.describe(self._shapes)
        return weight

    def _settle(self) -> None:
        """Wait for weights that kernels have packed: products read theirs before they wait for the kernel before."""
        self._stream.synchronize()

    def _buffer(self, name: str, size: int, dtype: str = "float32") -> Any:
        """A flat array that recorded ops share under that name; unwritten, at least `size` long."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            self._forget_records(is_new=buffer is None)
            buffer = self._buffers[name] = cupy.empty(max(size, 1), dtype)
        return buffer

    def _rows_between(self, name: str, rows: int, channels: int) -> Activations:
        """Activations that ops share under that name, of at least so many rows."""
        found = self._between.get((name, channels))
        if found is None or found.shape[0] < rows:
            self._forget_records(is_new=found is None)
            found = self._between[name, channels] = new_activations(rows, channels, self.arch)
        return found

    def _forget_records(self, *, is_new: bool) -> None:
        """Before a buffer is replaced: a recorded step may still name the old one, so the records go with it."""
        assert not self._capturing, "a buffer grows while a step is recorded"
        if not is_new:
            self._stream.synchronize()
            self._graphs.clear()


def address(array: Array | None, first: int = 0) -> np.uint64:
    """Of the array's element `first`, 4 bytes each; 0 for no array."""
    return np.uint64(0 if array is None else array.data.ptr + 4 * first)
