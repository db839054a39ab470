"""The clients on an engine in this process, with the real model."""

from __future__ import annotations

import asyncio
import gc
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import shardline
from shardline import Client, Request, SamplingParams
from shardline.cluster import AsyncClient, EngineDeadError, ModelNotFoundError, ShardlineError
from shardline.cluster.client import _LoopThread
from shardline.scheduler import InvalidParameterError, RequestTooLargeError

CHAT = ({"role": "user", "content": "What is the capital of France?"},)
GREEDY = SamplingParams(max_tokens=12)
# Four sequences run at a time, so its own end is more than ten thousand steps away: no test and no machine gets there.
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, n=128)


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[Client]:
    with Client.local(smollm2, context=512, concurrency=4, block_size=16) as opened:
        yield opened


def idle(client: Client) -> None:
    """Wait until nothing runs any more; then no block may be held."""
    deadline = time.monotonic() + 60
    while (status := client.status()).requests:
        assert time.monotonic() < deadline, "requests that nobody wants still run"
        time.sleep(0.01)
    assert status.scheduler.blocks_used == 0


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardline")}


def ends_with(expected: set[threading.Thread]) -> None:
    """Wait until there are just these: some are told to end and not waited for."""
    deadline = time.monotonic() + 60
    while threads() != expected:
        assert time.monotonic() < deadline, threads() - expected
        time.sleep(0.01)


def test_a_chat_is_answered(client: Client) -> None:
    stream = client.submit(CHAT, GREEDY)
    deltas = list(stream)
    assert "Paris" in "".join(delta.text for delta in deltas)
    assert deltas[-1].finish_reason == "stop"
    assert {delta.request_id for delta in deltas} == {stream.request_id}
    assert deltas[-1].usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)


def test_a_text_a_request_and_its_tokens_say_the_same(client: Client) -> None:
    text = "The capital of France is"
    by_text = client.submit(text, GREEDY).result()
    by_request = client.submit(Request(text=text, params=GREEDY)).result()
    assert by_text.text == by_request.text
    assert " Paris" in by_text.text
    assert by_text.finish_reason in ("length", "stop")
    assert by_text.usage.prompt_tokens == by_request.usage.prompt_tokens > 3


def test_results_hold_what_was_iterated_over_before(client: Client) -> None:
    stream = client.submit(CHAT, GREEDY)
    first = next(stream)
    result = stream.result()
    assert result.text.startswith(first.text)
    assert result.text == client.submit(CHAT, GREEDY).text()


def test_logprobs_come_with_each_token(client: Client) -> None:
    result = client.submit(CHAT, SamplingParams(max_tokens=5, logprobs=3)).result()
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for entry in result.logprobs:
        assert entry.logprob <= 0
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the likeliest"
        assert [logprob for _, logprob in entry.top] == sorted((logprob for _, logprob in entry.top), reverse=True)


def test_several_sequences_of_one_prompt(client: Client) -> None:
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=11)
    together = client.submit(CHAT, params)
    with pytest.raises(InvalidParameterError, match="results"):
        together.result()
    results = together.results()
    assert [result.index for result in results] == [0, 1, 2]
    assert len({result.token_ids for result in results}) == 3
    alone = client.submit(CHAT, SamplingParams(max_tokens=8, temperature=1.0, seed=11)).result()
    assert results[0].token_ids == alone.token_ids, "the first sequence's noise is the request's own seed's"
    again = client.submit(CHAT, params).results()
    assert [result.token_ids for result in again] == [result.token_ids for result in results]


def test_streams_side_by_side_equal_those_alone(client: Client) -> None:
    prompts = [f"{i} plus {i + 1} is" for i in range(8)]
    params = SamplingParams(max_tokens=10, logprobs=2, temperature=0.8, seed=3)
    alone = [client.submit(prompt, params).result() for prompt in prompts]
    together = [client.submit(prompt, params) for prompt in prompts]
    for one, stream in zip(alone, together, strict=True):
        result = stream.result()
        assert (result.text, result.token_ids) == (one.text, one.token_ids)
        assert repr(result.logprobs) == repr(one.logprobs)


def test_cancel_ends_with_abort_and_frees(client: Client) -> None:
    stream = client.submit(CHAT, ENDLESS)
    assert next(stream).finish_reason is None
    stream.cancel()
    deltas = list(stream)
    assert deltas[-1].finish_reason == "abort"
    idle(client)
    stream.cancel()


@pytest.mark.parametrize("how", ["with", "close", "drop", "break"])
def test_a_stream_that_is_left_ends_its_request(client: Client, how: str) -> None:
    if how == "with":
        with client.submit(CHAT, ENDLESS) as stream:
            next(stream)
    elif how == "close":
        stream = client.submit(CHAT, ENDLESS)
        stream.close()
    elif how == "drop":
        stream = client.submit(CHAT, ENDLESS)
        next(stream)
        del stream
    else:
        for _ in client.submit(CHAT, ENDLESS):
            break
    gc.collect()
    idle(client)


def test_results_of_a_closed_stream_are_refused(client: Client) -> None:
    stream = client.submit(CHAT, ENDLESS)
    next(stream)
    stream.close()
    with pytest.raises(ShardlineError, match="closed"):
        stream.result()
    assert list(stream) == []


