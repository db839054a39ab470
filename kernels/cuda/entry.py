"""Every call of a backend computes on the backend's own device, whatever thread makes it.

CUDA's current device, and CuPy's current stream and allocator, belong to a thread. A stage is loaded in one thread and
may run in another, and one thread may drive stages of several GPUs in turn; so it is not left to the caller.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from shardline.kernels.backend import Backend

NOT_ENTERED = frozenset({"resident_bytes", "close", "entered"})
"""What only reads a number, which any thread may ask for while another computes; and what enters the device itself."""


class OwnDevice(Protocol):
    """A backend that can make its device, stream and memory those of the calling thread."""

    def here(self) -> AbstractContextManager[None]:
        """Enter, and leave the thread as it was. Raises if the backend is closed."""
        ...


T = TypeVar("T", bound=OwnDevice)


class _Entered(threading.local):
    backend: object = None


_ENTERED = _Entered()


def operations() -> list[str]:
    """Methods of `Backend` that want the device."""
    found = [name for name, one in vars(Backend).items() if callable(one) and not name.startswith("_")]
    return [name for name in found if name not in NOT_ENTERED]


def on_its_device(cls: type[T]) -> type[T]:
    """Wrap each of the `operations` of a class; those that it calls itself, and its helpers, cost nothing more."""
    for name in operations():
        setattr(cls, name, _entering(getattr(cls, name)))
    return cls


@contextmanager
def entered(backend: OwnDevice) -> Iterator[None]:
    """Enter the backend's device for a run of calls, unless the thread is there."""
    before = _ENTERED.backend
    if before is backend:
        yield
        return
    with backend.here():
        _ENTERED.backend = backend
        try:
            yield
        finally:
            _ENTERED.backend = before


def _entering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: OwnDevice, *args: Any, **kwargs: Any) -> Any:
        if _ENTERED.backend is self:
            return method(self, *args, **kwargs)
        with entered(self):
            return method(self, *args, **kwargs)

    return call
