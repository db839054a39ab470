"""Products that make their rows themselves give, on a GPU, the bits of the kernels that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
EPS = 1e-6


def rows_of(seed: int, count: int, channels: int) -> np.ndarray:
    """Rows of very different magnitudes, one of them of zeros."""
    rng = np.random.default_rng([seed, count, channels])
    x = rng.standard_normal((count, channels)) * 10.0 ** rng.uniform(-4, 4, (count, 1))
    x[np.arange(count), rng.integers(channels, size=count)] *= 30
    x[2:3] = 0
    return x.astype(np.float32)


@contextmanager
def staged(**rows: int) -> Iterator[None]:
    """Up to so many rows by source; 0 for those that are not named."""
    from shardline.kernels.cuda import tables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "STAGED_ROWS", {"tiles": 0, "gated": 0, "normed": 0} | rows)
        patch.setattr(tables, "STAGED_SLICES", 8)
        # All of a small card's shared memory for one block.
        patch.setattr(tables, "SHARED_LIMIT", 2 * tables.SHARED_LIMIT)
        yield


ALL = {"tiles": 4, "gated": 4, "normed": 4}


@pytest.fixture
def launched(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that have been launched."""
    names: list[str] = []
    launch = cuda._launch

    def noting(kernel: tuple[str, str], *args: Any, **options: Any) -> None:
        names.append(kernel[1])
        launch(kernel, *args, **options)

    monkeypatch.setattr(cuda, "_launch", noting)
    return names


def check_rows(got: np.ndarray, wanted: np.ndarray, spoiled: int | None) -> None:
    """Equal bits; of a row with a NaN, that it has one too."""
    fine = np.arange(len(got)) != spoiled
    assert np.array_equal(got[fine].view(np.uint32), wanted[fine].view(np.uint32))
    assert np.array_equal(np.isnan(got), np.isnan(wanted))


@pytest.mark.parametrize("inputs", [256, 640, 2112, 4096, 5120])
def test_of_tiles_of_gated_rows_and_of_normed_rows(
    cuda: Any, poisoned: Callable[..., Any], weights: Any, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inputs % weights.group_size:
        pytest.skip("a group does not divide K")
    rng = np.random.default_rng(inputs)
    # With blocks for a few tiles alone they go on from tile to tile, an uneven number of them.
    monkeypatch.setattr(cuda, "_processors", 1)
    weight = cuda.load_matrix([weights.matrix(300, inputs)])
    gate_up = cuda.load_gated(weights.matrix(inputs, 512, 1), weights.matrix(inputs, 512, 2))
    wide = cuda.load_gated(weights.matrix(144, inputs, 1), weights.matrix(144, inputs, 2))
    norm = cuda.upload(rng.standard_normal(inputs).astype(np.float32))
    small_norm = cuda.upload(rng.standard_normal(512).astype(np.float32))
    bias = cuda.upload(rng.standard_normal(300).astype(np.float32))
    for rows in (1, 2, 4):
        values = rows_of(1, rows, inputs)
        spoiled = 1 if rows == 4 else None
        if spoiled is not None:
            values[spoiled, 77] = np.nan
        x, before = cuda.upload(values), rows_of(2, rows, 300)
        short = cuda.upload(rows_of(3, rows, 512))
        normed, gated = cuda.activations(rows, inputs), cuda.activations(rows, inputs)
        short_normed, wide_gated = cuda.activations(rows, 512), cuda.activations(rows, 144)

        def run(
            rows: int = rows,
            x: Any = x,
            before: np.ndarray = before,
            short: Any = short,
            normed: Any = normed,
            gated: Any = gated,
            short_normed: Any = short_normed,
            wide_gated: Any = wide_gated,
        ) -> list[np.ndarray]:
            first, second = poisoned(rows + 1, 300), cuda.upload(before)
            cuda.norm_linear(x, norm, EPS, normed, weight, first, rows, bias=bias)
            args = (short, small_norm, EPS, short_normed, gate_up, gated, weight, second, rows)
            cuda.norm_mlp(*args, down_bias=bias, accumulate=True)
            cuda.rms_norm(x, norm, EPS, normed, rows)
            third = poisoned(rows + 1, 300)
            cuda.linear(normed, weight, third, rows)
            cuda.gated_linear(normed, wide, wide_gated, rows)
            found = [cuda.read(array) for array in (first, second, third, wide_gated)]
            for array in (first, third):
                assert (cuda.read(array)[rows:].view(np.uint32) == 0x7FCABCDE).all()
            for kept in (gated, wide_gated):
                assert not cuda.read(kept.largest).any()
                assert not cuda.read(kept.done).any()
            return [array[:rows] for array in found]

        with staged():
            wanted = run()
        for sources in (ALL, {"tiles": 4}, {"gated": 4}, {"normed": 4}):
            with staged(**sources):
                for _ in range(2):
                    for got, want in zip(run(), wanted, strict=True):
                        check_rows(got, want, spoiled)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("inputs", "width"), [(128, 512), (2048, 4096), (4096, 640)])
