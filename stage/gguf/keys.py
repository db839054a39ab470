"""The keys of one family in a GGUF file: typed reads that note what was read, so that what was not can be refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shardline.stage.errors import shown

MAX_CONTEXT = 1 << 24
MAX_SIZE = 1 << 24


class UnsupportedError(Exception):
    """A field of the file and what is wrong with it; the reader adds the file."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


class Keys:
    """Reads raise UnsupportedError for a value that is not of the kind."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self._prefix}.{key}"

    def get(self, key: str) -> Any:
        """A value as it is; None if the file does not have it."""
        name = self.name(key)
        self._read.add(name)
        return self._metadata.get(name)

    def refuse(self, key: str, problem: str) -> UnsupportedError:
        """The error for a key's value."""
        return UnsupportedError(self.name(key), f"{shown(self.get(key))} {problem}")

    def size(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A count; a list with one a layer is taken when all its entries agree."""
        value = self._given(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UnsupportedError(self.name(key), f"{shown(value)} is not one integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(key, "is not a finite number above zero")
        return float(value)

    def optional_number(self, key: str, default: float = 0.0) -> float:
        """A finite number above zero; the default where the file has none or zero."""
        return default if self.get(key) in (None, 0) else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "is not a truth value")
        return value

    def only(self, key: str, allowed: Callable[[Any], bool], meaning: str) -> None:
        """Refuse the key unless it is absent or has a value that changes nothing."""
        value = self.get(key)
        if value is not None and not allowed(value):
            raise UnsupportedError(self.name(key), f"{shown(value)}: {meaning} is not supported")

    def refuse_unread(self) -> None:
        """Raise for a key of the family that nobody asked for."""
        for name, value in self._metadata.items():
            if name.startswith(self._prefix + ".") and name not in self._read:
                raise UnsupportedError(
                    shown(name), f"{shown(value)}: the key is unknown here and may change what the model computes"
                )

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedError(self.name(key), "the key is missing")
        return value
