"""compressed-tensors' packed weights, written here from the published layout, give the weights that it defines."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage.huggingface.formats import CompressedTensorsFormat, Scheme, compressed_matrix, read_config


def packed(signed, bits):
    """Signed [N, K] to words [N, ceil(K b / 32)]: the middle of the range added, the first in the lowest bits."""
    unsigned = signed.astype(np.int64) + (1 << (bits - 1))
    n, k = unsigned.shape
    words = np.zeros((n, -(-k * bits // 32)), np.uint64)
    for column in range(k):
        word, place = divmod(column * bits, 32)
        words[:, word] += unsigned[:, column].astype(np.uint64) << np.uint64(place)
    return words.astype(np.uint32).view(np.int32)


def tensors(n, k, group_size, bits=4):
    rng = np.random.default_rng(n + k)
    count = 1 if group_size == -1 else -(-k // group_size)
    half = 1 << (bits - 1)
    q = rng.integers(-half, half, (n, k))
    zeros = rng.integers(-half, half, (n, count))
    zeros.flat[:4] = [-half, half - 1, 0, -half]
    return q, zeros, (rng.standard_normal((n, count)) * 0.02).astype(np.float16)


def shape_of(q):
    return np.array(q.shape, np.int64)


def weights(q, zeros, scales, groups):
    return scales.astype(float)[:, groups] * (q - zeros[:, groups])


SHAPES = [(72, 256, 128, 128), (9, 96, 32, 32), (20, 160, 32, 32), (7, 160, -1, 32), (12, 512, 256, 128)]


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size", "resident"), SHAPES)
def test_weights_are_the_layouts(n, k, group_size, resident, bits, symmetric):
    q, zeros, scales = tensors(n, k, group_size, bits)
    scheme = Scheme(bits, group_size, symmetric)
    zero_point = packed(zeros.T, bits).T
    groups = np.arange(k) // (k if group_size == -1 else group_size)
    expected = weights(q, np.zeros_like(zeros) if symmetric else zeros, scales, groups)
    # A symmetric file's zeros are not looked at: the config says that there are none.
    got = compressed_matrix(scheme, packed(q, bits), scales, shape_of(q), zero_point)
    assert (got.bits, got.group_size, got.shape, got.input_order) == (bits, resident, (n, k), None)
    assert np.array_equal(got.dequantize(), expected)
    assert got.nbytes == scheme.nbytes((n, k), "F16")
    if not symmetric:
        older = compressed_matrix(scheme, packed(q, bits), scales, shape_of(q), zeros.astype(np.int8))
        assert np.array_equal(older.dequantize(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), [(9, 96, 32), (300, 160, 32), (8, 512, 128)])
def test_act_order(n, k, group_size, bits):
    q, zeros, scales = tensors(n, k, group_size, bits)
    g_idx = np.random.default_rng(1).permutation(np.arange(k) // group_size).astype(np.int32)
    zero_point = packed(zeros.T, bits).T
    got = compressed_matrix(Scheme(bits, group_size, False), packed(q, bits), scales, shape_of(q), zero_point, g_idx)
    assert np.array_equal(got.dequantize(), weights(q, zeros, scales, g_idx))
    assert got.input_order is not None


def test_an_order_that_is_not_set():
    q, zeros, scales = tensors(8, 96, 32)
    scheme = Scheme(4, 32, True)
    got = compressed_matrix(scheme, packed(q, 4), scales, shape_of(q), None, np.full(96, -1, np.int32))
    assert got.input_order is None
    assert np.array_equal(got.dequantize(), weights(q, np.zeros_like(zeros), scales, np.arange(96) // 32))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("packed", lambda a: a.reshape(-1), "weight_packed has the shape"),
        ("packed", lambda a: a.astype(np.int8), "weight_packed is of int8, not int32"),
        ("shape", lambda a: a + 1, r"weight_shape is \[17, 65\]: weight_packed holds \[16, 64\]"),
        ("shape", lambda a: a.astype(np.float32), "weight_shape is of float32"),
        ("shape", lambda a: a[:1], r"weight_shape has the shape \[1\], not \[2\]"),
        ("scale", lambda a: a[:, :1], r"weight_scale has the shape \[16, 1\], not \[16, 2\]"),
        ("scale", lambda a: a.astype(np.int64), "weight_scale is of int64"),
        ("zero_point", lambda a: None, "weight_zero_point is missing"),
        ("zero_point", lambda a: a[:1], r"weight_zero_point has the shape \[1, 2\], not \[2, 2\]"),
        ("zero_point", lambda a: np.full((16, 2), 8, np.int8), "a zero that is not one of 4 bits"),
        ("zero_point", lambda a: a.astype(np.int8), r"weight_zero_point has the shape \[2, 2\], not \[16, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    q, zeros, scales = tensors(16, 64, 32)
    given = {"packed": packed(q, 4), "scale": scales, "shape": shape_of(q), "zero_point": packed(zeros.T, 4).T}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        compressed_matrix(Scheme(4, 32, False), **given)


def config(weights=(), ignore=("lm_head",), **changes):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
               "dynamic": False, "observer": "minmax", "observer_kwargs": {}, "block_structure": None,
               "actorder": None} | dict(weights)  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    } | changes


def test_config():
    found = read_config(config())
    assert isinstance(found, CompressedTensorsFormat)
    assert found.scheme("model.layers.0.mlp.up_proj") == Scheme(4, 128, True)
    assert found.scheme("lm_head") is None
    channel = {"strategy": "channel", "group_size": None, "num_bits": 8, "symmetric": False}
    assert read_config(config(channel)).scheme("a") == Scheme(8, -1, False)
    assert read_config(config({"strategy": None, "group_size": -1})).scheme("a") == Scheme(4, -1, True)
    for order in ("weight", "group", "static", "dynamic", False):
        assert read_config(config({"actorder": order})).scheme("a") == Scheme(4, 128, True)


def test_ignored_modules():
    ignore = ["lm_head", "re:.*mlp\\.gate$", "re:vision.*", "model.layers.1.self_attn.q_proj", "Embedding"]
    scheme = read_config(config(ignore=ignore)).scheme
    for name in ("lm_head", "model.layers.0.mlp.gate", "vision_tower.fc", "model.layers.1.self_attn.q_proj"):
        assert scheme(name) is None, name
    for name in ("model.lm_head", "model.layers.0.mlp.gate_proj", "model.vision", "model.layers.11.self_attn.q_proj"):
        assert scheme(name) is not None, name


def test_the_closest_target_counts():
    def group(targets, size):
        return {"targets": targets, "weights": {"num_bits": 4, "group_size": size}, "format": "pack-quantized"}

    groups = {"a": group(["Linear"], 32), "b": group(["re:.*down_proj"], 64), "c": group(["x.down_proj"], 128)}
    scheme = read_config(config(config_groups=groups, ignore=[])).scheme
    assert scheme("x.up_proj").group_size == 32
    assert scheme("y.down_proj").group_size == 64
    assert scheme("x.down_proj").group_size == 128
    named = read_config(config(config_groups={"a": group(["re:.*mlp.*"], 32)})).scheme
    assert named("x.self_attn") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int-quantized"}, 'format: "int-quantized" is not supported, only pack-quantized'),
        ({"format": "marlin-24"}, 'format: "marlin-24" is not supported'),
        ({"quantization_status": "frozen"}, 'quantization_status: "frozen" is not supported'),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.*num_bits.* is not supported"),
        ({"transform_config": {"config_groups": {}}}, "transform_config.* is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: .*sparse-24.* is not supported"),
        ({"config_groups": {}}, "config_groups says nothing"),
        ({"config_groups": {"a": ["Linear"]}}, "config_groups: a: .* is no table"),
        ({"ignore": "lm_head"}, 'ignore: "lm_head" is no list of names'),
        ({"ignore": ["re:("]}, "the pattern '\\('"),
        ({"weights": {"num_bits": 3}}, "config_groups: group_0: 3 bits"),
        ({"weights": {"type": "float"}}, 'type: "float" is not supported, only int'),
        ({"weights": {"strategy": "tensor"}}, 'strategy: "tensor" is not supported, only group, channel'),
        ({"weights": {"strategy": "block", "block_structure": [2, 2]}}, "is not supported"),
        ({"weights": {"strategy": "channel"}}, "group_size: 128 contradicts the strategy channel"),
        ({"weights": {"dynamic": True}}, "dynamic.: true is not supported"),
        ({"weights": {"actorder": "random"}}, 'actorder: "random" is not supported'),
        ({"weights": {"symmetric": 1}}, "symmetric: 1 is neither true nor false"),
        ({"group": {"input_activations": {"num_bits": 8}}}, "input_activations.*num_bits.* is not supported"),
        ({"group": {"output_activations": {"num_bits": 8}}}, "output_activations.* is not supported"),
        ({"group": {"targets": ["Embedding"]}}, 'the module class "Embedding" is not supported, only Linear'),
        ({"group": {"targets": []}}, "targets says nothing"),
        ({"group": {"weights": None}}, "weights: null is no table"),
        ({"group": {"format": "nvfp4-pack-quantized"}}, "nvfp4-pack-quantized"),
    ],
)
def test_config_that_is_refused(changes, message):
    changes = dict(changes)
    bad = config(changes.pop("weights", ()))
    bad["config_groups"]["group_0"] |= changes.pop("group", {})
    with pytest.raises(ValueError, match=message):
        read_config(bad | changes)