def test_mlp_in_every_tile(
    cuda: Any,
    formats: Any,
    launched: list[str],
    activation: str,
    biases: bool,
    inputs: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardline.kernels.cuda import tables

    form, rng = formats(4, 128, "float16", 8), np.random.default_rng(7)
    gate_up = cuda.load_gated(form.matrix(width, inputs, 1), form.matrix(width, inputs, 2))
    down = cuda.load_matrix([form.matrix(inputs, width, 3)])
    norm = cuda.upload(rng.standard_normal(inputs).astype(np.float32))
    vectors = [cuda.upload(rng.standard_normal(n).astype(np.float32)) if biases else None for n in (2 * width, inputs)]
    for rows in (1, 3):
        before = rows_of(4, rows, inputs)
        normed, gated = cuda.activations(rows, inputs), cuda.activations(rows, width)

        def run(
            rows: int = rows, before: np.ndarray = before, normed: Any = normed, gated: Any = gated
        ) -> tuple[list[str], np.ndarray]:
            launched.clear()
            residual = cuda.upload(before)
            args = (residual, norm, EPS, normed, gate_up, gated, down, residual, rows)
            options = {"activation": activation, "gate_up_bias": vectors[0], "down_bias": vectors[1]}
            cuda.norm_mlp(*args, accumulate=True, **options)
            return list(launched), cuda.read(residual)

        with staged():
            kernels, wanted = run()
        assert {"rms_norm_rows", "prepare_gated"} <= set(kernels)
        seen = set()
        for place in (0, 1):
            for processors in (1, 3):
                with staged(**ALL), pytest.MonkeyPatch.context() as patch:
                    one = {s: (v[min(place, len(v) - 1)],) for s, v in tables.STAGED.items()}
                    # What exists for gated products is asked for there.
                    one = {s: v if v[0].gated else (*v, *tables.STAGED[s][1:]) for s, v in one.items()}
                    patch.setattr(tables, "STAGED", one)
                    patch.setattr(cuda, "_processors", processors)
                    kernels, got = run()
                assert len(kernels) == 2, kernels
                seen.update(kernels)
                assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), (rows, kernels)
        assert seen <= {v.name for variants in tables.STAGED.values() for v in variants}


