"""What the scheduler refuses.

    SchedulerError
    ├── InvalidParameterError   a sampling parameter or a request's field is out of range (also a ValueError)
    ├── RequestTooLargeError    the request could never run here, with the numbers
    └── QueueFullError          too many requests wait already

All of them pickle: they cross process borders on their way to a client.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """The root of this room's errors."""


class InvalidParameterError(SchedulerError, ValueError):
    """A parameter is out of range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field = field
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} is not allowed: give {self.allowed}"


class RequestTooLargeError(SchedulerError):
    """The request could never run here: its message has the numbers and the remedy."""


class QueueFullError(SchedulerError):
    """Too many requests wait already."""
