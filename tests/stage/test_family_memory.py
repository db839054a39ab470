"""What the planner foresees of a model is what its stages keep, and what a stage allocates is what its layers need."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.cluster.build import model_bytes
from shardline.cluster.planning.placement import Device, Wanted
from shardline.cluster.planning.stage_costs import StageCosts, workspace_bytes
from shardline.kernels import cpu_backend
from shardline.stage import Stage, StageSpec, open_checkpoint, vector_shapes

# Whole blocks of channels, so that nothing depends on which matrices are stacked.
SIZES = {"kv_heads": 4, "ffn": 128, "kinds": [Kind.Q4_1, Kind.Q8_0, Kind.Q5_0]}
CASES = {
    "llama": {},
    "phi3": {},
    "gemma3": {},
    "qwen2moe": {"count": 5, "ffn": 64},
    "gpt-oss": {"count": 3, "ffn": 64},
    "glm4moe": {"count": 6, "ffn": 64, "dense_layers": 1},
    "qwen3moe": {"count": 4, "ffn": 96},  # a part of a block
    "mixtral": {"count": 3, "ffn": 64, "apart": True},
}


@pytest.mark.parametrize("name", CASES)
def test_weights_take_what_was_foreseen(name, tiny_model, experts, stage_row):
    mixture = experts(**CASES[name]) if CASES[name] else None
    path = tiny_model("llama" if name == "mixtral" else name, experts=mixture, **SIZES)
    checkpoint = open_checkpoint(path)
    spec, size = checkpoint.spec, model_bytes(checkpoint)
    checkpoint.close()

    def floats(layer: int | None) -> int:
        return 4 * sum(math.prod(shape) for shape in vector_shapes(spec, layer).values())

    for stage in stage_row(path, (1,)).stages:
        share = stage.spec
        whole = size.of(share.first_layer, share.end_layer, embed=share.has_embed, head=share.has_head)
        vectors = sum(floats(layer) for layer in range(share.first_layer, share.end_layer))
        vectors += floats(None) if share.has_head else 0
        pool = share.num_layers * share.num_blocks * share.block_size * spec.kv_bytes_per_token(share.kv_dtype)
        assert stage._backend.resident_bytes() == whole - vectors + pool
    assert bool(size.experts) == (mixture is not None)
    if mixture is not None:
        channels = 2 * mixture.count * (-(-mixture.ffn // 64) * 64) * 64 + mixture.count * 64 * mixture.ffn
        for layer, taken in enumerate(size.experts):
            assert (taken > channels // 2) == (layer >= mixture.dense_layers)
            assert taken < size.layers[layer]


@pytest.mark.parametrize("name", CASES)
def test_a_steps_buffers_fit_in_what_was_foreseen(name, tiny_model, experts):
    """Every array of a stage but weights, tables and pool; and of stages without experts none for them."""
    mixture = experts(**CASES[name]) if CASES[name] else None
    path = tiny_model("llama" if name == "mixtral" else name, experts=mixture, **SIZES)
    checkpoint = open_checkpoint(path)

    class Counting:
        """A backend that remembers the sizes of the arrays it made."""

        def __init__(self):
            self.backend = cpu_backend(1)
            self.bytes = 0

        def __getattr__(self, attribute):
            return getattr(self.backend, attribute)

        def empty(self, shape, dtype):
            self.bytes += math.prod(shape) * np.dtype(dtype).itemsize
            return self.backend.empty(shape, dtype)

        def activations(self, rows, channels):
            self.bytes += 4 * rows * channels
            return self.backend.activations(rows, channels)

    model = checkpoint.spec
    made = {}
    for first, end in [(0, 1), (1, 3), (0, 3)]:
        share = StageSpec(0, first, end, first == 0, end == 3, 8, 16, "float32", 96, 5, 128, 1)
        backend = Counting()
        Stage(share, checkpoint, backend).close()
        # Ids, positions, slots and sequences, each padded to 128; blocks; rows of the head.
        tables = 4 * (4 * 128 + 5 * 8 + 5)
        foreseen = workspace_bytes(model, 96, 5, head=share.has_head)
        between = 0
        if model.experts is not None:
            rule, width = model.experts.rule, model.experts.intermediate_size
            between = 4 * 96 * rule.experts_per_token * (width + model.hidden_size)
        made[first, end] = backend.bytes - tables
        assert made[first, end] <= foreseen - between
        assert made[first, end] >= 0.6 * (foreseen - between)
    if name == "glm4moe":
        # The first layer has no expert; the whole model also has ids, shares, the shared expert's rows; and the head.
        assert made[0, 3] - made[0, 1] == 4 * (96 * (2 + 2 + 64) + 5 * (101 + 2 * 64 + 1))
    checkpoint.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3", "gpt-oss"])
def test_tables_take_what_was_foreseen(name, tiny_model, experts):
    """Of the rotary embeddings that a stage's layers use, as long as the longest sequence, and of blocks."""
    mixture = experts(**CASES[name]) if CASES.get(name) else None
    keys = {"gemma3.rope.freq_base": 1e6, "gemma3.attention.sliding_window": 16}  # two rotary embeddings
    checkpoint = open_checkpoint(tiny_model(name, layers=8, experts=mixture, keys=keys))
    model, size = checkpoint.spec, model_bytes(checkpoint)
    wanted = Wanted(context=104, block_size=8, max_sequences=5)
    costs = StageCosts(model, size, [Device("d", "node", 1 << 30, bytes_per_second=1.0)], wanted, 1)
    foreseen = {}
    for first, end in [(0, 1), (3, 4), (0, 8), (8, 8)]:
        for blocks in (7, 13, 20):
            share = StageSpec(0, first, end, first == 0, end == 8, blocks, 8, "float16", 16, 5, 104, 1)
            backend = cpu_backend(1)
            decoder = Stage(share, checkpoint, backend)._decoder
            tables = []
            if first < end:
                tables = [array for rope in decoder._ropes.values() for array in (rope.cos, rope.sin)]
                tables.append(decoder._inputs.rows(1).block_tables)
            foreseen[first, end] = costs.table_bytes(first, end, blocks)
            assert sum(array.nbytes for array in tables) == foreseen[first, end]
            backend.close()
    checkpoint.close()
    turns, blocks = 4 * 104 * 16, 4 * 5 * 13
    assert foreseen[0, 1] == turns + blocks
    assert foreseen[3, 4] == (0 if name == "smollm3" else turns) + blocks
    assert foreseen[0, 8] == (2 if name == "gemma3" else 1) * turns + blocks


