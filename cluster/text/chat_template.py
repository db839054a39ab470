"""A model's chat template: messages to one prompt text, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from shardline.cluster.errors import TemplateError
from shardline.cluster.request import Message
from shardline.cluster.text.template_sandbox import RefusedError, TemplateSandbox, render_bounded
from shardline.scheduler import InvalidParameterError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A plain format of turns, for a model that has no template of its own."""

DEFAULT = "default"
"""The name of the template that is taken where no other is asked for."""

_FIELD = "tokenizer.chat_template"
_WITH_TOOLS = "tool_use"
# What a message's reasoning is passed as: templates read the first; clients, and gpt-oss' template, have others.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 100


class ChatTemplate:
    """Renders a conversation the way the model was trained to read it.

    The template comes from the model file and is not trusted: it runs in Jinja's immutable sandbox, and its time, loop
    rounds and the length of its texts are bounded.
    """

    def __init__(
        self, source: str | None, *, special: Mapping[str, str] | None = None, named: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            source: The Jinja source; None where all templates have names. It is compiled when first used, so that a
                broken one harms chats only.
            special: The texts of the model's special tokens, such as "bos_token", which templates write out.
            named: Other templates of the model by name; "tool_use" is taken when tools are given.
        """
        self._sources = dict(named or {})
        if source is not None:
            self._sources[DEFAULT] = source
        self._special = dict(special or {})
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str | None = None) -> ChatTemplate:
        """The template of a GGUF file, given its key-value pairs (`Checkpoint.metadata`).

        Args:
            metadata: The pairs.
            source: A template to use instead of the file's; `CHATML` for a model that has none.

        Raises:
            TemplateError: The file has no template and `source` is None, or what it has is no text.
        """
        tokens = metadata.get("tokenizer.ggml.tokens")

        def special(name: str) -> str:
            token_id = metadata.get(f"tokenizer.ggml.{name}_id")
            if not isinstance(tokens, list) or not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                return ""
            return str(tokens[token_id])

        named: dict[str, str] = {}
        if source is None:
            source = metadata.get(_FIELD)
            if source is None:
                raise TemplateError(
                    f"this model has no chat template ({_FIELD} is missing), so it cannot take messages. Give a text"
                    " prompt instead, or name a template to use, such as ChatML."
                )
            if not isinstance(source, str):
                raise TemplateError(f"{_FIELD} is {type(source).__name__}, not a text: the model file is damaged")
            prefix = f"{_FIELD}."
            named = {
                key.removeprefix(prefix): value
                for key, value in metadata.items()
                if key.startswith(prefix) and isinstance(value, str)
            }
        return cls(source, special={name: special(name) for name in ("bos_token", "eos_token")}, named=named)

    def render(
        self,
        /,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. Tokenize it with `encode(add_special=True, parse_special=True)`.

        A field of a message that is None is left out, as if it had never been there. A template that cannot do without
        a content, as that of a turn that only calls tools, gets an empty one. Content that is a list of text parts is
        given as it is to a template that takes it apart, and to others joined with line breaks. A tool call's arguments
        that are the text of a JSON object are given as that object.

        Args:
            messages: The conversation, oldest first; not empty.
            add_generation_prompt: Whether to end where the assistant's answer begins.
            tools: What the model may call, as the template expects it (usually JSON schemas).
            variables: Further variables for the template.

        Raises:
            InvalidParameterError: A message is malformed; names the field.
            TemplateError: The template refuses the messages, in its own words, or is broken or boundless.
        """
        given = [_message(index, message) for index, message in enumerate(_messages(messages))]
        arguments = {
            **self._special,
            "documents": None,
            **{name: _plain(name, value) for name, value in variables.items()},
            "add_generation_prompt": add_generation_prompt,
            "tools": _plain("tools", list(tools)) if tools else None,
        }
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._sources else DEFAULT
        if any(isinstance(message.get("content"), list) for message in given):
            text = self._render_parts(name, arguments, given)
            if text is not None:
                return text
            given = [_joined(message) for message in given]
        try:
            return self._render(name, {**arguments, "messages": given})
        except TemplateError:
            if all("content" in message for message in given):
                raise
            return self._render(name, {**arguments, "messages": [{"content": "", **message} for message in given]})

    def _render_parts(self, name: str, arguments: Mapping[str, Any], given: list[dict[str, Any]]) -> str | None:
        """The text, if the template takes lists of text parts apart: each part is found in it, and no list is."""
        try:
            text = self._render(name, {**arguments, "messages": given})
        except TemplateError:
            return None
        lists = [message["content"] for message in given if isinstance(message.get("content"), list)]
        taken_apart = all(str(parts) not in text for parts in lists)
        whole = all(part["text"].strip() in text for parts in lists for part in parts)
        return text if taken_apart and whole else None

    def _render(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            template = self._compiled.get(name)
            if template is None:
                template = self._compiled[name] = TemplateSandbox().from_string(self._source(name))
            return render_bounded(template, arguments)
        except TemplateError:
            raise
        except RefusedError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the model's chat template is broken in line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise TemplateError("the model's chat template calls itself without end") from error
        except Exception as error:
            # A template is a program of its own: whatever it runs into is a fault of its kind, never the engine's.
            raise TemplateError(f"the model's chat template failed: {type(error).__name__}: {error}") from error

    def _source(self, name: str) -> str:
        source = self._sources.get(name)
        if source is None:
            names = ", ".join(sorted(self._sources))
            raise TemplateError(f"the model has no chat template for this: none is named {name!r}, only {names}")
        return source


def _messages(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidParameterError("messages", messages, "a list of at least one message")
    return messages


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as the template sees it: plain data. Its content is a text, a list of text parts, or not there."""
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidParameterError(field, message, 'an object with "role" and "content"')
    plain: dict[str, Any] = {key: value for key, value in _plain(field, message).items() if value is not None}
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise InvalidParameterError(f"{field}.role", plain.get("role"), 'a text such as "user"')
    if "content" in plain:
        plain["content"] = _content(f"{field}.content", plain["content"])
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _object_or_text(function["arguments"])
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _content(field: str, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameterError(field, content, "a text, null, or a list of text parts")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameterError(
                f"{field}[{index}]", part, 'a part like {"type": "text", "text": "..."}; this model reads text only'
            )
        parts.append(part)
    return parts


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def _object_or_text(arguments: str) -> object:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _plain(field: str, value: object, depth: int = 0) -> Any:
    """A copy made of JSON's types alone, so that a template can reach nothing else."""
    if depth > _MAX_DEPTH:
        raise InvalidParameterError(field, "...", f"at most {_MAX_DEPTH} levels of lists and objects")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{field}.{key}", entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(f"{field}[{index}]", entry, depth + 1) for index, entry in enumerate(value)]
    raise InvalidParameterError(field, value, "JSON's types: texts, numbers, true, false, null, lists and objects")
