"""What a user of the engine can meet.

    ShardlineError
    ├── ModelNotFoundError   no such model, and how to get one
    ├── ConvertError         a converted model cannot be written there, or not like that
    ├── TokenizerError       the model file's vocabulary is damaged or not supported; names the field
    ├── PlanningError        the model does not fit the devices, with the numbers
    ├── TemplateError        the model's chat template refuses the messages (also a ValueError)
    ├── StageLostError       a stage died, hung or reported a device error; the engine recovers from it
    ├── DeadlyRequestError   a stage was lost each time that this request ran; the engine goes on without it
    ├── TransportError       a peer of the data plane broke the protocol
    ├── EngineDeadError      the retry budget is spent; carries the dead worker's own last words
    ├── EngineNotFoundError  no engine runs at that address
    └── LeaseExpiredError    the engine had not heard of a client for too long and ended its requests

All of them pickle.
"""

from __future__ import annotations


class ShardlineError(Exception):
    """The root of this room's errors."""


class ModelNotFoundError(ShardlineError):
    """No such model file; the message says how to get one."""


class ConvertError(ShardlineError):
    """A model cannot be converted to that place or in that form; the message has the remedy."""


class TokenizerError(ShardlineError):
    """The model file's vocabulary cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class PlanningError(ShardlineError):
    """The model does not fit the devices; the message has the numbers."""


class TemplateError(ShardlineError, ValueError):
    """The model's chat template refuses these messages, in its own words."""


class StageLostError(ShardlineError):
    """A stage died, hung or reported a device error.

    Attributes:
        stage: Its index; None when only the engine's side of a connection broke.
        reason: What is known, the worker's own last words included.
    """

    def __init__(self, stage: int | None, reason: str) -> None:
        super().__init__(stage, reason)
        self.stage = stage
        self.reason = reason

    def __str__(self) -> str:
        where = "a stage" if self.stage is None else f"stage {self.stage}"
        return f"{where} was lost: {self.reason}"


class DeadlyRequestError(ShardlineError):
    """A stage was lost each time that this request ran, at last when nothing else did; the message has the stage's last
    words. The engine goes on without it."""


class TransportError(ShardlineError):
    """A peer of the data plane broke the protocol."""


class EngineDeadError(ShardlineError):
    """The engine cannot go on; the message has the last worker's own words."""


class EngineNotFoundError(ShardlineError):
    """No engine runs at that address; the message says how to start one."""


class LeaseExpiredError(ShardlineError):
    """The engine had not heard of this client for too long and ended its requests; the message says how long."""