def test_what_is_ordered_or_of_several_formats_goes_the_other_way(
    cuda: Any, poisoned: Callable[..., Any], formats: Any, launched: list[str]
) -> None:
    form, rng = formats(4, 32, "float16", None), np.random.default_rng(9)
    order = rng.permutation(640).astype(np.int32)
    parts = [form.matrix(96, 640, 1), formats(8, 16, "float32", 32).matrix(33, 640, 2)]
    ordered = [replace(form.matrix(96, 640, 1), input_order=order)]
    norm = cuda.upload(rng.standard_normal(640).astype(np.float32))
    gate_up = cuda.load_gated(form.matrix(640, 640, 3), form.matrix(640, 640, 4))
    apart = cuda.load_gated(form.matrix(640, 640, 3), formats(8, 16, "float32", 32).matrix(640, 640, 4))
    x = cuda.upload(rows_of(5, 2, 640))
    normed, gated = cuda.activations(2, 640), cuda.activations(2, 640)
    for matrices in (parts, ordered):
        weight = cuda.load_matrix(matrices)
        for joined in (gate_up, apart):
            results = []
            for rows in ({}, ALL):
                with staged(**rows):
                    outs = [poisoned(2, weight.channels) for _ in range(2)]
                    launched.clear()
                    cuda.norm_linear(x, norm, EPS, normed, weight, outs[0], 2)
                    cuda.norm_mlp(x, norm, EPS, normed, joined, gated, weight, outs[1], 2)
                    assert "prepare_gated" in launched
                    results.append([cuda.read(out).view(np.uint32) for out in outs])
            for got, want in zip(*results, strict=True):
                assert np.array_equal(got, want)


def test_replayed_a_hundred_times(cuda: Any, formats: Any) -> None:
    """Steps of one row and of two in turn, as recorded: what a product leaves for the next one is right each time."""
    form, rng = formats(4, 128, "float16", 8), np.random.default_rng(11)
    gate_up = cuda.load_gated(form.matrix(3072, 2048, 1), form.matrix(3072, 2048, 2))
    down, qkv = cuda.load_matrix([form.matrix(2048, 3072, 3)]), cuda.load_matrix([form.matrix(3072, 2048, 4)])
    norm = cuda.upload(rng.standard_normal(2048).astype(np.float32))
    normed, gated = cuda.activations(2, 2048), cuda.activations(2, 3072)
    residual, heads = cuda.empty((2, 2048), "float32"), cuda.empty((2, 3072), "float32")

    def issue(rows: int) -> None:
        for _ in range(4):
            cuda.norm_linear(residual, norm, EPS, normed, qkv, heads, rows)
            cuda.norm_mlp(residual, norm, EPS, normed, gate_up, gated, down, residual, rows, accumulate=True)

    values = {rows: rows_of(6, rows, 2048) for rows in (1, 2)}
    wanted = {}
    with staged():
        for rows in (1, 2):
            cuda.write(residual, values[rows])
            issue(rows)
            wanted[rows] = [cuda.read(array)[:rows].copy() for array in (residual, heads)]
    for _ in range(100):
        for rows in (1, 2):
            cuda.write(residual, values[rows])
            cuda.replay(("staged", rows), lambda rows=rows: issue(rows))
            for array, want in zip((residual, heads), wanted[rows], strict=True):
                assert np.array_equal(cuda.read(array)[:rows].view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("inputs", [1024, 2048, 4096])
def test_the_norms_sum_has_its_order(cuda: Any, formats: Any, launched: list[str], inputs: int) -> None:
    """A sum in another order moves a half in some ten thousand: so many rows."""
    weight = cuda.load_matrix([formats(4, 128, "float16", 8).matrix(16, inputs)])
    rng = np.random.default_rng(inputs)
    norm = cuda.upload(rng.standard_normal(inputs).astype(np.float32))
    normed, x, out = cuda.activations(4, inputs), cuda.empty((4, inputs), "float32"), cuda.empty((4, 16), "float32")
    for _ in range(60):
        cuda.write(x, rng.standard_normal((4, inputs)).astype(np.float32))
        found = []
        # Four rows of 4096 channels are more than some cards have room for.
        for rows, most in ((3, 0), (3, 3)):
            with staged(normed=most):
                launched.clear()
                cuda.norm_linear(x, norm, EPS, normed, weight, out, rows)
                assert len(launched) == (1 if most else 2)
                found.append(cuda.read(out)[:rows].view(np.uint32).copy())
        assert np.array_equal(*found)
