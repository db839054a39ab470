"""Rotary scalings against transformers' own, which computes frequencies in float32."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.stage import rope_scaling

pytestmark = pytest.mark.peer

# Of geometries that models have, and of some that none has.
YARN = [
    (1e6, 128, 4.0, 32768, 32.0, 1.0, True),
    (150000.0, 64, 32.0, 4096, 32.0, 1.0, False),
    (1e4, 64, 40.0, 4096, 32.0, 1.0, True),
    (1e4, 16, 8.0, 64, 16.0, 2.0, False),
    (5e5, 6, 2.5, 100, 3.0, 0.5, True),
]
LLAMA3 = [(5e5, 128, 8.0, 1.0, 4.0, 8192), (5e5, 64, 32.0, 1.0, 4.0, 8192), (1e4, 16, 5.0, 0.5, 3.0, 64)]


def reference(kind: str, base: float, rotary_dim: int, **scaling) -> tuple[np.ndarray, float]:
    """What each frequency is divided by, and the attention factor."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        head_dim=rotary_dim,
        hidden_size=4 * rotary_dim,
        num_attention_heads=4,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": kind, "rope_theta": base, **scaling},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config)
    return base ** (-np.arange(0, rotary_dim, 2) / rotary_dim) / frequencies.double().numpy(), attention_factor


@pytest.mark.parametrize("case", YARN, ids=str)
def test_yarn(case):
    base, rotary_dim, factor, original, fast, slow, truncate = case
    expected, attention_factor = reference(
        "yarn",
        base,
        rotary_dim,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
    got = rope_scaling.yarn(*case)
    assert len(set(got)) > 1
    assert np.allclose(got, expected, rtol=1e-6, atol=0)
    assert rope_scaling.yarn_attention_factor(factor) == pytest.approx(attention_factor, rel=1e-11)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (0.707, 1.0), (1.0, None), (None, 0.5), (0.0, 1.0)])
@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_yarn_attention_factor(factor, mscale, mscale_all_dim):
    scaling = {"factor": factor, "original_max_position_embeddings": 4096}
    _, expected = reference("yarn", 1e4, 64, mscale=mscale, mscale_all_dim=mscale_all_dim, **scaling)
    assert rope_scaling.yarn_attention_factor(factor, mscale, mscale_all_dim) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("case", LLAMA3, ids=str)
def test_llama3(case):
    base, rotary_dim, factor, low, high, original = case
    expected, _ = reference(
        "llama3",
        base,
        rotary_dim,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    got = rope_scaling.llama3(*case)
    assert len(set(got)) > 2
    assert np.allclose(got, expected, rtol=1e-6, atol=0)


def test_linear():
    expected, _ = reference("linear", 1e4, 64, factor=4.0)
    assert np.allclose(rope_scaling.linear(4.0, 32), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("factor", "original"), [(32.0, 4096), (1.0, 4096), (16.0, 8192)])
def test_longrope_attention_factor(factor, original):
    lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    _, expected = reference("longrope", 1e4, 96, factor=factor, original_max_position_embeddings=original, **lists)
    assert rope_scaling.longrope_attention_factor(factor, original) == pytest.approx(expected, rel=1e-11)
