"""Whether a sequence of the queue may enter, and at whose cost."""

from __future__ import annotations

from collections.abc import Collection

from shardline.scheduler.block_pool import BlockPool
from shardline.scheduler.config import SchedulerConfig
from shardline.scheduler.sequence import Sequence


def victims_of(
    sequence: Sequence, found: list[int], running: Collection[Sequence], pool: BlockPool, config: SchedulerConfig
) -> list[Sequence] | None:
    """Who is preempted so that a waiting sequence, of which some blocks were found, may enter now.

    Nobody, mostly; None when it must wait. For a more urgent class, sequences of the less urgent ones are preempted, if
    that is enough.
    """
    need = pool.blocks_for(sequence.num_tokens) - len(found)
    # Of those found, the idle ones are available now, but not once this sequence holds them.
    available = pool.num_available - pool.num_idle_among(found) - need

    def enters(running: Collection[Sequence], available: int) -> bool:
        if not running:
            return available >= 0
        # Who was preempted comes back when each running sequence could grow, or it would be preempted at once.
        spare = max(config.watermark, len(running) if sequence.was_preempted else 0)
        reserved = sum(_blocks_short(other, pool) for other in running)
        return len(running) < config.max_sequences and available - reserved >= spare

    if enters(running, available):
        return []
    by_rank = sorted(running, key=lambda other: other.rank)
    victims: list[Sequence] = []
    while by_rank and by_rank[-1].priority > sequence.priority and by_rank[-1].rank > sequence.rank:
        victims.append(by_rank.pop())
        released = pool.num_released_by((victim.table for victim in victims), keep=found)
        if enters(by_rank, available + released):
            return victims
    return None


def _blocks_short(sequence: Sequence, pool: BlockPool) -> int:
    """Blocks that a sequence needs for the tokens it has, and does not hold yet."""
    return max(0, pool.blocks_for(sequence.num_tokens) - len(sequence.table))
