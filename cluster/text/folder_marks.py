"""What a Hugging Face folder's small files say of its tokenizer: special tokens, added tokens, end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardline.cluster.text.folder_files import JsonObject, brief, read_json
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.cluster.text.tokenizer import Marks

MAX_IDS = 1 << 22
"""More ids than any tokenizer has; an id from there on is damage, and no table is made as long."""

_MAX_BYTES = 1 << 24

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SOME_MORE = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in the text as it is written.

    Attributes:
        content: What is written.
        token_id: Its id; None where a file only names it.
        special: Whether it is no text.
        lstrip, rstrip: Whether white space before or after it becomes part of it.
        single_word: Whether it is found only where no letter, digit or "_" touches it.
        normalized: Whether it is looked for in the normalized text.
    """

    content: str
    token_id: int | None
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True

    @classmethod
    def from_json(cls, entry: JsonObject, token_id: int | None) -> AddedToken:
        """Raises TokenizerError, which names the field, when one is damaged."""
        content = entry.text("content")
        if content is None:
            raise entry.error("content", "is missing")
        special = entry.flag("special") or False
        normalized = entry.flag("normalized")
        return cls(
            content,
            token_id,
            special=special,
            lstrip=entry.flag("lstrip") or False,
            rstrip=entry.flag("rstrip") or False,
            single_word=entry.flag("single_word") or False,
            normalized=not special if normalized is None else normalized,
        )


@dataclass(frozen=True, slots=True)
class FolderMarks:
    """The small files of one folder, taken together.

    Attributes:
        folder: The folder.
        config: `tokenizer_config.json`; empty if there is none.
        names: The text of each special token that has a name, such as "bos_token": what chat templates may write.
        added: Tokens with an id that come on top of the vocabulary's, by ascending id.
        added_file: Where they are written.
        overrides: Whether they count more than what tokenizer.json says of the same tokens.
        named: Special tokens that the files only name.
        adds_bos, adds_eos: Whether a begin or end token is added to a text; None where no file says.
        bos_ids, eos_ids: What `generation_config.json` and `config.json` say.
        defaults: How to sample.
    """

    folder: Path
    config: JsonObject
    names: Mapping[str, str]
    added: tuple[AddedToken, ...]
    added_file: JsonObject
    overrides: bool
    named: tuple[AddedToken, ...]
    adds_bos: bool | None
    adds_eos: bool | None
    bos_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    defaults: GenerationDefaults

    @classmethod
    def read(cls, folder: Path) -> FolderMarks:
        """Raises TokenizerError, which names the file and the field, when one is damaged. None of them is needed."""
        config = _optional(folder / "tokenizer_config.json")
        listed = config.object("added_tokens_decoder")
        if listed is not None:
            added_file = listed
            names, named = _named_tokens([config])
            added = _added_by_id(listed)
        else:
            # Folders from before that field: each of these files adds to what tokenizer_config.json says.
            added_file = _optional(folder / "added_tokens.json")
            names, named = _named_tokens([config, _optional(folder / "special_tokens_map.json")])
            added = _added_by_content(added_file, {token.content for token in named})
        flags = {token.content: token for token in added.values()}
        generation = _optional(folder / "generation_config.json")
        model = _optional(folder / "config.json")
        eos_ids = {*generation.token_ids("eos_token_id"), *_of_model(model, "eos_token_id")}
        return cls(
            folder,
            config,
            names,
            tuple(added[token_id] for token_id in sorted(added)),
            added_file,
            listed is not None,
            tuple(replace(flags.get(token.content, token), token_id=None, special=True) for token in named),
            config.flag("add_bos_token"),
            config.flag("add_eos_token"),
            generation.token_ids("bos_token_id") or _of_model(model, "bos_token_id"),
            frozenset(eos_ids),
            GenerationDefaults.from_json(generation),
        )

    def around(self, bos_id: int | None, eos_id: int | None, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> Marks:
        """The tokens around a text, given those that have a name and those that the vocabulary's own file adds.

        `add_bos_token` and `add_eos_token` decide where the folder says them.
        """
        if bos_id is None and self.bos_ids:
            bos_id = self.bos_ids[0]
        if self.adds_bos and bos_id is None:
            raise self.config.error("add_bos_token", "is true, but the vocabulary has no begin token (bos_token)")
        if self.adds_eos and eos_id is None:
            raise self.config.error("add_eos_token", "is true, but the vocabulary has no end token (eos_token)")
        if self.adds_bos is not None and bos_id is not None and self.adds_bos != (bos_id in prefix):
            prefix = (bos_id,) if self.adds_bos else tuple(i for i in prefix if i != bos_id)
        if self.adds_eos is not None and eos_id is not None and self.adds_eos != (eos_id in suffix):
            suffix = (eos_id,) if self.adds_eos else tuple(i for i in suffix if i != eos_id)
        eos_ids = self.eos_ids if eos_id is None else self.eos_ids | {eos_id}
        return Marks(bos_id, eos_ids, prefix, suffix)


def _optional(path: Path) -> JsonObject:
    return read_json(path, _MAX_BYTES) or JsonObject(path, "", {})


def _of_model(config: JsonObject, key: str) -> tuple[int, ...]:
    """A field of config.json, which a model that does more than text keeps one level deeper."""
    text_config = config.object("text_config")
    return config.token_ids(key) or (() if text_config is None else text_config.token_ids(key))


def _added_by_id(listed: JsonObject) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    for key in listed.entries:
        entry = listed.object(key)
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < MAX_IDS) or entry is None:
            raise listed.error(ascii(key), f"is not a token id from 0 to {MAX_IDS - 1} with an object")
        added[int(key)] = AddedToken.from_json(entry, int(key))
    return added


