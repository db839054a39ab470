"""Byte-level BPE: pre-tokenizers, the byte alphabet, and the merge model of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as MergeTokenizer

_LETTERS_AND_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A word ends where a small letter is followed by a capital one."""
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family cuts text into words before merging.

    Attributes:
        patterns: Applied one after the other, each to the pieces that the one before left; both a match and the text
            between two matches become pieces.
        nfc: Whether the text is brought into Unicode's composed form first.
        whole_words: Whether a word that is a token is taken whole, whatever the merges say.
        adds_bos: Whether a begin token is added where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_THREE_DIGITS = PreTokenizer((_LETTERS_AND_MARKS % r"\p{N}{1,3}",))
_LLAMA3 = replace(_THREE_DIGITS, whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_LETTERS_AND_MARKS % r"\p{N}",), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _THREE_DIGITS,  # SmolLM3, and Llama 3 where the file says that words are merged as all others
    "dbrx": _THREE_DIGITS,  # Phi-4
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "tekken": PreTokenizer((_CASED % ("", "", r"\p{N}"),), whole_words=True, adds_bos=True),  # Mistral
    "gpt-4o": PreTokenizer((_CASED % (_CONTRACTION, _CONTRACTION, r"\p{N}{1,3}"),)),  # gpt-oss, Phi-4-mini
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""By the name that `tokenizer.ggml.pre` has for them."""


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself where it prints, else the next one from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printing)
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The byte of each character that stands for one."""


def spelled_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    A token with a character outside the byte alphabet was added to the vocabulary as plain text.
    """
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class ByteLevelModel:
    """Text to ids by merges. Has no special tokens: every text is only text to it."""

    def __init__(
        self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], pre_tokenizer: PreTokenizer
    ) -> None:
        """Every merge's two parts and their concatenation must be in the vocabulary."""
        model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pre_tokenizer.whole_words)
        self._tokenizer = MergeTokenizer(model)
        if pre_tokenizer.nfc:
            self._tokenizer.normalizer = normalizers.NFC()
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre_tokenizer.patterns
        ]
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A byte that the vocabulary has no token for is dropped, as in training."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids
