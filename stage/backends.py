"""From a stage's share to the backend that computes it."""

from __future__ import annotations

from shardline.kernels import Backend, cpu_backend, cuda_backend
from shardline.stage.spec import StageSpec


def backend_for(spec: StageSpec) -> Backend:
    """The backend of the stage's device.

    Raises:
        KernelsError: this machine cannot run it; says what is missing.
    """
    kind, _, index = spec.device.partition(":")
    if kind == "cuda":
        return cuda_backend(int(index), memory_limit=spec.memory_bytes)
    assert spec.device == "cpu", spec.device
    return cpu_backend(spec.num_threads)
