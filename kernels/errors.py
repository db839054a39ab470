"""What a backend can refuse.

    KernelsError
    ├── UnsupportedProcessorError   this machine's processor lacks what the compiled code needs
    ├── DeviceUnavailableError      a GPU is asked for and cannot be used; what is missing
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


class UnsupportedOperationError(KernelsError):
    """A model needs an operation that this backend does not have."""

    def __init__(self, operation: str, backend: str) -> None:
        super().__init__(operation, backend)
        self.operation = operation
        self.backend = backend

    def __str__(self) -> str:
        return f"this model needs {self.operation}, which the {self.backend} backend does not compute"
