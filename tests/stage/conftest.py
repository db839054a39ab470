"""Tiny models, the float64 reference, and stages in a row."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan, StepResult
from shardline.stage import Stage, StageSpec, open_checkpoint


def _module(name: str) -> ModuleType:
    """A file beside this one: tests are no package, so that an import statement would not find it."""
    spec = importlib.util.spec_from_file_location(f"shardline_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_tiny_models, _float64_reference = _module("tiny_models"), _module("float64_reference")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes tiny models: see `tiny_models.TinyModels`."""
    return _tiny_models.TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def experts() -> Any:
    """`tiny_models.Experts`."""
    return _tiny_models.Experts


@pytest.fixture(scope="session")
def reference() -> Any:
    """`float64_reference.Reference`."""
    return _float64_reference.Reference


class Row:
    """Stages in a row, and the plans of a test, whose block ids are taken in ascending order."""

    def __init__(self, path: Path, cuts: Sequence[int] = (), **changes: Any) -> None:
        """Cut before the layers `cuts`; a cut before 0 or behind the last layer leaves a stage without layers."""
        checkpoint = open_checkpoint(path)
        self.model = checkpoint.spec
        bounds = [0, *cuts, self.model.num_layers]
        base = StageSpec(
            index=0,
            first_layer=0,
            end_layer=0,
            has_embed=False,
            has_head=False,
            num_blocks=64,
            block_size=16,
            kv_dtype="float32",
            max_step_tokens=128,
            max_sequences=8,
            max_context=self.model.context_length,
            num_threads=2,
        )
        base = replace(base, **changes)
        self.specs = [
            replace(
                base,
                index=index,
                first_layer=bounds[index],
                end_layer=bounds[index + 1],
                has_embed=index == 0,
                has_head=index == len(cuts),
            )
            for index in range(len(cuts) + 1)
        ]
        self.stages = [Stage(spec, checkpoint, cpu_backend(spec.num_threads)) for spec in self.specs]
        checkpoint.close()
        self._block_size = base.block_size
        self._next_step = 0
        self._next_block = 0
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self.forget: list[int] = []

    def plan(
        self,
        tokens: dict[int, Sequence[int]],
        *,
        samples: bool = False,
        params: SamplingParams | None = None,
        prompt: Sequence[int] = (),
    ) -> StepPlan:
        """Run these tokens of these sequences next; unknown ones are started."""
        starts, runs = [], []
        for seq_id, token_ids in tokens.items():
            if seq_id not in self._lengths:
                self._lengths[seq_id], self._tables[seq_id] = 0, []
                asked = params or SamplingParams(seed=seq_id)
                known = tuple(prompt or token_ids)
                starts.append(SequenceStart(seq_id, asked, len(known), known, ()))
            position = self._lengths[seq_id]
            table = self._tables[seq_id]
            needed = -(-(position + len(token_ids)) // self._block_size) - len(table)
            new = tuple(range(self._next_block, self._next_block + needed))
            self._next_block += needed
            table.extend(new)
            self._lengths[seq_id] = position + len(token_ids)
            runs.append(SequenceRun(seq_id, position, tuple(token_ids), new, samples))
        self._next_step += 1
        forget, self.forget = tuple(self.forget), []
        return StepPlan(self._next_step - 1, forget, tuple(starts), tuple(runs))

    def logits(self, plan: StepPlan) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits of every row, and the hidden states that went from stage to stage."""
        hidden, passed = None, []
        for stage in self.stages[:-1]:
            hidden = stage.run(plan, hidden).hidden
            assert hidden is not None
            passed.append(hidden)
        return self.stages[-1].logits(plan, hidden), passed

    def run(self, plan: StepPlan) -> StepResult:
        """What the last stage made of a plan."""
        hidden = None
        for stage in self.stages:
            output = stage.run(plan, hidden)
            hidden = output.hidden
        assert output.result is not None
        return output.result

    def close(self) -> None:
        """Give back every stage's memory and threads."""
        for stage in self.stages:
            stage.close()


@pytest.fixture
def stage_row() -> Iterator[Callable[..., Row]]:
    """Makes rows of stages, closed at the test's end."""
    rows: list[Row] = []

    def make(path: Path, cuts: Sequence[int] = (), **changes: Any) -> Row:
        rows.append(Row(path, cuts, **changes))
        return rows[-1]

    yield make
    for row in rows:
        row.close()
