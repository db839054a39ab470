"""AWQ tensors of the gemm layout, written here nibble by nibble, give the weights that the layout defines."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage.huggingface.formats import AwqFormat, Scheme, awq_matrix

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def across(integers):
    """[rows, N] to words [rows, N / 8]: place i of a word, from the lowest, is its channel ORDER[i]."""
    rows, n = integers.shape
    words = np.zeros((rows, n // 8), np.int64)
    for row in range(rows):
        for start in range(0, n, 8):
            for place, channel in enumerate(ORDER):
                words[row, start // 8] += int(integers[row, start + channel]) * 16**place
    return words.astype(np.uint32).view(np.int32)


def tensors(k, n, group_size):
    rng = np.random.default_rng(k + n)
    count = 1 if group_size == -1 else k // group_size
    zeros = rng.integers(0, 16, (count, n))
    zeros[0, :8] = [0, 15, 0, 15, 8, 7, 15, 0]
    return rng.integers(0, 16, (k, n)), zeros, (rng.standard_normal((count, n)) * 0.02).astype(np.float16)


@pytest.mark.parametrize(
    ("k", "n", "group_size", "resident"),
    [(128, 72, 128, 128), (96, 8, 32, 32), (160, 16, 32, 32), (64, 1064, 64, 64), (160, 8, -1, 32), (512, 8, 256, 128)],
)
def test_weights_are_the_layouts(k, n, group_size, resident):
    q, zeros, scales = tensors(k, n, group_size)
    got = awq_matrix(Scheme(4, group_size, False), across(q), across(zeros), scales)
    repeat = k // len(scales)
    expected = scales.astype(float).repeat(repeat, axis=0) * (q - zeros.repeat(repeat, axis=0))
    assert (got.bits, got.group_size, got.shape, got.input_order) == (4, resident, (n, k), None)
    assert np.array_equal(got.dequantize(), expected.T)
    assert np.array_equal(got.integers(), q.T)
    assert got.scale.flags.c_contiguous
    assert got.q.flags.c_contiguous
    assert got.nbytes == Scheme(4, group_size, False).nbytes((n, k), "F16")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda a: a[:, 0], "it must be a matrix"),
        ("qweight", lambda a: a.astype(np.uint8), "qweight is of uint8, not int32"),
        ("qweight", lambda a: a[:40], "40 input channels"),
        ("qzeros", lambda a: a[:1], r"qzeros has the shape \[1, 2\], not \[2, 2\]"),
        ("scales", lambda a: a[:, :8], r"scales has the shape \[2, 8\], not \[2, 16\]"),
        ("scales", lambda a: a * np.float16(np.inf), "scales holds something that is not a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    q, zeros, scales = tensors(64, 16, 32)
    given = {"qweight": across(q), "qzeros": across(zeros), "scales": scales}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        awq_matrix(Scheme(4, 32, False), **given)


def test_config():
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}
    assert AwqFormat(config).scheme("a") == Scheme(4, 64, False)
    assert AwqFormat({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}).scheme("a") == Scheme(4, 128, False)
    assert AwqFormat(config | {"modules_to_not_convert": ["gate"], "backend": "autoawq"}).scheme("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, 'version: "gemv" is not supported, only gemm'),
        ({"version": "gemv_fast"}, 'version: "gemv_fast" is not supported, only gemm'),
        ({"version": "marlin"}, 'version: "marlin" is not supported, only gemm'),
        ({"version": "exllama"}, 'version: "exllama" is not supported, only gemm'),
        ({"format": "gemv"}, 'format: "gemv" is not supported, only gemm'),
        ({"backend": "llm-awq"}, 'backend: "llm-awq" is not supported'),
        ({"bits": 8}, "bits: 8 is not supported, only 4"),
        ({"group_size": "128"}, 'group_size: "128" is no integer'),
        ({"zero_point": 1}, "zero_point: 1 is neither true nor false"),
        ({"krot": 8}, "krot.: 8 is not supported"),
    ],
)
def test_config_that_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AwqFormat({"quant_method": "awq", "bits": 4, "group_size": 128} | changes)
