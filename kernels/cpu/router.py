"""Which experts a row goes to, and how much a shared expert's result counts: `RouterRule` in float32.

The order of a logit's sum depends on K alone. Of x[k] * router[k], k = 32 i + j goes to lane j of 32, each an fma chain
over ascending i from zero (a last 16 to the first half of them); lanes j and j + 16 are added, then those that are left
in halves; the rest of K follows in an fma chain on the result.

Experts are compared by an integer key that has the order of the floats, with NaN below all; so every row chooses valid
and distinct experts, whatever its logits are, and the one of the lowest id among equal ones.

A softmax over the chosen has a sum of 1 as it is, so `normalise` changes nothing in it.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numba import carray

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.blocks import WORKSPACE_BYTES
from shardline.kernels.cpu.intrinsics import bits_of_float32, exp_f32, float64_of_bits, fma, pointer
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.linear import range_of
from shardline.kernels.cpu.simd import LANES

SCORINGS: Final[dict[Literal["softmax", "sigmoid", "softmax_of_chosen"], int]] = {
    "softmax": 0,
    "sigmoid": 1,
    "softmax_of_chosen": 2,
}
"""How a record names a scoring."""
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = SCORINGS.values()

TILE = 4
"""Experts whose logits of a row are computed together."""

MAX_EXPERTS = WORKSPACE_BYTES // 8
"""Of one layer: the keys of experts and groups lie in a thread's workspace."""

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOWEST = np.float32(-np.inf)
_TAKEN = np.int32(-(2**31))
_NOT_A_NUMBER = np.int32(1 - 2**31)


@jit
def _dots(x, x_at, w, first, second, third, fourth, length):
    """The products of x[x_at : x_at + length] with four parts of w that begin at these places."""
    a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = simd.broadcast(_ZERO)
    k = 0
    while k + 2 * LANES <= length:
        v = simd.load(x, x_at + k)
        a0 = simd.fma(v, simd.load(w, first + k), a0)
        b0 = simd.fma(v, simd.load(w, second + k), b0)
        c0 = simd.fma(v, simd.load(w, third + k), c0)
        d0 = simd.fma(v, simd.load(w, fourth + k), d0)
        k += LANES
        v = simd.load(x, x_at + k)
        a1 = simd.fma(v, simd.load(w, first + k), a1)
        b1 = simd.fma(v, simd.load(w, second + k), b1)
        c1 = simd.fma(v, simd.load(w, third + k), c1)
        d1 = simd.fma(v, simd.load(w, fourth + k), d1)
        k += LANES
    if k + LANES <= length:
        v = simd.load(x, x_at + k)
        a0 = simd.fma(v, simd.load(w, first + k), a0)
        b0 = simd.fma(v, simd.load(w, second + k), b0)
        c0 = simd.fma(v, simd.load(w, third + k), c0)
        d0 = simd.fma(v, simd.load(w, fourth + k), d0)
        k += LANES
    a = simd.fold_add(simd.add(a0, a1))
    b = simd.fold_add(simd.add(b0, b1))
    c = simd.fold_add(simd.add(c0, c1))
    d = simd.fold_add(simd.add(d0, d1))
    while k < length:
        v = x[x_at + k]
        a = fma(v, w[first + k], a)
        b = fma(v, w[second + k], b)
        c = fma(v, w[third + k], c)
        d = fma(v, w[fourth + k], d)
        k += 1
    return a, b, c, d


