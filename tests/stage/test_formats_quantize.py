"""Our quantizer: smaller errors than GGUF's formats of the same size, the same bytes everywhere."""

from __future__ import annotations

import hashlib
import importlib

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.stage.huggingface.formats import quantize, quantized_bytes


def weights(kind, shape=(256, 576)):
    """Rows as trained weights are: each its own scale, heavier tails than a bell, now and then an outlier."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(shape) if kind == "normal" else rng.standard_t(5, shape)
    values *= rng.uniform(0.01, 0.2, (shape[0], 1))
    if kind == "outliers":
        values[rng.random(shape) < 0.002] *= 8
    return values.astype(np.float32)


def bfloat16(values):
    """float32 to the nearest bfloat16 as uint16, and that as float32."""
    bits = values.view(np.uint32)
    raw = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return raw, (raw.astype(np.uint32) << 16).view(np.float32)


def error(matrix, values):
    return np.square(matrix.dequantize().astype(float) - values).mean()


def gguf_error(values, kind):
    return np.square(gguf.dequantize(gguf.quantize(values, kind), kind).astype(float) - values).mean()


def parts(matrix):
    return matrix.q, matrix.scale, matrix.minimum


def same(one, other):
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(parts(one), parts(other), strict=True))


@pytest.mark.parametrize("kind", ["normal", "tails", "outliers"])
def test_error_is_clearly_below_ggufs(kind):
    raw, values = bfloat16(weights(kind))
    four, eight = quantize([raw], raw.shape), quantize([raw], raw.shape, bits=8)
    assert (four.bits, four.group_size, four.scale.dtype) == (4, 32, np.float16)
    assert four.nbytes == quantized_bytes(raw.shape, 4, 32) == raw.size * 5 / 8
    assert eight.nbytes == quantized_bytes(raw.shape, 8, 32)
    assert error(four, values) < 0.83 * gguf_error(values, Kind.Q4_1)
    assert error(four, values) < 0.68 * gguf_error(values, Kind.Q4_0)
    assert error(eight, values) < 0.72 * gguf_error(values, Kind.Q8_0)


@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_larger_groups_cost_as_much_as_they_must(group_size):
    """Against the same grid without a search: least and largest element on its first and last point."""
    values = weights("tails", (128, 512))
    groups = values.reshape(-1, group_size)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    step = (high - low) / 15
    plain = np.square(np.rint((groups - low) / step) * step + low - groups).mean()
    got = quantize([values], values.shape, group_size=group_size)
    assert got.group_size == group_size
    # Of few elements the ends matter more, and there is more to gain.
    assert error(got, values) < {16: 0.75, 32: 0.82, 64: 0.86, 128: 0.9}[group_size] * plain


@pytest.mark.parametrize("bits", [4, 8])
def test_no_integer_could_be_nearer(bits):
    values = weights("tails", (64, 256))
    got = quantize([values], values.shape, bits=bits)
    scale, minimum = (part.astype(float).repeat(32, axis=1) for part in (got.scale, got.minimum))
    for step in (-1, 1):
        other = got.integers().astype(float) + step
        allowed = (other >= 0) & (other < 1 << bits)
        closer = np.abs(other * scale + minimum - values) < np.abs(got.dequantize() - values) - 1e-3 * scale
        assert not (closer & allowed).any()


# Equal with AVX2 and with AVX-512.
DIGESTS = {
    4: "da1a7d97c942c0a07238b5a48ff1ec3bc9cdc257717f54b8c93277f39290985b",
    8: "cdefa180cfd53b0555f3386116c56b279ed2836e78ef2aae0b0b5b097190bd88",
}


@pytest.mark.parametrize("bits", [4, 8])
def test_the_same_bytes_on_every_machine(bits):
    # Nothing that a mathematical library computes: the input must be the same everywhere, too.
    rng = np.random.default_rng(11)
    values = rng.integers(-(2**15), 2**15, (4, 67, 320)).sum(axis=0).astype(np.float32) * np.float32(2.0**-20)
    values[rng.integers(0, 67, 60), rng.integers(0, 320, 60)] *= np.float32(6)
    values[3, :32] = 0
    values[4, :32] = 0.125
    values[5] *= np.float32(2.0**-20)
    values[6] *= np.float32(2.0**-140)
    values[7] *= np.float32(2.0**14)
    values[8] += np.float32(100)
    got = quantize([values], values.shape, bits=bits)
    digest = hashlib.sha256(b"".join(part.tobytes() for part in parts(got))).hexdigest()
    assert digest == DIGESTS[bits]


@pytest.mark.parametrize("bits", [4, 8])
def test_neither_pieces_nor_threads_change_a_bit(bits, monkeypatch):
    values = weights("tails", (100, 160))
    whole = quantize([values], values.shape, bits=bits)
    module = importlib.import_module("shardline.stage.huggingface.formats.quantize")
    monkeypatch.setattr(module, "_ELEMENTS", 7 * 160)
    for cuts in ([1, 2, 3], [50], [99], list(range(1, 100))):
        pieces = np.split(values, cuts)
        assert same(whole, quantize(iter(pieces), values.shape, bits=bits, num_threads=3))
    assert same(whole, quantize([np.asfortranarray(values)], values.shape, bits=bits))
    # A group's integers depend on the group alone.
    turned = quantize([values[::-1]], values.shape, bits=bits)
    assert all(np.array_equal(a, b[::-1]) for a, b in zip(parts(whole), parts(turned), strict=True))


def test_every_float_type():
    values = weights("normal", (8, 64))
    raw, rounded = bfloat16(values)
    half = values.astype(np.float16)
    assert same(quantize([raw], raw.shape), quantize([rounded], raw.shape))
    assert same(quantize([half], half.shape), quantize([half.astype(np.float32)], half.shape))


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_that_are_level_or_extreme(bits):
    rng = np.random.default_rng(0)
    values = np.zeros((9, 32), np.float32)
    values[1] = 0.3
    values[2] = -1e-7
    values[3] = rng.choice([-32768, 32768], 32)
    values[4] = rng.standard_normal(32) * 1e-6
    values[5] = rng.standard_normal(32) * 1e-42
    values[6] = 1000 + rng.standard_normal(32) * 0.01
    values[7, 0] = 32768
    values[8] = np.linspace(-1, 1, 32)
    got = quantize([values], values.shape, bits=bits)
    assert np.isfinite(got.dequantize()).all()
    off = np.abs(got.dequantize() - values).max(axis=1)
    assert off[0] == 0
    steps = (values.max(1) - values.min(1)) / ((1 << bits) - 1)
    # Half a step and what float16 loses of the minimum; ends that were cut off may be off by more than half a step.
    assert (off <= 2 * steps + np.abs(values).max(1) / 2048 + 2.0**-24).all(), off


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 32769, -65504, 1e30])
def test_elements_without_a_place_are_refused(bad):
    values = np.zeros((40, 64), np.float32)
    values[33, 7] = bad
    with pytest.raises(ValueError, match="not a finite number, or its size is past 32768"):
        quantize([values], values.shape)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([np.zeros((4, 64), np.float32)], "it has 4 rows, not 8"),
        ([np.zeros((4, 64), np.float32)] * 3, "rows 8 and on"),
        ([np.zeros((8, 32), np.float32)], r"rows 0 and on have the shape \[8, 32\], in a matrix \[8, 64\]"),
        ([np.zeros((8, 2, 32), np.float32)], "rows 0 and on have the shape"),
        ([np.zeros((8, 64), np.float64)], "rows 0 and on is of float64, not float16, bfloat16 or float32"),
        ([np.zeros((8, 64), np.int8)], "is of int8"),
    ],
)
def test_what_does_not_fit_is_refused(pieces, message):
    with pytest.raises(ValueError, match=message):
        quantize(pieces, (8, 64))


def test_channels_that_are_no_multiple_of_the_group_size():
    with pytest.raises(ValueError, match="80 input channels are not a multiple of the group size 32"):
        quantize([np.zeros((8, 80), np.float32)], (8, 80))
    assert quantize([np.zeros((8, 80), np.float32)], (8, 80), group_size=16).group_size == 16
