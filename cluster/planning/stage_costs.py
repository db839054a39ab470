"""What a stage costs in bytes and in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from shardline.cluster.planning.placement import Device, ModelBytes, Wanted
from shardline.stage import ModelSpec, StageSpec
from shardline.stage.workspace import gpu_workspace_bytes

_UNLIMITED = 2**62

GPU_PADDING_SHARE = 32
"""A GPU's weights are padded to 128 input channels, and lie in allocations of whole pages: one part in so many more."""

GPU_PADDING_BYTES = 32 * 2**20
"""And so much, however small they are."""


def workspace_bytes(model: ModelSpec, max_step_tokens: int, max_sequences: int, *, head: bool) -> int:
    """Bytes of a stage's arrays besides weights, pool and tables: the rows of one step, and the logits where it
    samples."""
    heads = model.num_heads + 2 * model.num_kv_heads
    row = 3 * model.hidden_size + (heads + model.num_heads) * model.head_dim + model.intermediate_size
    experts = model.experts
    if model.post_norms or (experts is not None and experts.shared_gate):
        row += model.hidden_size
    if experts is not None:
        # Of each choice its id and share, and what a backend keeps between the two products and before the sum.
        row += experts.rule.experts_per_token * (2 + experts.intermediate_size + model.hidden_size)
        row += experts.shared_size
    logits = max_sequences * (model.vocab_size + model.hidden_size) if head else 0
    return 4 * (max_step_tokens * row + logits)


def table_bytes_per_block(model: ModelSpec, first: int, end: int, wanted: Wanted) -> int:
    """Bytes of a stage's tables for each block of the longest sequence: cosines and sines of the rotary embeddings that
    its layers use, and the block's place in each sequence's block table."""
    if first == end:
        return 0
    ropes = {layer.rope for layer in model.layers[first:end] if layer.rope is not None}
    return 4 * (wanted.block_size * sum(model.ropes[rope].rotary_dim for rope in ropes) + wanted.max_sequences)


class StageCosts:
    """The `Costs` of one wish (see `partition`): `wanted.context` is resolved, a microbatch has `rows` sequences."""

    def __init__(
        self, model: ModelSpec, size: ModelBytes, devices: Sequence[Device], wanted: Wanted, rows: int
    ) -> None:
        assert wanted.context is not None
        self.model = model
        self.size = size
        self.devices = devices
        self.wanted = wanted
        self.rows = rows
        self.block_bytes = wanted.block_size * model.kv_bytes_per_token(wanted.kv_dtype)
        self.context_blocks = -(-wanted.context // wanted.block_size)
        self.wanted_blocks = wanted.concurrency * self.context_blocks
        # No stage with a layer holds more blocks than the largest device filled with them.
        self.most_blocks = max(device.free_bytes for device in devices) // self.block_bytes
        if not wanted.fill_memory:
            self.most_blocks = min(self.most_blocks, self.wanted_blocks)
        mean_context = max(1, wanted.context // 2)
        kv_bytes = model.kv_bytes_per_token(wanted.kv_dtype)
        seen = [min(mean_context, layer.window or mean_context) for layer in model.layers]
        # Sums over the leading layers; those of a range are a difference, exact in integers.
        self._flops_before = [0, *accumulate(_layer_flops(model, i, seen[i]) for i in range(model.num_layers))]
        self._kv_bytes_before = [0, *accumulate(kv_bytes * positions for positions in seen)]
        self._experts_before = [0, *accumulate(int(layer.experts) for layer in model.layers)]
        self._head_flops = 2 * model.hidden_size * model.vocab_size
        self._gpu_workspace: dict[tuple[int, int, bool, frozenset[bool]], int] = {}

    def fixed_bytes(self, device: int, first: int, end: int, *, embed: bool, head: bool) -> int:
        """Weights and workspace on the device with that index."""
        work = self.workspace_bytes(device, first, end, embed=embed, head=head)
        return self.size.of(first, end, embed=embed, head=head) + work

    def workspace_bytes(self, device: int, first: int, end: int, *, embed: bool, head: bool) -> int:
        """All but weights, pool and tables."""
        where, wanted = self.devices[device], self.wanted
        if not where.arch:
            return workspace_bytes(self.model, wanted.max_step_tokens, wanted.max_sequences, head=head)
        padding = self.size.of(first, end, embed=embed, head=head) // GPU_PADDING_SHARE + GPU_PADDING_BYTES
        # All that it depends on: the search asks for every range of layers.
        key = where.arch, where.processors, head, frozenset(layer.experts for layer in self.model.layers[first:end])
        if key not in self._gpu_workspace:
            self._gpu_workspace[key] = gpu_workspace_bytes(
                self.model,
                self._largest_step(first, end, head=head),
                self.size.traits,
                max_blocks=self.context_blocks,
                arch=where.arch,
                processors=where.processors,
            )
        return padding + self._gpu_workspace[key]

    def _largest_step(self, first: int, end: int, *, head: bool) -> StageSpec:
        """A stage's share as far as its workspace goes."""
        wanted = self.wanted
        assert wanted.context is not None
        return StageSpec(
            index=0,
            first_layer=first,
            end_layer=end,
            has_embed=first == 0,
            has_head=head,
            num_blocks=0,
            block_size=wanted.block_size,
            kv_dtype=wanted.kv_dtype,
            max_step_tokens=wanted.max_step_tokens,
            max_sequences=wanted.max_sequences,
            max_context=wanted.context,
            num_threads=1,
        )

    def blocks(self, device: int, first: int, end: int, embed: bool, head: bool) -> int:
        """Blocks that fit beside the weights, with what tables they need; -1 when the weights do not fit, and no limit
        where there is no layer."""
        room = self.devices[device].free_bytes - self.fixed_bytes(device, first, end, embed=embed, head=head)
        if room < 0:
            return -1
        if end == first:
            return _UNLIMITED
        pool, tables = self.block_bytes * (end - first), table_bytes_per_block(self.model, first, end, self.wanted)
        # Tables are as long as the longest sequence: the context, or the whole pool if that is less.
        blocks = max(room - self.context_blocks * tables, 0) // pool
        return blocks if blocks >= self.context_blocks else room // (pool + tables)

    def table_bytes(self, first: int, end: int, num_blocks: int) -> int:
        """Of tables, with a pool of that many blocks."""
        return min(num_blocks, self.context_blocks) * table_bytes_per_block(self.model, first, end, self.wanted)

    def nanoseconds(self, device: int, first: int, end: int, head: bool) -> int:
        """Time of one step of one microbatch."""
        return math.ceil(1e9 * self.seconds(device, first, end, head=head, rows=self.rows))

    def seconds(self, device: int, first: int, end: int, *, head: bool, rows: int) -> float:
        """Predicted time of one step with that many decoding rows."""
        where = self.devices[device]
        row_kv_bytes = self._kv_bytes_before[end] - self._kv_bytes_before[first]
        moved = self._moved_weights(first, end, head=head, rows=rows) + rows * row_kv_bytes
        with_experts = self._experts_before[end] - self._experts_before[first]
        seconds = where.step_seconds + moved / where.bytes_per_second
        seconds += (end - first) * where.layer_seconds + with_experts * where.experts_seconds
        if where.flops_per_second is not None:
            flops = self._flops_before[end] - self._flops_before[first] + head * self._head_flops
            seconds += rows * flops / where.flops_per_second
        return seconds

    def _moved_weights(self, first: int, end: int, *, head: bool, rows: int) -> float:
        """Bytes of weights that a step reads: of the experts those that some row chooses, as if by lot."""
        whole = self.size.of(first, end, embed=False, head=head)
        experts = self.model.experts
        if experts is None:
            return whole
        untouched = (1 - experts.rule.experts_per_token / experts.num_experts) ** rows
        return whole - untouched * sum(self.size.experts[first:end])


def _layer_flops(model: ModelSpec, layer: int, seen: int) -> int:
    """Of one row that attends to `seen` positions."""
    queries, hidden = model.num_heads * model.head_dim, model.hidden_size
    attention = 2 * hidden * (queries + model.num_kv_heads * model.head_dim) + 2 * queries * seen
    experts = model.experts
    if not model.layers[layer].experts:
        return 2 * (attention + 3 * hidden * model.intermediate_size)
    assert experts is not None
    width = experts.rule.experts_per_token * experts.intermediate_size + experts.shared_size
    return 2 * (attention + hidden * (3 * width + experts.num_experts))


def mib(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.1f} MiB"
