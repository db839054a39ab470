"""The tokenizer that a tokenizer.json describes, run by the `tokenizers` library."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken as LibraryToken
from tokenizers import Tokenizer as LibraryTokenizer

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.byte_level import BYTE_ALPHABET
from shardline.cluster.text.first_space import FirstSpace, KeepSpace, StripAtStart
from shardline.cluster.text.folder_files import JsonObject, brief, parse_json, read_text
from shardline.cluster.text.folder_marks import AddedToken, FolderMarks
from shardline.cluster.text.json_decoder import Decoding, parse_decoder
from shardline.cluster.text.json_pipeline import keeps_length, prefixes_each_stretch
from shardline.cluster.text.json_vocabulary import JsonVocabulary, parse_ends, parse_vocabulary
from shardline.cluster.text.tokenizer import Coverage, Marks, Tokenizer

_MAX_BYTES = 1 << 26
_T = TypeVar("_T")


def read_json_tokenizer(path: Path, marks: FolderMarks) -> Tokenizer | None:
    """The tokenizer of that file and of the small files next to it; None if there is no such file.

    Raises TokenizerError, which names the file and the field, when something is damaged or not supported.
    """
    text = read_text(path, _MAX_BYTES)
    if text is None:
        return None
    document = parse_json(path, text)
    vocabulary = parse_vocabulary(document)
    decoding = parse_decoder(document)
    prefix, suffix = parse_ends(document)
    library = _guarded(path, "the tokenizers library refuses it", lambda: LibraryTokenizer.from_str(text))
    # Both would change a prompt without a word.
    library.no_truncation()
    library.no_padding()
    for index, token in enumerate(vocabulary.added):
        _check_id(library, document.error(f"added_tokens[{index}].id", ""), token)
    _add_tokens(path, library, marks)

    added = library.get_added_tokens_decoder()
    size = 1 + max(max(vocabulary.ids.values(), default=0), max(added, default=0))
    texts = [""] * size
    pieces = [b""] * size
    for name, token_id in vocabulary.ids.items():
        texts[token_id] = name
        pieces[token_id] = decoding.piece(name)
    for token_id, entry in added.items():
        texts[token_id] = entry.content
        pieces[token_id] = _guarded(
            path, "an added token cannot be decoded", partial(_added_bytes, library, decoding, token_id, entry)
        )
    special = frozenset(token_id for token_id, entry in added.items() if entry.special)
    squeezes = any(entry.lstrip or entry.rstrip for entry in added.values())
    for token_id in (*prefix, *suffix):
        if token_id >= size or not texts[token_id]:
            raise document.error("post_processor", f"adds {token_id}, which is no token's id")
    return Tokenizer(
        texts,
        pieces,
        special,
        _LibraryEncoder(path, library, frozenset(texts[token_id] for token_id in special)),
        _first_space(document, decoding, frozenset(added)),
        _marks(library, marks, prefix, suffix),
        _coverage(document, vocabulary, decoding, pieces, squeezes),
    )


class _LibraryEncoder:
    """An `Encoder` over the library's tokenizer, which does all but what goes around a text."""

    def __init__(self, path: Path, library: LibraryTokenizer, special: frozenset[str]) -> None:
        """`special`: the special tokens' names."""
        self._path = path
        self._library = library
        self._special = special
        self._plain: LibraryTokenizer | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        library = self._library if parse_special else self._plain_library()
        encoding = _guarded(
            self._path, "the tokenizers library fails on a text", lambda: library.encode(text, add_special_tokens=False)
        )
        return encoding.ids

    def _plain_library(self) -> LibraryTokenizer:
        """One that finds no special tokens; made when it is first needed, for it is as large as the other."""
        with self._lock:
            if self._plain is None:
                document = json.loads(self._library.to_str())
                _hide(document, self._special)
                self._plain = LibraryTokenizer.from_str(json.dumps(document))
            return self._plain


