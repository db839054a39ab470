"""What is asked of the driver about a GPU, with a library in the place of NVML."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from shardline.kernels.cuda import device

NVML = """
#include <string.h>
static int ready = 0;
int nvmlInit_v2(void) { ready++; return 0; }
int nvmlShutdown(void) { ready--; return 0; }
int open_handles(void) { return ready; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **out) {
    *out = (void *)0x1234567812345678;
    return ready != 1 || strcmp(address, "0000:65:00.0");
}
int nvmlDeviceGetMemoryInfo(void *card, unsigned long long *memory) {
    memory[0] = 12000; memory[1] = 11000; memory[2] = 1000;
    return card != (void *)0x1234567812345678;
}
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)
    made = ctypes.CDLL(str(tmp_path / "nvml.so"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made if name == "libnvidia-ml.so.1" else pytest.fail(name))
    return made


def test_memory_is_asked_for_by_address(library: ctypes.CDLL) -> None:
    assert device.nvml_memory("0000:65:00.0", 11800) == (11000, 12000)
    assert library.open_handles() == 0


def test_another_card_or_a_slice_of_one_is_not_believed(library: ctypes.CDLL) -> None:
    assert device.nvml_memory("0000:66:00.0", 11800) is None
    assert device.nvml_memory("0000:65:00.0", 6000) is None
    assert library.open_handles() == 0


def test_no_library_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert device.nvml_memory("0000:65:00.0", 11800) is None


@pytest.mark.parametrize(("arch", "kind"), [(80, 8), (86, 8), (89, 8), (90, 16), (100, 16), (120, 16)])
def test_numeric_classes(arch: int, kind: int) -> None:
    assert device.class_of(arch) == f"cuda {kind}"
