"""The order of operations is written down, not left to the width of a processor's vectors: so are the bits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.kernels.cpu.jit import target_features

PRODUCTS = """
import hashlib
import numpy as np
from shardline.kernels import Expert, GroupedMatrix, KVLayout, RopeTable, RouterRule, Rows, SamplingBatch
from shardline.kernels import cpu_backend, pack_nibbles
from shardline.kernels.cpu.microkernel import VECTOR

rng = np.random.default_rng(0)

def matrix(bits, group_size, dtype, channels=130, inputs=192, ordered=False):
    q = rng.integers(0, 1 << bits, (channels, inputs), dtype=np.uint8)
    scale = rng.random((channels, inputs // group_size)).astype(dtype)
    order = rng.permutation(inputs).astype(np.int32) if ordered else None
    return GroupedMatrix(bits, group_size, pack_nibbles(q) if bits == 4 else q, scale, -scale * 7, order)

backend = cpu_backend(1)
digest = hashlib.sha256()
kinds = [matrix(4, 32, "float16"), matrix(8, 64, "float32")]
together, gated = backend.load_matrix(kinds), backend.load_gated(*kinds)
norm = backend.upload(rng.standard_normal(192, np.float32))
for rows in (1, 2, 3, 4, 7, 9, 67):
    x = backend.upload(rng.standard_normal((rows, 192), np.float32))
    normed, out, product = (backend.empty((rows, channels), "float32") for channels in (192, 260, 130))
    backend.rms_norm(x, norm, 1e-5, normed, rows)
    backend.linear(normed, together, out, rows)
    backend.gated_linear(normed, gated, product, rows)
    for array in (normed, out, product):
        digest.update(backend.read(array).tobytes())
"""

OTHERS = """
router = backend.upload(rng.standard_normal((7, 192), np.float32))
for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
    experts = backend.load_experts(
        (
            Expert(
                matrix(4, 32, "float16", 96, ordered=True),
                matrix(8, 64, "float32", 96, ordered=True),
                matrix(4, 16, "float16", 192, 96),
            )
            for _ in range(7)
        ),
        activation=activation,
    )
    for rows in (1, 67):
        x = backend.upload(rng.standard_normal((rows, 192), np.float32) / 100)
        ids, shares = backend.empty((rows, 3), "int32"), backend.empty((rows, 3), "float32")
        result = backend.upload(np.zeros((rows, 192), np.float32))
        backend.route(x, router, RouterRule(3), ids, shares, rows)
        backend.expert_mlp(x, experts, ids, shares, result, rows)
        backend.add_gated(x, norm, x, result, rows)
        for array in (ids, shares, result):
            digest.update(backend.read(array).tobytes())
        assert np.isfinite(backend.read(result)).all()

length, dim = 300, 80
angles = rng.random((length, dim // 2), np.float32)
rope = RopeTable(backend.upload(np.cos(angles)), backend.upload(np.sin(angles)), False)
numbers = backend.upload(np.arange(length, dtype=np.int32))
table = backend.upload(np.arange(-(-length // 16), dtype=np.int32)[None])
rows = Rows(length, numbers, numbers, backend.upload(np.zeros(length, np.int32)), table)
qkv = backend.upload(rng.standard_normal((length, 5 * dim), np.float32) * 2)
out = backend.empty((length, 3 * dim), "float32")
cache = backend.allocate_kv(KVLayout(1, table.shape[1], 16, 1, dim, "float16"))
weight = backend.upload(rng.standard_normal(dim, np.float32))
backend.rope_kv_write(qkv, rows, rope, cache, 0, q_norm=weight, k_norm=weight, eps=1e-6)
backend.paged_attention(qkv, rows, cache, 0, dim**-0.5, out)
capped, wide_norm, sinks = (backend.upload(rng.standard_normal(n, np.float32)) for n in ((length, 3 * dim), 3 * dim, 3))
backend.paged_attention(qkv, rows, cache, 0, dim**-0.5, capped, window=33, softcap=2.0, sinks=sinks)
backend.add_rms_norm(capped, wide_norm, 1e-6, out, length)
backend.soft_cap(capped, 0.5, length)
for array in (qkv, out, capped):
    digest.update(backend.read(array).tobytes())
cache = backend.allocate_kv(KVLayout(1, table.shape[1], 16, 1, dim, "int8"))
backend.rope_kv_write(qkv, rows, rope, cache, 0)
backend.paged_attention(qkv, rows, cache, 0, dim**-0.5, out, window=200)
for array in (cache.keys, cache.values, cache.key_scales, cache.value_scales, out):
    digest.update(backend.read(array).tobytes())

count, vocab = 40, 3001
some = rng.integers(0, 2, (4, count))

def floats(values):
    return np.asarray(values, np.float32)

batch = SamplingBatch(
    temperature=floats(0.5 + some[0]), top_k=(some[1] * 40).astype(np.int32), top_p=floats(1 - 0.3 * some[2]),
    min_p=floats(0.01 * some[3]), repetition=np.ones(count, np.float32), presence=np.zeros(count, np.float32),
    frequency=np.zeros(count, np.float32), seed=np.arange(count, dtype=np.uint64),
    position=np.arange(count, dtype=np.int64), logprobs=np.full(count, 9, np.int32),
    bias_offsets=np.zeros(count + 1, np.int64), bias_ids=np.zeros(0, np.int32), bias_values=np.zeros(0, np.float32),
    history_offsets=np.zeros(count + 1, np.int64), history_ids=np.zeros(0, np.int32),
    history_counts=np.zeros(0, np.int32),
)
chosen = backend.sample(backend.upload(rng.standard_normal((count, vocab), np.float32) * 3), batch)
for array in (chosen.token_ids, chosen.logprobs, chosen.top_ids, chosen.top_logprobs):
    digest.update(array.tobytes())
"""

END = """
backend.close()
print(VECTOR, digest.hexdigest())
"""


def run(cache: Path, script: str, **environment: str) -> tuple[str, str]:
    given = {**os.environ, "SHARDLINE_CACHE": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", script + END], env=given, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    width, digest = done.stdout.split()
    return width, digest


# Each of its processes compiles everything for another processor.
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512f" not in target_features(), reason="needs a processor with AVX-512"
)
def test_avx2_and_avx512_give_the_same_bits(tmp_path: Path) -> None:
    wide = run(tmp_path, PRODUCTS + OTHERS)
    features = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
    narrow = run(tmp_path, PRODUCTS + OTHERS, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=features)
    assert (wide[0], narrow[0]) == ("32", "8")
    assert wide[1] == narrow[1]


def test_wide_and_narrow_passes_give_the_same_bits(tmp_path: Path) -> None:
    """On any processor: LLVM splits vectors that it does not have."""

    def claiming(change: str) -> str:
        return f"""
from shardline.kernels.cpu import jit
claimed = jit.target_features() {change} {{"avx512f"}}
jit.target_features = lambda: claimed
"""

    # In folders of their own: the stamp of compiled code knows the real features.
    wide = run(tmp_path / "wide", claiming("|") + PRODUCTS)
    narrow = run(tmp_path / "narrow", claiming("-") + PRODUCTS)
    assert (wide[0], narrow[0]) == ("32", "8")
    assert wide[1] == narrow[1]
