"""Sampling, one row at a time; `kernels.sampling` has the rule. Rows over threads, no row looks at another.

Ids go in blocks of 64 whose maxima are kept: they lead to the argmax, to the few blocks that can hold a row's k
largest, and past blocks that no noise could make win. They decide which ids are looked at, never a result. Sums are
either in a fixed order by id (log-softmax) or of integers (top-p: a weight is exp(x) * 2^40 to the nearest integer).
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray
from numpy.typing import NDArray

from shardline.kernels.cpu import simd
from shardline.kernels.cpu.intrinsics import bits_of_float32, exp_f32, float32_of_bits, pointer
from shardline.kernels.cpu.jit import jit, operation
from shardline.kernels.cpu.logarithm import log_f64
from shardline.kernels.cpu.philox import GUMBEL_BOUND, NOISE_BLOCK, gumbel_noise, noise_index
from shardline.kernels.cpu.simd import LANES
from shardline.kernels.sampling import SampleOutput, SamplingBatch

BLOCK = NOISE_BLOCK
"""Ids that share a maximum."""

_SUM_RUN = 256
"""Ids whose exponentials are added in float32 before float64 takes over."""

_BINS = 2048
_WEIGHT_ONE = 2.0**40
# exp of less than this rounds to a weight of 0.
_WEIGHTLESS = np.float32(-28.5)
_LOWEST = np.float32(-np.inf)
_NAN = np.float32(np.nan)
_ZERO = np.float32(0.0)
# Not a plain 0, for which numba would compile callees once more.
_START = np.int64(0)


def sample_scratch_bytes(vocab: int) -> int:
    """Bytes that `sample_rows` needs of scratch a thread."""
    blocks = -(-vocab // BLOCK)
    return 8 * (_BINS + NOISE_BLOCK) + 4 * (NOISE_BLOCK + blocks + 3 * (blocks + 1) * BLOCK)


@jit
def _block_maxima(values, offset, count, maxima):
    """The largest number of each block of values[offset : offset + count]; -inf for a block of NaN alone."""
    whole = count // BLOCK
    for block in range(whole):
        at = offset + block * BLOCK
        low = simd.larger(simd.load(values, at), simd.broadcast(_LOWEST))
        high = simd.larger(simd.load(values, at + LANES), simd.broadcast(_LOWEST))
        low = simd.larger(simd.load(values, at + 2 * LANES), low)
        high = simd.larger(simd.load(values, at + 3 * LANES), high)
        maxima[block] = simd.fold_larger(simd.larger(high, low))
    if whole * BLOCK < count:
        largest = _LOWEST
        for i in range(whole * BLOCK, count):
            if values[offset + i] > largest:
                largest = values[offset + i]
        maxima[whole] = largest


@jit
def _largest(maxima, blocks):
    largest = _LOWEST
    for block in range(blocks):
        if maxima[block] > largest:
            largest = maxima[block]
    return largest


@jit
def _first_equal(values, offset, count, maxima, largest):
    """The lowest id whose value equals `largest`; 0 if there is none (a row of NaN alone)."""
    for block in range((count + BLOCK - 1) // BLOCK):
        if maxima[block] == largest:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, count)):
                if values[offset + i] == largest:
                    return i
    return 0


@jit
def _log_sum(values, offset, count, maximum):
    """ln of the sum of exp(value - maximum), as float64; NaN if a value is NaN or the maximum is not finite."""
    total = 0.0
    shift = simd.broadcast(maximum)
    whole = count // _SUM_RUN * _SUM_RUN
    for run in range(0, whole, _SUM_RUN):
        lanes = simd.broadcast(_ZERO)
        for i in range(run, run + _SUM_RUN, LANES):
            lanes = simd.add(lanes, simd.exp(simd.sub(simd.load(values, offset + i), shift)))
        total += np.float64(simd.fold_add(lanes))
    for i in range(whole, count):
        total += np.float64(exp_f32(values[offset + i] - maximum))
    if not (total > 0.0 and total < np.inf):
        return np.nan
    return log_f64(total)


@jit
def _logprob(logit, largest, log_sum):
    logprob = np.float32(np.float64(logit) - largest - log_sum)
    # One NaN for all: which of two NaNs a difference hands on is the processor's choice.
    return logprob if logprob == logprob else _NAN


@jit
def _most_likely(values, offset, count, maxima, wanted, top_ids, top_values):
    """The ids of the `wanted` largest values, ties by lower id, then those of NaN; fewer if there are not so many."""
    filled = 0
    for block in range((count + BLOCK - 1) // BLOCK):
        if filled == wanted and (filled == 0 or not maxima[block] > top_values[filled - 1]):
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, count)):
            value = values[offset + i]
            if value != value or (filled == wanted and not value > top_values[filled - 1]):
                continue
            place = filled if filled < wanted else filled - 1
            while place > 0 and value > top_values[place - 1]:
                top_ids[place] = top_ids[place - 1]
                top_values[place] = top_values[place - 1]
                place -= 1
            top_ids[place] = i
            top_values[place] = value
            if filled < wanted:
                filled += 1
    i = 0
    while filled < wanted and i < count:
        value = values[offset + i]
        if value != value:
            top_ids[filled] = i
            top_values[filled] = value
            filled += 1
        i += 1
    return filled


@jit
def _at_least(values, count, maxima, threshold, kept):
    """Collect the values >= threshold; NaN is none."""
    filled = 0
    for block in range((count + BLOCK - 1) // BLOCK):
        if maxima[block] >= threshold:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, count)):
                kept[filled] = values[i]
                filled += values[i] >= threshold
    return filled


@jit
def _weight(exponential):
    return np.uint64(np.float64(exponential) * _WEIGHT_ONE + 0.5)


@jit
def _descend(values, weights, weighted, count, target, bins):
    """The value, all of them <= 0, at which weights added from the largest value down reach `target`.

    A weight is 1, or with `weighted` the integer of weights[i]. Of numbers <= 0 the larger has the smaller magnitude,
    whose bits order like integers: three rounds, each over the next digits of those that the last one left.
    """
    prefix = np.uint32(0)
    reached = np.uint64(0)
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        bins[: 1 << width] = np.uint64(0)
        mask = np.uint32((1 << width) - 1)
        for i in range(count):
            key = np.uint32(bits_of_float32(values[i]) & np.uint32(0x7FFFFFFF)) >> np.uint32(shift)
            if key >> np.uint32(width) == prefix:
                bins[key & mask] += _weight(weights[i]) if weighted else np.uint64(1)
        digit = 0
        while digit < (1 << width) - 1 and reached + bins[digit] < target:
            reached += bins[digit]
            digit += 1
        prefix = np.uint32((prefix << np.uint32(width)) | np.uint32(digit))
    return float32_of_bits(np.uint32(prefix | np.uint32(0x80000000)))


@jit
def _threshold(x, count, maxima, top_k, top_p, min_p, kept, weights, bins):
    """The smallest x that the filters leave; x <= 0 with 0 among them."""
    blocks = (count + BLOCK - 1) // BLOCK
    threshold = _LOWEST
    if 0 < top_k < count:
        bound = _LOWEST
        if top_k <= blocks:
            # As many blocks have a maximum of at least this, so as many values are.
            bound = _descend(maxima, weights, False, blocks, np.uint64(top_k), bins)
        left = _at_least(x, count, maxima, bound, kept)
        threshold = bound
        if left > top_k:
            threshold = _descend(kept, weights, False, left, np.uint64(top_k), bins)
    if min_p > 0.0:
        threshold = max(threshold, np.float32(log_f64(np.float64(min_p))))
    if top_p < 1.0:
        left = _at_least(x, count, maxima, max(threshold, _WEIGHTLESS), kept)
        total = np.uint64(0)
        for i in range(left):
            weights[i] = exp_f32(kept[i])
            total += _weight(weights[i])
        target = np.uint64(max(math.ceil(np.float64(top_p) * np.float64(total)), 1))
        threshold = max(threshold, _descend(kept, weights, True, left, target, bins))
    return threshold


@jit
def _noisiest(x, count, maxima, threshold, seed, position, words, noise):
    """The argmax of x + noise over ids with x >= threshold, the lowest id among equals."""
    best = -np.inf
    chosen = 0
    for block in range((count + BLOCK - 1) // BLOCK):
        highest = maxima[block]
        if highest >= threshold and np.float64(highest) + GUMBEL_BOUND >= best:
            gumbel_noise(seed, position, block, words, noise)
            for i in range(min(BLOCK, count - block * BLOCK)):
                value = x[block * BLOCK + i]
                if value >= threshold:
                    perturbed = np.float64(value) + noise[noise_index(i)]
                    if perturbed > best:
                        best = perturbed
                        chosen = block * BLOCK + i
    return chosen


@jit
def _adjust(
    flat,
    start,
    work,
    count,
    bias_ids,
    bias_values,
    history_ids,
    history_counts,
    repetition,
    presence,
    frequency,
):
    """Copy a row's logits to `work` with bias and penalties."""
    for i in range(count):
        work[i] = flat[start + i]
    for i in range(bias_ids.size):
        work[bias_ids[i]] += bias_values[i]
    for i in range(history_ids.size):
        value = work[history_ids[i]]
        value = value / repetition if value > _ZERO else value * repetition
        if history_counts[i] > 0:
            value -= frequency * np.float32(history_counts[i]) + presence
        work[history_ids[i]] = value


