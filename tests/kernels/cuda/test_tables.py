"""The rules that pick a launch: within every card's limits, and enough tiles for any routing. Needs no GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardline.kernels.cuda import tables
from shardline.kernels.cuda.pack import Format

ARCHES = (80, 86, 89, 90, 120)


def tiles_of(counts: np.ndarray, tile_pairs: int) -> int:
    return int((-(-counts // tile_pairs)).sum())


@pytest.mark.parametrize("experts", [2, 8, 60, 128, 512])
def test_no_routing_needs_more_tiles_than_are_launched(experts: int) -> None:
    rng = np.random.default_rng(experts)
    for rows, chosen in itertools.product((1, 2, 7, 16, 64, 257, 1024), (1, 2, min(8, experts))):
        plan = tables.expert_plan(rows, chosen, experts)
        pairs = rows * chosen
        if not plan.sorted:
            assert plan.tiles == pairs
            continue
        most = 0
        for concentration in (0.05, 1, 50):
            ids = rng.choice(experts, pairs, p=rng.dirichlet(np.full(experts, concentration)))
            most = max(most, tiles_of(np.bincount(ids, minlength=experts), plan.tile_pairs))
        # The worst: as many experts as can be have one pair more than fills their tiles.
        counts = np.zeros(experts, int)
        counts[: min(pairs, experts)] = 1
        counts[0] += (pairs - counts.sum()) // plan.tile_pairs * plan.tile_pairs
        counts[-1] += pairs - counts.sum()
        assert most <= plan.tiles
        assert tiles_of(counts, plan.tile_pairs) <= plan.tiles
        if min(pairs, experts) == pairs or (pairs - experts) % plan.tile_pairs == 0:
            assert tiles_of(counts, plan.tile_pairs) == plan.tiles


def test_every_launch_of_experts_fits_its_card() -> None:
    cases = itertools.product(
        ARCHES, (1, 2, 5, 16, 64, 256, 2048), ((8, 2), (60, 4), (128, 8)), (64, 768, 2048, 14336), (16, 32, 128), (4, 8)
    )
    for arch, rows, (experts, chosen), channels, group_size, bits in cases:
        plan = tables.expert_plan(rows, chosen, experts)
        for blocks in (2, 12, 32, 64, 224):
            variant = tables.expert_variant(plan, channels, blocks, group_size, arch, 28)
            assert variant.tokens == plan.tile_pairs
            assert variant in (*itertools.chain(*tables.EXPERT_FEW.values()), *tables.EXPERT_WHOLE)
            if not variant.staged:
                assert variant in tables.EXPERT_FEW[plan.tile_pairs, tables.slices(blocks)]
            # Tiles, pairs and the matrix's addresses take a little static shared memory.
            limit = tables.HOPPER_SHARED_LIMIT if arch == 90 else tables.SHARED_LIMIT
            for has_minimum, scale_f32 in itertools.product((False, True), (False, True)):
                if group_size > 16 or not has_minimum:
                    assert variant.shared_bytes(Format(bits, group_size, has_minimum, scale_f32), arch) + 1024 <= limit
            assert plan.tiles <= 65535


def test_every_launch_of_products_fits_its_card() -> None:
    formats = ((4, 16, False), (4, 32, True), (4, 32, False), (4, 128, False), (8, 32, False), (8, 128, True))
    cases = itertools.product(ARCHES, (1, 8, 9, 17, 33, 65, 300, 2048), (64, 4096, 151936), (2, 16, 64, 192), formats)
    for arch, tokens, channels, blocks, (bits, group_size, has_minimum) in cases:
        for gated in (False, True):
            launch = tables.linear_launch(
                tokens, channels, blocks, bits, group_size, has_minimum, arch, 28, gated=gated
            )
            limit = tables.HOPPER_SHARED_LIMIT if arch == 90 else tables.SHARED_LIMIT
            for scale_f32 in (False, True):
                assert launch.shared_bytes(Format(bits, group_size, has_minimum, scale_f32), arch) <= limit
            if launch.variant.wide:
                # Its clusters walk all tiles, all at once on the device.
                assert launch.grid[0] * launch.cluster <= 28
                assert launch.grid[1:] == (1, launch.cluster)
                continue
            assert launch.grid[0] * launch.variant.channels >= channels
            assert launch.grid[1] * launch.variant.tokens >= tokens
            assert tables.slices(blocks) % launch.grid[2] == 0
            assert launch.grid[1] <= 65535


def test_lanes_have_room_for_the_experts() -> None:
    for experts in range(1, 513):
        lanes = tables.lane_experts(experts)
        assert lanes * 32 >= experts
        assert lanes in (1, 2, 4, 8, 16)
        assert lanes == 1 or lanes // 2 * 32 < experts


def test_every_launch_of_a_router_covers_its_rows_and_fits_its_card() -> None:
    for rows, experts, processors in itertools.product((*range(1, 70), 256, 2048), (1, 8, 60, 128, 512), (28, 132)):
        variant = tables.route_variant(rows, experts, processors)
        blocks = -(-experts // variant.experts) * -(-rows // variant.rows)
        assert rows == 1 or variant is tables.ROUTE[-1] or blocks <= processors
        # Each of the block's experts and rows has one warp.
        warps = variant.threads // 32
        assert warps % (variant.experts // variant.warp_experts) == 0
        assert variant.rows % (warps // (variant.experts // variant.warp_experts)) == 0
        # The chosen wait where the rows were.
        assert warps * 32 * 8 <= variant.shared_bytes <= tables.SHARED_LIMIT - 1024
        assert -(-rows // variant.rows) <= 65535
    assert [tables.route_variant(rows, 128, 132).name for rows in (1, 8, 16, 32, 64, 128, 256)] == [
        "route_2x1", "route_2x8", "route_2x8", "route_4x8", "route_8x8", "route_16x8", "route_16x16"
    ]  # fmt: skip


def test_choices_go_where_they_fit() -> None:
    alone, grouped = tables.ExpertPlan(8, 8, sorted=False), tables.ExpertPlan(8, 8, sorted=True)
    assert tables.adds_choices(alone, 1, 8, 12)
    assert not tables.adds_choices(grouped, 1, 8, 12)
    assert not tables.adds_choices(alone, tables.CHOICES_ROWS + 1, 8, 12)
    assert not tables.adds_choices(alone, 1, 17, 12)
    assert not tables.adds_choices(alone, 1, 2, 224)
    # Shared memory that a consumer card's block has.
    assert not tables.adds_choices(alone, 1, 16, 48)


def test_staged_products_leave_room_for_two_blocks() -> None:
    assert tables.staged_launch("normed", 1, 5120, 32, 90, 132, gated=False) is not None
    for arch, limit in ((86, 100 * 1024), (90, 228 * 1024)):
        for source in ("tiles", "gated", "normed"):
            for blocks in range(1, 400):
                launch = tables.staged_launch(source, 1, 4096, blocks, arch, 28, gated=False)
                if launch is not None:
                    used = tables.staged_bytes(source, 1, blocks) + tables.STAGED_STATIC
                    assert 2 * used <= limit
                    assert launch.grid[0] <= 28 * (2 if launch.variant.threads > 64 else 4)
