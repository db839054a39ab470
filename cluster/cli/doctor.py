"""`shardline doctor`: what this machine offers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from shardline._version import __version__
from shardline.cluster.build import available_memory, cores
from shardline.cluster.cli.gpu_check import check_gpu
from shardline.cluster.cli.output import print_json, stdout, table
from shardline.cluster.errors import PlanningError
from shardline.cluster.gpus import gpus_here
from shardline.cluster.models import KNOWN_MODELS, cache_folder
from shardline.cluster.planning.stage_costs import mib
from shardline.kernels import CudaDevice

OK, NOTE, MISSING, FAULT = "ok", "note", "missing", "fault"
PACKAGES = ("ray", "numpy", "numba", "llvmlite", "tokenizers", "jinja2", "gguf", "safetensors", "typer", "rich")
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "neon", "asimd")
NEEDED_DESCRIPTORS = 1024
SHARED_MEMORY = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `status` is "ok", "note", "missing" or "fault"."""

    what: str
    status: str
    value: str


def doctor_command(*, as_json: bool) -> int:
    """See `shardline doctor`. Returns the exit code."""
    findings = examine()
    if as_json:
        print_json([{"what": f.what, "status": f.status, "value": f.value} for f in findings])
    else:
        made = table(("", "", ""), left=3)
        made.show_header = False
        styles = {OK: "green", NOTE: "yellow", MISSING: "red", FAULT: "red"}
        for found in findings:
            made.add_row(Text(found.status, styles[found.status]), found.what, found.value)
        stdout().print(made)
    return 1 if any(found.status in (MISSING, FAULT) for found in findings) else 0


def examine() -> list[Finding]:
    """Look at this machine. On each GPU a small step runs; else nothing is started."""
    return [
        Finding("shardline", OK, f"{__version__}, {Path(__file__).parents[2]}"),
        Finding("Python", OK, f"{platform.python_version()}, {sys.executable}"),
        *_packages(),
        Finding(
            "system", OK, f"{platform.system()} {platform.release()}, {platform.machine()}, host {platform.node()}"
        ),
        _processor(),
        _cores(),
        Finding("memory", OK, f"{mib(available_memory())} available"),
        _shared_memory(),
        _descriptors(),
        _folder("model cache", cache_folder()),
        _models(),
        _compiled(),
        *_gpus(),
    ]


def _packages() -> list[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, OK, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, MISSING, "not installed: run `pip install shardline` again"))
    return found


def _processor() -> Finding:
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
    except OSError:
        pass
    return Finding("processor", OK, f"{model}: {' '.join(name for name in FEATURES if name in flags) or 'no vectors'}")


def _cores() -> Finding:
    usable, there = cores(), os.cpu_count() or 1
    return Finding("cores", OK, f"{usable}" if usable == there else f"{usable} of {there} are open to this process")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", NOTE, "not there: Ray keeps its objects on disk instead")
    status = OK if free >= SHARED_MEMORY else NOTE
    small = "" if status == OK else ": small, Ray keeps its objects on disk instead"
    return Finding("/dev/shm", status, f"{mib(free)} free{small}")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= NEEDED_DESCRIPTORS:
        return Finding("open files", OK, f"{soft} allowed")
    return Finding("open files", NOTE, f"{soft} allowed, Ray wants {NEEDED_DESCRIPTORS}: `ulimit -n {hard}`")


def _folder(what: str, path: Path) -> Finding:
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Finding(what, OK, f"{path}, {mib(shutil.disk_usage(nearest).free)} free")
    return Finding(what, MISSING, f"{path} cannot be written: set SHARDLINE_CACHE to a folder that can")


def _models() -> Finding:
    there = [known.name for known in KNOWN_MODELS.values() if (cache_folder() / known.file_name).exists()]
    return Finding(
        "known models", OK, f"fetched: {', '.join(there) or 'none yet'} (of {', '.join(sorted(KNOWN_MODELS))})"
    )


def _compiled() -> Finding:
    # Where the CPU kernels keep what they compiled; see shardline.kernels.cpu.jit.
    folder = cache_folder().parent / "jit"
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    if not sizes:
        return Finding("compiled kernels", NOTE, f"none yet in {folder}: the first start compiles, which takes a while")
    return Finding("compiled kernels", OK, f"{len(sizes)} files, {mib(sum(sizes))} in {folder}")


def _gpus() -> list[Finding]:
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if importlib.util.find_spec("cupy") is None:
        if not count:
            return [Finding("GPUs", OK, "none found")]
        return [
            Finding("GPUs", NOTE, f"{count} NVIDIA cards, and no cupy: pip install 'shardline[cuda12]', or [cuda13]")
        ]
    unusable: list[str] = []
    try:
        found = gpus_here(unusable.append)
    except PlanningError as error:
        return [Finding("GPUs", NOTE if count else OK, str(error))]
    cards = [gpu.card for gpu in found]
    lines = [finding for card in cards for finding in _gpu(card)]
    classes = {card.numeric_class for card in cards}
    if len(classes) > 1:
        lines.append(
            Finding("GPUs", NOTE, f"of {len(classes)} numeric classes: bytes may depend on which one has which layers")
        )
    return lines + [Finding("GPUs", NOTE, f"not used, on {problem}") for problem in unusable]


def _gpu(card: CudaDevice) -> list[Finding]:
    """What it is, and whether it computes: a step runs on it, in a process of its own."""
    what = f"GPU {card.index}"
    found = [
        Finding(
            what,
            OK,
            f"{card.name}, sm_{card.arch}, numeric class {card.numeric_class}, {mib(card.free_bytes)} of "
            f"{mib(card.total_bytes)} free, {card.bytes_per_second / 1e9:.0f} GB/s, {card.bus_id}: "
            f"--device cuda:{card.index}",
        )
    ]
    verdict = check_gpu(card.index)
    found.append(Finding(f"{what} computes", FAULT if verdict.fault else OK, verdict.fault or verdict.computes))
    if verdict.note:
        found.append(Finding(f"{what} libraries", NOTE, verdict.note))
    return found
