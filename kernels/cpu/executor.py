"""Runs programs: lists of fixed-size records that a team of threads executes together, op after op.

An op is cut into shares. A thread that is free takes the next share of the current op; whoever ends the last one opens
the next op. So a thread that the system keeps from running holds up nobody, unless it was stopped inside a share: on a
machine whose cores are wanted by others too, fixed shares and a barrier would run at the slowest thread's pace.

The team is the calling thread and num_threads - 1 workers. A thread without work looks at a word for some microseconds,
then sleeps on a condition. All of it is native code without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from shardline.kernels.cpu.intrinsics import (
    I32,
    I64,
    IEEE_MODE,
    call_operation,
    emit_pointer,
    float_mode,
    set_float_mode,
)
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.resident import aligned_zeros

RECORD_WORDS = 26
"""int64 words of a record: an `Operation`'s address, the number of its shares, then its arguments."""

ARGUMENT_WORDS = RECORD_WORDS - 2

_SPINS = 2000
"""Looks at a word before a thread sleeps: some tens of microseconds, about what waking a thread costs."""

# Offsets in a team's state. Words that different threads write lie in cache lines of their own.
_CLAIM = 0  # the current op's number, counted over all programs, and below it how many of its shares are not taken
_DONE = 64  # ended shares of the current op
_BASE = 128  # the number of the current program's first op
_RECORDS = 136  # the current program's address
_COUNT = 144  # the number of its records
_STOP = 152  # not 0: workers end
_SLEEPERS = 192
_LOCK, _UNLOCK, _WAIT, _BROADCAST = 256, 264, 272, 280  # addresses of the pthread functions
_MUTEX = 320  # room for a pthread_mutex_t and a pthread_cond_t of any platform
_CONDITION = 448
_STATE_BYTES = 576

_SHARE_BITS = 16
MAX_SHARES = (1 << _SHARE_BITS) - 1
# 47 bits are left for numbers of ops: at a million ops a second, four years.


