"""Copies to a GPU and back through pinned memory: what the caller may do, and what is waited for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
SIZES = (1, 5, 64, 1000, 16384, 16385, 40000, 300000)
"""Numbers: many a buffer, just one, more than one holds."""


@pytest.fixture
def backend() -> Iterator[Any]:
    pytest.importorskip("cupy")
    from shardline.kernels.cuda.backend import CudaBackend

    made = CudaBackend(0, None)
    yield made
    made.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Copies that are enqueued, and pinned buffers that are made."""
    import cupy

    counts = {"copies": 0, "pinned": 0}

    def count(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            counts[what] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    count(cupy.cuda.runtime, "memcpyAsync", "copies")
    count(cupy.cuda, "PinnedMemory", "pinned")
    return counts


def numbers(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, size]).integers(-(2**31), 2**31, size).astype(np.int32)


def test_the_source_is_free_when_write_returns(backend: Any) -> None:
    host = np.empty(1 << 20, np.int32)
    targets = [backend.empty(host.shape, "int32") for _ in range(6)]
    for seed, target in enumerate(targets):
        host[:] = numbers(seed, host.size)
        backend.write(target, host)
        host[:] = -1
    for seed, target in enumerate(targets):
        assert np.array_equal(backend.read(target), numbers(seed, host.size))


@pytest.mark.parametrize("seed", range(3))
def test_many_writes_in_flight_arrive_each_in_its_place(backend: Any, seed: int) -> None:
    sizes = np.random.default_rng(seed).choice(SIZES, 120).tolist()
    targets = [backend.upload(np.zeros(size + 3, np.int32)) for size in sizes]
    for index, (size, target) in enumerate(zip(sizes, targets, strict=True)):
        backend.write(target, numbers(index, size))
    for index, (size, target) in enumerate(zip(sizes, targets, strict=True)):
        got = backend.read(target)
        assert np.array_equal(got[:size], numbers(index, size)), index
        assert not got[size:].any()


def test_a_later_write_is_the_one_that_stays(backend: Any) -> None:
    target = backend.empty((1000,), "int32")
    for seed in range(200):
        backend.write(target, numbers(seed, 1000))
    assert np.array_equal(backend.read(target), numbers(199, 1000))


def test_any_arrangement_and_type_goes_up(backend: Any) -> None:
    rows = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    target = backend.empty((5, 4), "float32")
    backend.write(target, rows[::2, ::2])
    assert np.array_equal(backend.read(target)[:3], rows[::2, ::2])
    received = np.arange(41, dtype=np.uint8)[1:].view(np.float32)  # at no multiple of 4
    flat = backend.empty((10,), "float32")
    backend.write(flat, received)
    assert np.array_equal(backend.read(flat).view(np.uint8), np.arange(1, 41, dtype=np.uint8))
    backend.write(flat, np.empty(0, np.float32))
    assert backend.read(flat[:0]).shape == (0,)


@pytest.mark.parametrize("more", [-1, 0, 1, 4096])
def test_a_large_array_goes_up_in_pieces(backend: Any, counted: dict[str, int], more: int) -> None:
    from shardline.kernels.cuda.transfers import PIECE_BYTES

    host = numbers(3, 5 * PIECE_BYTES // 4 + more)
    device = backend.upload(host)
    host_was, host[:] = host.copy(), 0
    assert np.array_equal(backend.read(device), host_was)
    # Two halves of a piece, and what came back.
    assert counted["pinned"] <= 3
    columns = numbers(4, 2 * PIECE_BYTES // 4).reshape(2, -1).T
    assert np.array_equal(backend.read(backend.upload(columns)), columns)


def test_what_was_read_stays_while_later_steps_run(backend: Any) -> None:
    device = backend.empty((5000,), "int32")
    kept = []
    for seed in range(5):
        backend.write(device, numbers(seed, 5000))
        kept.append(backend.read(device)[1:-1])  # a view holds it too
    for seed, host in enumerate(kept):
        assert np.array_equal(host, numbers(seed, 5000)[1:-1])
    backend.close()
    gc.collect()
    assert np.array_equal(kept[0], numbers(0, 5000)[1:-1])


def test_buffers_are_used_again(backend: Any, counted: dict[str, int]) -> None:
    device = backend.empty((300000,), "int32")
    for count in range(1, 400):
        backend.write(device, numbers(count, 700 * count))
        backend.read(device[: 700 * count])
    # Powers of two from 64 KiB to 2 MiB: two uploads' halves each, and what comes back.
    assert counted["pinned"] <= 3 * 6
    made = counted["pinned"]
    held = [backend.read(device) for _ in range(3)]
    assert counted["pinned"] <= made + 2
    del held
    held = [backend.read(device) for _ in range(3)]
    assert counted["pinned"] <= made + 2
    assert len(held) == 3


def test_each_write_and_read_is_one_copy(backend: Any, counted: dict[str, int]) -> None:
    device = backend.empty((64, 128), "float32")
    backend.write(device, np.ones((3, 128), np.float32))
    backend.read(device[:7])
    assert counted["copies"] == 2
