"""The tokenizer of a Hugging Face folder that has a tokenizer.json."""

from __future__ import annotations

import copy
import json
import os
import pickle
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from shardline.cluster import Request, TokenizerError
from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.text.tokenizer import Tokenizer

Document = dict[str, Any]


def printing(byte: int) -> bool:
    return 0x21 <= byte < 0x7F or 0xA1 <= byte < 0xAD or byte > 0xAD


SPELLING = {byte: chr(byte) for byte in range(256) if printing(byte)}
SPELLING |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if not printing(byte))}


def added(token_id: int, content: str, **flags: bool) -> Document:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **plain, **flags}


def document(model: Document, decoder: Document | None, tokens: Sequence[Document], **parts: Any) -> Document:
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(tokens),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
        **parts,
    }
    return copy.deepcopy(made)


def merged(alphabet: Sequence[str], words: Sequence[tuple[str, str]]) -> tuple[dict[str, int], list[list[str]]]:
    tokens = [*alphabet, *(left + right for left, right in words)]
    return {token: i for i, token in enumerate(tokens)}, [list(pair) for pair in words]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def byte_level(**parts: Any) -> Document:
    """Every byte, "hello" and " hello", the three bytes of a character in two tokens; <s>, </s>, <|im_end|>, <tool>."""
    word = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "hello")]
    vocabulary, merges = merged(list(SPELLING.values()), [*word, (SPELLING[0xE6], SPELLING[0xBC])])
    end = len(vocabulary)
    return document(
        {"type": "BPE", "vocab": vocabulary, "merges": merges},
        BYTES,
        [
            added(end, "<s>"),
            added(end + 1, "</s>"),
            added(end + 2, "<|im_end|>", rstrip=True),
            added(end + 3, "<tool>", special=False),
            added(end + 4, "<\xe9t\xe9>", special=False, normalized=True),
        ],
        **{
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": BYTES,
            **parts,
        },
    )


MARKS = ["<unk>", "<s>", "</s>"]
STRIPPED = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ],
}


def llama(*, decoder: Document = STRIPPED, **parts: Any) -> Document:
    """BPE with a space before words and bytes for what it does not know."""
    alphabet = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581helowrd"]
    words = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello"), ("\u2581", "\u2581")]
    vocabulary, merges = merged(alphabet, words)
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return document(
        {**model, "vocab": vocabulary, "merges": merges},
        decoder,
        [*(added(i, content) for i, content in enumerate(MARKS)), added(len(vocabulary), "<tool>", special=False)],
        **{"normalizer": LEGACY, **parts},
    )


def metaspace(scheme: str) -> Document:
    pre_tokenizer = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return llama(normalizer=None, pre_tokenizer=pre_tokenizer)


def gemma() -> Document:
    made = llama(normalizer=LEGACY["normalizers"][1])
    del made["decoder"]["decoders"][3]
    return made


def unigram() -> Document:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -4.0), ("\u2581hello", -2.5), ("hello", -3.0)]
    pieces += [("\u2581\u2581", -9.0)]
    pieces += [(letter, -6.0) for letter in "helowrd"]
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return document(
        {"type": "Unigram", "unk_id": 0, "vocab": [list(piece) for piece in pieces]},
        space,
        [added(i, content) for i, content in enumerate(MARKS)],
        pre_tokenizer=space,
    )


KINDS: Mapping[str, Callable[[], Document]] = {
    "byte-level": byte_level,
    "legacy": llama,
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "gemma": gemma,
    "unigram": unigram,
}


def write(folder: Path, tokenizer: Document | None, **files: Any) -> Path:
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def opened(folder: Path, tokenizer: Document | None, **files: Any) -> Tokenizer:
    return Tokenizer.from_folder(write(folder, tokenizer, **files))


def texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Library]:
    """Each kind of tokenizer, and what the library alone makes of the same file."""
    made = KINDS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    return opened(folder, made), Library.from_str(json.dumps(made))


TRICKY = [
    *"helowrd \n\u2581\xe9\u6f22\u00c9",
    "e\u0301",
    "  ",
    "hello",
    " hello",
    "\U0001f600",
    "<s>",
    "</s>",
    "<unk>",
    "<tool>",
]
TRICKY += ["<|im_end|>", "<\xe9t\xe9>", "<0x41>", "\x00", "\ufffd", "\u05e9\u05c1"]
tricky_text = st.lists(st.sampled_from(TRICKY), max_size=12).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=12
)


def cut(data: st.DataObject, ids: Sequence[int]) -> Iterator[Sequence[int]]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 2)))
    return (ids[start:end] for start, end in zip([0, *borders], [*borders, len(ids)], strict=True))


