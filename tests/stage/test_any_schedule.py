"""Random schedules over random splits, in memory full of NaN: each row's logits are those of its sequence alone.

Sequences share prefixes and blocks, come in chunks of any size beside others', lose their blocks and start again; block
ids have no order; stages have one to three threads, pools of both types, and perhaps no layer. What a step leaves
unwritten holds NaN, so that reading it would show; and one token is NaN itself, which nobody else may notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.kernels import cpu_backend
from shardline.kernels.cpu import backend as cpu
from shardline.kernels.cpu import ops, pool
from shardline.kernels.cpu.resident import aligned_empty
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint

VOCAB = 101
POISON = VOCAB - 1
LONGEST = 72
PARAMS = SamplingParams(seed=0)


def equal_routers(tensors: Any) -> None:
    """Every second expert has the logits of the one before it."""
    for name, (data, kind) in tensors.items():
        if "ffn_gate_inp" in name and "shexp" not in name:
            rows = data.copy()
            rows[1::2] = rows[::2][: len(rows[1::2])]
            tensors[name] = (rows, kind)


# Family, what the writer is asked for, its experts, and keys without the family's prefix.
CASES = {
    "llama": ("llama", {"kv_heads": 1, "tied": False}, None, {"attention.sliding_window": 5}),
    "qwen2moe": ("qwen2moe", {"edit": equal_routers}, {"count": 10, "used": 3}, {}),
    "glm4moe": (
        "glm4moe",
        {"rotary_dim": 8, "tied": False, "edit": equal_routers},
        {"count": 24, "used": 4, "dense_layers": 1},
        {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "olmoe": ("olmoe", {}, {"count": 3, "used": 3}, {}),
    "gemma3": ("gemma3", {"tied": False, "head_dim": 32}, None, {"attention.sliding_window": 9}),
    "gpt-oss": (
        "gpt-oss",
        {"layers": 4, "kinds": [Kind.MXFP4, Kind.Q8_0]},
        {"count": 40, "used": 2},
        {"attention.sliding_window": 16},
    ),
    "phi3": (
        "phi3",
        {"long_factors": True, "rotary_dim": 12, "tied": False},
        None,
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.2},
    ),
    "smollm3": ("smollm3", {"layers": 5, "tied": False}, None, {}),
}


@pytest.fixture
def full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, buffers and scratch memory of every backend begin as NaN, or as numbers that are no index."""

    def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
        array = aligned_empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF if array.dtype != np.int32 else 0x3F
        return array

    for module, name in ((ops, "aligned_empty"), (cpu, "aligned_empty"), (pool, "aligned_zeros")):
        monkeypatch.setattr(module, name, poisoned)


