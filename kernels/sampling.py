"""What the sampling op takes and gives: one row a sequence that samples in this step. Host arrays.

The order of the rule, the same in every backend, for a row's logits `l` (float32):

1. logprobs, if asked for, are log-softmax of the untouched `l`.
2. `l += bias`; then the repetition penalty (over ids of the history) divides positive and multiplies negative logits;
   then `l -= frequency * count + presence * (count > 0)` with the count in the output.
3. temperature 0, or a largest logit that is infinite: the argmax, the lowest id among equals. Nothing below applies.
4. x = (l - max l) / temperature. Filters, each a threshold on what the one before left: top-k keeps every x >= the
   k-th largest (ties are kept); then min-p keeps x >= ln(min_p); then top-p keeps the smallest set of the most likely
   that reaches p of what is left (ties with its least likely are kept). At least the maximum always stays.
5. The token is the argmax over the kept ids of x[id] + Gumbel(seed, position, id), the lowest id among equals. The
   noise is a function of these three alone: Philox 4x32-10 with key = seed, counter = (id // 4, position, 0, 0), lane
   id % 4; a 32-bit word u becomes -ln(-ln((u + 0.5) / 2^32)).

A NaN is less than every number: it is never chosen before one, and listed after all of them. A row that holds one has
NaN for each of its logprobs; a row of NaN alone gives id 0. Ids repeated in a row's bias add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of `rows` rows.

    Attributes:
        temperature, top_p, min_p, repetition, presence, frequency: float32 [rows]; see `SamplingParams`.
        top_k: int32 [rows], 0 keeps all.
        seed: uint64 [rows].
        position: int64 [rows], the absolute position that the new token will have.
        logprobs: int32 [rows]: -1 for none, else how many of the most likely tokens to report with the chosen one.
        bias_offsets: int64 [rows + 1]; row r's entries are bias_ids and bias_values [offsets[r] : offsets[r + 1]].
        bias_ids, bias_values: int32 and float32.
        history_offsets: int64 [rows + 1], likewise.
        history_ids: int32, the distinct ids of the prompt and the output, each once.
        history_counts: int32, how often each occurs in the output (0: in the prompt only).
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]
    logprobs: NDArray[np.int32]
    bias_offsets: NDArray[np.int64]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    history_offsets: NDArray[np.int64]
    history_ids: NDArray[np.int32]
    history_counts: NDArray[np.int32]

    @property
    def rows(self) -> int:
        """How many rows sample."""
        return len(self.temperature)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What was chosen.

    Attributes:
        token_ids: int32 [rows].
        logprobs: float32 [rows], of the chosen token; NaN where none was asked for.
        top_ids, top_logprobs: int32 and float32 [rows, max of batch.logprobs (at least 0)]: most likely first, ties by
            lower id; a row's entries past its own number are -1 and NaN.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