class TestEveryKind:
    @given(text=tricky_text)
    def test_ids_and_text_are_the_librarys(self, both: tuple[Tokenizer, Library], text: str) -> None:
        ours, library = both
        ids = ours.encode(text, add_special=False, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            # An added token is its own text; the library reads one of Latin letters as a spelling of bytes.
            expected = library.decode(ids, skip_special_tokens=skip)
            if "<\xe9t\xe9>" not in text:
                assert ours.decode(ids, skip_special=skip) == expected

    @given(text=tricky_text)
    def test_plain_text_holds_no_special_tokens(self, both: tuple[Tokenizer, Library], text: str) -> None:
        ours, _ = both
        ids = ours.encode(text, add_special=False, parse_special=False)
        unknown = 0 if ours.token_text(0) == "<unk>" else None
        assert not [i for i in ids if ours.is_special(i) and i != unknown]
        if unknown is None:
            assert ours.decode(ids) == unicodedata.normalize("NFC", text)
        elif unknown not in ids and text[:1] not in (" ", "\u2581") and "<tool>" not in text:
            assert ours.decode(ids) == text.replace("\u2581", " ")

    @given(data=st.data(), skip=st.booleans(), begins=st.booleans())
    def test_any_ids_in_any_cut(
        self, both: tuple[Tokenizer, Library], data: st.DataObject, skip: bool, begins: bool
    ) -> None:
        ours, library = both
        size = ours.vocab_size
        pick = st.integers(0, size + 3) | st.integers(0, 12) | st.integers(max(0, size - 12), size - 1)
        ids = data.draw(st.lists(pick, max_size=16))
        previous_id = None if begins else data.draw(st.integers(0, size + 3))
        stream = Detokenizer(ours, skip_special=skip, previous_id=previous_id)
        parts = [*(stream.feed(piece) for piece in cut(data, ids)), stream.finish()]
        whole = ours.decode(ids, skip_special=skip, previous_id=previous_id)
        assert "".join(parts) == whole
        raw = b"".join(ours.token_bytes(i) for i in ids)
        latin = any(ours.token_text(i) == "<\xe9t\xe9>" for i in ids)
        if begins and not latin and raw.decode("utf-8", "replace").encode() == raw:
            assert whole == library.decode(ids, skip_special_tokens=skip)

    @given(text=tricky_text | st.text("a \u3000\n<s>", max_size=40))
    def test_no_text_has_fewer_tokens_than_is_said(self, both: tuple[Tokenizer, Library], text: str) -> None:
        ours, _ = both
        for parse in (True, False):
            assert ours.fewest_tokens(text) <= len(ours.encode(text, add_special=False, parse_special=parse))

    def test_the_bound_is_one(self, both: tuple[Tokenizer, Library]) -> None:
        """A unigram model makes one unknown token of any text; of the others none does."""
        ours, _ = both
        if ours.token_text(5) == "hello":
            assert ours.fewest_tokens("x" * 10**6) == 0
        else:
            assert ours.fewest_tokens("x" * 10**6) > 10**4
        assert ours.fewest_tokens("") == 0


class TestFewestTokens:
    LONG = "x" * 10**6

    def test_spaces_that_a_token_takes_do_not_count(self, tmp_path: Path) -> None:
        tokenizer = opened(tmp_path, byte_level())
        text = "<|im_end|>" + " " * 10**6
        assert len(tokenizer.encode(text, add_special=False, parse_special=True)) == 1
        assert tokenizer.fewest_tokens(text) <= 1
        assert tokenizer.fewest_tokens(self.LONG) > 10**4

    @pytest.mark.parametrize(
        "parts",
        [
            {"normalizer": {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "x"}},
            {"normalizer": {"type": "Replace", "pattern": {"String": "xxxxxxxx"}, "content": "x"}},
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
            {"pre_tokenizer": {"type": "WhitespaceSplit"}},
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False},
                        BYTES,
                    ],
                }
            },
        ],
    )
    def test_no_bound_is_claimed_where_text_may_vanish(self, tmp_path: Path, parts: Document) -> None:
        assert opened(tmp_path, byte_level(**parts)).fewest_tokens(self.LONG) == 0

    def test_none_where_a_byte_has_no_token(self, tmp_path: Path) -> None:
        made = byte_level()
        made["model"]["vocab"]["a longer one"] = made["model"]["vocab"].pop("x")
        tokenizer = opened(tmp_path, made)
        assert tokenizer.encode(self.LONG, add_special=False, parse_special=True) == []
        assert tokenizer.fewest_tokens(self.LONG) == 0


