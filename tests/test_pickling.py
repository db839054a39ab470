"""What crosses a process border pickles and comes back equal: errors of all rooms, parameters and messages."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import pickle
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardline.cluster.pipeline import StageStats
from shardline.scheduler import SamplingParams, SchedulerConfig
from shardline.stage import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cluster", "kernels", "scheduler", "stage")
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def errors_of_the_rooms() -> list[type[Exception]]:
    """The exceptions of each room's errors module, and the public ones that other modules derive from them."""
    found: dict[str, type[Exception]] = {}
    for room in ROOMS:
        if (ROOT / room / "errors.py").exists():
            module = importlib.import_module(f"shardline.{room}.errors")
            found |= {name: one for name, one in vars(module).items() if inspect.isclass(one) and _is_ours(one)}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
                if isinstance(node, ast.ClassDef) and node.name not in found and bases & found.keys():
                    module = importlib.import_module(
                        f"shardline.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
                    )
                    found[node.name] = getattr(module, node.name)
    return sorted(found.values(), key=lambda one: one.__qualname__)


def _is_ours(one: type) -> bool:
    return issubclass(one, Exception) and one.__module__.startswith("shardline.")


def is_message(kind: object) -> bool:
    """Whether it is a dataclass or a named tuple."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def fields_of(message: type) -> list[str]:
    if hasattr(message, "_fields"):
        return list(message._fields)
    return [field.name for field in dataclasses.fields(message)]


def built(kind: object, depth: int = 0) -> object:
    """A value of a type, as its annotation says; fails on an annotation that it does not know."""
    if kind is SamplingParams:
        return SamplingParams(temperature=0.7, seed=2**64 - 1, logit_bias=((5, -1.0),), stop=("הסוף", "\n"), n=3)
    if kind is SchedulerConfig:
        return SchedulerConfig(8, 16, 128, 4, 64, 32, 16, eos_token_ids=(2,))
    if kind is ModelSpec:
        layers = (LayerSpec(window=9, rope=None), LayerSpec(experts=True))
        parts = {"layers": layers, "ropes": (built(RopeSpec),), "experts": built(ExpertsSpec), "qk_norm": "row"}
        return ModelSpec("größer", 2, *range(3, 10), norm_eps=1e-5, tied_embeddings=True, **parts)
    if is_message(kind):
        assert isinstance(kind, type)
        hints = typing.get_type_hints(kind)
        return kind(**{name: built(hints[name], depth + 1) for name in fields_of(kind)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return built(next(one for one in arguments if one is not type(None)), depth)
    if origin is tuple:
        repeated = arguments[-1] is Ellipsis
        return tuple(built(one, depth) for one in ((arguments[0],) * 2 if repeated else arguments))
    if origin is typing.Literal:
        return arguments[-1]
    if origin is list:
        return [built(arguments[0], depth)]
    if origin in (dict, Mapping):
        return {built(arguments[0], depth): built(arguments[1], depth)}
    simple = {
        int: 7 + depth,
        float: -0.5,
        str: "größer 🦊",
        bool: True,
        object: 2.5,
        typing.Any: None,
        Path: Path("/a/b"),
    }
    return simple[kind]


def arguments_of(error: type[Exception]) -> inspect.BoundArguments | None:
    """Arguments for an exception with an `__init__` of its own; None for one that takes a message."""
    if not inspect.isfunction(error.__init__):
        return None
    signature = inspect.signature(error.__init__)
    hints = typing.get_type_hints(error.__init__)
    bound = signature.bind_partial(None)
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            bound.arguments[name] = built(hints[name])
    return bound


def messages_of_the_rooms() -> list[type]:
    found = [StageStats]
    for room in ("scheduler", "stage", "cluster"):
        module = importlib.import_module(f"shardline.{room}")
        found += [one for name in module.__all__ if is_message(one := vars(module).get(name))]
    # What a stage gives to the next one goes over the data plane as a frame, never pickled.
    return sorted((one for one in found if one.__name__ != "StepOutput"), key=lambda one: one.__name__)


@pytest.mark.parametrize("error", errors_of_the_rooms(), ids=lambda error: error.__name__)
def test_errors(error: type[Exception]) -> None:
    bound = arguments_of(error)
    raised = error("what went wrong: größer") if bound is None else error(*bound.args[1:], **bound.kwargs)
    raised.add_note("seen on node 2")
    for protocol in PROTOCOLS:
        back = pickle.loads(pickle.dumps(raised, protocol))
        assert type(back) is error
        assert str(back) == str(raised) != ""
        assert (back.args, vars(back)) == (raised.args, vars(raised))
    assert str(copy.copy(raised)) == str(raised)


@pytest.mark.parametrize("message", messages_of_the_rooms(), ids=lambda message: message.__name__)
def test_messages(message: type) -> None:
    sent = built(message)
    for protocol in PROTOCOLS:
        back = pickle.loads(pickle.dumps(sent, protocol))
        assert type(back) is message
        assert back == sent
        for name in fields_of(message):
            # A dataclass raises a class of its own of this.
            with pytest.raises(AttributeError):
                setattr(back, name, None)


def test_enough_was_found() -> None:
    names = {one.__name__ for one in (*errors_of_the_rooms(), *messages_of_the_rooms())}
    wanted = (
        "InvalidParameterError CheckpointError StageLostError StepPlan StepResult SequenceRun SampledToken StageSpec "
        "Request Delta NewRequest"
    )
    assert names >= set(wanted.split())
