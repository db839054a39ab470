"""GPTQ tensors, written here bit by bit from the published layout, give the weights that the layout defines."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage.huggingface.formats import GptqFormat, Scheme, gptq_matrix


def word(fields, bits):
    """An int32 whose lowest field is the first."""
    digits = "".join(format(int(field), f"0{bits}b") for field in reversed(fields)).zfill(32)
    return int.from_bytes(int(digits, 2).to_bytes(4, "little"), "little", signed=True)


def down(integers, bits):
    """[K, N] to words [K b / 32, N]."""
    per_word = 32 // bits
    rows = range(0, len(integers), per_word)
    return np.array([[word(integers[row : row + per_word, n], bits) for n in range(integers.shape[1])] for row in rows],
                    np.int32)  # fmt: skip


def across(integers, bits):
    """[groups, N] to words [groups, N b / 32], the last filled up with zeros."""
    padded = np.pad(integers, ((0, 0), (0, -integers.shape[1] % (32 // bits))))
    return np.ascontiguousarray(down(padded.T, bits).T)


def stored(zeros, bits, how):
    """The zeros as words, in one of the three ways in which files have them."""
    if how == "as they are":
        return across(zeros, bits)
    if how == "minus one":
        return across((zeros.astype(int) - 1) % (1 << bits), bits)
    one = word([1] * (32 // bits), bits)
    less = [[(int(value) - one) % 2**32 for value in row] for row in across(zeros, bits)]
    return np.array(less, np.uint32).view(np.int32)


def weights(q, zeros, scales, groups_of_channels):
    """float64 [N, K] by the layout's definition."""
    k, n = q.shape
    out = np.empty((n, k))
    for channel in range(k):
        group = groups_of_channels[channel]
        out[:, channel] = scales[group].astype(float) * (q[channel].astype(int) - zeros[group].astype(int))
    return out


