"""Every kernel compiles for every arch, without spills and within a consumer card's shared memory. Needs no GPU.

The products are many: by default each arch compiles them for formats of its own, so that all formats are compiled and
every arch is. SHARDLINE_COMPILE_ALL=1 compiles all for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shardline.kernels.cuda import tables
from shardline.kernels.cuda.compile import Compiled, compile_kernels
from shardline.kernels.cuda.errors import KernelCompileError
from shardline.kernels.cuda.pack import Format

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs the extra 'cuda12' or 'cuda13'")

ARCHES = (80, 86, 89, 90, 120)
ALL = os.environ.get("SHARDLINE_COMPILE_ALL") == "1"
FORMATS = [
    {"BITS": bits, "GROUP": group, "HAS_MIN": has_min, "SCALE_F32": scale_f32}
    for bits, group, has_min, scale_f32 in (
        (4, 32, 1, 0),
        (4, 32, 1, 1),
        (4, 128, 0, 0),
        (4, 128, 1, 0),
        (8, 16, 0, 1),
        (8, 32, 0, 0),
        (4, 32, 0, 0),
        (4, 64, 1, 0),
        (8, 64, 1, 0),
        (8, 128, 1, 1),
    )
]


def products(form: dict[str, int], index: int) -> list[tuple[str, dict[str, int]]]:
    """What a format is compiled to, with one of the activations and biases or none in turn."""
    kind = {"ACTIVATION": index % 3, "GATED_BIAS": index % 2}
    return [
        ("linear", form),
        ("linear", form | {name: value for name, value in kind.items() if value}),
        ("experts", form | {"EXPERTS": 1, "IS_GATED": 0}),
        ("experts", form | {"EXPERTS": 1, "IS_GATED": 1} | kind),
        *(("staged", form | {"SOURCE": source, "IS_GATED": 0}) for source in range(3)),
        ("staged", form | {"SOURCE": 2, "IS_GATED": 1} | kind),
        ("staged", form | {"SOURCE": 0, "IS_GATED": 1} | kind),
        ("choices", form | {"SOURCE": 1}),
    ]


ATTENTION = [
    *({"HEAD_DIM": head_dim} for head_dim in (64, 80, 96, 128, 256)),
    {"HEAD_DIM": 64, "WINDOW": 1, "SINKS": 1},
    {"HEAD_DIM": 80, "SINKS": 1},
    {"HEAD_DIM": 96, "WINDOW": 1},
    {"HEAD_DIM": 128, "WINDOW": 1, "SOFTCAP": 1, "SINKS": 1},
    {"HEAD_DIM": 256, "SOFTCAP": 1},
    {"HEAD_DIM": 256, "WINDOW": 1, "SOFTCAP": 1},
    *({"HEAD_DIM": head_dim, "KV_BITS": 8} for head_dim in (16, 64, 80, 96, 128, 256)),
    {"HEAD_DIM": 64, "WINDOW": 1, "SINKS": 1, "KV_BITS": 8},
    {"HEAD_DIM": 128, "WINDOW": 1, "SOFTCAP": 1, "SINKS": 1, "KV_BITS": 8},
    {"HEAD_DIM": 256, "WINDOW": 1, "SOFTCAP": 1, "KV_BITS": 8},
]
OTHERS = [
    *(("activation", {"THREADS": threads}) for threads in (256, 1024)),
    *(("norms", {"THREADS": threads}) for threads in (256, 1024)),
    ("sample", {}),
    ("dispatch", {}),
    ("reorder", {"THREADS": 256}),
    *(("pack", {"BITS": bits, "SCALE_F32": scale_f32}) for bits, scale_f32 in ((4, 0), (8, 1))),
    *(("pointwise", {"ACTIVATION": activation}) for activation in range(3)),
    ("route", {"LANE_EXPERTS": 1, "SCORING": 0}),
    ("route", {"LANE_EXPERTS": 4, "SCORING": 2}),
    ("route", {"LANE_EXPERTS": 8, "SCORING": 1}),
    ("route", {"LANE_EXPERTS": 16, "SCORING": 0}),
    ("rows", {"BITS": 4, "GROUP": 32, "HAS_MIN": 1, "SCALE_F32": 0}),
    ("rows", {"BITS": 8, "GROUP": 16, "HAS_MIN": 0, "SCALE_F32": 1}),
    ("rows", {"BITS": 4, "GROUP": 128, "HAS_MIN": 0, "SCALE_F32": 0, "SCALED": 1, "ORDERED": 1}),
    ("rows", {"BITS": 4, "GROUP": 64, "HAS_MIN": 1, "SCALE_F32": 0, "LAST_TOKENS": 1}),
    ("rows", {"BITS": 8, "GROUP": 32, "HAS_MIN": 0, "SCALE_F32": 0, "SCALED": 1, "ORDERED": 1, "LAST_TOKENS": 1}),
    *(("attention", defines) for defines in ATTENTION),
    ("rope_kv_write", {"HEAD_DIM": 64, "INTERLEAVED": 1, "NORMS": 0}),
    ("rope_kv_write", {"HEAD_DIM": 80, "INTERLEAVED": 0, "NORMS": 0}),
    ("rope_kv_write", {"HEAD_DIM": 128, "INTERLEAVED": 0, "NORMS": 1}),
    ("rope_kv_write", {"HEAD_DIM": 256, "INTERLEAVED": 0, "NORMS": 1}),
    ("rope_kv_write", {"HEAD_DIM": 80, "INTERLEAVED": 1, "NORMS": 0, "KV_BITS": 8}),
    ("rope_kv_write", {"HEAD_DIM": 256, "INTERLEAVED": 0, "NORMS": 1, "KV_BITS": 8}),
]
WIDE_FORMAT = {"BITS": 4, "GROUP": 128, "HAS_MIN": 0, "SCALE_F32": 0}
WIDE = [
    ("wide", WIDE_FORMAT),
    ("wide", WIDE_FORMAT | {"SCALE_F32": 1}),
    *(("wide", WIDE_FORMAT | {"ACTIVATION": activation, "GATED_BIAS": bias}) for activation, bias in ((1, 0), (2, 1))),
]
CASES = [
    (file, defines, arch)
    for place, arch in enumerate(ARCHES)
    for file, defines in (
        *(
            product
            for index, form in enumerate(FORMATS)
            if ALL or index % len(ARCHES) == place
            for product in products(form, index)
        ),
        *OTHERS,
        *(WIDE if arch == tables.WIDE_ARCH else ()),
    )
]
KERNELS = {
    "activation": {"prepare_gated", "prepare_rows", "rms_norm_rows"},
    "attention": {"query_tiles", "attend_rows", "attend_splits"},
    "choices": {"add_choices"},
    "dispatch": {"group_pairs", "combine"},
    "norms": {"add_rms_norm", "norm_heads"},
    "pack": {"pack_integers", "pack_scales"},
    "pointwise": {"soft_cap", "add_gated", "join_rows"},
    "reorder": {"reorder_channels"},
    "rope_kv_write": {"rope_kv_write"},
    "route": {variant.name for variant in (tables.ROUTE_ONE, *tables.ROUTE)},
    "rows": {"embedding", "gather_rows"},
    "sample": {"sample"},
}
FEW = [variant for variants in tables.FEW.values() for variant in variants]
EXPERT_FEW = [variant for variants in tables.EXPERT_FEW.values() for variant in variants]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, int], int], Compiled]]:
    """What the tests that run here compile, side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started: dict[str, Future[Compiled]] = {}
        for item in request.session.items:
            params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and {"file", "defines", "arch"} <= params.keys():
                key = repr((params["file"], params["defines"], params["arch"]))
                started[key] = pool.submit(compile_kernels, params["file"], params["defines"], params["arch"], None)
        yield lambda *case: started[repr(case)].result()
        pool.shutdown(cancel_futures=True)


