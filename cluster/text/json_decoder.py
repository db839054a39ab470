"""The `decoder` of a tokenizer.json: what the bytes of each token are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardline.cluster.text.byte_level import spelled_bytes
from shardline.cluster.text.first_space import Strips
from shardline.cluster.text.folder_files import JsonObject, brief

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNSUPPORTED = "is not supported; ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order are"
_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens become text. Every step but the last works on one token alone, so that text can be streamed.

    Attributes:
        byte_level: Whether a token is spelled in the byte alphabet.
        replacements: (old, new) texts, replaced in each token in this order.
        named_bytes: Whether a token such as "<0x0A>" is that byte.
        strips: Which spaces go at the beginning of a text; None for none.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    named_bytes: bool = False
    strips: Strips | None = None

    def piece(self, token: str) -> bytes:
        """The bytes of a token of the vocabulary."""
        if self.byte_level:
            return spelled_bytes(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        named = _BYTE.fullmatch(token) if self.named_bytes else None
        return bytes([int(named[1], 16)]) if named else token.encode("utf-8")

    def added_piece(self, content: str) -> bytes:
        """The bytes of a token that was added as plain text."""
        return content.encode("utf-8") if self.byte_level else self.piece(content)


def parse_decoder(document: JsonObject) -> Decoding:
    """Raises TokenizerError, which names the step, where there is one that is not supported."""
    decoder = document.object("decoder")
    if decoder is None:
        raise document.error("decoder", f"is missing: without one, tokens have no text. {_remedy()}")
    steps = _steps(decoder)
    if not steps:
        raise decoder.error("decoders", "is empty: without a step, tokens have no text")
    if len(steps) == 1 and steps[0].text("type") == "ByteLevel":
        return Decoding(byte_level=True)
    if len(steps) == 1 and steps[0].text("type") == "Metaspace":
        return _metaspace(steps[0])
    decoding = Decoding()
    order = ("Replace", "ByteFallback", "Fuse", "Strip")
    done = -1
    for step in steps:
        kind = step.text("type")
        if kind not in order or order.index(kind) < done or (order.index(kind) == done and kind != "Replace"):
            raise step.error("type", f"{brief(kind)} here {_UNSUPPORTED}")
        if kind == "Replace":
            decoding = replace(decoding, replacements=(*decoding.replacements, _replacement(step)))
        elif kind == "ByteFallback":
            decoding = replace(decoding, named_bytes=True)
        elif kind == "Strip":
            if done < order.index("Fuse"):
                raise step.error("type", "'Strip' without 'Fuse' before it is not supported")
            decoding = replace(decoding, strips=_strip(step))
        done = order.index(kind)
    return decoding


def _remedy() -> str:
    return "Save the tokenizer again with a library that writes one"


def _steps(decoder: JsonObject) -> list[JsonObject]:
    """The decoder's steps, sequences in sequences taken apart."""
    pending = [decoder]
    steps: list[JsonObject] = []
    while pending:
        step = pending.pop()
        if step.text("type") == "Sequence":
            inner = step.objects("decoders")
            if inner is None:
                raise step.error("decoders", "is missing")
            pending += reversed(inner)
        else:
            steps.append(step)
        if len(steps) + len(pending) > _MAX_STEPS:
            raise decoder.error("decoders", f"has more than {_MAX_STEPS} steps")
    return steps


def _replacement(step: JsonObject) -> tuple[str, str]:
    pattern = step.object("pattern")
    old = None if pattern is None else pattern.text("String")
    if not old:
        raise step.error("pattern", 'is not supported; a text is: {"String": "..."}')
    new = step.text("content")
    if new is None:
        raise step.error("content", "is missing")
    return old, new


def _metaspace(step: JsonObject) -> Decoding:
    sign = step.text("replacement")
    if not sign:
        raise step.error("replacement", "is missing")
    prepends = step.flag("add_prefix_space") is not False and step.text("prepend_scheme") != "never"
    return Decoding(replacements=((sign, " "),), strips=Strips.FIRST_TOKEN if prepends else None)


def _strip(step: JsonObject) -> Strips | None:
    content, start, stop = step.text("content"), step.integer("start"), step.integer("stop")
    if content != " " or start not in (0, 1) or stop != 0:
        raise step.error("type", "'Strip' of anything but one space at the beginning is not supported")
    return Strips.ONE if start == 1 else None
