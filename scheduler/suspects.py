"""Who may be what kills a stage: the sequences that were in flight when it was lost."""

from __future__ import annotations

from collections.abc import Iterable

from shardline.scheduler.sequence import Sequence

SUSPECTED = 2
"""Losses without a token of its own between, from which on a sequence runs alone."""

CONVICTED = 4
"""Losses from which on its request is ended: nobody else was in flight at the last two. One of them may have been a
coincidence."""


class Suspects:
    """The sequences that were in flight at two losses or more, and have not had a token since.

    They run one at a time and with nothing else in flight, until a token of theirs comes: who kills a stage each time
    that it runs is soon found alone, and who was only beside it goes on as if nothing had been.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    @property
    def first(self) -> Sequence:
        """The next to run, by rank."""
        return min(self._sequences, key=lambda sequence: sequence.rank)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence run alone until its next token."""
        if sequence not in self._sequences:
            self._sequences.append(sequence)

    def clear(self, sequence: Sequence) -> None:
        """It had a token, or has ended."""
        sequence.losses = 0
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def note_loss(self, in_flight: Iterable[Sequence]) -> list[str]:
        """A stage was lost while these unfinished sequences were in flight. Returns the requests that are to be ended
        for it."""
        convicted: dict[str, None] = {}
        for sequence in dict.fromkeys(in_flight):
            sequence.losses += 1
            if sequence.losses >= SUSPECTED:
                self.add(sequence)
            if sequence.losses >= CONVICTED:
                convicted[sequence.request.request.request_id] = None
        return list(convicted)