class TestFirstSpace:
    @pytest.mark.parametrize(
        ("kind", "pieces", "after_mark", "after_tool"),
        [
            ("legacy", ["\u2581hello"], "hello", "hello"),
            ("always", ["\u2581hello"], "hello", "hello"),
            ("first", ["\u2581hello"], " hello", " hello"),
            ("gemma", ["hello"], " hello", " hello"),
            ("byte-level", ["hello"], None, None),
        ],
    )
    def test_an_answer(
        self, tmp_path: Path, kind: str, pieces: list[str], after_mark: str | None, after_tool: str | None
    ) -> None:
        """The space that encoding adds is no part of the text, wherever it adds one; the model's own spaces are."""
        tokenizer = opened(tmp_path, KINDS[kind]())
        assert texts(tokenizer, tokenizer.encode("hello", add_special=False, parse_special=True)) == pieces
        if after_mark is None:
            return
        (word,) = tokenizer.encode("hello", add_special=False, parse_special=True)[-1:]
        word = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\u2581hello")
        tool = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "<tool>")
        assert tokenizer.decode([word], previous_id=1) == after_mark
        assert tokenizer.decode([word], previous_id=tool) == after_tool
        assert tokenizer.decode([word, word], previous_id=word) == " hello hello"
        start = "" if kind != "gemma" else " "
        assert tokenizer.decode([word, 1, word]) == f"{start}hello hello"
        assert tokenizer.decode([1, word], skip_special=False) == "<s> hello"
        stream = Detokenizer(tokenizer)
        assert [stream.feed([i]) for i in (1, word, word)] == ["", f"{start}hello", " hello"]

    def test_all_spaces_of_the_first_token(self, tmp_path: Path) -> None:
        """As the library's Metaspace has it: of the first token each, and of no other."""
        tokenizer, library = opened(tmp_path, unigram()), Library.from_str(json.dumps(unigram()))
        two, hello = (library.token_to_id(token) for token in ("\u2581\u2581", "\u2581hello"))
        for ids in ([two, hello], [two, two, hello], [1, two, hello], [hello, two]):
            assert tokenizer.decode(ids) == library.decode(ids)
        assert tokenizer.decode([two, hello]) == " hello"

    def test_a_space_of_a_byte_token(self, tmp_path: Path) -> None:
        tokenizer = opened(tmp_path, llama())
        space = 3 + 0x20
        assert tokenizer.decode([space, space, space]) == "  "


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}


