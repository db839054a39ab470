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


@pytest.mark.parametrize("rows", [1, 2, 65, 130])
def test_tokens_go_to_their_places_too(cuda: Any, rows: int) -> None:
    rng = np.random.default_rng([6, rows])
    vocab, places = 997, 2 * rows + 3
    logits = [cuda.upload((rng.standard_normal((rows, vocab)) * 3).astype(np.float32)) for _ in range(3)]
    batches = [batch_of(rng, rows, vocab) for _ in logits]
    alone = [cuda.sample(device, batch) for device, batch in zip(logits, batches, strict=True)]
    last = cuda.upload(np.full(places, -7, np.int32))
    wanted, pending = np.full(places, -7, np.int32), []
    chosen = np.empty(rows, np.int32)
    # All of them before any is waited for; what the caller gave is his again at once.
    for device, batch, output in zip(logits, batches, alone, strict=True):
        chosen[:] = rng.permutation(places)[:rows]
        wanted[chosen] = output.token_ids
        given = replace(batch, **{name: getattr(batch, name).copy() for name in ("seed", "temperature", "bias_ids")})
        pending.append((cuda.sample_later(device, given, last, chosen), cuda.read_later(last), wanted.copy()))
        for array in (chosen, given.seed, given.temperature, given.bias_ids):
            array[:] = 0
    for (sampled, kept, expected), output in reversed(list(zip(pending, alone, strict=True))):
        assert np.array_equal(kept.wait(), expected)
        got = sampled.wait()
        for field in fields(got):
            assert np.array_equal(getattr(got, field.name), getattr(output, field.name), equal_nan=True), field.name


def test_the_packed_rows_have_the_kernels_size(cuda: Any) -> None:
    from shardline.kernels.cuda import sampling_ops, workspace

    assert sampling_ops.ROW.itemsize == workspace._SAMPLING_ROW == 64


def test_scratch_that_grows_is_not_taken_from_steps_under_way(cuda: Any) -> None:
    """Each step needs larger buffers than the one before, and none is waited for until all are enqueued."""
    from shardline.kernels.cuda.backend import CudaBackend

    rng = np.random.default_rng(8)
    counts = [1, 2, 5, 12, 30, 70, 150]
    steps = [((rng.standard_normal((rows, 997)) * 3).astype(np.float32), batch_of(rng, rows, 997)) for rows in counts]
    wanted = [sample(cuda, logits, batch) for logits, batch in steps]
    backend = CudaBackend(0, None)
    pending = [backend.sample_later(backend.upload(logits), batch) for logits, batch in steps]
    got = [one.wait() for one in pending]
    backend.close()
    for one, other in zip(got, wanted, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.top_logprobs, other.top_logprobs, equal_nan=True)


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


def test_steps_ahead_of_the_host_choose_what_steps_one_by_one_choose(cuda: Any, portable: Any) -> None:
    """A chain of steps, each of which begins with the tokens of the one before, is enqueued as one: embedding, product
    and choice, recorded and replayed, with nothing between them that waits for the host."""
    rng = np.random.default_rng(9)
    rows, inputs, vocab, steps = 9, 640, 331, 12
    embed, head = (cuda.load_matrix([portable[0].matrix(vocab, inputs, seed)]) for seed in range(2))
    first = rng.integers(vocab, size=rows).astype(np.int32)
    places = rng.permutation(2 * rows)[:rows].astype(np.int32)
    x, norm = cuda.empty((rows, inputs), "float32"), cuda.upload(np.ones(inputs, np.float32))
    normed, logits = cuda.activations(rows, inputs), cuda.empty((rows, vocab), "float32")
    ids, last = cuda.empty((rows,), "int32"), cuda.upload(np.full(2 * rows, -1, np.int32))
    batches = [replace(batch_of(rng, rows, vocab), temperature=np.full(rows, 2, np.float32)) for _ in range(steps)]

    def issue() -> None:
        cuda.embedding(ids, embed, x, rows, last_tokens=last)
        cuda.rms_norm(x, norm, 1e-5, normed, rows)
        cuda.linear(normed, head, logits, rows)

    def run(ahead: bool) -> list[np.ndarray]:
        tokens, pending = first, []
        for step, batch in enumerate(batches):
            cuda.write(ids, -1 - places if ahead and step else tokens)
            cuda.replay(("ahead", ahead), issue)
            pending.append(cuda.sample_later(logits, batch, last, places))
            if not ahead:
                tokens = pending[-1].wait().token_ids
                pending[-1] = cuda.read_later(last[: 2 * rows])
        if ahead:
            return [one.wait().token_ids for one in pending]
        return [one.wait()[places] for one in pending]

    one_by_one, ahead = run(False), run(True)
    assert len({tokens.tobytes() for tokens in one_by_one}) == steps
    for step in range(steps):
        assert np.array_equal(ahead[step], one_by_one[step]), step
