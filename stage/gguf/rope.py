"""A GGUF file's rotary embeddings: of the layers that see everything, and of those with a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from shardline.stage import rope_scaling
from shardline.stage.errors import shown
from shardline.stage.gguf.blocks import FLOAT_TYPES
from shardline.stage.gguf.families import Family
from shardline.stage.gguf.header import TensorInfo
from shardline.stage.gguf.keys import MAX_CONTEXT, Keys, UnsupportedError
from shardline.stage.spec import RopeSpec

ReadFloats = Callable[[TensorInfo], NDArray[np.float32]]

FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (FACTORS, SHORT_FACTORS, LONG_FACTORS)


def read_ropes(
    keys: Keys,
    family: Family,
    head_dim: int,
    context_length: int,
    tensors: Mapping[str, TensorInfo],
    read_floats: ReadFloats,
) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embedding of a layer without a window, and of one with; often the same. Raises UnsupportedError."""
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedError(
            keys.name("rope.dimension_count"), f"{rotary_dim} is odd or more than the head's {head_dim} channels"
        )
    reader = _Reader(keys, family, rotary_dim, context_length, tensors, read_floats)
    whole = reader.scaled(keys.number("rope.freq_base", 10000.0))
    if family.windows is None:
        return whole, whole
    if family.windows.local_base is not None:
        base = keys.number("rope.freq_base_swa", family.windows.local_base)
        return whole, RopeSpec(base, rotary_dim, family.interleaved)
    base = keys.number("rope.freq_base_swa", whole.base)
    return whole, whole if base == whole.base else reader.scaled(base)


class _Reader:
    def __init__(
        self,
        keys: Keys,
        family: Family,
        rotary_dim: int,
        context_length: int,
        tensors: Mapping[str, TensorInfo],
        read_floats: ReadFloats,
    ) -> None:
        self._keys = keys
        self._family = family
        self._rotary_dim = rotary_dim
        self._context_length = context_length
        self._tensors = tensors
        self._read_floats = read_floats

    def scaled(self, base: float) -> RopeSpec:
        """A rotary embedding of that base with the file's scaling."""
        keys, count = self._keys, self._rotary_dim // 2
        short, long, original = None, None, 0
        attention_factor = keys.optional_number("rope.scaling.attn_factor", 1.0)
        kind, factor = self._kind()
        given = self._factors(FACTORS)
        others = {"longrope": (FACTORS,), "yarn": ROPE_TENSORS}.get(kind, (SHORT_FACTORS, LONG_FACTORS))
        for name in others:
            if name in self._tensors:
                raise UnsupportedError(
                    f"tensor {name}", f"is there, but the scaling is {kind}: they exclude each other"
                )
        if kind == "none":
            short = given
        elif kind == "linear":
            short = tuple(value * factor for value in given or (1.0,) * count) if factor != 1.0 else given
        elif kind == "yarn":
            short, scale = self._yarn(base, factor)
            attention_factor *= scale
        else:
            short, long = self._factors(SHORT_FACTORS), self._factors(LONG_FACTORS)
            for name, factors in ((SHORT_FACTORS, short), (LONG_FACTORS, long)):
                if factors is None:
                    raise UnsupportedError(f"tensor {name}", "is missing; longrope needs it")
            if factor != 1.0:
                raise keys.refuse("rope.scaling.factor", "has no meaning for longrope")
            original = keys.size("rope.scaling.original_context_length", most=MAX_CONTEXT)
        return RopeSpec(base, self._rotary_dim, self._family.interleaved, short, long, original, attention_factor)

    def _kind(self) -> tuple[str, float]:
        keys = self._keys
        # Older files have one key, scale_linear; a factor without a type means linear too. "none" switches it off.
        factor = 1.0
        for key in ("rope.scale_linear", "rope.scaling.factor"):
            factor = keys.optional_number(key, factor)
        kind = keys.get("rope.scaling.type")
        if kind is None:
            if SHORT_FACTORS in self._tensors or LONG_FACTORS in self._tensors:
                kind = "longrope"
            else:
                kind = "none" if factor == 1.0 else "linear"
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise UnsupportedError(
                keys.name("rope.scaling.type"), f"{shown(kind)} is not supported; none, linear, yarn and longrope are"
            )
        # What the model was trained with; it changes nothing where it is not asked for.
        keys.get("rope.scaling.original_context_length")
        keys.get("rope.scaling.finetuned")
        return kind, factor

    def _yarn(self, base: float, factor: float) -> tuple[tuple[float, ...], float]:
        keys = self._keys
        keys.only("rope.scaling.yarn_ext_factor", lambda value: value == 1, "another mixture of frequencies")
        original = keys.size("rope.scaling.original_context_length", self._context_length, most=MAX_CONTEXT)
        fast = keys.number("rope.scaling.yarn_beta_fast", 32.0)
        slow = keys.number("rope.scaling.yarn_beta_slow", 1.0)
        try:
            factors = rope_scaling.yarn(
                base, self._rotary_dim, factor, original, fast, slow, self._family.yarn_truncates
            )
        except ValueError as error:
            raise UnsupportedError(keys.name("rope.scaling"), str(error)) from None
        weight = keys.optional_number("rope.scaling.yarn_log_multiplier")
        usual = rope_scaling.yarn_attention_factor(factor, 1.0, weight)
        return factors, keys.optional_number("rope.scaling.yarn_attn_factor", usual)

    def _factors(self, name: str) -> tuple[float, ...] | None:
        """What each frequency is divided by, as a tensor of the file has it."""
        info = self._tensors.get(name)
        if info is None:
            return None
        count = self._rotary_dim // 2
        if info.shape != (count,):
            raise UnsupportedError(f"tensor {name}", f"has shape {list(info.shape)}; the model's keys say {[count]}")
        if info.kind not in FLOAT_TYPES:
            raise UnsupportedError(f"tensor {name}", f"type {info.kind.name} is not supported here; floats are")
        factors = tuple(float(value) for value in self._read_floats(info))
        if not all(0 < value < math.inf for value in factors):
            raise UnsupportedError(f"tensor {name}", "an element is not a finite number above zero")
        return factors
