"""The real model on a GPU: logits against the kept reference, and the bits of a row in any company."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint

pytestmark = pytest.mark.gpu
KEPT = Path(__file__).parents[1] / "stage" / "data" / "smollm2_logits.npz"
LOSSES = KEPT.with_name("smollm2_losses.npz")
PROMPTS = ("short", "long", "scripts", "code")


class Row:
    """Stages of one model in a row on one GPU, and plans for them."""

    def __init__(
        self,
        path: Path,
        cuts: tuple[int, ...] = (),
        block_size: int = 16,
        max_rows: int = 1024,
        kv_dtype: str = "float16",
    ) -> None:
        from shardline.kernels.cuda.backend import CudaBackend

        checkpoint = open_checkpoint(path)
        borders = (0, *cuts, checkpoint.spec.num_layers)
        self.block_size = block_size
        self.blocks_a_sequence = 1024 // block_size
        self.stages = [
            Stage(
                StageSpec(
                    index=index,
                    first_layer=first,
                    end_layer=end,
                    has_embed=index == 0,
                    has_head=index == len(cuts),
                    num_blocks=64 * self.blocks_a_sequence,
                    block_size=block_size,
                    kv_dtype=kv_dtype,
                    max_step_tokens=max_rows,
                    max_sequences=64,
                    max_context=1024,
                    num_threads=1,
                ),
                checkpoint,
                CudaBackend(0, None),
            )
            for index, (first, end) in enumerate(itertools.pairwise(borders))
        ]
        self.step = 0
        self.done: dict[int, int] = {}

    def plan(self, runs: dict[int, list[int]], samples: bool = False) -> StepPlan:
        """A plan that runs these tokens of these sequences; block ids are spread out and out of order."""
        starts, rows = [], []
        for sequence, tokens in runs.items():
            blocks = range(sequence, 64 * self.blocks_a_sequence, 64)
            first = self.done.get(sequence)
            if first is None:
                starts.append(
                    SequenceStart(sequence, SamplingParams(logprobs=2, seed=1), len(tokens), tuple(tokens), ())
                )
                first = 0
            end = first + len(tokens)
            new = list(blocks)[-(-first // self.block_size) : -(-end // self.block_size)]
            rows.append(SequenceRun(sequence, first, tuple(tokens), tuple(new), samples))
            self.done[sequence] = end
        plan = StepPlan(self.step, (), tuple(starts), tuple(rows))
        self.step += 1
        return plan

    def logits(self, runs: dict[int, list[int]]) -> np.ndarray:
        plan, hidden = self.plan(runs), None
        for stage in self.stages[:-1]:
            hidden = stage.run(plan, hidden).hidden
        return self.stages[-1].logits(plan, hidden)

    def reset(self) -> None:
        self.done.clear()
        for stage in self.stages:
            stage.reset()


@pytest.fixture(scope="module")
def kept() -> dict[str, np.ndarray]:
    with np.load(KEPT) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def row(smollm2: Path) -> Row:
    return Row(smollm2)


def whole(row: Row, token_ids: list[int]) -> np.ndarray:
    row.reset()
    return row.logits({0: token_ids})


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_are_the_references(row: Row, kept: dict[str, np.ndarray], prompt: str) -> None:
    got = whole(row, kept[f"{prompt}.token_ids"].tolist())[kept[f"{prompt}.positions"]].astype(np.float64)
    got -= got.max(axis=1, keepdims=True)
    got -= np.log(np.exp(got).sum(axis=1, keepdims=True))
    ids, top = kept[f"{prompt}.top_ids"], kept[f"{prompt}.top_logits"].astype(np.float64)
    clear = top[:, 0] - top[:, 1] > 5e-2
    assert np.array_equal(got.argmax(axis=1)[clear], ids[clear, 0])
    expected = top - kept[f"{prompt}.logsumexp"][:, None]
    got = np.take_along_axis(got, ids, axis=1)
    rest, expected_rest = 1 - np.exp(got).sum(axis=1), 1 - np.exp(expected).sum(axis=1)
    divergence = (np.exp(expected) * (expected - got)).sum(axis=1) + expected_rest * np.log(expected_rest / rest)
    assert divergence.mean() < 1e-3


def test_the_perplexity_is_the_references(row: Row, record_testsuite_property: Any) -> None:
    """Of 20 windows of 1024 tokens; transformers in float32 on the same weights made the losses that are kept."""
    with np.load(LOSSES) as file:
        windows, losses = file["token_ids"], file["losses"]
    lost = []
    for token_ids in windows.astype(np.int64):
        logits = whole(row, token_ids.tolist())[:-1].astype(np.float64)
        largest = logits.max(axis=1)
        total = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest
        lost.append((total - logits[np.arange(len(logits)), token_ids[1:]]).sum())
    count = windows.shape[0] * (windows.shape[1] - 1)
    perplexity, reference = np.exp(sum(lost) / count), np.exp(losses.sum() / count)
    record_testsuite_property("perplexity", perplexity)
    assert perplexity == pytest.approx(reference, rel=2e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64, 97, 256])
def test_chunks_change_no_bit(row: Row, kept: dict[str, np.ndarray], chunk: int) -> None:
    token_ids = kept["long.token_ids"].tolist()[: 90 if chunk == 1 else 600]
    expected = whole(row, token_ids)
    row.reset()
    got = [row.logits({3: token_ids[at : at + chunk]}) for at in range(0, len(token_ids), chunk)]
    assert np.array_equal(np.concatenate(got), expected)


@pytest.mark.parametrize("batch", [2, 5, 8, 9, 16, 17, 33, 64])
def test_company_changes_no_bit(row: Row, kept: dict[str, np.ndarray], batch: int) -> None:
    token_ids = kept["scripts.token_ids"].tolist()
    expected = whole(row, token_ids)[[-3, -2, -1]]
    row.reset()
    others = {place: kept["long.token_ids"].tolist()[place : place + 40 + place] for place in range(1, batch)}
    row.logits({0: token_ids[:-3]})
    for place, tokens in others.items():
        row.logits({place: tokens})
    for step in range(3):
        runs = {place: [tokens[step]] for place, tokens in others.items() if place % 2}
        runs[0] = [token_ids[len(token_ids) - 3 + step]]
        runs |= {place: [tokens[step]] for place, tokens in others.items() if place % 2 == 0}
        at = list(runs).index(0)
        assert np.array_equal(row.logits(runs)[at], expected[step])


@pytest.mark.parametrize(("cuts", "block_size"), [((10,), 8), ((3, 29), 64), ((7, 15, 22), 16)])
def test_splits_and_blocks_change_no_bit(
    smollm2: Path, row: Row, kept: dict[str, np.ndarray], cuts: tuple[int, ...], block_size: int
) -> None:
    token_ids = kept["code.token_ids"].tolist()
    expected = whole(row, token_ids)
    assert np.array_equal(whole(Row(smollm2, cuts, block_size), token_ids), expected)


@pytest.mark.parametrize("cuts", [(), (3, 29)])
def test_eight_bits_change_little_and_chunks_and_blocks_no_bit(
    smollm2: Path, row: Row, kept: dict[str, np.ndarray], cuts: tuple[int, ...]
) -> None:
    token_ids = kept["long.token_ids"].tolist()
    ours = Row(smollm2, cuts, kv_dtype="int8")
    expected = whole(ours, token_ids)
    halves, eighths = (x - np.logaddexp.reduce(x, axis=1)[:, None] for x in (whole(row, token_ids), expected))
    divergence = (np.exp(halves.astype(np.float64)) * (halves - eighths)).sum(axis=1)
    assert 1e-6 < divergence.mean() < 5e-3
    for chunk, block_size in ((7, 8), (64, 64), (1, 16)):
        other = Row(smollm2, cuts, block_size, kv_dtype="int8")
        end = 90 if chunk == 1 else len(token_ids)
        got = [other.logits({5: token_ids[at : min(at + chunk, end)]}) for at in range(0, end, chunk)]
        assert np.array_equal(np.concatenate(got), expected[:end]), (chunk, block_size)


def test_sampling_repeats(row: Row, kept: dict[str, np.ndarray]) -> None:
    token_ids = kept["short.token_ids"].tolist()
    logits = whole(row, token_ids)
    for _ in range(3):
        row.reset()
        result = row.stages[-1].run(row.plan({0: token_ids}, samples=True), None).result
        assert result is not None
        (token,) = result.tokens
        assert token.token_id == logits[-1].argmax()
        assert token.top_logprobs[0][0] == token.token_id