def tensors(rng, k, n, group_size, bits=4, symmetric=False):
    count = 1 if group_size == -1 else -(-k // group_size)
    q = rng.integers(0, 1 << bits, (k, n), dtype=np.uint8)
    zeros = rng.integers(0, 1 << bits, (count, n), dtype=np.uint8)
    zeros[0, : n // 2] = np.resize([0, (1 << bits) - 1, 0, 5], n // 2)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = (rng.standard_normal((count, n)) * 0.02).astype(np.float16)
    return q, zeros, scales


@pytest.mark.parametrize("how", ["as they are", "minus one", "word minus one"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "resident"),
    [
        (256, 72, 128, 128),
        (96, 8, 32, 32),
        (160, 20, 32, 32),
        (192, 24, 64, 64),
        (160, 12, 128, 32),  # the last group has 32 channels
        (512, 16, 256, 128),
        (96, 16, -1, 32),
        (320, 8, -1, 64),
        (48, 8, 48, 16),
        (256, 8, -1, 128),
    ],
)
def test_weights_are_the_layouts(k, n, group_size, resident, bits, symmetric, how):
    rng = np.random.default_rng(k + n)
    scheme = Scheme(bits, group_size, symmetric, how)
    q, zeros, scales = tensors(rng, k, n, group_size, bits, symmetric)
    channels = np.arange(k) // (k if group_size == -1 else group_size)
    got = gptq_matrix(scheme, down(q, bits), stored(zeros, bits, how), scales)
    assert (got.bits, got.group_size, got.shape) == (bits, resident, (n, k))
    assert got.input_order is None
    assert np.array_equal(got.dequantize(), weights(q, zeros, scales, channels))
    assert np.array_equal(got.integers(), q.T)
    assert got.scale.dtype == (np.float16 if symmetric else np.float32)
    assert not np.signbit(got.minimum[got.minimum == 0]).any()
    assert got.nbytes == scheme.nbytes(got.shape, "F16")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("k", "n", "group_size"), [(256, 24, 32), (160, 9, 32), (512, 300, 128), (512, 8, 256), (96, 8, -1)]
)
def test_act_order(k, n, group_size, bits):
    rng = np.random.default_rng(k)
    scheme = Scheme(bits, group_size, False, "minus one")
    q, zeros, scales = tensors(rng, k, n, group_size, bits)
    g_idx = rng.permutation(np.arange(k) // (k if group_size == -1 else group_size)).astype(np.int32)
    got = gptq_matrix(scheme, down(q, bits), stored(zeros, bits, "minus one"), scales, g_idx)
    assert np.array_equal(got.dequantize(), weights(q, zeros, scales, g_idx))
    if group_size == -1:
        assert got.input_order is None
        return
    assert (np.diff(g_idx) < 0).any()
    assert np.array_equal(np.sort(got.input_order), np.arange(k))
    assert (np.diff(g_idx[got.input_order]) >= 0).all()
    # One file, one resident form: channels of a group stay in their order.
    assert all((np.diff(got.input_order[g_idx[got.input_order] == group]) > 0).all() for group in set(g_idx))


@pytest.mark.parametrize("trivial", ["in order", "zeros", "absent"])
def test_an_order_that_is_none(trivial):
    rng = np.random.default_rng(5)
    q, zeros, scales = tensors(rng, 128, 16, 32)
    in_order = np.arange(128, dtype=np.int32) // 32
    g_idx = {"in order": in_order, "zeros": np.zeros(128, np.int32), "absent": None}[trivial]
    got = gptq_matrix(Scheme(4, 32, False), down(q, 4), across(zeros, 4), scales, g_idx)
    assert got.input_order is None
    assert np.array_equal(got.dequantize(), weights(q, zeros, scales, in_order))


def test_a_zero_of_0_in_each_way_of_storing_it():
    """0 is stored as 15; a field above it is one less where the writer took the ones from the whole word."""
    q = np.full((32, 8), 3, np.uint8)
    scales = np.ones((1, 8), np.float16)
    zeros = np.array([[0, 5, 0, 0, 15, 1, 8, 0]], np.uint8)
    expected = 3.0 - zeros.T.astype(np.float32).repeat(32, axis=1)
    by_field = int.from_bytes(bytes([0x4F, 0xFF, 0x0E, 0xF7]), "little", signed=True)
    by_word = int.from_bytes(bytes([0x3F, 0xEF, 0x0D, 0xF7]), "little", signed=True)
    for how, words in (("minus one", by_field), ("word minus one", by_word)):
        assert stored(zeros, 4, how) == words
        got = gptq_matrix(Scheme(4, 32, False, how), down(q, 4), np.array([[words]], np.int32), scales)
        assert np.array_equal(got.dequantize(), expected)


@pytest.mark.parametrize("how", ["as they are", "minus one", "word minus one"])
@pytest.mark.parametrize("written", [7, 8])
def test_a_symmetric_file_may_name_the_wrong_version(written, how):
    q = np.arange(16, dtype=np.uint8).repeat(6).reshape(32, 3)
    words = across(np.full((1, 3), written, np.uint8), 4)
    got = gptq_matrix(Scheme(4, 32, True, how), down(q, 4), words, np.ones((1, 3), np.float16))
    assert np.array_equal(got.dequantize(), q.T.astype(np.float32) - 8)


def test_a_symmetric_file_with_other_zeros_is_read_as_it_is():
    q, zeros, scales = tensors(np.random.default_rng(0), 64, 8, 32)
    got = gptq_matrix(Scheme(4, 32, True), down(q, 4), across(zeros, 4), scales)
    assert np.array_equal(got.dequantize(), weights(q, zeros, scales, np.arange(64) // 32))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_scales_keep_their_value(kind):
    rng = np.random.default_rng(1)
    q, zeros, _ = tensors(rng, 64, 8, 32, symmetric=True)
    exact = rng.random((2, 8), np.float32) * np.float32(0.01)
    if kind == "bfloat16":
        raw = (exact.view(np.uint32) >> 16).astype(np.uint16)
        scales, exact = raw, (raw.astype(np.uint32) << 16).view(np.float32)
    else:
        scales = exact.astype(kind)
        exact = scales.astype(np.float32)
    got = gptq_matrix(Scheme(4, 32, True), down(q, 4), across(zeros, 4), scales)
    off = np.abs(got.dequantize() - weights(q, zeros, exact, np.arange(64) // 32))
    # Of full float32 scales the product with the integer is rounded, as it is in the format's own definition.
    assert off.max() <= (2.0**-24 * 15 * exact.max() if kind == "float32" else 0)
    assert got.scale.dtype == (np.float32 if kind == "float32" else np.float16)
    assert got.nbytes == Scheme(4, 32, True).nbytes((8, 64), {"float16": "F16", "bfloat16": "BF16"}.get(kind, "F32"))


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**14])
def test_a_scale_that_float16_cannot_hold_with_its_minimum(scale):
    raw = np.full((1, 8), np.float32(scale).view(np.uint32) >> 16, np.uint16)
    q = np.full((32, 8), 9, np.uint8)
    got = gptq_matrix(Scheme(4, 32, True), down(q, 4), across(np.full((1, 8), 8), 4), raw)
    assert got.scale.dtype == np.float32
    assert (got.dequantize() == scale).all()


def good():
    q, zeros, scales = tensors(np.random.default_rng(0), 64, 8, 32)
    g_idx = np.arange(64, dtype=np.int32)[::-1] // 32
    return {"qweight": down(q, 4), "qzeros": across(zeros, 4), "scales": scales, "g_idx": g_idx}


def with_one(array, value):
    changed = array.copy()
    changed.flat[3] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": lambda a: a[0]}, r"qweight has the shape \[8\]: it must be a matrix"),
        ({"qweight": lambda a: a[:0]}, "it must be a matrix"),
        ({"qweight": lambda a: a.astype(np.int64)}, "qweight is of int64, not int32"),
        ({"qweight": lambda a: a[:3]}, "24 input channels"),
        ({"qweight": lambda a: a[:4]}, "g_idx has the shape"),
        ({"qzeros": lambda a: a[:1]}, r"qzeros has the shape \[1, 1\], not \[2, 1\]"),
        ({"qzeros": lambda a: a.astype(np.float32)}, "qzeros is of float32, not int32"),
        ({"scales": lambda a: a[:, :7]}, r"scales has the shape \[2, 7\], not \[2, 8\]"),
        ({"scales": lambda a: a.astype(np.int32)}, "scales is of int32"),
        ({"scales": lambda a: with_one(a, np.nan)}, "scales holds something that is not a finite number"),
        ({"scales": lambda a: with_one(a, np.inf)}, "scales holds something that is not a finite number"),
        ({"scales": lambda a: np.full(a.shape, 3e38, np.float32)}, "leaves the range of float32"),
        ({"g_idx": lambda a: a[:63]}, r"g_idx has the shape \[63\], not \[64\]"),
        ({"g_idx": lambda a: a.astype(np.float32)}, "g_idx is of float32"),
        ({"g_idx": lambda a: with_one(a, 2)}, "g_idx has the group 2: there are 2 groups"),
        ({"g_idx": lambda a: with_one(a, -1)}, "g_idx has the group -1"),
        ({"g_idx": lambda a: with_one(a, 0)}, "g_idx puts 33 input channels into group 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    given = good()
    for name, change in changes.items():
        given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        gptq_matrix(Scheme(4, 32, False), **given)


def test_config():
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True, "damp_percent": 0.1}
    assert GptqFormat(config).scheme("a") == Scheme(4, 32, False, "minus one")
    assert GptqFormat(config | {"checkpoint_format": "gptq"}).scheme("a") == Scheme(4, 32, False, "minus one")
    second = GptqFormat(config | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1, "sym": True})
    assert second.scheme("a") == Scheme(8, -1, True, "as they are")
    for writer in ({"meta": {"quantizer": ["optimum:1.2", "gptqmodel:5.0.0"]}}, {"meta": {"quantizer": "GPTQModel:4"}},
                   {"provider": "auto-round"}, {"autoround_version": "0.5"}):  # fmt: skip
        assert GptqFormat(config | writer).scheme("a").stored_zeros == "word minus one"
        assert GptqFormat(config | writer | {"format": "gptq_v2"}).scheme("a").stored_zeros == "as they are"


def test_config_of_single_modules():
    dynamic = {
        r"-:model\.layers\.0\..*": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 64},
        r".*\.(k|v)_proj$": {"sym": True, "desc_act": False},
        r".*": {"group_size": -1},
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "dynamic": dynamic}
    scheme = GptqFormat(config).scheme
    assert scheme("model.layers.0.mlp.down_proj") is None
    assert scheme("model.layers.1.mlp.down_proj") == Scheme(8, 64, False, "minus one")
    assert scheme("model.layers.1.self_attn.v_proj") == Scheme(4, 32, True, "minus one")
    assert scheme("model.layers.1.self_attn.q_proj") == Scheme(4, -1, False, "minus one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "3 bits: 4 and 8 are supported"),
        ({"bits": "4"}, 'bits: "4" is no integer'),
        ({"bits": True}, "bits: true is no integer"),
        ({"group_size": 0}, "a group size of 0"),
        ({"group_size": -2}, "a group size of -2"),
        ({"sym": "yes"}, 'sym: "yes" is neither true nor false'),
        ({"checkpoint_format": "marlin"}, 'checkpoint_format: "marlin" is not supported, only gptq, gptq_v2'),
        ({"checkpoint_format": "gptq_p"}, 'checkpoint_format: "gptq_p" is not supported'),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "contradict each other"),
        ({"is_marlin_format": True}, "is_marlin_format: true is not supported"),
        ({"pack_dtype": "int64"}, 'pack_dtype: "int64" is not supported'),
        ({"rotation": "hadamard"}, 'rotation": "hadamard" is not supported'),
        ({"act_bits": 8}, "act_bits.: 8 is not supported"),
        ({"dynamic": [1]}, "dynamic: .1. is no table"),
        ({"dynamic": {"(": {}}}, "dynamic: .*: the pattern"),
        ({"dynamic": {".*": {"bits": 2}}}, "dynamic: .*: 2 bits"),
        ({"dynamic": {".*": {"adapter": {"rank": 4}}}}, "dynamic: .*adapter.* is not supported"),
        ({"dynamic": {".*": 4}}, "dynamic: .*: 4 is no table"),
    ],
)
def test_config_that_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GptqFormat({"quant_method": "gptq", "bits": 4, "group_size": 128} | changes)


@pytest.mark.parametrize("missing", ["bits", "group_size"])
def test_config_that_says_too_little(missing):
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    del config[missing]
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        GptqFormat(config)
