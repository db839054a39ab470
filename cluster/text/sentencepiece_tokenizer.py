"""The tokenizer of a folder that has SentencePiece's `tokenizer.model` and no tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from shardline.cluster.errors import TokenizerError
from shardline.cluster.text.charsmap import Charsmap, DamagedCharsmapError
from shardline.cluster.text.first_space import FirstSpace, KeepSpace, StripAtStart, Strips
from shardline.cluster.text.folder_files import brief, read_bytes
from shardline.cluster.text.folder_marks import AddedToken, FolderMarks
from shardline.cluster.text.literal_tokens import Literal, LiteralEncoder, LiteralTokens
from shardline.cluster.text.normalization import SentencePieceNormalizer
from shardline.cluster.text.scored_pieces import SPACE, ScoredPieceModel
from shardline.cluster.text.sentencepiece_file import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceFile,
    byte_of,
    parse_sentencepiece,
)
from shardline.cluster.text.tokenizer import Coverage, Marks, Tokenizer
from shardline.cluster.text.unigram_pieces import UnigramModel

_MAX_BYTES = 1 << 25


def read_sentencepiece_tokenizer(path: Path, marks: FolderMarks) -> Tokenizer | None:
    """The tokenizer of that file and of the small files next to it; None if there is no such file.

    Raises TokenizerError, which names the file and the field, when something is damaged or not supported.
    """
    content = read_bytes(path, _MAX_BYTES)
    return None if content is None else sentencepiece_tokenizer(path, content, marks)


def sentencepiece_tokenizer(path: Path, content: bytes, marks: FolderMarks) -> Tokenizer:
    """The tokenizer of a file with that content. Raises as `read_sentencepiece_tokenizer` does."""
    file = parse_sentencepiece(path, content)
    added = _added(file, marks)
    texts, types = _with_added(file, added)
    pieces = [_piece_bytes(text, kind) for text, kind in zip(texts, types, strict=True)]
    for token_id, token in added.items():
        pieces[token_id] = token.content.encode("utf-8")
    # A folder's own word on the space before a text counts more than the vocabulary's.
    prefixes = file.adds_dummy_prefix and marks.config.flag("add_prefix_space") is not False
    model = _SentencePieceModel(file, added, prefixes)
    literals = _literals(texts, types, added)
    # Older folders encode each stretch between two of these as a text of its own; newer ones say that they do not.
    restarts = frozenset(literal.token_id for literal in literals) if marks.config.flag("legacy") is not False else ()
    first_space: FirstSpace = KeepSpace()
    if prefixes or file.removes_extra_spaces:
        strips = Strips.EACH_TOKEN if file.removes_extra_spaces else Strips.ONE
        first_space = StripAtStart(strips, restarts if prefixes else ())
    squeezes = any(literal.lstrip or literal.rstrip for literal in literals)
    return Tokenizer(
        texts,
        pieces,
        frozenset(literal.token_id for literal in literals if literal.special),
        LiteralEncoder(literals, model.encode, restarts=restarts),
        first_space,
        _marks(file, marks, texts, types),
        Coverage(4 * max(1, *map(len, pieces)) if model.covers_text else None, squeezes),
    )


class _SentencePieceModel:
    """A stretch of text to ids, as SentencePiece does it: normalization, then pieces, then bytes for the rest."""

    def __init__(self, file: SentencePieceFile, renamed: dict[int, AddedToken], adds_dummy_prefix: bool) -> None:
        """`renamed`: pieces whose place another token took: text does not become them any more."""
        pieces: dict[int, dict[str, int]] = {kind: {} for kind in range(NORMAL, BYTE + 1)}
        for token_id, (piece, kind) in enumerate(zip(file.pieces, file.types, strict=True)):
            if token_id not in renamed or kind == BYTE:
                pieces[kind][piece] = token_id
        self._unknown_id = file.unknown_id
        self._bytes = {_byte(piece): token_id for piece, token_id in pieces[BYTE].items()}
        self._adds_dummy_prefix = adds_dummy_prefix
        self._path = file.path
        try:
            charsmap = Charsmap(file.charsmap)
        except DamagedCharsmapError as error:
            raise self._damaged(error) from error
        self._normalizer = SentencePieceNormalizer(charsmap, pieces[USER_DEFINED], file.removes_extra_spaces)
        normal = {piece: (token_id, file.scores[token_id]) for piece, token_id in pieces[NORMAL].items()}
        self._frozen: LiteralTokens | None = None
        if file.kind == BPE:
            unused = {piece: (token_id, file.scores[token_id]) for piece, token_id in pieces[UNUSED].items()}
            scored = ScoredPieceModel(normal | unused, frozenset(unused), self._bytes, file.unknown_id)
            self._encode = scored.encode
            # No piece grows over a user's own. In a unigram model these have a score like others.
            self._frozen = LiteralTokens(
                Literal(piece, token_id, special=False) for piece, token_id in pieces[USER_DEFINED].items()
            )
        else:
            self._encode = UnigramModel(normal, pieces[USER_DEFINED], self._spell_unknown).encode

    @property
    def covers_text(self) -> bool:
        """Whether every character becomes a token of its own or a part of one."""
        return bool(self._bytes) and self._normalizer.keeps_length

    def encode(self, text: str, begins: bool) -> list[int]:
        """The ids of a stretch; `begins`: whether a text begins with it."""
        try:
            text = self._normalizer.normalize(text, begins and self._adds_dummy_prefix)
        except DamagedCharsmapError as error:
            raise self._damaged(error) from error
        ids: list[int] = []
        for stretch, token_id in ((text, None),) if self._frozen is None else self._frozen.cut(text):
            ids += self._encode(stretch) if token_id is None else [token_id]
        if self._bytes:
            return ids
        # Unknown characters in a row are one unknown token.
        unknown = self._unknown_id
        return [i for index, i in enumerate(ids) if i != unknown or index == 0 or ids[index - 1] != unknown]

    def _damaged(self, error: DamagedCharsmapError) -> TokenizerError:
        return TokenizerError(f"{self._path}: normalizer_spec.precompiled_charsmap", f"is damaged: it has {error}")

    def _spell_unknown(self, character: str) -> list[int]:
        if not self._bytes:
            return [self._unknown_id]
        return [self._bytes[byte] for byte in character.encode("utf-8")]


def _byte(piece: str) -> int:
    byte = byte_of(piece)
    assert byte is not None, f"{piece!r} was checked to be a byte token"
    return byte


def _added(file: SentencePieceFile, marks: FolderMarks) -> dict[int, AddedToken]:
    """The tokens that come on top of the vocabulary's, or take the place of one, by id."""
    added: dict[int, AddedToken] = {}
    next_id = len(file.pieces)
    for token in marks.added:
        token_id = token.token_id
        assert token_id is not None
        if not token.content:
            raise marks.added_file.error(str(token_id), "is a token without text")
        if token_id < len(file.pieces):
            if file.pieces[token_id] == token.content and file.types[token_id] in (UNKNOWN, CONTROL):
                continue
            if file.types[token_id] == BYTE:
                raise marks.added_file.error(brief(token.content), f"takes the id {token_id} of a byte token")
        elif token_id != next_id:
            raise marks.added_file.error(
                brief(token.content), f"has the id {token_id}, but the ids before it go to {next_id - 1}"
            )
        else:
            next_id += 1
        added[token_id] = token
    return added