def _hide(document: dict[str, Any], special: frozenset[str]) -> None:
    """Give special tokens names that no text can hold, for nobody can guess them. Their ids stay."""
    secret = secrets.token_hex(16)
    hidden = {name: f"{secret}{index}" for index, name in enumerate(special)}
    model = document["model"]
    if model["type"] == "BPE":
        model["vocab"] = {hidden.get(token, token): token_id for token, token_id in model["vocab"].items()}
        model["merges"] = [
            (left, right) for left, right in model["merges"] if hidden.keys().isdisjoint((left, right, left + right))
        ]
        model["unk_token"] = hidden.get(model["unk_token"], model["unk_token"])
    else:
        model["vocab"] = [(hidden.get(token, token), score) for token, score in model["vocab"]]
    for token in document["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    document["post_processor"] = None


def _guarded(path: Path, what: str, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as error:
        raise TokenizerError(str(path), f"{what}: {_first_line(error)}") from error
    except BaseException as error:
        # What the library's own assertions raise is no Exception, and has no name to import.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(str(path), f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _check_id(library: LibraryTokenizer, error: TokenizerError, token: AddedToken) -> None:
    found = library.token_to_id(token.content)
    if found != token.token_id:
        raise TokenizerError(
            error.field,
            f"is {token.token_id}, but the token {brief(token.content)} gets the id {found}: ids have to go on from the"
            " vocabulary without a gap, and a token of the vocabulary keeps its own",
        )


def _add_tokens(path: Path, library: LibraryTokenizer, marks: FolderMarks) -> None:
    """Add what the small files say on top of tokenizer.json, as transformers does when it opens a folder.

    A token that they only name and that has no id is none of this model's: it gets none here.
    """
    present = library.get_added_tokens_decoder()
    in_file = {entry.content: entry for entry in present.values()}
    by_content = {token.content for token in marks.added}
    for token in marks.added:
        if token.content and (marks.overrides or token.token_id not in present):
            _guarded(path, "an added token is refused", partial(library.add_tokens, [_library_token(token)]))
            _check_id(library, marks.added_file.error(brief(token.content), ""), token)
    for token in marks.named:
        if library.token_to_id(token.content) is not None:
            entry = in_file.get(token.content) if token.content not in by_content else None
            _guarded(
                path,
                "a special token is refused",
                partial(library.add_special_tokens, [_library_token(token) if entry is None else entry]),
            )


def _library_token(token: AddedToken) -> LibraryToken:
    return LibraryToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _added_bytes(library: LibraryTokenizer, decoding: Decoding, token_id: int, entry: LibraryToken) -> bytes:
    """An added token is its own text. One that is looked for in normalized text comes back as the library has it: its
    name after normalization, then decoded."""
    content: str = entry.content
    if entry.normalized and library.normalizer is not None:
        normalized = library.normalizer.normalize_str(content)
        if normalized != content:
            twice: str = library.decode([token_id, token_id], skip_special_tokens=False)
            once: str = library.decode([token_id], skip_special_tokens=False)
            # The second of two, for what stands first may lose a space.
            return twice[len(once) :].encode("utf-8")
    return decoding.added_piece(content)


def _first_space(document: JsonObject, decoding: Decoding, added: frozenset[int]) -> FirstSpace:
    if decoding.strips is None:
        return KeepSpace()
    return StripAtStart(decoding.strips, added if prefixes_each_stretch(document) else frozenset())


def _coverage(
    document: JsonObject, vocabulary: JsonVocabulary, decoding: Decoding, pieces: list[bytes], squeezes_space: bool
) -> Coverage:
    covers = vocabulary.covers_text or (decoding.byte_level and vocabulary.ids.keys() >= BYTE_ALPHABET.keys())
    if not covers or not keeps_length(document):
        return Coverage(None)
    return Coverage(4 * max(1, *map(len, pieces)), squeezes_space)


def _marks(library: LibraryTokenizer, marks: FolderMarks, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> Marks:
    def named(name: str) -> int | None:
        text = marks.names.get(name)
        return None if text is None else library.token_to_id(text)

    return marks.around(named("bos_token"), named("eos_token"), prefix, suffix)
