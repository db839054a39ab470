"""What a step keeps on a GPU, foreseen: against every number of rows, and against a card that has little."""

from __future__ import annotations

import numpy as np
import pytest

from shardline.kernels import StepShape
from shardline.kernels.cuda import tables
from shardline.kernels.cuda.workspace import (
    FORMATS,
    ExpertsShape,
    Product,
    WeightShapes,
    attends_whole,
    slice_sums,
    split_sums,
    step_workspace,
)

CARDS = [(86, 28), (86, 82), (89, 128), (90, 132), (120, 84)]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("channels", "inputs"), [(6144, 4096), (4096, 12288), (1536, 12288), (2048, 4096), (151936, 896)]
)
def test_slices_wait_in_what_was_foreseen_for_any_number_of_rows(
    channels: int, inputs: int, form: tuple[int, int, bool]
) -> None:
    product = Product.of(channels, inputs, *form, gated=False)
    largest = 0
    for arch, processors in CARDS:
        most = 1
        for rows in range(1, 300):
            launch = tables.linear_launch(rows, product.channels, product.blocks, *form, arch, processors, gated=False)
            most = max(most, launch.waiting_floats(tables.slices(product.blocks)))
            if rows in (1, 7, 16, 17, 100, 299):
                assert slice_sums(product, rows, arch, processors) == most, (arch, rows)
        largest = max(largest, most)
    # Long rows of few channels are split, and clusters of wide.cu hand sums on; where blocks of a cluster add up,
    # nothing waits here.
    wide = tables.is_wide_format(*form, 90)
    assert (largest > 1) == (inputs == 12288 or wide), "nothing was compared"


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(32, 8), (16, 16), (8, 1), (64, 8)])
@pytest.mark.parametrize("rows", [1, 100, 512])
def test_splits_wait_in_what_was_foreseen_for_any_number_of_rows(query_heads: int, kv_heads: int, rows: int) -> None:
    for _, processors in CARDS:
        step = StepShape(rows, query_heads=query_heads, kv_heads=kv_heads, head_dim=128, max_positions=8192)
        group = query_heads // kv_heads
        most = max(
            0 if attends_whole(count, kv_heads, group, processors) else split_sums(count, query_heads, 128, 32)
            for count in range(1, rows + 1)
        )
        found = step_workspace(step, WeightShapes(), 86, processors)
        assert found.flat["split sums"][0] == max(1, most)


def test_a_stage_with_experts_takes_what_the_page_on_gpus_says() -> None:
    """About rows * chosen * (4 K + 6 F) bytes."""
    rows, chosen, inputs, width = 512, 8, 2048, 768
    weights = WeightShapes(experts={ExpertsShape(128, width, inputs, apart=False, ordered=(False, False))})
    found = step_workspace(StepShape(rows, experts_per_token=chosen), weights, 86, 28)
    rule = rows * chosen * (4 * inputs + 6 * width)
    assert rule <= found.nbytes <= 1.15 * rule


def test_what_a_row_may_sample_with_fits() -> None:
    from shardline.kernels.cuda.workspace import BIAS_ENTRIES

    rows, distinct = 5, 700
    found = step_workspace(
        StepShape(8, sampled_rows=rows, vocab=1000, distinct_ids=distinct, logprobs=64), WeightShapes(), 86, 28
    )
    # The arrays of SamplingBatch, each at a multiple of 8.
    each = [4] * 7 + [8, 8, 4]
    needed = sum(-(-rows * size // 8) * 8 for size in each) + 2 * 8 * (rows + 1)
    needed += 2 * 4 * rows * BIAS_ENTRIES + 2 * 4 * rows * distinct
    assert needed <= found.flat["sampling"][0] <= needed + 512
    assert found.flat["sampled"] == (rows * (2 + 2 * 64), "int32")
    assert np.dtype(found.flat["adjusted logits"][1]).itemsize * found.flat["adjusted logits"][0] == 4 * rows * 1000