def _with_added(file: SentencePieceFile, added: dict[int, AddedToken]) -> tuple[list[str], list[int]]:
    texts, types = list(file.pieces), list(file.types)
    for token_id, token in added.items():
        kind = CONTROL if token.special else USER_DEFINED
        if token_id < len(texts):
            texts[token_id], types[token_id] = token.content, kind
        else:
            texts.append(token.content)
            types.append(kind)
    return texts, types


def _literals(texts: list[str], types: list[int], added: dict[int, AddedToken]) -> list[Literal]:
    literals = [
        Literal(texts[token_id], token_id, special=True)
        for token_id, kind in enumerate(types)
        if kind in (UNKNOWN, CONTROL) and token_id not in added
    ]
    literals += [
        Literal(token.content, token_id, token.special, token.lstrip, token.rstrip, token.single_word)
        for token_id, token in added.items()
    ]
    return literals


def _piece_bytes(text: str, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([_byte(text)])
    if kind in (UNKNOWN, CONTROL):
        return text.encode("utf-8")
    return text.replace(SPACE, " ").encode("utf-8")


def _marks(file: SentencePieceFile, marks: FolderMarks, texts: list[str], types: list[int]) -> Marks:
    by_name = {text: i for i, text in enumerate(texts) if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)}

    def named(name: str, of_file: int | None) -> int | None:
        return of_file if name not in marks.names else by_name.get(marks.names[name])

    bos_id = named("bos_token", file.bos_id)
    # Where no file says, a vocabulary of this kind is used with its begin token.
    prefix = (bos_id,) if bos_id is not None else ()
    return marks.around(bos_id, named("eos_token", file.eos_id), prefix, ())
