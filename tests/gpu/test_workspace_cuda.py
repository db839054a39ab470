"""All memory of a stage is allocated when it is loaded, and no more of it than the planner foresaw."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shardline.cluster.errors import StageLostError
from shardline.cluster.local_pipeline import LocalPipeline
from shardline.cluster.planning.placement import Device, Wanted
from shardline.cluster.planning.planner import plan_pipeline
from shardline.cluster.planning.stage_costs import GPU_PADDING_BYTES
from shardline.kernels import DeviceMemoryError, Expert, RouterRule, StepShape
from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SequenceRun, SequenceStart, StepPlan
from shardline.stage import Stage, StageSpec, open_checkpoint
from shardline.stage.workspace import FileTraits, gpu_workspace_bytes

pytestmark = pytest.mark.gpu
STAGE_TESTS = Path(__file__).parents[1] / "stage"
ROWS, SEQUENCES, BLOCK = 100, 24, 16
CONTEXT = 1024
STEPS = [*range(1, 18), *range(24, ROWS, 8), 33, 65, 99, ROWS]
CASES = ("mixtral", "llama with all biases", "qwen2moe", "gemma2", "gpt-oss", "glm4moe with groups")


def module(name: str) -> ModuleType:
    """A file of the stage's tests, which are no package."""
    spec = importlib.util.spec_from_file_location(f"shardline_workspace_{name}", STAGE_TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


families = module("test_family_decoders")
tiny_models = module("tiny_models")
HARD = SamplingParams(
    temperature=1.0,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    logit_bias=tuple((token, 0.5) for token in range(100)),
    logprobs=64,
    seed=0,
)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a family's case."""
    make = tiny_models.TinyModels(tmp_path_factory.mktemp("workspace"))

    def path(name: str) -> Path:
        family, asked, mixture, keys = families.CASES[name]
        changes = dict(asked)
        if changes.get("edit") == "biases":
            changes["edit"] = families.all_biases
        if mixture is not None:
            changes["experts"] = tiny_models.Experts(**mixture)
        made: Path = make(family, keys={f"{family}.{key}": value for key, value in keys.items()}, **changes)
        return made

    return path


@pytest.fixture(params=[(86, 28), (90, 132)], ids=str)
def backends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes backends that launch nothing: of a step only what it allocates counts. On a real GPU both are it."""
    pytest.importorskip("cupy")
    from shardline.kernels.cuda.backend import CudaBackend

    arch, processors = request.param
    monkeypatch.setenv("EMU_ARCH", str(arch))
    monkeypatch.setenv("EMU_SMS", str(processors))
    monkeypatch.setattr(CudaBackend, "_launch", lambda *_, **__: None)
    made = []

    def backend() -> Any:
        one = CudaBackend(0, None)
        one.uploaded = 0
        one.asked = {one._arrived.data.ptr: one._arrived.nbytes}
        upload, allocate = one.upload, one._memory.allocate

        def counted(host: np.ndarray) -> Any:
            one.uploaded += host.nbytes
            return upload(host)

        def asked(size: int) -> Any:
            memory = allocate(size)
            one.asked[memory.ptr] = size
            return memory

        one.upload, one._memory.allocate = counted, asked
        made.append(one)
        return one

    yield backend
    for one in made:
        one.close()


def placed_bytes(backend: Any) -> int:
    """Of arrays that live, as they were asked for: without what rounding and whole pages add."""
    backend._memory._take_back()
    return sum(backend.asked[address] for address in backend._memory._arena._used)


def share_of(num_layers: int, first: int, end: int) -> StageSpec:
    return StageSpec(
        index=0,
        first_layer=first,
        end_layer=end,
        has_embed=first == 0,
        has_head=end == num_layers,
        num_blocks=SEQUENCES * 4 + CONTEXT // BLOCK,
        block_size=BLOCK,
        kv_dtype="float16",
        max_step_tokens=ROWS,
        max_sequences=SEQUENCES,
        max_context=CONTEXT,
        num_threads=1,
    )


def plans(vocab: int) -> Iterator[StepPlan]:
    """Steps of every number of rows up to the most: one sequence's alone, then as many sequences as there may be."""
    step = last = 0
    for rows in STEPS:
        for count in {1, min(rows, SEQUENCES)}:
            counts = [rows // count + (index < rows % count) for index in range(count)]
            starts, runs, block = [], [], 0
            for index, length in enumerate(counts):
                prompt = tuple(token % vocab for token in range(length))
                blocks = tuple(range(block, block - (-length // BLOCK)))
                block += len(blocks)
                seq_id = 1000 * step + index
                starts.append(SequenceStart(seq_id, HARD, length, prompt, ()))
                runs.append(SequenceRun(seq_id, 0, prompt, blocks, samples=True))
            before = tuple(range(1000 * (step - 1), 1000 * (step - 1) + last))
            yield StepPlan(step, before, tuple(starts), tuple(runs))
            step, last = step + 1, count


@pytest.mark.parametrize("name", CASES)
def test_a_stage_allocates_when_it_is_loaded_and_what_was_foreseen(name: str, model_of: Any, backends: Any) -> None:
    checkpoint = open_checkpoint(model_of(name))
    model = checkpoint.spec
    layers = model.num_layers
    for first, end in {(0, 1), (1, layers), (layers, layers), (0, layers)}:
        share = share_of(layers, first, end)
        backend = backends()
        stage = Stage(share, checkpoint, backend)
        held, placed = backend._memory.held_bytes, placed_bytes(backend)
        # From here on nothing on the device.
        backend._memory.allocate = lambda size: pytest.fail(f"a step allocates {size} bytes")
        hidden = None if share.has_embed else np.zeros((ROWS, model.hidden_size), np.float32)
        for plan in plans(model.vocab_size):
            stage.run(plan, None if hidden is None else hidden[: plan.num_tokens])
        tables = 4 * SEQUENCES * stage._decoder.max_blocks if share.num_layers else 0
        kept = placed - backend.resident_bytes() - backend.uploaded - tables
        foreseen = gpu_workspace_bytes(
            model,
            share,
            FileTraits(apart=True, ordered=False),
            max_blocks=stage._decoder.max_blocks,
            arch=backend.arch,
            processors=backend._processors,
        )
        assert kept <= foreseen, (first, end)
        if first < end:
            assert foreseen <= 1.5 * kept + 2**20, (first, end)
        # Whole pages, and nothing that loading left behind.
        assert held - placed <= GPU_PADDING_BYTES, (first, end)
        stage.close()
    checkpoint.close()


def test_orders_and_formats_apart_are_reserved_too(backends: Any, formats: Any) -> None:
    """What the tiny models do not have: columns in orders of their own, gates and ups that are no one product."""
    backend = backends()
    inputs, width, rows, chosen = 128, 64, 40, 3
    rng = np.random.default_rng(0)

    def matrix(channels: int, inputs: int, *, ordered: bool = True, scale: str = "float16") -> Any:
        made = formats(4, 32, scale, None).matrix(channels, inputs)
        return replace(made, input_order=rng.permutation(inputs).astype(np.int32)) if ordered else made

    stacked = backend.load_matrix([matrix(64, inputs), matrix(32, inputs), matrix(32, inputs, ordered=False)])
    gated = backend.load_gated(matrix(4 * width, inputs), matrix(4 * width, inputs, scale="float32"))
    order = rng.permutation(inputs).astype(np.int32)
    gate, up = (replace(matrix(width, inputs, scale=kind), input_order=order) for kind in ("float16", "float32"))
    experts = backend.load_experts(Expert(gate, up, matrix(inputs, width)) for _ in range(8))
    x, h = backend.activations(rows, inputs), backend.activations(rows, 4 * width)
    out = backend.empty((rows, inputs), "float32")
    ids, shares = backend.empty((rows, chosen), "int32"), backend.empty((rows, chosen), "float32")
    router = backend.upload(np.zeros((8, inputs), np.float32))
    backend.reserve(StepShape(rows, experts_per_token=chosen))
    backend._memory.allocate = lambda size: pytest.fail(f"an op allocates {size} bytes")
    for count in range(1, rows + 1):
        backend.linear(x, stacked, out, count)
        backend.gated_linear(x, gated, h, count)
        backend.route(x, router, RouterRule(chosen), ids, shares, count)
        backend.expert_mlp(x, experts, ids, shares, out, count)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "smollm2"])
def test_a_plan_that_fills_a_limit_loads_within_it(
    name: str, request: pytest.FixtureRequest, model_of: Any, backends: Any
) -> None:
    """The pool is as large as the planner's arithmetic allows, and all of the stage still fits, in every step."""
    from shardline.cluster.build import model_bytes
    from shardline.kernels.cuda.backend import CudaBackend
    from shardline.kernels.cuda.memory import CONTEXT_BYTES

    card = backends()
    checkpoint = open_checkpoint(request.getfixturevalue(name) if name == "smollm2" else model_of(name))
    device = Device("gpu", "node", 300 * 2**20, 1e12, arch=card.arch, processors=card._processors)
    wanted = Wanted(context=512, max_step_tokens=ROWS, max_sequences=SEQUENCES, fill_memory=True)
    (stage,) = plan_pipeline(checkpoint.spec, model_bytes(checkpoint), [device], wanted).stages
    assert device.free_bytes - stage.total_bytes < 4 * 2**20
    backend = CudaBackend(0, None, CONTEXT_BYTES + device.free_bytes)
    try:
        loaded = Stage(stage.spec, checkpoint, backend)
        assert device.free_bytes - backend._memory.held_bytes < 64 * 2**20
        backend._memory.allocate = lambda size: pytest.fail(f"a step allocates {size} bytes")
        for plan in plans(min(1000, checkpoint.spec.vocab_size)):
            loaded.run(plan, None)
    finally:
        backend.close()
    # With less than was foreseen it does not load, and says so.
    tight = CudaBackend(0, None, CONTEXT_BYTES + device.free_bytes - 64 * 2**20)
    with pytest.raises(DeviceMemoryError, match="while its stage was being loaded"):
        Stage(stage.spec, checkpoint, tight)
    tight.close()
    checkpoint.close()


def test_a_stage_that_failed_is_replaced_in_the_same_process(model_of: Any, backends: Any) -> None:
    """Its memory is free before the new one loads, although the error's traceback still holds its arrays."""
    checkpoint = open_checkpoint(model_of("mixtral"))
    made: list[Any] = []

    def factory(spec: StageSpec) -> Any:
        assert not any(backend._memory.held_bytes for backend in made), "the lost stage still holds memory"
        made.append(backends())
        return made[-1]

    def fails(*_: Any) -> None:
        raise RuntimeError("the device has gone")

    async def scenario() -> None:
        share = share_of(checkpoint.spec.num_layers, 0, checkpoint.spec.num_layers)
        pipeline = LocalPipeline([share], checkpoint, factory, owns_checkpoint=True)
        await pipeline.start()
        held = made[0]._memory.held_bytes
        made[0].sample_later = fails
        first = next(plans(100))
        await pipeline.submit(first)
        with pytest.raises(StageLostError, match="the device has gone") as caught:
            await pipeline.result()
        await pipeline.recover()
        assert made[1]._memory.held_bytes == held
        await pipeline.submit(first)
        assert (await pipeline.result()).step_id == first.step_id
        await pipeline.close()
        assert not made[1]._memory.held_bytes
        assert caught.value.__cause__ is not None

    asyncio.run(scenario())
