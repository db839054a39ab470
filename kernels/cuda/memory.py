"""The device memory of one backend: its own, with a limit, and given back whole when the backend closes."""

from __future__ import annotations

from collections import deque
from typing import Any

from shardline.kernels.cuda.arena import Arena
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.errors import DeviceMemoryError

CONTEXT_BYTES = 512 * 2**20
"""Of a limit, what CUDA itself takes of the device for a process: its context, and the code of loaded kernels."""

_NO_MEMORY = 2  # cudaErrorMemoryAllocation


class _Block:
    """Of an array; comes back when the last view of it is gone, in whatever thread that is."""

    __slots__ = ("_address", "_returned")

    def __init__(self, address: int, returned: deque[int]) -> None:
        self._address, self._returned = address, returned

    def __del__(self) -> None:
        self._returned.append(self._address)


class DeviceMemory:
    """What one backend holds of its GPU. One thread at a time uses it; `held_bytes` may be asked from any.

    It is the backend's own, and not CuPy's pool, which all of a process share: so a limit is one stage's, what is held
    is what the driver gave, and closing frees that and nothing else, even while someone (a traceback, say) still holds
    arrays. All arrays are of one stream, whose order makes it safe to use a block again at once.

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
        self._returned: deque[int] = deque()
        self._arena = Arena(self._take, self._give)
        if limit is not None and limit <= CONTEXT_BYTES:
            raise self._error(0)

    @property
    def held_bytes(self) -> int:
        """Taken of the device, what is only kept for later included."""
        return self._arena.held_bytes

    def allocate(self, size: int) -> Any:
        """An allocator as `cupy.cuda.using_allocator` wants one. Raises DeviceMemoryError."""
        assert not self._closed, "memory asked for after close"
        current = cupy.cuda.runtime.getDevice()
        assert current == self._device, f"memory of GPU {self._device} asked for while GPU {current} is current"
        self._take_back()
        address = self._arena.allocate(size)
        if address is None:
            raise self._error(size)
        block = _Block(address, self._returned)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, block, self._device), 0)

    def trim(self) -> None:
        """Give back what is only kept for later. The device must have ended all that was enqueued."""
        self._take_back()
        self._arena.trim()

    def close(self) -> None:
        """Give everything back; arrays that are still held point nowhere from here on. The device must be idle."""
        self._closed = True
        self._arena.close()

    def _take_back(self) -> None:
        # Not where an array ends: that may be in the middle of anything, an allocation too.
        while self._returned:
            self._arena.release(self._returned.popleft())

    def _take(self, size: int) -> int | None:
        if self._limit is not None and self.held_bytes + size > self._limit - CONTEXT_BYTES:
            return None
        runtime = cupy.cuda.runtime
        try:
            return int(runtime.malloc(size))
        except runtime.CUDARuntimeError as error:
            if error.status != _NO_MEMORY:
                raise
            return None

    def _give(self, address: int) -> None:
        cupy.cuda.runtime.free(address)

    def _error(self, wanted: int) -> DeviceMemoryError:
        free, total = cupy.cuda.runtime.memGetInfo()
        return DeviceMemoryError(
            device=self._device,
            running=self.running,
            wanted=wanted,
            held=self.held_bytes,
            limit=self._limit,
            context=CONTEXT_BYTES,
            free=int(free),
            total=int(total),
        )
