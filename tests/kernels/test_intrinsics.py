"""The arithmetic that the ops are made of, on every interesting float."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from shardline.kernels.cpu.intrinsics import F32, I8, emit_pointer, exp_f32, float_to_half, fma, half_to_float
from shardline.kernels.cpu.jit import jit


@jit
def _exp(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = exp_f32(x[i])


@jit
def _fma(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(a.size):
        out[i] = fma(a[i], b[i], c[i])


@jit
def _from_half(bits: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = half_to_float(bits[i])


@jit
def _to_half(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = float_to_half(x[i])


def exp(x: Any) -> NDArray[np.float32]:
    x = np.atleast_1d(np.asarray(x, np.float32))
    out = np.empty_like(x)
    _exp(x, out)
    return out


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-103.9, 88.7, 400_001), rng.normal(0, 1e-3, 10_000), rng.uniform(-1, 1, 50_000)])
    x = x.astype(np.float32)
    true = np.exp(x.astype(np.float64))
    unit = np.spacing(true.astype(np.float32)).astype(np.float64)
    assert (np.abs(exp(x) - true) / unit).max() < 1.0


def test_exp_at_its_borders() -> None:
    np.testing.assert_array_equal(exp([0.0, -0.0, -104, -1e30, -np.inf]), [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(exp([88.8, 1e30, np.inf]), np.inf)
    assert np.isnan(exp(np.nan)).all()
    assert 0 < exp(-103.0)[0] < np.finfo(np.float32).smallest_normal


@pytest.mark.parametrize("length", [1, 7, 16, 33])
def test_exp_has_the_same_bits_vectorised_and_alone(length: int) -> None:
    x = np.random.default_rng(length).normal(0, 30, 1000).astype(np.float32)
    alone = np.concatenate([exp(value) for value in x])
    parts = [exp(x[start : start + length]) for start in range(0, 1000, length)]
    np.testing.assert_array_equal(np.concatenate(parts), alone)


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 5000)).astype(np.float32)
    c = (-a * b).astype(np.float32)  # what is left is the product's rounding error
    out = np.empty_like(a)
    _fma(a, b, c, out)
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_array_equal(out, exact.astype(np.float32))
    assert (out != 0).mean() > 0.9


def test_every_half_becomes_its_float_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    floats = np.empty(bits.size, np.float32)
    _from_half(bits, floats)
    expected = bits.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(floats, expected)
    back = np.empty_like(bits)
    _to_half(floats, back)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(back[~number].view(np.float16)).all()


def rounding_cases() -> NDArray[np.float32]:
    halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    near = np.concatenate([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(np.inf))])
    return np.concatenate([near, -near, np.float32([65519.9, 65520, 1e30, -1e30, 1e-8, 2e-8, 3e-8])])


def test_floats_round_to_the_nearest_half_ties_to_even() -> None:
    x = rounding_cases()
    out = np.empty(x.size, np.uint16)
    _to_half(x, out)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(out.view(np.float16), expected)


def test_loops_over_exp_and_halves_vectorise() -> None:
    """Not a matter of taste: scalar, attention would take several times as long."""
    floats, halves = np.zeros(4, np.float32), np.zeros(4, np.uint16)
    for function, arguments, instruction in (
        (_exp, (floats, floats.copy()), "vfmadd"),
        (_from_half, (halves, floats), "vcvtph2ps"),
        (_to_half, (floats, halves), "vcvtps2ph"),
    ):
        function(*arguments)
        assembly: str = function.inspect_asm(function.signatures[0])
        lines = [line for line in assembly.splitlines() if instruction in line]
        if not lines:
            pytest.skip("not an x86 processor")
        # From memory, the width is the last letter of the name: vcvtps2phxy reads eight floats.
        wide = ("ymm" in line or "zmm" in line or line.split()[0].endswith(("y", "z")) for line in lines)
        assert any(wide), instruction


@intrinsic
def _read_behind_null(typingctx: Any, address: Any) -> Any:
    """Twice the float at an address: once as it is, once as an offset from null, which is how LLVM may write it when it
    makes machine code."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        plain = builder.load(emit_pointer(builder, args[0], F32), align=4)
        null = ir.Constant(I8.as_pointer(), None)
        behind = builder.bitcast(builder.gep(null, [args[0]]), F32.as_pointer())
        return builder.fadd(plain, builder.load(behind, align=4))

    return types.float32(types.int64), codegen


def test_an_address_may_be_an_offset_from_null() -> None:
    """Else LLVM takes such code for one that never runs, and the test of a loop around it goes as well."""
    read = jit(lambda address: _read_behind_null(address))
    signature = (types.int64,)
    read.compile(signature)
    assert "fadd float" in read.inspect_llvm(signature)
    value = np.array([1.5], np.float32)
    assert read(value.ctypes.data) == 3.0