class Team:
    """Threads that run programs together."""

    def __init__(self, num_threads: int) -> None:
        """Start num_threads - 1 workers; they sleep until `run`."""
        self._num_threads = num_threads
        self._state = aligned_zeros((_STATE_BYTES // 8,), np.int64)
        state = self._state.ctypes.data
        process = ctypes.CDLL(None)
        process.pthread_mutex_init(ctypes.c_void_p(state + _MUTEX), None)
        process.pthread_cond_init(ctypes.c_void_p(state + _CONDITION), None)
        for offset, name in (
            (_LOCK, "pthread_mutex_lock"),
            (_UNLOCK, "pthread_mutex_unlock"),
            (_WAIT, "pthread_cond_wait"),
            (_BROADCAST, "pthread_cond_broadcast"),
        ):
            self._state[offset // 8] = ctypes.cast(getattr(process, name), ctypes.c_void_p).value
        # Through ctypes, because it gives up the interpreter's lock for the call.
        native = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 4)
        self._lead = native(_lead.address)
        workers = []
        stop = None
        if num_threads > 1:
            work, stop = native(_work.address), native(_stop.address)
            for worker in range(1, num_threads):
                name = f"shardline-cpu-{worker}"
                workers.append(threading.Thread(target=_run_worker, args=(work, worker, self._state), name=name))
                workers[-1].daemon = True
                workers[-1].start()
        self._finalizer = weakref.finalize(self, _end_workers, stop, self._state, workers)

    def run(self, records: NDArray[np.int64]) -> None:
        """Run one program, records [n, RECORD_WORDS] with n >= 1, and wait for its end."""
        self._lead(self._num_threads, records.ctypes.data, len(records), self._state.ctypes.data)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._finalizer()


def _run_worker(work: Any, worker: int, state: NDArray[np.int64]) -> None:
    work(worker, 0, 0, state.ctypes.data)


def _end_workers(stop: Any, state: NDArray[np.int64], workers: list[threading.Thread]) -> None:
    if workers:
        stop(0, 0, 0, state.ctypes.data)
    for worker in workers:
        worker.join()


@operation
def _lead(num_threads: int, records: int, count: int, state: int) -> None:
    """Run a program as the team's worker 0; returns when its last op has ended."""
    # A library may have left the caller's thread flushing subnormal numbers; bits would depend on who takes a share.
    callers_mode = float_mode()
    set_float_mode(IEEE_MODE)
    if num_threads == 1:
        for index in range(count):
            record = records + 8 * RECORD_WORDS * index
            call_operation(_load(record), 0, 0, 1, record + 16)
        set_float_mode(callers_mode)
        return
    # No op is open, so nobody reads these.
    base = (_load(state + _CLAIM) >> _SHARE_BITS) + 1
    _store(state + _RECORDS, records)
    _store(state + _COUNT, count)
    _store(state + _BASE, base)
    _publish(state, _CLAIM, (base << _SHARE_BITS) | _load(records + 8))
    while True:
        claim = _load(state + _CLAIM)
        if claim & MAX_SHARES:
            _take_share(0, claim, state)
        elif claim >> _SHARE_BITS == base + count:
            set_float_mode(callers_mode)
            return
        else:
            _await_change(state, _CLAIM, claim)


@operation
def _work(worker: int, _first: int, _second: int, state: int) -> None:
    """A worker's life."""
    # It began with the mode of the thread that made it.
    set_float_mode(IEEE_MODE)
    while True:
        claim = _load(state + _CLAIM)
        if claim & MAX_SHARES:
            _take_share(worker, claim, state)
        elif _load(state + _STOP):
            return
        else:
            _await_change(state, _CLAIM, claim)


@operation
def _stop(_first: int, _second: int, _third: int, state: int) -> None:
    """Make the workers end, between programs."""
    _store(state + _STOP, 1)
    _publish(state, _CLAIM, _load(state + _CLAIM) + (1 << _SHARE_BITS))


@jit
def _take_share(worker: int, claim: int, state: int) -> None:
    """Take one share of the op that was seen open, unless another thread was faster."""
    if not _exchange(state + _CLAIM, claim, claim - 1):
        return
    # From here to the share's end its op cannot end, and so neither its program.
    number = claim >> _SHARE_BITS
    index = number - _load(state + _BASE)
    record = _load(state + _RECORDS) + 8 * RECORD_WORDS * index
    shares = _load(record + 8)
    call_operation(_load(record), worker, shares - (claim & MAX_SHARES), shares, record + 16)
    if _add(state + _DONE, 1) + 1 == shares:
        _store(state + _DONE, 0)
        following = 0
        if index + 1 < _load(state + _COUNT):
            following = _load(record + 8 * RECORD_WORDS + 8)
        _publish(state, _CLAIM, ((number + 1) << _SHARE_BITS) | following)


@jit
def _publish(state: int, word: int, value: int) -> None:
    """Change a word that others may wait for.

    A waiter counts itself a sleeper before it looks at the word for the last time, and this looks for sleepers after it
    has changed the word: one of the two sees the other.
    """
    _store(state + word, value)
    if _load(state + _SLEEPERS) != 0:
        _call(_load(state + _LOCK), state + _MUTEX, 0)
        _call(_load(state + _BROADCAST), state + _CONDITION, 0)
        _call(_load(state + _UNLOCK), state + _MUTEX, 0)


@jit
def _await_change(state: int, word: int, value: int) -> None:
    """Wait until the word has another value."""
    for _ in range(_SPINS):
        if _load(state + word) != value:
            return
        _relax()
    _call(_load(state + _LOCK), state + _MUTEX, 0)
    _add(state + _SLEEPERS, 1)
    while _load(state + word) == value:
        _call(_load(state + _WAIT), state + _CONDITION, state + _MUTEX)
    _add(state + _SLEEPERS, -1)
    _call(_load(state + _UNLOCK), state + _MUTEX, 0)


@intrinsic
def _load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, sequentially consistent."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.load_atomic(emit_pointer(builder, args[0], I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the int64 at an address, sequentially consistent."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], emit_pointer(builder, args[0], I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, sequentially consistent; what it was before."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", emit_pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace the int64 at an address if it is the expected one; whether it was. Sequentially consistent."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        place = emit_pointer(builder, args[0], I64)
        return builder.extract_value(builder.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _call(typingctx: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a C function of one or two pointers that returns an int."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        function_type = ir.FunctionType(I32, [I64, I64])
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])

    return types.int32(types.int64, types.int64, types.int64), codegen


@intrinsic
def _relax(typingctx: Any) -> Any:
    """Tell the core that this is a wait loop."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        machine = platform.machine()
        if machine in ("x86_64", "AMD64"):
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            function_type = ir.FunctionType(ir.VoidType(), [I32])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.aarch64.hint"), [I32(1)])
        return context.get_dummy_value()

    return types.void(), codegen