@jit
def sample_rows(
    thread,
    num_threads,
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    seed,
    position,
    logprobs,
    bias_offsets,
    bias_ids,
    bias_values,
    history_offsets,
    history_ids,
    history_counts,
    token_ids,
    token_logprobs,
    top_ids,
    top_logprobs,
    scratch,
    rows,
):
    """Fill token_ids, token_logprobs, top_ids and top_logprobs (`SampleOutput`) from the arrays of a `SamplingBatch`.

    logits float32 [>= rows, vocab]; scratch uint8 [>= num_threads, `sample_scratch_bytes`], 8-byte aligned.
    """
    vocab = logits.shape[1]
    blocks = (vocab + BLOCK - 1) // BLOCK
    padded = (blocks + 1) * BLOCK
    flat = logits.reshape(logits.size)
    own = scratch[thread]
    begin, end = 0, 8 * _BINS
    bins = own[begin:end].view(np.uint64)
    begin, end = end, end + 8 * NOISE_BLOCK
    noise = own[begin:end].view(np.float64)
    begin, end = end, end + 4 * NOISE_BLOCK
    words = own[begin:end].view(np.uint32)
    begin, end = end, end + 4 * blocks
    maxima = own[begin:end].view(np.float32)
    begin, end = end, end + 4 * padded
    work = own[begin:end].view(np.float32)
    begin, end = end, end + 4 * padded
    kept = own[begin:end].view(np.float32)
    begin, end = end, end + 4 * padded
    weights = own[begin:end].view(np.float32)

    for row in range(thread, rows, num_threads):
        start = row * vocab
        first_bias, end_bias = bias_offsets[row], bias_offsets[row + 1]
        first_seen, end_seen = history_offsets[row], history_offsets[row + 1]
        wanted = logprobs[row]
        top_ids[row] = -1
        top_logprobs[row] = _NAN
        token_logprobs[row] = _NAN

        _block_maxima(flat, start, vocab, maxima)
        largest = _largest(maxima, blocks)
        log_sum = 0.0
        model_largest = np.float64(largest)
        if wanted >= 0:
            log_sum = _log_sum(flat, start, vocab, largest)
            found = _most_likely(flat, start, vocab, maxima, wanted, top_ids[row], top_logprobs[row])
            for i in range(found):
                top_logprobs[row, i] = _logprob(top_logprobs[row, i], model_largest, log_sum)

        greedy = temperature[row] == _ZERO
        if greedy and first_bias == end_bias and first_seen == end_seen:
            chosen = _first_equal(flat, start, vocab, maxima, largest)
        else:
            _adjust(
                flat,
                start,
                work,
                vocab,
                bias_ids[first_bias:end_bias],
                bias_values[first_bias:end_bias],
                history_ids[first_seen:end_seen],
                history_counts[first_seen:end_seen],
                repetition[row],
                presence[row],
                frequency[row],
            )
            _block_maxima(work, _START, vocab, maxima)
            largest = _largest(maxima, blocks)
            if greedy or not math.isfinite(largest):
                chosen = _first_equal(work, _START, vocab, maxima, largest)
            else:
                for i in range(vocab):
                    work[i] = (work[i] - largest) / temperature[row]
                _block_maxima(work, _START, vocab, maxima)
                threshold = _threshold(work, vocab, maxima, top_k[row], top_p[row], min_p[row], kept, weights, bins)
                chosen = _noisiest(work, vocab, maxima, threshold, seed[row], position[row], words, noise)
        token_ids[row] = chosen
        if wanted >= 0:
            token_logprobs[row] = _logprob(flat[start + chosen], model_largest, log_sum)


