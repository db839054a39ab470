"""What a backend can refuse.

    KernelsError
    └── UnsupportedProcessorError   this machine's processor lacks what the compiled code needs

They pickle.
"""

from __future__ import annotations


class KernelsError(Exception):
    """The root of this room's errors."""


class UnsupportedProcessorError(KernelsError):
    """The processor cannot run the backend; the message names what it lacks and what to do."""
