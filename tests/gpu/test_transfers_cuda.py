"""Copies to a GPU and back through pinned memory: what the caller may do, and what is waited for."""

from __future__ import annotations

import gc
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def test_what_is_on_its_way_is_of_its_place_in_the_order(backend: Any) -> None:
    """Kernels and copies that come right after, and do not wait for the host, change nothing of it."""
    size, steps = 1 << 20, 12
    values = np.stack([numbers(seed, size) for seed in range(steps)]).view(np.float32)
    values[~np.isfinite(values)] = 0
    x, out = backend.upload(values), backend.empty((1, size), "float32")
    indices = [backend.upload(np.array([seed], np.int32)) for seed in range(steps)]
    pending = []
    for seed in range(steps):
        backend.gather_rows(x, indices[seed], out, 1)
        pending.append(backend.read_later(out))
        if seed % 3 == 1:
            backend.write(out, np.zeros((1, size), np.float32))
    order = np.random.default_rng(0).permutation(steps).tolist()
    kept = {seed: pending[seed].wait() for seed in order}
    for seed in order:
        assert np.array_equal(kept[seed][0], values[seed]), seed


def test_a_result_is_ready_once_it_has_come_and_is_given_once(backend: Any) -> None:
    device = backend.upload(numbers(1, 5000))
    pending = backend.read_later(device)
    backend.synchronize()
    assert pending.ready
    assert np.array_equal(pending.wait(), numbers(1, 5000))
    with pytest.raises(AssertionError, match="twice"):
        pending.wait()
    nothing = backend.read_later(device[:0])
    assert nothing.ready
    assert nothing.wait().shape == (0,)


def test_another_thread_waits_while_steps_go_on(backend: Any) -> None:
    """It has never used a device, and is left on its own."""
    import cupy

    device, steps = backend.empty((70000,), "int32"), 200
    begun: queue.Queue[Any] = queue.Queue(maxsize=2)
    got: list[np.ndarray] = []
    devices: set[int] = set()

    def collect() -> None:
        for _ in range(steps):
            got.append(begun.get().wait())
            devices.add(cupy.cuda.runtime.getDevice())

    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(collect)
        for seed in range(steps):
            backend.write(device, numbers(seed, 70000))
            begun.put(backend.read_later(device))
        collected.result()
    assert devices == {0}
    for seed, host in enumerate(got):
        assert np.array_equal(host, numbers(seed, 70000)), seed


def test_a_result_that_nobody_waits_for_does_no_harm(backend: Any, counted: dict[str, int]) -> None:
    device = backend.empty((300000,), "int32")
    for seed in range(60):
        backend.write(device, numbers(seed, 300000))
        dropped = backend.read_later(device)
        backend.write(device, numbers(seed + 1000, 300000))
        del dropped
        gc.collect()
        # Into the buffer that the dropped one may still be on its way to.
        kept = backend.read_later(device)
        backend.write(device, numbers(seed + 2000, 300000))
        assert np.array_equal(kept.wait(), numbers(seed + 1000, 300000)), seed
        del kept
    # Two uploads' halves, which grow, and one or two for what comes back.
    assert counted["pinned"] <= 8


def test_memory_is_not_unpinned_below_a_copy(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from shardline.kernels.cuda.transfers import Downloads

    pinned, done = cupy.cuda.PinnedMemory, []

    class Watched:
        def __init__(self, size: int, flags: int) -> None:
            self._memory = pinned(size, flags)
            self.ptr = self._memory.ptr

        def __del__(self) -> None:
            done.append(stream.done)

    source = backend.upload(numbers(6, 1 << 24))
    backend.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(cupy.cuda, "PinnedMemory", Watched)
    downloads = Downloads(stream, 0)
    pending = downloads.later(source)
    del pending, downloads
    gc.collect()
    assert done == [True]


def test_a_thread_of_another_device_waits_and_stays_there() -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    from shardline.kernels.cuda.backend import CudaBackend

    if runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    backend = CudaBackend(1, None)
    device = backend.upload(numbers(7, 5000))
    one, other = backend.read_later(device), backend.read_later(device[:7])
    assert runtime.getDevice() == 0
    assert np.array_equal(one.wait(), numbers(7, 5000))
    backend.synchronize()
    assert other.ready
    assert np.array_equal(other.wait(), numbers(7, 5000)[:7])
    assert runtime.getDevice() == 0
    backend.close()


def test_results_on_their_way_outlive_the_backend(backend: Any) -> None:
    device = backend.upload(numbers(5, 300000))
    pending = [backend.read_later(device[: 1000 * count]) for count in (300, 1, 200, 300)]
    kept = pending[3].wait()
    dropped = pending.pop(2)
    backend.close()
    del dropped
    gc.collect()
    assert pending[0].ready
    assert np.array_equal(pending[1].wait(), numbers(5, 300000)[:1000])
    assert np.array_equal(pending[0].wait(), numbers(5, 300000))
    assert np.array_equal(kept, numbers(5, 300000))


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
