"""AWQ files in the layout that AutoAWQ calls "gemm".

A module of N output and K input channels is

    qweight  int32 [K, N / 8]        packed along N
    qzeros   int32 [groups, N / 8]   packed along N
    scales   float [groups, N]

and w[n, k] = scales[g, n] * (q[k, n] - zero[g, n]), the zeros stored as they are. A word holds eight output channels in
the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up. The layouts gemv, gemv_fast, marlin, exllama and llm-awq are
others, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardline.kernels import GroupedMatrix
from shardline.stage.huggingface.formats.config import HISTORY, choice, flag, integer, refuse_unknown
from shardline.stage.huggingface.formats.scheme import (
    AnyArray,
    Bytes,
    Scheme,
    expect,
    expect_matrix,
    floats,
    groups_of,
    matrix,
    unpack,
)

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight channels is."""

_WORDS = 64
"""Words of each row that are unpacked at a time."""


def awq_matrix(scheme: Scheme, qweight: AnyArray, qzeros: AnyArray, scales: AnyArray) -> GroupedMatrix:
    """A module's tensors as they lie in the file, mapped exactly; shapes above. Raises ValueError."""
    k, words = expect_matrix("qweight", qweight, (np.int32,))
    n, count = words * 8, scheme.num_groups(k)
    groups = groups_of(scheme, k, None)
    expect("qzeros", qzeros, (np.int32,), (count, words))
    expect("scales", scales, (scales.dtype,), (count, n))
    zeros = unpack(qzeros, 4).reshape(count, words, 8)[:, :, _PLACES].reshape(count, n)
    q = _transposed(qweight)
    return matrix(scheme, q, floats("scales", scales).T, zeros.T, groups, scales.dtype == np.float32)


def _transposed(qweight: AnyArray) -> Bytes:
    """Words [K, N / 8] to `GroupedMatrix.q`, uint8 [N, K / 2]."""
    k, words = qweight.shape
    q = np.empty((words * 8, k // 2), np.uint8)
    for start in range(0, words, _WORDS):
        # [K / 2, 2, words]: the two channels that a byte holds.
        pairs = np.ascontiguousarray(qweight[:, start : start + _WORDS]).view(np.uint32).reshape(k // 2, 2, -1)
        for channel, place in enumerate(_PLACES):
            integers = (pairs >> np.uint32(4 * place) & np.uint32(15)).astype(np.uint8)
            out = q[8 * start + channel : 8 * (start + _WORDS) : 8]
            out[...] = (integers[:, 0] | integers[:, 1] << np.uint8(4)).T
    return q


class AwqFormat:
    """The `quantization_config` of an AWQ folder."""

    name = "AWQ"
    tensors = ("qweight", "qzeros", "scales")
    optional_tensors: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: the config says something that is not supported."""
        refuse_unknown(
            config,
            HISTORY | {"quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "zero_point"}
            | {"version", "format", "checkpoint_format", "backend", "pack_dtype", "data_type"},
        )  # fmt: skip
        for key in ("version", "format", "checkpoint_format"):
            choice(config, key, ("gemm",), "gemm")
        choice(config, "method", ("awq",), "awq")
        choice(config, "backend", ("auto", "autoawq"), "autoawq")
        choice(config, "pack_dtype", ("int32",), "int32")
        choice(config, "data_type", ("int",), "int")
        # A file without zero points has them all the same in this layout, each 8.
        flag(config, "zero_point", True)
        bits = integer(config, "bits" if "bits" in config else "w_bit", 4)
        if bits != 4:
            raise ValueError(f"bits: {bits} is not supported, only 4")
        self._scheme = Scheme(
            4, integer(config, "group_size" if "group_size" in config else "q_group_size", 128), False
        )

    def scheme(self, module: str) -> Scheme | None:
        """How a linear module is quantized: all are alike, but for those without a qweight in the file."""
        return self._scheme

    def matrix(self, scheme: Scheme, tensors: Mapping[str, AnyArray]) -> GroupedMatrix:
        """A module's matrix, from its `tensors`. Raises ValueError."""
        return awq_matrix(scheme, tensors["qweight"], tensors["qzeros"], tensors["scales"])

    def shape(self, scheme: Scheme, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """(N, K) of a module, from its tensors' shapes. Raises ValueError."""
        shape = shapes["qweight"]
        if len(shape) != 2:
            raise ValueError(f"qweight has the shape {list(shape)}: it must be a matrix")
        return shape[1] * 8, shape[0]
