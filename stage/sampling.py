"""What the last stage keeps for sampling, and the way from parameters to a `SamplingBatch` and back to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import SampleOutput, SamplingBatch
from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SampledToken


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


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row that samples: its parameters, the position of the new token, and the tokens before it if they matter."""

    params: SamplingParams
    position: int
    history: History | None


def sampling_batch(rows: Sequence[SamplingRow]) -> SamplingBatch:
    """The op's arguments for some rows."""
    params = [row.params for row in rows]
    assert all(p.seed is not None for p in params), "the scheduler resolves seeds"
    biases = [bias for p in params for bias in p.logit_bias]
    histories = [row.history for row in rows if row.history is not None]

    def floats(values: list[float]) -> NDArray[np.float32]:
        return np.array(values, np.float32)

    return SamplingBatch(
        temperature=floats([p.temperature for p in params]),
        top_k=np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        repetition=floats([p.repetition_penalty for p in params]),
        presence=floats([p.presence_penalty for p in params]),
        frequency=floats([p.frequency_penalty for p in params]),
        seed=np.array([p.seed for p in params], np.uint64),
        position=np.array([row.position for row in rows], np.int64),
        logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        bias_offsets=_offsets([len(p.logit_bias) for p in params]),
        bias_ids=np.array([token_id for token_id, _ in biases], np.int32),
        bias_values=floats([value for _, value in biases]),
        history_offsets=_offsets([0 if row.history is None else len(row.history.ids) for row in rows]),
        history_ids=_joined([history.ids for history in histories]),
        history_counts=_joined([history.counts for history in histories]),
    )


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def sampled_tokens(
    seq_ids: Sequence[int], params: Sequence[SamplingParams], output: SampleOutput
) -> tuple[SampledToken, ...]:
    """The op's results as messages, one a row."""
    token_ids = output.token_ids.tolist()
    tokens = []
    for row, (seq_id, asked) in enumerate(zip(seq_ids, params, strict=True)):
        if asked.logprobs is None:
            tokens.append(SampledToken(seq_id, token_ids[row]))
            continue
        top_ids = output.top_ids[row, : asked.logprobs].tolist()
        top_logprobs = output.top_logprobs[row, : asked.logprobs].tolist()
        top = tuple((i, p) for i, p in zip(top_ids, top_logprobs, strict=True) if i >= 0)
        tokens.append(SampledToken(seq_id, token_ids[row], float(output.logprobs[row]), top))
    return tuple(tokens)
