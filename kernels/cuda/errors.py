"""What the CUDA backend refuses.

CudaError
├── KernelCompileError    NVRTC refused a source; carries the compiler's log
└── LaunchError           the driver refused a launch
"""

from __future__ import annotations

from shardline.kernels.errors import KernelsError


class CudaError(KernelsError):
    """The root of this folder's errors."""


class KernelCompileError(CudaError):
    """NVRTC refused a source: a fault of ours, or an arch that it does not know. Carries the compiler's log."""


class LaunchError(CudaError):
    """The driver refused a launch, or an earlier one failed on the device; carries the driver's code."""
