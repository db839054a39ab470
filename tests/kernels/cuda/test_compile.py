"""Every kernel compiles for every arch, without spills and within a consumer card's shared memory. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.kernels.cuda import tables
from shardline.kernels.cuda.compile import compile_kernels
from shardline.kernels.cuda.errors import KernelCompileError

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs the extra 'cuda12' or 'cuda13'")

ARCHES = (80, 86, 89, 90, 120)
LINEAR = [
    {"BITS": bits, "GROUP": group, "HAS_MIN": has_min, "SCALE_F32": scale_f32}
    for bits, group, has_min, scale_f32 in (
        (4, 32, 1, 0),
        (4, 32, 1, 1),
        (4, 128, 0, 0),
        (4, 128, 1, 0),
        (8, 16, 0, 1),
        (8, 32, 0, 0),
    )
]
SOURCES = [
    *(("linear", defines) for defines in LINEAR),
    ("activation", {"THREADS": 256}),
    ("activation", {"THREADS": 1024}),
    ("sample", {}),
    ("rows", {"BITS": 4, "GROUP": 32, "HAS_MIN": 1, "SCALE_F32": 0}),
    ("rows", {"BITS": 8, "GROUP": 16, "HAS_MIN": 0, "SCALE_F32": 1}),
    *(("attention", {"HEAD_DIM": head_dim}) for head_dim in (64, 80, 96, 128, 256)),
    ("rope_kv_write", {"HEAD_DIM": 64, "INTERLEAVED": 1, "NORMS": 0}),
    ("rope_kv_write", {"HEAD_DIM": 80, "INTERLEAVED": 0, "NORMS": 0}),
    ("rope_kv_write", {"HEAD_DIM": 128, "INTERLEAVED": 0, "NORMS": 1}),
    ("rope_kv_write", {"HEAD_DIM": 256, "INTERLEAVED": 0, "NORMS": 1}),
]
KERNELS = {
    "activation": {"prepare_gated", "prepare_rows", "rms_norm_rows"},
    "attention": {"query_tiles", "attend_rows", "attend_splits"},
    "rope_kv_write": {"rope_kv_write"},
    "rows": {"embedding", "gather_rows"},
    "sample": {"sample"},
}
FEW = [variant for variants in tables.FEW.values() for variant in variants]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("file", "defines"), SOURCES, ids=str)
def test_compiles_without_spills(file: str, defines: dict[str, int], arch: int) -> None:
    resources = compile_kernels(file, defines, arch, None).resources()
    there = tables.num_tiles(defines.get("BITS", 4), defines.get("GROUP", 0), arch)
    variants = [*FEW, *tables.SPLIT[:there], *tables.WHOLE[:there]]
    assert (KERNELS.get(file) or {variant.name for variant in variants}) <= resources.keys()
    for name, used in resources.items():
        assert used.spill_bytes == 0, f"{name} spills {used.spill_bytes} bytes"
        assert used.stack_bytes == 0, f"{name} keeps {used.stack_bytes} bytes on its stack"
    dynamic = {variant.name: variant.shared_bytes(defines.get("BITS", 4)) for variant in variants}
    if file == "attention":
        dynamic = dict.fromkeys(("attend_rows", "attend_splits"), tables.attention_shared_bytes(defines["HEAD_DIM"]))
    for name, used in resources.items():
        limit = tables.HOPPER_SHARED_LIMIT if arch == 90 else tables.SHARED_LIMIT
        assert used.static_shared_bytes + dynamic.get(name, 0) <= limit, name


def test_a_wrong_source_shows_the_compilers_log() -> None:
    with pytest.raises(KernelCompileError, match=r"(?s)linear\.cu for sm_86 with .*error"):
        compile_kernels("linear", {"BITS": 4, "GROUP": 48, "HAS_MIN": 0, "SCALE_F32": 0}, 86, None)


def test_the_second_time_comes_from_the_cache(tmp_path: Path) -> None:
    defines = {"BITS": 4, "GROUP": 32, "HAS_MIN": 1, "SCALE_F32": 0}
    first = compile_kernels("rows", defines, 90, tmp_path)
    (stored,) = tmp_path.glob("*.cubin")
    stored.write_bytes(b"from the cache")
    assert compile_kernels("rows", defines, 90, tmp_path).cubin == b"from the cache"
    assert compile_kernels("rows", defines, 86, tmp_path).cubin != first.cubin
    assert compile_kernels("rows", defines | {"GROUP": 64}, 90, tmp_path).cubin not in (b"from the cache", first.cubin)
