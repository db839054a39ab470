"""Each family's decoder against the float64 reference, and against itself in 1, 2 and 3 stages.

Small models with what sets the family apart switched on: windows shorter than the prompt, experts of a number that is
no power of two, rotations scaled beyond the original context, sinks, caps, layers that do not turn.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

TOKENS = np.random.default_rng(5).integers(0, 101, 80).tolist()

YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 24,
    "rope.scaling.yarn_beta_fast": 8.0,
}

# Family, what the writer is asked for, its experts, and keys without the family's prefix.
CASES = {
    "mixtral": ("llama", {"kinds": [Kind.Q4_0, Kind.Q5_1]}, {"count": 8, "used": 2}, {}),
    "mixtral, a tensor an expert": ("llama", {}, {"count": 5, "used": 2, "apart": True}, {}),
    "mistral with a window": ("llama", {"kv_heads": 1}, None, {"attention.sliding_window": 17}),
    "llama with yarn": ("llama", {}, None, YARN),
    "llama with a scale": ("llama", {}, None, {"attention.scale": 0.75}),
    "llama with all biases": ("llama", {"bias": True, "edit": "biases"}, None, {}),
    "qwen2moe": ("qwen2moe", {}, {"count": 60, "used": 4, "shared": 96}, {}),
    "qwen3moe": ("qwen3moe", {"kinds": [Kind.Q4_1, Kind.Q8_0, Kind.F16]}, {"count": 60, "used": 8}, {}),
    "qwen3moe with yarn": ("qwen3moe", {}, {"count": 8, "used": 1}, YARN),
    "olmoe": ("olmoe", {"kv_heads": 4}, {"count": 60, "used": 8}, {}),
    "olmoe with fewer keys": ("olmoe", {}, {"count": 12, "used": 1}, {}),
    "phi3": ("phi3", {}, None, {"attention.sliding_window": 31}),
    "phi3 with long factors": (
        "phi3",
        {"long_factors": True, "rotary_dim": 12, "tied": False},
        None,
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
    ),
    "gemma2": ("gemma2", {"layers": 4, "head_dim": 32}, None, {"attention.sliding_window": 16}),
    "gemma2 with other caps": (
        "gemma2",
        {"layers": 4},
        None,
        {"attention.sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3",
        {"layers": 7},
        None,
        {
            "attention.sliding_window": 16,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3 with a pattern": (
        "gemma3",
        {"layers": 4},
        None,
        {
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": [True, False, True, True],
            "rope.freq_base_swa": 500.0,
        },
    ),
    "glm4": ("glm4", {"rotary_dim": 8, "bias": True}, None, {}),
    "glm4 without biases": ("glm4", {"rotary_dim": 8, "fused_qkv": True}, None, {}),
    "glm4moe": ("glm4moe", {"rotary_dim": 8, "bias": True}, {"count": 12, "used": 3, "dense_layers": 1}, {}),
    "glm4moe with groups": (
        "glm4moe",
        {"rotary_dim": 8, "qk_norm": False, "predicts": 1},
        {"count": 24, "used": 4, "dense_layers": 1, "together": True},
        {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "gpt-oss": (
        "gpt-oss",
        {"layers": 4, "kinds": [Kind.MXFP4, Kind.Q8_0]},
        {"count": 8, "used": 4},
        YARN | {"attention.sliding_window": 16, "rope.freq_base": 150000.0},
    ),
    "smollm3": ("smollm3", {"layers": 5}, None, {}),
}


def all_biases(tensors) -> None:
    rng = np.random.default_rng(9)
    for layer in range(3):
        for name, size in (("attn_output", 64), ("ffn_gate", 96), ("ffn_up", 96), ("ffn_down", 64)):
            tensors[f"blk.{layer}.{name}.bias"] = (rng.normal(0, 0.5, size).astype(np.float32), Kind.F32)


@pytest.fixture(scope="module")
def made(tiny_model, experts):
    """A case's file, written once."""
    paths = {}

    def make(name):
        if name not in paths:
            family, asked, mixture, keys = CASES[name]
            changes = dict(asked)
            if changes.get("edit") == "biases":
                changes["edit"] = all_biases
            if mixture is not None:
                changes["experts"] = experts(**mixture)
            paths[name] = tiny_model(family, keys={f"{family}.{key}": value for key, value in keys.items()}, **changes)
        return paths[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_logits_match_float64_in_one_two_and_three_stages(name, made, reference, stage_row):
    """Float32 arithmetic with 4-bit weights: errors of some 1e-6 of the logits' size; 1e-4 is room for any order.

    Stages of two and three take the prompt in chunks, with blocks of another size and other threads.
    """
    path = made(name)
    row = stage_row(path)
    whole, _ = row.logits(row.plan({0: TOKENS}))
    expected = reference(path).logits(TOKENS)
    assert whole.dtype == np.float32
    assert np.abs(whole - expected).max() <= 1e-4 * np.abs(expected).max()
    last = row.model.num_layers - 1
    for cuts, size, block_size, threads in [((1,), 33, 8, 1), ((1, last), 7, 32, 2)]:
        split = stage_row(path, cuts, block_size=block_size, num_threads=threads)
        chunks = [TOKENS[start : start + size] for start in range(0, len(TOKENS), size)]
        logits = np.concatenate([split.logits(split.plan({0: chunk}))[0] for chunk in chunks])
        assert np.array_equal(logits, whole), cuts


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss", "gemma3"])
def test_batch_mates_change_nothing(name, made, stage_row):
    """Prefill beside decode, each as if it were alone."""
    path = made(name)
    sequences = {seq_id: TOKENS[seq_id : seq_id + 5 + 14 * seq_id] for seq_id in range(5)}
    row = stage_row(path, (2,), max_step_tokens=512)
    row.logits(row.plan({seq_id: ids[:-1] for seq_id, ids in sequences.items() if seq_id != 3}))
    mixed, _ = row.logits(row.plan({seq_id: ids if seq_id == 3 else ids[-1:] for seq_id, ids in sequences.items()}))
    alone = stage_row(path)
    end = 0
    for seq_id, ids in sequences.items():
        end += len(ids) if seq_id == 3 else 1
        expected, _ = alone.logits(alone.plan({seq_id: ids}))
        assert np.array_equal(mixed[end - 1], expected[-1]), seq_id


@pytest.mark.parametrize("context", [64, 65])
def test_long_factors_hold_for_an_engine_with_a_longer_context_than_the_original(context, made, reference, stage_row):
    """Of the whole engine, from position 0 on: a sequence must not change its meaning as it grows."""
    path = made("phi3 with long factors")
    row = stage_row(path, max_context=context)
    got, _ = row.logits(row.plan({0: TOKENS[:20]}))
    expected = reference(path, max_context=context).logits(TOKENS[:20])
    other = reference(path, max_context=129 - context).logits(TOKENS[:20])
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(got - other).max() > 1e-2 * np.abs(other).max()
