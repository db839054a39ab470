"""Scalings of the rotary embedding, resolved to what `RopeSpec` has: a factor that divides each frequency, and one that
multiplies cosines and sines. Pure functions of a file's numbers, whatever kind of file it is.

Every stage resolves them for itself, and two stages must have the same bits though the math libraries of their hosts
may differ in a last bit. So they are taken in extended precision and rounded to 40 bits: at a position of 100,000 that
is still below what float32 cosines can show, and far above what math libraries differ in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Extended = NDArray[np.longdouble]

_BITS = 40
_TWO_PI: np.longdouble = 8 * np.arctan(np.longdouble(1))


def linear(factor: float, count: int) -> tuple[float, ...]:
    """Position interpolation: `count` times the factor."""
    return (_above_zero("factor", factor),) * count


def llama3(
    base: float,
    rotary_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> tuple[float, ...]:
    """Llama 3.1's: frequencies that turn less than `low_freq_factor` times in the original context are divided by
    `factor`, those that turn more than `high_freq_factor` times are kept, and between them goes a line.

    Raises ValueError for numbers that define no scaling.
    """
    _above_zero("factor", factor)
    _above_zero("original_context", original_context)
    if not 0 < low_freq_factor < high_freq_factor < np.inf:
        raise ValueError(f"high_freq_factor {high_freq_factor} is not above low_freq_factor {low_freq_factor} above 0")
    turns = original_context * _frequencies(base, rotary_dim) / _TWO_PI
    kept = np.clip((turns - low_freq_factor) / (np.longdouble(high_freq_factor) - low_freq_factor), 0, 1)
    return _mixed(kept, factor)


def yarn(
    base: float,
    rotary_dim: int,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> tuple[float, ...]:
    """YaRN (arXiv 2309.00071, "NTK by parts"): channels that turn more than `beta_fast` times in the original context
    are kept, those that turn less than `beta_slow` times are divided by `factor`, and between them goes a line over
    the channels' *numbers*, whose ends are whole numbers if `truncate`.

    Raises ValueError for numbers that define no scaling.
    """
    _above_zero("factor", factor)
    _above_zero("original_context", original_context)
    if not 0 < beta_slow < beta_fast < np.inf:
        raise ValueError(f"beta_fast {beta_fast} is not above beta_slow {beta_slow} above 0")
    log_base = np.log(np.longdouble(_above_one("base", base)))

    turns = np.array([beta_fast, beta_slow], np.longdouble)
    first, last = rotary_dim * np.log(np.longdouble(original_context) / (turns * _TWO_PI)) / (2 * log_base)
    if truncate:
        first, last = np.floor(first), np.ceil(last)
    first = max(first, np.longdouble(0))
    last = max(min(last, np.longdouble(rotary_dim - 1)), first + np.longdouble(0.001))
    channels = np.arange(rotary_dim // 2, dtype=np.longdouble)
    return _mixed(1 - np.clip((channels - first) / (last - first), 0, 1), factor)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What multiplies cosines and sines under YaRN, if a file does not say it. `mscale` and `mscale_all_dim` (DeepSeek)
    hold together only; 0 and None are the same."""

    def growth(weight: float) -> np.longdouble:
        return np.longdouble(1) if factor <= 1 else np.longdouble(weight) * np.log(np.longdouble(factor)) / 10 + 1

    if mscale and mscale_all_dim:
        return _rounded(growth(mscale) / growth(mscale_all_dim))
    return _rounded(growth(1))


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """What multiplies cosines and sines under LongRoPE (arXiv 2402.13753), if a file does not say it.

    factor: The model's context in original contexts. Raises ValueError if the original context is one token.
    """
    if factor <= 1:
        return 1.0
    _above_one("original_context", original_context)
    return _rounded(np.sqrt(1 + np.log(np.longdouble(factor)) / np.log(np.longdouble(original_context))))


def _frequencies(base: float, rotary_dim: int) -> Extended:
    """Radians a position of each pair of channels."""
    channels = np.arange(rotary_dim // 2, dtype=np.longdouble)
    frequencies: Extended = np.longdouble(_above_one("base", base)) ** (-2 * channels / rotary_dim)
    return frequencies


def _mixed(kept: Extended, factor: float) -> tuple[float, ...]:
    """Frequencies of which that share (0 to 1) stays and the rest is divided by the factor."""
    return tuple(_rounded(1 / (share + (1 - share) / np.longdouble(factor))) for share in kept)


def _rounded(value: np.longdouble) -> float:
    fraction, exponent = np.frexp(value)
    return float(np.ldexp(np.rint(np.ldexp(fraction, _BITS)), exponent - _BITS))


def _above_zero(name: str, value: float) -> float:
    if not 0 < value < np.inf:
        raise ValueError(f"{name} {value} is not a finite number above 0")
    return value


def _above_one(name: str, value: float) -> float:
    if not 1 < value < np.inf:
        raise ValueError(f"{name} {value} is not a finite number above 1")
    return value
