"""The matrix runner itself: that it covers what it says, sees what is wrong, and says where."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cluster.checking.verify import Verifier
from shardline.cluster.checking.verify_cases import Case, Factors, default_splits
from shardline.cluster.checking.verify_result import first_difference
from shardline.cluster.cli import main
from shardline.cluster.local_pipeline import LocalPipeline
from shardline.kernels.cpu.backend import CpuBackend
from shardline.scheduler import InvalidParameterError, SampledToken
from shardline.stage import sequences as sequences_module

CASE = Case(split=(30,), block_size=16, prefill_chunk=None, batch=5, warm=False, preempted=False, seeded=True)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True),
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.lists(st.booleans(), min_size=1, max_size=2, unique=True),
)
def test_every_two_values_meet(batches: list[int], blocks: list[int], flags: list[bool]) -> None:
    factors = Factors(
        split=((3,), (1, 2)),
        block_size=tuple(blocks),
        prefill_chunk=(None, 7),
        batch=tuple(batches),
        warm=tuple(flags),
        preempted=(False,),
        seeded=tuple(flags),
    )
    cases = factors.covering()
    assert len(set(cases)) == len(cases)
    assert set(cases) <= set(factors.product())
    names = ("split", "block_size", "prefill_chunk", "batch", "warm", "preempted", "seeded")
    for a, b in itertools.combinations(names, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(getattr(factors, a), getattr(factors, b)))


def test_the_whole_product() -> None:
    factors = Factors(default_splits(30))
    assert len(factors.product()) == len(set(factors.product())) == 5 * 3 * 3 * 6 * 2 * 2 * 2
    assert len(factors.covering()) < 40


@pytest.mark.parametrize("layers", range(1, 12))
def test_default_splits_are_splits(layers: int) -> None:
    splits = default_splits(layers)
    assert splits[0] == (layers,)
    assert len(set(splits)) == len(splits)
    assert all(sum(split) == layers and min(split) > 0 for split in splits)


def token(token_id: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> SampledToken:
    return SampledToken(0, token_id, logprob, top)


def test_a_difference_is_found_at_its_first_bit() -> None:
    a = [token(1, -0.5), token(2, -0.25, ((2, -0.25), (7, -1.5)))]
    assert first_difference(0, a, [t._replace(seq_id=9) for t in a]) is None
    for wrong in (
        [a[0], a[1]._replace(token_id=3)],
        [a[0], a[1]._replace(logprob=float(np.nextafter(-0.25, 0)))],
        [a[0], a[1]._replace(logprob=None)],
        [a[0], a[1]._replace(top_logprobs=((2, -0.25), (7, float(np.nextafter(-1.5, 0)))))],
        [a[0], a[1]._replace(top_logprobs=((2, -0.25),))],
        [a[0]],
        [*a, a[0]],
    ):
        found = first_difference(4, a, wrong)
        assert found is not None
        assert (found.request, found.position) == (4, 2 if len(wrong) == 3 else 1)
    zero = first_difference(0, [token(1, 0.0)], [token(1, -0.0)])
    assert zero is not None
    assert zero.same_token
    assert "expected token 1 with logprob 0.0" in str(zero)
    assert "got token 1 with logprob -0.0" in str(zero)


def test_wrong_numbers_are_refused(smollm2: Path) -> None:
    with pytest.raises(InvalidParameterError, match="new_tokens"):
        Verifier(smollm2, new_tokens=1)


def forgetful_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of rows that leaves out the last one when their number is odd."""
    linear = CpuBackend.linear

    def faulty(self: CpuBackend, x: Any, weight: Any, out: Any, rows: int, **options: Any) -> None:
        linear(self, x, weight, out, rows - (rows > 1 and rows % 2), **options)

    monkeypatch.setattr(CpuBackend, "linear", faulty)


def wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """While several sequences decode, the last one reads its first block where the first one has its own."""
    step_rows = sequences_module._step_rows

    def faulty(*arguments: Any) -> Any:
        rows = step_rows(*arguments)
        if len(rows.block_tables) == len(rows.positions) > 1:
            rows.block_tables[-1, 0] = rows.block_tables[0, 0]
        return rows

    monkeypatch.setattr(sequences_module, "_step_rows", faulty)


SMALL = ["--splits", "30", "--block-sizes", "16", "--chunks", "0", "--batches", "5", "--tokens", "5"]


def test_equal_batches_pass(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(smollm2), *SMALL, "--batches", "1"]) == 0
    told = capsys.readouterr().out
    assert "cases equal, byte for byte" in told
    assert "NO" not in told
    assert main(["verify", str(smollm2), *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    for case in document["cases"]:
        assert (case["preemptions"] > 0) >= case["case"]["preempted"]
        assert (case["prefix_hit_tokens"] > 0) == case["case"]["warm"]
        assert (case["plans_ahead"] > 0) == case["case"]["warm"], "one stage runs a step ahead in half of the cases"
        assert case["tokens"] == 5 * 5


@pytest.mark.parametrize("fault", [forgetful_tile, wrong_block])
def test_a_fault_is_named_and_sets_the_exit_code(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Any
) -> None:
    fault(monkeypatch)
    assert main(["verify", str(smollm2), *SMALL]) == 1
    told = capsys.readouterr().out
    assert "FAILED" in told
    assert "split 30, blocks of 16, whole prompts, batch 5" in told
    assert "sequences differ; first at request" in told
    assert "expected token" in told
    assert "got token" in told

    assert main(["verify", str(smollm2), *SMALL, "--json"]) == 1
    # A fault may give NaN, which JSON has not.
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["passed"] is False
    differing = [case for case in document["cases"] if case["differing"]]
    assert differing
    assert all(case["first"]["expected"] != case["first"]["got"] for case in differing)


def test_a_case_that_does_not_do_its_work_fails(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Verifier(smollm2, max_batch=2) as verifier:
        monkeypatch.setattr(verifier, "_few_blocks", lambda case, running: 100)
        result = verifier.run(replace(CASE, batch=2, preempted=True))
        assert result.first is None
        assert not result.passed
        assert result.missed == "no sequence was preempted"


def test_a_case_in_which_every_plan_waits_proves_nothing_of_plans_ahead(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Verifier(smollm2, max_batch=2) as verifier:
        make = verifier._scheduler
        monkeypatch.setattr(verifier, "_scheduler", lambda *sizes, **given: make(*sizes, **given | {"ahead": False}))
        result = verifier.run(replace(CASE, batch=2, warm=True))
        assert result.first is None
        assert not result.passed
        assert result.missed == "0 plans were made ahead"


def test_an_interrupt_leaves_nothing_behind(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    result = LocalPipeline.result
    calls = itertools.count()

    async def interrupted(self: LocalPipeline) -> Any:
        if next(calls) == 20:
            # As a signal does: in the loop, while the work of the case waits.
            asyncio.get_running_loop().call_soon(interrupt)
        return await result(self)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalPipeline, "result", interrupted)
    assert main(["verify", str(smollm2), *SMALL]) == 130
    gc.collect()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "never retrieved" not in captured.err
    assert next(calls) == 21
