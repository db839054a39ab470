from __future__ import annotations

import json
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from shardline.cluster import ShardlineError, TemplateError
from shardline.cluster.text.chat_template import CHATML, ChatTemplate
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.scheduler import InvalidParameterError

HI = ({"role": "user", "content": "hi"},)
PASTED = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
ADDED = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
TRIMMED = "{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{% endfor %}"
ASKED = "{% for m in messages %}[{{ m.role }}]{{ '-' if m['content'] is none else m['content'] }}{% endfor %}"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é<"]}'}}


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


class TestSmolLM2:
    def test_prompt(self, smollm2_metadata: Mapping[str, Any]) -> None:
        template = ChatTemplate.from_metadata(smollm2_metadata)
        system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        turn = "<|im_start|>user\nGrüße 👋<|im_end|>\n"
        messages = [{"role": "user", "content": "Grüße 👋"}]
        assert template.render(messages) == system + turn + "<|im_start|>assistant\n"
        assert template.render(messages, add_generation_prompt=False) == system + turn
        own = {"role": "system", "content": "Be brief."}
        assert template.render([own, *messages], False) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"

    def test_tokens(self, smollm2_metadata: Mapping[str, Any]) -> None:
        text = ChatTemplate.from_metadata(smollm2_metadata).render(HI)
        ids = Tokenizer.from_metadata(smollm2_metadata).encode(text, add_special=True, parse_special=True)
        assert [i for i in ids if i < 17] == [1, 2, 1, 2, 1]
        assert ids[0] == 1

    def test_content_null_and_parts(self, smollm2_metadata: Mapping[str, Any]) -> None:
        template = ChatTemplate.from_metadata(smollm2_metadata)
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool"},
        ]
        assert template.render(messages).endswith(
            "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PASTED, "[user]None so[assistant]"),
        (ADDED, "[user]None so[assistant]"),
        (TRIMMED, "[user]None so[assistant]"),
        (ASKED, "[user]None so[assistant]"),
    ],
)
@pytest.mark.parametrize("turn", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_a_turn_without_content(source: str, text: str, turn: dict[str, Any]) -> None:
    """As transformers has it, the field is not there: a template writes nothing for it, and never the word None."""
    assert render(source, [{"role": "user", "content": "None so"}, turn]) == text


def test_a_turn_without_content_may_be_refused() -> None:
    source = (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('say something') }}{% endif %}{% endfor %}"
    )
    with pytest.raises(TemplateError, match="refuses these messages: say something"):
        render(source, [{"role": "user", "content": None}])


class TestMessages:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ([], ""),
            (["a", "b"], "a\nb"),
            ([{"type": "text", "text": "a"}], "a"),
            (({"type": "text", "text": "a"}, {"type": "text", "text": ""}), "a\n"),
            ("{{ 7 * 6 }}", "{{ 7 * 6 }}"),
        ],
    )
    def test_content(self, content: object, text: str) -> None:
        assert render(PASTED, [{"role": "user", "content": content}]) == f"[user]{text}"

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ((), "messages"),
            ("hi", "messages"),
            ({"role": "user", "content": "hi"}, "messages"),
            (None, "messages"),
            (["hi"], "messages[0]"),
            ([*HI, {"content": "hi"}], "messages[1].role"),
            ([{"role": "", "content": "hi"}], "messages[0].role"),
            ([{"role": 3, "content": "hi"}], "messages[0].role"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": ["a", {"type": "text"}]}], "messages[0].content[1]"),
            ([{"role": "user", "content": "a", "extra": {"x": [object()]}}], "messages[0].extra.x[0]"),
            ([{"role": "user", "content": "a", "raw": b"x"}], "messages[0].raw"),
        ],
    )
    def test_malformed(self, messages: Any, field: str) -> None:
        with pytest.raises(InvalidParameterError) as caught:
            render(PASTED, messages)
        assert caught.value.field == field

    def test_bottomless(self) -> None:
        nest: list[Any] = []
        nest.append(nest)
        with pytest.raises(InvalidParameterError, match="at most 100 levels"):
            render(PASTED, [{"role": "user", "content": "a", "extra": nest}])

    def test_any_mapping_and_text_type(self) -> None:
        class Role(StrEnum):
            USER = "user"

        message = MappingProxyType(OrderedDict(content="hi", role=Role.USER))
        assert render(PASTED, (message,)) == "[user]hi"

    def test_the_caller_keeps_its_messages(self) -> None:
        messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
        before = json.dumps(messages)
        render("{% for m in messages %}{{ m.tool_calls[0].function.arguments.x[1] }}{% endfor %}", messages)
        assert json.dumps(messages) == before

    def test_tool_call_arguments_come_as_an_object(self) -> None:
        source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
        for arguments, text in [
            ('{"x": [1, "é<"]}', '{"x": [1, "é<"]}'),
            ({"x": 1}, '{"x": 1}'),
            ("not json", '"not json"'),
            ("[1]", '"[1]"'),
            ("[" * 100_000, json.dumps("[" * 100_000)),
        ]:
            call = {"function": {"name": "f", "arguments": arguments}}
            assert render(source, [{"role": "assistant", "content": "", "tool_calls": [call]}]) == text