@operation
def logits(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, router, K, experts, rows, bias (0: none), out [rows, experts]. Tasks are (a tile of experts, a row)."""
    words = carray(pointer(record), (16,), np.int64)
    size, experts, rows = words[2], words[3], words[4]
    x = carray(pointer(words[0]), (rows * size,), np.float32)
    router = carray(pointer(words[1]), (experts * size,), np.float32)
    bias = carray(pointer(words[5]), (experts,), np.float32)
    out = carray(pointer(words[6]), (rows, experts), np.float32)
    task, end = range_of(share, num_shares, (experts + TILE - 1) // TILE * rows)
    while task < end:
        expert, row = task // rows * TILE, task % rows
        last = experts - 1
        values = _dots(
            x,
            row * size,
            router,
            expert * size,
            min(expert + 1, last) * size,
            min(expert + 2, last) * size,
            min(expert + 3, last) * size,
            size,
        )
        for i in range(min(TILE, experts - expert)):
            value = values[i]
            if words[5]:
                value += bias[expert + i]
            out[row, expert + i] = value
        task += 1


@jit
def _softmax(values, count, out):
    """out[i] = e^values[i] over the sum of all; the sum in float64, ascending. `out` may be `values`."""
    highest = _LOWEST
    for i in range(count):
        if values[i] > highest:
            highest = values[i]
    total = 0.0
    for i in range(count):
        out[i] = exp_f32(values[i] - highest)
        total += np.float64(out[i])
    share = np.float32(total)
    for i in range(count):
        out[i] /= share


@jit
def _key(value):
    """An integer that orders as floats do, with NaN at the bottom and both zeros equal."""
    if value != value:
        return _NOT_A_NUMBER
    bits = np.int32(bits_of_float32(value + _ZERO))
    return bits if bits >= 0 else np.int32(bits ^ np.int32(0x7FFFFFFF))


@jit
def _best(keys, begin, end):
    """The place of the largest key, the lowest one of several; begin if all are taken."""
    best = begin
    for i in range(begin + 1, end):
        if keys[i] > keys[best]:
            best = i
    return best


@jit
def _choice(scores, choice_bias, has_bias, expert):
    value = scores[expert]
    if has_bias:
        value += choice_bias[expert]
    return value


@jit
def _drop_groups(scores, choice_bias, has_bias, keys, group_keys, num_groups, kept):
    """Take the keys of all experts that are not in the `kept` best groups."""
    size = keys.size // num_groups
    for group in range(num_groups):
        first = _best(keys, group * size, (group + 1) * size)
        worth = _choice(scores, choice_bias, has_bias, first)
        if size > 1:
            key = keys[first]
            keys[first] = _TAKEN
            worth += _choice(scores, choice_bias, has_bias, _best(keys, group * size, (group + 1) * size))
            keys[first] = key
        group_keys[group] = _key(worth)
    for _ in range(kept):
        group_keys[_best(group_keys, 0, num_groups)] = _TAKEN
    for group in range(num_groups):
        if group_keys[group] != _TAKEN:
            keys[group * size : (group + 1) * size] = _TAKEN


@operation
def choose(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: logits [rows, experts] (overwritten), experts, rows, chosen, scoring, normalise, scale (float64 bits),
    num_groups, groups_kept, choice_bias (0: none), expert_ids, shares, workspaces."""
    words = carray(pointer(record), (16,), np.int64)
    experts, rows, chosen, scoring, num_groups, kept = words[1], words[2], words[3], words[4], words[7], words[8]
    table = carray(pointer(words[0]), (rows, experts), np.float32)
    scale = np.float32(float64_of_bits(words[6]))
    choice_bias = carray(pointer(words[9]), (experts,), np.float32)
    ids = carray(pointer(words[10]), (rows, chosen), np.int32)
    shares = carray(pointer(words[11]), (rows, chosen), np.float32)
    workspace = words[12] + worker * WORKSPACE_BYTES
    keys = carray(pointer(workspace), (experts,), np.int32)
    group_keys = carray(pointer(workspace + 4 * experts), (num_groups,), np.int32)
    first_row, end_row = range_of(share, num_shares, rows)
    for row in range(first_row, end_row):
        scores = table[row]
        if scoring == _SOFTMAX:
            _softmax(scores, experts, scores)
        elif scoring == _SIGMOID:
            for expert in range(experts):
                scores[expert] = _ONE / (_ONE + exp_f32(-scores[expert]))
        for expert in range(experts):
            keys[expert] = _key(_choice(scores, choice_bias, words[9] != 0, expert))
        if kept < num_groups:
            _drop_groups(scores, choice_bias, words[9] != 0, keys, group_keys, num_groups, kept)
        total = 0.0
        for rank in range(chosen):
            expert = _best(keys, 0, experts)
            keys[expert] = _TAKEN
            ids[row, rank] = expert
            shares[row, rank] = scores[expert]
            total += np.float64(scores[expert])
        if scoring == _SOFTMAX_OF_CHOSEN:
            _softmax(shares[row], chosen, shares[row])
        elif words[5]:
            for rank in range(chosen):
                shares[row, rank] /= np.float32(total)
        for rank in range(chosen):
            shares[row, rank] *= scale


@operation
def add_gated(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: x, gate, K, y, out, N, rows: out[r] = fma(sigmoid(x[r] . gate), y[r], out[r])."""
    words = carray(pointer(record), (16,), np.int64)
    size, width, rows = words[2], words[5], words[6]
    x = carray(pointer(words[0]), (rows * size,), np.float32)
    gate = carray(pointer(words[1]), (size,), np.float32)
    y = carray(pointer(words[3]), (rows, width), np.float32)
    out = carray(pointer(words[4]), (rows, width), np.float32)
    first, end = range_of(share, num_shares, rows)
    for row in range(first, end):
        logit = _dots(x, row * size, gate, 0, 0, 0, 0, size)[0]
        weight = _ONE / (_ONE + exp_f32(-logit))
        for channel in range(width):
            out[row, channel] = fma(weight, y[row, channel], out[row, channel])
