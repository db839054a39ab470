"""Tests in several workers: one of them has every cluster, and a worker's crash is one failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")

HEAD = """
import os, pytest
from pathlib import Path
note = Path(__file__).parent / "notes" / f"{Path(__file__).stem}-{os.environ['PYTEST_XDIST_WORKER']}"
"""
# Slow enough that an idle worker would take the other file.
WITH_RAY = (
    HEAD
    + """
import time
pytestmark = pytest.mark.ray
@pytest.mark.parametrize("index", range(5))
def test_it(index):
    note.touch()
    time.sleep(0.1)
"""
)
WITHOUT = (
    HEAD
    + """
@pytest.mark.parametrize("index", range(5))
def test_it(index):
    note.touch()
"""
)
CRASHES = "import os\ndef test_before(): pass\ndef test_crash(): os._exit(3)\ndef test_after(): pass\n"


def run(folder: Path, **files: str) -> str:
    """The report of these test files in two workers, under this suite's conftest."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = ray\n")
    (folder / "notes").mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "auto", "--dist", "loadfile"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False).stdout


def test_files_with_ray_have_one_worker(tmp_path: Path) -> None:
    told = run(tmp_path, test_a=WITHOUT, test_b=WITH_RAY, test_c=WITHOUT, test_d=WITH_RAY, test_e=WITH_RAY)
    assert " 25 passed" in told, told
    seen = dict(path.name.split("-") for path in (tmp_path / "notes").iterdir())
    assert len(seen) == 5
    assert seen["test_b"] == seen["test_d"] == seen["test_e"]
    assert set(seen.values()) == {"gw0", "gw1"}


def test_a_crash_is_one_failure_and_the_rest_still_runs(tmp_path: Path) -> None:
    told = run(tmp_path, test_a=CRASHES, test_b=WITHOUT)
    assert "1 failed, 7 passed" in told, told
    assert "crashed while running 'test_a.py::test_crash'" in told
