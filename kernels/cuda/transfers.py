"""Pinned host memory, through which arrays go to a device and come back: the copies wait for nobody but the stream."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import Arrived, Pending
from shardline.kernels.cuda.cupy_import import cupy

LEAST_BYTES = 1 << 16
"""Of one buffer: several steps' indices."""

PIECE_BYTES = 8 << 20
"""A larger array goes up in pieces, one being filled while the one before is under way: so weights need no more pinned
memory than hidden states."""

_ALIGNMENT = 256
_PORTABLE = 1  # cudaHostAllocPortable: pinned for every device of the process
_NOT_READY = 600  # cudaErrorNotReady


def _round_up(size: int) -> int:
    """A power of two, so that steps of many sizes share few buffers."""
    return max(LEAST_BYTES, 1 << (size - 1).bit_length())


class _Half:
    """One of two buffers that uploads fill in turn."""

    def __init__(self) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self.grow(LEAST_BYTES)

    def grow(self, size: int) -> None:
        """A new buffer of at least that size; nothing may read the old one any more."""
        self.size, self.used = _round_up(size), 0
        self.memory = cupy.cuda.PinnedMemory(self.size, _PORTABLE)
        self.bytes = _view(self.memory, self.size, self.memory)


class Uploads:
    """Copies to the device on one stream. The source may be changed as soon as `send` returns.

    A copy waits only when both halves are full of copies that the device has not done yet.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._half, self._other = _Half(), _Half()

    def send(self, target: int, source: NDArray[Any]) -> None:
        """Enqueue a copy to that device address. `source` need not be contiguous."""
        if source.nbytes <= PIECE_BYTES:
            self._send_piece(target, source)
            return
        flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, PIECE_BYTES):
            self._send_piece(target + start, flat[start : start + PIECE_BYTES])

    def _send_piece(self, target: int, source: NDArray[Any]) -> None:
        size = source.nbytes
        if not size:
            return
        half = self._half
        if half.used + size > half.size:
            half = self._turn(size)
        staged = half.bytes[half.used : half.used + size]
        np.copyto(staged.view(source.dtype).reshape(source.shape), source)
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(target, half.memory.ptr + half.used, size, runtime.memcpyHostToDevice, self._stream.ptr)
        half.used = -(-(half.used + size) // _ALIGNMENT) * _ALIGNMENT

    def _turn(self, size: int) -> _Half:
        """Go on with the other half, once the copies out of it are done."""
        self._half.event.record(self._stream)
        self._half, self._other = self._other, self._half
        half = self._half
        half.event.synchronize()
        half.used = 0
        if half.size < size:
            half.grow(size)
        return half


class _Landing:
    """A pinned buffer for copies from a device, and the event behind the last of them."""

    def __init__(self, size: int, device: int) -> None:
        self.device = device
        self.memory = cupy.cuda.PinnedMemory(size, _PORTABLE)
        self.event = cupy.cuda.Event(disable_timing=True)
        self.under_way = False

    def wait(self) -> None:
        """Until the copy is done; any thread."""
        # A device object of its own: CuPy's keep what to go back to in themselves, for all threads together.
        with cupy.cuda.Device(self.device):
            self.event.synchronize()
        self.under_way = False

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # In whatever thread the last array ends: the driver would begin to use the thread's own device.
        with suppress(cupy.cuda.runtime.CUDARuntimeError), cupy.cuda.Device(self.device):
            try:
                if self.under_way:
                    self.event.synchronize()  # nobody has waited, and memory is not unpinned below a copy
            finally:
                self.memory = self.event = None


class _Lease:
    """Brings a buffer back when the last array on it is gone."""

    def __init__(self, landing: _Landing, home: list[_Landing]) -> None:
        self._landing, self._home = landing, home

    def __del__(self) -> None:
        self._home.append(self._landing)


class Download:
    """A `Pending` of a device array's contents."""

    __slots__ = ("_host", "_landing")

    def __init__(self, landing: _Landing, host: NDArray[Any]) -> None:
        self._landing = landing
        self._host: NDArray[Any] | None = host

    @property
    def ready(self) -> bool:
        """Whether the copy is done, or never will be because its device has failed."""
        with cupy.cuda.Device(self._landing.device):
            status: int = cupy.cuda.runtime.eventQuery(self._landing.event.ptr)
        return status != _NOT_READY

    def wait(self) -> NDArray[Any]:
        """The contents; once."""
        host, self._host = self._host, None
        assert host is not None, "a result is waited for twice"
        self._landing.wait()
        return host


class Downloads:
    """Copies from the device on one stream. Each array that comes is the caller's for as long as it is held.

    A buffer is lent again once its array is gone. If that was never waited for, its copy may still be under way: the
    next one into the buffer comes after it, as both are of one stream.
    """

    def __init__(self, stream: Any, device: int) -> None:
        self._stream, self._device = stream, device
        self._free: dict[int, list[_Landing]] = {}

    def later(self, source: Any) -> Pending[NDArray[Any]]:
        """Enqueue a copy of a C-contiguous device array."""
        if not source.nbytes:
            return Arrived(np.empty(source.shape, source.dtype))
        landing, host = self._take(source.nbytes)
        runtime = cupy.cuda.runtime
        to = landing.memory.ptr
        runtime.memcpyAsync(to, source.data.ptr, source.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr)
        landing.under_way = True
        landing.event.record(self._stream)
        return Download(landing, host.view(source.dtype).reshape(source.shape))

    def close(self) -> None:
        """Unpin what nobody holds; the rest follows when its arrays are gone."""
        self._free.clear()

    def _take(self, size: int) -> tuple[_Landing, NDArray[np.uint8]]:
        rounded = _round_up(size)
        free = self._free.setdefault(rounded, [])
        landing = free.pop() if free else _Landing(rounded, self._device)
        return landing, _view(landing.memory, size, _Lease(landing, free))


def _view(memory: Any, size: int, keeper: object) -> NDArray[np.uint8]:
    """Pinned bytes as an array; `keeper` lives as long as it and its views do."""
    owner: Any = (ctypes.c_char * size).from_address(memory.ptr)
    owner.keeper = keeper
    view: NDArray[np.uint8] = np.frombuffer(owner, np.uint8)
    return view
