"""Sampling on a GPU: against the CPU backend, whose tests hold it to the rule, and a row's choice in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import Backend, SampleOutput, SamplingBatch, cpu_backend

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cpu() -> Iterator[Backend]:
    backend = cpu_backend(4)
    yield backend
    backend.close()


def batch_of(rng: np.random.Generator, rows: int, vocab: int) -> SamplingBatch:
    """Rows with filters, penalties and biases in every combination."""

    def some(values: list[float], dtype: Any = np.float32) -> np.ndarray:
        return rng.choice(np.array(values), rows).astype(dtype)

    def lists(most: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.where(rng.random(rows) < 0.5, 0, rng.integers(0, most, rows))
        ids = [rng.permutation(vocab)[:length] for length in lengths]
        return np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64), np.concatenate(
            [*ids, np.zeros(0)]
        ).astype(np.int32)

    bias_offsets, bias_ids = lists(20)
    history_offsets, history_ids = lists(300)
    return SamplingBatch(
        temperature=some([0, 0, 0.3, 1, 1, 1, 5]),
        top_k=some([0, 0, 1, 40, 3000], np.int32),
        top_p=some([1, 1, 0.9, 0.5, 1e-6]),
        min_p=some([0, 0, 0.05, 1]),
        repetition=some([1, 1, 1.2, 0.8]),
        presence=some([0, 0.7]),
        frequency=some([0, -0.3, 0.2]),
        seed=rng.integers(2**64, size=rows, dtype=np.uint64),
        position=rng.integers(10**6, size=rows).astype(np.int64),
        logprobs=some([-1, -1, 0, 5, 20], np.int32),
        bias_offsets=bias_offsets,
        bias_ids=bias_ids,
        bias_values=rng.uniform(-5, 5, len(bias_ids)).astype(np.float32),
        history_offsets=history_offsets,
        history_ids=history_ids,
        history_counts=rng.integers(0, 4, len(history_ids)).astype(np.int32),
    )


def rows_of(batch: SamplingBatch, chosen: np.ndarray) -> SamplingBatch:
    """Some rows of a batch, in another order."""
    changes: dict[str, np.ndarray] = {
        field.name: getattr(batch, field.name)[chosen]
        for field in fields(batch)
        if not field.name.startswith(("bias", "history"))
    }
    for kind, value in (("bias", "values"), ("history", "counts")):
        offsets = getattr(batch, f"{kind}_offsets")
        spans = [np.arange(offsets[r], offsets[r + 1]) for r in chosen]
        entries = np.concatenate([*spans, np.zeros(0)]).astype(np.int64)
        changes[f"{kind}_offsets"] = np.concatenate([[0], np.cumsum([len(span) for span in spans])]).astype(np.int64)
        for name in ("ids", value):
            changes[f"{kind}_{name}"] = getattr(batch, f"{kind}_{name}")[entries]
    return replace(batch, **changes)


def sample(backend: Any, logits: np.ndarray, batch: SamplingBatch) -> SampleOutput:
    device = backend.upload(np.ascontiguousarray(logits))
    output = backend.sample(device, batch)
    assert np.array_equal(backend.read(device), logits, equal_nan=True), "logits were changed"
    return output


@pytest.mark.parametrize("vocab", [1, 5, 1000, 32003, 151936])
def test_chooses_what_the_cpu_chooses(cuda: Any, cpu: Backend, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 64 if vocab > 100000 else 300
    logits = (rng.standard_normal((rows, vocab)) * rng.uniform(0.5, 6, (rows, 1))).astype(np.float32)
    logits[3] = 0
    logits[4, :] = -np.inf
    logits[5, vocab // 2] = np.inf
    logits[6, vocab // 3] = np.nan
    logits[7] = np.nan
    logits[8] = np.round(logits[8])
    batch = batch_of(rng, rows, vocab)
    got, wanted = sample(cuda, logits, batch), sample(cpu, logits, batch)
    assert np.array_equal(got.token_ids, wanted.token_ids)
    assert np.array_equal(got.top_ids, wanted.top_ids)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, rtol=1e-6, atol=1e-6)


def test_a_row_is_the_same_in_any_company(cuda: Any) -> None:
    rng = np.random.default_rng(1)
    most, vocab = 513, 3001
    logits = (rng.standard_normal((most, vocab)) * 4).astype(np.float32)
    logits[9, 17], logits[19], logits[30, :100] = np.nan, np.nan, np.inf
    batch = batch_of(rng, most, vocab)
    alone = [sample(cuda, logits[r : r + 1], rows_of(batch, np.array([r]))) for r in range(most)]
    for count in (*range(1, 66), 255, 256, 257, 511, 512, 513):
        chosen = rng.permutation(most)[:count]
        output = sample(cuda, logits[chosen], rows_of(batch, chosen))
        for place, r in enumerate(chosen):
            assert output.token_ids[place] == alone[r].token_ids[0]
            assert np.array_equal(output.logprobs[place], alone[r].logprobs[0], equal_nan=True)
            wanted = max(int(batch.logprobs[r]), 0)
            assert np.array_equal(output.top_ids[place, :wanted], alone[r].top_ids[0])
            assert np.array_equal(output.top_logprobs[place, :wanted], alone[r].top_logprobs[0], equal_nan=True)
            assert (output.top_ids[place, wanted:] == -1).all()
            assert np.isnan(output.top_logprobs[place, wanted:]).all()