def _added_by_content(listed: JsonObject, special: set[str]) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    for content, token_id in listed.entries.items():
        field = brief(content)
        JsonObject(listed.path, field, {"content": content}).text("content")
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_IDS:
            raise listed.error(field, f"is {brief(token_id)}, not a token id from 0 to {MAX_IDS - 1}")
        if token_id in added:
            raise listed.error(field, f"is {token_id}, and so is {brief(added[token_id].content)}")
        is_special = content in special
        added[token_id] = AddedToken(content, token_id, special=is_special, normalized=not is_special)
    return added


def _named_tokens(sources: list[JsonObject]) -> tuple[dict[str, str], list[AddedToken]]:
    """The named special tokens of all sources, later ones over earlier ones, and those that are in a list."""
    names: dict[str, str] = {}
    named: dict[str, AddedToken] = {}
    for source in sources:
        for key, value in source.entries.items():
            # Other names, such as "image_token", are a model's own; what is no token in them is not looked at.
            if key in _NAMED or (key.endswith("_token") and isinstance(value, str)):
                token = _token(source, key, value)
                if token is None:
                    names.pop(key, None)
                else:
                    names[key] = token.content
                    named[key] = token
        for key in _SOME_MORE:
            value = source.entries.get(key)
            if isinstance(value, dict):
                deeper = JsonObject(source.path, key, value)
                more = {name: _token(deeper, name, entry) for name, entry in value.items()}
                names |= {name: token.content for name, token in more.items() if token is not None}
            elif isinstance(value, list):
                more = {name: _token(source, name, entry) for name, entry in _numbered(key, value)}
            elif value is None:
                continue
            else:
                raise source.error(key, f"is {brief(value)}, not a list of tokens")
            named |= {name: token for name, token in more.items() if token is not None}
    return names, list(named.values())


def _numbered(key: str, values: list[object]) -> list[tuple[str, object]]:
    return [(f"{key}[{index}]", value) for index, value in enumerate(values)]


def _token(source: JsonObject, key: str, value: object) -> AddedToken | None:
    """A special token: its text, or an object with its content."""
    if value is None:
        return None
    if isinstance(value, str):
        content = JsonObject(source.path, source.field, {key: value}).text(key)
        return AddedToken(content, None, special=True, normalized=False) if content else None
    if isinstance(value, dict):
        return AddedToken.from_json(JsonObject(source.path, f"{source.field}.{key}".lstrip("."), value), None)
    raise source.error(key, f"is {brief(value)}, not a token")
