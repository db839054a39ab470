"""What a backend refuses at its edge: wrong arguments before any address is read, processors that cannot run it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from shardline.kernels import (
    Backend,
    GroupedMatrix,
    KVLayout,
    RopeTable,
    Rows,
    UnsupportedProcessorError,
    cpu_backend,
)
from shardline.kernels.cpu.jit import check_processor

MakeBackend = Callable[[int], Backend]
MakeMatrix = Callable[..., GroupedMatrix]


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_importing_the_room_imports_no_compiler_and_no_device() -> None:
    script = (
        "import sys, shardline.kernels; print([m for m in ('numba', 'cupy', 'ray', 'llvmlite') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("threads", [0, -1])
def test_refuses_a_team_of_nobody(threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {threads}"):
        cpu_backend(threads)


def test_refuses_processors_by_what_they_lack() -> None:
    check_processor("x86_64", frozenset({"avx", "avx2", "f16c", "fma"}))
    check_processor("aarch64", frozenset({"neon"}))
    with pytest.raises(UnsupportedProcessorError, match=r"lacks f16c, fma\.") as caught:
        check_processor("x86_64", frozenset({"avx", "sse2"}))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_linear_and_gated_refuse_what_does_not_fit(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(1)
    weight = backend.load_matrix([random_matrix(64, 32)])
    gated = backend.load_gated(random_matrix(64, 32), random_matrix(64, 32, seed=1))
    good = {"x": floats(4, 32), "out": floats(4, 64), "rows": 4}
    for op, own, other in ((backend.linear, weight, gated), (backend.gated_linear, gated, weight)):
        for change, message in (
            ({"x": floats(4, 31)}, "x is"),
            ({"x": floats(3, 32)}, "x is"),
            ({"x": floats(4, 64)[:, ::2]}, "not C-contiguous"),
            ({"x": np.zeros((4, 32))}, "x is float64"),
            ({"x": floats(4 * 32)}, "2 dimensions"),
            ({"out": floats(4, 63)}, "out is"),
            ({"out": floats(3, 64)}, "out is"),
            ({"rows": 0}, "rows is 0"),
            ({"rows": 5}, "fewer than 5 rows"),
            ({"weight": other}, "wants a weight of"),
        ):
            arguments = {**good, "weight": own, **change}
            with pytest.raises(AssertionError, match=message):
                op(arguments["x"], arguments["weight"], arguments["out"], arguments["rows"])
    for bias in (floats(63), floats(65), np.zeros(64), floats(2, 32)):
        with pytest.raises(AssertionError, match="bias is"):
            backend.linear(good["x"], weight, good["out"], 4, bias=bias)
    square = backend.load_matrix([random_matrix(32, 32)])
    with pytest.raises(AssertionError, match="overlaps"):
        backend.linear(good["x"], square, good["x"], 4)
    with pytest.raises(AssertionError, match=r"\(64, 32\).*\(32, 32\)"):
        backend.load_gated(random_matrix(64, 32), random_matrix(32, 32))


def test_row_ops_refuse_what_does_not_fit(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(1)
    weight = backend.load_matrix([random_matrix(64, 32)])
    ids = np.zeros(3, np.int32)
    for call in (
        lambda: backend.embedding(ids.astype(np.int64), weight, floats(3, 32), 3),
        lambda: backend.embedding(ids, weight, floats(3, 32), 4),
        lambda: backend.embedding(ids, weight, floats(3, 64), 3),
        lambda: backend.embedding(ids, weight, floats(3, 32), 3, last_tokens=floats(4)),
        lambda: backend.embedding(ids, weight, floats(3, 32), 3, last_tokens=ids.astype(np.int64)),
        lambda: backend.embedding(ids, weight, floats(3, 32), 3, last_tokens=np.zeros((2, 2), np.int32)),
        lambda: backend.rms_norm(floats(3, 32), floats(31), 1e-5, floats(3, 32), 3),
        lambda: backend.rms_norm(floats(3, 32), floats(32), 1e-5, floats(2, 32), 3),
        lambda: backend.add_rms_norm(floats(3, 32), floats(31), 1e-5, floats(3, 32), 3),
        lambda: backend.add_rms_norm(floats(3, 32), floats(32), 1e-5, floats(2, 32), 3),
        lambda: backend.soft_cap(floats(3, 32), 30.0, 4),
        lambda: backend.soft_cap(np.zeros((3, 32)), 30.0, 3),
        lambda: backend.soft_cap(floats(3, 32), 0.0, 3),
        lambda: backend.soft_cap(floats(3, 32), -1.0, 3),
        lambda: backend.soft_cap(floats(3, 32), float("inf"), 3),
        lambda: backend.soft_cap(floats(3, 32), float("nan"), 3),
        lambda: backend.gather_rows(floats(3, 32), ids, floats(3, 31), 3),
        lambda: backend.gather_rows(floats(3, 32), ids[:2], floats(3, 32), 3),
        lambda: backend.write(floats(3, 32), floats(4, 32)),
        lambda: backend.write(floats(3, 32), floats(3, 31)),
        lambda: backend.write(floats(3, 32), np.zeros((3, 32))),
    ):
        with pytest.raises(AssertionError):
            call()


def test_attention_ops_refuse_what_does_not_fit(cpu: MakeBackend) -> None:
    backend = cpu(1)
    layout = KVLayout(num_layers=2, num_blocks=4, block_size=8, num_kv_heads=2, head_dim=16, dtype="float32")
    cache = backend.allocate_kv(layout)
    table = np.zeros((1, 4), np.int32)

    def rows(count: int = 3, length: int = 3, dtype: type = np.int32) -> Rows:
        column = np.zeros(length, dtype)
        return Rows(count, column, column, column, table)

    rope = RopeTable(floats(32, 8), floats(32, 8), False)
    qkv, out = floats(3, 8 * 16), floats(3, 4 * 16)
    backend.rope_kv_write(qkv, rows(), rope, cache, 1)
    backend.rope_kv_write(qkv, rows(), None, cache, 1, q_norm=floats(64), k_norm=floats(32))
    backend.paged_attention(qkv, rows(), cache, 1, 0.25, out)
    backend.paged_attention(qkv, rows(), cache, 1, 0.25, out, window=1, softcap=1.0, sinks=floats(4))
    backend.synchronize()
    for call in (
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 2),
        lambda: backend.rope_kv_write(qkv, rows(4), rope, cache, 0),
        lambda: backend.rope_kv_write(floats(3, 7 * 16), rows(), rope, cache, 0),
        lambda: backend.rope_kv_write(floats(3, 4 * 16), rows(), rope, cache, 0),
        lambda: backend.rope_kv_write(floats(3, 8 * 16 + 1), rows(), rope, cache, 0),
        lambda: backend.rope_kv_write(qkv, rows(dtype=np.int64), rope, cache, 0),
        lambda: backend.rope_kv_write(qkv, rows(length=2), rope, cache, 0),
        lambda: backend.rope_kv_write(qkv, rows(), RopeTable(floats(32, 9), floats(32, 9), False), cache, 0),
        lambda: backend.rope_kv_write(qkv, rows(), RopeTable(floats(32, 8), floats(31, 8), False), cache, 0),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(16)),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(15), k_norm=floats(16)),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(16), k_norm=floats(32)),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(64), k_norm=floats(16)),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(32), k_norm=floats(32)),
        lambda: backend.rope_kv_write(qkv, rows(), rope, cache, 0, q_norm=floats(4, 16), k_norm=floats(2, 16)),
        lambda: backend.rope_kv_write(qkv, rows(), None, cache, 0, q_norm=floats(16)),
        lambda: backend.rope_kv_write(qkv, rows(4), None, cache, 0),
        lambda: backend.paged_attention(qkv, rows(), cache, -1, 0.25, out),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, floats(3, 8 * 16)),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, floats(2, 4 * 16)),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, window=-1),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, softcap=-1.0),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, softcap=float("nan")),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, softcap=float("inf")),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, sinks=floats(2)),
        lambda: backend.paged_attention(qkv, rows(), cache, 0, 0.25, out, sinks=np.zeros(4)),
    ):
        with pytest.raises(AssertionError):
            call()
