"""What one process measures of one layout: its options, what it is compared with, and what came out."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.drive import Answer, Parity, Tokens, prompt
from benchmarks.layouts import Layout, engine_options, reachable_by_workers
from benchmarks.record import say
from benchmarks.traffic import Job, Lengths, trace

from shardline.cluster.build import Prepared, model_bytes, prepare, wanted
from shardline.cluster.errors import PlanningError
from shardline.cluster.planning.planner import plan_pipeline
from shardline.cluster.ray_runtime import connected
from shardline.stage import open_checkpoint

SAMPLE = 8
"""Sequences of a batch that also run alone."""

JOBS = 48
BLOCK = 16


@dataclass(slots=True)
class Session:
    """What one process measures of one layout.

    Attributes:
        given: The command's options.
        layout: The layout.
        model: The folder.
        vocab: Of the model.
        alone: Tokens of sequences alone, of the first layout; empty when this is it.
        seen: Tokens that another layout or batch gave.
        deadline: `time.monotonic` after which nothing more is begun.
        result: For the JSON.
        parity: Of this layout.
    """

    given: argparse.Namespace
    layout: Layout
    model: Path
    vocab: int
    alone: dict[str, Answer]
    seen: dict[str, Answer]
    deadline: float
    result: dict[str, Any] = field(default_factory=dict)
    parity: Parity = field(default_factory=Parity)

    @property
    def partial(self) -> Path:
        """What is measured so far of this layout, for the case that the command is ended from outside."""
        results: Path = self.given.results
        return results.with_name(f"{results.stem}.{self.layout.name}.partial.json")

    def late(self, what: str) -> bool:
        """Whether there is no time left; what is left out is said."""
        if time.monotonic() < self.deadline:
            return False
        left_out = self.result.setdefault("left_out", [])
        if what not in left_out:
            left_out.append(what)
            say(f"  no time left for: {what}")
        return True

    def prompt(self, index: int) -> Tokens:
        """Of the index-th sequence that decodes."""
        made = prompt(self.vocab, self.given.prompt, index, self.given.seed)
        if self.given.spoil and index == 0 and self.alone:
            return (made[0] ^ 1, *made[1:])
        return made

    @property
    def sample(self) -> list[int]:
        """Of the sequences that decode, those that also run alone: the first ones and the last of each batch."""
        batches = [batch for batch in self.given.batches if batch >= SAMPLE]
        return sorted({*range(SAMPLE), *(batch - 1 for batch in batches)})

    def jobs(self, cancels: float = 0.0) -> list[Job]:
        """The trace of mixed traffic, a share of it to be cancelled."""
        given = self.given
        lengths = Lengths(given.median_prompt, given.median_output, 0.9, given.most_prompt, given.most_output)
        return trace(JOBS, self.vocab, given.seed, lengths, cancels=cancels)


def prepared_for(layout: Layout, model: Path, given: argparse.Namespace) -> Prepared:
    """The plan of a layout."""
    options = engine_options(
        layout,
        model,
        given.device,
        context=given.context,
        concurrency=max(1, given.pool // given.context),
        max_sequences=max(given.batches),
        max_step_tokens=given.step_tokens,
        prefill_chunk=min(given.step_tokens, 512),
        block_size=BLOCK,
        threads=given.threads,
        prefix_cache=set(given.parts) == {"soak"},
    )
    return prepare(options)


@contextmanager
def ray_for(prepared: Prepared) -> Iterator[None]:
    """Inside, Ray is connected if the plan needs it."""
    if not prepared.options.uses_ray:
        yield
        return
    reachable_by_workers()
    with connected(None, num_cpus=len(prepared.plan.stages), num_gpus=prepared.num_gpus):
        yield


def predictions(prepared: Prepared, given: argparse.Namespace) -> dict[str, float]:
    """What the planner expects of this split with so many sequences, tokens a second."""
    checkpoint = open_checkpoint(prepared.path)
    try:
        model, size = checkpoint.spec, model_bytes(checkpoint)
    finally:
        checkpoint.close()
    devices = [stage.device for stage in prepared.plan.stages]
    split = tuple(spec.num_layers for spec in prepared.plan.specs)
    wish = replace(wanted(prepared.options), stages=len(split), split=split)
    made = {}
    for batch in given.batches:
        context = given.prompt + given.warm + given.steps
        with suppress(PlanningError):
            plan = plan_pipeline(model, size, devices, replace(wish, context=context, concurrency=batch))
            made[str(batch)] = plan.tokens_per_second
    return made


def apart(work: Callable[[Session], Session], session: Session) -> Session:
    """Run it in a fresh process, which takes its memory with it. What ends that process is an error of the layout."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, session).result()
        except Exception as error:
            session.result["error"] = f"the layout's process failed: {type(error).__name__}: {error}"
            say(session.result["error"])
            return session
