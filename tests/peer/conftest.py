"""Our logits and transformers' logits of one GGUF file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint


class WholeModel:
    """One stage with all layers; a call gives the logits of one sequence, float32 [tokens, vocab]."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        checkpoint = open_checkpoint(path)
        self._block_size = 16
        self._num_blocks = -(-max_tokens // self._block_size)
        spec = StageSpec(
            index=0,
            first_layer=0,
            end_layer=checkpoint.spec.num_layers,
            has_embed=True,
            has_head=True,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            kv_dtype="float32",
            max_step_tokens=max_tokens,
            max_sequences=64,
            max_context=checkpoint.spec.context_length,
            num_threads=2,
        )
        self._stage = Stage(spec, checkpoint, cpu_backend(spec.num_threads))
        checkpoint.close()

    def __call__(self, token_ids: Sequence[int]) -> np.ndarray:
        self._stage.reset()
        start = SequenceStart(0, SamplingParams(seed=0), len(token_ids), tuple(token_ids), ())
        run = SequenceRun(0, 0, tuple(token_ids), tuple(range(self._num_blocks)), False)
        return self._stage.logits(StepPlan(0, (), (start,), (run,)), None)

    def close(self) -> None:
        """Give back memory and threads."""
        self._stage.close()


@pytest.fixture
def whole_model() -> Iterator[Callable[[Path, int], WholeModel]]:
    """Makes models of one stage, closed at the test's end."""
    made: list[WholeModel] = []

    def make(path: Path, max_tokens: int) -> WholeModel:
        made.append(WholeModel(path, max_tokens))
        return made[-1]

    yield make
    for model in made:
        model.close()


@pytest.fixture(scope="session")
def reference_logits() -> ModuleType:
    """The script that makes the kept logits, as a module: the tests compare with the same model and prompts."""
    spec = importlib.util.spec_from_file_location(
        "make_reference_logits", Path(__file__).with_name("make_reference_logits.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def transformers_llama(reference_logits, smollm2):
    """The reference, loaded once."""
    return reference_logits.TransformersLlama(smollm2)
