"""Getting from Ray the very GPUs that were planned with."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from shardline.cluster.errors import PlanningError
from shardline.cluster.gpus import LOOK_SECONDS, GpuFinder
from shardline.cluster.ray_runtime import StageBundles, StagePlacement

GpuKey = tuple[str, str]
"""Ray's id of a node, and the PCI address of a GPU there."""


async def hold_gpus(wanted: Collection[GpuKey], finder: GpuFinder, timeout: float) -> dict[GpuKey, StageBundles]:
    """A bundle of one whole GPU for each that is wanted, each in a group of its own.

    Ray chooses which of a node's GPUs a bundle gets, and a node's GPUs may be unequal. So each bundle is asked what it
    has; one that has another GPU is kept while the search goes on, so that it does not come again, and given back at
    the end. The other way, to tell Ray to leave CUDA_VISIBLE_DEVICES alone and to open a GPU by its number, would let
    a stage work on a card that Ray has given to someone else's job. Stages that share a GPU share its bundle: by
    fractions alone Ray might put them on different ones.

    Args:
        wanted: The GPUs.
        finder: Says which GPU a process has.
        timeout: Seconds for Ray to place a bundle.

    Raises:
        PlanningError: somebody else has one of them, or it cannot be used.
    """
    held: dict[GpuKey, StageBundles] = {}
    others: list[StageBundles] = []
    pending: list[StageBundles] = []
    try:
        while missing := [key for key in wanted if key not in held]:
            pending = [StageBundles([StagePlacement(node_id, {"GPU": 1.0})]) for node_id, _ in missing]
            try:
                for group in pending:
                    await group.wait(timeout)
            except PlanningError as error:
                raise PlanningError(_unavailable(missing, len(others))) from error
            cards = await asyncio.gather(*(_which(group, finder) for group in pending))
            for (node_id, _), bus_id, group in zip(missing, cards, pending, strict=True):
                key = node_id, bus_id
                if key in wanted and key not in held:
                    held[key] = group
                else:
                    others.append(group)
            pending = []
    except BaseException:
        for group in (*held.values(), *pending):
            group.remove()
        raise
    finally:
        for group in others:
            group.remove()
    return held


async def _which(group: StageBundles, finder: GpuFinder) -> str:
    """The PCI address of the bundle's GPU, from a process that ends when it has said so."""
    task: Any = ray.remote(num_cpus=0, num_gpus=1, max_calls=1, max_retries=0)(_held)
    future = asyncio.wrap_future(task.options(scheduling_strategy=group.strategy(0)).remote(finder).future())
    try:
        return str(await asyncio.wait_for(future, LOOK_SECONDS))
    except TimeoutError:
        raise PlanningError(f"a process with a GPU has not said within {LOOK_SECONDS:g} s which it has") from None
    except RayTaskError as error:
        raise PlanningError(f"a GPU that Ray gave cannot be used: {error.cause}") from error
    except RayError as error:
        raise PlanningError(f"a process with a GPU failed before it said which it has: {error}") from error


def _held(finder: GpuFinder) -> str:
    return finder.held()


def _unavailable(missing: Collection[GpuKey], others: int) -> str:
    cards = ", ".join(f"{bus_id} of node {node_id[:8]}" for node_id, bus_id in missing)
    seen = f"; Ray offered {others} other(s)" if others else ""
    return (
        f"Ray does not give the GPU {cards}: another job of the cluster has it, or Ray does not count it{seen}. End "
        "that job, or choose other GPUs with --device cuda:N,..."
    )