class TestLanguage:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
            ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
            ("{{ {'b': 2, 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":1,"b":2}'),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            ("{% for i in [0, 1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}"
             "{{ i }}{% endfor %}", "02"),
            ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
            ("{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}{% endfor %}", "1"),
            ("{% set ns = namespace(x=0) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}", "3"),
            ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f(1) }}", "<a><1>"),
            ("{% set x %}a{% generation %}b{% endgeneration %}{% endset %}{{ x | upper }}", "AB"),
            ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
            ("{{ missing }}{% if missing is defined %}x{% endif %}{% for x in missing %}{% endfor %}", ""),
            ("{{ '%s-%03d' | format('a', 7) }}{{ '{:>4}'.format('b') }}{{ 'a' * 3 }}{{ 2 ** 10 }}", "a-007   baaa1024"),
            ("{% for k, v in {'a': 1}.items() recursive %}{{ k }}{{ v }}{% endfor %}", "a1"),
            ("{{ messages[0].content.split('i')[0].strip().upper() }}", "H"),
        ],
    )  # fmt: skip
    def test_what_templates_use(self, source: str, text: str) -> None:
        assert render(source) == text

    def test_today(self) -> None:
        before = datetime.now()
        text = render("{{ strftime_now('%Y-%m-%d %H:%M') }}")
        assert text in {before.strftime("%Y-%m-%d %H:%M"), datetime.now().strftime("%Y-%m-%d %H:%M")}

    def test_variables(self) -> None:
        assert render("{{ a.b[0] }}{{ tools[0].name }}", tools=({"name": "t"},), a={"b": (1,)}) == "1t"
        assert render("{{ name }}{{ self }}", name=1, self=2)[0] == "1"
        with pytest.raises(InvalidParameterError, match=r"a\.b"):
            render("", a={"b": object()})
        with pytest.raises(InvalidParameterError, match=r"tools\[0\]"):
            render("", tools=[print])

    def test_threads_share_it(self) -> None:
        template = ChatTemplate(PASTED)
        texts: dict[int, str] = {}

        def run(index: int) -> None:
            texts[index] = template.render([{"role": "user", "content": f"{index}"}] * 200)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == {index: f"[user]{index}" * 200 for index in range(8)}