def test_errors_come_as_themselves_and_nothing_is_left(client: Client) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        client.submit("")
    with pytest.raises(RequestTooLargeError, match="512"):
        client.submit("word " * 600)
    with pytest.raises(InvalidParameterError, match="role"):
        client.submit(({"content": "no role"},))
    with pytest.raises(InvalidParameterError, match="Request alone"):
        client.submit(Request(text="a"), GREEDY)
    with pytest.raises(InvalidParameterError, match="49152"):
        client.submit(Request(token_ids=(49152,)))
    idle(client)


def test_many_threads_use_one_client(client: Client) -> None:
    def ask(i: int) -> str:
        return client.submit(f"{i} plus {i} is", GREEDY).text()

    alone = [ask(i) for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(6))) == alone


def test_status_tells_stages_and_blocks(client: Client) -> None:
    status = client.status()
    assert status.state == "ready"
    assert [stage.spec.num_layers for stage in status.stages] == [30]
    assert status.scheduler.blocks_total == 4 * 512 // 16
    assert pickle.loads(pickle.dumps(status)) == status


def test_a_client_that_was_closed_says_so_and_its_threads_are_gone(smollm2: Path) -> None:
    before = threads()
    client = Client.local(smollm2, context=64, concurrency=2)
    running = client.submit(CHAT, SamplingParams(max_tokens=20, ignore_eos=True))
    client.close()
    client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        client.submit(CHAT)
    with pytest.raises(EngineDeadError, match="closed"):
        next(running)
    ends_with(before)


def test_a_client_that_nobody_holds_ends_but_not_before_its_streams(smollm2: Path) -> None:
    before = threads()
    text = Client.local(smollm2, context=64, concurrency=2).submit("The capital of France is", GREEDY).text()
    assert "Paris" in text
    gc.collect()
    ends_with(before)


def test_several_threads_may_close_a_client(smollm2: Path) -> None:
    before = threads()
    for _ in range(3):
        client = Client.local(smollm2, context=64, concurrency=2)
        with ThreadPoolExecutor(8) as closing:
            list(closing.map(lambda _, client=client: client.close(), range(8)))
    ends_with(before)


def test_nobody_waits_for_a_loop_that_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _LoopThread()
    late: list[Future[None]] = []
    ends, closes = runner.loop.shutdown_default_executor, runner.loop.close

    async def end() -> None:
        await ends()
        late.append(runner.submit(asyncio.sleep(3600)))  # the loop's last turn

    def close() -> None:
        with pytest.raises(EngineDeadError, match="closed"):
            runner.submit(asyncio.sleep(3600))
        closes()

    monkeypatch.setattr(runner.loop, "shutdown_default_executor", end)
    monkeypatch.setattr(runner.loop, "close", close)
    runner.close()
    assert late[0].cancelled()
    assert not runner.running
    with pytest.raises(EngineDeadError, match="closed"):
        runner.call(asyncio.sleep(0))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    before = threads()
    with pytest.raises(ModelNotFoundError, match=r"no\.gguf"):
        Client.local(tmp_path / "no.gguf")
    ends_with(before)


def test_the_async_twin(smollm2: Path) -> None:
    async def work() -> None:
        async with await AsyncClient.local(smollm2, split=(10, 20), context=256, concurrency=4) as client:
            assert [stage.spec.num_layers for stage in (await client.status()).stages] == [10, 20]

            async def ask(i: int) -> str:
                return "".join([delta.text async for delta in await client.submit(f"{i} plus {i} is", GREEDY)])

            alone = [await ask(i) for i in range(4)]
            assert list(await asyncio.gather(*map(ask, range(4)))) == alone
            assert "Paris" in await (await client.submit(CHAT, GREEDY)).text()

            endless = replace(ENDLESS, max_tokens=200)
            stream = await client.submit(CHAT, endless)
            await anext(stream)
            stream.cancel()
            assert [delta async for delta in stream][-1].finish_reason == "abort"
            async with await client.submit(CHAT, endless) as stream:
                await anext(stream)
            stream = await client.submit(CHAT, endless)
            del stream
            gc.collect()
            async with asyncio.timeout(60):
                while (await client.status()).requests:
                    await asyncio.sleep(0.01)
            assert (await client.status()).scheduler.blocks_used == 0
            with pytest.raises(InvalidParameterError, match="content"):
                await client.submit(({"role": "user", "content": {"no": "text"}},))

    asyncio.run(work())


def test_the_documented_programs_run(smollm2: Path) -> None:
    """The Python blocks of docs/client.md that need no cluster, one after the other as one program."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "connect(" not in block]
    assert len(blocks) == 6
    program = "\n".join(blocks).replace("smollm2-135m", str(smollm2))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_package_exports_the_public_names() -> None:
    assert set(shardline.__all__) == {"Client", "Request", "SamplingParams", "__version__"}
    assert shardline.Client is Client
    script = (
        "import shardline, sys; assert not {'ray', 'numba'} & set(sys.modules); shardline.Client; shardline.Request"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("rest", ["next(stream)", "stream.text(); del stream"], ids=["an open stream", "nothing runs"])
def test_a_program_that_forgets_to_close_ends_quietly_and_needs_no_ray(smollm2: Path, rest: str) -> None:
    script = f"""
import sys
from shardline import Client, SamplingParams
client = Client.local({str(smollm2)!r}, context=256, concurrency=2)
stream = client.submit("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
{rest}
print("ray" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
