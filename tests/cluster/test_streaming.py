"""Joined deltas are the whole text: for any script, stop string and cut. The tokens are forced, the rest is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import Client, Delta, Engine, Request, TemplateError
from shardline.cluster.inbox import merge
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.scheduler import SamplingParams, SchedulerConfig
from shardline.stage import open_checkpoint

TEXTS = {
    "emoji": "Grüße 👩‍👩‍👧‍👦! 🇺🇳🏳️‍🌈 done 🙂🙂",
    "cjk": "今日は東京の天気がいいですね。你好,世界!",
    "hebrew": "שלום עולם, מה שלומך היום? טוב מאוד",
    "code": "def f(x):\n\treturn {'a': [x, x**2]}  # ok\r\n\n",
    "plain": "The quick brown fox jumps over the lazy dog. " * 2,
    "spaces": "  a   b\n\n   c  ",
}


@pytest.fixture(scope="module")
def text(smollm2: Path) -> ModelText:
    checkpoint = open_checkpoint(smollm2)
    made = ModelText.from_checkpoint(checkpoint)
    checkpoint.close()
    return made


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special=False, parse_special=False))


def stream_all(
    scripted_pipeline: Any, text: ModelText, output: tuple[int, ...], requests: list[Request]
) -> list[list[Delta]]:
    """The deltas of requests that all say `output` (after it, end tokens), run side by side on one engine."""
    end = min(text.tokenizer.eos_ids)

    async def work() -> list[list[Delta]]:
        pipeline = scripted_pipeline(lambda _prompt, place: output[place] if place < len(output) else end)
        limits = SchedulerConfig(
            num_blocks=1024,
            block_size=16,
            max_context=2048,
            depth=3,
            max_step_tokens=64,
            prefill_chunk=32,
            max_sequences=64,
            eos_token_ids=tuple(text.tokenizer.eos_ids),
        )
        engine = Engine(pipeline, ModelText(text.tokenizer, text.template), limits)
        await engine.start()

        async def one(request: Request) -> list[Delta]:
            return [delta async for delta in engine.generate(request)]

        async with asyncio.timeout(60):
            deltas = await asyncio.gather(*map(one, requests))
        engine._scheduler.check_integrity()
        assert engine._scheduler.stats().blocks_used == 0
        await engine.close()
        return deltas

    return asyncio.run(work())


def whole_characters(deltas: list[Delta]) -> bool:
    """Whether no delta but the last holds a replacement character."""
    return not any("\ufffd" in delta.text for delta in deltas[:-1])


@pytest.mark.parametrize("name", TEXTS)
def test_joined_deltas_equal_the_text_also_beside_other_streams(
    scripted_pipeline: Any, text: ModelText, name: str
) -> None:
    output = encode(text.tokenizer, TEXTS[name])
    requests = [Request(token_ids=(5, 6, 7 + i), params=SamplingParams(max_tokens=200)) for i in range(9)]
    for deltas in stream_all(scripted_pipeline, text, output, requests):
        whole = merge(deltas)
        assert whole.text == TEXTS[name]
        assert whole.finish_reason == "stop"
        assert whole.token_ids[:-1] == output
        assert whole_characters(deltas)
        # As it is made, not all at the end.
        assert sum(1 for delta in deltas if delta.text) > len(TEXTS[name]) // 12


@pytest.mark.parametrize("name", TEXTS)
def test_cut_by_length_anywhere(scripted_pipeline: Any, text: ModelText, name: str) -> None:
    output = encode(text.tokenizer, TEXTS[name])
    requests = [Request(token_ids=(5,), params=SamplingParams(max_tokens=count + 1)) for count in range(len(output))]
    for count, deltas in enumerate(stream_all(scripted_pipeline, text, output, requests), 1):
        whole = merge(deltas)
        assert whole.token_ids == output[:count]
        assert whole.text == text.tokenizer.decode(output[:count])
        assert whole.finish_reason == "length"
        assert whole_characters(deltas)


@pytest.mark.parametrize("name", TEXTS)
def test_a_stop_string_at_every_place_and_length(scripted_pipeline: Any, text: ModelText, name: str) -> None:
    """None of it is shown, all before it is; whatever token borders it crosses."""
    said = TEXTS[name]
    output = encode(text.tokenizer, said)
    stops = [said[start : start + length] for length in (1, 2, 3, 7) for start in range(0, len(said) - length, 3)]
    requests = [
        Request(token_ids=(5,), params=SamplingParams(max_tokens=200, stop=(stop, "never said"))) for stop in stops
    ]
    for stop, deltas in zip(stops, stream_all(scripted_pipeline, text, output, requests), strict=True):
        whole = merge(deltas)
        assert whole.text == said[: said.index(stop)]
        assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
        assert deltas[-1].finish_reason == "stop"
        # The tokens are those up to the one that completed it.
        so_far = text.tokenizer.decode(whole.token_ids)
        assert stop in so_far
        assert whole.token_ids == output[: len(whole.token_ids)]
        assert stop not in text.tokenizer.decode(whole.token_ids[:-1])
        assert whole.usage.completion_tokens == len(whole.token_ids)


def test_a_stop_string_that_never_completes_is_shown_whole(scripted_pipeline: Any, text: ModelText) -> None:
    said = "one two thr"
    output = encode(text.tokenizer, said)
    requests = [
        Request(token_ids=(5,), params=SamplingParams(max_tokens=limit, stop=("two three",)))
        for limit in (200, len(output))
    ]
    ended, cut = stream_all(scripted_pipeline, text, output, requests)
    assert (merge(ended).text, merge(ended).finish_reason) == (said, "stop")
    assert merge(ended).stop_reason in text.tokenizer.eos_ids
    assert (merge(cut).text, merge(cut).finish_reason, merge(cut).stop_reason) == (said, "length", None)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(scripted_pipeline: Any, text: ModelText) -> None:
    output = encode(text.tokenizer, "one two three")
    params = SamplingParams(max_tokens=len(output), stop=("three",))
    (deltas,) = stream_all(scripted_pipeline, text, output, [Request(token_ids=(5,), params=params)])
    assert (merge(deltas).text, merge(deltas).finish_reason, merge(deltas).stop_reason) == ("one two ", "stop", "three")


def test_a_stop_string_ends_its_own_sequence_only(scripted_pipeline: Any, text: ModelText) -> None:
    output = encode(text.tokenizer, TEXTS["plain"])
    params = SamplingParams(max_tokens=8, n=4, stop=("brown",))
    (deltas,) = stream_all(scripted_pipeline, text, output, [Request(token_ids=(5,), params=params)])
    for index in range(4):
        assert merge([delta for delta in deltas if delta.index == index]).text == "The quick "


@pytest.mark.parametrize("name", ["emoji", "hebrew"])
def test_cut_by_abort_anywhere(scripted_pipeline: Any, text: ModelText, name: str) -> None:
    """What the client got until then, and what was held back for a stop string, is the text of the tokens it got."""
    output = encode(text.tokenizer, TEXTS[name])
    end = min(text.tokenizer.eos_ids)

    async def work() -> None:
        pipeline = scripted_pipeline(lambda _prompt, place: output[place] if place < len(output) else end)
        limits = SchedulerConfig(
            num_blocks=64,
            block_size=16,
            max_context=512,
            depth=2,
            max_step_tokens=64,
            prefill_chunk=32,
            max_sequences=8,
            eos_token_ids=(end,),
        )
        engine = Engine(pipeline, ModelText(text.tokenizer, text.template), limits)
        await engine.start()
        for count in range(1, len(output)):
            stop = (TEXTS[name] + "!",)
            request = Request(token_ids=(5,), params=SamplingParams(stop=stop), request_id="cut")
            deltas = []
            async for delta in engine.generate(request):
                deltas.append(delta)
                if len(deltas) == count:
                    engine.cancel("cut")
            whole = merge(deltas)
            assert whole.finish_reason == "abort"
            assert whole.text == text.tokenizer.decode(whole.token_ids)
            assert whole.token_ids == output[: len(whole.token_ids)]
        engine._scheduler.check_integrity()
        await engine.close()

    asyncio.run(work())


def test_a_space_between_prompt_and_answer_is_part_of_the_answer(scripted_pipeline: Any) -> None:
    """SentencePiece: the space that a text begins with is the encoder's own; one after a prompt's last word is not."""
    pieces = ["<unk>", "<s>", "</s>", "▁Paris", "▁is", "▁the"]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [0.0] * len(pieces),
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    )
    text = ModelText(tokenizer, TemplateError("none"))
    requests = [
        Request(token_ids=prompt, params=SamplingParams(max_tokens=2)) for prompt in ((1, 5, 4), (1,), (1, 4, 2))
    ]
    after_word, after_begin, after_end = stream_all(scripted_pipeline, text, (3, 4), requests)
    assert merge(after_word).text == " Paris is"
    assert merge(after_begin).text == merge(after_end).text == "Paris is"


# -- the real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[Client]:
    with Client.local(smollm2, context=512, concurrency=4) as opened:
        yield opened


def cycle(tokens: tuple[int, ...]) -> dict[str, Any]:
    """Parameters that make the real sampler say these tokens over and over: each is the likeliest until it is said, and
    the frequency penalty then puts it behind the others."""
    assert len(set(tokens)) == len(tokens) <= 8
    return {
        "logit_bias": tuple((token, 1000.0 - 10.0 * place) for place, token in enumerate(tokens)),
        "frequency_penalty": 100.0,
    }


@pytest.mark.parametrize("said", ["🙂", "東京", "שלום", "👩"])
def test_characters_of_several_tokens_come_whole_from_the_real_model(
    client: Client, text: ModelText, said: str, record_property: Callable[[str, object], None]
) -> None:
    tokens = encode(text.tokenizer, said)
    if len(set(tokens)) != len(tokens):
        tokens = tuple(dict.fromkeys(tokens))
    record_property("tokens", len(tokens))
    assert len(tokens) > 1
    count = 3 * len(tokens)
    params = SamplingParams(max_tokens=count, **cycle(tokens))
    streams = [client.submit(f"Say it, number {i}:", params) for i in range(3)]
    for stream in streams:
        deltas = list(stream)
        assert merge(deltas).token_ids == tokens * 3
        assert merge(deltas).text == text.tokenizer.decode(tokens * 3)
        assert whole_characters(deltas)


def test_a_stop_string_over_token_borders_on_the_real_model(client: Client) -> None:
    """Cut the model's own answer at every place: always the text before the stop string's first occurrence."""
    prompt = "The three primary colours are"
    free = client.submit(prompt, SamplingParams(max_tokens=24, ignore_eos=True)).result()
    stops = sorted({free.text[start : start + 4] for start in range(0, len(free.text) - 4, 5)})
    params = [SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,)) for stop in stops]
    for stop, stream in zip(stops, [client.submit(prompt, each) for each in params], strict=True):
        result = stream.result()
        assert result.text == free.text[: free.text.index(stop)]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.token_ids == free.token_ids[: len(result.token_ids)]
