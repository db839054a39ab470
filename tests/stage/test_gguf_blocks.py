"""Every block type maps to the canonical format bit for bit."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.kernels import quantize_groups
from shardline.stage import CheckpointError, open_checkpoint

QUANTIZED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.MXFP4]
REQUANTIZED = [Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS]
SHAPES = {
    Kind.Q4_0: (4, 32, np.float16),
    Kind.Q4_1: (4, 32, np.float16),
    Kind.Q5_0: (8, 32, np.float16),
    Kind.Q5_1: (8, 32, np.float16),
    Kind.Q8_0: (8, 32, np.float16),
    Kind.Q4_K: (4, 32, np.float32),
    Kind.Q5_K: (8, 32, np.float32),
    Kind.Q6_K: (8, 16, np.float32),
    Kind.MXFP4: (8, 32, np.float16),
}
ROLES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"} | {
    name: f"ffn_{name}" for name in ("gate", "up", "down")
}


def model(tiny_model, kind, **changes):
    # K-quants come in rows of 256.
    return tiny_model(kinds=[kind], hidden=256, ffn=512, head_dim=64, layers=2, **changes)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_weights_are_the_files_own(tiny_model, kind):
    path = model(tiny_model, kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    for layer in range(2):
        for role, name in ROLES.items():
            tensor = tensors[f"blk.{layer}.{name}.weight"]
            matrix = checkpoint.matrix(role, layer)
            assert (matrix.bits, matrix.group_size, matrix.scale.dtype) == SHAPES[kind]
            assert np.array_equal(matrix.dequantize(), gguf.dequantize(tensor.data, kind))
            assert matrix.nbytes == checkpoint.matrix_bytes(role, layer)
    checkpoint.close()


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_a_tensor_of_many_pieces_is_the_same(tiny_model, kind):
    """Tensors are unpacked some rows at a time; this one takes several pieces, the last a short one."""
    path = tiny_model(embed=kind, hidden=256, ffn=256, head_dim=64, layers=1, vocab=4099)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    assert tensor.n_bytes > 2 << 18
    checkpoint = open_checkpoint(path)
    assert np.array_equal(checkpoint.matrix("embed", None).dequantize(), gguf.dequantize(tensor.data, kind))
    checkpoint.close()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_float_matrices_become_eight_bits_and_a_warning_says_so(tiny_model, kind, caplog):
    path = model(tiny_model, kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        for role, name in ROLES.items():
            matrix = checkpoint.matrix(role, 1)
            values = gguf.dequantize(tensors[f"blk.1.{name}.weight"].data, kind)
            rounded = gguf.dequantize(gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)
            assert np.array_equal(matrix.dequantize(), rounded)
            assert np.abs(matrix.dequantize() - values).max() <= np.abs(values).max() / 200
            assert matrix.nbytes == checkpoint.matrix_bytes(role, 1)
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    assert kind.name in caplog.text
    assert "quantized to 8 bits" in caplog.text
    checkpoint.close()


@pytest.mark.parametrize("kind", REQUANTIZED, ids=lambda kind: kind.name)
def test_other_grids_become_four_bits_and_a_warning_says_so(tiny_model, kind, caplog):
    """By the search of the kernels, on the file's own values; a random model is as hard as any."""
    path = model(tiny_model, kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        for role, name in ROLES.items():
            matrix = checkpoint.matrix(role, 1)
            values = gguf.dequantize(tensors[f"blk.1.{name}.weight"].data, kind)
            q, scale, minimum = quantize_groups(values, 4, 32)
            assert np.array_equal(matrix.q, q)
            assert np.array_equal(matrix.scale, scale)
            assert np.array_equal(matrix.minimum, minimum)
            off = matrix.dequantize() - values
            assert np.sqrt((off * off).mean()) < 0.1 * np.sqrt((values * values).mean())
            assert (matrix.bits, matrix.group_size) == (4, 32)
            assert matrix.nbytes == checkpoint.matrix_bytes(role, 1)
    assert len(caplog.records) == 1
    assert f"are {kind.name}; they are requantized to 4 bits in groups of 32" in caplog.text
    checkpoint.close()


@pytest.mark.parametrize("kind", REQUANTIZED, ids=lambda kind: kind.name)
def test_grids_that_are_no_numbers_are_refused(tiny_model, kind):
    def poison(tensors):
        data, _ = tensors["blk.1.ffn_up.weight"]
        data = data.copy()
        at = {Kind.Q2_K: 82, Kind.Q3_K: 108, Kind.IQ4_NL: 0, Kind.IQ4_XS: 0}[kind]
        data[7, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        tensors["blk.1.ffn_up.weight"] = (data, kind)

    checkpoint = open_checkpoint(model(tiny_model, kind, edit=poison))
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight: an element is not a finite number"):
        checkpoint.matrix("up", 1)
    checkpoint.close()


@pytest.mark.parametrize(
    ("exponents", "dtype"), [((104, 140), np.float16), ((104, 103), np.float32), ((104, 141), np.float32)]
)
def test_powers_of_two_stay_exact(tiny_model, exponents, dtype):
    """2^-24 and -12 * 2^12 are float16s, but the powers below and above are not: then a matrix has float32 scales."""

    def change(tensors):
        data, kind = tensors["blk.1.attn_q.weight"]
        data = data.copy()
        data[:, 0], data[9, 0] = exponents
        tensors["blk.1.attn_q.weight"] = (data, kind)

    path = tiny_model(kinds=[Kind.MXFP4], edit=change)
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.attn_q.weight")
    checkpoint = open_checkpoint(path)
    matrix = checkpoint.matrix("q", 1)
    checkpoint.close()
    assert matrix.scale.dtype == dtype
    assert np.array_equal(matrix.dequantize(), gguf.dequantize(tensor.data, Kind.MXFP4))


@pytest.mark.parametrize("exponent", [252, 255])
def test_powers_of_two_that_are_no_weights_are_refused(tiny_model, exponent):
    def change(tensors):
        data, kind = tensors["blk.1.attn_q.weight"]
        data = data.copy()
        data[9, 0] = exponent
        tensors["blk.1.attn_q.weight"] = (data, kind)

    checkpoint = open_checkpoint(tiny_model(kinds=[Kind.MXFP4], edit=change))
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.attn_q\.weight: a scale .* is not a finite number"):
        checkpoint.matrix("q", 1)
    checkpoint.close()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_vectors_stay_float32(tiny_model, kind):
    values = np.linspace(-2, 3, 64, dtype=np.float32)
    raw = gguf.quantize(values, kind)
    path = tiny_model(edit=lambda tensors: tensors.update({"output_norm.weight": (raw, kind)}))
    checkpoint = open_checkpoint(path)
    got = checkpoint.vector("final_norm", None)
    assert got.dtype == np.float32
    assert np.array_equal(got, gguf.dequantize(raw, kind))
    checkpoint.close()


def test_scales_beyond_float16_stay_exact(tiny_model):
    """A Q8_0 scale of 600 is a float16, its minimum -128 * 600 is none; and neither are the ones after it."""

    def enlarge(tensors):
        data, kind = tensors["token_embd.weight"]
        data = data.copy()
        data[50, :2] = np.array([600], np.float16).view(np.uint8)
        tensors["token_embd.weight"] = (data, kind)

    path = tiny_model(edit=enlarge)
    checkpoint = open_checkpoint(path)
    matrix = checkpoint.matrix("embed", None)
    assert matrix.scale.dtype == np.float32
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    assert np.array_equal(matrix.dequantize(), gguf.dequantize(tensor.data, Kind.Q8_0))
    checkpoint.close()


@pytest.mark.parametrize(
    ("kind", "offset"),
    [(kind, 0) for kind in QUANTIZED[:7]]
    + [(kind, 2) for kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)]
    + [(Kind.Q6_K, 208)],
    ids=lambda value: value.name if isinstance(value, Kind) else str(value),
)
@pytest.mark.parametrize("bad", [0x7E00, 0x7D00, 0x7C00, 0xFC00], ids=["nan", "signalling nan", "inf", "-inf"])
def test_scales_that_are_no_numbers_are_refused(tiny_model, kind, offset, bad):
    def poison(tensors):
        data, _ = tensors["blk.1.ffn_up.weight"]
        data = data.copy()
        data[7, offset : offset + 2] = np.array([bad], np.uint16).view(np.uint8)
        # A minimum is a product with a 6-bit integer, which must not be zero for inf to stay inf.
        if kind in (Kind.Q4_K, Kind.Q5_K):
            data[7, 4:16] = 255
        tensors["blk.1.ffn_up.weight"] = (data, kind)

    path = model(tiny_model, kind, edit=poison)
    checkpoint = open_checkpoint(path)
    checkpoint.matrix("gate", 1)
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight: .* not a finite number"):
        checkpoint.matrix("up", 1)
    checkpoint.close()


@pytest.mark.parametrize(("bad", "what"), [(np.nan, "an element"), (-np.inf, "an element"), (3e38, "a scale")], ids=str)
def test_float_elements_that_do_not_fit_are_refused(tiny_model, bad, what):
    def poison(tensors):
        data, kind = tensors["blk.0.attn_q.weight"]
        values = data.view(np.float32).copy()
        values[3, 5] = bad
        tensors["blk.0.attn_q.weight"] = (values, kind)

    path = tiny_model(kinds=[Kind.F32], edit=poison)
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=rf"tensor blk\.0\.attn_q\.weight: {what} .*is not a finite number"):
        checkpoint.matrix("q", 0)
    checkpoint.close()
