"""Compiled kernels of one device, by file, defines and name; loaded once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cupy
from cupy_backends.cuda.api import driver

from shardline.kernels.cuda.compile import compile_kernels

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Modules:
    """Compiles on first use. Not thread-safe: one backend owns it."""

    def __init__(self, arch: int, cache: Path | None) -> None:
        self.arch = arch
        self._cache = cache
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._functions: dict[tuple[str, tuple[tuple[str, int], ...], str], Any] = {}
        self._shared: dict[tuple[str, tuple[tuple[str, int], ...], str], int] = {}  # the most that each may use

    def function(self, file: str, kernel: str, shared_bytes: int, defines: Mapping[str, int]) -> Any:
        """The kernel of that name from <file>.cu with those defines; may use up to `shared_bytes` of dynamic memory."""
        settings = tuple(sorted(defines.items()))
        key = (file, settings, kernel)
        function = self._functions.get(key)
        if function is None:
            module = self._modules.get((file, settings))
            if module is None:
                module = cupy.cuda.function.Module()
                module.load(compile_kernels(file, defines, self.arch, self._cache).cubin)
                self._modules[file, settings] = module
            function = self._functions[key] = module.get_function(kernel)
        if shared_bytes > self._shared.get(key, 0):
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared_bytes)
            self._shared[key] = shared_bytes
        return function
