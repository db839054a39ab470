"""MXFP4's numbers, looked up in the format's own table, survive exactly."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage.huggingface.formats import Mxfp4Format, mxfp4_expert, mxfp4_matrix, read_config

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def number(nibble):
    return NUMBERS[nibble % 8] * (-1 if nibble >= 8 else 1)


def weights(blocks, scales):
    """float64 [N, K] by the format's definition."""
    n, count, _ = blocks.shape
    out = np.empty((n, count * 32))
    for row, block, byte in np.ndindex(blocks.shape):
        power = 2.0 ** (int(scales[row, block]) - 127)
        at = block * 32 + 2 * byte
        out[row, at] = number(int(blocks[row, block, byte]) % 16) * power
        out[row, at + 1] = number(int(blocks[row, block, byte]) // 16) * power
    return out


def test_every_byte_and_every_usual_scale():
    exponents = np.arange(104, 141, dtype=np.uint8)
    blocks = np.resize(np.arange(256, dtype=np.uint8), (16 * len(exponents), 3, 16))
    scales = np.resize(exponents, blocks.shape[:2])
    got = mxfp4_matrix(blocks, scales)
    assert (got.bits, got.group_size, got.shape) == (8, 32, (len(blocks), 96))
    assert got.scale.dtype == np.float16
    assert np.array_equal(got.dequantize(), weights(blocks, scales))
    assert got.nbytes == Mxfp4Format({"quant_method": "mxfp4"}).nbytes(got.shape)


@pytest.mark.parametrize("exponent", [0, 1, 50, 103, 141, 200, 251])
def test_scales_that_only_float32_holds(exponent):
    blocks = np.arange(256, dtype=np.uint8).reshape(8, 2, 16)
    scales = np.full((8, 2), exponent, np.uint8)
    scales[0, 0] = 120
    got = mxfp4_matrix(blocks, scales)
    assert got.scale.dtype == np.float32
    assert np.array_equal(got.dequantize(), weights(blocks, scales))


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((4, 16), np.uint8), np.zeros(4, np.uint8), r"the blocks have the shape \[4, 16\]"),
        (np.zeros((4, 0, 16), np.uint8), np.zeros((4, 0), np.uint8), "the blocks have the shape"),
        (np.zeros((4, 2, 15), np.uint8), np.zeros((4, 2), np.uint8), r"not \[4, 2, 16\]"),
        (np.zeros((4, 2, 16), np.int8), np.zeros((4, 2), np.uint8), "the blocks is of int8"),
        (
            np.zeros((4, 2, 16), np.uint8),
            np.zeros((4, 3), np.uint8),
            r"the scales has the shape \[4, 3\], not \[4, 2\]",
        ),
        (np.zeros((4, 2, 16), np.uint8), np.full((4, 2), 255, np.uint8), "a scale is not a number"),
        (np.zeros((4, 2, 16), np.uint8), np.full((4, 2), 252, np.uint8), r"a scale is 2\^125: too large"),
    ],
)
def test_what_does_not_fit_is_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        mxfp4_matrix(blocks, scales)


class OneAtATime:
    """A tensor in a file: gives one expert, and remembers which."""

    def __init__(self, array):
        self.array, self.read = array, []

    def __getitem__(self, expert):
        self.read.append(expert)
        return self.array[expert]


def test_one_expert_is_read_alone():
    rng = np.random.default_rng(0)
    blocks = OneAtATime(rng.integers(0, 256, (5, 12, 3, 16), dtype=np.uint8))
    scales = OneAtATime(rng.integers(110, 130, (5, 12, 3), dtype=np.uint8))
    whole = weights(blocks.array[3], scales.array[3])
    for rows in (slice(None), slice(0, None, 2), slice(1, None, 2)):
        assert np.array_equal(mxfp4_expert(blocks, scales, 3, rows).dequantize(), whole[rows])
    assert set(blocks.read) == set(scales.read) == {3}


def test_config():
    assert isinstance(read_config({"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed"]}), Mxfp4Format)
    with pytest.raises(ValueError, match=r"block_size.: 16 is not supported"):
        read_config({"quant_method": "mxfp4", "block_size": 16})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method is missing"),
        ({"quant_method": "bitsandbytes"}, 'quant_method: "bitsandbytes" is not supported, only gptq, awq'),
        ({"quant_method": "fp8"}, 'quant_method: "fp8" is not supported'),
        ({"quant_method": ["gptq"]}, r'quant_method: \["gptq"\] is not supported'),
    ],
)
def test_other_formats_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        read_config(config)
