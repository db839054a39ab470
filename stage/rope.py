"""The rotary embedding's table of cosines and sines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Backend, RopeTable
from shardline.stage.spec import RopeSpec

_SPAN = 256


def rope_tables(rope: RopeSpec, positions: int, max_context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [positions, rotary_dim / 2], of position * base^(-2i / rotary_dim) / factors[i].

    max_context: The engine's, which says which of two sets of factors holds.

    The math libraries of two hosts may differ in a float64's last bit, and then now and then in the float32 that it
    rounds to; two stages of one model must not. So the angles are taken in extended precision, of two short ranges of
    positions, and joined by the addition theorems: what reaches float32 is far more exact than it can show.
    """
    channels = np.arange(rope.rotary_dim // 2, dtype=np.longdouble)
    frequencies: NDArray[np.longdouble] = np.longdouble(rope.base) ** (-2 * channels / rope.rotary_dim)
    is_long = rope.long_factors is not None and max_context > rope.original_context
    factors = rope.long_factors if is_long else rope.factors
    if factors is not None:
        frequencies = frequencies / np.array(factors, np.longdouble)
    scale = np.longdouble(rope.attention_factor)
    fine = np.arange(_SPAN, dtype=np.longdouble)[:, None] * frequencies
    cos_fine, sin_fine = np.cos(fine), np.sin(fine)
    cos = np.empty((positions, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    for start in range(0, positions, _SPAN):
        end = min(start + _SPAN, positions)
        coarse = np.longdouble(start) * frequencies
        cos_coarse, sin_coarse = np.cos(coarse), np.sin(coarse)
        c, s = cos_fine[: end - start], sin_fine[: end - start]
        cos[start:end] = (cos_coarse * c - sin_coarse * s) * scale
        sin[start:end] = (sin_coarse * c + cos_coarse * s) * scale
    return cos, sin


def load_rope(rope: RopeSpec, positions: int, max_context: int, backend: Backend) -> RopeTable:
    """`rope_tables` on the device."""
    cos, sin = rope_tables(rope, positions, max_context)
    return RopeTable(backend.upload(cos), backend.upload(sin), rope.interleaved)