class TestMarks:
    def ids(self, tokenizer: Tokenizer, text: str) -> list[str]:
        return texts(tokenizer, tokenizer.encode(text, add_special=True, parse_special=True))

    def test_what_the_post_processor_adds(self, tmp_path: Path) -> None:
        processor = {"type": "Sequence", "processors": [BYTES, TEMPLATE]}
        tokenizer = opened(tmp_path, llama(post_processor=processor))
        assert self.ids(tokenizer, "hello") == ["<s>", "\u2581hello"]
        assert self.ids(tokenizer, "") == ["<s>"]

    def test_a_template_that_writes_it_gives_one(self, tmp_path: Path) -> None:
        tokenizer = opened(tmp_path, llama(post_processor=TEMPLATE))
        assert self.ids(tokenizer, "<s>hello") == ["<s>", "\u2581hello"]
        assert self.ids(tokenizer, "<s><s>hello") == ["<s>", "<s>", "\u2581hello"]

    def test_more_than_one_token_at_each_end(self, tmp_path: Path) -> None:
        processor = copy.deepcopy(TEMPLATE)
        processor["special_tokens"]["<s>"]["ids"] = [1, 0]
        processor["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
        processor["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
        tokenizer = opened(tmp_path, llama(post_processor=processor))
        whole = ["<s>", "<unk>", "\u2581hello", "</s>"]
        for text in ("hello", "<s><unk>hello", "<s><unk>hello</s>", "hello</s>"):
            assert self.ids(tokenizer, text) == whole
        assert self.ids(tokenizer, "<s>hello") == ["<s>", "<unk>", "<s>", "\u2581hello", "</s>"]

    @pytest.mark.parametrize("processor", [None, TEMPLATE])
    @pytest.mark.parametrize("adds_bos", [None, True, False])
    @pytest.mark.parametrize("adds_eos", [None, True, False])
    def test_what_the_folder_says(
        self, tmp_path: Path, processor: Document | None, adds_bos: bool | None, adds_eos: bool | None
    ) -> None:
        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": adds_bos, "add_eos_token": adds_eos}
        tokenizer = opened(tmp_path, llama(post_processor=processor), tokenizer_config=config)
        begin = adds_bos if adds_bos is not None else processor is not None
        assert self.ids(tokenizer, "hello") == [*["<s>"] * begin, "\u2581hello", *["</s>"] * bool(adds_eos)]
        assert (tokenizer.adds_bos, tokenizer.adds_eos) == (begin, bool(adds_eos))

    def test_a_token_that_is_not_there_cannot_be_added(self, tmp_path: Path) -> None:
        for key, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
            with pytest.raises(TokenizerError, match=rf"tokenizer_config.json: {key}: is true, but .*\({name}\)"):
                opened(tmp_path, llama(), tokenizer_config={key: True})
            opened(tmp_path, llama(), tokenizer_config={key: True, name: "<s>"})

    def test_end_tokens_of_all_files(self, tmp_path: Path) -> None:
        config = {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}
        tokenizer = opened(
            tmp_path,
            llama(),
            tokenizer_config=config,
            generation_config={"eos_token_id": [5, 7], "bos_token_id": 1},
            config={"eos_token_id": 9},
        )
        assert tokenizer.eos_ids == {2, 5, 7, 9}
        assert tokenizer.bos_id == 1
        assert tokenizer.is_special(7)
        assert tokenizer.decode([7, 2, 300]) == tokenizer.decode([300])
        deeper = opened(tmp_path, llama(), config={"text_config": {"eos_token_id": [4]}}, generation_config={})
        assert deeper.eos_ids == {2, 4}
        assert opened(tmp_path, llama(), tokenizer_config={}, config={}).eos_ids == set()

    def test_a_named_token_without_an_id_is_none(self, tmp_path: Path) -> None:
        config = {"pad_token": "[PAD]", "additional_special_tokens": ["[MORE]"], "eos_token": "</s>"}
        tokenizer = opened(tmp_path, llama(), tokenizer_config=config)
        assert tokenizer.vocab_size == len(llama()["model"]["vocab"]) + 1
        assert tokenizer.encode("[PAD]", add_special=False, parse_special=True)[-1] < tokenizer.vocab_size


class TestAddedTokens:
    def test_flags(self, tmp_path: Path) -> None:
        size = len(byte_level()["model"]["vocab"])
        tokenizer = opened(tmp_path, byte_level())
        ids = tokenizer.encode("hello<|im_end|> \n hello<tool>", add_special=False, parse_special=True)
        assert texts(tokenizer, ids) == ["hello", "<|im_end|>", "hello", "<tool>"]
        assert [i for i in range(size, tokenizer.vocab_size) if tokenizer.is_special(i)] == [size, size + 1, size + 2]
        assert tokenizer.decode(ids) == "hellohello<tool>"

    def test_its_text_is_its_own(self, tmp_path: Path) -> None:
        """Its letters are no spelling of bytes, though each of them could be one."""
        tokenizer = opened(tmp_path, byte_level())
        ids = tokenizer.encode("<\xe9t\xe9>", add_special=False, parse_special=True)
        assert len(ids) == 1
        assert tokenizer.decode(ids) == "<\xe9t\xe9>"

    def test_from_the_small_files(self, tmp_path: Path) -> None:
        size = len(llama()["model"]["vocab"])
        listed = {
            str(size + 2): {"content": "<call>", "special": True, "normalized": False},
            str(size + 1): {"content": "<think>", "special": False, "normalized": False},
            "2": {"content": "</s>", "special": True, "rstrip": True, "normalized": False},
        }
        # Being named as well takes no flag away.
        config = {"added_tokens_decoder": listed, "eos_token": "</s>"}
        tokenizer = opened(tmp_path, llama(), tokenizer_config=config)
        ids = tokenizer.encode("</s>  <think><call>", add_special=False, parse_special=True)
        assert texts(tokenizer, ids) == ["</s>", "<think>", "<call>"]
        assert tokenizer.decode(ids) == "<think>"
        assert tokenizer.vocab_size == size + 3
        (tmp_path / "tokenizer_config.json").unlink()
        older = opened(
            tmp_path, llama(), added_tokens={"<think>": size + 1}, special_tokens_map={"unk_token": "<think>"}
        )
        assert older.is_special(size + 1)
        assert older.encode("<think>", add_special=False, parse_special=True) == [size + 1]

    def test_ids_without_a_token(self, tmp_path: Path) -> None:
        made = llama()
        made["model"]["vocab"]["lone"] = 900
        made["added_tokens"] = made["added_tokens"][:3]
        tokenizer = opened(tmp_path, made)
        assert tokenizer.vocab_size == 901
        assert tokenizer.token_bytes(500) == tokenizer.token_bytes(10_000) == b""
        assert tokenizer.decode([500, 900, 10_000]) == "lone"

    def test_control_tokens_of_a_vocabulary_that_merges_to_them(self, tmp_path: Path) -> None:
        made = llama()
        vocabulary, merges = made["model"]["vocab"], made["model"]["merges"]
        for token in ("<", "s", ">", "<s", "\u2581<s>"):
            vocabulary[token] = len(vocabulary)
        merges += [["<", "s"], ["<s", ">"], ["\u2581", "<s>"]]
        made["added_tokens"] = made["added_tokens"][:3]
        for whole_words in (False, True):
            made["model"]["ignore_merges"] = whole_words
            tokenizer = opened(tmp_path, made)
            plain = tokenizer.encode("hello<s>", add_special=False, parse_special=False)
            assert texts(tokenizer, plain) == ["\u2581hello", "<s", ">"]
            assert tokenizer.encode("<s>", add_special=False, parse_special=True) == [1]


class TestModelText:
    CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"

    async def prompt(self, model: ModelText, **request: Any) -> list[str]:
        return texts(model.tokenizer, await model.prompt_ids(Request(**request), 1000))

    @pytest.mark.parametrize(("template", "begin"), [(CHAT, ["<s>"]), (CHAT.replace("{{ bos_token }}", ""), [])])
    def test_a_chat_is_what_the_template_writes(self, tmp_path: Path, template: str, begin: list[str]) -> None:
        import asyncio

        config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
        write(tmp_path, llama(), tokenizer_config={**config, "add_eos_token": True})
        text = ModelText.from_folder(tmp_path, None)
        chat = asyncio.run(self.prompt(text, messages=({"role": "user", "content": "hello"},)))
        assert chat == [*begin, "\u2581hello", "</s>"]
        assert asyncio.run(self.prompt(text, text="hello")) == ["<s>", "\u2581hello", "</s>"]
        text.close()

    def test_from_a_checkpoint(self, tmp_path: Path) -> None:
        write(tmp_path, llama(), generation_config={"temperature": 0.5})
        size = len(llama()["model"]["vocab"]) + 1
        checkpoint: Any = SimpleNamespace(text_folder=tmp_path, spec=SimpleNamespace(vocab_size=size + 60), metadata={})
        text = ModelText.from_checkpoint(checkpoint)
        assert (text.num_ids, text.generation_defaults.temperature) == (size, 0.5)
        text.close()
        checkpoint.spec.vocab_size = size
        ModelText.from_checkpoint(checkpoint).close()
        checkpoint.spec.vocab_size = size - 1
        with pytest.raises(
            TokenizerError, match=rf"the id {size - 1} \('<tool>'\), but .* ends at {size - 2}: .*another"
        ):
            ModelText.from_checkpoint(checkpoint)

    def test_an_end_token_past_the_vocabulary(self, tmp_path: Path) -> None:
        write(tmp_path, llama(), config={"eos_token_id": 10**6})
        with pytest.raises(TokenizerError, match="the id 1000000"):
            ModelText.from_folder(tmp_path, 1000)

    def test_a_gguf_vocabulary_that_is_too_large(self) -> None:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
            "tokenizer.ggml.merges": ["a b"],
        }
        checkpoint: Any = SimpleNamespace(text_folder=None, spec=SimpleNamespace(vocab_size=2), metadata=metadata)
        with pytest.raises(TokenizerError, match=r"tokenizer.ggml.tokens: has a token with the id 2 \('ab'\)"):
            ModelText.from_checkpoint(checkpoint)

    def test_generation_defaults(self, tmp_path: Path) -> None:
        given_values = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0, "repetition_penalty": 1.05}
        write(tmp_path, llama(), generation_config={**given_values, "do_sample": True, "max_length": 4096})
        assert ModelText.from_folder(tmp_path, None).generation_defaults == GenerationDefaults(
            0.7, 20, 0.8, 0.0, 1.05, source="generation_config.json"
        )
        write(tmp_path, llama(), generation_config={})
        assert ModelText.from_folder(tmp_path, None).generation_defaults == GenerationDefaults()


