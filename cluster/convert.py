"""From any model that opens to a folder of per-layer shards that loads at disk speed."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline._version import __version__
from shardline.cluster.errors import ConvertError
from shardline.cluster.hub import TEXT_FILES
from shardline.cluster.models import Progress, resolve
from shardline.scheduler import InvalidParameterError
from shardline.stage import Checkpoint, open_checkpoint
from shardline.stage.huggingface.checkpoint import HuggingFaceCheckpoint
from shardline.stage.resident.checkpoint import ResidentCheckpoint, hash_file
from shardline.stage.resident.layout import MANIFEST, METADATA, file_name
from shardline.stage.resident.manifest import FileRecord, Manifest, Shard, encode
from shardline.stage.resident.writer import shard_bytes, write_shard

GROUP_SIZES = (16, 32, 64, 128)

# The largest vocabulary with its merges takes about 35 MB.
_LARGEST_TEXT = 1 << 28
_SPARE = 1 << 24


@dataclass(frozen=True, slots=True)
class Written:
    """Called for after each file of a conversion.

    Attributes:
        name: The file's.
        nbytes: Its size.
        done, files: How many files are written, of how many.
    """

    name: str
    nbytes: int
    done: int
    files: int


def convert(
    model: str | os.PathLike[str],
    out: Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    progress: Progress | None = None,
    written: Callable[[Written], None] | None = None,
) -> int:
    """Write a model as a folder in the resident format. Returns its size in bytes.

    The folder appears at `out` when all of it is on the disk, and not before: an interrupted conversion leaves nothing
    there, and one that was killed leaves a hidden folder beside it that the next one to the same place removes.

    Args:
        model: A path or a name, as `resolve` takes it.
        out: The folder to make; its parent must exist.
        bits: Of the layers' matrices where the model's weights are floats: 4 or 8; None: 4.
        group_size: Input channels that share a scale there: 16, 32, 64 or 128; None: 32.
        progress: Called with lines about what takes long before the first file.
        written: Called after each file.

    Raises:
        ConvertError: There is something at `out` already, there is no room, a file cannot be written, or `bits` and
            `group_size` are given for a model that is quantized already.
        InvalidParameterError: `bits` or `group_size` is of no kind that there is.
        ModelNotFoundError, CheckpointError: The model cannot be had or used.
    """
    if bits not in (None, 4, 8):
        raise InvalidParameterError("bits", bits, "4 or 8")
    if group_size not in (None, *GROUP_SIZES):
        raise InvalidParameterError("group_size", group_size, ", ".join(map(str, GROUP_SIZES)))
    if os.path.lexists(out):
        raise ConvertError(f"{out} is there already, and is not overwritten: remove it, or name another folder")
    if not out.absolute().parent.is_dir():
        raise ConvertError(f"{out.absolute().parent} is no folder: make it first, or name another place")
    path = resolve(model, progress=progress)
    checkpoint = _open(path, bits, group_size)
    try:
        with _folder_beside(out) as folder:
            _convert(checkpoint, path, folder, written or (lambda _: None))
            _publish(folder, out)
    except OSError as error:
        raise ConvertError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        checkpoint.close()
    return sum(each.stat().st_size for each in out.rglob("*") if each.is_file())


def _open(path: Path, bits: int | None, group_size: int | None) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    try:
        if isinstance(checkpoint, ResidentCheckpoint):
            raise ConvertError(f"{path} is such a folder already")
        if bits is None and group_size is None:
            return checkpoint
        if not isinstance(checkpoint, HuggingFaceCheckpoint) or checkpoint.is_quantized:
            raise ConvertError(
                f"{path} holds weights that are quantized already, and are kept as they are: leave out --bits and "
                "--group-size, which are for folders of floats"
            )
    except BaseException:
        checkpoint.close()
        raise
    checkpoint.close()
    return HuggingFaceCheckpoint(path, bits or 4, group_size or 32)


def _convert(checkpoint: Checkpoint, source: Path, folder: Path, written: Callable[[Written], None]) -> None:
    layers = (None, *range(checkpoint.spec.num_layers))
    needed = sum(shard_bytes(checkpoint, layer) for layer in layers) + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConvertError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, but the folder takes about {needed / 1e9:.1f} GB: make "
            "room, or name a place on another disk"
        )
    text = _write_text(checkpoint, folder)
    shards: dict[int | None, Shard] = {}
    for layer in layers:
        shards[layer] = write_shard(folder, checkpoint, layer)
        written(Written(file_name(layer), shards[layer].record.nbytes, len(shards), len(layers)))
    manifest = Manifest(f"shardline {__version__}", source.name[:200], checkpoint.spec, text, shards)
    _write(folder / MANIFEST, encode(manifest))
    # What a reader would refuse must not take the folder's name.
    ResidentCheckpoint(folder).close()


def _write_text(checkpoint: Checkpoint, folder: Path) -> dict[str, FileRecord]:
    """The tokenizer's files, or a GGUF file's metadata of the tokenizer and of sampling."""
    source = checkpoint.text_folder
    if source is None:
        _write(folder / METADATA, _metadata_json(checkpoint.metadata, checkpoint.path))
        return {METADATA: hash_file(folder / METADATA)}
    names = [name for name in TEXT_FILES if (source / name).is_file()]
    templates = sorted((source / "chat_templates").glob("*.jinja"))
    if templates:
        (folder / "chat_templates").mkdir()
        names += [f"chat_templates/{path.name}" for path in templates]
    for name in names:
        with (source / name).open("rb") as file:
            content = file.read(_LARGEST_TEXT + 1)
        if len(content) > _LARGEST_TEXT:
            raise ConvertError(f"{source / name} has more than {_LARGEST_TEXT >> 20} MiB: it is no tokenizer's file")
        _write(folder / name, content)
    return {name: hash_file(folder / name) for name in names}


def _metadata_json(metadata: Mapping[str, Any], path: Path) -> bytes:
    kept = {key: value for key, value in metadata.items() if key.startswith(("tokenizer.", "general.sampling."))}
    for key, value in kept.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConvertError(f"{path}: {key} has a number that is not finite: the file is damaged")
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, removed at the end if it is still there. It is locked while this process lives, so
    that those of processes that were killed can be told from others, and are removed first."""
    parent, prefix = out.absolute().parent, f".{out.name[:100]}.part-"
    for stale in parent.iterdir():
        if stale.name.startswith(prefix) and (descriptor := _locked(stale)) is not None:
            shutil.rmtree(stale, ignore_errors=True)
            os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    descriptor = _locked(folder)
    try:
        # As the user's umask has it, not for the user alone, as mkdtemp makes it.
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(folder: Path, out: Path) -> None:
    """Give the folder its name, if nothing has taken it in the meantime."""
    _sync(folder)
    if os.path.lexists(out):
        raise ConvertError(f"{out} was made by another process in the meantime, and is not overwritten")
    folder.rename(out)
    _sync(out.absolute().parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
