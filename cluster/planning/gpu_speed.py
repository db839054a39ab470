"""What a GPU does in a second, for the planner: from what the driver says of it, and what was measured on one.

Fitted to whole decode steps of two models on an H200 (`python -m benchmarks.gpu_model`: an 8B and a 30B-A3B in 4 bits,
1 to 256 rows), which these numbers follow within a fifth. Other cards are reckoned from there: bytes with their
memory's rate; arithmetic with their tensor cores where these are slower than the unpacking of weights, which bounds an
H200. No consumer card has been measured, so between cards of unlike generations the split may be off its best.
"""

from __future__ import annotations

from typing import NamedTuple

from shardline.kernels import CudaDevice

STREAM_SHARE = 0.55
"""Of the memory's peak rate, what products stream their weights at."""

LAYER_SECONDS = 23e-6
"""Of each layer's kernels, which wait for one another, whatever they read."""

EXPERTS_SECONDS = 15e-6
"""And of a layer with experts besides: its router, and its products that wait for it."""

UNPACKED_FLOPS = 1050
"""The most arithmetic that one multiprocessor does in a clock on weights that it has to unpack."""

TENSOR_SHARE = 0.6
"""Of its tensor cores' peak, where that is less."""

TENSOR_FLOPS = {80: 2048, 86: 512, 87: 1024, 89: 512, 90: 4096, 100: 8192, 103: 8192, 120: 512, 121: 512}
"""Of one multiprocessor in a clock, by arch: products of halves with sums in float32."""


class GpuSpeed(NamedTuple):
    """Rates of one GPU.

    Attributes:
        bytes_per_second: At which a step streams weights, keys and values.
        flops_per_second: Of the rows' arithmetic; None where the driver does not tell the clock.
        layer_seconds: What each layer costs besides.
        experts_seconds: What a layer with experts costs besides that.
    """

    bytes_per_second: float
    flops_per_second: float | None
    layer_seconds: float
    experts_seconds: float


def gpu_speed(card: CudaDevice) -> GpuSpeed:
    """Of a card as the driver describes it."""
    known = [arch for arch in TENSOR_FLOPS if arch <= card.arch]
    tensor = TENSOR_FLOPS[max(known)] if known else min(TENSOR_FLOPS.values())
    flops = min(UNPACKED_FLOPS, TENSOR_SHARE * tensor) * card.processors * card.clock_hertz
    return GpuSpeed(STREAM_SHARE * card.bytes_per_second, flops or None, LAYER_SECONDS, EXPERTS_SECONDS)
