"""The chat template of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import TemplateError
from shardline.cluster.text import template_sandbox
from shardline.cluster.text.chat_template import ChatTemplate
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.folder_template import template_from_folder

HI = ({"role": "user", "content": "hi"},)
TOOLS = ({"type": "function", "function": {"name": "f"}},)


def template(folder: Path, files: Mapping[str, object]) -> ChatTemplate:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return template_from_folder(folder, FolderMarks.read(folder))


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


class TestWhere:
    @pytest.mark.parametrize(
        ("files", "text"),
        [
            ({"tokenizer_config.json": {"chat_template": "config"}}, "config"),
            (
                {"chat_template.json": {"chat_template": "json"}, "tokenizer_config.json": {"chat_template": "x"}},
                "json",
            ),
            ({"chat_template.jinja": "file", "chat_template.json": {"chat_template": "json"}}, "file"),
            ({"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": NAMED}}, "file"),
            ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain"),
            ({"tokenizer_config.json": {"chat_template": {"default": "a", "rag": "b"}}}, "a"),
            ({"chat_template.json": {"chat_template": None}, "tokenizer_config.json": {"chat_template": "x"}}, "x"),
            ({"chat_template.jinja": "\ufefffile", "additional_chat_templates/tool_use.jinja": "tools"}, "file"),
        ],
    )
    def test_which_is_taken(self, tmp_path: Path, files: Mapping[str, object], text: str) -> None:
        assert template(tmp_path, files).render(HI) == text

    @pytest.mark.parametrize(
        "files",
        [
            {"tokenizer_config.json": {"chat_template": NAMED}},
            {"tokenizer_config.json": {"chat_template": {"default": "plain", "tool_use": "tools"}}},
            {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
        ],
    )
    def test_one_for_tools(self, tmp_path: Path, files: Mapping[str, object]) -> None:
        found = template(tmp_path, files)
        assert found.render(HI) == "plain"
        assert found.render(HI, tools=TOOLS) == "tools"

    def test_only_one_for_tools(self, tmp_path: Path) -> None:
        found = template(tmp_path, {"tokenizer_config.json": {"chat_template": NAMED[1:]}})
        assert found.render(HI, tools=TOOLS) == "tools"
        with pytest.raises(TemplateError, match="none is named 'default', only tool_use"):
            found.render(HI)

    def test_none(self, tmp_path: Path) -> None:
        with pytest.raises(TemplateError, match=r"has no chat template .*Give a text prompt, or name a template"):
            template(tmp_path, {"tokenizer_config.json": {}})

    @pytest.mark.parametrize(
        ("files", "problem"),
        [
            ({"tokenizer_config.json": {"chat_template": 3}}, "chat_template: is 3, not a text or a list of named"),
            ({"tokenizer_config.json": {"chat_template": ["x"]}}, "chat_template[0]: is 'x', not an object"),
            ({"tokenizer_config.json": {"chat_template": [{"name": "a"}]}}, "chat_template[0].template: is missing"),
            ({"tokenizer_config.json": {"chat_template": [{"template": "a"}]}}, "chat_template[0].name: is missing"),
            ({"tokenizer_config.json": {"chat_template": {"default": 1}}}, "chat_template.default: is 1, not a text"),
            ({"tokenizer_config.json": {"chat_template": "\ud800"}}, "holds half a surrogate pair"),
            ({"chat_template.json": "["}, "chat_template.json: is no JSON"),
            ({f"additional_chat_templates/{i}.jinja": "x" for i in range(40)}, "has more than 32 templates"),
        ],
    )
    def test_damaged(self, tmp_path: Path, files: Mapping[str, object], problem: str) -> None:
        with pytest.raises(TemplateError) as caught:
            template(tmp_path, files)
        assert problem in str(caught.value)
        assert str(tmp_path) in str(caught.value)

    def test_too_large(self, tmp_path: Path) -> None:
        with (tmp_path / "chat_template.jinja").open("wb") as file:
            file.truncate(1 << 38)
        with pytest.raises(TemplateError, match=r"chat_template.jinja: has more than 4 MiB"):
            template(tmp_path, {})

    def test_no_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
        with pytest.raises(TemplateError, match=r"chat_template.jinja: is no UTF-8 text: byte 1 is wrong"):
            template(tmp_path, {})


class TestVariables:
    def test_special_tokens(self, tmp_path: Path) -> None:
        config = {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "image_token": "<img>",
            "extra_special_tokens": {"call_token": "<call>"},
            "model_specific_special_tokens": {"think_token": "<think>"},
            "add_bos_token": True,
        }
        source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ call_token }}{{ think_token }}"
        source += "|{{ pad_token is defined }}"
        found = template(tmp_path, {"tokenizer_config.json": config, "chat_template.jinja": source})
        assert found.render(HI) == "<s></s><img><call><think>|False"
        older = {
            "tokenizer_config.json": {"eos_token": "x"},
            "special_tokens_map.json": {"eos_token": "y", "bos_token": "z"},
        }
        assert template(tmp_path, older).render(HI) == "zy|False"

    def test_what_every_template_may_ask_for(self, tmp_path: Path) -> None:
        source = "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}"
        found = template(tmp_path, {"chat_template.jinja": source})
        assert found.render(HI) == "TrueTrueTrue"
        assert found.render(HI, False, documents=[{"title": "a", "text": "b"}]) == "FalseTrueFalse"


class TestBounds:
    def test_a_loop_without_end(self, tmp_path: Path) -> None:
        for source in (
            "{% for i in range(10 ** 9) %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ):
            with pytest.raises(TemplateError):
                template(tmp_path, {"chat_template.jinja": source}).render(HI)

    def test_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = template(tmp_path, {"chat_template.jinja": "{% for i in range(1000) %}{{ i }}{% endfor %}"})
        assert found.render(HI).startswith("012")
        monkeypatch.setattr(template_sandbox, "MAX_SECONDS", -1.0)
        with pytest.raises(TemplateError, match="takes more than -1 seconds"):
            found.render(HI)

    @pytest.mark.parametrize(
        "source", ["{% for", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "(" * 99]
    )
    def test_a_broken_one_harms_chats_only(self, tmp_path: Path, source: str) -> None:
        found = template(tmp_path, {"chat_template.jinja": source})
        if source.startswith("("):
            assert found.render(HI) == source
        else:
            with pytest.raises(TemplateError, match="template"):
                found.render(HI)


LISTS = "{% for m in messages %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEXTS_ONLY = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
PASTED = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
DROPPED = "{% for m in messages %}<{{ m.content if m.content is string }}>{% endfor %}"
REFUSED = (
    "{% for m in messages %}{% if m.content is not string %}{{ raise_exception('text!') }}{% endif %}<{{ m.content }}>"
    "{% endfor %}"
)
PARTS = [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (LISTS, "onetwo"),
        (EITHER, "[ one ][two]"),
        (TEXTS_ONLY, "< one \ntwo>"),
        (PASTED, "< one \ntwo>"),
        (DROPPED, "< one \ntwo>"),
        (REFUSED, "< one \ntwo>"),
    ],
)
def test_content_in_parts(source: str, text: str) -> None:
    """A template that takes parts apart gets them; any other gets their text, and never a list's Python form."""
    assert ChatTemplate(source).render([{"role": "user", "content": PARTS}]) == text
    plain = [dict(part) for part in PARTS]
    assert ChatTemplate(source).render([{"role": "user", "content": ["a", *plain]}]).startswith(("a", "[a]", "<a\n"))


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (TEXTS_ONLY, "<>"),
        (PASTED, "<>"),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<>"),
        ("{% for m in messages %}<{% if m.content is not none %}{{ m.content }}{% endif %}>{% endfor %}", "<>"),
        ("{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}", "f"),
        ("{% for m in messages %}{{ m.keys() | list | sort | join(',') }}{% endfor %}", "role,tool_calls"),
    ],
)
def test_a_turn_that_only_calls_tools(source: str, text: str) -> None:
    assert ChatTemplate(source).render([CALL]) == text
    assert ChatTemplate(source).render([{k: v for k, v in CALL.items() if v is not None}]) == text


def test_null_fields_are_not_there() -> None:
    message: dict[str, Any] = {"role": "user", "content": "a", "tool_calls": None, "name": None}
    assert (
        ChatTemplate("{{ 'name' in messages[0] }}{{ messages[0].tool_calls is defined }}").render([message])
        == "FalseFalse"
    )


def test_a_templates_own_refusal_is_told_as_it_is() -> None:
    source = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first, ' + messages[0].role) }}{% endif %}"
    )
    with pytest.raises(TemplateError, match="refuses these messages: system first, user") as caught:
        ChatTemplate(source).render(HI)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_by_any_name(name: str) -> None:
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert ChatTemplate(source).render([{"role": "assistant", "content": "a", name: "hm"}]) == "hm|hm"
