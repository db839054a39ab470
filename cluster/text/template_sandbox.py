"""Where chat templates run: Jinja's immutable sandbox, with bounds on time, loop rounds and sizes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 24
"""The longest prompt text, and the longest text or list that a template may keep."""
MAX_STEPS = 1 << 20
"""The most loop rounds, calls, and entries of lists and objects turned into text, in one rendering."""
MAX_SECONDS = 5.0
"""The longest that one rendering may take."""

_MAX_POWER_BITS = 1 << 12
_MAX_INDENT = 64

# Each can make a text or list of any length out of nothing, and no chat template needs it.
_REFUSED_FILTERS = ("batch", "center", "slice", "wordwrap")
_REFUSED_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
# A width in a format that is absurd, or is not written in it.
_WIDE_FORMAT = re.compile(r"\d{5}|\{[^{}]*\{")
_WIDE_PERCENT = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")

_T = TypeVar("_T")


class RefusedError(Exception):
    """The template called `raise_exception`; the message is its own."""


class BoundlessError(Exception):
    """The template takes more than a chat template ever should."""


class _Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise BoundlessError(f"it takes more than {MAX_STEPS} loop rounds and calls")
        if time.monotonic() > self._deadline:
            raise BoundlessError(f"it takes more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("_budget")


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template of a `TemplateSandbox`. Raises BoundlessError, RefusedError or what the template runs into."""
    token = _budget.set(_Budget())
    try:
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                raise BoundlessError(f"its text is longer than {MAX_CHARACTERS} characters")
        return "".join(parts)
    finally:
        _budget.reset(token)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, for `render_bounded` only.

    Blocks are trimmed; there are loop controls, a `tojson` that does not escape, `raise_exception`, `strftime_now` and
    `{% generation %}` blocks.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=_printable
        )
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters |= {"_rounds": _rounds, "_kept": _kept, "_concatenated": _concatenated}
        self.filters |= {"format": _percent, "indent": _indent, "join": _join, "replace": _replace}
        self.filters |= {"string": _text, "tojson": _to_json}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bounded = _Bounds().visit(tree)
        assert isinstance(bounded, nodes.Template)
        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise BoundlessError(f"it formats with a width that is too large: {value.__self__[:40]!r}")
        return wrapped

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend(1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and obj.__name__ == "replace":
            return _replace(owner, *args, **kwargs)
        if isinstance(owner, str) and obj.__name__ == "join":
            return _joined(owner, *args)
        return _kept(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
                raise BoundlessError("it computes a power that is too large")
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int):
                    _check_length(len(sized) * count)
        elif operator == "%":
            _check_percent(left, right)
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Puts the bounds into a parsed template: on each loop's rounds, each value that it keeps, and each `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_rounds", node)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        self.generic_visit(node)
        node.node = _filtered(node.node, "_kept", node)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_kept", node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(
            nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "_concatenated", node
        )


def _filtered(value: nodes.Node | None, name: str, near: nodes.Node) -> nodes.Filter:
    assert value is None or isinstance(value, nodes.Expr)
    return nodes.Filter(value, name, [], [], None, None, lineno=near.lineno, environment=near.environment)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's own words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise BoundlessError(f"it makes a text or list longer than {MAX_CHARACTERS}")


def _kept(value: _T) -> _T:
    if isinstance(value, str | list | tuple):
        _check_length(len(value))
    return value


def _rounds(values: Any) -> Any:
    try:
        count = len(values)
    except TypeError:
        return _counted(values)
    _budget.get().spend(count)
    return values


def _counted(values: Iterable[_T]) -> Iterator[_T]:
    budget = _budget.get()
    for value in values:
        budget.spend(1)
        yield value


def _printable(value: _T) -> _T:
    """Count what a list or object holds before it is turned into text: one that holds itself many times is short in
    memory and has no end in print."""
    if isinstance(value, list | tuple | dict):
        pending: list[Any] = [value]
        budget = _budget.get()
        while pending:
            entry = pending.pop()
            if isinstance(entry, list | tuple | dict):
                budget.spend(len(entry))
                pending += entry.values() if isinstance(entry, dict) else entry
    return value


def _text(value: Any) -> str:
    return str(_printable(value))


def _concatenated(values: Iterable[Any]) -> str:
    return _joined("", values)


def _joined(separator: str, values: Iterable[Any]) -> str:
    texts = [_text(value) for value in values]
    _check_length(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _joined(_text(d), value)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    limit = -1 if count is None else count
    found = text.count(old) if limit < 0 else min(text.count(old), limit)
    _check_length(len(text) + found * (len(new) - len(old)))
    return text.replace(old, new, limit)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(value)
    _check_length(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    return do_indent(text, width, first, blank)


def _check_percent(pattern: object, values: object) -> None:
    if isinstance(pattern, str) and _WIDE_PERCENT.search(pattern):
        raise BoundlessError(f"it formats with a width that is too large: {pattern[:40]!r}")
    _printable(values)


def _percent(pattern: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(pattern, args)
    _check_percent(pattern, kwargs)
    return do_format(pattern, *args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, str) or (indent is not None and indent > _MAX_INDENT):
        raise BoundlessError(f"tojson is asked to indent by {indent!r}; {_MAX_INDENT} spaces is the most")
    _printable(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
