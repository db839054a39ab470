"""A folder's safetensors files: which tensor lies in which, and their bytes.

Opening reads the index, or the header of the one file that there is. With an index a shard is opened when a tensor of
it is first asked for, so that a stage touches only those with its own layers; it must then hold the tensors that the
index places in it, and no other.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface.files import open_file, read_exactly, read_json
from shardline.stage.huggingface.header import HEADER_LIMIT, MAX_NAME, Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Formats that run code when they are loaded.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Bytes from the middle of each tensor that the folder's fingerprint depends on.
_SAMPLE = 1 << 10


class Folder:
    """The tensors of one folder, by name.

    Attributes:
        path: The folder.
        shards: Tensor -> the name of the file that holds it.
    """

    path: Path
    shards: Mapping[str, str]

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError: there are no safetensors files, or what says which there are is damaged."""
        self.path = path
        self._open: dict[str, tuple[int, Header]] = {}
        self._closed = False
        self._index = b""
        if _exists(path / INDEX):
            self.shards = self._read_index()
        elif _exists(path / SINGLE):
            descriptor, header = self._open_shard(SINGLE)
            self._open[SINGLE] = descriptor, header
            self.shards = dict.fromkeys(header.tensors, SINGLE)
        else:
            raise self._without_weights()
        self._counts = Counter(self.shards.values())

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies; opens its file. The name is one of `shards`. Raises CheckpointError."""
        return self._shard(self.shards[name])[1].tensors[name]

    def read(self, name: str, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Some bytes of a tensor, counted from its first. Raises CheckpointError."""
        shard = self.shards[name]
        descriptor, header = self._shard(shard)
        info = header.tensors[name]
        assert 0 <= start <= start + nbytes <= info.nbytes, (start, nbytes, info.nbytes)
        out = np.empty(nbytes, np.uint8)
        read_exactly(self.path / shard, descriptor, out.data, info.offset + start, f"tensor {shown(name)}")
        return out

    def digest(self) -> bytes:
        """SHA-256 of the index, and of every file's header, size and a kilobyte from the middle of each tensor.

        So it costs a read a tensor, whatever the folder's size, and is the same for every copy of the files: dates and
        paths are no part of it. It does not see what changes outside the samples: damage in a part of a tensor, or an
        edit of some rows. Another training, shard or precision it sees.
        """
        digest = hashlib.sha256(self._index)
        for shard in sorted(self._counts):
            header = self._shard(shard)[1]
            digest.update(header.digest)
            for info in header.tensors.values():
                count = min(_SAMPLE, info.nbytes)
                digest.update(self.read(info.name, (info.nbytes - count) // 2, count).data)
        return digest.digest()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._closed = True
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _shard(self, shard: str) -> tuple[int, Header]:
        found = self._open.get(shard)
        if found is None:
            if self._closed:
                raise CheckpointError(self.path / shard, "file", "is closed")
            found = self._open_shard(shard)
            try:
                self._check_against_index(shard, found[1])
            except BaseException:
                os.close(found[0])
                raise
            self._open[shard] = found
        return found

    def _open_shard(self, shard: str) -> tuple[int, Header]:
        descriptor, size = open_file(self.path / shard)
        try:
            return descriptor, read_header(self.path / shard, descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def _check_against_index(self, shard: str, header: Header) -> None:
        for name in header.tensors:
            place = self.shards.get(name)
            if place != shard:
                where = "has not" if place is None else f"places in {place}"
                raise CheckpointError(
                    self.path / shard, f"tensor {shown(name)}", f"is in this file, but {INDEX} {where}"
                )
        if len(header.tensors) < self._counts[shard]:
            missing = next(name for name, place in self.shards.items() if place == shard and name not in header.tensors)
            raise CheckpointError(
                self.path / shard, f"tensor {shown(missing)}", f"is missing, but {INDEX} places it in this file"
            )

    def _read_index(self) -> dict[str, str]:
        path = self.path / INDEX
        entries, self._index = read_json(path, HEADER_LIMIT)
        weight_map: Any = entries.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(path, "weight_map", f"{shown(weight_map)} is not a map of tensors to files")
        shards: set[str] = set()
        for name, shard in weight_map.items():
            if not 0 < len(name) <= MAX_NAME:
                raise CheckpointError(path, "weight_map", f"the name {shown(name)} is empty or very long")
            if not isinstance(shard, str) or (shard not in shards and not _is_plain_name(shard)):
                raise CheckpointError(
                    path, f"weight_map: {shown(name)}", f"{shown(shard)} is not the name of a .safetensors file here"
                )
            shards.add(shard)
        if SINGLE not in shards and _exists(self.path / SINGLE):
            raise CheckpointError(
                self.path, "file", f"has both {SINGLE} and {INDEX}, which does not name it: remove the one that is old"
            )
        return weight_map

    def _without_weights(self) -> CheckpointError:
        try:
            names = sorted(os.listdir(self.path))
        except OSError as error:
            return CheckpointError(self.path, "folder", f"cannot be read: {error.strerror}")
        pickles = [name for name in names if name.endswith(_PICKLES)]
        others = [name for name in names if name.endswith(".safetensors")]
        problem = f"there is neither {SINGLE} nor {INDEX}"
        if others:
            problem += f"; what {shown(', '.join(others))} holds is not said"
        elif pickles:
            problem += (
                f"; {shown(', '.join(pickles))} can run code when loaded, and is not read: "
                "have the model saved as safetensors"
            )
        return CheckpointError(self.path, "weights", problem)


def _exists(path: Path) -> bool:
    """Whether there is something of that name, be it a link that leads nowhere: opening it says so."""
    return os.path.lexists(path)


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and len(name) <= 255
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )
