"""How this backend's code is compiled and cached.

`jit` marks a function that other compiled code calls; it is compiled into its callers. `operation` marks an op's entry:
native code with one fixed signature that the executor calls through its address, compiled at first use and kept on
disk.

numba's own cache knows only the file that a function stands in, so that an edit of a helper in another file would leave
stale code behind. Here entries are named after a stamp of *all* sources of this folder and of the processor, and lie in
the user's cache folder (`$SHARDLINE_CACHE/jit`, else `shardline/jit` in `$XDG_CACHE_HOME` or `~/.cache`). So a
read-only installation caches too, and processes that write the same file at once write the same code into it, on hosts
that share a home folder as well. An entry that cannot be read is compiled again; where nothing can be written, so is
every one.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numba
from numba import types
from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from shardline.kernels.cpu import sources
from shardline.kernels.errors import UnsupportedProcessorError

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Any:
    """Compile for callers in compiled code. Not cached by itself: the operations that it ends up in are."""
    return numba.njit(**_OPTIONS)(function)


def jit_inlined(function: Callable[..., Any]) -> Any:
    """As `jit`, and always merged into its callers, so that a loop over it vectorises however long it is."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


class Operation:
    """An op's native entry, `void (int64 worker, int64 share, int64 num_shares, int64 record)`.

    It does one share of the op that the record (an address of int64 words) describes. `worker` is the thread that does
    it, for scratch memory. Which thread does which share, and how many there are, changes no bit.
    """

    def __init__(self, function: Callable[[int, int, int, int], None]) -> None:
        self._function = function
        self.name = function.__name__

    @cached_property
    def _compiled(self) -> Any:
        compiled = CFunc(self._function, ((types.int64,) * 4, types.void), locals={}, options=_OPTIONS)
        with_cache(compiled, self._function)
        compiled.compile()
        return compiled

    @property
    def address(self) -> int:
        """Where the code is; compiles or loads it at the first call, which takes a moment."""
        address: int = self._compiled.address
        return address


def operation(function: Callable[[int, int, int, int], None]) -> Operation:
    """Mark an op's entry; see `Operation`."""
    return Operation(function)


def with_cache(compiled: Any, function: Callable[..., Any]) -> None:
    """Give a numba dispatcher or callback this folder's disk cache; leaves it uncached if there is no place for one."""
    if _Locator.from_function(function, inspect.getfile(function)) is not None:
        compiled._cache = _Cache(function)


def cache_folder() -> Path:
    """Where compiled code is kept."""
    own = os.environ.get("SHARDLINE_CACHE")
    base = (
        Path(own).expanduser()
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline"
    )
    # One folder an installation, so that two checkouts do not throw out each other's entries.
    return base / "jit" / hashlib.sha256(str(sources.FOLDER).encode()).hexdigest()[:16]


@cache
def target_features() -> frozenset[str]:
    """What the processor that code is compiled for can do, by LLVM's names ("avx512f")."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(feature[1:] for feature in features if feature.startswith("+"))


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


@cache
def stamp() -> str:
    """A hash of this folder's sources, of what they are compiled with, and of the processor they are compiled for."""
    target = cpu_target.target_context.codegen().magic_tuple()
    return hashlib.sha256(repr((numba.__version__, target, sources.at_import())).encode()).hexdigest()


class _Locator(caching._CacheLocator):
    def __init__(self) -> None:
        self._path = str(cache_folder())

    def get_cache_path(self) -> str:
        return self._path

    def get_source_stamp(self) -> str:
        return stamp()

    def get_disambiguator(self) -> str:
        return stamp()[:16]

    @classmethod
    def from_function(cls, function: Callable[..., Any], _file: str) -> _Locator | None:
        try:
            locator = cls()
            locator.ensure_cache_path()
        except (OSError, RuntimeError):  # RuntimeError: no home directory can be told
            return None
        return locator


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(caching.Cache):
    _impl_class = _CacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        if sources.changed():
            return None
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            # A file that a crash or a full disk has cut short raises anything that unpickling can raise.
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if sources.changed():
            return
        try:
            self.flush()
            super().save_overload(sig, data)
        except OSError:
            # The code is there; only the next start will miss it.
            return
