"""The order of operations is written down, not left to the width of a processor's vectors: so are the bits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.kernels.cpu.jit import target_features

SCRIPT = """
import hashlib
import numpy as np
from shardline.kernels import GroupedMatrix, cpu_backend, pack_nibbles
from shardline.kernels.cpu.microkernel import PASS_BYTES

rng = np.random.default_rng(0)

def matrix(bits, group_size, dtype):
    q = rng.integers(0, 1 << bits, (130, 192), dtype=np.uint8)
    scale = rng.random((130, 192 // group_size)).astype(dtype)
    return GroupedMatrix(bits, group_size, pack_nibbles(q) if bits == 4 else q, scale, -scale * 7)

backend = cpu_backend(1)
digest = hashlib.sha256()
kinds = [matrix(4, 32, "float16"), matrix(8, 64, "float32")]
together, gated = backend.load_matrix(kinds), backend.load_gated(*kinds)
norm = backend.upload(rng.standard_normal(192, np.float32))
for rows in (1, 2, 3, 4, 67):
    x = backend.upload(rng.standard_normal((rows, 192), np.float32))
    normed, out, product = (backend.empty((rows, channels), "float32") for channels in (192, 260, 130))
    backend.rms_norm(x, norm, 1e-5, normed, rows)
    backend.linear(normed, together, out, rows)
    backend.gated_linear(normed, gated, product, rows)
    for array in (normed, out, product):
        digest.update(backend.read(array).tobytes())
backend.close()
print(PASS_BYTES, digest.hexdigest())
"""


def run(cache: Path, **environment: str) -> tuple[str, str]:
    given = {**os.environ, "SHARDLINE_CACHE": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=given, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    width, digest = done.stdout.split()
    return width, digest


@pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512f" not in target_features(), reason="needs a processor with AVX-512"
)
def test_avx2_and_avx512_give_the_same_bits(tmp_path: Path) -> None:
    wide = run(tmp_path)
    narrow = run(tmp_path, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt")
    assert (wide[0], narrow[0]) == ("32", "8")
    assert wide[1] == narrow[1]
