"""Which layers go to which device, and what that will give: settled before any weight is read.

`plan_pipeline` is a pure function of the model's shape and bytes, the devices' free memory and speed, and what is
wanted of them. The model of a step's time: the bytes of the stage's weights at the device's byte rate, plus the rows'
arithmetic at its arithmetic rate, plus the keys and values that the rows read, plus fixed costs of the step and of each
layer. (Two cores of an x86 server on SmolLM2 with 1 to 64 rows follow it within a fifth; for GPUs see gpu_speed.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardline.cluster.errors import PlanningError
from shardline.cluster.planning.partition import Limits, Outcome, Partition, Share
from shardline.cluster.planning.placement import Device, ModelBytes, PipelinePlan, StagePlan, Wanted
from shardline.cluster.planning.stage_costs import StageCosts, mib
from shardline.stage import ModelSpec, StageSpec

SHARED_MICROBATCH = 16
"""Where stages share cores, a thinner microbatch than this costs more in unpacking weights again than it hides."""

HOST_SECONDS = 6e-4
"""Of a step on GPUs, from its result to the next plan on its way: hidden where plans are made ahead, as long as the
steps take longer."""

HOST_ROW_SECONDS = 6e-6
"""And of each of its rows: scheduler and messages (`python -m benchmarks.step_overhead`)."""


FEWER_PAYS = 0.1
"""What fewer microbatches than there are stages must bring."""


def plan_pipeline(model: ModelSpec, size: ModelBytes, devices: Sequence[Device], wanted: Wanted) -> PipelinePlan:
    """Place a model.

    Among the splits that fit it takes, in this order: the largest pool up to what is wanted; the shortest time of the
    slowest stage (stages that share cores count together); the largest pool; the most even stages.

    Args:
        model: Its shape.
        size: Its resident bytes.
        devices: In the order of the pipeline; those of one `compute` are brought together.
        wanted: What it is for.

    Raises:
        PlanningError: it does not fit, or the wish contradicts itself; with the numbers and what to change.
    """
    assert len(size.layers) == model.num_layers
    _check_wanted(model, devices, wanted)
    ordered = _neighbours(devices)
    computes = [device.compute or device.name for device in ordered]
    context = wanted.context if wanted.context is not None else model.context_length
    chosen: tuple[Outcome, StageCosts] | None = None
    for count in _stage_counts(model, ordered, wanted):
        rows = _usual_flight(count, ordered, wanted).rows(wanted.concurrency)
        costs = StageCosts(model, size, ordered, replace(wanted, context=context), rows)
        search = Partition(model.num_layers, computes, count, costs)
        if wanted.split is not None:
            outcome: Outcome | None = search.outcome(_forced(wanted.split))
            assert outcome is not None
            if outcome.blocks < 0:
                raise PlanningError(_does_not_fit(costs, outcome.shares, "this split"))
        else:
            outcome = search.best(costs.wanted_blocks, costs.most_blocks)
        if outcome is not None and (chosen is None or _rank(outcome, costs) > _rank(*chosen)):
            chosen = outcome, costs
    if chosen is None:
        raise PlanningError(_does_not_fit(costs, _closest(costs, computes, count), "the closest split"))
    outcome, costs = chosen
    num_blocks = min(outcome.blocks, costs.most_blocks)
    shrunk = False
    if num_blocks < costs.context_blocks:
        if wanted.context is not None or num_blocks == 0:
            raise PlanningError(_context_does_not_fit(costs, outcome, context))
        shrunk = True
        context = num_blocks * wanted.block_size
    flight = _flight(costs, outcome.shares)
    costs = StageCosts(model, size, ordered, replace(wanted, context=context), flight.rows(wanted.concurrency))
    return _finish(costs, outcome.shares, flight, num_blocks, asked=wanted.context is not None, shrunk=shrunk)


def _check_wanted(model: ModelSpec, devices: Sequence[Device], wanted: Wanted) -> None:
    if not devices:
        raise PlanningError("there is no device to place a stage on: start a node, or give --address local")
    if len({device.name for device in devices}) != len(devices):
        raise PlanningError("two devices have the same name: give each its own")
    if wanted.context is not None and not 1 <= wanted.context <= model.context_length:
        raise PlanningError(
            f"context {wanted.context} is not possible: the model was made for 1 to {model.context_length} tokens"
        )
    if wanted.concurrency < 1:
        raise PlanningError(f"concurrency {wanted.concurrency} is not possible: give 1 or more")
    split = wanted.split
    if split is not None:
        text = ",".join(map(str, split))
        if sum(split) != model.num_layers:
            raise PlanningError(f"split {text} has {sum(split)} layers, but the model has {model.num_layers}")
        if any(layers < 1 for layers in split[:-1]) or split[-1] < 0:
            raise PlanningError(f"split {text}: only the last stage may have no layer (it keeps the head)")
        if wanted.stages is not None and wanted.stages != len(split):
            raise PlanningError(f"split {text} has {len(split)} stages, but {wanted.stages} stages are asked for")
    count = len(split) if split is not None else wanted.stages
    if count is not None:
        if count < 1:
            raise PlanningError(f"{count} stages are not possible: give 1 or more")
        if count > len(devices):
            raise PlanningError(
                f"{count} stages need {count} devices, and there are {len(devices)}: "
                + ", ".join(device.name for device in devices)
            )
        if count > model.num_layers + 1:
            raise PlanningError(f"{count} stages are not possible: the model has {model.num_layers} layers")


def _neighbours(devices: Sequence[Device]) -> list[Device]:
    """Devices of one node, and in it those of one compute, side by side: fewer hops cross the network."""
    nodes = {device.node: i for i, device in reversed(list(enumerate(devices)))}
    computes = {device.compute or device.name: i for i, device in reversed(list(enumerate(devices)))}
    return sorted(devices, key=lambda device: (nodes[device.node], computes[device.compute or device.name]))


def _stage_counts(model: ModelSpec, devices: Sequence[Device], wanted: Wanted) -> Sequence[int]:
    if wanted.split is not None:
        return [len(wanted.split)]
    if wanted.stages is not None:
        return [wanted.stages]
    return range(1, min(len(devices), model.num_layers + 1) + 1)


def _forced(split: Sequence[int]) -> tuple[Share, ...]:
    shares, first = [], 0
    for device, layers in enumerate(split):
        shares.append(Share(device, first, first + layers))
        first += layers
    return tuple(shares)


class _Flight(NamedTuple):
    """How many plans are in flight, the least sequences of one where there are that many, and whether one is made
    ahead: see `SchedulerConfig`."""

    depth: int
    min_microbatch: int
    ahead: bool = False

    def microbatches(self, sequences: int) -> int:
        """Groups that the scheduler makes of so many sequences."""
        slots = max(1, self.depth - 1) if self.ahead else self.depth
        return max(1, min(slots, sequences // self.min_microbatch))

    def rows(self, sequences: int) -> int:
        """Sequences of the largest."""
        return -(-sequences // self.microbatches(sequences))


def _usual_flight(stages: int, devices: Sequence[Device], wanted: Wanted) -> _Flight:
    """That of some stages on these devices, whatever their shares are."""
    parallel = min(stages, len({device.compute or device.name for device in devices}))
    if not _on_gpus(devices):
        # One more than work at the same time, so that a plan lies ready wherever one has just ended.
        depth = stages + 1 if parallel == stages > 1 else parallel + 1
        return _Flight(depth, 1 if parallel > 1 else SHARED_MICROBATCH)
    # There the host's part of a step is much beside the device's: a plan made ahead lies ready. A GPU's step costs the
    # same for few rows as for many: where stages take turns on one, all that decode are one microbatch.
    return _Flight(parallel + 1, 1 if parallel > 1 else wanted.max_sequences, ahead=True)


def _on_gpus(devices: Sequence[Device]) -> bool:
    return all(device.arch for device in devices)


def _flight(costs: StageCosts, shares: Sequence[Share]) -> _Flight:
    """The flight that gives the most tokens a second, by the model of a step's time; on a CPU the usual one."""
    devices, wanted = [costs.devices[share.device] for share in shares], costs.wanted
    stages, parallel = len(shares), len({device.compute or device.name for device in devices})
    usual = _usual_flight(stages, devices, wanted)
    if not usual.ahead or not parallel == stages > 1:
        return usual
    # As many microbatches as stages keep all at work. With fewer, prompts cannot fill all stages: only where steps are
    # so much shorter than the host's part.
    sequences = max(wanted.concurrency, stages)
    costly = {
        groups: _cycle(costs, shares, groups, sequences) * (1.0 if groups == stages else 1.0 + FEWER_PAYS)
        for groups in range(1, stages + 1)
    }
    return usual._replace(depth=min(costly, key=costly.__getitem__) + 1)