def variants_of(file: str, defines: dict[str, int], arch: int) -> list[tables.LinearVariant]:
    """Those that tables.py may ask for, of a file of products."""
    bits, group = defines["BITS"], defines["GROUP"]
    if file == "experts":
        return [*EXPERT_FEW, *tables.EXPERT_WHOLE[: tables.num_expert_tiles(group, arch)]]
    there = tables.num_tiles(bits, group, bool(defines["HAS_MIN"]), arch)
    return [*FEW, *tables.SPLIT[:there], *tables.WHOLE[:there]]


@pytest.mark.parametrize(("file", "defines", "arch"), CASES, ids=str)
def test_compiles_without_spills(
    compiled: Callable[[str, dict[str, int], int], Compiled], file: str, defines: dict[str, int], arch: int
) -> None:
    resources = compiled(file, defines, arch).resources()
    wanted, dynamic = KERNELS.get(file, set()), {}
    if file in ("linear", "experts"):
        variants = variants_of(file, defines, arch)
        form = Format(defines["BITS"], defines["GROUP"], bool(defines["HAS_MIN"]), bool(defines["SCALE_F32"]))
        gated_alone = defines.get("ACTIVATION", 0) or defines.get("GATED_BIAS", 0)
        dynamic = {variant.name: variant.shared_bytes(form, arch) for variant in variants}
        if file == "linear":
            gated = {f"gated_{variant.name}" for variant in variants if variant.gated}
            wanted = gated if gated_alone else gated | dynamic.keys()
            dynamic |= {f"gated_{name}": size for name, size in dynamic.items()}
        else:
            wanted = set(dynamic)
    elif file == "wide":
        alone = defines.get("ACTIVATION", 0) or defines.get("GATED_BIAS", 0)
        wanted = {f"gated_{tile.variant.name}" for tile in tables.WIDE}
        wanted |= set() if alone else {tile.variant.name for tile in tables.WIDE if not tile.only_gated}
        dynamic = dict.fromkeys(wanted, tables.HOPPER_SHARED_LIMIT - tables.WIDE_STATIC)
    elif file == "choices":
        dynamic = {"add_choices": tables.CHOICES_SHARED}
    elif file == "staged":
        wanted = {v.name for vs in tables.STAGED.values() for v in vs if v.gated or not defines["IS_GATED"]}
        dynamic = dict.fromkeys(wanted, tables.SHARED_LIMIT // 2 - tables.STAGED_STATIC)
    elif file == "attention":
        size = tables.attention_shared_bytes(defines["HEAD_DIM"], defines.get("KV_BITS", 16))
        dynamic = dict.fromkeys(("attend_rows", "attend_splits"), size)
    elif file == "route":
        dynamic = {variant.name: variant.shared_bytes for variant in (tables.ROUTE_ONE, *tables.ROUTE)}
    elif file == "dispatch":
        dynamic = {"group_pairs": 4 * 32 * 512}
    assert wanted <= resources.keys()
    for name, used in resources.items():
        assert used.spill_bytes == 0, f"{name} spills {used.spill_bytes} bytes"
        assert used.stack_bytes == 0, f"{name} keeps {used.stack_bytes} bytes on its stack"
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


def test_a_fault_of_a_source_compiled_ahead_is_raised_where_it_is_wanted() -> None:
    from shardline.kernels.cuda.modules import Modules

    modules = Modules(86, None)
    wrong = {"BITS": 4, "GROUP": 48, "HAS_MIN": 0, "SCALE_F32": 0}
    modules.start("linear", **wrong)
    modules.start("rows", BITS=4, GROUP=32, HAS_MIN=0, SCALE_F32=0)
    with pytest.raises(KernelCompileError, match=r"(?s)linear\.cu for sm_86 with .*48.*error"):
        modules.function("linear", "few_8x64_s1", 0, wrong)
    modules.close()
    modules.close()
