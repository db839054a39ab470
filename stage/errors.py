"""What can go wrong inside a stage.

    StageError
    ├── CheckpointError     a model file is damaged, unsupported or lacks something; names the file and the field
    └── PlanError           a plan names a sequence or block that this stage does not have, or comes out of order

All of them pickle: they cross process borders.
"""

from __future__ import annotations

from pathlib import Path


class StageError(Exception):
    """The root of this room's errors."""


class CheckpointError(StageError):
    """A model file cannot be used."""

    def __init__(self, path: Path | str, field: str, problem: str) -> None:
        super().__init__(str(path), field, problem)
        self.path = str(path)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.field}: {self.problem}"


class PlanError(StageError):
    """A plan does not fit what this stage knows: a fault of the engine, never of a user."""


def shown(text: object, most: int = 80) -> str:
    """Text of a file for an error message: quoted when it holds anything odd, cut when it is long."""
    raw = text if isinstance(text, str) else repr(text)
    if not raw.isprintable() or raw != raw.strip() or not raw:
        raw = repr(raw)
    return raw if len(raw) <= most else raw[: most - 3] + "..."
