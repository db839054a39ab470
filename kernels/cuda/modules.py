"""Compiled kernels of one device, by file, defines and name; loaded once."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from cupy_backends.cuda.api import driver

from shardline.kernels.cuda.compile import Compiled, compile_kernels
from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.errors import LaunchError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_Source = tuple[str, tuple[tuple[str, int], ...]]
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Launcher:
    """Launches kernels through the driver, with one argument buffer. One thread uses it.

    From sm_90 on a kernel may start while the one before it in the stream still runs: it waits for that one's results
    itself (common.cuh, after_previous). CuPy's own launches do not offer that.
    """

    _MOST_ARGUMENTS = 32

    def __init__(self, arch: int) -> None:
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_void_p] * 4
        self._buffer = ctypes.create_string_buffer(8 * self._MOST_ARGUMENTS)
        start = ctypes.addressof(self._buffer)
        places = (ctypes.c_void_p * self._MOST_ARGUMENTS)(*(start + 8 * i for i in range(self._MOST_ARGUMENTS)))
        self._attributes = (_Attribute * 2)()
        self._attributes[0].id = _PROGRAMMATIC_SERIALIZATION
        self._attributes[0].value[0] = 1
        self._attributes[1].id = _CLUSTER_DIMENSION
        self._attributes[1].value[:3] = (1, 1, 1)
        self._usual_attributes = int(arch >= 90)
        self._config = _Config(attributes=self._attributes)
        self._kept = places
        self._places, self._config_at = ctypes.addressof(places), ctypes.addressof(self._config)
        self._formats: dict[tuple[type, ...], struct.Struct] = {}

    def __call__(
        self,
        function: Any,
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        shared: int,
        stream: Any,
        cluster: int = 1,
    ) -> None:
        """Enqueue. Arguments are device arrays, int32, float32 and uint64 (an address).

        cluster: Blocks along z that run at once and see each other's shared memory; more than 1 from sm_90 on.
        Raises LaunchError with the driver's code.
        """
        kinds = tuple(map(type, arguments))
        layout = self._formats.get(kinds)
        if layout is None:
            letters = {cupy.ndarray: "Q", np.uint64: "Q", np.int32: "i4x", np.float32: "f4x"}
            layout = self._formats[kinds] = struct.Struct("<" + "".join(letters[kind] for kind in kinds))
        layout.pack_into(self._buffer, 0, *(a.data.ptr if type(a) is cupy.ndarray else a for a in arguments))
        config = self._config
        config.grid[:] = (*grid, 1, 1)[:3]
        config.block[:] = (threads, 1, 1)
        config.shared_bytes, config.stream = shared, stream.ptr
        config.num_attributes = self._usual_attributes
        if cluster > 1:
            self._attributes[1].value[2] = cluster
            config.num_attributes = 2
        code = self._launch(self._config_at, function.ptr, self._places, None)
        if code:
            raise LaunchError(
                f"the driver refused a launch of {grid} x {threads} threads, {shared} bytes: CUresult {code}"
            )


class Modules:
    """Compiles in threads what is known to be needed, and the rest at first use. One backend, one thread owns it."""

    def __init__(self, arch: int, cache: Path | None) -> None:
        self.arch = arch
        self._cache = cache
        self._compilers = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="nvrtc")
        self._compiled: dict[_Source, Future[Compiled]] = {}
        self._modules: dict[_Source, Any] = {}
        self._functions: dict[tuple[_Source, str], Any] = {}
        self._shared: dict[tuple[_Source, str], int] = {}  # the most that each may use

    def start(self, file: str, **defines: int) -> None:
        """Begin to compile <file>.cu with those defines; NVRTC works beside Python. A fault is raised at first use."""
        source = (file, tuple(sorted(defines.items())))
        if source not in self._modules:
            self._compile(source)

    def function(self, file: str, kernel: str, shared_bytes: int, defines: Mapping[str, int]) -> Any:
        """The kernel of that name from <file>.cu with those defines; may use up to `shared_bytes` of dynamic memory.

        Raises KernelCompileError.
        """
        source = (file, tuple(sorted(defines.items())))
        function = self._functions.get((source, kernel))
        if function is None:
            module = self._modules.get(source)
            if module is None:
                module = cupy.cuda.function.Module()
                module.load(self._compile(source).result().cubin)
                self._modules[source] = module
                del self._compiled[source]
            function = self._functions[source, kernel] = module.get_function(kernel)
        if shared_bytes > self._shared.get((source, kernel), 0):
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared_bytes)
            self._shared[source, kernel] = shared_bytes
        return function

    def close(self) -> None:
        """Give up what was started and not used. Idempotent."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, source: _Source) -> Future[Compiled]:
        compiled = self._compiled.get(source)
        if compiled is None:
            file, defines = source
            compiled = self._compilers.submit(compile_kernels, file, dict(defines), self.arch, self._cache)
            self._compiled[source] = compiled
        return compiled
