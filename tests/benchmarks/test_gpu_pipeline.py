"""The benchmark of a whole model over several devices, on the CPU with a tiny geometry."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.drive import Answer, Parity
from benchmarks.gpu_pipeline import arguments, code_of
from benchmarks.layouts import Layout, engine_options, parse_layout
from benchmarks.session import Session
from benchmarks.soak import flat
from benchmarks.stages_alone import projected
from benchmarks.traffic import Lengths, trace

from shardline.cluster.subset import BatchTimes

ROOT = Path(__file__).parent.parent.parent
GIB = 1 << 30
SMALL = [
    *("--device", "cpu", "--geometry", "tiny", "--layers", "4", "--threads", "1", "--batches", "8", "12"),
    *("--steps", "8", "--warm", "2", "--prompt", "32", "--pool", "8192", "--context", "512", "--step-tokens", "256"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def run(work: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    results = work / "results.json"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_pipeline", *SMALL, "--work", str(work), "--results", str(results)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(results.read_text()) if results.exists() else {}
    return done, report


@pytest.mark.ray
def test_two_stages_over_ray_give_the_tokens_of_one_and_a_report_that_says_how_fast(work: Path) -> None:
    done, report = run(work, "--layouts", "one", "2", "--trials", "2", "--parts", "decode", "overhead", "subset")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report["code"], set(report["layouts"])) == (0, {"one", "2"})
    assert report["options"]["seed"] == 0
    assert report["versions"]["shardline"]
    assert "benchmarks.gpu_pipeline" in report["command"]
    one, two = report["layouts"]["one"], report["layouts"]["2"]
    assert (one["split"], two["split"]) == ([4], [2, 2])
    # The last sequence of the larger batch is one of those that run alone.
    assert one["alone"]["sequences"] == 9
    assert one["alone"]["distinct_tokens"] > 30
    assert {(row["flight"], row["batch"]) for row in one["decode"]} == {("planned", 8), ("planned", 12)}
    assert {(row["flight"], row["batch"], row["depth"]) for row in two["decode"]} >= {("cards", 8, 3), ("cards", 12, 3)}
    for result, stages in ((one, 1), (two, 2)):
        assert result["parity"]["equal"]
        assert result["parity"]["sequences_compared_with_one_stream"] >= 4 * 8
        assert result["parity"]["logprobs_compared"] >= 8 * 10
        assert len(result["stage_facts"]) == stages
        for row in result["decode"]:
            rate = row["tokens_per_second"]
            assert len(rate["trials"]) == 2
            assert 0 < rate["least"] <= rate["median"] <= rate["most"]
            assert len(row["busy_shares"]) == stages
            assert all(0 < busy["median"] <= 1.001 for busy in row["busy_shares"])
            assert 1 <= row["rows_a_step"] <= row["batch"]
            assert row["engine_core_share"]["median"] > 0
        for row in result["overhead"]:
            assert 0 < row["share_of_a_step"]["median"] < 1
            assert row["seconds_a_hop"]["median"] > 0
    assert [load["bytes"] > 0 and load["seconds"] > 0 for load in two["loads"]] == [True, True]
    for row in two["subset"]:
        assert len(row["stage_seconds"]) == 2
        assert row["cards_tokens_per_second"] >= row["one_device_tokens_per_second"] > 0


@pytest.mark.ray
def test_a_soak_loses_nothing_while_stages_are_killed(work: Path) -> None:
    soak = ["--parts", "soak", "--soak", "8", "--kill-every", "3", "--clients", "6"]
    short = ["--median-prompt", "24", "--median-output", "24", "--most-prompt", "64", "--most-output", "64"]
    done, report = run(work, "--layouts", "one", "2", *soak, *short)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "soak" not in report["layouts"]["one"], "its only stage is in the benchmark's own process"
    result = report["layouts"]["2"]["soak"]
    assert result["clean"], result
    assert result["kills"]
    assert result["losses"] >= len(result["kills"])
    assert result["requests"]["whole"] > 0
    assert result["requests"]["cancelled"] > 0
    assert (result["requests"]["failed"], result["blocks_used_at_the_end"]) == (0, 0)
    assert report["layouts"]["2"]["parity"]["equal"]


def test_tokens_that_differ_end_the_command_with_1(work: Path) -> None:
    done, report = run(work, "--layouts", "one", "--trials", "1", "--parts", "decode", "--spoil")
    assert done.returncode == 1, done.stdout + done.stderr
    parity = report["layouts"]["one"]["parity"]
    assert not parity["equal"]
    assert all("sequence 0" in words for words in parity["different"])
    assert "NOT EQUAL" in done.stdout


def test_a_layout_that_cannot_be_built_is_an_error_and_not_a_success(work: Path) -> None:
    done, report = run(work, "--layouts", "one", "2x1KiB", "--trials", "1", "--parts", "prefill")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "PlanningError" in report["layouts"]["2x1KiB"]["error"]
    assert report["layouts"]["one"]["parity"]["equal"]


def test_what_does_not_fit_into_the_pool_is_said_and_left_out(work: Path) -> None:
    done, report = run(work, "--layouts", "one", "--trials", "1", "--parts", "decode", "--batches", "8", "400")
    assert done.returncode == 0, done.stdout + done.stderr
    result = report["layouts"]["one"]
    assert {row["batch"] for row in result["decode"]} == {8}
    assert set(result["does_not_fit"]) == {"400"}


def test_traffic_says_how_long_requests_wait(work: Path) -> None:
    short = ["--median-prompt", "24", "--median-output", "8", "--most-prompt", "64", "--most-output", "16"]
    done, report = run(work, "--layouts", "one", "--parts", "traffic", "--seconds", "2", "--shares", "0.5", *short)
    assert done.returncode == 0, done.stdout + done.stderr
    traffic = report["layouts"]["one"]["traffic"]
    assert traffic["capacity"]["tokens_per_second"] > 0
    (row,) = traffic["rates"]
    assert row["requests"] > 0
    assert row["failed"] == []
    for quantiles in (row["first_token_seconds"], row["token_seconds"]):
        assert 0 < quantiles["p50"] <= quantiles["p95"] <= quantiles["p99"]
    assert 0 <= row["good_share"] <= 1


@pytest.mark.parametrize(
    ("text", "stages", "memory", "ray"),
    [
        ("one", 1, None, False),
        ("one-ray", 1, None, True),
        ("2", 2, None, True),
        ("4x8GiB", 4, (8 * GIB,) * 4, True),
        ("6,8,12,16GiB", 4, (6 * GIB, 8 * GIB, 12 * GIB, 16 * GIB), True),
        ("2x1.5G", 2, (3 << 29, 3 << 29), True),
    ],
)
def test_layouts_are_read(text: str, stages: int, memory: tuple[int, ...] | None, ray: bool) -> None:
    assert parse_layout(text) == Layout(text, stages, memory, ray)


@pytest.mark.parametrize("text", ["", "0", "two", "4x", "8 GB x4", "-1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_layout(text)


def test_limits_are_the_gpus_where_stages_are_on_gpus() -> None:
    limited = engine_options(parse_layout("2x12GiB"), Path("model"), "gpu")
    assert (limited.device, limited.gpu_memory, limited.memory) == ("gpu", (12 * GIB,) * 2, None)
    assert engine_options(parse_layout("one"), Path("model"), "gpu").device == "cuda:0"
    on_cpu = engine_options(parse_layout("2x12GiB"), Path("model"), "cpu")
    assert (on_cpu.device, on_cpu.gpu_memory, on_cpu.memory) == ("cpu", None, (12 * GIB,) * 2)


def answer(*tokens: int) -> Answer:
    return tuple((token, None) for token in tokens)


class TestParity:
    def test_a_shorter_output_is_compared_as_far_as_it_goes(self) -> None:
        parity = Parity({"a": answer(1, 2, 3)})
        assert parity.check("a", answer(1, 2), "here")
        assert parity.check("a", answer(1, 2, 3, 4), "here")
        assert not parity.check("a", answer(1, 3), "here")
        assert (parity.compared_alone, len(parity.different)) == (3, 1)

    def test_an_output_that_ended_must_be_as_long(self) -> None:
        parity = Parity({"a": answer(1, 2, 3)})
        assert parity.check("a", answer(1, 2, 3), "here", ended=True)
        assert not parity.check("a", answer(1, 2), "here", ended=True)
        assert not parity.check("a", answer(1, 2, 3, 4), "here", ended=True)

    def test_what_never_ran_alone_is_compared_with_what_came_first(self) -> None:
        parity = Parity()
        assert parity.check("b", answer(5, 6), "first")
        assert parity.check("b", answer(5, 6), "second")
        assert not parity.check("b", answer(5, 7), "third")
        assert (parity.compared_alone, parity.compared_seen) == (0, 2)

    def test_of_what_came_first_the_longest_and_its_logprobs_are_kept(self) -> None:
        parity = Parity()
        assert parity.check("b", ((5, -0.5),), "first")
        assert parity.check("b", answer(5, 6, 7), "second")
        assert not parity.check("b", answer(5, 6, 8), "third")
        assert not parity.check("b", ((5, -0.25),), "fourth")

    def test_one_bit_of_a_logprob_is_a_difference(self) -> None:
        parity = Parity({"a": ((1, -0.5), (2, -1.5))})
        assert parity.check("a", ((1, -0.5), (2, -1.5)), "here")
        assert parity.check("a", answer(1, 2), "without logprobs")
        assert parity.compared_logprobs == 2
        assert not parity.check("a", ((1, -0.5), (2, math.nextafter(-1.5, 0))), "here")


def report_of(**result: Any) -> dict[str, Any]:
    parity = {"equal": True, "sequences_compared_with_one_stream": 8}
    return {"layouts": {"one": {"parity": parity} | result}}


def test_the_exit_code_says_what_went_wrong() -> None:
    different = {"equal": False, "sequences_compared_with_one_stream": 8}
    nothing = {"equal": True, "sequences_compared_with_one_stream": 0}
    assert code_of(report_of(), True) == 0
    assert code_of(report_of(parity=different, error="x"), True) == 1
    assert code_of(report_of(error="x"), True) == 2
    assert code_of(report_of(subset_error="x"), True) == 2
    assert code_of(report_of(soak={"clean": False}), True) == 2
    assert code_of(report_of(parity=nothing), True) == 2, "nothing was compared, so nothing is proven"
    assert code_of({"layouts": {"one": {}}, "hops_error": "x"}, False) == 2


def test_a_projection_is_the_slowest_stage_on_cards_of_their_own_and_the_sum_on_one() -> None:
    def times(seconds: float) -> dict[int, BatchTimes]:
        return {4: BatchTimes(4, 15, seconds, seconds, seconds, seconds, 4 / seconds)}

    stages = [times(0.010), times(0.020)]
    row = projected("cards", 12, 4, stages)
    assert row["cards_tokens_per_second"] == pytest.approx(12 / (3 * 0.020))
    assert row["one_device_tokens_per_second"] == pytest.approx(12 / (3 * 0.030))
    # One microbatch waits for its own way through both.
    assert projected("cards", 4, 4, stages)["cards_tokens_per_second"] == pytest.approx(4 / 0.030)


def test_a_trace_has_long_tails_and_is_the_same_for_the_same_seed() -> None:
    jobs = trace(400, 1024, 3, Lengths(), cancels=0.2)
    assert jobs == trace(400, 1024, 3, Lengths(), cancels=0.2)
    assert jobs != trace(400, 1024, 4, Lengths(), cancels=0.2)
    lengths = sorted(len(job.ids) for job in jobs)
    assert lengths[200] == pytest.approx(128, rel=0.25)
    assert lengths[390] > 3 * lengths[200]
    assert sum(job.gap for job in jobs) / 400 == pytest.approx(1, rel=0.2)
    assert 40 < sum(job.cancel_after is not None for job in jobs) < 120
    assert max(max(job.ids) for job in jobs) < 1023, "the end token is no part of a prompt"


def test_what_has_no_time_left_is_said_once() -> None:
    given = arguments().parse_args([])
    session = Session(given, parse_layout("one"), Path("model"), 100, {}, {}, deadline=0.0)
    assert session.late("decode")
    assert session.late("decode")
    assert session.result["left_out"] == ["decode"]
    assert not Session(given, parse_layout("one"), Path("model"), 100, {}, {}, deadline=math.inf).late("decode")


def test_memory_that_grows_is_not_flat() -> None:
    steady, growing = [1 << 30] * 30, [(1 << 30) + (i << 24) for i in range(30)]
    assert flat(steady)["flat"]
    assert not flat(growing)["flat"]
    assert flat([1 << 20, *steady])["flat"], "caches fill at first"
    assert flat([None] * 30)["flat"] is None
    assert math.isclose(flat(steady)["last"], 1 << 30)