class TestNames:
    def test_are_never_paths(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        write(outside, unigram())
        folder = tmp_path / "model"
        folder.mkdir()
        config = {
            key: str(outside / "tokenizer.json")
            for key in ("tokenizer_file", "vocab_file", "merges_file", "name_or_path", "chat_template_file")
        }
        config["fast_tokenizer_files"] = ["../outside/tokenizer.json"]
        assert opened(folder, llama(), tokenizer_config=config).vocab_size > 200

    def test_the_users_own_links_are_followed(self, tmp_path: Path) -> None:
        outside = tmp_path / "blobs"
        outside.mkdir()
        write(outside, llama())
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to(outside / "tokenizer.json")
        assert Tokenizer.from_folder(folder).vocab_size > 200


class TestTruncation:
    def test_and_padding_are_not_the_files_to_decide(self, tmp_path: Path) -> None:
        made = llama()
        made["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
        made["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, **pad}
        tokenizer = opened(tmp_path, made)
        assert len(tokenizer.encode("hello" * 10, add_special=True, parse_special=True)) == 10


class TestMissing:
    def test_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerError, match=r"has no tokenizer.json and no tokenizer.model. .*save_pretrained"):
            Tokenizer.from_folder(tmp_path)
        with pytest.raises(TokenizerError, match=r"has no tokenizer.json"):
            Tokenizer.from_folder(tmp_path / "nowhere")

    def test_a_program(self, tmp_path: Path) -> None:
        config = {"auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}}
        (tmp_path / "tokenization_evil.py").write_text("raise SystemExit(1)")
        with pytest.raises(TokenizerError, match=r"tokenizer_config.json: auto_map: .*programs of a model are not run"):
            opened(tmp_path, None, tokenizer_config=config)
        assert opened(tmp_path, llama()).vocab_size > 200

    @pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"])
    def test_other_formats(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("{}")
        with pytest.raises(TokenizerError, match=rf"{name}: holds .*, which is not supported. .*save_pretrained"):
            Tokenizer.from_folder(tmp_path)


def changed(made: Document, path: str, value: Any) -> Document:
    """`made` with the value at a dotted path, "-" to take it away."""
    made = copy.deepcopy(made)
    place: Any = made
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        place = place[step]
    if value == "-":
        del place[last]
    else:
        place[last] = value
    return made


DAMAGE = [
    (llama, "model", "-", "model", "is missing: the file holds no tokenizer"),
    (llama, "model", [], "model", "is a list of 0 entries, not an object"),
    (llama, "model.type", "WordPiece", "model.type", "'WordPiece' is not supported; BPE and Unigram are"),
    (llama, "model.type", 3, "model.type", "is 3, not a text"),
    (llama, "model.vocab", "-", "model.vocab", "is missing"),
    (llama, "model.vocab", {}, "model.vocab", "is missing or empty"),
    (llama, "model.vocab", [["a", 1]], "model.vocab", "is a list of 1 entries, not an object"),
    (llama, "model.vocab.h", -1, "model.vocab['h']", "is -1, not a token id from 0 to 4194303"),
    (llama, "model.vocab.h", 2**40, "model.vocab['h']", "is 1099511627776, not a token id"),
    (llama, "model.vocab.h", 10**400, "model.vocab['h']", "is a huge number, not a token id"),
    (llama, "model.vocab.h", True, "model.vocab['h']", "is true, not a token id"),
    (llama, "model.vocab.h", 1.0, "model.vocab['h']", "is 1.0, not a token id"),
    (llama, "model.vocab.h", 5, "model.vocab['h']", "is 5, and so is vocab['<0x02>']"),
    (llama, "model.merges", "-", "model.merges", "is missing"),
    (llama, "model.merges.1", ["l", "q"], "model.merges[1]", "needs the token 'q', which is not in vocab"),
    (llama, "model.merges.1", "o o", "model.merges[1]", "needs the token 'oo', which is not in vocab"),
    (llama, "model.merges.1", "a b c", "model.merges[1]", "is 'a b c', not two tokens"),
    (llama, "model.merges.1", ["l"], "model.merges[1]", "is a list of 1 entries, not two tokens"),
    (llama, "model.merges.1", ["l", 1], "model.merges[1]", "not two tokens"),
    (llama, "model.merges.1", None, "model.merges[1]", "is null, not two tokens"),
    (llama, "model.dropout", 0.1, "model.dropout", "is 0.1: it would make the same text other tokens each time"),
    (llama, "model.continuing_subword_prefix", "##", "model.continuing_subword_prefix", "is '##', which is not"),
    (llama, "model.end_of_word_suffix", "</w>", "model.end_of_word_suffix", "is '</w>', which is not supported"),
    (llama, "model.byte_fallback", "yes", "model.byte_fallback", "is 'yes', not true or false"),
    (unigram, "model.vocab", {}, "model.vocab", "is an object of 0 entries, not a list"),
    (unigram, "model.vocab.3", ["", 0.0], "model.vocab[3]", "not a token with its score"),
    (unigram, "model.vocab.3", ["a", "b"], "model.vocab[3]", "not a token with its score"),
    (unigram, "model.vocab.3", "a", "model.vocab[3]", "is 'a', not a token with its score"),
    (unigram, "model.vocab.3", ["hello", 1.0], "model.vocab[5]", "is 'hello', and so is vocab[3]"),
    (unigram, "model.unk_id", "-", "model.unk_id", "is null, not an id from 0 to 13"),
    (unigram, "model.unk_id", 14, "model.unk_id", "is 14, not an id from 0 to 13"),
    (llama, "added_tokens", {}, "added_tokens", "is an object of 0 entries, not a list"),
    (llama, "added_tokens.0", "x", "added_tokens[0]", "is 'x', not an object"),
    (llama, "added_tokens.0.id", "0", "added_tokens[0].id", "is '0', not an integer"),
    (llama, "added_tokens.0.id", -1, "added_tokens[0].id", "is -1, not a token id"),
    (llama, "added_tokens.0.id", 7, "added_tokens[0].id", "is 7, but the token '<unk>' gets the id 0"),
    (llama, "added_tokens.3.id", 5000, "added_tokens[3].id", "is 5000, but the token '<tool>' gets the id"),
    (llama, "added_tokens.0.content", "-", "added_tokens[0].content", "is missing"),
    (llama, "added_tokens.0.special", 1, "added_tokens[0].special", "is 1, not true or false"),
    (llama, "added_tokens.0.content", "\ud800", "added_tokens[0].content", "holds half a surrogate pair"),
    (llama, "decoder", None, "decoder", "is missing: without one, tokens have no text"),
    (llama, "decoder", {"type": "WordPiece", "prefix": "##"}, "decoder.type", "'WordPiece' here is not supported"),
    (llama, "decoder", {"type": "Sequence", "decoders": []}, "decoder.decoders", "is empty"),
    (llama, "decoder.decoders.0.pattern", {"Regex": "x"}, "decoder.decoders[0].pattern", "is not supported; a text"),
    (llama, "decoder.decoders.3.stop", 1, "decoder.decoders[3].type", "of anything but one space at the beginning"),
    (llama, "decoder.decoders.2", "-", "decoder.decoders[2].type", "'Strip' without 'Fuse' before it"),
    (llama, "decoder.decoders.1", {"type": "Fuse"}, "decoder.decoders[2].type", "'Fuse' here is not supported"),
    (llama, "post_processor", {"type": "RobertaProcessing"}, "post_processor.type", "'RobertaProcessing' is not"),
    (llama, "post_processor", {"type": "TemplateProcessing", "single": []}, "post_processor.single", "has no place"),
    (
        llama,
        "post_processor",
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}]},
        "post_processor.single[0].SpecialToken.id",
        "is '<x>', which is not in special_tokens",
    ),
    (
        llama,
        "post_processor",
        {**TEMPLATE, "special_tokens": {"<s>": {"id": "<s>", "ids": [4000], "tokens": []}}},
        "post_processor",
        "adds 4000, which is no token's id",
    ),
    (llama, "version", "9.0", None, "the tokenizers library refuses it: Unknown tokenizer version '9.0'"),
    (llama, "normalizer", {"type": "Nonsense"}, None, "the tokenizers library refuses it"),
    (
        llama,
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        None,
        "the tokenizers library refuses it",
    ),
]

SMALL_DAMAGE = [
    ("tokenizer_config", {"bos_token": 3}, "bos_token", "is 3, not a token"),
    ("tokenizer_config", {"eos_token": {"lstrip": True}}, "eos_token.content", "is missing"),
    ("tokenizer_config", {"eos_token": {"content": ["x"]}}, "eos_token.content", "is a list of 1 entries, not a text"),
    ("tokenizer_config", {"add_bos_token": 1}, "add_bos_token", "is 1, not true or false"),
    ("tokenizer_config", {"additional_special_tokens": "x"}, "additional_special_tokens", "is 'x', not a list"),
    ("tokenizer_config", {"additional_special_tokens": [1]}, "additional_special_tokens[0]", "is 1, not a token"),
    ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder", "not an object"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder.'x'", "is not a token id"),
    ("tokenizer_config", {"added_tokens_decoder": {"9999999": {}}}, "added_tokens_decoder.'9999999'", "is not"),
    ("tokenizer_config", {"added_tokens_decoder": {"-1": {}}}, "added_tokens_decoder.'-1'", "is not a token id"),
    (
        "tokenizer_config",
        {"added_tokens_decoder": {"7": {"content": "<x>"}}},
        "added_tokens_decoder.'<x>'",
        "is 7, but the token '<x>' gets the id",
    ),
    ("special_tokens_map", {"unk_token": [1]}, "unk_token", "is a list of 1 entries, not a token"),
    ("added_tokens", {"<x>": -1}, "'<x>'", "is -1, not a token id from 0 to 4194303"),
    ("added_tokens", {"<x>": "1"}, "'<x>'", "is '1', not a token id"),
    ("added_tokens", {"<x>": 500, "<y>": 500}, "'<y>'", "is 500, and so is '<x>'"),
    ("generation_config", {"eos_token_id": "2"}, "eos_token_id", "is '2', not a token id or a list of them"),
    ("generation_config", {"eos_token_id": [2, -1]}, "eos_token_id", "not a token id"),
    ("generation_config", {"temperature": -1}, "temperature", "is -1; it is 0 or more"),
    ("generation_config", {"temperature": "hot"}, "temperature", "is 'hot', not a number"),
    ("generation_config", {"temperature": 1e300}, "temperature", "not a number"),
    ("generation_config", {"top_p": 0}, "top_p", "is 0; it is above 0 and at most 1"),
    ("generation_config", {"top_p": 1.5}, "top_p", "is 1.5; it is above 0 and at most 1"),
    ("generation_config", {"top_k": 2.5}, "top_k", "is 2.5, not an integer"),
    ("generation_config", {"top_k": -2}, "top_k", "is -2; it is 0 or more, or -1"),
    ("generation_config", {"min_p": 2}, "min_p", "is 2; it is 0 or more and at most 1"),
    ("generation_config", {"repetition_penalty": 0}, "repetition_penalty", "is 0; it is above 0"),
    ("config", {"eos_token_id": {}}, "eos_token_id", "is an object of 0 entries, not a token id"),
    ("config", {"text_config": 1}, "text_config", "is 1, not an object"),
]