_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_OTHERS = ("top_k", "logprobs", "seed", "position", "bias_offsets", "history_offsets")
_ENTRIES = ("bias_ids", "bias_values", "history_ids", "history_counts")


def new_output(batch: SamplingBatch) -> SampleOutput:
    """Unwritten arrays for what `sample_operation` chooses."""
    rows = batch.rows
    top = max(int(batch.logprobs.max(initial=0)), 0)
    return SampleOutput(
        np.empty(rows, np.int32),
        np.empty(rows, np.float32),
        np.empty((rows, top), np.int32),
        np.empty((rows, top), np.float32),
    )


def describe(
    logits: NDArray[np.float32], batch: SamplingBatch, output: SampleOutput, scratch: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """What `sample_operation` reads: addresses and sizes. The arrays must outlive it."""
    words = [logits.ctypes.data, batch.rows, logits.shape[1], scratch.ctypes.data, scratch.shape[1]]
    words += [getattr(batch, name).ctypes.data for name in (*_FLOATS, *_OTHERS)]
    for name in _ENTRIES:
        words += [getattr(batch, name).ctypes.data, getattr(batch, name).size]
    words += [output.token_ids.ctypes.data, output.logprobs.ctypes.data]
    words += [output.top_ids.ctypes.data, output.top_logprobs.ctypes.data, output.top_ids.shape[1]]
    return np.array(words, np.int64)


@operation
def sample_operation(worker: int, share: int, num_shares: int, record: int) -> None:
    """Words: the address of what `describe` gives."""
    words = carray(pointer(carray(pointer(record), (1,), np.int64)[0]), (30,), np.int64)
    rows, vocab = words[1], words[2]
    # The scratch belongs to the thread, whichever share it does.
    scratch = words[3] + (worker - share) * words[4]
    sample_rows(
        share,
        num_shares,
        carray(pointer(words[0]), (rows, vocab), np.float32),
        carray(pointer(words[5]), (rows,), np.float32),
        carray(pointer(words[11]), (rows,), np.int32),
        carray(pointer(words[6]), (rows,), np.float32),
        carray(pointer(words[7]), (rows,), np.float32),
        carray(pointer(words[8]), (rows,), np.float32),
        carray(pointer(words[9]), (rows,), np.float32),
        carray(pointer(words[10]), (rows,), np.float32),
        carray(pointer(words[13]), (rows,), np.uint64),
        carray(pointer(words[14]), (rows,), np.int64),
        carray(pointer(words[12]), (rows,), np.int32),
        carray(pointer(words[15]), (rows + 1,), np.int64),
        carray(pointer(words[17]), (words[18],), np.int32),
        carray(pointer(words[19]), (words[20],), np.float32),
        carray(pointer(words[16]), (rows + 1,), np.int64),
        carray(pointer(words[21]), (words[22],), np.int32),
        carray(pointer(words[23]), (words[24],), np.int32),
        carray(pointer(words[25]), (rows,), np.int32),
        carray(pointer(words[26]), (rows,), np.float32),
        carray(pointer(words[27]), (rows, words[29]), np.int32),
        carray(pointer(words[28]), (rows, words[29]), np.float32),
        carray(pointer(scratch), (num_shares, words[4]), np.uint8),
        rows,
    )
