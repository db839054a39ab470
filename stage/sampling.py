"""What the last stage keeps for sampling, and the way from parameters to a `SamplingBatch` and back to tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import SampleOutput, SamplingBatch
from shardline.scheduler.plan import SampledToken, SequenceStart


class History:
    """The distinct tokens of a sequence and how often each occurs in its output.

    Attributes:
        ids: int32, ascending.
        counts: int32, of each in the output; 0 if it is in the prompt only.
    """

    __slots__ = ("counts", "ids")

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        tokens = np.array(token_ids, np.int32)
        self.ids: NDArray[np.int32] = np.unique(tokens)
        self.counts: NDArray[np.int32] = np.zeros(len(self.ids), np.int32)
        np.add.at(self.counts, np.searchsorted(self.ids, tokens[prompt_len:]), 1)

    def add(self, token_id: int) -> None:
        """Take a token of the output."""
        place = int(np.searchsorted(self.ids, token_id))
        if place < len(self.ids) and self.ids[place] == token_id:
            self.counts[place] += 1
        else:
            self.ids = np.insert(self.ids, place, token_id)
            self.counts = np.insert(self.counts, place, 1)


_COLUMNS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "seed": np.uint64,
    "logprobs": np.int32,
}
"""Of `SamplingBatch`: what is the same in each of a sequence's steps."""


class SamplingTable:
    """How the tokens of the sequences in a stage's table are chosen: a row each, written once a sequence."""

    def __init__(self, num_rows: int) -> None:
        self._columns = {name: np.zeros(num_rows, dtype) for name, dtype in _COLUMNS.items()}
        self._biases: list[tuple[tuple[int, float], ...]] = [()] * num_rows
        self._histories: list[History | None] = [None] * num_rows
        # Whether it has a bias or a history.
        self._adjusted = np.zeros(num_rows, np.bool_)

    def write(self, row: int, start: SequenceStart) -> None:
        """A sequence starts in that row."""
        params = start.params
        assert params.seed is not None, "the scheduler resolves seeds"
        values = {
            "temperature": params.temperature,
            "top_k": min(params.top_k, 2**31 - 1),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "seed": params.seed,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
        }
        for name, column in self._columns.items():
            column[row] = values[name]
        self._biases[row] = params.logit_bias
        self._histories[row] = History(start.token_ids, start.prompt_len) if params.needs_history else None
        self._adjusted[row] = bool(params.logit_bias) or params.needs_history

    def batch(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        """The op's arguments for some rows, whose new tokens will have these positions."""
        columns: dict[str, Any] = {name: column[rows] for name, column in self._columns.items()}
        if not self._adjusted[rows].any():
            return SamplingBatch(position=positions, **columns, **_no_adjustments(len(rows)))
        biases = [self._biases[row] for row in rows]
        histories = [self._histories[row] for row in rows]
        entries = [entry for bias in biases for entry in bias]
        kept = [history for history in histories if history is not None]
        return SamplingBatch(
            position=positions,
            **columns,
            bias_offsets=_offsets([len(bias) for bias in biases]),
            bias_ids=np.array([token_id for token_id, _ in entries], np.int32),
            bias_values=np.array([value for _, value in entries], np.float32),
            history_offsets=_offsets([0 if one is None else len(one.ids) for one in histories]),
            history_ids=_joined([history.ids for history in kept]),
            history_counts=_joined([history.counts for history in kept]),
        )

    def histories(self, rows: NDArray[np.int64]) -> list[tuple[int, History]]:
        """Those of the rows that have one, each with its place in `rows`."""
        found = [(at, self._histories[rows[at]]) for at in np.flatnonzero(self._adjusted[rows]).tolist()]
        return [(at, history) for at, history in found if history is not None]


@functools.lru_cache(maxsize=64)
def _no_adjustments(rows: int) -> dict[str, NDArray[Any]]:
    """The parts of a `SamplingBatch` about biases and histories, where no row has any."""
    offsets, ids, values = np.zeros(rows + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    return {
        "bias_offsets": offsets,
        "bias_ids": ids,
        "bias_values": values,
        "history_offsets": offsets,
        "history_ids": ids,
        "history_counts": ids,
    }


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


_NEW_TOKEN = functools.partial(tuple.__new__, SampledToken)
"""As `SampledToken._make`, in a third of the time: hundreds are made a step."""


def sampled_tokens(seq_ids: Sequence[int], asked: NDArray[np.int32], output: SampleOutput) -> tuple[SampledToken, ...]:
    """The op's results as messages, one a row; `asked` is `SamplingBatch.logprobs`."""
    token_ids = output.token_ids.tolist()
    tokens = list(map(_NEW_TOKEN, zip(seq_ids, token_ids, repeat(None), repeat(()))))
    for row in np.flatnonzero(asked >= 0).tolist():
        top_ids = output.top_ids[row, : asked[row]].tolist()
        top_logprobs = output.top_logprobs[row, : asked[row]].tolist()
        top = tuple((i, p) for i, p in zip(top_ids, top_logprobs, strict=True) if i >= 0)
        tokens[row] = SampledToken(seq_ids[row], token_ids[row], float(output.logprobs[row]), top)
    return tuple(tokens)
