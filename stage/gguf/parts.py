"""A model in one GGUF file, or in several parts NAME-00001-of-0000N.gguf that any one of them stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.gguf.file import GgufFile
from shardline.stage.gguf.header import TensorInfo

MAX_PARTS = 4096

_OF_ONE_PART = ("split.no", "general.alignment")

_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


class GgufParts:
    """The files of a model as one.

    Attributes:
        files: The parts in order.
        metadata: The first part's keys, and what the others say besides.
        tensors: Of all parts, by name.

    Raises:
        CheckpointError: a part is missing or damaged, or they are not parts of one model; names the file.
    """

    def __init__(self, path: Path) -> None:
        self._opened: list[GgufFile] = []
        try:
            given = self._open(path)
            count = _count(given)
            self.files = [given] if count == 1 else self._all(given, count)
            self.metadata = self._joined_metadata()
            self.tensors, self._places = self._joined_tensors()
        except BaseException:
            self.close()
            raise

    def file_of(self, info: TensorInfo) -> GgufFile:
        """The part that has the tensor."""
        return self._places[info.name]

    def close(self) -> None:
        """Close every file. Idempotent."""
        for file in self._opened:
            file.close()

    def _open(self, path: Path) -> GgufFile:
        self._opened.append(GgufFile(path))
        return self._opened[-1]

    def _all(self, given: GgufFile, count: int) -> list[GgufFile]:
        name = _PART_NAME.fullmatch(given.path.name)
        own = 0 if name is None else int(name[2])
        if name is None or int(name[3]) != count or not 1 <= own <= count:
            raise CheckpointError(
                given.path,
                "split.count",
                f"the file is one of {count} parts, and they are found by their names NAME-00001-of-{count:05}.gguf: "
                f"call them so, or merge them first (llama-gguf-split --merge)",
            )
        files = []
        for number in range(1, count + 1):
            path = given.path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf")
            files.append(given if number == own else self._open(path))
        for number, file in enumerate(files):
            if _count(file) != count:
                raise CheckpointError(file.path, "split.count", f"{_count(file)}, but {given.path.name} says {count}")
            said = file.header.metadata.get("split.no")
            if isinstance(said, bool) or said != number:
                raise CheckpointError(
                    file.path, "split.no", f"{shown(said)}, but by its name it is {number} (of 0 to {count - 1})"
                )
        return files

    def _joined_metadata(self) -> Mapping[str, Any]:
        first = self.files[0].header.metadata
        if len(self.files) == 1:
            return first
        joined = dict(first)
        for file in self.files[1:]:
            for key, value in file.header.metadata.items():
                if key not in _OF_ONE_PART and joined.setdefault(key, value) != value:
                    raise CheckpointError(
                        file.path,
                        shown(key),
                        f"{shown(value)}, but {shown(joined[key])} in {self.files[0].path.name}: parts of other models",
                    )
        return joined

    def _joined_tensors(self) -> tuple[Mapping[str, TensorInfo], Mapping[str, GgufFile]]:
        tensors: dict[str, TensorInfo] = {}
        places: dict[str, GgufFile] = {}
        for file in self.files:
            for name, info in file.header.tensors.items():
                if name in tensors:
                    raise CheckpointError(file.path, f"tensor {shown(name)}", f"is in {places[name].path.name} too")
                tensors[name], places[name] = info, file
        if len(self.files) > 1:
            said = self.metadata.get("split.tensors.count")
            if isinstance(said, bool) or said != len(tensors):
                raise CheckpointError(
                    self.files[0].path,
                    "split.tensors.count",
                    f"{shown(said)}, but the parts have {len(tensors)} tensors",
                )
        return tensors, places


def _count(file: GgufFile) -> int:
    """How many parts the file says that there are."""
    count = file.header.metadata.get("split.count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
        raise CheckpointError(file.path, "split.count", f"{shown(count)} is not an integer from 0 to {MAX_PARTS}")
    return max(1, count)
