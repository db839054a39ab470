"""Weights written and read by other programs' code: compressed-tensors (where it is installed) and transformers."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage.huggingface.formats import (
    Scheme,
    awq_matrix,
    compressed_matrix,
    mxfp4_expert,
    mxfp4_matrix,
    read_config,
)

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.fixture(scope="module")
def library(torch):
    """compressed-tensors; not of the extra 'peer'."""
    return pytest.importorskip("compressed_tensors")


def scheme_of(library, bits, group_size, symmetric):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,
    )
    return QuantizationScheme(targets=["Linear"], weights=args)


def as_numpy(torch, tensor):
    """A tensor's bytes as `formats` takes them."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("n", "k", "group_size"), [(72, 256, 128), (9, 96, 32), (20, 160, 32), (13, 160, -1)])
def test_compressed_tensors_writes_and_we_read(torch, library, n, k, group_size, dtype, bits, symmetric):
    from compressed_tensors.compressors import PackedQuantizationCompressor

    generator = torch.Generator().manual_seed(n + k)
    half = 1 << (bits - 1)
    groups = 1 if group_size == -1 else k // group_size
    zeros = torch.randint(-half, half, (n, groups), generator=generator, dtype=torch.int8)
    zeros.view(-1)[:2] = torch.tensor([-half, half - 1])
    state = {
        "weight": torch.randn(n, k, generator=generator).to(getattr(torch, dtype)),
        "weight_scale": (torch.rand(n, groups, generator=generator) * 0.3 + 0.01).to(getattr(torch, dtype)),
        "weight_zero_point": torch.zeros_like(zeros) if symmetric else zeros,
    }
    scheme = scheme_of(library, bits, group_size, symmetric)
    written = PackedQuantizationCompressor.compress(state, scheme)
    ours = read_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": scheme.model_dump()},
        }
    )
    tensors = {name: as_numpy(torch, tensor) for name, tensor in written.items()}
    found = ours.scheme("model.layers.0.mlp.up_proj")
    got = ours.matrix(found, tensors)
    assert ours.shape(found, {name: array.shape for name, array in tensors.items()}) == (n, k) == got.shape
    # The library computes in the scale's type; give it the same scales in a type that rounds less.
    exact = written | {"weight_scale": written["weight_scale"].double()}
    reference = PackedQuantizationCompressor.decompress(exact, scheme)["weight"].numpy()
    off = np.abs(got.dequantize() - reference)
    # Of a full float32 the product with the integer is rounded.
    assert off.max() <= (2.0**-23 * (1 << bits) * float(state["weight_scale"].max()) if dtype == "float32" else 0)


def test_our_patterns_match_what_the_librarys_do(library):
    from compressed_tensors.utils.match import match_name

    targets = ["re:.*mlp.gate$", "re:.*(up|down)_proj", "lm_head", "re:^model.layers.[0-3]\\..*"]
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": targets,
    }
    ours = read_config(config)
    layers = [f"model.layers.{i}.{part}" for i in (0, 3, 4, 12, 31)
              for part in ("mlp.gate", "mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj")]  # fmt: skip
    for name in ["lm_head", "model.lm_head", *layers]:
        assert (ours.scheme(name) is None) == any(match_name(name, target) for target in targets), name


@pytest.mark.parametrize(("k", "n", "group_size"), [(128, 72, 128), (96, 16, 32), (160, 24, 32)])
def test_awq_is_what_compressed_tensors_takes_it_for(torch, library, k, n, group_size):
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    rng = np.random.default_rng(k)
    words = (
        rng.integers(-(2**31), 2**31, shape).astype(np.int32) for shape in ((k, n // 8), (k // group_size, n // 8))
    )
    scales = (rng.standard_normal((k // group_size, n)) * 0.02).astype(np.float16)
    ours = dict(zip(("qweight", "qzeros"), words, strict=True)) | {"scales": scales}
    given = {f"m.{name}": torch.from_numpy(array.copy()) for name, array in ours.items()}
    theirs = AutoAWQConverter(group_size=group_size).process(given)
    state = {name.removeprefix("m."): tensor for name, tensor in theirs.items()}
    state["weight_scale"] = state["weight_scale"].double()
    reference = PackedQuantizationCompressor.decompress(state, scheme_of(library, 4, group_size, False))["weight"]
    got = awq_matrix(Scheme(4, group_size, False), **ours)
    assert np.array_equal(got.dequantize(), reference.numpy())
    # And what it wrote from that is the same to us.
    again = {name: tensor.numpy() for name, tensor in state.items() if name != "weight_scale"}
    packed = again["weight_packed"], scales.T.copy(), again["weight_shape"], again["weight_zero_point"]
    assert np.array_equal(compressed_matrix(Scheme(4, group_size, False), *packed).dequantize(), got.dequantize())


def test_mxfp4_is_what_transformers_takes_it_for(torch):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 24, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 24, 4), dtype=np.uint8)
    # It gives [experts, K, N].
    reference = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    for expert in range(3):
        whole = reference[expert].T.numpy()
        assert np.array_equal(mxfp4_matrix(blocks[expert], scales[expert]).dequantize(), whole)
        assert np.array_equal(mxfp4_expert(blocks, scales, expert, slice(1, None, 2)).dequantize(), whole[1::2])
