"""The tokenizer of a Hugging Face folder that has only SentencePiece's tokenizer.model."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Library

from shardline.cluster import TokenizerError
from shardline.cluster.text.charsmap import Charsmap, DamagedCharsmapError
from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.literal_tokens import Literal, LiteralTokens
from shardline.cluster.text.normalization import SentencePieceNormalizer
from shardline.cluster.text.sentencepiece_tokenizer import sentencepiece_tokenizer
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.cluster.text.unigram_pieces import UnigramModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2

Piece = tuple[str, float, int]


def varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | float | bytes | str) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def model(pieces: Sequence[Piece], trainer: Mapping[int, Any], normalizer: Mapping[int, Any]) -> bytes:
    """A model file, written by what sentencepiece_model.proto says."""
    message = b""
    for text, score, kind in pieces:
        message += field(1, field(1, text) + field(2, score) + (field(3, kind) if kind != NORMAL else b""))
    message += field(2, b"".join(field(number, value) for number, value in trainer.items()))
    return message + field(3, b"".join(field(number, value) for number, value in normalizer.items()))


MARKS: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES: list[Piece] = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
WORDS: list[Piece] = [
    (text, -float(rank), NORMAL)
    for rank, text in enumerate(["he", "ll", "hell", "hello", "\u2581hello", "\u2581\u2581", "\u2581w", "or"], 1)
]
LETTERS: list[Piece] = [(letter, -20.0 - rank, NORMAL) for rank, letter in enumerate("\u2581helowrdab")]
AS_IS = {4: 0}


def llama_bytes(*more: Piece, trainer: Mapping[int, Any] | None = None, normalizer: Mapping[int, Any] = AS_IS) -> bytes:
    return model([*MARKS, *BYTES, *WORDS, *LETTERS, *more], {3: BPE, 35: 1, **(trainer or {})}, normalizer)


def opened(folder: Path, content: bytes, **files: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(content)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return Tokenizer.from_folder(folder)


def pieces(tokenizer: Tokenizer, text: str, *, special: bool = False, parse: bool = True) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special=special, parse_special=parse)]


class TestBpe:
    def test_pieces(self, tmp_path: Path) -> None:
        tokenizer = opened(tmp_path, llama_bytes())
        assert pieces(tokenizer, "hello wor") == ["\u2581hello", "\u2581w", "or"]
        assert pieces(tokenizer, "  hell") == ["\u2581\u2581", "\u2581", "hell"]
        assert pieces(tokenizer, "\xe9\n") == ["\u2581", "<0xC3>", "<0xA9>", "<0x0A>"]
        assert pieces(tokenizer, "<0x0A>")[1:5] == ["<0x3C>", "<0x30>", "<0x78>", "<0x30>"]
        assert pieces(tokenizer, "") == []

    def test_marks(self, tmp_path: Path) -> None:
        tokenizer = opened(tmp_path, llama_bytes())
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
        assert pieces(tokenizer, "hello", special=True) == ["<s>", "\u2581hello"]
        assert pieces(tokenizer, "<s>hello</s>", special=True) == ["<s>", "\u2581hello", "</s>"]
        plain = pieces(tokenizer, "<s>", special=True, parse=False)
        assert plain[0] == "<s>"
        assert "<s>" not in plain[1:]
        without = opened(tmp_path, llama_bytes(), tokenizer_config={"add_bos_token": False, "add_eos_token": True})
        assert pieces(without, "hello", special=True) == ["\u2581hello", "</s>"]
        renumbered = opened(tmp_path, llama_bytes(trainer={41: 2, 42: 1}), tokenizer_config={})
        assert (renumbered.bos_id, renumbered.eos_ids) == (2, {1})
        none = opened(tmp_path, llama_bytes(trainer={41: -1, 42: -1}))
        assert (none.bos_id, none.eos_ids, none.adds_bos) == (None, frozenset(), False)
        named = opened(tmp_path, llama_bytes(), tokenizer_config={"eos_token": "<s>", "bos_token": "nothing"})
        assert (named.bos_id, named.eos_ids, named.adds_bos) == (None, {1}, False)

    @pytest.mark.parametrize(
        ("config", "text", "expected", "answer"),
        [
            ({}, "<s>hello</s>hello", ["<s>", "\u2581hello", "</s>", "\u2581hello"], "hello"),
            ({"legacy": True}, "<s>hello", ["<s>", "\u2581hello"], "hello"),
            ({"legacy": False}, "<s>hello</s>hello", ["<s>", "hello", "</s>", "hello"], " hello"),
            ({"legacy": False}, "hello</s>hello", ["\u2581hello", "</s>", "hello"], " hello"),
            ({"add_prefix_space": False}, "hello</s>hello", ["hello", "</s>", "hello"], " hello"),
        ],
    )
    def test_where_a_space_is_added(
        self, tmp_path: Path, config: Mapping[str, Any], text: str, expected: list[str], answer: str
    ) -> None:
        tokenizer = opened(tmp_path, llama_bytes(), tokenizer_config=config)
        assert pieces(tokenizer, text) == expected
        (word,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\u2581hello")
        assert tokenizer.decode([word, word], previous_id=2) == f"{answer} hello"
        assert tokenizer.decode([word], previous_id=word) == " hello"
        assert tokenizer.decode([word]) == (" hello" if "add_prefix_space" in config else "hello")

    def test_a_users_own_pieces_are_whole(self, tmp_path: Path) -> None:
        """Found where spaces are written as signs already, and never merged over."""
        own = [("\u2581\u2581\u2581", 0.0, USER_DEFINED), ("lo", 0.0, USER_DEFINED), ("<t>", 0.0, USER_DEFINED)]
        tokenizer = opened(tmp_path, llama_bytes(*own, normalizer={3: 0, 4: 0}))
        assert pieces(tokenizer, "a    hello") == ["a", "\u2581\u2581\u2581", "\u2581", "he", "l", "lo"]
        for parse in (True, False):
            assert pieces(tokenizer, "he<t>he", parse=parse) == ["he", "<t>", "he"]
        (own_id,) = tokenizer.encode("<t>", add_special=False, parse_special=True)
        assert not tokenizer.is_special(own_id)

    def test_without_bytes(self, tmp_path: Path) -> None:
        content = model([*MARKS, *LETTERS], {3: BPE}, AS_IS)
        tokenizer = opened(tmp_path, content)
        assert pieces(tokenizer, "h\u6f22\u5b57\xe9h\xe9") == ["\u2581", "h", "<unk>", "h", "<unk>"]
        ids = tokenizer.encode("h\u6f22h", add_special=False, parse_special=True)
        assert tokenizer.decode(ids) == "hh"

    @given(text=st.text(st.sampled_from("helowrdab \n\xe9\u6f22\U0001f600<"), max_size=20))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_text_comes_back(self, tmp_path: Path, text: str) -> None:
        tokenizer = opened(tmp_path, llama_bytes())
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids) == text
        stream = Detokenizer(tokenizer)
        assert "".join(stream.feed([i]) for i in ids) + stream.finish() == text
        assert tokenizer.fewest_tokens(text) <= len(ids)


class TestAddedTokens:
    def test_come_after_the_vocabulary(self, tmp_path: Path) -> None:
        size = len(MARKS) + len(BYTES) + len(WORDS) + len(LETTERS)
        flags = {"normalized": False, "lstrip": False, "rstrip": True, "single_word": False}
        listed = {
            str(size): {"content": "<|im_start|>", "special": True, **flags},
            str(size + 1): {"content": "<tool>", "special": False, **flags, "rstrip": False},
            "1": {"content": "<s>", "special": True, **flags, "rstrip": False},
        }
        tokenizer = opened(tmp_path, llama_bytes(), tokenizer_config={"added_tokens_decoder": listed})
        assert tokenizer.vocab_size == size + 2
        assert pieces(tokenizer, "<|im_start|> \nhello<tool>") == ["<|im_start|>", "\u2581hello", "<tool>"]
        assert pieces(tokenizer, "<|im_start|><tool>", parse=False)[-1] == "<tool>"
        assert tokenizer.decode([size, size + 1]) == "<tool>"
        (tmp_path / "tokenizer_config.json").unlink()
        older = opened(
            tmp_path,
            llama_bytes(),
            added_tokens={"<|im_end|>": size, "<x>": size + 1},
            special_tokens_map={"eos_token": "<|im_end|>"},
        )
        assert older.eos_ids == {size}
        assert pieces(older, "<x><|im_end|>") == ["<x>", "<|im_end|>"]

    def test_take_the_place_of_a_piece(self, tmp_path: Path) -> None:
        """As models do that gave unused pieces a meaning."""
        size = len(MARKS) + len(BYTES)
        listed = {str(size): {"content": "<|call|>", "special": True, "normalized": False}}
        tokenizer = opened(tmp_path, llama_bytes(), tokenizer_config={"added_tokens_decoder": listed})
        assert pieces(tokenizer, "<|call|>he") == ["<|call|>", "\u2581", "h", "e"]
        assert tokenizer.encode("<|call|>", add_special=False, parse_special=True) == [size]

    @pytest.mark.parametrize(
        ("listed", "problem"),
        [
            ({"9000": {"content": "<x>"}}, "'<x>': has the id 9000, but the ids before it go to 276"),
            ({"10": {"content": "<x>"}}, "'<x>': takes the id 10 of a byte token"),
            ({"277": {"content": ""}}, "277: is a token without text"),
        ],
    )
    def test_that_do_not_fit(self, tmp_path: Path, listed: Mapping[str, Any], problem: str) -> None:
        with pytest.raises(TokenizerError) as caught:
            opened(tmp_path, llama_bytes(), tokenizer_config={"added_tokens_decoder": listed})
        assert problem in str(caught.value)
        assert str(tmp_path / "tokenizer_config.json") in str(caught.value)


LITERALS = [
    Literal("<a>", 1, special=True),
    Literal("<a>>", 2, special=True, lstrip=True),
    Literal("<b>", 3, special=True, rstrip=True),
    Literal("c", 4, special=True, single_word=True),
    Literal("<d>", 5, special=True, lstrip=True, rstrip=True, single_word=True),
]


class TestLiterals:
    @given(
        text=st.lists(st.sampled_from([*" \n\u3000\x1cac_1>\xe9.", "<a>", "<a>>", "<b>", "<d>"]), max_size=14).map(
            "".join
        )
    )
    def test_are_found_as_the_tokenizers_library_finds_them(self, text: str) -> None:
        library = Library(models.WordLevel({"?": 0}, unk_token="?"))
        for literal in LITERALS:
            flags = {"lstrip": literal.lstrip, "rstrip": literal.rstrip, "single_word": literal.single_word}
            library.add_special_tokens([AddedToken(literal.name, normalized=False, **flags)])
        found = [token_id or 0 for _, token_id in LiteralTokens(LITERALS).cut(text)]
        assert found == library.encode(text).ids

    def test_nothing_is_taken_twice(self) -> None:
        """The first takes the spaces with which the second begins."""
        literals = [Literal("<b>", 1, special=True, rstrip=True), Literal(" x", 2, special=True)]
        assert list(LiteralTokens(literals).cut("a<b>  x x")) == [("a", None), ("<b>", 1), ("x", None), (" x", 2)]
        assert list(LiteralTokens([]).cut("a")) == [("a", None)]
        assert list(LiteralTokens(literals).cut("")) == []


def double_array(rules: Mapping[str, str]) -> bytes:
    """A `precompiled_charsmap`: a trie whose every node has 256 places for children, with values at the first."""
    replacements = b"".join(new.encode() + b"\0" for new in rules.values())
    starts = itertools.accumulate((len(new.encode()) + 1 for new in rules.values()), initial=0)
    values = {key.encode(): start for key, start in zip(rules, starts, strict=False)}
    prefixes = sorted({key[:end] for key in values for end in range(len(key) + 1)}, key=lambda p: (len(p), p))
    block = {prefix: 1 + i for i, prefix in enumerate(prefixes)}
    units = np.zeros(256 * (len(prefixes) + 1), dtype="<u4")
    place = {b"": 0}
    for prefix in prefixes[1:]:
        place[prefix] = 256 * block[prefix[:-1]] + prefix[-1]
    for prefix, index in place.items():
        base = 256 * block[prefix]
        # Offsets of whole blocks are written without their low eight bits.
        unit = ((index ^ base) >> 8) << 10 | 0x200 if (index ^ base) & 0xFF == 0 else (index ^ base) << 10
        units[index] = unit | (prefix[-1] if prefix else 0) | (0x100 if prefix in values else 0)
        if prefix in values:
            units[base] = 0x80000000 | values[prefix]
    return struct.pack("<I", units.nbytes) + units.tobytes() + replacements


RULES = {
    "A": "a",
    "\u3000": " ",
    "\ufb01": "fi",
    "e\u0301": "\xe9",
    "\xad": "",
    "a\u0308": "\xe4",
    "a\u0308\u0304": "\u01df",
    "\t": "  ",
}


class TestNormalization:
    def test_rules(self) -> None:
        charsmap = Charsmap(double_array(RULES))
        assert charsmap
        for old, new in RULES.items():
            assert charsmap.longest(f"x{old}y".encode(), 1) == (new, 1 + len(old.encode()))
        assert charsmap.longest(b"b", 0) is None
        assert charsmap.longest("a\u0308".encode()[:2], 0) is None
        assert not Charsmap(b"")

    @given(
        text=st.text(st.sampled_from("Aab \u3000\ufb01e\u0301\xad\u0308\u0304\t\u2581<>"), max_size=16),
        removes=st.booleans(),
        prefix=st.booleans(),
    )
    def test_equals_its_definition(self, text: str, removes: bool, prefix: bool) -> None:
        """Literals first, then the longest rule, then the character; spaces last."""
        literals = ["<A>", "<A", "\u3000b"]
        normalizer = SentencePieceNormalizer(Charsmap(double_array(RULES)), literals, removes)
        parts: list[str] = []
        rest = text
        while rest:
            literal = max((x for x in literals if rest.startswith(x)), key=len, default=None)
            rule = max((x for x in RULES if rest.startswith(x)), key=len, default=None)
            taken = literal or rule or rest[0]
            parts.append(literal or RULES.get(rule or "", rest[0]) if literal or rule else rest[0])
            rest = rest[len(taken) :]
        if removes:
            while parts and parts[0] == " ":
                del parts[0]
            expected, after_space = "", True
            for part in parts:
                part = part.lstrip(" ") if after_space else part
                expected += part
                after_space = part.endswith(" ") if part else after_space
            expected = ("\u2581" * prefix + expected.replace(" ", "\u2581")).rstrip("\u2581") if parts else ""
        else:
            expected = ("\u2581" * prefix if text else "") + "".join(parts).replace(" ", "\u2581")
        assert normalizer.normalize(text, prefix) == expected

    def test_without_rules(self) -> None:
        normalizer = SentencePieceNormalizer(Charsmap(b""), [], False)
        assert normalizer.normalize(" a  A ", True) == "\u2581\u2581a\u2581\u2581A\u2581"
        assert SentencePieceNormalizer(Charsmap(b""), [], True).normalize("  a   b ", True) == "\u2581a\u2581b"
        assert SentencePieceNormalizer(Charsmap(b""), [], True).normalize("   ", True) == ""

    def test_in_a_tokenizer(self, tmp_path: Path) -> None:
        content = llama_bytes(normalizer={2: double_array({**RULES, "W": "w"}), 3: 1, 4: 1})
        tokenizer = opened(tmp_path, content)
        assert pieces(tokenizer, " \u3000 hello\u3000 Wor \t") == ["\u2581hello", "\u2581w", "or"]
        assert tokenizer.fewest_tokens("\xad" * 10**6) == 0
        ids = tokenizer.encode("hello", add_special=False, parse_special=True)
        space = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == "\u2581")
        assert tokenizer.decode([1, space, space, *ids, *ids]) == "hello hello"

    @pytest.mark.parametrize(
        ("blob", "problem"),
        [
            (b"\0", "a trie of 0 bytes in 1 bytes"),
            (struct.pack("<I", 2**31) + bytes(8), "a trie of 2147483648 bytes in 12 bytes"),
            (struct.pack("<I", 6) + bytes(8), "a trie of 6 bytes in 12 bytes"),
            (struct.pack("<I", 0) + bytes(8), "a trie of 0 bytes in 12 bytes"),
        ],
    )
    def test_damaged(self, tmp_path: Path, blob: bytes, problem: str) -> None:
        with pytest.raises(TokenizerError, match=f"normalizer_spec.precompiled_charsmap: is damaged: it has {problem}"):
            opened(tmp_path, llama_bytes(normalizer={2: blob}))

    def test_damage_that_a_text_meets(self, tmp_path: Path) -> None:
        blob = double_array({"A": "a"})
        tokenizer = opened(tmp_path, llama_bytes(normalizer={2: blob[:-2]}))
        assert pieces(tokenizer, "hello") == ["\u2581hello"]
        with pytest.raises(TokenizerError, match="is damaged: it has a replacement at byte 0 of 0"):
            tokenizer.encode("A", add_special=False, parse_special=True)

    def test_any_damage_ends(self) -> None:
        """Whatever the units hold, a walk ends and reads nothing but the trie."""
        draw = random.Random(1)
        blob = double_array(RULES)
        places = [i for i in range(4, len(blob)) if blob[i]]
        for _ in range(3000):
            broken = bytearray(blob)
            for _ in range(draw.randrange(1, 4)):
                broken[draw.choice(places)] = draw.randrange(256)
            try:
                normalizer = SentencePieceNormalizer(Charsmap(bytes(broken)), ["<A>"], True)
                normalizer.normalize("Aa\u0308\u0304 \u3000\ufb01<A>e\u0301\xad\t", True)
            except DamagedCharsmapError:
                pass


class TestUnigram:
    def test_pieces(self, tmp_path: Path) -> None:
        table = [
            ("\u2581", -3.0),
            ("\u2581he", -4.0),
            ("he", -3.0),
            ("hello", -7.0),
            ("l", -2.0),
            ("o", -2.0),
            ("lo", -3.5),
        ]
        vocabulary = [*MARKS, *BYTES, *((text, score, NORMAL) for text, score in table)]
        tokenizer = opened(tmp_path, model(vocabulary, {3: UNIGRAM, 35: 1}, AS_IS))
        assert pieces(tokenizer, "hello") == ["\u2581he", "l", "lo"]
        assert pieces(tokenizer, "h\xe9") == ["\u2581", "<0x68>", "<0xC3>", "<0xA9>"]
        unknown = opened(tmp_path, model([*MARKS, *vocabulary[259:]], {3: UNIGRAM}, AS_IS))
        assert pieces(unknown, "xyzhello\xe9") == ["\u2581", "<unk>", "hello", "<unk>"]

    def test_a_users_own_pieces_come_first(self, tmp_path: Path) -> None:
        own = ("el", 0.0, USER_DEFINED)
        vocabulary = [
            *MARKS,
            ("hello", -1.0, NORMAL),
            ("h", -9.0, NORMAL),
            ("l", -9.0, NORMAL),
            ("o", -9.0, NORMAL),
            own,
        ]
        tokenizer = opened(tmp_path, model(vocabulary, {3: UNIGRAM}, {3: 0, 4: 0}))
        assert pieces(tokenizer, "hello") == ["hello"]
        assert pieces(tokenizer, "hell") == ["h", "el", "l"]

    def test_an_unused_piece_is_none(self, tmp_path: Path) -> None:
        vocabulary = [*MARKS, ("he", -1.0, UNUSED), ("h", -9.0, NORMAL), ("e", -9.0, NORMAL), ("x", 0.0, UNUSED)]
        tokenizer = opened(tmp_path, model(vocabulary, {3: UNIGRAM}, {3: 0, 4: 0}))
        assert pieces(tokenizer, "hex") == ["h", "e", "<unk>"]

    @given(
        scores=st.dictionaries(st.text("ab", min_size=1, max_size=4), st.integers(-40, 0), max_size=10),
        text=st.text("abc", max_size=9),
    )
    @settings(max_examples=300)
    def test_no_way_scores_better(self, scores: dict[str, int], text: str) -> None:
        """Quarters, so that every sum is exact."""
        table = {piece: (i, score / 4) for i, (piece, score) in enumerate(scores.items())}
        unknown = min((score for _, score in table.values()), default=0.0) - 10
        ids = UnigramModel(table, {}, lambda character: [-ord(character)]).encode(text)
        names = {i: piece for piece, (i, _) in table.items()}

        def ways(rest: str) -> Iterator[float]:
            if not rest:
                yield 0.0
            for size in range(1, len(rest) + 1):
                known = table.get(rest[:size])
                if known is not None:
                    yield from (known[1] + other for other in ways(rest[size:]))
            if rest and rest[0] not in table:
                yield from (unknown + other for other in ways(rest[1:]))

        assert "".join(names[i] if i >= 0 else chr(-i) for i in ids) == text
        assert sum(table[names[i]][1] if i >= 0 else unknown for i in ids) == max(ways(text))

    @pytest.mark.parametrize("seed", range(20))
    def test_sums_are_rounded_to_32_bits(self, seed: int) -> None:
        """Two ways that differ less than that are equal, and then the one whose last piece begins first is taken."""
        draw = random.Random(seed)
        one, two = (np.float32(draw.uniform(-12, -8)) for _ in range(2))
        encode = UnigramModel({"a": (0, float(one)), "aa": (1, float(two))}, {}, lambda character: []).encode
        for count in range(3, 40, 2):
            # (score, size of the last piece) of the best way to each place.
            ways: list[tuple[np.float32, int]] = [(np.float32(0.0), 0)]
            for end in range(1, count + 1):
                longer = [(ways[end - 2][0] + two, 2)] if end > 1 else []
                ways.append(max([*longer, (ways[end - 1][0] + one, 1)], key=lambda way: way[0]))
            sizes: list[int] = []
            at = count
            while at:
                sizes.append(ways[at][1])
                at -= sizes[-1]
            assert encode("a" * count) == [size - 1 for size in reversed(sizes)]


class TestDamage:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", "holds no SentencePiece vocabulary: it has no pieces"),
            (b"IQ== 0\nIg== 1\n", "is written in tiktoken's format, which is not supported"),
            (b"\x0a\xff\xff\xff\xff\x0f", "4294967295 bytes at byte 6, and 0 are left"),
            (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "bytes at byte 11, and 0 are left"),
            (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a number of more than 10 bytes"),
            (b"\x0a", "it ends inside a number"),
            (b"\x0b", "a field of the kind 3"),
            (b"\x00", "a field 0 at byte 1"),
            (field(1, 5), "pieces[0]: is a number, not bytes"),
            (field(1, field(1, 5)), "pieces[0].piece: is a number, not bytes"),
            (field(1, field(1, b"\xff")), "pieces[0].piece: is no UTF-8 text"),
            (field(1, field(2, 1.0)), "pieces[0].piece: is empty"),
            (field(1, field(1, "a") + field(2, 1)), "pieces[0].score: is no 32-bit number"),
            (field(1, field(1, "a") + field(2, float("nan"))), "pieces[0].score: is nan"),
            (field(1, field(1, "a") + field(3, 9)), "pieces[0].type: is 9; types are 1 to 6"),
            (field(1, field(1, "a") + field(3, "x")), "pieces[0].type: is no integer"),
            (model([("a", 0.0, NORMAL)], {}, {}), "pieces: has no unknown token"),
            (model([*MARKS, MARKS[0]], {}, {}), "pieces[3]: is '<unk>', and so is pieces[0]"),
            (model([*MARKS, ("<u>", 0.0, UNKNOWN)], {}, {}), "pieces[3]: is a second unknown token"),
            (model([*MARKS, ("a", 0.0, NORMAL), ("a", 0.0, USER_DEFINED)], {}, {}), "pieces[4]: is 'a', and so is"),
            (model([*MARKS, BYTES[0]], {}, {}), "pieces[3]: is '<0x00>', which is no byte token of a vocabulary with"),
            (model([*MARKS, ("<0xZZ>", 0.0, BYTE)], {35: 1}, {}), "pieces[3]: is '<0xZZ>', which is no byte token"),
            (
                model([*MARKS, *BYTES[1:]], {35: 1}, {}),
                "pieces: has 255 of the 256 byte tokens that byte_fallback needs",
            ),
            (model(MARKS, {3: 3}, {}), "trainer_spec.model_type: WORD is not supported; UNIGRAM and BPE are"),
            (model(MARKS, {3: 77}, {}), "trainer_spec.model_type: 77 is not supported"),
            (model(MARKS, {24: 1}, {}), "trainer_spec.treat_whitespace_as_suffix: is true, which is not supported"),
            (model(MARKS, {}, {5: 0}), "normalizer_spec.escape_whitespaces: is false, which is not supported"),
            (model(MARKS, {}, {}) + field(5, field(2, b"x")), "denormalizer_spec: changes the model's own text"),
        ],
    )
    def test_is_named(self, tmp_path: Path, content: bytes, problem: str) -> None:
        with pytest.raises(TokenizerError) as caught:
            opened(tmp_path, content)
        assert problem in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path / "tokenizer.model"))

    def test_what_nobody_knows_is_skipped(self, tmp_path: Path) -> None:
        extra = field(99, "x") + field(98, 7) + field(97, 1.0) + varint(96 << 3 | 1) + bytes(8)
        tokenizer = opened(tmp_path, llama_bytes() + extra + field(4, field(1, "self test")))
        assert pieces(tokenizer, "hello") == ["\u2581hello"]

    def test_any_damage_is_one_clear_error(self, tmp_path: Path) -> None:
        draw = random.Random(2)
        whole = [*MARKS, *WORDS, *LETTERS, ("<x>", 0.0, USER_DEFINED), ("ab", -1.0, UNUSED)]
        normalizer = {2: double_array({"A": "a"}), 4: 1}
        path, marks = tmp_path / "tokenizer.model", FolderMarks.read(tmp_path)
        refused = 0
        bases = [model(whole, {3: kind}, settings) for kind in (UNIGRAM, BPE) for settings in (normalizer, AS_IS)]
        for _ in range(3000):
            broken = bytearray(draw.choice(bases))
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(len(broken))
                match draw.randrange(4):
                    case 0:
                        broken[at] = draw.randrange(256)
                    case 1:
                        del broken[at : at + draw.randrange(1, 20)]
                    case 2:
                        broken[at:at] = draw.randbytes(draw.randrange(1, 6))
                    case 3:
                        broken[at : at + 1] = varint(draw.choice([2**31, 2**32, 2**63, 2**64 - 1]))
                if not broken:
                    break
            try:
                tokenizer = sentencepiece_tokenizer(path, bytes(broken), marks)
                ids = tokenizer.encode("hello <s>A\xe9 ab<x>", add_special=True, parse_special=True)
            except TokenizerError:
                refused += 1
                continue
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            tokenizer.decode(ids)
        assert 1000 < refused < 2900
