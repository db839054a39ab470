"""The arithmetic's room: one `Backend` interface, one implementation a kind of device; alone in using cupy or numba."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import (
    Array,
    Backend,
    KVCache,
    KVLayout,
    Pending,
    RopeTable,
    Rows,
    StepShape,
    Weight,
    kv_head_bytes,
)
from shardline.kernels.cpu.resident import cpu_resident_bytes
from shardline.kernels.cuda.device import CudaDevice, cuda_bus_id, cuda_device, cuda_devices, cuda_free_bytes
from shardline.kernels.errors import (
    DeviceMemoryError,
    DeviceUnavailableError,
    KernelsError,
    UnsupportedOperationError,
    UnsupportedProcessorError,
)
from shardline.kernels.experts import Activation, Expert, RouterRule
from shardline.kernels.matrix import GROUP_SIZES, GroupedMatrix, pack_nibbles
from shardline.kernels.sampling import SampleOutput, SamplingBatch

__all__ = [
    "GROUP_SIZES",
    "Activation",
    "Array",
    "Backend",
    "CudaDevice",
    "DeviceMemoryError",
    "DeviceUnavailableError",
    "Expert",
    "GroupedMatrix",
    "KVCache",
    "KVLayout",
    "KernelsError",
    "Pending",
    "RopeTable",
    "RouterRule",
    "Rows",
    "SampleOutput",
    "SamplingBatch",
    "StepShape",
    "UnsupportedOperationError",
    "UnsupportedProcessorError",
    "Weight",
    "cpu_backend",
    "cpu_resident_bytes",
    "cuda_backend",
    "cuda_bus_id",
    "cuda_device",
    "cuda_devices",
    "cuda_free_bytes",
    "kv_head_bytes",
    "pack_nibbles",
    "quantize_groups",
]


def cpu_backend(num_threads: int) -> Backend:
    """A CPU backend with that many threads. Imports numba, which takes a moment; so only when asked for.

    Raises UnsupportedProcessorError, and ValueError if there is no thread.
    """
    from shardline.kernels.cpu.backend import CpuBackend

    return CpuBackend(num_threads)


def cuda_backend(index: int, *, memory_limit: int | None = None) -> Backend:
    """A CUDA backend on that GPU. Imports cupy, so only when asked for.

    memory_limit: Bytes that this process may take of the GPU for it, CUDA's own context included; None: no limit.

    Raises DeviceUnavailableError, DeviceMemoryError.
    """
    found = cuda_device(index)
    from shardline.kernels.cuda.backend import CudaBackend
    from shardline.kernels.cuda.device import cubin_folder

    return CudaBackend(found.index, cubin_folder(), memory_limit)


def quantize_groups(
    values: NDArray[np.float32], bits: int, group_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Quantize float32 [rows, K] in 4 or 8 bits: q, scale and minimum of a `GroupedMatrix` of these rows.

    The same bytes on every machine. Imports numba, and runs without the interpreter's lock.

    Raises UnsupportedProcessorError, and ValueError: an element is not a finite number, or is so large that float16
    could not hold a minimum.
    """
    from shardline.kernels.cpu import quantize

    return quantize.quantize_groups(values, bits, group_size)
