"""The chat template of a Hugging Face folder, from whichever file it has one in."""

from __future__ import annotations

from pathlib import Path

from shardline.cluster.errors import TemplateError, TokenizerError
from shardline.cluster.text.chat_template import DEFAULT, ChatTemplate
from shardline.cluster.text.folder_files import JsonObject, brief, read_json, read_text
from shardline.cluster.text.folder_marks import FolderMarks

_MAX_BYTES = 1 << 22
_MAX_NAMED = 32
_NAMED_FOLDER = "additional_chat_templates"


def template_from_folder(folder: Path, marks: FolderMarks) -> ChatTemplate:
    """The folder's template: files of their own come before `tokenizer_config.json`.

    Raises:
        TemplateError: The folder has no template, or what it has is none; names the file.
    """
    try:
        named = _sources(folder, marks)
    except TokenizerError as error:
        raise TemplateError(str(error)) from error
    if not named:
        raise TemplateError(
            f"this model has no chat template ({folder} has no chat_template.jinja, and no chat_template in its"
            " tokenizer_config.json), so it cannot take messages. Give a text prompt, or name a template, such as"
            " ChatML."
        )
    return ChatTemplate(named.pop(DEFAULT, None), named=named, special=marks.names)


def _sources(folder: Path, marks: FolderMarks) -> dict[str, str]:
    """The templates by name."""
    named: dict[str, str] = {}
    source = read_text(folder / "chat_template.jinja", _MAX_BYTES)
    if source is not None:
        named[DEFAULT] = source
    more = sorted((folder / _NAMED_FOLDER).glob("*.jinja"))
    if len(more) > _MAX_NAMED:
        raise TokenizerError(str(folder / _NAMED_FOLDER), f"has more than {_MAX_NAMED} templates")
    for path in more:
        source = read_text(path, _MAX_BYTES)
        if source is not None:
            named[path.name.removesuffix(".jinja")] = source
    if named:
        return named
    for config in (read_json(folder / "chat_template.json", _MAX_BYTES), marks.config):
        if config is not None and config.entries.get("chat_template") is not None:
            return _of_config(config)
    return {}


def _of_config(config: JsonObject) -> dict[str, str]:
    """One template, an object of them, or a list of objects with a name and a template."""
    value = config.entries["chat_template"]
    if isinstance(value, str):
        source = config.text("chat_template")
        assert source is not None
        return {DEFAULT: source}
    if isinstance(value, list):
        entries = config.objects("chat_template") or []
        pairs = [(entry.text("name"), entry.text("template"), entry) for entry in entries]
    elif isinstance(value, dict):
        listed = JsonObject(config.path, "chat_template", value)
        pairs = [(name, listed.text(name), listed) for name in value]
    else:
        raise config.error("chat_template", f"is {brief(value)}, not a text or a list of named ones")
    named: dict[str, str] = {}
    for name, source, entry in pairs:
        if not name or source is None:
            raise entry.error("name" if not name else "template", "is missing")
        named[name] = source
    if len(named) > _MAX_NAMED:
        raise config.error("chat_template", f"has more than {_MAX_NAMED} templates")
    return named
