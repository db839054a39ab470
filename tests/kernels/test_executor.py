"""The command list and the team: ops run in order, each share once, on any number of threads and cores."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from shardline.kernels import Array, Backend, GroupedMatrix, Weight, cpu_backend
from shardline.kernels.cpu import linear
from shardline.kernels.cpu.commands import MAX_PROGRAMS
from shardline.kernels.cpu.executor import RECORD_WORDS, Team
from shardline.kernels.cpu.resident import aligned_zeros

MakeBackend = Callable[[int], Backend]
MakeMatrix = Callable[..., GroupedMatrix]


def gather_record(
    x: NDArray[np.float32], indices: NDArray[np.int32], out: NDArray[np.float32], shares: int
) -> list[int]:
    words = [linear.gather_rows.address, shares, x.ctypes.data, len(x), indices.ctypes.data, out.ctypes.data]
    words += [x.shape[1], len(indices)]
    return words + [0] * (RECORD_WORDS - len(words))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_share_runs_once_and_no_op_overtakes_another(threads: int) -> None:
    """Chains of permutations: a share lost, done twice or begun before the op before it has ended ruins the result."""
    rng = np.random.default_rng(threads)
    team = Team(threads)
    try:
        for _ in range(60):
            rows = int(rng.integers(1, 40))
            x = rng.standard_normal((rows, 3), np.float32)
            buffers = [x.copy(), np.zeros_like(x)]
            steps = [rng.permutation(rows).astype(np.int32) for _ in range(int(rng.integers(1, 60)))]
            records, expected = [], x
            for number, step in enumerate(steps):
                source, target = buffers[number % 2], buffers[1 - number % 2]
                records.append(gather_record(source, step, target, int(rng.integers(1, 20))))
                expected = expected[step]
            team.run(np.array(records, np.int64))
            np.testing.assert_array_equal(buffers[len(steps) % 2], expected)
    finally:
        team.close()


def test_workers_sleep_between_programs_and_wake_again() -> None:
    team = Team(3)
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    out = np.zeros_like(x)
    reverse = np.arange(10, dtype=np.int32)[::-1].copy()
    records = np.array([gather_record(x, reverse, out, 5)] * 20, np.int64)
    try:
        team.run(records)
        deadline = time.monotonic() + 60
        busy = 1.0
        while busy > 0.5:
            # They spin for a while first.
            assert time.monotonic() < deadline, "idle workers keep a core busy"
            began, used = time.monotonic(), time.process_time()
            time.sleep(0.1)
            busy = (time.process_time() - used) / (time.monotonic() - began)
        for _ in range(50):
            out[...] = 0
            team.run(records)
            np.testing.assert_array_equal(out, x[::-1])
            time.sleep(0.001)
    finally:
        team.close()


def test_close_ends_the_threads_and_may_be_called_again() -> None:
    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("shardline-cpu")]

    before = set(workers())
    backend = cpu_backend(4)
    assert len(set(workers()) - before) == 3
    backend.close()
    backend.close()
    assert set(workers()) == before
    with pytest.raises(AssertionError, match="closed"):
        backend.synchronize()


def test_a_dropped_backend_ends_its_threads() -> None:
    before = threading.active_count()
    backend = cpu_backend(3)
    assert threading.active_count() == before + 2
    del backend
    gc.collect()
    assert threading.active_count() == before


def test_a_process_that_forgets_to_close_still_ends() -> None:
    script = "from shardline.kernels import cpu_backend; backend = cpu_backend(3)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


class Chain:
    """Some dependent ops on arrays of one backend."""

    def __init__(self, backend: Backend, matrix: GroupedMatrix, rows: int) -> None:
        self.backend, self.rows = backend, rows
        size = matrix.shape[0]
        self.weight: Weight = backend.load_matrix([matrix])
        self.norm: Array = backend.upload(np.full(size, 0.5, np.float32))
        self.x: Array = backend.empty((rows, size), "float32")
        self.normed: Array = backend.empty((rows, size), "float32")
        self.issued = 0

    def issue(self) -> None:
        self.issued += 1
        for _ in range(6):
            self.backend.rms_norm(self.x, self.norm, 1e-5, self.normed, self.rows)
            self.backend.linear(self.normed, self.weight, self.x, self.rows, accumulate=True)

    def inputs(self, seed: int) -> NDArray[np.float32]:
        return np.random.default_rng(seed).standard_normal(self.x.shape, np.float32)

    def one_at_a_time(self, seed: int) -> NDArray[np.float32]:
        self.backend.write(self.x, self.inputs(seed))
        for _ in range(6):
            self.backend.rms_norm(self.x, self.norm, 1e-5, self.normed, self.rows)
            self.backend.synchronize()
            self.backend.linear(self.normed, self.weight, self.x, self.rows, accumulate=True)
            self.backend.synchronize()
        result: NDArray[np.float32] = self.backend.read(self.x)
        return result

    def replayed(self, key: object, seed: int) -> NDArray[np.float32]:
        self.backend.write(self.x, self.inputs(seed))
        self.backend.replay(key, self.issue)
        result: NDArray[np.float32] = self.backend.read(self.x)
        return result


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_replay_gives_the_bits_of_ops_run_one_at_a_time(
    cpu: MakeBackend, random_matrix: MakeMatrix, threads: int, rows: int
) -> None:
    chain = Chain(cpu(threads), random_matrix(192, 192), rows)
    for seed in range(4):
        expected = chain.one_at_a_time(seed)
        np.testing.assert_array_equal(chain.replayed(("chain", id(chain)), seed), expected)
    assert chain.issued == 1


def test_the_longest_unused_program_is_forgotten(random_matrix: MakeMatrix) -> None:
    backend = cpu_backend(1)
    try:
        chain = Chain(backend, random_matrix(64, 64), 2)
        expected = chain.one_at_a_time(0)
        chain.replayed("kept", 0)
        chain.replayed("forgotten", 0)
        for number in range(MAX_PROGRAMS - 1):
            chain.replayed(number, 0)
            chain.replayed("kept", 0)
        issued = chain.issued
        np.testing.assert_array_equal(chain.replayed("kept", 0), expected)
        assert chain.issued == issued
        np.testing.assert_array_equal(chain.replayed("forgotten", 0), expected)
        assert chain.issued == issued + 1
    finally:
        backend.close()


def test_replays_mix_with_other_ops_in_order(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(2)
    chain = Chain(backend, random_matrix(64, 64), 3)
    key = ("mixed", id(chain))
    backend.write(chain.x, chain.inputs(1))
    for _ in range(4):
        chain.issue()
        backend.synchronize()
    expected = backend.read(chain.x)
    for _ in range(2):
        backend.write(chain.x, chain.inputs(1))
        chain.issue()
        backend.replay(key, chain.issue)
        chain.issue()
        backend.replay(key, chain.issue)
        np.testing.assert_array_equal(backend.read(chain.x), expected)


def test_a_failed_recording_leaves_nothing_behind(cpu: MakeBackend, random_matrix: MakeMatrix) -> None:
    backend = cpu(1)
    chain = Chain(backend, random_matrix(64, 64), 2)
    key = ("failed", id(chain))
    backend.write(chain.x, chain.inputs(3))

    def fail() -> None:
        chain.issue()
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        backend.replay(key, fail)
    np.testing.assert_array_equal(backend.read(chain.x), chain.inputs(3))
    np.testing.assert_array_equal(chain.replayed(key, 3), chain.one_at_a_time(3))


def test_waits_and_writes_are_refused_while_recording(cpu: MakeBackend) -> None:
    backend = cpu(1)
    x = backend.empty((2, 4), "float32")
    host = np.zeros((2, 4), np.float32)
    for name, issue in (
        ("write", lambda: backend.write(x, host)),
        ("wait", lambda: backend.read(x)),
        ("wait", backend.synchronize),
        ("replay", lambda: backend.replay("inner", lambda: None)),
    ):
        with pytest.raises(AssertionError, match=name):
            backend.replay(("refused", name), issue)


def test_arrays_live_until_their_ops_have_run(cpu: MakeBackend) -> None:
    backend = cpu(2)
    out = backend.empty((4, 1000), "float32")
    indices = backend.upload(np.arange(4, dtype=np.int32))
    for value in range(5):
        backend.gather_rows(backend.upload(np.full((4, 1000), value, np.float32)), indices, out, 4)
        gc.collect()
        # Would be put where the source was, if that had been given back.
        aligned_zeros((4, 1000), np.float32)[...] = -1
        assert (backend.read(out) == value).all()


def test_a_write_comes_after_what_was_enqueued_before_it(cpu: MakeBackend) -> None:
    backend = cpu(2)
    x = backend.upload(np.ones((3, 5), np.float32))
    out = backend.empty((3, 5), "float32")
    host = np.full((2, 5), 2, np.float32)
    backend.gather_rows(x, backend.upload(np.arange(3, dtype=np.int32)), out, 3)
    backend.write(x, host)
    host[...] = 9
    assert (backend.read(out) == 1).all()
    assert backend.read(x)[:, 0].tolist() == [2, 2, 1]


def test_what_is_read_later_is_of_its_place_in_the_order(cpu: MakeBackend) -> None:
    backend = cpu(2)
    x, indices = backend.upload(np.arange(6, dtype=np.float32).reshape(3, 2)), backend.upload(np.zeros(3, np.int32))
    out = backend.empty((3, 2), "float32")
    pending = []
    for value in range(3):
        backend.write(indices, np.full(3, value, np.int32))
        backend.gather_rows(x, indices, out, 3)
        pending.append(backend.read_later(out))
    backend.write(out, np.full((3, 2), -1, np.float32))
    assert all(one.ready for one in pending)
    for value, one in reversed(list(enumerate(pending))):
        assert (one.wait() == [2 * value, 2 * value + 1]).all()


def test_read_gives_a_copy(cpu: MakeBackend) -> None:
    backend = cpu(1)
    x = backend.upload(np.ones((2, 3), np.float32))
    copy = backend.read(x)
    backend.write(x, np.zeros((2, 3), np.float32))
    assert (copy == 1).all()
    part = backend.read(x[:1])
    assert part.shape == (1, 3)
    assert part.flags.c_contiguous