def test_a_step_reads_only_the_experts_that_are_chosen(tiny_model, experts):
    """Of 8 experts and 2 a token a single row reads a quarter, and many rows read them all; every row pays for two."""
    checkpoint = open_checkpoint(tiny_model("qwen3moe", experts=experts(count=8, used=2), **SIZES))
    model, size = checkpoint.spec, model_bytes(checkpoint)
    checkpoint.close()
    device = Device("d", "node", 1 << 30, bytes_per_second=1.0)
    costs = StageCosts(model, size, [device], Wanted(context=16, concurrency=1), 1)
    keys = [rows * 3 * 8 * model.kv_bytes_per_token("float16") for rows in (1, 2, 1000)]
    experts_bytes, rest = sum(size.experts), sum(size.layers) - sum(size.experts)
    one, two, many = (costs.seconds(0, 0, 3, head=False, rows=rows) for rows in (1, 2, 1000))
    assert one == pytest.approx(rest + experts_bytes / 4 + keys[0])
    assert two == pytest.approx(rest + experts_bytes * (1 - 0.75**2) + keys[1])
    assert many == pytest.approx(rest + experts_bytes + keys[2])

    counted = Device("d", "node", 1 << 30, bytes_per_second=1e30, flops_per_second=1.0)
    costs = StageCosts(model, size, [counted], Wanted(context=16, concurrency=1), 1)
    attention = 2 * 64 * (64 + 64) + 2 * 64 * 8
    assert costs.seconds(0, 0, 1, head=False, rows=3) == 3 * 2 * (attention + 64 * (3 * 2 * 32 + 8))


def test_windows_bound_what_a_row_reads(tiny_model):
    checkpoint = open_checkpoint(tiny_model("gpt-oss", layers=4, keys={"gpt-oss.attention.sliding_window": 16}))
    model, size = checkpoint.spec, model_bytes(checkpoint)
    checkpoint.close()
    device = Device("d", "node", 1 << 30, bytes_per_second=1.0)
    costs = StageCosts(model, size, [device], Wanted(context=512, concurrency=1), 1)
    token = model.kv_bytes_per_token("float16")
    two = [costs.seconds(0, first, first + 2, head=False, rows=1) for first in (0, 2)]
    assert two[0] == pytest.approx(two[1])
    alone = [costs.seconds(0, layer, layer + 1, head=False, rows=1) for layer in (0, 1)]
    assert alone[1] - alone[0] == pytest.approx((256 - 16) * token)
