"""Logits of the real model against a few of transformers' that are kept in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

KEPT = Path(__file__).parent / "data" / "smollm2_logits.npz"


@pytest.mark.parametrize("cuts", [(), (11, 19)], ids=["one stage", "three stages"])
def test_kept_logits(cuts, smollm2, stage_row):
    """Top-1 equal where the gap is clear, and the divergence tiny: of the 64 most likely tokens and all others as one.

    `tests/peer` compares whole distributions; merging tokens can only make the divergence smaller, so the bound here is
    stricter than its 1e-4. What the file is made with: `tests/peer/make_reference_logits.py`.
    """
    with np.load(KEPT) as file:
        kept = {name: file[name] for name in file.files}
    row = stage_row(smollm2, cuts, max_step_tokens=256)
    for number, prompt in enumerate(["short", "long", "scripts", "code"]):
        token_ids = kept[f"{prompt}.token_ids"].tolist()
        chunks = [token_ids[start : start + 256] for start in range(0, len(token_ids), 256)]
        logits = np.concatenate([row.logits(row.plan({number: chunk}))[0] for chunk in chunks])
        compare(
            logits[kept[f"{prompt}.positions"]].astype(np.float64),
            kept[f"{prompt}.top_ids"],
            kept[f"{prompt}.top_logits"].astype(np.float64),
            kept[f"{prompt}.logsumexp"],
        )


def test_eight_bit_keys_and_values_stay_near_float32(smollm2, stage_row):
    """Mean divergence a position, over whole distributions; `benchmarks/kv_accuracy.py` prints it for all prompts."""
    with np.load(KEPT) as file:
        token_ids = file["scripts.token_ids"].tolist()
    row = {dtype: stage_row(smollm2, kv_dtype=dtype, max_step_tokens=256) for dtype in ("float32", "int8")}
    expected, got = (each.logits(each.plan({0: token_ids}))[0].astype(np.float64) for each in row.values())
    expected, got = (x - np.logaddexp.reduce(x, axis=1)[:, None] for x in (expected, got))
    divergence = (np.exp(expected) * (expected - got)).sum(axis=1)
    assert 1e-6 < divergence.mean() < 2e-3, divergence.mean()


def compare(got: np.ndarray, top_ids: np.ndarray, top_logits: np.ndarray, logsumexp: np.ndarray) -> None:
    largest = got.max(axis=1, keepdims=True)
    got = got - largest - np.log(np.exp(got - largest).sum(axis=1, keepdims=True))
    expected = top_logits - logsumexp[:, None]
    clear = top_logits[:, 0] - top_logits[:, 1] > 1e-2
    assert clear.mean() > 0.9
    assert np.array_equal(got.argmax(axis=1)[clear], top_ids[clear, 0])

    got = np.take_along_axis(got, top_ids, axis=1)
    assert np.abs(got - expected).max() < 1e-3
    rest, expected_rest = 1 - np.exp(got).sum(axis=1), 1 - np.exp(expected).sum(axis=1)
    divergence = (np.exp(expected) * (expected - got)).sum(axis=1) + expected_rest * np.log(expected_rest / rest)
    assert divergence.max() < 1e-6
