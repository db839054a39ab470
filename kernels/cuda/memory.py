"""The device memory of one backend: a pool of its own, with a limit, and given back whole when the backend closes."""

from __future__ import annotations

from typing import Any

from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.errors import DeviceMemoryError

CONTEXT_BYTES = 512 * 2**20
"""Of a limit, what CUDA itself takes of the device for a process: its context, and the code of loaded kernels."""


class DeviceMemory:
    """What one backend holds of its GPU. One thread at a time uses it; `held_bytes` may be asked from any.

    A pool of the backend's own and not CuPy's, which all of a process share: so a limit is one stage's, and closing
    frees what this backend took and nothing else, even while someone (a traceback, say) still holds its arrays.

    Attributes:
        running: Loading has ended; errors say which it was.
    """

    def __init__(self, device: int, limit: int | None) -> None:
        """limit: Bytes that the process may take of the device, context included; None: what there is.

        Raises DeviceMemoryError: no limit that small leaves anything.
        """
        self.running = False
        self._device = device
        self._limit = limit
        self._closed = False
        self._free = cupy.cuda.runtime.free  # here, since arrays may end with the interpreter
        self._held: dict[int, int] = {}
        self._held_bytes = 0
        if limit is not None and limit <= CONTEXT_BYTES:
            raise self._error(0)
        self._pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(self._take, self._give).malloc)

    @property
    def held_bytes(self) -> int:
        """Taken of the device, what the pool keeps for later included."""
        return self._held_bytes

    def allocate(self, size: int) -> Any:
        """An allocator as `cupy.cuda.using_allocator` wants one. Raises DeviceMemoryError."""
        try:
            return self._pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            # The pool has tried again without what it kept.
            raise self._error(size) from None

    def trim(self) -> None:
        """Give back what the pool only keeps for later. The device must have ended all that was enqueued."""
        self._pool.free_all_blocks()

    def close(self) -> None:
        """Give everything back; arrays that are still held point nowhere from here on. The device must be idle."""
        self._closed = True
        self._pool.free_all_blocks()
        held, self._held, self._held_bytes = self._held, {}, 0
        for pointer in held:
            self._free(pointer)

    def _take(self, size: int, device: int) -> int:
        assert device == self._device, f"memory of GPU {self._device} asked for while GPU {device} is current"
        assert not self._closed, "memory asked for after close"
        runtime = cupy.cuda.runtime
        if self._limit is not None and self._held_bytes + size > self._limit - CONTEXT_BYTES:
            # As the driver would say it: the pool gives back what it keeps, and asks again.
            raise runtime.CUDARuntimeError(runtime.errorMemoryAllocation)
        pointer = int(runtime.malloc(size))
        self._held[pointer] = size
        self._held_bytes += size
        return pointer

    def _give(self, pointer: int, device: int) -> None:
        # What `close` has freed already may come here later.
        size = self._held.pop(pointer, None)
        if size is not None:
            self._held_bytes -= size
            self._free(pointer)

    def _error(self, wanted: int) -> DeviceMemoryError:
        free, total = cupy.cuda.runtime.memGetInfo()
        return DeviceMemoryError(
            device=self._device,
            running=self.running,
            wanted=wanted,
            held=self._held_bytes,
            limit=self._limit,
            context=CONTEXT_BYTES,
            free=int(free),
            total=int(total),
        )
