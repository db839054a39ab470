"""Compiled code is kept between processes, and never used when it is not the code of these sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardline

# Runs an op for real and says for each entry that it needed whether it came from the disk.
SCRIPT = """
import numpy as np
from shardline.kernels import cpu_backend
from shardline.kernels.cpu import executor, linear

backend = cpu_backend(1)
x = backend.upload(np.arange(12, dtype=np.float32).reshape(4, 3))
out = backend.empty((2, 3), "float32")
backend.gather_rows(x, backend.upload(np.array([3, 1], np.int32)), out, 2)
assert backend.read(out).tolist() == [[9, 10, 11], [3, 4, 5]]
backend.close()
used = (executor._lead, linear.gather_rows)
print(sorted({entry._compiled.cache_hits for entry in used}))
"""


def start(cache: Path, package_root: Path | None = None, script: str = SCRIPT) -> str:
    environment = {**os.environ, "SHARDLINE_CACHE": str(cache)}
    if package_root is not None:
        environment["PYTHONPATH"] = str(package_root)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def package_copy(folder: Path) -> Path:
    """A folder to import a copy of the kernels from."""
    root = folder / "root"
    source = Path(shardline.__file__).parent
    shutil.copytree(source, root / "shardline", ignore=shutil.ignore_patterns("__pycache__", "cluster", "stage"))
    (root / "shardline" / "__init__.py").write_text("")
    return root


# Processes that start cold compile for a while.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    assert start(cache) == "[0]"
    return cache


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_second_process_compiles_nothing(cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in entries(cache)}
    assert {path.suffix for path in before} == {".nbi", ".nbc"}
    assert start(cache) == "[1]"
    assert {path: path.stat().st_mtime_ns for path in entries(cache)} == before


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_cut_file_is_compiled_again_and_mended(cache: Path, suffix: str) -> None:
    for path in entries(cache):
        if path.suffix == suffix:
            path.write_bytes(path.read_bytes()[:100])
    assert start(cache) == "[0]"
    assert start(cache) == "[1]"


def test_an_edit_of_a_helper_elsewhere_is_not_missed(cache: Path, tmp_path: Path) -> None:
    root = package_copy(tmp_path)
    assert start(cache, root) == "[0]"
    assert start(cache, root) == "[1]"
    helper = root / "shardline" / "kernels" / "cpu" / "intrinsics.py"
    helper.write_text(helper.read_text() + "\n# An edit.\n")
    assert start(cache, root) == "[0]"
    assert start(cache) == "[1]", "the other installation's entries are still there"


def test_an_edit_while_a_process_starts_mixes_no_code(cache: Path, tmp_path: Path) -> None:
    """A process that has read some old and some new sources neither uses old entries nor leaves any under the new."""
    root = package_copy(tmp_path)
    linear = root / "shardline" / "kernels" / "cpu" / "linear.py"
    old, new = "x[index, k] if found", "-x[index, k] if found"
    assert linear.read_text().count(old) == 1
    edit = f"""
import pathlib
edited = pathlib.Path({str(linear)!r})
edited.write_text(edited.read_text().replace({old!r}, {new!r}))
"""
    imports = "from shardline.kernels.cpu import executor, linear\n"
    assert SCRIPT.count(imports) == 1
    negated = SCRIPT.replace("[[9, 10, 11], [3, 4, 5]]", "[[-9, -10, -11], [-3, -4, -5]]")

    assert start(cache, root) == "[0]"
    assert start(cache, root, negated.replace(imports, edit + imports)) == "[0]", "old code for a new source"
    linear.write_text(linear.read_text().replace(new, old))
    assert start(cache, root) == "[1]", "code of both was kept"
    assert start(cache, root, SCRIPT.replace(imports, imports + edit)) == "[0]"
    assert start(cache, root, negated) == "[0]", "old code was kept for the new sources"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file" / "below") == "[0]"