class Stages:
    """Stages in a row."""

    def __init__(self, checkpoint: Any, cuts: Sequence[int], threads: Sequence[int], **sizes: Any) -> None:
        bounds = [0, *cuts, checkpoint.spec.num_layers]
        self._stages = []
        for index, count in enumerate(threads):
            spec = StageSpec(
                index=index,
                first_layer=bounds[index],
                end_layer=bounds[index + 1],
                has_embed=index == 0,
                has_head=index == len(cuts),
                num_threads=count,
                max_context=96,
                **sizes,
            )
            self._stages.append(Stage(spec, checkpoint, cpu_backend(count)))
        # No file may hold what is no number; so it is put where the file's has become resident.
        part = self._stages[0]._decoder._embed.matrix.parts[0]
        part.scale[POISON // 64, :, POISON % 64] = np.nan

    def logits(self, plan: StepPlan) -> np.ndarray:
        hidden = None
        for stage in self._stages[:-1]:
            hidden = stage.run(plan, hidden).hidden
        return self._stages[-1].logits(plan, hidden)

    def close(self) -> None:
        for stage in self._stages:
            stage.close()


def alone(checkpoint: Any, sequences: list[list[int]], kv_dtype: str) -> list[np.ndarray]:
    """Each whole, in one step, in one stage of one thread."""
    sizes = {"num_blocks": 8, "block_size": 16, "kv_dtype": kv_dtype, "max_step_tokens": LONGEST, "max_sequences": 1}
    stages = Stages(checkpoint, (), [1], **sizes)
    results = []
    for index, tokens in enumerate(sequences):
        forget = (index - 1,) if index else ()
        start = SequenceStart(index, PARAMS, len(tokens), tuple(tokens), ())
        run = SequenceRun(index, 0, tuple(tokens), tuple(range(-(-len(tokens) // 16))), False)
        results.append(stages.logits(StepPlan(index, forget, (start,), (run,))))
    stages.close()
    return results


@dataclass
class Schedule:
    """Random plans over some sequences, each of which runs twice."""

    rng: np.random.Generator
    sequences: list[list[int]]
    block_size: int
    free: list[int]
    max_rows: int
    left: dict[int, int] = field(default_factory=dict)
    running: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # position, blocks
    users: dict[int, int] = field(default_factory=dict)
    cache: dict[tuple[int, ...], int] = field(default_factory=dict)
    forget: list[int] = field(default_factory=list)
    hits: int = 0

    def plans(self) -> Iterator[StepPlan]:
        self.left = dict.fromkeys(range(len(self.sequences)), 2)
        step = 0
        while ids := [index for index, count in self.left.items() if count]:
            chosen = self.rng.permutation(ids)[: self.rng.integers(1, len(ids) + 1)].tolist()
            rows, starts, runs = int(self.rng.integers(1, self.max_rows + 1)), [], []
            for index in chosen:
                if rows:
                    if index in self.running and self.rng.random() < 0.1:
                        self._drop(index)
                    if index not in self.running:
                        starts.append(self._start(index))
                    runs.append(self._run(index, rows))
                    rows -= len(runs[-1].token_ids)
            forget, self.forget = tuple(self.forget), []
            yield StepPlan(step, forget, tuple(starts), tuple(runs))
            step += 1
            for run in runs:
                self._ran(run)

    def _start(self, index: int) -> SequenceStart:
        tokens, blocks = tuple(self.sequences[index]), []
        while (end := (len(blocks) + 1) * self.block_size) < len(tokens) and tokens[:end] in self.cache:
            blocks.append(self.cache[tokens[:end]])
            self.users[blocks[-1]] += 1
        self.hits += bool(blocks)
        self.running[index] = len(blocks) * self.block_size, blocks
        return SequenceStart(index, PARAMS, len(tokens), tokens, tuple(blocks))

    def _run(self, index: int, rows: int) -> SequenceRun:
        position, blocks = self.running[index]
        chunk = 1 if self.rng.random() < 0.3 else int(self.rng.integers(1, LONGEST + 1))
        tokens = tuple(self.sequences[index][position : position + min(chunk, rows)])
        new = [self.free.pop() for _ in range(-(-(position + len(tokens)) // self.block_size) - len(blocks))]
        self.users.update(dict.fromkeys(new, 1))
        self.running[index] = position + len(tokens), [*blocks, *new]
        return SequenceRun(index, position, tokens, tuple(new), False)

    def _ran(self, run: SequenceRun) -> None:
        position, blocks = self.running[run.seq_id]
        tokens = tuple(self.sequences[run.seq_id])
        for full in range(run.position // self.block_size, position // self.block_size):
            self.cache.setdefault(tokens[: (full + 1) * self.block_size], blocks[full])
        if position == len(tokens):
            self.left[run.seq_id] -= 1
            self._drop(run.seq_id)

    def _drop(self, index: int) -> None:
        self.forget.append(index)
        for block in self.running.pop(index)[1]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(int(self.rng.integers(len(self.free) + 1)), block)
                self.cache = {tokens: kept for tokens, kept in self.cache.items() if kept != block}


def some_sequences(rng: np.random.Generator) -> list[list[int]]:
    """Of 1 to LONGEST tokens; many begin like another, and some have the token that is NaN."""
    made: list[list[int]] = []
    for _ in range(6):
        begin = made[rng.integers(len(made))] if made and rng.random() < 0.7 else []
        tokens = begin[: rng.integers(len(begin) + 1)]
        made.append(tokens + rng.integers(0, POISON, rng.integers(1, LONGEST - len(tokens) + 2)).tolist())
        made[-1] = made[-1][:LONGEST]
    made[1][len(made[1]) // 2] = POISON
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("full_of_nan")
def test_any_schedule_on_any_split_gives_each_row_the_same_bits(name, tiny_model, experts):
    family, asked, mixture, keys = CASES[name]
    changes = {} if mixture is None else {"experts": experts(**mixture)}
    path = tiny_model(family, keys={f"{family}.{key}": value for key, value in keys.items()}, **asked, **changes)
    checkpoint = open_checkpoint(path)
    layers = checkpoint.spec.num_layers
    rng = np.random.default_rng([1, list(CASES).index(name)])
    hits = poisoned = 0
    for kv_dtype, block_size, most in [("float32", 8, 4), ("float16", 16, 3), ("int8", 8, 3), ("float32", 64, 4)]:
        sequences = some_sequences(rng)
        expected = alone(checkpoint, sequences, kv_dtype)
        cuts = sorted(rng.choice(np.arange(1, layers + 1), rng.integers(1, most), replace=False).tolist())
        num_blocks = 6 * -(-LONGEST // block_size)
        rows = int(rng.choice([16, 64, 6 * LONGEST]))
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_step_tokens": rows, "max_sequences": 6}
        stages = Stages(checkpoint, cuts, rng.integers(1, 4, len(cuts) + 1).tolist(), kv_dtype=kv_dtype, **sizes)
        schedule = Schedule(rng, sequences, block_size, rng.permutation(num_blocks).tolist(), rows)
        for plan in schedule.plans():
            logits, at = stages.logits(plan), 0
            for run in plan.runs:
                end = run.position + len(run.token_ids)
                wanted = expected[run.seq_id][run.position : end]
                got = logits[at : at + len(run.token_ids)]
                assert np.array_equal(got, wanted, equal_nan=True), (cuts, run)
                is_poisoned = POISON in sequences[run.seq_id][:end]
                assert is_poisoned or np.isfinite(got).all()
                poisoned += np.isnan(got[-1]).all()
                at += len(run.token_ids)
        hits += schedule.hits
        stages.close()
    checkpoint.close()
    assert hits
    assert poisoned
