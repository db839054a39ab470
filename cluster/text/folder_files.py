"""Reading the files of a Hugging Face folder: bounded, and checked field by field."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shardline.cluster.errors import TokenizerError

_T = TypeVar("_T")

_LARGEST_NUMBER = 1e30
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def read_bytes(path: Path, limit: int) -> bytes | None:
    """A file's bytes; None if there is no such file.

    Raises TokenizerError, which names the file, when it is larger than `limit` bytes, no regular file or unreadable.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(str(path), f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise TokenizerError(str(path), "is no file")
    if status.st_size <= limit:
        try:
            with path.open("rb") as file:
                content = file.read(limit + 1)
        except OSError as error:
            raise TokenizerError(str(path), f"cannot be read: {error.strerror}") from error
        if len(content) <= limit:
            return content
    raise TokenizerError(
        str(path),
        f"has more than {limit >> 20} MiB, which no file of its kind needs: it is damaged, or not such a file",
    )


def read_text(path: Path, limit: int) -> str | None:
    """A UTF-8 file's text; None if there is no such file. Raises as `read_bytes` does, and where it is no UTF-8."""
    content = read_bytes(path, limit)
    if content is None:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(str(path), f"is no UTF-8 text: byte {error.start} is wrong") from error


def read_json(path: Path, limit: int) -> JsonObject | None:
    """A JSON file that holds an object; None if there is no such file. Raises as `read_text` and `parse_json` do."""
    text = read_text(path, limit)
    return None if text is None else parse_json(path, text)


def parse_json(path: Path, text: str) -> JsonObject:
    """A JSON text that holds an object. Raises TokenizerError, which names `path`, when it does not."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TokenizerError(
            str(path), f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:
        raise TokenizerError(str(path), f"is no JSON: {error}") from error
    except RecursionError as error:
        raise TokenizerError(str(path), "is nested too deeply") from error
    if not isinstance(value, dict):
        raise TokenizerError(str(path), f"is {brief(value)}, not an object")
    return JsonObject(path, "", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of a JSON file, with checked access.

    A value of a wrong type gives a TokenizerError that names the file, the field and the value. A field that is missing
    and one that is null are the same.

    Attributes:
        path: The file.
        field: Where in it the object is, such as "model.vocab"; empty at the top.
        entries: What it holds.
    """

    path: Path
    field: str
    entries: Mapping[str, Any]

    def error(self, key: str, problem: str) -> TokenizerError:
        """An error that names a field of this object; `key` may go deeper, such as "merges[3]"."""
        return TokenizerError(f"{self.path}: {self._name(key)}", problem)

    def text(self, key: str) -> str | None:
        value = self._typed(key, str, "a text")
        if value is not None and not value.isascii() and _HALF_PAIR.search(value):
            raise self.error(key, "holds half a surrogate pair, which is no character")
        return value

    def flag(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def integer(self, key: str) -> int | None:
        value = self._typed(key, int, "an integer")
        if isinstance(value, bool):
            raise self.error(key, f"is {brief(value)}, not an integer")
        return value

    def number(self, key: str) -> float | None:
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < _LARGEST_NUMBER:
            return float(value)
        raise self.error(key, f"is {brief(value)}, not a number")

    def array(self, key: str) -> list[Any] | None:
        return self._typed(key, list, "a list")

    def object(self, key: str) -> JsonObject | None:
        value = self._typed(key, dict, "an object")
        return None if value is None else JsonObject(self.path, self._name(key), value)

    def objects(self, key: str) -> list[JsonObject] | None:
        """A list of objects."""
        values = self.array(key)
        if values is None:
            return None
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{key}[{index}]", f"is {brief(value)}, not an object")
        return [JsonObject(self.path, self._name(f"{key}[{index}]"), value) for index, value in enumerate(values)]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none if it is missing."""
        value = self.entries.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.error(key, f"is {brief(value)}, not a token id or a list of them")
        return tuple(ids)

    def _typed(self, key: str, kind: type[_T], what: str) -> _T | None:
        value = self.entries.get(key)
        if value is None:
            return None
        if not isinstance(value, kind):
            raise self.error(key, f"is {brief(value)}, not {what}")
        return value

    def _name(self, key: str) -> str:
        return f"{self.field}.{key}" if self.field else key


def brief(value: object) -> str:
    """A value for an error's text: never long, whatever it is."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    text = ascii(value[:60]) if isinstance(value, str) else _number(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return "a huge number"
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else repr(value)
