"""What the CUDA backend refuses.

CudaError
├── DeviceTooOldError     the GPU is older than sm_80
└── KernelCompileError    NVRTC refused a source; carries the compiler's log
"""

from __future__ import annotations


class CudaError(Exception):
    """The root of this folder's errors."""


class DeviceTooOldError(CudaError):
    """The GPU is older than the kernels need; the message says what to do."""


class KernelCompileError(CudaError):
    """NVRTC refused a source: a fault of ours, or an arch that it does not know. Carries the compiler's log."""
