"""The decoder against a float64 reference, and against itself under every split."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

TOKENS = np.random.default_rng(1).integers(0, 101, 90).tolist()

FAMILIES = {
    "llama": {"architecture": "llama"},
    "llama-bias": {"architecture": "llama", "bias": True, "tied": False},
    "llama3-rope": {"architecture": "llama", "rope_factors": True},
    "llama-linear-rope": {
        "architecture": "llama",
        "keys": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    },
    "llama-partial-rope": {"architecture": "llama", "rotary_dim": 8},
    "qwen2": {"architecture": "qwen2"},
    "qwen2-untied": {"architecture": "qwen2", "tied": False, "kinds": [Kind.Q5_0, Kind.Q8_0, Kind.Q4_0]},
    "qwen2-one-kv-head": {"architecture": "qwen2", "kv_heads": 1},
    "qwen3": {"architecture": "qwen3"},
    "qwen3-wide-heads": {"architecture": "qwen3", "head_dim": 32, "heads": 6, "kv_heads": 3},
    "k-quants": {
        "kinds": [Kind.Q4_K, Kind.Q6_K, Kind.Q5_K],
        "hidden": 256,
        "ffn": 256,
        "head_dim": 64,
        "embed": Kind.Q6_K,
    },
    "floats": {"kinds": [Kind.F16, Kind.BF16, Kind.F32], "embed": Kind.F16},
}


@pytest.fixture(params=FAMILIES)
def family(request, tiny_model):
    return tiny_model(**FAMILIES[request.param])


def test_logits_match_float64(family, reference, stage_row):
    """Float32 arithmetic with 4-bit weights: errors of some 1e-6 of the logits' size; 1e-4 is room for any order."""
    row = stage_row(family)
    got, _ = row.logits(row.plan({0: TOKENS}))
    expected = reference(family).logits(TOKENS)
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
