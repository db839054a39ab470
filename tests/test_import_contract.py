"""Which room may import what: read from every file's syntax tree, and from what a fresh process has loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cluster", "kernels", "scheduler", "stage")
FILES = {room: sorted((ROOT / room).rglob("*.py")) for room in ROOMS}
FILES["shardline"] = sorted((ROOT / "src" / "shardline").glob("*.py"))

# What a room may import of another, besides `shardline._version`: a module with all that is in it, or one name of it.
MAY_IMPORT = {
    # Of the kernels only what names a backend, says what GPUs there are, or went wrong.
    "cluster": (
        "shardline.stage",
        "shardline.scheduler",
        *(f"shardline.kernels:{name}" for name in ("Backend", "KernelsError", "cpu_backend", "cuda_device")),
        *(f"shardline.kernels:{name}" for name in ("CudaDevice", "cuda_bus_id", "cuda_devices", "cuda_free_bytes")),
    ),
    "stage": ("shardline.kernels", "shardline.scheduler.plan", "shardline.scheduler.params"),
    "kernels": (),
    "scheduler": (),
    "shardline": ("shardline.cluster", "shardline.scheduler"),
}
# Libraries that only one room may name.
ONLY_IN = {"ray": "cluster", "numba": "kernels", "llvmlite": "kernels", "cupy": "kernels", "cupyx": "kernels"}
HEAVY = ("ray", "numba", "llvmlite", "cupy", "torch", "transformers")


def imports(source: str, name: str = "<source>") -> Iterator[tuple[int, str]]:
    """(line, what) of each import: "module", or "module:name" for `from module import name`; also those in functions,
    under TYPE_CHECKING, and by a name that is written out for `import_module` or `__import__`."""
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def broken(room: str, source: str, name: str = "<source>") -> list[str]:
    """The imports of a file of `room` that break the contract, with file, line and reason."""
    found = []
    for line, what in imports(source, name):
        module = what.partition(":")[0]
        top = module.partition(".")[0]
        reason = None
        if what.startswith("."):
            reason = "is relative: import through `shardline.`"
        elif top in ROOMS:
            reason = "names a room without `shardline.`"
        elif top in ONLY_IN and ONLY_IN[top] != room:
            reason = f"belongs to the room {ONLY_IN[top]}"
        elif top == "shardline":
            reason = _of_another_room(room, what)
        elif room in ("scheduler", "shardline") and top not in sys.stdlib_module_names:
            reason = "is not of the standard library"
        if reason:
            found.append(f"{name}:{line}: {what} {reason}")
    return found


def _of_another_room(room: str, what: str) -> str | None:
    # `from shardline import stage` and `from shardline.stage import spec` name modules as well as attributes.
    dotted = what.replace(":", ".")
    allowed = ("shardline._version", f"shardline.{room}", *MAY_IMPORT[room])
    for entry in allowed:
        exact = entry.replace(":", ".")
        if dotted == exact or (":" not in entry and dotted.startswith(f"{entry}.")):
            return None
    return f"is not for the room {room}"


@pytest.mark.parametrize(("room", "path"), [(room, path) for room, paths in FILES.items() for path in paths], ids=str)
def test_imports(room: str, path: Path) -> None:
    assert broken(room, path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))) == []


def test_every_room_was_read() -> None:
    assert all(len(paths) > 3 for room, paths in FILES.items() if room != "shardline")
    assert {path.name for path in (ROOT / "src" / "shardline").iterdir() if path.is_symlink()} == set(ROOMS)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("scheduler", "import numpy"),
        ("scheduler", "from shardline.stage import StageSpec"),
        ("scheduler", "from shardline import kernels"),
        ("scheduler", "import shardline"),
        ("scheduler", "from . import plan"),
        ("scheduler", "def late():\n    from ..stage import spec"),
        ("kernels", "import shardline.scheduler.params"),
        ("kernels", "if TYPE_CHECKING:\n    from shardline.stage.spec import StageSpec"),
        ("kernels", "import ray"),
        ("stage", "from shardline.scheduler import StepPlan"),
        ("stage", "from shardline.scheduler.scheduler import Scheduler"),
        ("stage", "from shardline.scheduler.planner import x"),
        ("stage", "import shardline.cluster.request as r"),
        ("stage", "def late():\n    import numba.typed"),
        ("stage", "import cupy as cp"),
        ("stage", "import importlib\nimportlib.import_module('ray.util')"),
        ("stage", "__import__('cupy')"),
        ("stage", "from kernels import Backend"),
        ("cluster", "from shardline.kernels import GroupedMatrix"),
        ("cluster", "from shardline.kernels.cpu.backend import CpuBackend"),
        ("cluster", "import shardline.kernels"),
        ("cluster", "from numba import njit"),
        ("cluster", "import scheduler"),
        ("shardline", "import numpy"),
        ("shardline", "from shardline.kernels import Backend"),
    ],
)
def test_what_breaks_the_contract_is_found(room: str, source: str) -> None:
    assert len(broken(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("scheduler", "from __future__ import annotations\nimport math, collections.abc"),
        ("scheduler", "from shardline.scheduler.plan import StepPlan"),
        ("kernels", "import numba\nimport cupy\nimport numpy\nfrom shardline.kernels import matrix"),
        ("stage", "from shardline.kernels import Backend\nfrom shardline.kernels.matrix import GroupedMatrix"),
        ("stage", "from shardline.scheduler.plan import StepPlan\nfrom shardline.scheduler import params"),
        ("cluster", "import ray\nfrom ray.util import placement_group\nimport numpy"),
        ("cluster", "from shardline.kernels import Backend, cpu_backend\nfrom shardline._version import __version__"),
        ("cluster", "from shardline.stage.spec import StageSpec\nfrom shardline import scheduler"),
    ],
)
def test_what_keeps_the_contract_passes(room: str, source: str) -> None:
    assert broken(room, source) == []


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a statement loads in a fresh process, besides those of the interpreter's own start."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("package", ["shardline", *(f"shardline.{room}" for room in ROOMS)])
def test_rooms_are_light(package: str) -> None:
    loaded = loaded_by(f"import {package}")
    assert "shardline" in loaded
    assert loaded.isdisjoint(HEAVY), f"import {package} loads {loaded & set(HEAVY)}"


def test_the_scheduler_loads_the_standard_library_only() -> None:
    loaded = loaded_by("from shardline.scheduler import *")
    assert loaded - sys.stdlib_module_names == {"shardline"}
