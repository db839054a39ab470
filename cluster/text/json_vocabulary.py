"""The parts of a tokenizer.json that are checked before the `tokenizers` library sees it."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.cluster.text.folder_files import JsonObject, brief
from shardline.cluster.text.folder_marks import MAX_IDS, AddedToken

_MODELS = ("BPE", "Unigram")
_MAX_STEPS = 64
"""The most steps of a post-processor, and the most tokens that it adds on either side."""


@dataclass(frozen=True, slots=True)
class JsonVocabulary:
    """The checked vocabulary.

    Attributes:
        ids: The id of each token of the model.
        added: The tokens on top of it, or over it, with their ids.
        covers_text: Whether every character becomes a token of its own or a part of one, whatever the pre-tokenizer is.
    """

    ids: dict[str, int]
    added: tuple[AddedToken, ...]
    covers_text: bool


def parse_vocabulary(document: JsonObject) -> JsonVocabulary:
    """Raises TokenizerError, which names the field, where something is damaged or not supported."""
    model = document.object("model")
    if model is None:
        raise document.error("model", "is missing: the file holds no tokenizer that can be used")
    kind = model.text("type")
    if kind is None:
        # Files from before there were several kinds.
        kind = "BPE" if "merges" in model.entries else "Unigram"
    if kind not in _MODELS:
        raise model.error("type", f"{brief(kind)} is not supported; {' and '.join(_MODELS)} are")
    if kind == "BPE":
        ids = _bpe_ids(model)
        _check_merges(model, ids)
        byte_fallback = model.flag("byte_fallback") or False
        covers_text = byte_fallback and all(f"<0x{byte:02X}>" in ids for byte in range(256))
    else:
        ids = _unigram_ids(model)
        covers_text = False
    return JsonVocabulary(ids, _added(document), covers_text)


def _bpe_ids(model: JsonObject) -> dict[str, int]:
    dropout = model.number("dropout")
    if dropout:
        raise model.error("dropout", f"is {dropout:g}: it would make the same text other tokens each time. Set it to 0")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(key):
            raise model.error(key, f"is {brief(model.text(key))}, which is not supported")
    vocabulary = model.object("vocab")
    if vocabulary is None or not vocabulary.entries:
        raise model.error("vocab", "is missing or empty")
    taken: dict[int, str] = {}
    for token, token_id in vocabulary.entries.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_IDS:
            raise model.error(f"vocab[{brief(token)}]", f"is {brief(token_id)}, not a token id from 0 to {MAX_IDS - 1}")
        other = taken.setdefault(token_id, token)
        if other != token:
            raise model.error(f"vocab[{brief(token)}]", f"is {token_id}, and so is vocab[{brief(other)}]")
    return dict(vocabulary.entries)


def _check_merges(model: JsonObject, ids: dict[str, int]) -> None:
    merges = model.array("merges")
    if merges is None:
        raise model.error("merges", "is missing")
    for index, merge in enumerate(merges):
        if isinstance(merge, str):
            if merge.startswith("#version"):
                continue
            parts = merge.split(" ")
        else:
            parts = merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise model.error(f"merges[{index}]", f"is {brief(merge)}, not two tokens")
        left, right = parts
        if left not in ids or right not in ids or left + right not in ids:
            missing = next(token for token in (left, right, left + right) if token not in ids)
            raise model.error(f"merges[{index}]", f"needs the token {brief(missing)}, which is not in vocab")


def _unigram_ids(model: JsonObject) -> dict[str, int]:
    vocabulary = model.array("vocab")
    if not vocabulary:
        raise model.error("vocab", "is missing or empty")
    if len(vocabulary) > MAX_IDS:
        raise model.error("vocab", f"has {len(vocabulary)} tokens; {MAX_IDS} is the most")
    ids: dict[str, int] = {}
    for token_id, entry in enumerate(vocabulary):
        well_formed = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0]
        if not well_formed or isinstance(entry[1], bool) or not isinstance(entry[1], int | float):
            raise model.error(f"vocab[{token_id}]", f"is {brief(entry)}, not a token with its score")
        if ids.setdefault(entry[0], token_id) != token_id:
            raise model.error(f"vocab[{token_id}]", f"is {brief(entry[0])}, and so is vocab[{ids[entry[0]]}]")
    unknown_id = model.integer("unk_id")
    if unknown_id is None or not 0 <= unknown_id < len(vocabulary):
        raise model.error("unk_id", f"is {brief(unknown_id)}, not an id from 0 to {len(vocabulary) - 1}")
    return ids


def _added(document: JsonObject) -> tuple[AddedToken, ...]:
    added: list[AddedToken] = []
    for entry in document.objects("added_tokens") or ():
        token_id = entry.integer("id")
        if token_id is None or not 0 <= token_id < MAX_IDS:
            raise entry.error("id", f"is {brief(token_id)}, not a token id from 0 to {MAX_IDS - 1}")
        token = AddedToken.from_json(entry, token_id)
        if token.content:
            added.append(token)
    return tuple(added)


def parse_ends(document: JsonObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that `post_processor` puts before and after a text; whether there are such tokens is not looked at.

    Raises TokenizerError, which names the field, where something is damaged or not supported.
    """
    processor = document.object("post_processor")
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    pending = [] if processor is None else [processor]
    steps = 0
    while pending:
        step = pending.pop()
        steps += 1
        kind = step.text("type")
        if kind == "Sequence":
            pending += reversed(step.objects("processors") or [])
        elif kind == "TemplateProcessing":
            before, after = _template_ends(step)
            prefix, suffix = before + prefix, suffix + after
        elif kind != "ByteLevel":
            raise step.error("type", f"{brief(kind)} is not supported; TemplateProcessing, ByteLevel and Sequence are")
        if max(steps + len(pending), len(prefix), len(suffix)) > _MAX_STEPS:
            raise document.error("post_processor", f"has more than {_MAX_STEPS} steps or tokens")
    return prefix, suffix


def _template_ends(step: JsonObject) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens = step.object("special_tokens")
    ends: tuple[list[int], list[int]] = ([], [])
    seen_text = False
    for piece in step.objects("single") or ():
        special = piece.object("SpecialToken")
        sequence = piece.object("Sequence")
        if special is not None:
            name = special.text("id") or ""
            entry = None if tokens is None else tokens.object(name)
            if entry is None:
                raise special.error("id", f"is {brief(name)}, which is not in special_tokens")
            ends[seen_text].extend(entry.token_ids("ids"))
        elif sequence is not None and not seen_text and sequence.text("id") == "A":
            seen_text = True
        else:
            raise step.error("single", "is not a text with special tokens before and after it")
    if not seen_text:
        raise step.error("single", "has no place for the text")
    return tuple(ends[0]), tuple(ends[1])
