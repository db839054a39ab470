"""How GGUF's pre-tokenizers cut text, against the patterns that the families published, run by other engines."""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardline.cluster.text.tokenizer import Tokenizer

pytestmark = pytest.mark.peer


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_PEER = _sibling("test_tokenizer_peer")
SPELLING: Mapping[int, str] = _PEER.SPELLING
PAIRS: Sequence[str] = _PEER.PAIRS
HANDMADE = [
    "camelCase HTMLParser iPhone XMLHttpRequest McDonald's THEY'RE they'RE o'clock 'tis",
    "\u01c5a\u02b0B \u02b0\u02b1 \u4e2d\u6587ABCabc\u6f22 e\u0301E\u0301 \u0130\u0131 \u05e9\u05c1\u05b8x",
    "a/b//c /\n/ .\r\n/ ;\n\n\n x  \n\n  y",
    "a'T bB'LL xY'd a'rEs 'VE'm z''S",
    "12345678 1\u0661\u0662\u0663\u0664 \u00bd\u00b2\u2167\u2168",
]
TEXTS: list[str] = [*HANDMADE, *_PEER.ASSIGNED]
IDS = {token: i for i, token in enumerate(PAIRS)}

_CL100K_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_FOLDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    # tiktoken, o200k_base
    "gpt-4o": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    # mistral-common, tekken.json
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    # The families' tokenizer.json. tiktoken's newer cl100k_base takes all white space at a text's end as one word; the
    # models' own files keep the older rule.
    "dbrx": _FOLDED + "|" + _CL100K_WORDS % "{1,3}",
    "glm4": _FOLDED + "|" + _CL100K_WORDS % "{1,3}",
    "smaug-bpe": _FOLDED + "|" + _CL100K_WORDS % "{1,3}",
    "qwen2": _FOLDED + "|" + _CL100K_WORDS % "",
    # tiktoken, r50k_base; \Z is the end that $ means there
    "olmo": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\Z|\s+(?!\S)|\s",
}


@functools.cache
def merged(word: str, sign: int) -> tuple[int, ...]:
    """A word's ids in the vocabulary of all pairs of bytes: the first of all pairs first, or the last (sign -1)."""
    parts = [SPELLING[byte] for byte in word.encode()]
    while True:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        at = [(sign * IDS[pair], i) for i, pair in enumerate(joined) if pair in IDS]
        if not at:
            return tuple(IDS[part] for part in parts)
        _, i = min(at)
        parts[i : i + 2] = [joined[i]]


@pytest.mark.parametrize("pre", PUBLISHED)
@pytest.mark.parametrize("sign", [1, -1])
def test_words_are_those_of_the_published_pattern(pre: str, sign: int) -> None:
    regex = pytest.importorskip("regex", reason="needs regex, which transformers brings")
    # This engine's \s has four control characters more than Unicode's white space.
    pattern = PUBLISHED[pre].replace(r"\S", r"\P{White_Space}").replace(r"\s", r"\p{White_Space}")
    words: Callable[[str], list[str]] = regex.compile(pattern).findall
    metadata = _PEER.pairs_metadata(pre)
    # A border shows where its two bytes would have merged, and not each with its other neighbour: once in some order.
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][::sign]
    tokenizer = Tokenizer.from_metadata(metadata)
    composes = pre in ("qwen2", "olmo")
    differing: list[str] = []
    for text in TEXTS if sign == 1 else [*HANDMADE, *TEXTS[::5]]:
        theirs = words(unicodedata.normalize("NFC", text) if composes else text)
        expected = [token_id for word in theirs for token_id in merged(word, sign)]
        if tokenizer.encode(text, add_special=False, parse_special=False) != expected:
            differing.append(text)
    assert differing == []


def test_tekken_with_its_own_vocabulary() -> None:
    """Mistral's own file, of which the first tokens are enough, and its own engine."""
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken")
    package = importlib.util.find_spec("mistral_common")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs mistral-common, which carries a vocabulary")
    path = Path(package.submodule_search_locations[0]) / "data" / "tekken_240911.json"
    file: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in file["vocab"][:20_000]}
    theirs = tiktoken.Encoding("tekken", pat_str=file["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    spelled = {token: "".join(SPELLING[byte] for byte in token) for token in ranks}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": list(spelled.values()),
        "tokenizer.ggml.token_type": [1] * len(ranks),
        "tokenizer.ggml.merges": [
            " ".join("".join(SPELLING[byte] for byte in part) for part in halves(token, ranks))
            for token in ranks
            if len(token) > 1
        ],
    }
    ours = Tokenizer.from_metadata(metadata)
    differing = [
        text
        for text in TEXTS
        if ours.encode(text, add_special=False, parse_special=False) != theirs.encode_ordinary(text)
    ]
    assert differing == []


def halves(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two tokens that become this one last: what merging with the lower ranks alone leaves."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts
