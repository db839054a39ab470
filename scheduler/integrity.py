"""The proof that a scheduler has lost nothing, over the parts that it is made of."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardline.scheduler.sequence import Rank, Sequence

if TYPE_CHECKING:
    from shardline.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """See `Scheduler.check_integrity`."""
    scheduler._pool.check(sequence.table for sequence in scheduler._running.values())
    live = {id(sequence) for state in scheduler._requests.values() for sequence in state.live.values()}
    waiting = {id(sequence) for sequence in scheduler._waiting}
    running = {id(sequence) for sequence in scheduler._running.values()}
    assert not waiting & running, "a sequence waits and runs"
    assert waiting | running == live, "a sequence is lost, or outlived its request"
    for sequence in scheduler._waiting:
        assert not sequence.table, "a waiting sequence holds blocks"
        assert (sequence.num_computed, sequence.seq_id) == (0, -1), "a waiting sequence still has a name"
    ranks: list[Rank] = [sequence.rank for sequence in scheduler._waiting]
    assert ranks == sorted(ranks), "the queue is out of order"
    assert len(scheduler._running) <= scheduler.config.max_sequences, "more sequences run than are allowed"
    assert len(scheduler._in_flight) <= scheduler.config.depth, "more plans are in flight than are allowed"
    for plan in scheduler._in_flight:
        if any(sequence in scheduler._suspects for sequence in plan.sequences):
            assert len(scheduler._in_flight) == plan.size == 1, "a suspect has company"
    in_flight = Counter(seq_id for plan in scheduler._in_flight for seq_id in plan.sampling)
    scheduler._prefixes.check(scheduler._running.values())
    for seq_id, sequence in scheduler._running.items():
        _check_running(scheduler, seq_id, sequence, in_flight[seq_id])


def _check_running(scheduler: Scheduler, seq_id: int, sequence: Sequence, sampling: int) -> None:
    name = f"sequence {seq_id}"
    assert sequence.seq_id == seq_id, f"{name} is kept as {sequence.seq_id}"
    assert len(set(sequence.table)) == len(sequence.table), f"{name} has a block twice"
    assert len(sequence.table) >= scheduler._pool.blocks_for(sequence.num_computed), f"{name} lacks a block"
    for index, block_id in enumerate(sequence.table):
        written_later = (index + 1) * scheduler.config.block_size > sequence.num_computed
        assert not written_later or scheduler._pool.holders(block_id) == 1, f"{name} would write to a shared block"
    least = -1 if scheduler.config.ahead and not sequence.params.needs_history else 0
    assert sequence.lag >= least, f"{name} is too far ahead"
    state = (sequence.lag == 1, sequence.lag > 1, max(0, 1 - sequence.lag))
    assert (seq_id in scheduler._ready, seq_id in scheduler._catching_up, sampling) == state, (
        f"{name} is not where its lag says"
    )
    assert sequence.num_computed < sequence.request.max_tokens, f"{name} runs beyond its end"
