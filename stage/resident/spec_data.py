"""A `ModelSpec` as the data of a JSON file, and back: checked as strictly as what any other reader makes one from."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardline.stage.errors import CheckpointError, shown
from shardline.stage.spec import ExpertsSpec, ModelSpec, RopeSpec

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
MAX_EXPERTS = 4096

_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_length")


def spec_to_data(spec: ModelSpec) -> dict[str, Any]:
    """Plain data; JSON keeps every bit of its numbers."""
    return dataclasses.asdict(spec)


def spec_from_data(path: Path, data: Any, field: str) -> ModelSpec:
    """The model that a file's data says. Raises CheckpointError, which names the file and the field."""
    try:
        values = _values(ModelSpec, data, field)
        _check_model(values)
        return ModelSpec(**values)
    except _FieldError as error:
        raise CheckpointError(path, error.field, error.problem) from None


class _FieldError(Exception):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def _values(kind: type, data: Any, field: str) -> dict[str, Any]:
    """The arguments of a dataclass, each of its type."""
    if not isinstance(data, dict):
        raise _FieldError(field, f"{shown(data)} is not an object")
    hints = get_type_hints(kind)
    for name in data:
        if name not in hints:
            raise _FieldError(f"{field}.{shown(name)}", "is unknown: the folder is of a later version of shardline")
    for name in hints:
        if name not in data:
            raise _FieldError(f"{field}.{name}", "is missing")
    return {name: _value(hint, data[name], f"{field}.{name}") for name, hint in hints.items()}


def _value(kind: Any, value: Any, field: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _value(kind, value, field)
    if origin is Literal:
        if value not in arguments:
            raise _FieldError(field, f"{shown(value)} is not one of {', '.join(arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _FieldError(field, f"{shown(value)} is not a list")
        return tuple(_value(arguments[0], entry, f"{field}[{index}]") for index, entry in enumerate(value))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**_values(kind, value, field))
    if kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e30 < value < 1e30:
            raise _FieldError(field, f"{shown(value)} is not a finite number")
        return float(value)
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise _FieldError(field, f"{shown(value)} is not an integer from 0 to {MAX_SIZE}")
        return value
    assert kind in (bool, str), kind
    if not isinstance(value, kind):
        raise _FieldError(field, f"{shown(value)} is not {'a text' if kind is str else 'true or false'}")
    return value


def _require(condition: bool, field: str, problem: str) -> None:
    if not condition:
        raise _FieldError(f"model.{field}", problem)


def _check_model(values: dict[str, Any]) -> None:
    for name in _SIZES:
        _require(values[name] >= 1, name, "is 0")
    layers, ropes, experts = values["layers"], values["ropes"], values["experts"]
    count = values["num_layers"]
    _require(count <= MAX_LAYERS, "num_layers", f"{count} is more than {MAX_LAYERS}")
    _require(len(layers) == count, "layers", f"has {len(layers)} entries; num_layers is {count}")
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    _require(heads % kv_heads == 0, "num_kv_heads", f"{kv_heads} does not divide the {heads} query heads")
    for name in ("norm_eps", "embedding_scale"):
        _require(values[name] > 0, name, f"{values[name]} is not above zero")
    for name in ("attention_softcap", "final_softcap", "attention_scale"):
        _require(values[name] >= 0, name, f"{values[name]} is below zero")
    qk_norm = values["qk_norm"]
    _require(qk_norm in (None, "head", "row"), "qk_norm", f"{shown(qk_norm)} is not null, head or row")
    with_experts = [layer.experts for layer in layers]
    _require(all(with_experts) or values["intermediate_size"] >= 1, "intermediate_size", "is 0")
    _require((experts is not None) == any(with_experts), "experts", "does not agree with what the layers have")
    _require(not (values["post_norms"] and any(with_experts)), "post_norms", "is set in a model with experts")
    for index, layer in enumerate(layers):
        known = layer.rope is None or layer.rope < len(ropes)
        _require(known, f"layers[{index}].rope", f"is {layer.rope}; there are {len(ropes)}")
    for index, rope in enumerate(ropes):
        _check_rope(rope, values["head_dim"], f"ropes[{index}]")
    if experts is not None:
        _check_experts(experts)


def _check_rope(rope: RopeSpec, head_dim: int, field: str) -> None:
    _require(rope.base > 0, f"{field}.base", f"{rope.base} is not above zero")
    even = 2 <= rope.rotary_dim <= head_dim and rope.rotary_dim % 2 == 0
    _require(even, f"{field}.rotary_dim", f"{rope.rotary_dim} is no even part of a head's {head_dim} channels")
    for name in ("factors", "long_factors"):
        factors = getattr(rope, name)
        if factors is not None:
            fit = len(factors) == rope.rotary_dim // 2 and min(factors) > 0
            _require(fit, f"{field}.{name}", f"are not {rope.rotary_dim // 2} numbers above zero")
    positive = rope.attention_factor > 0 and math.isfinite(rope.attention_factor)
    _require(positive, f"{field}.attention_factor", f"{rope.attention_factor} is not above zero")


def _check_experts(experts: ExpertsSpec) -> None:
    rule, count = experts.rule, experts.num_experts
    _require(1 <= count <= MAX_EXPERTS, "experts.num_experts", f"{count} is not 1 to {MAX_EXPERTS}")
    _require(experts.intermediate_size >= 1, "experts.intermediate_size", "is 0")
    _require(experts.shared_size > 0 or not experts.shared_gate, "experts.shared_gate", "gates no expert")
    groups, kept = rule.num_groups, rule.groups_kept
    even = 1 <= groups <= count and count % groups == 0 and (groups == 1 or count // groups >= 2)
    _require(even, "experts.rule.num_groups", f"{groups} even groups of {count} experts cannot be")
    _require(1 <= kept <= groups, "experts.rule.groups_kept", f"{kept} is not 1 to {groups}")
    chosen = rule.experts_per_token
    fit = 1 <= chosen <= kept * (count // groups)
    _require(fit, "experts.rule.experts_per_token", f"{chosen} of {kept * (count // groups)}")
    _require(rule.scale > 0, "experts.rule.scale", f"{rule.scale} is not above zero")
