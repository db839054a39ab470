"""Models of the Hugging Face hub by name: `hf:owner/name`, or `hf:owner/name@revision`.

Downloads go through huggingface-hub, to its own cache ($HF_HOME), with its own settings ($HF_ENDPOINT, $HF_TOKEN,
$HF_HUB_OFFLINE). Only JSON files, chat templates, a `tokenizer.model` and the safetensors files that the model's index
names are fetched, never code or pickles. A file that is whole stays; one whose connection breaks is gone on with.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.cluster.errors import ModelNotFoundError
from shardline.cluster.models import Progress, cache_folder
from shardline.stage.huggingface.folder import INDEX, SINGLE
from shardline.stage.huggingface.needed import needed_files, weight_files

PREFIX = "hf:"

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a folder's tokenizer, chat template and advice for sampling are read from, with chat_templates/*.jinja."""

_SMALL = (*TEXT_FILES, "chat_templates/*.jinja", INDEX)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a repository: the same bytes on every node.

    Attributes:
        repo: "owner/name".
        commit: Its full hash.
    """

    repo: str
    commit: str

    @property
    def name(self) -> str:
        """As a user would write it."""
        return f"{PREFIX}{self.repo}@{self.commit}"

    @property
    def fingerprint(self) -> str:
        """Short, and another for another commit, whose hash is one of all its files."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def is_hub_name(model: str | os.PathLike[str]) -> bool:
    """Whether it names a model of the hub."""
    return isinstance(model, str) and model.startswith(PREFIX)


def pin(name: str) -> HubModel:
    """The commit that a name stands for now; without a network the one that it stood for when it was last fetched.

    Raises ModelNotFoundError.
    """
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    if not _NAME.fullmatch(repo) or (not revision and "@" in name):
        raise ModelNotFoundError(f"{name!r} is no name of a model: write hf:owner/name, or hf:owner/name@revision")
    from huggingface_hub import snapshot_download

    with _told(repo):
        # With config.json alone, which whatever comes next needs too: the folder's name is the commit.
        path = Path(snapshot_download(repo, revision=revision or None, allow_patterns=["config.json"], **_quietly()))
    return HubModel(repo, path.name)


def fetch_small(model: HubModel) -> Path:
    """The folder, with all that is not weights. Raises ModelNotFoundError."""
    return _download(model, _SMALL)


def fetch_all(model: HubModel, progress: Progress | None = None) -> Path:
    """The folder, whole. Raises ModelNotFoundError, CheckpointError."""
    folder = fetch_small(model)
    _check_weights(model, folder)
    return _fetch_weights(model, folder, weight_files(folder), progress)


def fetch_needed(
    model: HubModel,
    first_layer: int,
    end_layer: int,
    *,
    has_embed: bool,
    has_head: bool,
    progress: Progress | None = None,
) -> Path:
    """The folder, with the files of weights that a stage reads. Raises ModelNotFoundError, CheckpointError."""
    folder = fetch_small(model)
    _check_weights(model, folder)
    files = needed_files(folder, first_layer, end_layer, has_embed=has_embed, has_head=has_head)
    return _fetch_weights(model, folder, files, progress)


