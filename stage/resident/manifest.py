"""`shardline.json`: the model as data, how each matrix is stored, and a hash of every other file of the folder."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface.files import read_json
from shardline.stage.resident import layout
from shardline.stage.resident.layout import FORMAT, MANIFEST, Form
from shardline.stage.resident.spec_data import spec_from_data, spec_to_data
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes
from shardline.stage.spec import ModelSpec

MANIFEST_LIMIT = 32 << 20
"""Bytes; 100 layers of 256 experts that all differ in form take 8 MB."""

MAX_FILE = 1 << 50

_KEYS = ("format", "written_by", "source", "model", "text", "shards")
_HASH = re.compile(r"[0-9a-f]{64}")
# Of files with text, which may lie in one folder more. The first character keeps ".." and hidden files out.
_TEXT_NAME = re.compile(r"(chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and its SHA-256 in hex."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One layer's file, or that of the rest.

    Attributes:
        record: Of the file.
        forms: Of each matrix in it.
    """

    record: FileRecord
    forms: layout.Forms


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `shardline.json` says.

    Attributes:
        written_by, source: The version that wrote it, and the name of the file or folder it was made from; for people.
        spec: The model.
        text: Name -> record of each file of the tokenizer and the chat template.
        shards: By layer; None is that of the rest.
    """

    written_by: str
    source: str
    spec: ModelSpec
    text: Mapping[str, FileRecord]
    shards: Mapping[int | None, Shard]


def encode(manifest: Manifest) -> bytes:
    """The file's bytes."""
    data = {
        "format": FORMAT,
        "written_by": manifest.written_by,
        "source": manifest.source,
        "model": spec_to_data(manifest.spec),
        "text": {name: _record_data(record) for name, record in manifest.text.items()},
        "shards": {
            layout.file_name(layer): {
                **_record_data(shard.record),
                "matrices": {role: [dataclasses.asdict(form) for form in forms] for role, forms in shard.forms.items()},
            }
            for layer, shard in manifest.shards.items()
        },
    }
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> tuple[Manifest, bytes]:
    """Read and check a folder's `shardline.json`: what it says, and its bytes. Raises CheckpointError."""
    path = folder / MANIFEST
    values, raw = read_json(path, MANIFEST_LIMIT)
    # Before all else: another format may have other keys.
    if values.get("format") != FORMAT or isinstance(values["format"], bool):
        raise CheckpointError(
            path, "format", f"{shown(values.get('format'))} is not {FORMAT}: convert the model again with this version"
        )
    _check_keys(path, "file", values, _KEYS)
    spec = spec_from_data(path, values["model"], "model")
    text = _object(path, "text", values["text"])
    for name in text:
        if not _TEXT_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(path, "text", f"{shown(name)} is not the name of a file of text here")
    shards = _object(path, "shards", values["shards"])
    files = layout.file_names(spec)
    _check_keys(path, "shards", shards, tuple(files))
    manifest = Manifest(
        _text(path, "written_by", values["written_by"]),
        _text(path, "source", values["source"]),
        spec,
        {name: _record(path, f"text.{shown(name)}", entry) for name, entry in text.items()},
        {layer: _shard(path, f"shards.{name}", shards[name], spec, layer) for name, layer in files.items()},
    )
    return manifest, raw


def _shard(path: Path, field: str, entry: Any, spec: ModelSpec, layer: int | None) -> Shard:
    entry = dict(_object(path, field, entry))
    matrices = _object(path, f"{field}.matrices", entry.pop("matrices", None))
    shapes = matrix_shapes(spec, layer)
    _check_keys(path, f"{field}.matrices", matrices, tuple(shapes))
    forms = {}
    for role, (_, inputs) in shapes.items():
        where = f"{field}.matrices.{role}"
        entries = matrices[role]
        counts = {1, spec.experts.num_experts} if spec.experts and role in EXPERT_ROLES else {1}
        if not isinstance(entries, list) or len(entries) not in counts:
            raise CheckpointError(path, where, f"{shown(entries)} is not a list of {' or '.join(map(str, counts))}")
        forms[role] = tuple(_form(path, f"{where}[{index}]", form, inputs) for index, form in enumerate(entries))
    return Shard(_record(path, field, entry), forms)


def _form(path: Path, field: str, entry: Any, inputs: int) -> Form:
    entry = _object(path, field, entry)
    _check_keys(path, field, entry, tuple(name.name for name in dataclasses.fields(Form)))
    types: dict[str, type] = {"bits": int, "group_size": int, "scale": str, "ordered": bool}
    for name, kind in types.items():
        if type(entry[name]) is not kind:
            raise CheckpointError(path, f"{field}.{name}", f"{shown(entry[name])} is of the wrong type")
    form = Form(**entry)
    problem = form.problem(inputs)
    if problem is not None:
        raise CheckpointError(path, field, shown(problem, 200))
    return form


def _record(path: Path, field: str, entry: Any) -> FileRecord:
    entry = _object(path, field, entry)
    _check_keys(path, field, entry, ("bytes", "sha256"))
    nbytes, sha256 = entry["bytes"], entry["sha256"]
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes <= MAX_FILE:
        raise CheckpointError(path, f"{field}.bytes", f"{shown(nbytes)} is not a file's size")
    if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
        raise CheckpointError(path, f"{field}.sha256", f"{shown(sha256)} is not 64 hexadecimal digits")
    return FileRecord(nbytes, sha256)


def _record_data(record: FileRecord) -> dict[str, Any]:
    return {"bytes": record.nbytes, "sha256": record.sha256}


def _object(path: Path, field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(path, field, f"{shown(value)} is not an object")
    return value


def _text(path: Path, field: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise CheckpointError(path, field, f"{shown(value)} is not a short text")
    return value


def _check_keys(path: Path, field: str, values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in values:
            raise CheckpointError(path, f"{field}.{name}", "is missing")
    if len(values) > len(names):
        known = set(names)
        raise CheckpointError(
            path, f"{field}.{shown(next(name for name in values if name not in known))}", "is unknown"
        )
