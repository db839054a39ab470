from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.stop import StopMatcher
from shardline.cluster.text.tokenizer import Tokenizer

few_letters = st.text("ab", max_size=30)
few_stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def cut(data: st.DataObject, text: str) -> list[str]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text) + 2)))
    return [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: at the first character that completes a stop string, the longest one that it completes."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(matcher: StopMatcher, pieces: Sequence[str]) -> str:
    return "".join(map(matcher.feed, pieces)) + matcher.finish()


@given(data=st.data(), text=few_letters, stops=few_stops)
def test_any_text_in_any_cut(data: st.DataObject, text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert (run(matcher, cut(data, text)), matcher.matched) == expected(text, stops)


@given(text=few_letters, stops=few_stops)
def test_holds_back_exactly_what_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for end in range(1, len(text) + 1):
        emitted += matcher.feed(text[end - 1])
        if matcher.matched is not None:
            assert emitted == expected(text, stops)[0]
            return
        seen = text[:end]
        held = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert emitted == seen[: len(seen) - held]
    assert emitted + matcher.finish() == text


@pytest.mark.parametrize(
    ("stops", "pieces", "deltas", "matched"),
    [
        (["STOP"], ["go S", "TO", "P now"], ["go ", "", ""], "STOP"),
        (["STOP"], ["go S", "TO", "LEN"], ["go ", "", "STOLEN"], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["abc", "b"], ["abc"], ["a"], "b"),
        (["abc", "bc"], ["xabc"], ["x"], "abc"),
        (["bc", "abc"], ["xab", "c"], ["x", ""], "abc"),
        (["END"], ["END"], [""], "END"),
        (["終わり"], ["これで終", "わ", "り。"], ["これで", "", ""], "終わり"),
        (["👩‍👩‍👧"], ["x👩‍👩", "‍👧"], ["x", ""], "👩‍👩‍👧"),
        ([], ["a", "", "b"], ["a", "", "b"], None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], deltas: list[str], matched: str | None) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces] == deltas
    assert matcher.matched == matched


def test_nothing_comes_after_the_stop_string() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("one. two. three") == "one"
    assert matcher.feed(" four") == ""
    assert matcher.finish() == ""
    assert matcher.matched == "."


def test_the_held_text_comes_once() -> None:
    """A sequence that ends by length or abort in the middle of a possible stop string."""
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("42</ans") == "42"
    assert matcher.finish() == "</ans"
    assert matcher.finish() == ""


def test_long_stop_strings_take_linear_time() -> None:
    stops = ["a" * size + "b" for size in range(5000, 5004)]
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed("a") for _ in range(20_000))
    assert len(text) == 20_000 - 5003
    assert matcher.feed("b") == ""
    assert matcher.matched == stops[-1]
    assert len(text) == 20_001 - len(stops[-1])


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(smollm2_metadata)


@given(data=st.data())
def test_over_real_token_borders(smollm2_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Ids and text take one path: whatever the tokens, the text ends right before the stop string, or is whole."""
    text = data.draw(
        st.sampled_from(
            [
                "The answer is 42.\n\nUser: next? שלום",
                "ok 👩‍👩‍👧 and 漢字 and <|im_end|> end",
                "def f():\n    return  1\n\n\nprint(f())",
            ]
        )
    )
    start = data.draw(st.integers(0, len(text) - 1))
    stops = [
        text[start : start + data.draw(st.integers(1, 12))],
        data.draw(st.sampled_from(["zzz", "is 43", "\n\n\n\n"])),
    ]
    ids = smollm2_tokenizer.encode(text, add_special=True, parse_special=False)
    length = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(smollm2_tokenizer)
    matcher = StopMatcher(stops)
    output = "".join(matcher.feed(detokenizer.feed([token_id])) for token_id in ids[:length])
    output += matcher.feed(detokenizer.finish()) + matcher.finish()
    assert (output, matcher.matched) == expected(smollm2_tokenizer.decode(ids[:length]), stops)
