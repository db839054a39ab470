"""The planner against brute force, and what it must always keep."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardline.cluster.errors import PlanningError
from shardline.cluster.planning.partition import Partition, Share, slack
from shardline.cluster.planning.placement import Device, ModelBytes, PipelinePlan, Wanted
from shardline.cluster.planning.planner import HOST_ROW_SECONDS, HOST_SECONDS, plan_pipeline
from shardline.cluster.planning.stage_costs import (
    GPU_PADDING_BYTES,
    GPU_PADDING_SHARE,
    StageCosts,
    workspace_bytes,
)
from shardline.scheduler import (
    NewRequest,
    SampledToken,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)
from shardline.scheduler.plan import AHEAD
from shardline.stage import LayerSpec, ModelSpec, RopeSpec
from shardline.stage.workspace import gpu_workspace_bytes

MIB = 2**20


def make_model(num_layers: int, **changes: object) -> ModelSpec:
    model = ModelSpec(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=512,
        context_length=2048,
        norm_eps=1e-5,
        layers=(LayerSpec(),) * num_layers,
        ropes=(RopeSpec(base=1e4, rotary_dim=16, interleaved=True),),
        tied_embeddings=True,
    )
    return replace(model, **changes)  # type: ignore[arg-type]


def make_size(num_layers: int, layer: int = MIB, ends: int = 4 * MIB, tied: bool = True) -> ModelBytes:
    return ModelBytes((layer,) * num_layers, embed=ends, head=ends, tied=tied)


SMALL = {"max_step_tokens": 16, "max_sequences": 4}


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, ModelBytes, list[Device], Wanted]:
    num_layers = draw(st.integers(1, 7))
    layers = tuple(draw(st.integers(1, 40)) * 50_000 for _ in range(num_layers))
    ends = draw(st.integers(0, 60)) * 50_000
    size = ModelBytes(layers, embed=ends, head=ends, tied=draw(st.booleans()))
    devices = []
    for index in range(draw(st.integers(1, 4))):
        node = f"n{draw(st.integers(0, 1))}"
        compute = draw(st.sampled_from([None, f"{node} cores"]))
        # Devices that share cores have the same speed.
        speed = 1e9 if compute else draw(st.sampled_from([5e8, 1e9, 4e9]))
        flops = None if compute else draw(st.sampled_from([None, 1e10, 1e11]))
        devices.append(Device(f"d{index}", node, draw(st.integers(0, 200)) * 100_000, speed, flops, compute=compute))
    wanted = Wanted(
        context=draw(st.sampled_from([None, 16, 100, 2048])),
        concurrency=draw(st.integers(1, 9)),
        block_size=draw(st.sampled_from([8, 16, 64])),
        kv_dtype=draw(st.sampled_from(["float16", "float32", "int8"])),
        stages=draw(st.sampled_from([None, None, 1, 2, 3])),
        fill_memory=draw(st.booleans()),
        **SMALL,
    )
    assume(wanted.stages is None or wanted.stages <= min(len(devices), num_layers + 1))
    ropes = tuple(RopeSpec(base=1e4, rotary_dim=dim, interleaved=False) for dim in (16, 8))
    rope_of = [draw(st.sampled_from([None, 0, 1])) for _ in range(num_layers)]
    model = make_model(num_layers, layers=tuple(LayerSpec(rope=rope) for rope in rope_of), ropes=ropes)
    return model, size, devices, wanted


def planned(case: tuple[ModelSpec, ModelBytes, list[Device], Wanted]) -> PipelinePlan | None:
    try:
        return plan_pipeline(*case)
    except PlanningError:
        return None


@given(cases())
def test_every_layer_once_and_never_over_memory(case: tuple[ModelSpec, ModelBytes, list[Device], Wanted]) -> None:
    model, size, _, wanted = case
    plan = planned(case)
    if plan is None:
        return
    specs = plan.specs
    assert [layer for spec in specs for layer in range(spec.first_layer, spec.end_layer)] == list(
        range(model.num_layers)
    )
    assert [spec.index for spec in specs] == list(range(len(specs)))
    assert [spec.has_embed for spec in specs] == [True] + [False] * (len(specs) - 1)
    assert [spec.has_head for spec in specs] == [False] * (len(specs) - 1) + [True]
    assert len({spec.num_blocks for spec in specs}) == 1
    assert all(spec.num_layers > 0 for spec in specs[:-1])
    assert len({stage.device.name for stage in plan.stages}) == len(specs)
    for stage in plan.stages:
        spec = stage.spec
        kv = spec.num_layers * spec.num_blocks * spec.block_size * model.kv_bytes_per_token(spec.kv_dtype)
        weights = sum(size.layers[spec.first_layer : spec.end_layer])
        if spec.has_embed and spec.has_head and size.tied:
            weights += size.embed
        else:
            weights += size.embed * spec.has_embed + size.head * spec.has_head
        work = workspace_bytes(model, wanted.max_step_tokens, wanted.max_sequences, head=spec.has_head)
        if spec.num_layers:
            used = {layer.rope for layer in model.layers[spec.first_layer : spec.end_layer]} - {None}
            sequence_blocks = min(-(-plan.context // spec.block_size), spec.num_blocks)
            work += sequence_blocks * 4 * wanted.max_sequences
            work += sequence_blocks * spec.block_size * 4 * sum(model.ropes[rope].rotary_dim for rope in used)
        assert weights + work + kv <= stage.device.free_bytes
        assert (stage.weight_bytes, stage.workspace_bytes, stage.kv_bytes) == (weights, work, kv)
    pool_tokens = plan.num_blocks * wanted.block_size
    assert plan.context <= pool_tokens
    assert plan.max_context == min(model.context_length, pool_tokens)
    if wanted.context is not None:
        assert plan.context == wanted.context
    if not wanted.fill_memory:
        assert plan.num_blocks <= wanted.concurrency * -(-(wanted.context or model.context_length) // wanted.block_size)
    bound = plan.stages[plan.memory_bound_by].capacity_blocks
    assert bound == min(s.capacity_blocks for s in plan.stages if s.capacity_blocks is not None)
    # The pool is the smallest capacity unless no more was wanted.
    assert bound is not None
    assert plan.num_blocks <= bound


def every_split(num_layers: int, devices: int, stages: int) -> list[tuple[Share, ...]]:
    found = []
    for chosen in itertools.combinations(range(devices), stages):
        for cuts in itertools.combinations_with_replacement(range(1, num_layers + 1), stages - 1):
            bounds = (0, *cuts, num_layers)
            if any(a >= b for a, b in itertools.pairwise(bounds[:-1])):
                continue
            found.append(tuple(Share(d, a, b) for d, a, b in zip(chosen, bounds[:-1], bounds[1:], strict=True)))
    return found


@given(cases(), st.integers(1, 4))
@settings(max_examples=150)
def test_the_search_equals_brute_force(case: tuple[ModelSpec, ModelBytes, list[Device], Wanted], stages: int) -> None:
    model, size, devices, wanted = case
    assume(stages <= len(devices))
    devices = sorted(devices, key=lambda device: (device.node, device.compute or device.name))
    wanted = replace(wanted, context=wanted.context or 128)
    costs = StageCosts(model, size, devices, wanted, rows=3)
    computes = [device.compute or device.name for device in devices]
    search = Partition(model.num_layers, computes, stages, costs)

    def measure(shares: tuple[Share, ...]) -> tuple[int, int, int, int]:
        """The pool up to what is wanted, the cycle, the pool up to the most, the slowest stage."""
        busy: dict[str, int] = {}
        times, rooms = [], []
        for share in shares:
            last = share is shares[-1]
            times.append(costs.nanoseconds(share.device, share.first, share.end, last))
            rooms.append(costs.blocks(share.device, share.first, share.end, share is shares[0], last))
            busy[computes[share.device]] = busy.get(computes[share.device], 0) + times[-1]
        blocks = min(rooms)
        most = max(costs.most_blocks, costs.wanted_blocks)
        return min(blocks, costs.wanted_blocks), max(busy.values()), min(blocks, most), max(times)

    left = [measure(shares) for shares in every_split(model.num_layers, len(devices), stages)]
    left = [m for m in left if m[0] >= 0]
    found = search.best(costs.wanted_blocks, costs.most_blocks)
    assert (found is None) == (not left)
    if found is not None:
        left = [m for m in left if m[0] == max(m[0] for m in left)]
        least = min(m[1] for m in left)
        left = [m for m in left if m[1] <= least + slack(least)]
        left = [m for m in left if m[2] == max(m[2] for m in left)]
        left = [m for m in left if m[3] == min(m[3] for m in left)]
        assert measure(found.shares) in left


@given(cases(), st.integers(0, 3), st.integers(1, 4_000_000))
def test_more_memory_is_never_worse(
    case: tuple[ModelSpec, ModelBytes, list[Device], Wanted], which: int, more: int
) -> None:
    model, size, devices, wanted = case
    before = planned(case)
    larger = [
        replace(device, free_bytes=device.free_bytes + more * (i == which % len(devices)))
        for i, device in enumerate(devices)
    ]
    after = planned((model, size, larger, wanted))
    if before is None:
        return
    assert after is not None
    need = wanted.concurrency * -(-(wanted.context or model.context_length) // wanted.block_size)
    pools = min(before.num_blocks, need), min(after.num_blocks, need)
    assert pools[1] >= pools[0]
    if pools[1] == pools[0] and before.context == after.context:
        assert after.tokens_per_second >= before.tokens_per_second * (1 - 1e-6)


@given(cases(), st.data())
def test_a_forced_split_is_kept(case: tuple[ModelSpec, ModelBytes, list[Device], Wanted], data: st.DataObject) -> None:
    model, size, devices, wanted = case
    options = [
        tuple(share.end - share.first for share in shares)
        for count in range(1, len(devices) + 1)
        for shares in every_split(model.num_layers, count, count)
    ]
    split = data.draw(st.sampled_from(options))
    plan = planned((model, size, devices, replace(wanted, split=split, stages=None)))
    if plan is not None:
        assert tuple(spec.num_layers for spec in plan.specs) == split
        # What it is free to choose beats what it is told.
        free = planned((model, size, devices, replace(wanted, stages=len(split))))
        assert free is not None
        need = wanted.concurrency * -(-(wanted.context or model.context_length) // wanted.block_size)
        assert min(free.num_blocks, need) >= min(plan.num_blocks, need)


def cpus(*mib: int, node: str = "a") -> list[Device]:
    return [
        Device(f"{node} cpu {i}", node, free * MIB, 4e9, 5e10, compute=f"{node} cores") for i, free in enumerate(mib)
    ]


def gpus(*mib: int, speeds: tuple[float, ...] | None = None) -> list[Device]:
    speeds = speeds or (1e11,) * len(mib)
    return [
        Device(f"GPU {i}", "a", free * MIB, speed, numeric_class="sm_86")
        for i, (free, speed) in enumerate(zip(mib, speeds, strict=True))
    ]


def test_unequal_memory_gives_an_unequal_split_and_equal_pools() -> None:
    plan = plan_pipeline(make_model(30), make_size(30), cpus(20, 34, 26), Wanted(stages=3, fill_memory=True, **SMALL))
    layers = [spec.num_layers for spec in plan.specs]
    assert layers[1] > layers[2] >= layers[0]
    assert len({spec.num_blocks for spec in plan.specs}) == 1


def test_a_device_twice_as_fast_takes_twice_the_layers() -> None:
    size = make_size(30, ends=0)
    plan = plan_pipeline(make_model(30), size, gpus(900, 900, speeds=(2e11, 1e11)), Wanted(stages=2, **SMALL))
    assert [spec.num_layers for spec in plan.specs] == [20, 10]


def test_the_head_counts_as_work() -> None:
    # The head is worth six layers of bytes: 18 + 12 and not 15 + 15.
    plan = plan_pipeline(
        make_model(30), make_size(30, ends=6 * MIB), gpus(900, 900), Wanted(context=16, stages=2, **SMALL)
    )
    assert [spec.num_layers for spec in plan.specs] == [18, 12]


def test_stages_on_shared_cores_are_even_when_memory_is_plenty() -> None:
    plan = plan_pipeline(make_model(30), make_size(30), cpus(900, 900, 900), Wanted(stages=3, **SMALL))
    # The head on the last stage is worth a layer.
    assert [spec.num_layers for spec in plan.specs] == [10, 11, 9]


def test_memory_beats_speed_when_the_fast_device_is_small() -> None:
    size = make_size(30, ends=0)
    plan = plan_pipeline(
        make_model(30), size, gpus(11, 900, speeds=(9e11, 1e11)), Wanted(context=64, concurrency=1, stages=2, **SMALL)
    )
    assert plan.specs[0].num_layers <= 10
    assert plan.memory_bound_by == 0
    assert plan.speed_bound_by == 1


def test_depth_and_microbatches() -> None:
    model, size = make_model(30), make_size(30)
    own = plan_pipeline(model, size, gpus(90, 90, 90), Wanted(stages=3, **SMALL))
    assert (own.depth, own.min_microbatch) == (4, 1)
    shared = plan_pipeline(model, size, cpus(90, 90, 90), Wanted(stages=3, **SMALL))
    assert shared.depth == 2
    assert shared.min_microbatch > 1
    # Eight sequences on shared cores run as one microbatch: splitting them would unpack the weights once more.
    assert shared.microbatch_rows == 8
    assert own.microbatch_rows == 2
    alone = plan_pipeline(model, size, cpus(200), Wanted(**SMALL))
    assert len(alone.stages) == 1


def cards(count: int, speed: float = 3e12, flops: float | None = None) -> list[Device]:
    """GPUs of their own that the planner knows as such, with plenty of memory."""
    return [
        Device(f"GPU {i}", "a", 64 * 1024 * MIB, speed, flops, arch=90, processors=132, numeric_class="sm_90")
        for i in range(count)
    ]


LARGE = ModelBytes((340 * MIB,) * 48, embed=160 * MIB, head=160 * MIB, tied=False)
"""As many bytes as 30 billion weights of 4 bits."""


def test_one_gpu_runs_all_that_decode_in_one_step() -> None:
    wanted = Wanted(context=128, concurrency=64, stages=1, max_step_tokens=512, max_sequences=256)
    plan = plan_pipeline(make_model(48), LARGE, cards(1), wanted)
    assert (plan.depth, plan.min_microbatch, plan.microbatch_rows) == (2, 256, 64)
    on_cores = plan_pipeline(make_model(48), LARGE, [replace(cards(1)[0], arch=0)], wanted)
    assert (on_cores.depth, on_cores.min_microbatch, on_cores.microbatch_rows) == (2, 16, 32)


def test_stages_that_share_a_gpu_run_all_that_decode_in_one_step() -> None:
    shares = [replace(card, compute="the one") for card in cards(4)]
    wanted = Wanted(context=128, concurrency=64, stages=4, max_step_tokens=512, max_sequences=256)
    plan = plan_pipeline(make_model(48), LARGE, shares, wanted)
    assert (plan.depth, plan.min_microbatch, plan.microbatch_rows) == (2, 256, 64)


@pytest.mark.parametrize(
    ("count", "speed", "flops", "sequences"),
    [
        (1, 3e12, None, 64),
        (1, 3e12, None, 256),
        # Arithmetic takes most of a step: halves cost hardly more than the whole.
        (1, 3e12, 3e9, 64),
        (1, 3e13, 3e9, 64),
        (1, 3e13, 3e9, 8),
        (2, 3e12, None, 64),
        (4, 3e12, None, 64),
        (4, 3e12, 3e9, 64),
        # A step is shorter than the host's part of it.
        (2, 1e14, None, 64),
        (4, 3e13, 1e10, 256),
        # Few steps a second, and the host's part is nothing.
        (3, 1e11, None, 32),
    ],
)
def test_on_gpus_no_other_flight_gives_many_more_tokens(
    count: int, speed: float, flops: float | None, sequences: int
) -> None:
    model, devices = make_model(48), cards(count, speed, flops)
    wanted = Wanted(context=128, concurrency=sequences, stages=count, max_step_tokens=512, max_sequences=256)
    plan = plan_pipeline(model, LARGE, devices, wanted)
    costs = StageCosts(model, LARGE, devices, wanted, 1)

    @cache
    def seconds(stage: int, rows: int) -> float:
        spec = plan.specs[stage]
        return costs.seconds(stage, spec.first_layer, spec.end_layer, head=spec.has_head, rows=rows)

    assert plan.ahead
    planned = tokens_a_second(seconds, count, sequences, plan.depth, plan.min_microbatch, ahead=plan.ahead)
    rates = {
        (depth, least): tokens_a_second(seconds, count, sequences, depth, least)
        for depth in {*range(1, count + 3), plan.depth}
        for least in {1, 16, 64, 256, plan.min_microbatch}
    }
    # Fewer microbatches than stages must bring a tenth, and the model of the time takes the scheduler's largest.
    assert planned > 0.88 * max(rates.values())
    ahead = {
        depth: tokens_a_second(seconds, count, sequences, depth, plan.min_microbatch, ahead=True)
        for depth in range(2, count + 4)
    }
    assert planned > 0.88 * max(ahead.values())
    if count == 1:
        # Planned ahead, steps follow one another as if there were no host.
        assert planned > 0.99 * max(rates.values())
        assert planned > 0.99 * sequences / max(seconds(0, sequences), HOST_SECONDS + HOST_ROW_SECONDS * sequences)


@pytest.mark.parametrize(
    ("count", "speed", "flops", "sequences", "flight"),
    [
        (1, 3e12, 3e9, 64, (2, 256)),
        # The weights are read again in less time than the host takes; but that is hidden by planning ahead.
        (1, 3e13, 3e9, 64, (2, 256)),
        (4, 3e12, None, 64, (5, 1)),
        (4, 3e13, 1e10, 64, (5, 1)),
        (4, 3e12, None, 1, (5, 1)),
        # Steps are shorter than the host's part of them.
        (2, 1e14, None, 64, (2, 1)),
    ],
)
def test_flights_on_gpus(
    count: int, speed: float, flops: float | None, sequences: int, flight: tuple[int, int]
) -> None:
    wanted = Wanted(context=128, concurrency=sequences, stages=count, max_step_tokens=512, max_sequences=256)
    plan = plan_pipeline(make_model(48), LARGE, cards(count, speed, flops), wanted)
    assert (plan.depth, plan.min_microbatch) == flight


def tokens_a_second(
    seconds: Callable[[int, int], float],
    stages: int,
    sequences: int,
    depth: int,
    min_microbatch: int,
    *,
    ahead: bool = False,
) -> float:
    """Of the real scheduler over stages that take that long for so many rows, on a clock of its own."""
    config = SchedulerConfig(
        num_blocks=8 * sequences,
        block_size=16,
        max_context=128,
        depth=depth,
        min_microbatch=min_microbatch,
        max_step_tokens=512,
        prefill_chunk=512,
        max_sequences=256,
        ahead=ahead,
    )
    scheduler = Scheduler(config)
    for index in range(sequences):
        scheduler.add(NewRequest(str(index), (1,), SamplingParams(seed=0, ignore_eos=True)))
    now, tokens, marks = 0.0, 0, []
    free = [0.0] * stages
    sampled: dict[int, float] = {}  # when the last token of each sequence is there
    in_flight: deque[tuple[float, StepPlan]] = deque()
    while tokens < 100 * sequences:
        while (plan := scheduler.schedule()) is not None:
            now += HOST_SECONDS + HOST_ROW_SECONDS * plan.num_tokens
            # What one stage has sampled is there when the next step begins; several tell the first.
            done = max([now, *(sampled[run.seq_id] for run in plan.runs if run.token_ids == (AHEAD,))])
            for stage in range(stages):
                free[stage] = done = max(done, free[stage]) + seconds(stage, plan.num_tokens)
            sampled.update((run.seq_id, done) for run in plan.runs if run.samples)
            in_flight.append((done, plan))
        done, plan = in_flight.popleft()
        now = max(now, done)
        scheduler.update(StepResult(plan.step_id, tuple(SampledToken(run.seq_id, 1) for run in plan.runs)))
        tokens += len(plan.runs)
        marks.append((now, tokens))
    # From where the groups have found their sizes.
    began, first = next(mark for mark in marks if mark[1] >= 20 * sequences)
    return (tokens - first) / (now - began)


def test_shared_cores_bring_no_speed_and_own_devices_do() -> None:
    model, size = make_model(30), make_size(30, ends=0)
    one = plan_pipeline(model, size, cpus(300), Wanted(stages=1, **SMALL))
    three = plan_pipeline(model, size, cpus(300, 300, 300), Wanted(stages=3, **SMALL))
    assert three.tokens_per_second == pytest.approx(one.tokens_per_second)
    single = plan_pipeline(model, size, gpus(300), Wanted(stages=1, concurrency=64, **SMALL))
    several = plan_pipeline(model, size, gpus(300, 300, 300), Wanted(concurrency=64, **SMALL))
    assert len(several.stages) == 3
    assert several.tokens_per_second > single.tokens_per_second


def test_one_sequence_alone_takes_the_fewest_hops() -> None:
    devices = [replace(device, step_seconds=1e-3) for device in gpus(300, 300, 300)]
    plan = plan_pipeline(make_model(30), make_size(30), devices, Wanted(concurrency=1, **SMALL))
    assert len(plan.stages) == 1


def test_devices_of_one_node_come_together() -> None:
    a, b = cpus(40, 40, node="a"), cpus(40, 40, node="b")
    plan = plan_pipeline(make_model(30), make_size(30), [a[0], b[0], a[1], b[1]], Wanted(stages=4, **SMALL))
    assert [stage.device.node for stage in plan.stages] == ["a", "a", "b", "b"]


def test_numeric_classes_are_told() -> None:
    devices = gpus(30, 30)
    mixed = [devices[0], replace(devices[1], numeric_class="sm_90")]
    plan = plan_pipeline(make_model(30), make_size(30), mixed, Wanted(stages=2, **SMALL))
    (note,) = [note for note in plan.notes if "numeric" in note]
    assert f"sm_86: {devices[0].name}; sm_90: {devices[1].name}" in note
    same = plan_pipeline(make_model(30), make_size(30), devices, Wanted(stages=2, **SMALL))
    assert not any("numeric" in note for note in same.notes)


def test_tied_embeddings_cost_on_both_ends() -> None:
    model, wanted = make_model(4), Wanted(context=64, concurrency=1, **SMALL)
    # One device holds the matrix once; two hold it twice.
    one = plan_pipeline(model, make_size(4), gpus(9), replace(wanted, stages=1))
    assert one.stages[0].weight_bytes == 8 * MIB
    two = plan_pipeline(model, make_size(4), gpus(9, 9), replace(wanted, stages=2))
    assert sum(stage.weight_bytes for stage in two.stages) == 12 * MIB
    untied = plan_pipeline(model, make_size(4, tied=False), gpus(13), replace(wanted, stages=1))
    assert untied.stages[0].weight_bytes == 12 * MIB


def test_context_shrinks_to_the_memory_unless_it_was_asked_for() -> None:
    model, size = make_model(30), make_size(30)
    token = 30 * model.kv_bytes_per_token("float16") + 4 * 16  # and what its cosines and sines take
    free = size.total + workspace_bytes(model, 16, 4, head=True) + 500 * token + 31 * 4 * 4
    device = [Device("cpu", "a", free, 4e9)]
    plan = plan_pipeline(model, size, device, Wanted(**SMALL))
    assert plan.context == 496  # whole blocks of 16
    assert plan.concurrency == 1
    assert any("496" in note for note in plan.notes)
    asked = plan_pipeline(model, size, device, Wanted(context=496, **SMALL))
    assert not any("longer" in note for note in asked.notes)
    with pytest.raises(PlanningError, match=r"600 tokens does not fit: on cpu .*--context 496"):
        plan_pipeline(model, size, device, Wanted(context=600, **SMALL))
    with pytest.raises(PlanningError, match=r"--context 240.*--kv-dtype float16"):
        plan_pipeline(model, size, device, Wanted(context=600, kv_dtype="float32", **SMALL))
    with pytest.raises(PlanningError, match=r"--context 496.*--kv-dtype int8 nearly halves"):
        plan_pipeline(model, size, device, Wanted(context=1000, **SMALL))
    # 8 bits and a scale of 16 a head, instead of 16 bits a channel: and then they fit.
    heads, dim = model.num_kv_heads, model.head_dim
    assert model.kv_bytes_per_token("int8") == 2 * heads * (dim + 2)
    assert plan_pipeline(model, size, device, Wanted(context=800, kv_dtype="int8", **SMALL)).context == 800
    with pytest.raises(PlanningError, match="does not fit") as told:
        plan_pipeline(model, size, device, Wanted(context=2000, kv_dtype="int8", **SMALL))
    assert "--kv-dtype" not in str(told.value)


def test_the_last_block_of_a_context_has_its_tables_too() -> None:
    """A byte less than keys, values, and tables of positions need, and the context is a block shorter."""
    model, size = make_model(2, context_length=1024), make_size(2)
    block = 16 * (2 * model.kv_bytes_per_token("float16") + 4 * 16) + 4 * 4
    fixed = size.total + workspace_bytes(model, 16, 4, head=True)
    for free, context in [(64 * block, 1024), (64 * block - 1, 1008), (block, 16)]:
        plan = plan_pipeline(model, size, [Device("cpu", "a", fixed + free, 4e9)], Wanted(concurrency=1, **SMALL))
        assert plan.context == context
    with pytest.raises(PlanningError, match="Not one block fits"):
        plan_pipeline(model, size, [Device("cpu", "a", fixed + block - 1, 4e9)], Wanted(concurrency=1, **SMALL))
    # Behind the context the pool grows without them.
    more = 64 * block + 3 * 16 * 2 * model.kv_bytes_per_token("float16")
    wanted = Wanted(concurrency=1, fill_memory=True, **SMALL)
    assert plan_pipeline(model, size, [Device("cpu", "a", fixed + more, 4e9)], wanted).num_blocks == 67


def test_says_that_the_context_chooses_the_rotary_factors() -> None:
    rope = RopeSpec(1e4, 16, False, (1.0,) * 8, (2.0,) * 8, original_context=1024)
    model = make_model(4, ropes=(rope,))

    def notes(context: int | None, room: float) -> str:
        device = [Device("cpu", "a", int(room * MIB), 4e9)]
        return " ".join(plan_pipeline(model, make_size(4), device, Wanted(context=context, **SMALL)).notes)

    assert "context 2048 is more than the 1024" in notes(None, 40)
    assert "is no more than the 1024" in notes(None, 8.6)
    assert "1024" not in notes(2048, 40)


def test_a_refusal_has_the_numbers() -> None:
    with pytest.raises(PlanningError) as refusal:
        plan_pipeline(make_model(30), make_size(30), cpus(10, 10, 16), Wanted(stages=3, **SMALL))
    text = str(refusal.value)
    assert "weights are 34.0 MiB" in text
    assert "36.0 MiB in all" in text
    # 30 layers and the matrix twice are 38 MiB and a little workspace: each of the three lacks at least 2/3 MiB.
    assert "lacks 1.1 MiB" in text or "lacks 0." in text or "lacks 1.0 MiB" in text
    assert all(f"a cpu {i}" in text for i in range(3))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(context=0), "context 0 is not possible: the model was made for 1 to 2048"),
        (Wanted(context=4096), "context 4096 .*1 to 2048"),
        (Wanted(concurrency=0), "concurrency 0"),
        (Wanted(stages=0), "0 stages"),
        (Wanted(stages=4), "4 stages need 4 devices, and there are 3"),
        (Wanted(split=(10, 10, 11)), "split 10,10,11 has 31 layers, but the model has 30"),
        (Wanted(split=(0, 20, 10)), "only the last stage may have no layer"),
        (Wanted(split=(40, -10)), "only the last stage"),
        (Wanted(split=(10, 20), stages=3), "2 stages, but 3 stages are asked for"),
        (Wanted(split=(5, 5, 5, 15)), "4 stages need 4 devices"),
        (Wanted(split=(28, 1, 1)), r"In this split a cpu 0 lacks 12.0 MiB"),
    ],
)
def test_contradictions_are_refused(wanted: Wanted, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        plan_pipeline(make_model(30), make_size(30), cpus(20, 20, 20), replace(wanted, **SMALL))


def test_no_device() -> None:
    with pytest.raises(PlanningError, match="no device"):
        plan_pipeline(make_model(30), make_size(30), [], Wanted())


def test_a_large_model_is_planned_in_time() -> None:
    devices = gpus(*(24_000 - 1000 * i for i in range(8)), speeds=tuple(1e11 * (1 + i % 3) for i in range(8)))
    plan = plan_pipeline(
        make_model(126), ModelBytes((1200 * MIB,) * 126, 2000 * MIB, 2000 * MIB, tied=False), devices, Wanted(**SMALL)
    )
    assert len(plan.stages) == 8


@pytest.mark.parametrize(("first_card", "step_tokens"), [((86, 28), 64), ((86, 28), 2048), ((90, 132), 2048)])
def test_a_gpus_workspace_is_what_its_kernels_keep(first_card: tuple[int, int], step_tokens: int) -> None:
    """Each stage on a GPU counts its own card's; a CPU in the same pipeline counts a CPU's."""
    model = make_model(6)
    size = ModelBytes((10 << 20,) * 6, 20 << 20, 20 << 20, tied=False)
    arch, processors = first_card
    devices = [
        Device("gpu", "a", 400 << 20, 1e9, arch=arch, processors=processors),
        Device("cpu", "b", 400 << 20, 1e9),
    ]
    wanted = Wanted(context=512, concurrency=2, max_step_tokens=step_tokens, max_sequences=8, split=(3, 3))
    on_gpu, on_cpu = plan_pipeline(model, size, devices, wanted).stages
    foreseen = gpu_workspace_bytes(
        model, on_gpu.spec, size.traits, max_blocks=512 // 16, arch=arch, processors=processors
    )
    padding = on_gpu.weight_bytes // GPU_PADDING_SHARE + GPU_PADDING_BYTES
    tables = StageCosts(model, size, devices, wanted, 1).table_bytes(0, 3, on_gpu.spec.num_blocks)
    assert on_gpu.workspace_bytes == foreseen + padding + tables
    assert on_cpu.workspace_bytes == workspace_bytes(model, step_tokens, 8, head=True) + tables
    # What does not fit says how much is missing, workspace and all.
    small = [replace(devices[0], free_bytes=on_gpu.weight_bytes + on_gpu.workspace_bytes - tables - 1), devices[1]]
    with pytest.raises(PlanningError, match=r"gpu lacks 0\.0 MiB"):
        plan_pipeline(model, size, small, wanted)
