"""Conversations as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster.text.chat_template import ChatTemplate
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.folder_template import template_from_folder

pytestmark = pytest.mark.peer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now>, \u00e9.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "\u00c5rhus"}}}
PARTS = [{"type": "text", "text": " It is "}, {"type": "text", "text": "sunny.\n"}]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " two  spaces\n"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": None, "content": '{"sun": true}'},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None, "reasoning": "It says so."},
        {"role": "user", "content": "Sure?"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}],
]
IN_PARTS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": PARTS}],
    [
        {"role": "system", "content": [PARTS[0]]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": PARTS},
    ],
]

# The ways in which the templates of well-known families treat content, tools and calls.
CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content is string %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{- content }}{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}"
    "{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}"
    '{{- \'<tool_call>{"name": "\' + tool_call.name + \'", "arguments": \' }}{{- tool_call.arguments | tojson }}'
    "{{- '}</tool_call>' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|h|>' + message['role'] + '<|e|>\\n\\n' + message['content'] | trim + '<|eot|>' }}"
    "{%- elif 'tool_calls' in message %}{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|h|>assistant<|e|>\\n\\n' }}{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}"
    "{{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot|>' }}{%- else %}{{- '<|h|>ipython<|e|>\\n\\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}"
    "{{- message.content }}{%- endif %}{{- '<|eot|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|h|>assistant<|e|>\\n\\n' }}{%- endif %}"
)
EITHER = (
    "{{ bos_token }}\n{%- for message in messages -%}\n    {{ '<start_of_turn>' + message.role + '\\n' }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
    "    {%- elif message['content'] is iterable -%}\n        {%- for item in message['content'] -%}\n"
    "            {%- if item['type'] == 'text' -%}\n                {{ item['text'] | trim }}\n"
    "            {%- endif -%}\n"
    "        {%- endfor -%}\n    {%- endif -%}\n    {{ '<end_of_turn>\\n' }}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n    {{ '<start_of_turn>model\\n' }}\n{%- endif -%}\n"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "either": EITHER}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    library = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendered(tokenizer: Any, name: str, tools: Any) -> None:
    ours = ChatTemplate(TEMPLATES[name], special={"bos_token": "<s>", "eos_token": "</s>"})
    chats = CHATS + (IN_PARTS if name == "either" else [])
    for chat in chats:
        for prompt in (True, False):
            expected = tokenizer.apply_chat_template(
                chat, tools=tools, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt
            )
            assert ours.render(chat, prompt, tools) == expected


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_parts_where_transformers_loses_them(name: str) -> None:
    """These templates take texts only: from the parts comes what would come of their text."""
    ours = ChatTemplate(TEMPLATES[name], special={"bos_token": "<s>"})
    for chat in IN_PARTS:
        joined = [
            {
                **turn,
                "content": turn["content"]
                if isinstance(turn["content"], str)
                else "\n".join(p["text"] for p in turn["content"]),
            }
            for turn in chat
        ]
        assert ours.render(chat) == ours.render(joined)


def test_files_as_transformers_writes_them(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = {"default": CHATML, "tool_use": HEADERS}
    for jinja_files in (True, False):
        folder = tmp_path / str(jinja_files)
        tokenizer.save_pretrained(str(folder), save_jinja_files=jinja_files)
        ours = template_from_folder(folder, FolderMarks.read(folder))
        for tools in (None, TOOLS):
            expected = tokenizer.apply_chat_template(CHATS[1], tools=tools, tokenize=False)
            assert ours.render(CHATS[1], False, tools) == expected
    tokenizer.chat_template = EITHER
    tokenizer.save_pretrained(str(tmp_path / "one"))
    assert (tmp_path / "one" / "chat_template.jinja").is_file()
    ours = template_from_folder(tmp_path / "one", FolderMarks.read(tmp_path / "one"))
    assert ours.render(CHATS[0]) == tokenizer.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True)
    # Older folders keep it in tokenizer_config.json.
    config = json.loads((tmp_path / "False" / "tokenizer_config.json").read_text())
    assert isinstance(config["chat_template"], list)
