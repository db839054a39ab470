"""What GPUs there are, without importing cupy before one is asked for."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.kernels.errors import DeviceUnavailableError

OLDEST_ARCH = 80


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU that the kernels run on.

    Attributes:
        index: As CUDA counts them for this process.
        name: The driver's.
        arch: 86 for sm_86.
        free_bytes, total_bytes: Of its memory.
        bytes_per_second: Of its memory, from its clock and width; what a stream of weights can reach at best.
        processors: Multiprocessors.
        bus_id: Its PCI address, "0000:65:00.0": the same in every process of the host, whatever that process sees.
        clock_hertz: Of its multiprocessors, the highest; 0 where the driver does not tell.
    """

    index: int
    name: str
    arch: int
    free_bytes: int
    total_bytes: int
    bytes_per_second: float
    processors: int
    bus_id: str = ""
    clock_hertz: float = 0.0

    @property
    def numeric_class(self) -> str:
        """See `class_of`."""
        return class_of(self.arch)


def class_of(arch: int) -> str:
    """GPUs of one class give the same bits: a tensor core adds 8 products at a time before sm_90, then 16."""
    return "cuda 8" if arch < 90 else "cuda 16"


def cuda_devices() -> tuple[list[CudaDevice], list[str]]:
    """Every GPU that this process sees and the kernels run on, and why they do not on each of the others.

    Raises:
        DeviceUnavailableError: there is none; what is missing, or what they lack.
    """
    found: list[CudaDevice] = []
    refused: list[str] = []
    for index in range(_device_count()):
        try:
            found.append(cuda_device(index))
        except DeviceUnavailableError as error:
            refused.append(str(error))
    if refused and not found:
        raise DeviceUnavailableError("; ".join(refused))
    if not found:
        raise DeviceUnavailableError(
            "no GPU can be used: this process sees none; nvidia-smi should list one, CUDA_VISIBLE_DEVICES allow it"
        )
    return found, refused


def cuda_bus_id(index: int) -> str:
    """A GPU's PCI address, without a context on it. Raises DeviceUnavailableError."""
    count = _device_count()
    if not 0 <= index < count:
        raise DeviceUnavailableError(f"there is no GPU {index}: this process sees {count}, counted from 0")
    return str(_runtime().deviceGetPCIBusId(index)).lower()


def cuda_free_bytes(index: int) -> int:
    """What is free on a GPU now, for all processes together. Leaves a context there only where NVML does not answer."""
    total = int(_runtime().getDeviceProperties(index)["totalGlobalMem"])
    return (nvml_memory(cuda_bus_id(index), total) or _mem_info(index))[0]


def cuda_device(index: int) -> CudaDevice:
    """Look at a GPU. Leaves this process's context on it only where NVML does not answer.

    Raises:
        DeviceUnavailableError: cupy, a driver or the GPU is missing, or it is older than sm_80.
    """
    count, runtime = _device_count(), _runtime()
    from shardline.kernels.cuda.cupy_import import cupy

    if not 0 <= index < count:
        raise DeviceUnavailableError(f"there is no GPU {index}: this process sees {count}, counted from 0")
    facts = runtime.getDeviceProperties(index)
    arch = facts["major"] * 10 + facts["minor"]
    if arch < OLDEST_ARCH:
        raise DeviceUnavailableError(
            f"GPU {index} is sm_{arch}, and the kernels need sm_{OLDEST_ARCH} (Ampere) or newer: leave this card out, "
            "or use the CPU"
        )
    address, total = cuda_bus_id(index), int(facts["totalGlobalMem"])
    free, total = nvml_memory(address, total) or _mem_info(index)
    # The device is not entered: that makes a context, some hundreds of MiB that then count as taken.
    attributes = cupy.cuda.Device(index).attributes
    # kHz, two transfers a clock, bits.
    rate = 2e3 * attributes["MemoryClockRate"] * attributes["GlobalMemoryBusWidth"] / 8
    return CudaDevice(
        index,
        facts["name"].decode(),
        arch,
        free,
        total,
        float(rate),
        facts["multiProcessorCount"],
        address,
        1e3 * attributes.get("ClockRate", 0),
    )


def nvml_memory(address: str, total: int) -> tuple[int, int] | None:
    """(free, total) bytes of the GPU with that PCI address, from the library behind nvidia-smi, which needs no context.

    None where it does not answer, or speaks of something else than CUDA, whose total is given: a slice of the card.
    """
    memory = _NvmlMemory()
    device = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            failed = library.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(device))
            failed = failed or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    # NVML's total has some hundreds of MiB that the driver keeps for itself.
    if failed or abs(memory.total - total) > total // 8:
        return None
    return int(memory.free), int(memory.total)


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _mem_info(index: int) -> tuple[int, int]:
    from shardline.kernels.cuda.cupy_import import cupy

    with cupy.cuda.Device(index) as device:
        free, total = device.mem_info
    return int(free), int(total)


def _device_count() -> int:
    runtime = _runtime()
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise DeviceUnavailableError(f"no GPU can be used: {error}; nvidia-smi should list one") from None


def _runtime() -> Any:
    try:
        from shardline.kernels.cuda.cupy_import import cupy
    except ImportError as error:
        raise DeviceUnavailableError(
            f"the CUDA backend needs cupy ({error}): pip install 'shardline[cuda12]', or [cuda13] for a CUDA 13 driver"
        ) from None
    return cupy.cuda.runtime


def cubin_folder() -> Path:
    """Where compiled kernels are kept: $SHARDLINE_CACHE, else shardline/ under $XDG_CACHE_HOME or ~/.cache."""
    chosen = os.environ.get("SHARDLINE_CACHE")
    if chosen:
        return Path(chosen) / "cubin"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardline" / "cubin"
