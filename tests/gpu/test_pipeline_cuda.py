"""Stages of the real model on real GPUs over Ray: the bytes of one process, in every split and through deaths.

Needs Ray beside a GPU; everything goes through the calls that `shardline run` makes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from shardline.cluster import Engine, PlanningError, Request
from shardline.cluster.build import EngineOptions, build_engine, prepare
from shardline.cluster.cli import main
from shardline.cluster.engine import EngineStatus
from shardline.cluster.gpus import NodeGpu, gpus_here, gpus_of
from shardline.scheduler import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    # Ray starts its processes with a preexec_fn, of which Python 3.12 warns where there are threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

GIB = 2**30
LIMIT = 3 * GIB
TOKENS = 20
POEM = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. "
PROMPTS = (
    "The capital of France is",
    POEM * 4,
    "def fibonacci(n):",
    "שלום עולם",
    "Once upon a time",
    POEM,
    "1, 1, 2, 3, 5, 8,",
    "The three laws of robotics are",
)

Bytes = list[tuple[tuple[int, ...], tuple[object, ...], str, str | None]]
"""Of each request: token ids, logprobs, text, finish reason."""


def requests() -> list[Request]:
    return [
        Request(
            text=prompt,
            params=SamplingParams(
                max_tokens=TOKENS,
                ignore_eos=True,
                logprobs=2,
                seed=index,
                temperature=0.0 if index % 2 else 0.9,
                frequency_penalty=0.5 if index == 2 else 0.0,
            ),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


async def stream(engine: Engine, on_token: Callable[[int], None] = lambda count: None) -> Bytes:
    """All requests at once; `on_token` is told how many tokens there are so far, over all of them."""
    count = 0

    async def one(request: Request) -> tuple[tuple[int, ...], tuple[object, ...], str, str | None]:
        nonlocal count
        ids: tuple[int, ...] = ()
        logprobs: tuple[object, ...] = ()
        text, finish = "", None
        async for delta in engine.generate(request):
            ids += delta.token_ids
            logprobs += delta.logprobs
            text += delta.text
            finish = delta.finish_reason or finish
            for _ in delta.token_ids:
                count += 1
                on_token(count)
        return ids, logprobs, text, finish

    return list(await asyncio.gather(*(one(request) for request in requests())))


def options(model: Path, **chosen: object) -> EngineOptions:
    common: dict[str, object] = {"context": 256, "max_step_tokens": 64, "prefill_chunk": 32, "max_sequences": 16}
    return EngineOptions(model=str(model), **common | chosen)  # type: ignore[arg-type]


def run_with(wish: EngineOptions, work: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = build_engine(prepare(wish))
        try:
            await engine.start()
            async with asyncio.timeout(400):
                await work(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def after_losses(engine: Engine, losses: int) -> EngineStatus:
    """Wait until the engine has brought the stages back so often."""
    while (status := await engine.status()).losses < losses or status.state != "ready":
        await asyncio.sleep(0.01)
    assert status.losses == losses
    return status


@pytest.fixture(scope="module")
def gpus() -> list[NodeGpu]:
    return gpus_here()


@pytest.fixture(scope="module")
def ray_cluster(gpus: list[NodeGpu]) -> Iterator[None]:
    from shardline.cluster.ray_runtime import connected

    with connected(num_cpus=8, num_gpus=len(gpus)):
        yield


@pytest.fixture(scope="module")
def undisturbed(smollm2: Path) -> Bytes:
    """From one stage in this process, without Ray."""
    result: Bytes = []

    async def work(engine: Engine) -> None:
        result.extend(await stream(engine))

    run_with(options(smollm2, device="cuda:0"), work)
    assert all(len(ids) == TOKENS and len(logprobs) == TOKENS for ids, logprobs, _, _ in result)
    return result


def test_looking_leaves_nothing_on_the_card(ray_cluster: None, gpus: list[NodeGpu]) -> None:
    from shardline.cluster.ray_runtime import describe_cluster

    for _ in range(2):
        for found in (gpus_here(), gpus_of(describe_cluster())):
            assert [gpu.card.bus_id for gpu in found] == [gpu.card.bus_id for gpu in gpus]
            # Less by a context, some hundreds of MiB, for each that stayed.
            assert all(now.card.free_bytes > was.card.free_bytes - 2**27 for now, was in zip(found, gpus, strict=True))
    for gpu in gpus:
        assert gpu.card.arch >= 80
        assert 0 < gpu.card.free_bytes <= gpu.card.total_bytes
        assert 1e11 < gpu.card.bytes_per_second < 2e13
    assert len({gpu.card.bus_id for gpu in gpus}) == len(gpus)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_on_one_gpu_give_the_bytes_of_one_process(
    ray_cluster: None, smollm2: Path, undisturbed: Bytes, gpus: list[NodeGpu], stages: int
) -> None:
    async def work(engine: Engine) -> None:
        assert await stream(engine) == undisturbed
        status = await engine.status()
        assert len({stage.pid for stage in status.stages} | {os.getpid()}) == stages + 1
        assert {stage.where.split(" ", 1)[1] for stage in status.stages} == {"GPU 0"}
        assert {stage.numeric_class for stage in status.stages} == {gpus[0].card.numeric_class}
        assert all(stage.resident_bytes < LIMIT for stage in status.stages)
        # What the whole processes have on the card, contexts and all, beside what another look takes.
        taken = before[0].card.free_bytes - gpus_here()[0].card.free_bytes
        assert taken <= stages * LIMIT

    before = gpus_here()
    wish = options(smollm2, device="cuda:0", address="local", stages=stages, gpu_memory=(LIMIT,))
    run_with(wish, work)
    # A process's end comes a little after Ray has been told to end it.
    for _ in range(20):
        left = before[0].card.free_bytes - gpus_here()[0].card.free_bytes
        if left < 2**27:
            break
    assert left < 2**27, "something stayed on the card"


def killing(engine: Engine, victims: tuple[int, ...], when: int, pids: list[int]) -> Callable[[int], None]:
    def kill(count: int) -> None:
        if count == when:
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)

    return kill


def through_deaths(undisturbed: Bytes, stages: int) -> Callable[[Engine], Awaitable[None]]:
    """Each stage is killed under load, once early and once late, and two at once."""

    async def work(engine: Engine) -> None:
        rounds = [((victim,), 9 if victim % 2 else 100) for victim in range(stages)] + [((0, stages - 1), 50)]
        for losses, (victims, when) in enumerate(rounds, start=1):
            before = [stage.pid for stage in (await engine.status()).stages]
            assert await stream(engine, killing(engine, victims, when, before)) == undisturbed
            status = await after_losses(engine, losses)
            after = [stage.pid for stage in status.stages]
            assert [old != new for old, new in zip(before, after, strict=True)] == [
                stage in victims for stage in range(stages)
            ]
        assert await stream(engine) == undisturbed

    return work


def test_stages_of_one_gpu_die_and_come_back(ray_cluster: None, smollm2: Path, undisturbed: Bytes) -> None:
    wish = options(smollm2, device="cuda:0", address="local", stages=3, gpu_memory=(LIMIT,))
    run_with(wish, through_deaths(undisturbed, 3))


def test_a_replacement_waits_for_its_memory(
    ray_cluster: None, smollm2: Path, undisturbed: Bytes, gpus: list[NodeGpu]
) -> None:
    """Two stages that are given nearly all of the card: each replacement fits only in the room of the dead one."""
    half = gpus[0].card.free_bytes * 48 // 100
    # Pools that fill what is given, so that the memory is not only promised: bytes of keys and values in 15 layers.
    concurrency = half * 85 // 100 // (8192 * 15 * 768)
    wish = options(
        smollm2,
        device="cuda:0",
        address="local",
        split=(15, 15),
        gpu_memory=(half, half),
        concurrency=concurrency,
        context=8192,
    )
    run_with(wish, through_deaths(undisturbed, 2))


@pytest.mark.parametrize("split", [None, (7, 23), (5, 5, 10, 10)])
def test_two_gpus_give_the_bytes_of_one(
    ray_cluster: None, smollm2: Path, undisturbed: Bytes, gpus: list[NodeGpu], split: tuple[int, ...] | None
) -> None:
    if len(gpus) < 2:
        pytest.skip("one GPU here")
    stages = len(split) if split else len(gpus)

    async def work(engine: Engine) -> None:
        where = [stage.where.split(" ", 1)[1] for stage in (await engine.status()).stages]
        assert where == sorted(where)
        assert len(set(where)) == min(stages, len(gpus))
        await through_deaths(undisturbed, stages)(engine)

    run_with(options(smollm2, device="gpu", split=split, gpu_memory=(LIMIT,)), work)


def test_the_gpus_of_a_list_in_its_order(
    ray_cluster: None, smollm2: Path, undisturbed: Bytes, gpus: list[NodeGpu]
) -> None:
    if len(gpus) < 2:
        pytest.skip("one GPU here")

    async def work(engine: Engine) -> None:
        where = [stage.where.split(" ", 1)[1] for stage in (await engine.status()).stages]
        assert where == ["GPU 1", "GPU 0"]
        assert await stream(engine) == undisturbed

    run_with(options(smollm2, device="cuda:1,cuda:0"), work)


def test_limits_over_the_card_are_refused(smollm2: Path, gpus: list[NodeGpu]) -> None:
    half = gpus[0].card.total_bytes // 2 + GIB
    with pytest.raises(PlanningError, match=r"MiB \+ .* MiB = .* MiB: give less"):
        prepare(options(smollm2, device="cuda:0", gpu_memory=(half, half)))


def test_the_commands_say_the_same_over_ray(
    ray_cluster: None, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", str(smollm2), "-p", "Name three rivers.", "--max-tokens", "24", "--context", "256", "--device"]
    assert main([*asked, "cuda:0"]) == 0
    alone = capsys.readouterr().out
    assert alone.strip()
    assert main([*asked, "cuda:0", "--gpu-memory", "3GiB,2GiB,3GiB"]) == 0
    assert capsys.readouterr().out == alone
    assert main([*asked, "gpu", "--gpu-memory", "4GiB"]) == 0
    assert capsys.readouterr().out == alone
