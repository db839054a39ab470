"""The queue of sequences that hold no blocks, in the order of service."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from shardline.scheduler.sequence import Rank, RequestState, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class WaitingQueue:
    """Sorted by rank: a preempted sequence, being older than what came after it, is at the front of its class again."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._per_request: Counter[RequestState] = Counter()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of service, over a snapshot."""
        return iter(self._sequences.copy())

    @property
    def num_requests(self) -> int:
        """Requests that have a sequence here."""
        return len(self._per_request)

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._sequences, sequence, key=_rank)
        self._per_request[sequence.request] += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self._per_request[sequence.request] -= 1
        if not self._per_request[sequence.request]:
            del self._per_request[sequence.request]
