"""Kernel sources to machine code with NVRTC, cached on disk by content. Needs no GPU, no toolkit and no headers."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardline.kernels.cuda.errors import KernelCompileError

HERE = Path(__file__).parent
# -fmad=false: a fused multiply-add happens only where a kernel writes it, or the compiler would choose bits for us.
BUILDS_ON = {
    "linear": ("gate.cuh", "groups.cuh", "output.cuh", "few_tokens.cuh", "results.cuh", "many_tokens.cuh"),
    "experts": ("gate.cuh", "groups.cuh", "output.cuh", "few_tokens.cuh", "results.cuh", "many_tokens.cuh"),
    "wide": ("gate.cuh", "groups.cuh", "output.cuh", "results.cuh", "wide.cuh"),
    "staged": ("gate.cuh", "groups.cuh", "output.cuh", "scale.cuh", "staged.cuh"),
    "choices": ("gate.cuh", "groups.cuh", "output.cuh", "scale.cuh", "staged.cuh"),
    "activation": ("scale.cuh", "prepare.cuh"),
    "attention": ("attention_kinds.cuh",),
    "norms": ("scale.cuh", "prepare.cuh"),
    "reorder": ("scale.cuh", "prepare.cuh"),
    "pointwise": ("gate.cuh",),
}
"""Besides common.cuh, by kernel file."""
OPTIONS = ("--std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--ptxas-options=-v")


@dataclass(frozen=True, slots=True)
class Resources:
    """What the assembler says of one kernel."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A loadable image and the log that came with it."""

    cubin: bytes
    log: str

    def resources(self) -> dict[str, Resources]:
        """By kernel name."""
        found = {}
        pattern = re.compile(
            r"Function properties for (\w+)\s+ptxas[ .]+(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads"
            r"[^\n]*\n[^\n]*Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
        )
        for name, stack, stores, loads, registers, shared in pattern.findall(self.log):
            found[name] = Resources(int(registers), int(stores) + int(loads), int(stack), int(shared or 0))
        return found


def source_text(name: str, defines: Mapping[str, int]) -> str:
    """The whole text that is compiled: the defines, what the kernel file builds on, that file. Nothing is included."""
    lines = [f"#define {key} {value}" for key, value in sorted(defines.items())]
    files = ["common.cuh", *BUILDS_ON.get(name, ()), f"{name}.cu"]
    return "\n".join([*lines, *((HERE / file).read_text() for file in files)])


def compile_kernels(name: str, defines: Mapping[str, int], arch: int, cache: Path | None) -> Compiled:
    """Compile `name`.cu for sm_<arch>, or find the result of an earlier time in `cache`.

    Raises:
        KernelCompileError: names the kernel file, the defines and the arch, and shows the compiler's log.
    """
    from cupy_backends.cuda.libs import nvrtc

    text = source_text(name, defines)
    # Hopper's own instructions (wgmma) are not part of the plain sm_90.
    options = (f"-arch=sm_{arch}{'a' if arch == 90 else ''}", *OPTIONS)
    key = hashlib.sha256(repr((text, options, nvrtc.getVersion())).encode()).hexdigest()[:32]
    stored = cache / f"{name}-sm{arch}-{key}" if cache else None
    if stored and (image := stored.with_suffix(".cubin")).exists():
        return Compiled(image.read_bytes(), stored.with_suffix(".log").read_text())
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise KernelCompileError(
                f"{name}.cu for sm_{arch} with {dict(defines)}: {error}\n{nvrtc.getProgramLog(program)}"
            ) from None
        compiled = Compiled(nvrtc.getCUBIN(program), nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    if stored:
        _publish(stored.with_suffix(".log"), compiled.log.encode())
        _publish(stored.with_suffix(".cubin"), compiled.cubin)
    return compiled


def _publish(path: Path, data: bytes) -> None:
    """Write so that another process sees all of the file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
