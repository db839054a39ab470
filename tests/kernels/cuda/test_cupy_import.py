"""What importing CuPy brings into a process: no vendor library of linear algebra, not even by the way."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOM = Path(__file__).resolve().parents[3] / "kernels"

FAKE_CUPY = """
from cuda.pathfinder import load_nvidia_dynamic_lib
loaded = [load_nvidia_dynamic_lib("cutensor"), load_nvidia_dynamic_lib("nvrtc")]
"""


def test_the_rooms_modules_take_cupy_from_one_place() -> None:
    for path in ROOM.rglob("*.py"):
        if path.name != "cupy_import.py":
            lines = path.read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.strip().startswith(("import cupy", "from cupy "))], path


def test_cutensor_counts_as_loaded_while_cupy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "pathfinder.py").write_text("def load_nvidia_dynamic_lib(name):\n    return name\n")
    (tmp_path / "cupy.py").write_text(FAKE_CUPY)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from shardline.kernels.cuda.cupy_import import cupy\n"
        "from cuda import pathfinder\n"
        "assert cupy.loaded == [None, 'nvrtc'], cupy.loaded\n"
        "assert pathfinder.load_nvidia_dynamic_lib('cutensor') == 'cutensor'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_older_cupy_is_imported_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.delitem(sys.modules, "shardline.kernels.cuda.cupy_import", raising=False)
    from shardline.kernels.cuda import cupy_import

    assert cupy_import.cupy is sys.modules["cupy"]
    monkeypatch.delitem(sys.modules, "shardline.kernels.cuda.cupy_import")


def test_the_real_cupy_has_asked_for_nothing() -> None:
    pytest.importorskip("cupy")
    code = (
        "from shardline.kernels.cuda.backend import CudaBackend\n"
        "from shardline.kernels.cuda.libraries import vendor_libraries\n"
        "assert not vendor_libraries(), vendor_libraries()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
