"""The wheel and the sdist hold every room and data file, and a wheel in an empty environment runs the real model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cluster", "kernels", "scheduler", "stage")
PACKAGED = (".py", ".sh", ".cu", ".cuh", ".typed")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The command's standard output; a failure shows both of its streams."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy: building writes into the source tree."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "source"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "benchmarks")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    # The wheel is made from the sdist, so what the sdist lacks the wheel lacks too.
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", cwd=copy)
    return folder / "dist"


def files_in_the_tree() -> set[str]:
    rooms = {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in PACKAGED and "__pycache__" not in path.parts
    }
    return {f"shardline/{name}" for name in rooms | {"__init__.py", "_version.py", "py.typed"}}


def test_the_wheel_holds_every_file_of_the_rooms(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert packed == files_in_the_tree()


def test_the_sdist_holds_every_file_of_the_rooms(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        names = {member.name.partition("/src/")[2] for member in opened.getmembers() if member.isfile()}
    assert files_in_the_tree() <= names


def test_a_wheel_in_an_empty_environment_answers(archives: Path, smollm2: Path, tmp_path: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    # Without compiling what it installs: most of it is never imported here.
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", constraints, wheel, cwd=tmp_path)
    command = tmp_path / "venv" / "bin" / "shardline"
    # A home that is empty too, so that nothing of this machine's helps.
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    imported = run(python, "-c", "import shardline; print(shardline.__file__)", cwd=tmp_path, **home)
    assert Path(imported.strip()).is_relative_to(tmp_path)
    prompt = "The capital of France is"
    answer = run(command, "run", smollm2, "--raw", "-p", prompt, "--max-tokens", "6", cwd=tmp_path, **home)
    assert "Paris" in answer
