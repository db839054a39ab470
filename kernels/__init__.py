"""The arithmetic's room: one `Backend` interface, one implementation a kind of device; alone in using cupy or numba."""

from __future__ import annotations

from shardline.kernels.backend import Array, Backend, KVCache, KVLayout, RopeTable, Rows, Weight
from shardline.kernels.cpu.resident import cpu_resident_bytes
from shardline.kernels.cuda.device import CudaDevice, cuda_device
from shardline.kernels.errors import (
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
    "DeviceUnavailableError",
    "Expert",
    "GroupedMatrix",
    "KVCache",
    "KVLayout",
    "KernelsError",
    "RopeTable",
    "RouterRule",
    "Rows",
    "SampleOutput",
    "SamplingBatch",
    "UnsupportedOperationError",
    "UnsupportedProcessorError",
    "Weight",
    "cpu_backend",
    "cpu_resident_bytes",
    "cuda_backend",
    "cuda_device",
    "pack_nibbles",
]


def cpu_backend(num_threads: int) -> Backend:
    """A CPU backend with that many threads. Imports numba, which takes a moment; so only when asked for.

    Raises UnsupportedProcessorError, and ValueError if there is no thread.
    """
    from shardline.kernels.cpu.backend import CpuBackend

    return CpuBackend(num_threads)


def cuda_backend(index: int) -> Backend:
    """A CUDA backend on that GPU. Imports cupy, so only when asked for.

    Raises DeviceUnavailableError.
    """
    found = cuda_device(index)
    from shardline.kernels.cuda.backend import CudaBackend
    from shardline.kernels.cuda.device import cubin_folder

    return CudaBackend(found.index, cubin_folder())