class TestDamage:
    @pytest.mark.parametrize(
        ("made", "path", "value", "field", "problem"),
        DAMAGE,
        ids=lambda value: getattr(value, "__name__", ascii(value)[:60]),
    )
    def test_is_named(
        self, tmp_path: Path, made: Callable[[], Document], path: str, value: Any, field: str | None, problem: str
    ) -> None:
        with pytest.raises(TokenizerError) as caught:
            opened(tmp_path, changed(made(), path, value))
        file = str(tmp_path / "tokenizer.json")
        assert caught.value.field == (file if field is None else f"{file}: {field}")
        assert problem in caught.value.problem
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    @pytest.mark.parametrize(("file", "content", "field", "problem"), SMALL_DAMAGE)
    def test_of_a_small_file_is_named(
        self, tmp_path: Path, file: str, content: Document, field: str, problem: str
    ) -> None:
        with pytest.raises(TokenizerError) as caught:
            opened(tmp_path, llama(), **{file: content})
        assert caught.value.field == f"{tmp_path / file}.json: {field}"
        assert problem in caught.value.problem

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "is no JSON: Expecting value in line 1, column 1"),
            (b"{", "is no JSON"),
            (b"[]", "is a list of 0 entries, not an object"),
            (b"\xff\xfe{}", "is no UTF-8 text: byte 0 is wrong"),
            (b'{"a": NaN}', "NaN is no number"),
            (b'{"a": ' + b"1" * 5000 + b"}", "is no JSON"),
            (b'{"model": ' + b"[" * 200_000, "is nested too deeply"),
            (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "is nested too deeply"),
        ],
    )
    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    def test_no_json(self, tmp_path: Path, name: str, content: bytes, problem: str) -> None:
        write(tmp_path, llama())
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_folder(tmp_path)
        assert caught.value.field == str(tmp_path / name)
        assert problem in caught.value.problem

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "tokenizer.model"])
    def test_a_file_that_is_too_large_is_not_read(self, tmp_path: Path, name: str) -> None:
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 38)
        with pytest.raises(TokenizerError, match=rf"{name}: has more than \d+ MiB, which no file of its kind needs"):
            Tokenizer.from_folder(tmp_path)

    def test_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "tokenizer_config.json")
        with pytest.raises(TokenizerError, match=r"tokenizer_config.json: is no file"):
            opened(tmp_path, llama())
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.json").mkdir()
        with pytest.raises(TokenizerError, match=r"tokenizer.json: is no file"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / "tokenizer.json").rmdir()
        (tmp_path / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
        with pytest.raises(TokenizerError, match=r"tokenizer.json: cannot be read: Too many levels of symbolic links"):
            Tokenizer.from_folder(tmp_path)

    def test_a_nest_of_steps(self, tmp_path: Path) -> None:
        many = {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 100}
        with pytest.raises(TokenizerError, match="has more than 64 steps"):
            opened(tmp_path, llama(decoder=many))
        processors = {"type": "Sequence", "processors": [BYTES] * 100}
        with pytest.raises(TokenizerError, match="has more than 64 steps or tokens"):
            opened(tmp_path, llama(post_processor=processors))

    def test_an_assertion_of_the_library(self, tmp_path: Path) -> None:
        """It raises what no `except Exception` catches."""
        tokenizer = opened(tmp_path, llama(pre_tokenizer={"type": "FixedLength", "length": 0}))
        with pytest.raises(TokenizerError, match="the tokenizers library fails on a text"):
            tokenizer.encode("hello", add_special=True, parse_special=True)

    def test_an_expression_without_end(self, tmp_path: Path) -> None:
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        tokenizer = opened(tmp_path, llama(pre_tokenizer=split))
        with pytest.raises(TokenizerError, match="the tokenizers library fails on a text"):
            tokenizer.encode("a" * 5000 + "b", add_special=True, parse_special=True)

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_damage_is_one_clear_error(self, tmp_path: Path, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from([byte_level, llama, unigram]))()
        place: Any = made
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 3)) == 0:
                break
            place = inner
        kinds = ["Sequence", "Replace", "Metaspace", "Strip", "NFKC", "Unigram", "TemplateProcessing", "Precompiled"]
        scalar = st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats(allow_nan=False) | st.text(max_size=3)
        scalar |= st.sampled_from([*kinds, "hello", "<s>"])
        junk = scalar | st.lists(scalar, max_size=3) | st.dictionaries(st.sampled_from(["type", "id", "a"]), scalar)
        if data.draw(st.booleans()):
            place[key] = data.draw(junk)
        else:
            del place[key]
        try:
            tokenizer = opened(tmp_path, made)
            for parse in (True, False):
                ids = tokenizer.encode("hi <s>\xe9\n", add_special=True, parse_special=parse)
                assert all(0 <= i < tokenizer.vocab_size for i in ids)
                tokenizer.decode(ids)
        except TokenizerError:
            pass
