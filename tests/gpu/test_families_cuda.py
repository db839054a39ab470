"""Tiny models of every family on a GPU: against float64, and the same bits in stages, chunks and batches."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint

pytestmark = pytest.mark.gpu
STAGE_TESTS = Path(__file__).parents[1] / "stage"


def module(name: str) -> ModuleType:
    """A file of the stage's tests, which are no package."""
    spec = importlib.util.spec_from_file_location(f"shardline_gpu_{name}", STAGE_TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


families = module("test_family_decoders")
tiny_models, float64_reference = module("tiny_models"), module("float64_reference")
folders, quantized = module("huggingface/conftest"), module("huggingface/test_hf_quantized")
TOKENS: list[int] = families.TOKENS


class Row:
    """Stages of one model in a row on one GPU; block ids are taken in ascending order."""

    def __init__(self, path: Path, cache: Path, cuts: Sequence[int] = (), block_size: int = 16) -> None:
        from shardline.kernels.cuda.backend import CudaBackend

        checkpoint = open_checkpoint(path)
        self.model = checkpoint.spec
        borders = [0, *cuts, self.model.num_layers]
        self.stages = [
            Stage(
                StageSpec(
                    index=index,
                    first_layer=borders[index],
                    end_layer=borders[index + 1],
                    has_embed=index == 0,
                    has_head=index == len(cuts),
                    num_blocks=1024 // block_size,
                    block_size=block_size,
                    kv_dtype="float16",
                    max_step_tokens=512,
                    max_sequences=8,
                    max_context=self.model.context_length,
                    num_threads=1,
                ),
                checkpoint,
                CudaBackend(0, cache),
            )
            for index in range(len(cuts) + 1)
        ]
        checkpoint.close()
        self.block_size, self.step, self.next_block = block_size, 0, 0
        self.lengths: dict[int, int] = {}
        self.blocks: dict[int, int] = {}

    def logits(self, runs: dict[int, Sequence[int]]) -> np.ndarray:
        """Of every row of a step that runs these tokens of these sequences next."""
        starts, plans = [], []
        for sequence, tokens in runs.items():
            first = self.lengths.get(sequence)
            if first is None:
                first = self.blocks[sequence] = 0
                starts.append(SequenceStart(sequence, SamplingParams(seed=1), len(tokens), tuple(tokens), ()))
            self.lengths[sequence] = end = first + len(tokens)
            new = -(-end // self.block_size) - self.blocks[sequence]
            ids = tuple(range(self.next_block, self.next_block + new))
            self.next_block += new
            self.blocks[sequence] += new
            plans.append(SequenceRun(sequence, first, tuple(tokens), ids, False))
        plan = StepPlan(self.step, (), tuple(starts), tuple(plans))
        self.step += 1
        hidden = None
        for stage in self.stages[:-1]:
            hidden = stage.run(plan, hidden).hidden
        return self.stages[-1].logits(plan, hidden)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@pytest.fixture(scope="module")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Row]:
    """Stages of a case, whose compiled kernels are kept for the next."""
    folder = tmp_path_factory.mktemp("families")
    make, paths = tiny_models.TinyModels(folder), {}

    def row(name: str, *args: Any, **kwargs: Any) -> Row:
        if name not in paths:
            family, asked, mixture, keys = families.CASES[name]
            changes = dict(asked)
            if changes.get("edit") == "biases":
                changes["edit"] = families.all_biases
            if mixture is not None:
                changes["experts"] = tiny_models.Experts(**mixture)
            paths[name] = make(family, keys={f"{family}.{key}": value for key, value in keys.items()}, **changes)
        made = Row(paths[name], folder / "cubin", *args, **kwargs)
        made.path = paths[name]
        return made

    return row


def check_near(whole: np.ndarray, wanted: np.ndarray, *, mixture: bool) -> None:
    """Activations, keys, values and probabilities are rounded to halves: 2^-11 each, and many of them. Where two
    experts are as good as each other a row may go to the other one, and those that attend to it feel it."""
    error = np.abs(whole - wanted).max(axis=1) / np.abs(wanted).max()
    assert np.median(error) <= 0.01
    assert np.mean(error <= 0.03) >= (0.8 if mixture else 1)


@pytest.mark.parametrize("form", quantized.FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_folders_of_packed_integers(tmp_path_factory: pytest.TempPathFactory, form: str, family: str) -> None:
    """GPTQ, AWQ and compressed-tensors, also where each matrix has its columns in an order of its own."""
    packer = quantized.Packer(form)
    make = folders.TinyFolders(tmp_path_factory.mktemp("folders"))
    path, tensors = make(family, edit=packer, keys={"quantization_config": packer.config})
    cache = tmp_path_factory.getbasetemp() / "folders-cubin"
    rows = [Row(path, cache, cuts) for cuts in ((), (2,), (1, 2))]
    whole, *others = [row.logits({0: quantized.PROMPT}) for row in rows]
    for row in rows:
        row.close()
    wanted = quantized.meant_logits(float64_reference.Reference, family, packer, tensors)
    check_near(whole, wanted, mixture=family == "qwen2_moe")
    for other in others:
        assert np.array_equal(other, whole)


@pytest.mark.parametrize("name", families.CASES)
def test_near_float64_and_the_same_bits_however_it_is_cut(row_of: Callable[..., Row], name: str) -> None:
    row = row_of(name)
    whole = row.logits({0: TOKENS})
    row.close()
    assert whole.dtype == np.float32
    wanted = float64_reference.Reference(row.path).logits(TOKENS)
    check_near(whole, wanted, mixture=row.model.experts is not None)

    last = row.model.num_layers - 1
    for cuts, size, block_size in (((1,), 33, 8), ((1, last), 7, 32), ((), 1, 16)):
        split = row_of(name, cuts, block_size=block_size)
        chunks = [TOKENS[start : start + size] for start in range(0, len(TOKENS), size)]
        got = np.concatenate([split.logits({0: chunk}) for chunk in chunks])
        split.close()
        assert np.array_equal(got, whole), (cuts, size)


@pytest.mark.parametrize("name", families.CASES)
def test_batch_mates_change_nothing(row_of: Callable[..., Row], name: str) -> None:
    sequences = {i: TOKENS[i : i + 5 + 14 * i] for i in range(5)}
    row = row_of(name)
    together = [row.logits(dict(sequences))]
    # Each goes on by one token; the third time the step is a recorded one.
    together += [row.logits({i: [TOKENS[-1 - i - turn]] for i in sequences}) for turn in range(3)]
    row.close()
    firsts = np.split(together[0], np.cumsum([len(tokens) for tokens in sequences.values()])[:-1])
    for i, tokens in sequences.items():
        alone = row_of(name)
        assert np.array_equal(alone.logits({0: tokens}), firsts[i]), i
        for turn in range(3):
            got = alone.logits({0: [TOKENS[-1 - i - turn]]})
            assert np.array_equal(got[0], together[1 + turn][i]), (i, turn)
        alone.close()
