"""A part of a model alone in this process: what it holds, what it computes, what it promises."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.cluster import subset as subset_module
from shardline.cluster.build import model_bytes
from shardline.cluster.cli import main
from shardline.cluster.subset import SubsetReport, measure_subset
from shardline.scheduler import InvalidParameterError
from shardline.stage import Stage, open_checkpoint


@pytest.fixture(scope="module")
def middle(smollm2: Path) -> SubsetReport:
    return measure_subset(smollm2, 10, 20, batches=(1, 4), context=40, steps=5, threads=2)


def test_the_middle(smollm2: Path, middle: SubsetReport) -> None:
    checkpoint = open_checkpoint(smollm2)
    size = model_bytes(checkpoint)
    checkpoint.close()
    assert (middle.has_embed, middle.has_head) == (False, False)
    assert middle.weight_bytes == pytest.approx(sum(size.layers[10:20]), rel=1e-2)
    # 4 sequences of 40 + 3 + 5 tokens: 3 blocks of 16 each.
    assert middle.kv_bytes == 10 * 4 * 3 * 16 * 2 * 3 * 64 * 2
    assert middle.stages_needed == 3
    assert "without the embedding and the head" in middle.projection
    for batch, sequences in zip(middle.batches, (1, 4), strict=True):
        assert batch.sequences == sequences
        assert batch.steps == 5
        assert 0 < batch.low_seconds <= batch.median_seconds <= batch.high_seconds
        assert batch.layer_seconds == batch.median_seconds / 10
        assert batch.projected_tokens_per_second == sequences / batch.median_seconds


@pytest.mark.parametrize(("first", "end", "stages"), [(0, 4, 8), (26, 30, 8), (0, 30, 1)])
def test_the_ends_bring_embedding_and_head(smollm2: Path, first: int, end: int, stages: int) -> None:
    report = measure_subset(smollm2, first, end, batches=(2,), context=8, steps=2, threads=2)
    assert (report.has_embed, report.has_head) == (first == 0, end == 30)
    assert report.stages_needed == stages == math.ceil(30 / (end - first))
    assert ("the head" in report.projection) == (end != 30)


def test_steps_are_batched_decode_at_the_context(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[tuple[int, int, int]], Any]] = []
    begin = Stage.begin

    def watched(self: Stage, plan: Any, hidden: Any) -> Any:
        seen.append(([(r.seq_id, r.position, len(r.token_ids)) for r in plan.runs], hidden))
        return begin(self, plan, hidden)

    monkeypatch.setattr(Stage, "begin", watched)
    measure_subset(smollm2, 3, 5, batches=(3,), context=600, steps=2, threads=2)
    # Each sequence computes a context of its own, in pieces; then all decode together, one position further a step.
    assert [rows for rows, _ in seen] == [
        *([(seq_id, start, count)] for seq_id in range(3) for start, count in ((0, 512), (512, 88))),
        *([(seq_id, position, 1) for seq_id in range(3)] for position in range(600, 605)),
    ]
    for rows, hidden in seen:
        assert hidden.shape == (sum(count for _, _, count in rows), 576)
        assert np.sqrt(np.mean(hidden**2)) == pytest.approx(1, rel=0.2)


def test_only_its_own_tensors_are_read(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int | None]] = []
    open_real = subset_module.open_checkpoint

    def watched(path: Path) -> Any:
        checkpoint = open_real(path)
        for name in ("matrix", "vector"):
            method = getattr(checkpoint, name)

            def reading(role: str, layer: int | None, method: Any = method) -> Any:
                read.append((role, layer))
                return method(role, layer)

            setattr(checkpoint, name, reading)
        return checkpoint

    monkeypatch.setattr(subset_module, "open_checkpoint", watched)
    measure_subset(smollm2, 7, 9, batches=(1,), context=4, steps=1)
    assert {layer for _, layer in read} == {7, 8}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"first": 5, "end": 5}, "layers"),
        ({"end": 31}, "layers='0:31'.*0:30"),
        ({"batches": (0,)}, "batches"),
        ({"batches": ()}, "batches"),
        ({"context": 0}, "context=0"),
        ({"steps": 0}, "steps=0"),
        # Once a heap was overwritten.
        ({"block_size": 7}, "block_size=7"),
        ({"kv_dtype": "int4"}, "kv_dtype='int4'"),
        ({"threads": 0}, "threads=0"),
        ({"threads": 100_000}, "threads=100000.*1024"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"context": 8192}, "context=8192.*at most 81"),
    ],
)
def test_numbers_out_of_range(smollm2: Path, changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"first": 0, "end": 2, "batches": (1,), "context": 8, "steps": 1, **changes}
    with pytest.raises(InvalidParameterError, match=told):
        measure_subset(smollm2, arguments.pop("first"), arguments.pop("end"), **arguments)


def test_the_command_needs_no_ray(
    smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["subset", str(smollm2), "--layers", "10:12", "--batches", "1,2", "--context", "8", "--steps", "2"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "layers 10 to 11 of 30" in told
    assert "projection: 15 stages" in told
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [batch["sequences"] for batch in document["batches"]] == [1, 2]
    assert document["stages_needed"] == 15
