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
    "llama-odd-heads": {"architecture": "llama", "head_dim": 24, "heads": 8, "rotary_dim": 6, "vocab": 103},
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


def passed_on(row, chunks):
    """Logits of all rows and the hidden states behind each stage but the last, of a prompt in chunks."""
    logits, hidden = [], []
    for chunk in chunks:
        rows, passed = row.logits(row.plan({0: chunk}))
        logits.append(rows)
        hidden.append(passed)
    return np.concatenate(logits), [np.concatenate(parts) for parts in zip(*hidden, strict=True)]


def chunked(token_ids, size):
    return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]


def test_every_split_gives_the_same_bytes(family, stage_row):
    """Behind any layer, the embedding alone, the head alone: hidden states and logits."""
    expected, _ = passed_on(stage_row(family), [TOKENS])
    behind = {}
    for cuts in [(1,), (2,), (1, 2), (0,), (3,), (0, 3), (0, 1, 2, 3)]:
        logits, hidden = passed_on(stage_row(family, cuts), [TOKENS])
        assert np.array_equal(logits, expected), cuts
        for cut, states in zip(cuts, hidden, strict=True):
            assert states.dtype == np.float32
            assert np.array_equal(states, behind.setdefault(cut, states)), (cuts, cut)
    assert set(behind) == {0, 1, 2, 3}
    assert len({states.tobytes() for states in behind.values()}) == 4


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_every_chunk_block_and_thread_count_gives_the_same_bytes(family, kv_dtype, stage_row):
    expected, _ = passed_on(stage_row(family, kv_dtype=kv_dtype), [TOKENS])
    for size, block_size, threads in [(1, 16, 2), (7, 8, 1), (64, 64, 2), (90, 32, 3)]:
        row = stage_row(family, (1,), kv_dtype=kv_dtype, block_size=block_size, num_threads=threads)
        logits, _ = passed_on(row, chunked(TOKENS, size))
        assert np.array_equal(logits, expected), (size, block_size, threads)


def test_batch_mates_change_nothing(family, stage_row):
    """Eight sequences in one step, prefill beside decode, each as if it were alone."""
    sequences = {seq_id: TOKENS[seq_id : seq_id + 3 + 9 * seq_id] for seq_id in range(8)}
    row = stage_row(family, (2,), max_step_tokens=512)
    together, _ = row.logits(row.plan({seq_id: ids[:-1] for seq_id, ids in sequences.items() if seq_id != 5}))
    mixed, _ = row.logits(row.plan({seq_id: ids if seq_id == 5 else ids[-1:] for seq_id, ids in sequences.items()}))
    first = last = 0
    for seq_id, ids in sequences.items():
        alone = stage_row(family)
        expected, _ = alone.logits(alone.plan({0: ids}))
        if seq_id == 5:
            got = mixed[last : last + len(ids)]
            last += len(ids)
        else:
            got = np.concatenate([together[first : first + len(ids) - 1], mixed[last : last + 1]])
            first += len(ids) - 1
            last += 1
        assert np.array_equal(got, expected), seq_id


def test_the_real_model_split_and_chunked(smollm2, stage_row):
    token_ids = np.random.default_rng(2).integers(0, 49152, 100).tolist()
    expected, _ = passed_on(stage_row(smollm2), [token_ids])
    at_twenty = None
    for cuts, size in [((20,), 100), ((3, 20), 37), ((11, 20), 7)]:
        logits, hidden = passed_on(stage_row(smollm2, cuts), chunked(token_ids, size))
        assert np.array_equal(logits, expected), cuts
        at_twenty = hidden[-1] if at_twenty is None else at_twenty
        assert np.array_equal(hidden[-1], at_twenty), cuts
