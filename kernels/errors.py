"""What a backend can refuse.

    KernelsError
    ├── UnsupportedProcessorError   this machine's processor lacks what the compiled code needs
    ├── DeviceUnavailableError      a GPU is asked for and cannot be used; what is missing
    ├── DeviceMemoryError           a GPU, or a limit set for it, has no room; the numbers and what to change
    └── UnsupportedOperationError   a model needs what this kind of backend does not compute

They pickle.
"""

from __future__ import annotations


class KernelsError(Exception):
    """The root of this room's errors."""


class UnsupportedProcessorError(KernelsError):
    """The processor cannot run the backend; the message names what it lacks and what to do."""


class DeviceUnavailableError(KernelsError):
    """A GPU is asked for and cannot be used; the message names what is missing and what to do."""


class DeviceMemoryError(KernelsError):
    """A GPU, or the limit that was set for a stage on it, has no room for what is wanted."""

    def __init__(
        self,
        device: int,
        wanted: int,
        held: int,
        limit: int | None,
        context: int,
        free: int,
        total: int,
        running: bool,
    ) -> None:
        """
        Args:
            device: The GPU.
            wanted: Bytes that were asked for.
            held: Bytes that the backend holds.
            limit: Bytes that it may take, `context` of them for CUDA itself; None: no limit was set.
            context: See `limit`.
            free, total: Bytes of the device.
            running: It happened in a step, not while loading.
        """
        super().__init__(device, wanted, held, limit, context, free, total, running)
        self.device = device
        self.wanted = wanted
        self.held = held
        self.limit = limit
        self.context = context
        self.free = free
        self.total = total
        self.running = running

    def __str__(self) -> str:
        when = "in a step" if self.running else "while its stage was being loaded"
        fewer = "give this GPU fewer layers (--split), or lower --context, --concurrency or --max-step-tokens"
        if self.limit is None:
            return (
                f"GPU {self.device} has no room for {_mib(self.wanted)} more {when}: the stage holds "
                f"{_mib(self.held)}, and {_mib(self.free)} of the GPU's {_mib(self.total)} are free. End others "
                f"that use it (nvidia-smi lists them), {fewer}"
            )
        if self.limit <= self.context:
            return (
                f"a memory limit of {_mib(self.limit)} for GPU {self.device} leaves nothing: CUDA itself takes up to "
                f"{_mib(self.context)} of it. Raise the limit, or leave this GPU out"
            )
        return (
            f"the memory limit of GPU {self.device} has no room for {_mib(self.wanted)} more {when}: the stage holds "
            f"{_mib(self.held)} of the {_mib(self.limit - self.context)} that it may ({_mib(self.limit)}, of which "
            f"{_mib(self.context)} are CUDA's own). Raise the limit, {fewer}"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


class UnsupportedOperationError(KernelsError):
    """A model needs an operation that this backend does not have."""

    def __init__(self, operation: str, backend: str) -> None:
        super().__init__(operation, backend)
        self.operation = operation
        self.backend = backend

    def __str__(self) -> str:
        return f"this model needs {self.operation}, which the {self.backend} backend does not compute"
