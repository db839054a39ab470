from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.tokenizer import Tokenizer

TEXTS = [
    "plain words, and more of them",
    "emoji 😀👍🏽 and 🇩🇪 flags",
    "a family 👩‍👩‍👧‍👦 and a pirate 🏴‍☠️",
    "漢字かな交じり文。한국어도",
    "שלום עולם, מה שלומך היום?",
    "e\u0301 and \u05e9\u05c1\u05b8 with marks",
    "  leading and trailing  \n\n",
    "\U0001d518\U0001d52b beyond the plane 🀄",
]
UNKNOWN, CONTROL, BYTE, NORMAL, USER_DEFINED, UNUSED = 2, 3, 6, 1, 4, 5


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(smollm2_metadata)


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """A SentencePiece vocabulary with every byte, a few pieces, and every type of token."""
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces += [(text, NORMAL) for text in ("▁", "▁▁", "▁a", "a", "é", "▁漢", "漢", "😀", "\ufffd")]
    pieces += [("<tool>", USER_DEFINED), (" ", USER_DEFINED), ("▁unused", UNUSED), ("<|user|>", CONTROL)]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [text for text, _ in pieces],
            "tokenizer.ggml.token_type": [kind for _, kind in pieces],
            "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        }
    )


def cut(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    """The ids in pieces of random sizes, empty ones among them."""
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return [ids[start:end] for start, end in zip([0, *borders], [*borders, len(ids)], strict=True)]


def deltas(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_every_token_alone(smollm2_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm2_tokenizer.encode(text, add_special=True, parse_special=True)
    detokenizer = Detokenizer(smollm2_tokenizer)
    parts = [detokenizer.feed([token_id]) for token_id in ids]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert detokenizer.finish() == ""


def test_some_token_borders_lie_inside_characters(smollm2_tokenizer: Tokenizer) -> None:
    """Else the tests above would prove nothing."""
    for text in TEXTS[1:5]:
        ids = smollm2_tokenizer.encode(text, add_special=True, parse_special=True)
        assert any("\ufffd" in smollm2_tokenizer.decode([token_id]) for token_id in ids)


@given(data=st.data(), text=st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_in_any_cut(smollm2_tokenizer: Tokenizer, data: st.DataObject, text: str) -> None:
    ids = smollm2_tokenizer.encode(text, add_special=True, parse_special=True)
    assert "".join(deltas(Detokenizer(smollm2_tokenizer), cut(data, ids))) == smollm2_tokenizer.decode(ids)


@given(data=st.data(), ids=st.lists(st.integers(0, 20) | st.integers(0, 49_200), max_size=20), skip=st.booleans())
def test_any_ids_in_any_cut(smollm2_tokenizer: Tokenizer, data: st.DataObject, ids: list[int], skip: bool) -> None:
    parts = deltas(Detokenizer(smollm2_tokenizer, skip_special=skip), cut(data, ids))
    assert "".join(parts) == smollm2_tokenizer.decode(ids, skip_special=skip)


@given(
    data=st.data(),
    ids=st.lists(st.integers(0, 280), max_size=20) | st.lists(st.integers(240, 280), max_size=20),
    skip=st.booleans(),
    previous_id=st.none() | st.integers(0, 280),
)
def test_any_pieces_and_bytes_in_any_cut(
    llama: Tokenizer, data: st.DataObject, ids: list[int], skip: bool, previous_id: int | None
) -> None:
    parts = deltas(Detokenizer(llama, skip_special=skip, previous_id=previous_id), cut(data, ids))
    assert "".join(parts) == llama.decode(ids, skip_special=skip, previous_id=previous_id)


@given(
    data=st.data(), raw=st.binary(max_size=24) | st.text(max_size=8).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_in_any_cut(llama: Tokenizer, data: st.DataObject, raw: bytes) -> None:
    """What is given so far is always all that is certain: no half character, and none held back once it is whole."""
    ids = [3 + byte for byte in raw]
    detokenizer = Detokenizer(llama)
    given_text = ""
    seen = 0
    for piece in cut(data, ids):
        given_text += detokenizer.feed(piece)
        seen += len(piece)
        assert given_text == codecs.getincrementaldecoder("utf-8")("replace").decode(raw[:seen])
    assert given_text + detokenizer.finish() == raw.decode("utf-8", "replace") == llama.decode(ids)


def test_a_character_comes_with_its_last_byte(llama: Tokenizer) -> None:
    detokenizer = Detokenizer(llama)
    raw = "a😀b".encode()
    assert [detokenizer.feed([3 + byte]) for byte in raw] == ["a", "", "", "", "😀", "b"]


def test_a_cut_inside_a_character_ends_as_the_whole_text_does(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("flag 🏴‍☠️", add_special=True, parse_special=True)
    for count in range(len(ids) + 1):
        detokenizer = Detokenizer(smollm2_tokenizer)
        text = "".join(deltas(detokenizer, [[token_id] for token_id in ids[:count]]))
        assert text == smollm2_tokenizer.decode(ids[:count])


def test_the_prompt_never_leaks(smollm2_tokenizer: Tokenizer) -> None:
    """A prompt that ends inside a character: the output's own bytes alone decide the output's text."""
    ids = smollm2_tokenizer.encode("yes 👩‍👩‍👧 no", add_special=True, parse_special=True)
    for border in range(1, len(ids)):
        output = ids[border:]
        detokenizer = Detokenizer(smollm2_tokenizer, previous_id=ids[border - 1])
        text = "".join(deltas(detokenizer, [[token_id] for token_id in output]))
        assert text == b"".join(map(smollm2_tokenizer.token_bytes, output)).decode("utf-8", "replace")


def test_streams_side_by_side_do_not_touch(smollm2_tokenizer: Tokenizer) -> None:
    streams = [smollm2_tokenizer.encode(text, add_special=True, parse_special=True) for text in TEXTS]
    detokenizers = [Detokenizer(smollm2_tokenizer) for _ in streams]
    texts = [""] * len(streams)
    for step in range(max(map(len, streams))):
        for index, ids in enumerate(streams):
            texts[index] += detokenizers[index].feed(ids[step : step + 1])
    assert texts == TEXTS


def test_special_tokens_are_left_out(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_end|>\nb", add_special=True, parse_special=True)
    assert "".join(deltas(Detokenizer(smollm2_tokenizer), [ids])) == "a\nb"
    assert "".join(deltas(Detokenizer(smollm2_tokenizer, skip_special=False), [ids])) == "a<|im_end|>\nb"


def test_the_first_space_of_sentencepiece(llama: Tokenizer) -> None:
    a, word = (llama.encode(text, add_special=False, parse_special=True)[-1] for text in ("ba", "a"))
    assert (llama.token_text(a), llama.token_text(word)) == ("a", "▁a")

    def text(ids: list[int], previous_id: int | None) -> str:
        return "".join(deltas(Detokenizer(llama, previous_id=previous_id), [[token_id] for token_id in ids]))

    # After a control token a space is what `encode` would have put there; after text it is the model's own.
    assert text([word, word], None) == "a a"
    assert text([word, word], 1) == "a a"
    assert text([word, word], a) == " a a"
    assert text([a, word], None) == "a a"
    # A token without text of its own is not what stands before: here <unk>, an unused piece, and one past the end.
    unused = llama.vocab_size - 2
    assert (llama.token_text(0), llama.token_text(unused)) == ("<unk>", "▁unused")
    for nothing in (0, unused, llama.vocab_size + 5):
        assert text([nothing, word, word], None) == llama.decode([nothing, word, word]) == "a a"
        assert text([a, nothing, word], None) == llama.decode([a, nothing, word]) == "a a"