def _cycle(costs: StageCosts, shares: Sequence[Share], groups: int, sequences: int) -> float:
    """Seconds in which each of so many sequences, in so many microbatches planned ahead, gets a token."""
    rows = -(-sequences // groups)
    busy: dict[str, float] = {}
    for share in shares:
        device = costs.devices[share.device]
        seconds = costs.seconds(share.device, share.first, share.end, head=share is shares[-1], rows=rows)
        compute = device.compute or device.name
        busy[compute] = busy.get(compute, 0.0) + seconds
    host = HOST_SECONDS + HOST_ROW_SECONDS * rows
    return max(sum(busy.values()), groups * max(*busy.values(), host))


def _rank(outcome: Outcome, costs: StageCosts) -> tuple[int, float, int, int]:
    sequences = costs.wanted.concurrency
    devices = [costs.devices[share.device] for share in outcome.shares]
    microbatches = _usual_flight(len(devices), devices, costs.wanted).microbatches(sequences)
    cycle = max(outcome.latency_ns, microbatches * outcome.cycle_ns)
    return (min(outcome.blocks, costs.wanted_blocks), sequences / cycle, outcome.blocks, -len(outcome.shares))


def _finish(
    costs: StageCosts, shares: Sequence[Share], flight: _Flight, num_blocks: int, *, asked: bool, shrunk: bool
) -> PipelinePlan:
    wanted, context = costs.wanted, costs.wanted.context
    assert context is not None
    stages = [_stage(costs, shares, index, num_blocks, context) for index in range(len(shares))]
    busy: dict[str, float] = {}
    for stage in stages:
        compute = stage.device.compute or stage.device.name
        busy[compute] = busy.get(compute, 0.0) + stage.step_seconds
    microbatches = flight.microbatches(wanted.concurrency)
    # A sequence waits for its own step through all stages and, where microbatches queue, for the busiest device.
    cycle = max(sum(busy.values()), microbatches * max(busy.values()))
    alone = sum(costs.seconds(s.device, s.first, s.end, head=s is shares[-1], rows=1) for s in shares)
    capacities = [(stage.capacity_blocks, stage.spec.index) for stage in stages if stage.capacity_blocks is not None]
    return PipelinePlan(
        stages=tuple(stages),
        context=context,
        concurrency=num_blocks // (-(-context // wanted.block_size)),
        max_context=min(costs.model.context_length, num_blocks * wanted.block_size),
        microbatch_rows=costs.rows,
        tokens_per_second=wanted.concurrency / cycle,
        single_tokens_per_second=1 / alone,
        memory_bound_by=min(capacities)[1],
        speed_bound_by=max(range(len(stages)), key=lambda index: stages[index].step_seconds),
        depth=flight.depth,
        min_microbatch=flight.min_microbatch,
        ahead=flight.ahead,
        notes=_notes(costs, stages, num_blocks, context, asked=asked, shrunk=shrunk),
    )


def _stage(costs: StageCosts, shares: Sequence[Share], index: int, num_blocks: int, context: int) -> StagePlan:
    share, wanted = shares[index], costs.wanted
    embed, head = index == 0, index == len(shares) - 1
    device = costs.devices[share.device]
    layers = share.end - share.first
    spec = StageSpec(
        index=index,
        first_layer=share.first,
        end_layer=share.end,
        has_embed=embed,
        has_head=head,
        num_blocks=num_blocks,
        block_size=wanted.block_size,
        kv_dtype=wanted.kv_dtype,
        max_step_tokens=wanted.max_step_tokens,
        max_sequences=wanted.max_sequences,
        max_context=context,
        num_threads=device.threads,
        device=device.backend,
        memory_bytes=device.memory_limit,
    )
    return StagePlan(
        spec=spec,
        device=device,
        weight_bytes=costs.size.of(share.first, share.end, embed=embed, head=head),
        workspace_bytes=costs.workspace_bytes(share.device, share.first, share.end, embed=embed, head=head)
        + costs.table_bytes(share.first, share.end, num_blocks),
        kv_bytes=num_blocks * costs.block_bytes * layers,
        capacity_blocks=costs.blocks(share.device, share.first, share.end, embed, head) if layers else None,
        step_seconds=costs.seconds(share.device, share.first, share.end, head=head, rows=costs.rows),
    )


def _notes(
    costs: StageCosts, stages: Sequence[StagePlan], num_blocks: int, context: int, *, asked: bool, shrunk: bool
) -> tuple[str, ...]:
    notes = []
    wanted, model = costs.wanted, costs.model
    classes = sorted({stage.device.numeric_class for stage in stages})
    if len(classes) > 1:
        members = [
            f"{name}: {', '.join(dict.fromkeys(s.device.name for s in stages if s.device.numeric_class == name))}"
            for name in classes
        ]
        notes.append(
            f"WARNING: stages of {len(classes)} numeric classes ({'; '.join(members)}): bytes do not depend on batch "
            "mates, but they may depend on where the split falls between the classes, and on which card a stage has"
        )
    originals = [rope.original_context for rope in model.ropes if rope.long_factors is not None]
    if originals and not asked:
        holding = "more" if context > originals[0] else "no more"
        notes.append(
            f"context {context} is {holding} than the {originals[0]} tokens that the model was first trained for: "
            "that decides its rotary factors and so its bytes: give --context where other devices must have the same"
        )
    if shrunk:
        notes.append(f"context {context} of the model's {model.context_length}: memory holds no longer sequence")
    at_once = num_blocks // costs.context_blocks
    if at_once < wanted.concurrency:
        notes.append(
            f"{at_once} of the {wanted.concurrency} sequences wanted fit at once with {context} tokens each: shorter "
            "ones share the pool, and some are preempted and recomputed when it is full"
        )
    if len(stages) > 1:
        if costs.size.tied:
            notes.append(f"tied embeddings: {mib(costs.size.embed)} are on the first stage and again on the last")
        shared = {stage.device.compute for stage in stages if stage.device.compute is not None}
        if shared and len(shared) < len(stages):
            notes.append("stages that share a device take turns: splitting them saves memory a stage, not time")
    return tuple(notes)


def _does_not_fit(costs: StageCosts, shares: Sequence[Share], what: str) -> str:
    have = sum(device.free_bytes for device in costs.devices)
    lines, worst, lacking = [], "", -1
    for index, share in enumerate(shares):
        device = costs.devices[share.device]
        embed, head = index == 0, index == len(shares) - 1
        need = costs.fixed_bytes(share.device, share.first, share.end, embed=embed, head=head)
        lines.append(
            f"{device.name} with {share.end - share.first} layers needs {mib(need)} of {mib(device.free_bytes)}"
        )
        if need - device.free_bytes > lacking:
            lacking, worst = need - device.free_bytes, device.name
    return (
        f"the model does not fit: its weights are {mib(costs.size.total)} and the devices have {mib(have)} in all. In "
        f"{what} {worst} lacks {mib(lacking)} ({'; '.join(lines)}). Give it more memory, add a device, change the "
        "split, or take a smaller model"
    )


def _closest(costs: StageCosts, computes: Sequence[str], stages: int) -> tuple[Share, ...]:
    """The split that would fit with the least memory added to every device."""
    whole = (
        costs.fixed_bytes(device, 0, costs.model.num_layers, embed=True, head=True)
        for device in range(len(costs.devices))
    )
    low, high = 0, max(whole) + costs.size.embed
    best: tuple[Share, ...] | None = None
    while low <= high:
        middle = (low + high) // 2
        larger = [replace(device, free_bytes=device.free_bytes + middle) for device in costs.devices]
        roomy = StageCosts(costs.model, costs.size, larger, costs.wanted, costs.rows)
        shares = Partition(costs.model.num_layers, computes, stages, roomy).feasible(Limits(0, 2**62, 2**62))
        if shares is None:
            low = middle + 1
        else:
            best, high = shares, middle - 1
    assert best is not None
    return best


def _context_does_not_fit(costs: StageCosts, outcome: Outcome, context: int) -> str:
    wanted = costs.wanted
    rooms = []
    for index, share in enumerate(outcome.shares):
        embed, head = index == 0, index == len(outcome.shares) - 1
        rooms.append((costs.blocks(share.device, share.first, share.end, embed, head), share))
    blocks, binding = min(rooms, key=lambda room: room[0])
    needed = costs.context_blocks * costs.block_bytes * (binding.end - binding.first)
    needed += costs.table_bytes(binding.first, binding.end, costs.context_blocks)
    device = costs.devices[binding.device]
    fixed = costs.fixed_bytes(
        binding.device,
        binding.first,
        binding.end,
        embed=binding is outcome.shares[0],
        head=binding is outcome.shares[-1],
    )
    room = device.free_bytes - fixed
    smaller = {"float32": "float16 halves", "float16": "int8 nearly halves"}.get(wanted.kv_dtype)
    halve = f" --kv-dtype {smaller} what a token takes." if smaller else ""
    fits = f"The longest that fits is --context {blocks * wanted.block_size}." if blocks else "Not one block fits."
    return (
        f"a sequence of {context} tokens does not fit: on {device.name} the keys and values of "
        f"{binding.end - binding.first} layers and the tables of positions take {mib(needed)}, and {mib(room)} of "
        f"{mib(device.free_bytes)} are left beside the weights. "
        f"{fits}{halve} More memory on {device.name} or one more device helps too"
    )
