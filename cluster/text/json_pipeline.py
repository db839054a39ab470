"""What the normalizer and the pre-tokenizer of a tokenizer.json do to a text's length and its first space."""

from __future__ import annotations

from shardline.cluster.text.folder_files import JsonObject

_MAX_STEPS = 256

# Steps that leave no character without a token, and make no text shorter by a factor of four or more.
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend"})


def normalizer_steps(document: JsonObject) -> list[JsonObject]:
    """The normalizer's steps in order, sequences in sequences taken apart."""
    return _steps(document, "normalizer", "normalizers")


def pre_tokenizer_steps(document: JsonObject) -> list[JsonObject]:
    """The pre-tokenizer's steps in order, sequences in sequences taken apart."""
    return _steps(document, "pre_tokenizer", "pretokenizers")


def keeps_length(document: JsonObject) -> bool:
    """Whether a text is known to keep at least a quarter of its characters before the model sees it."""
    return all(map(_keeps_length, [*normalizer_steps(document), *pre_tokenizer_steps(document)]))


def prefixes_each_stretch(document: JsonObject) -> bool:
    """Whether encoding adds a space after each added token too, and not only at the very beginning."""
    if any(step.text("type") == "Prepend" for step in normalizer_steps(document)):
        return True
    for step in pre_tokenizer_steps(document):
        if step.text("type") == "Metaspace":
            prepends = step.flag("add_prefix_space") is not False
            return prepends and (step.text("prepend_scheme") or "always") == "always"
    return False


def _steps(document: JsonObject, key: str, inner: str) -> list[JsonObject]:
    first = document.object(key)
    pending = [] if first is None else [first]
    steps: list[JsonObject] = []
    while pending:
        step = pending.pop()
        if step.text("type") == "Sequence":
            pending += reversed(step.objects(inner) or [])
        else:
            steps.append(step)
        if len(steps) + len(pending) > _MAX_STEPS:
            raise document.error(key, f"has more than {_MAX_STEPS} steps")
    return steps


def _keeps_length(step: JsonObject) -> bool:
    kind = step.text("type")
    if kind == "Replace":
        pattern = step.object("pattern")
        old = None if pattern is None else pattern.text("String")
        return old is not None and len(old) <= 4 * len(step.text("content") or "")
    if kind in ("Split", "Punctuation"):
        return (step.text("behavior") or "Isolated").lower() != "removed"
    return kind in _KEEPING