def held_bytes(model: HubModel) -> int:
    """Bytes on this host's disk of the repository's files, of those too that are still being fetched."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo, repo_type="model") / "blobs"
    held = 0
    for path in blobs.glob("*"):
        # One that is whole gets another name in the meantime.
        with suppress(FileNotFoundError):
            held += path.stat().st_blocks * 512
    return held


def outline(model: HubModel, progress: Progress | None = None) -> Path:
    """A folder like the model's in all but its weights, of which it has the headers: enough to plan with, and for text.

    It is made once a commit, in `cache_folder`. Raises ModelNotFoundError, CheckpointError.
    """
    folder = cache_folder() / "outlines" / f"{model.repo.replace('/', '--')}@{model.commit}"
    if folder.is_dir():
        return folder
    small = fetch_small(model)
    _check_weights(model, small)
    if progress is not None:
        progress(f"reading what {model.name} consists of")
    # What opening the folder reads of weights must be these.
    real = needed_files(small, 0, 0, has_embed=False, has_head=False) if (small / INDEX).exists() else set()
    if real:
        _fetch_weights(model, small, real, progress)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as scratch_name:
            scratch = Path(scratch_name) / "outline"
            _copy_small(small, scratch)
            for name in weight_files(small):
                if name in real:
                    (scratch / name).symlink_to((small / name).resolve())
                else:
                    _write_header(model, name, scratch / name)
            try:
                scratch.rename(folder)
            except OSError:
                # Another process was faster, and made the same.
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise ModelNotFoundError(
            f"{folder} cannot be written: {error}. The environment variable SHARDLINE_CACHE names another cache folder."
        ) from error
    return folder


def _copy_small(source: Path, target: Path) -> None:
    target.mkdir()
    for path in (source / name for name in (*TEXT_FILES, INDEX)):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    templates = sorted((source / "chat_templates").glob("*.jinja"))
    if templates:
        (target / "chat_templates").mkdir()
        for path in templates:
            shutil.copyfile(path, target / "chat_templates" / path.name)


def _write_header(model: HubModel, name: str, path: Path) -> None:
    """A file of the same length in which only the header is; the rest is a hole, which takes no room."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    try:
        with _told(model.repo):
            found = HfApi().parse_safetensors_file_metadata(model.repo, name, revision=model.commit)
    except SafetensorsParsingError as error:
        raise ModelNotFoundError(f"{model.name}: {name} is no safetensors file: {error}") from error
    entries: dict[str, Any] = {
        tensor: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
        for tensor, info in found.tensors.items()
    }
    header = json.dumps(entries).encode()
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def _check_weights(model: HubModel, folder: Path) -> None:
    """That the repository has what is read, before much is fetched."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    if (folder / INDEX).exists():
        return
    try:
        names = [entry.path for entry in get_cached_repo_tree(model.repo, revision=model.commit)]
    except CachedRepoTreeNotFoundError:
        return
    if SINGLE in names:
        return
    problem = f"{PREFIX}{model.repo} has neither {SINGLE} nor {INDEX}"
    pickles = [name for name in names if name.endswith(_PICKLES)]
    gguf = [name for name in names if name.endswith(".gguf")]
    if pickles:
        shown = ", ".join(pickles[:3])
        problem += f"; {shown} can run code when loaded, and is not fetched: take a repository with safetensors"
    elif gguf:
        problem += f"; it has GGUF files ({', '.join(gguf[:3])}): fetch one with `hf download`, and give its path"
    raise ModelNotFoundError(problem + ".")


def _fetch_weights(model: HubModel, folder: Path, names: Iterable[str], progress: Progress | None) -> Path:
    names = sorted(names)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        if progress is not None:
            progress(f"fetching {len(missing)} of {len(names)} files of weights of {model.name}")
        _download(model, [glob.escape(name) for name in missing])
        lost = [name for name in missing if not (folder / name).exists()]
        if lost:
            raise ModelNotFoundError(f"{model.name}: its index names {lost[0]}, which the repository does not have")
    return folder


def _download(model: HubModel, patterns: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _told(model.repo):
        return Path(snapshot_download(model.repo, revision=model.commit, allow_patterns=list(patterns), **_quietly()))


def _quietly() -> dict[str, Any]:
    """No bars where nobody watches them."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    return {"library_name": "shardline"}


@contextmanager
def _told(repo: str) -> Iterator[None]:
    """Turn the errors of huggingface-hub into ours, with the remedy."""
    from huggingface_hub import constants, errors

    name = f"{PREFIX}{repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{repo}, and set HF_TOKEN to a token of that "
            "account, on every node"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{constants.ENDPOINT} has no model {repo}, or it is private: check the name, or set HF_TOKEN to a token "
            "that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} has no such revision: leave out what follows @, or correct it") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name} is no name of a model of the hub: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.is_offline_mode():
            raise ModelNotFoundError(
                f"{name} is not, or not wholly, in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: fetch it where "
                "there is a network, or unset that"
            ) from error
        cause = error.__cause__ or error
        failed = isinstance(cause, errors.HfHubHTTPError)
        raise ModelNotFoundError(_refused(name, cause) if failed else _no_network(name, cause)) from error
    except errors.HfHubHTTPError as error:
        raise ModelNotFoundError(_refused(name, error)) from error
    except _http_error() as error:
        raise ModelNotFoundError(_no_network(name, error)) from error
    except OSError as error:
        raise ModelNotFoundError(
            f"{name} cannot be put in {constants.HF_HUB_CACHE}: {_first_line(error)}. HF_HOME names another cache"
        ) from error


def _refused(name: str, error: BaseException) -> str:
    from huggingface_hub import constants

    return (
        f"{constants.ENDPOINT} could not give {name}: {_first_line(error)}. What was fetched is kept: try again later"
    )


def _no_network(name: str, error: BaseException) -> str:
    from huggingface_hub import constants

    return (
        f"{name} is not in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be reached "
        f"({_first_line(error)}): what was fetched is kept, so try again; or copy a folder from elsewhere and give its "
        "path"
    )


def _http_error() -> type[Exception]:
    """What huggingface-hub's library for HTTP raises, whichever it is."""
    from huggingface_hub import errors

    found: type[Exception] = vars(errors)["HTTPError"]
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
