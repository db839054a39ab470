"""GPTQ files: layout, zeros, and the configuration beside them.

A module of N output and K input channels in b bits (4 or 8) is

    qweight  int32 [K b / 32, N]        packed along K, the first channel in the lowest bits
    qzeros   int32 [groups, N b / 32]   packed along N
    scales   float [groups, N]
    g_idx    int32 [K]                  optional: the group of each channel, in any order with act-order

and w[n, k] = scales[g, n] * (q[k, n] - zero[g, n]). What qzeros holds depends on `checkpoint_format`:

- "gptq_v2": the zeros.
- "gptq" (v1, and whatever says nothing): the zeros minus one. A zero of 0 is stored as 15 (255 for 8 bits), and what
  that does to its neighbours depends on who wrote the file. GPTQModel and AutoRound take the one from a whole word of
  eight zeros at once, so that a zero of 0 borrows from the next field: only adding the ones to the whole word, modulo
  2^32, restores all eight. Anyone else's fields are read one by one, (stored + 1) modulo 2^b, as AutoGPTQ reads them.
  (AutoGPTQ's own writer overwrites the fields above a zero of 0 with ones; what they held is in no file.) A stored 15
  never means 16, which is what a reader gets that adds one and forgets the modulus.
- Symmetric files have the one zero 2^(b - 1), stored as that or as one less. Some say v1 and store it as v2 does. As no
  other zero is possible, either is taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardline.kernels import GroupedMatrix
from shardline.stage.huggingface.formats.config import HISTORY, choice, flag, integer, refuse_unknown, text
from shardline.stage.huggingface.formats.patterns import Pattern
from shardline.stage.huggingface.formats.scheme import (
    AnyArray,
    Bytes,
    Scheme,
    StoredZeros,
    bytes_of,
    expect,
    expect_matrix,
    floats,
    groups_of,
    matrix,
    reordered,
    unpack,
)


def gptq_matrix(
    scheme: Scheme, qweight: AnyArray, qzeros: AnyArray, scales: AnyArray, g_idx: AnyArray | None = None
) -> GroupedMatrix:
    """A module's tensors as they lie in the file, mapped exactly; shapes above. Raises ValueError."""
    packed, n = expect_matrix("qweight", qweight, (np.int32,))
    per_word = 32 // scheme.bits
    k = packed * per_word
    count = scheme.num_groups(k)
    groups = groups_of(scheme, k, g_idx)
    expect("qzeros", qzeros, (np.int32,), (count, -(-n // per_word)))
    expect("scales", scales, (scales.dtype,), (count, n))
    # A word holds neighbours of one output channel as `GroupedMatrix.q` has them: only whole words change places.
    q = reordered(bytes_of(qweight.T), scheme.bits, groups.order)
    zeros = _zeros(scheme, qzeros, n)
    return matrix(scheme, q, floats("scales", scales).T, zeros.T, groups, scales.dtype == np.float32)


def _zeros(scheme: Scheme, qzeros: AnyArray, n: int) -> Bytes:
    """The zeros, uint8 [groups, N]; the module's docstring says how they are stored."""
    stored = unpack(qzeros, scheme.bits)[:, :n]
    if scheme.symmetric and _all_one_of(stored, (scheme.middle, scheme.middle - 1)):
        return np.full_like(stored, scheme.middle)
    if scheme.stored_zeros == "as they are":
        return stored
    if scheme.stored_zeros == "minus one":
        return (stored + np.uint8(1)) & np.uint8((1 << scheme.bits) - 1)
    ones = np.uint32(0x11111111 if scheme.bits == 4 else 0x01010101)
    return unpack((np.ascontiguousarray(qzeros).view(np.uint32) + ones).view(np.int32), scheme.bits)[:, :n]


def _all_one_of(stored: Bytes, values: tuple[int, ...]) -> bool:
    first = int(stored.flat[0])
    return first in values and bool((stored == first).all())


class GptqFormat:
    """The `quantization_config` of a GPTQ folder."""

    name = "GPTQ"
    tensors = ("qweight", "qzeros", "scales")
    optional_tensors = ("g_idx",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: the config says something that is not supported, or contradicts itself."""
        refuse_unknown(
            config,
            HISTORY | {"quant_method", "method", "bits", "group_size", "sym", "checkpoint_format", "format", "dynamic"}
            | {"is_marlin_format", "pack_dtype", "data_type"},
        )  # fmt: skip
        choice(config, "method", ("gptq",), "gptq")
        choice(config, "pack_dtype", ("int32",), "int32")
        choice(config, "data_type", ("int",), "int")
        if flag(config, "is_marlin_format", False):
            raise ValueError("is_marlin_format: true is not supported, only the formats gptq and gptq_v2")
        formats = {choice(config, key, ("gptq", "gptq_v2"), "") for key in ("checkpoint_format", "format")} - {""}
        if len(formats) > 1:
            raise ValueError("checkpoint_format and format contradict each other")
        stored: StoredZeros = "as they are"
        if formats != {"gptq_v2"}:
            stored = "word minus one" if _takes_one_from_words(config) else "minus one"
        self._scheme = _scheme(config, Scheme(4, 128, True, stored), ("bits", "group_size"))
        self._overrides = _overrides(config.get("dynamic"), self._scheme)

    def scheme(self, module: str) -> Scheme | None:
        """How that linear module is quantized; None: it is not. Raises ValueError (see `Pattern`)."""
        for pattern, scheme in self._overrides:
            if pattern.matches(module):
                return scheme
        return self._scheme

    def matrix(self, scheme: Scheme, tensors: Mapping[str, AnyArray]) -> GroupedMatrix:
        """A module's matrix. tensors: `tensors` and those of `optional_tensors` that there are. Raises ValueError."""
        return gptq_matrix(scheme, tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"))

    def shape(self, scheme: Scheme, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """(N, K) of a module, from its tensors' shapes. Raises ValueError."""
        shape = shapes["qweight"]
        if len(shape) != 2:
            raise ValueError(f"qweight has the shape {list(shape)}: it must be a matrix")
        return shape[1], shape[0] * (32 // scheme.bits)


def _takes_one_from_words(config: Mapping[str, Any]) -> bool:
    meta = config.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = writers if isinstance(writers, list) else [writers]
    if any(isinstance(name, str) and name.lower().startswith("gptqmodel") for name in names):
        return True
    return config.get("provider") == "auto-round" or "autoround_version" in config


def _scheme(config: Mapping[str, Any], default: Scheme, needed: tuple[str, ...]) -> Scheme:
    for key in needed:
        if key not in config:
            raise ValueError(f"{key} is missing")
    return Scheme(
        integer(config, "bits", default.bits),
        integer(config, "group_size", default.group_size),
        flag(config, "sym", default.symmetric),
        default.stored_zeros,
    )


def _overrides(dynamic: Any, default: Scheme) -> list[tuple[Pattern, Scheme | None]]:
    """`dynamic`: pattern -> what differs for the modules that match; the first match counts. "-:": not quantized."""
    if dynamic is None:
        return []
    if not isinstance(dynamic, Mapping):
        raise ValueError(f"dynamic: {text(dynamic)} is no table of patterns")
    found: list[tuple[Pattern, Scheme | None]] = []
    for key, changes in dynamic.items():
        try:
            pattern = Pattern(key[2:] if key.startswith(("+:", "-:")) else key)
            if key.startswith("-:"):
                found.append((pattern, None))
                continue
            if not isinstance(changes, Mapping):
                raise ValueError(f"{text(changes)} is no table")
            refuse_unknown(changes, HISTORY | {"bits", "group_size", "sym"})
            found.append((pattern, _scheme(changes, default, ())))
        except ValueError as error:
            raise ValueError(f"dynamic: {text(key)}: {error}") from None
    return found