class TestErrors:
    @pytest.mark.parametrize(
        ("source", "words"),
        [
            ("{{ raise_exception('Roles must alternate') }}", "refuses these messages: Roles must alternate"),
            ("{% for %}", "is broken in line 1: "),
            ("\n{{ x | no_such_filter }}", "is broken in line 2: No filter named 'no_such_filter'"),
            ("{{ messages[0].a.b }}", "failed: UndefinedError: 'dict object' has no attribute 'a'"),
            ("{{ messages[0].content + 1 }}", "failed: TypeError: "),
            ("{{ 1 / 0 }}", "failed: ZeroDivisionError: division by zero"),
            ("{{ messages | tojson(indent='x') }}", "failed: BoundlessError"),
            ("{{ missing | tojson }}", "failed: TypeError: "),
        ],
    )
    def test_in_the_templates_own_words(self, source: str, words: str) -> None:
        with pytest.raises(TemplateError) as caught:
            render(source)
        assert f"the model's chat template {words}" in str(caught.value)
        assert isinstance(caught.value, ShardlineError)
        assert isinstance(caught.value, ValueError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.append(1) }}",
            "{{ messages[0].update(a=1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ raise_exception.__globals__.x }}",
            "{{ (messages | first).__class__.x }}",
            "{{ '{0.__class__.__name__}'.format(1) }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ self._TemplateReference__context.environment.__class__ }}",
            "{% include 'x' %}",
            "{% import 'x' as y %}",
        ],
    )
    def test_nothing_leaves_the_sandbox(self, source: str) -> None:
        with pytest.raises(TemplateError, match="failed: "):
            render(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) | map('string') %}{% endfor %}{% endfor %}",
            "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% for k in r %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            "{% for x in [[[]]] recursive %}{{ loop([[]]) }}{{ loop([[[]]]) }}{% endfor %}",
            "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
            "{{ ('a' * 10 ** 8) | length }}",
            "{{ (10 ** 8 * 'a') | length }}",
            "{{ ([0] * 10 ** 8) | length }}",
            "{% set x = 'a' * 16777216 %}{{ (x + x) | length }}",
            "{% set x = [0] * 16777216 %}{{ (x + x) | length }}",
            "{{ 10 ** (10 ** 6) % 7 }}",
            "{% set n.x = n.x + n.x %}",
            "{% set n.x = n.x ~ n.x %}",
            "{% set n.x = [n.x, n.x] | join %}",
            "{% set n.x = ''.join([n.x, n.x]) %}",
            "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}",
            "{% set n.x = n.x.replace('a', 'aa') %}",
            "{% set n.x = n.x | replace('a', 'aa') %}",
            "{% set n.x = [n.x, n.x] | string %}",
            "{% set n.x = '%s%s' % (n.x, n.x) %}",
            "{% set n.x = '%s%s' | format(n.x, n.x) %}",
            "{% set n.x = n.x | indent(2, true) ~ '\n' ~ n.x %}",
            "{% set n.l = n.l + n.l %}",
            "{{ ('a' * 10000).replace('a', 'b' * 10000) | length }}",
            "{{ ('a' * 10000) | replace('a', 'b' * 10000) | length }}",
            "{{ ''.join(['a' * 10000] * 10000) | length }}",
            "{{ (['a' * 10000] * 10000) | join | length }}",
            "{{ ('\\n' * 10000000) | indent(10) | length }}",
            "{{ '%99999999d' % 1 }}",
            "{{ '%*d' % (99999999, 1) }}",
            "{{ '%99999999d' | format(1) }}",
            "{{ '{:>99999999}'.format(1) }}",
            "{{ '{:>{}}'.format(1, 99999999) }}",
            "{{ 'a'.ljust(99999999) }}",
            "{{ 'a' | center(99999999) }}",
            "{{ 'a' | indent(99999999) }}",
            "{{ lipsum(n=9999, max=9999) }}",
            "{{ [1] | batch(99999999, 0) | list | length }}",
            "{{ [1] | tojson(indent=99999999) }}",
            "{{ range(99999999) | list | length }}",
        ],
    )  # fmt: skip
    def test_nothing_runs_away(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shardline.cluster.text.template_sandbox.MAX_SECONDS", 1.0)
        if "n." in source:
            source = (
                "{% set n = namespace(x='aa', l=[1]) %}{% for i in range(26) %}"
                + source
                + "{% endfor %}{{ n.x | length }}"
            )
        with pytest.raises(TemplateError):
            render(source)

    @pytest.mark.parametrize(
        "use", ["n.l", "n.l | tojson", "n.l ~ ''", "'%s' % (n.l,)", "[n.l] | join", "n.l | string"]
    )
    def test_a_list_of_itself_has_no_end_in_print(self, use: str) -> None:
        source = "{% set n = namespace(l=[1]) %}{% for i in range(26) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ USE }}"
        with pytest.raises(TemplateError, match="takes more than 1048576 loop rounds and calls"):
            render(source.replace("USE", use))

    @pytest.mark.parametrize("width", ["'{:>99999999}'", "'{:>{}}'", "'{0:{1}}'"])
    def test_a_width_is_refused_before_it_is_made(self, width: str) -> None:
        with pytest.raises(TemplateError, match="formats with a width that is too large"):
            render(f"{{{{ {width}.format(1, 99999999) }}}}")

    def test_a_slow_template_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shardline.cluster.text.template_sandbox.MAX_SECONDS", 0.05)
        source = "{% for i in range(99999) %}{% set x = range(99999) | list | sum %}{% endfor %}"
        with pytest.raises(TemplateError, match=r"takes more than 0\.05 seconds"):
            render(source)

    def test_after_an_error_the_template_still_works(self) -> None:
        template = ChatTemplate("{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}ok")
        for _ in range(2):
            with pytest.raises(TemplateError):
                template.render([{"role": "user", "content": "bad"}])
            assert template.render(HI) == "ok"


class TestFromMetadata:
    TOKENS = ("<s>", "</s>", "x")
    METADATA = MappingProxyType(
        {
            "tokenizer.ggml.tokens": list(TOKENS),
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.chat_template": "{{ bos_token }}plain{{ eos_token }}",
            "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
            "tokenizer.chat_template.rag": "never",
        }
    )

    def test_named_templates(self) -> None:
        template = ChatTemplate.from_metadata(self.METADATA)
        assert template.render(HI) == "<s>plain</s>"
        assert template.render(HI, tools=[{"name": "a"}, {"name": "b"}]) == "2 tools"
        assert template.render(HI, tools=[]) == "<s>plain</s>"

    def test_another_template(self) -> None:
        template = ChatTemplate.from_metadata(self.METADATA, source="{{ bos_token }}own")
        assert template.render(HI, tools=[{"name": "a"}]) == "<s>own"

    def test_none(self) -> None:
        bare = {key: value for key, value in self.METADATA.items() if not key.startswith("tokenizer.chat")}
        with pytest.raises(TemplateError, match=r"has no chat template \(tokenizer.chat_template is missing\).*text"):
            ChatTemplate.from_metadata(bare)
        chatml = ChatTemplate.from_metadata(bare, source=CHATML)
        assert chatml.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_damaged(self) -> None:
        with pytest.raises(TemplateError, match="is list, not a text"):
            ChatTemplate.from_metadata(self.METADATA | {"tokenizer.chat_template": ["x"]})
        odd = {"tokenizer.ggml.bos_token_id": 9, "tokenizer.ggml.eos_token_id": "1"}
        assert ChatTemplate.from_metadata(self.METADATA | odd).render(HI) == "plain"

    def test_a_template_that_writes_the_begin_token_gives_one(self) -> None:
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "h", "i", "▁hi"],
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -3.0, -3.0, -1.0],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
        }
        tokenizer = Tokenizer.from_metadata(metadata)
        for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
            text = ChatTemplate.from_metadata(metadata, source=source).render(HI)
            ids = tokenizer.encode(text, add_special=True, parse_special=True)
            assert ids[0] == 1
            assert 1 not in ids[1:]
