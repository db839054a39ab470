"""compressed-tensors files in the format "pack-quantized": W4A16 and W8A16.

A module of N output and K input channels in b bits (4 or 8) is

    weight_packed      int32 [N, K b / 32]        packed along K, the first channel in the lowest bits
    weight_scale       float [N, groups]
    weight_shape       int [2]                    N, K
    weight_zero_point  int32 [N b / 32, groups]   asymmetric only, packed along N; older files: int8 [N, groups]
    weight_g_idx       int32 [K]                  optional: the group of each channel; -1: not set

The integers are signed and stored with 2^(b - 1) added, the packed zeros too; so
w[n, k] = weight_scale[n, g] * (stored q[n, k] - stored zero[n, g]).

Which module is quantized how, the config's `config_groups` and `ignore` say, by module names, patterns ("re:...") and
the class "Linear".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardline.kernels import GroupedMatrix
from shardline.stage.huggingface.formats.config import choice, flag, integer, refuse_unknown, text
from shardline.stage.huggingface.formats.patterns import Pattern
from shardline.stage.huggingface.formats.scheme import (
    AnyArray,
    Scheme,
    bytes_of,
    expect,
    expect_matrix,
    floats,
    groups_of,
    matrix,
    reordered,
    unpack,
)


def compressed_matrix(
    scheme: Scheme,
    packed: AnyArray,
    scale: AnyArray,
    shape: AnyArray,
    zero_point: AnyArray | None = None,
    g_idx: AnyArray | None = None,
) -> GroupedMatrix:
    """A module's tensors as they lie in the file, mapped exactly; shapes above. Without act-order the result's integers
    are those of `packed`, in the same memory.

    Raises ValueError.
    """
    n, words = expect_matrix("weight_packed", packed, (np.int32,))
    per_word = 32 // scheme.bits
    k = words * per_word
    expect("weight_shape", shape, (np.int32, np.int64), (2,))
    if (int(shape[0]), int(shape[1])) != (n, k):
        raise ValueError(f"weight_shape is {shape.tolist()}: weight_packed holds {[n, k]}")
    count = scheme.num_groups(k)
    expect("weight_scale", scale, (scale.dtype,), (n, count))
    if g_idx is not None and (g_idx == -1).any():
        g_idx = None
    groups = groups_of(scheme, k, g_idx)
    q = reordered(bytes_of(packed), scheme.bits, groups.order)
    zeros = scheme.middle if scheme.symmetric else _zeros(scheme, zero_point, n, count)
    return matrix(scheme, q, floats("weight_scale", scale), zeros, groups, scale.dtype == np.float32)


def _zeros(scheme: Scheme, zero_point: AnyArray | None, n: int, count: int) -> AnyArray:
    """The stored zeros, [N, groups]."""
    if zero_point is None:
        raise ValueError("weight_zero_point is missing, and the config says that the weights are not symmetric")
    if zero_point.dtype == np.int8:
        expect("weight_zero_point", zero_point, (np.int8,), (n, count))
        zeros = zero_point.astype(np.int16) + scheme.middle
        if zeros.min() < 0 or zeros.max() >= 2 * scheme.middle:
            raise ValueError(f"weight_zero_point holds a zero that is not one of {scheme.bits} bits")
        return zeros
    expect("weight_zero_point", zero_point, (np.int32,), (-(-n * scheme.bits // 32), count))
    return unpack(zero_point.T, scheme.bits).T[:n]


_Target = str | Pattern


class CompressedTensorsFormat:
    """The `quantization_config` of a compressed-tensors folder."""

    name = "compressed-tensors"
    tensors = ("weight_packed", "weight_scale", "weight_shape")
    optional_tensors = ("weight_zero_point", "weight_g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: the config says something that is not supported."""
        refuse_unknown(
            config,
            {"quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio"}
            | {"version", "sparsity_config"},
        )  # fmt: skip
        choice(config, "format", ("pack-quantized",), "")
        choice(config, "quantization_status", ("compressed",), "compressed")
        sparsity = config.get("sparsity_config")
        if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense"):
            raise ValueError(f"sparsity_config: {text(sparsity)} is not supported")
        entries = config.get("config_groups")
        if not isinstance(entries, Mapping) or not entries:
            raise ValueError("config_groups says nothing")
        schemes: dict[str, Scheme] = {}
        for name, entry in entries.items():
            try:
                targets, scheme = _group(entry, config.get("format"))
            except ValueError as error:
                raise ValueError(f"config_groups: {name}: {error}") from None
            schemes |= dict.fromkeys(targets, scheme)
        # Names count before patterns, patterns before the class; the first in the alphabet of each.
        ranked = sorted(schemes, key=lambda target: (target == "Linear", target.startswith("re:"), target))
        self._targets = [(_target(target), schemes[target]) for target in ranked]
        self._ignored = [_target(entry) for entry in _strings(config, "ignore") if not _is_other_class(entry)]

    def scheme(self, module: str) -> Scheme | None:
        """How that linear module is quantized; None: it is not. Raises ValueError (see `Pattern`)."""
        if any(_matches(entry, module) for entry in self._ignored):
            return None
        return next((scheme for target, scheme in self._targets if _matches(target, module)), None)

    def matrix(self, scheme: Scheme, tensors: Mapping[str, AnyArray]) -> GroupedMatrix:
        """A module's matrix. tensors: `tensors` and those of `optional_tensors` that there are. Raises ValueError."""
        return compressed_matrix(
            scheme,
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors["weight_shape"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"),
        )

    def shape(self, scheme: Scheme, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """(N, K) of a module, from its tensors' shapes. Raises ValueError."""
        shape = shapes["weight_packed"]
        if len(shape) != 2:
            raise ValueError(f"weight_packed has the shape {list(shape)}: it must be a matrix")
        return shape[0], shape[1] * (32 // scheme.bits)


def _group(entry: Any, format_name: Any) -> tuple[list[str], Scheme]:
    """Targets and scheme of one of `config_groups`."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{text(entry)} is no table")
    # Activations that are quantized, or anything new, are refused by this.
    refuse_unknown(entry, {"targets", "weights", "format"})
    if not choice(entry, "format", ("pack-quantized",), "") and not format_name:
        raise ValueError("format is missing, in the group and in the config")
    weights = entry.get("weights")
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights: {text(weights)} is no table")
    refuse_unknown(
        weights,
        {"num_bits", "type", "symmetric", "strategy", "group_size", "actorder"}
        | {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"},
    )
    choice(weights, "type", ("int",), "int")
    if weights.get("actorder") is not False:
        choice(weights, "actorder", ("weight", "static", "group", "dynamic"), "")
    size = weights.get("group_size")
    strategy = choice(weights, "strategy", ("group", "channel"), "channel" if size == -1 else "group")
    if strategy == "channel" and size not in (None, -1):
        raise ValueError(f"group_size: {text(size)} contradicts the strategy channel")
    if strategy == "group" and "group_size" not in weights:
        raise ValueError("group_size is missing")
    scheme = Scheme(
        integer(weights, "num_bits", 8),
        -1 if strategy == "channel" else integer(weights, "group_size", -1),
        flag(weights, "symmetric", True),
    )
    targets = _strings(entry, "targets")
    if not targets:
        raise ValueError("targets says nothing")
    return targets, scheme


def _strings(config: Mapping[str, Any], key: str) -> list[str]:
    values = config.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key}: {text(values)} is no list of names")
    return list(values)


def _is_other_class(entry: str) -> bool:
    return entry != "Linear" and entry[:1].isupper() and entry.isidentifier()


def _target(entry: str) -> _Target:
    if _is_other_class(entry):
        raise ValueError(f"the module class {text(entry)} is not supported, only Linear")
    return Pattern(entry[3:]) if entry.startswith("re:") else entry


def _matches(target: _Target, module: str) -> bool:
    if isinstance(target, Pattern):
        return target.matches(module)
    return target in ("Linear", module)
