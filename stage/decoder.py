"""The one decoder: embedding -> layers -> final norm, head. Families differ by their `ModelSpec` only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Array, Backend, KVLayout, RopeTable, Rows, Weight
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.rope import rope_tables
from shardline.stage.spec import ModelSpec, RopeSpec, StageSpec


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, on the host.

    Attributes:
        token_ids, positions, slots, sequences: int32 [rows]; see `Rows`.
        block_tables: int32 [sequences of the step, max blocks a sequence].
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    sequences: NDArray[np.int32]
    block_tables: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights on the device."""

    attention_norm: Array
    qkv: Weight
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    output: Weight
    mlp_norm: Array
    gate_up: Weight
    down: Weight


class Decoder:
    """A stage's share of one model on one device: weights, pool, and the buffers of a step.

    Every buffer is allocated here, once, for the largest step; a step fills the leading rows. The residual stream is
    float32, and between stages exactly its bits are passed on.

    Attributes:
        max_blocks: The most blocks of one sequence: the width of a block table.
        max_head_rows: The most rows that `logits` takes at once.
    """

    def __init__(self, share: StageSpec, checkpoint: Checkpoint, backend: Backend) -> None:
        """Load the share's tensors, one at a time, and allocate. Raises CheckpointError."""
        model = checkpoint.spec
        self._model = model
        self._share = share
        self._backend = backend
        # A sequence cannot be longer than the pool, however long the context: so neither are the tables.
        max_positions = min(share.max_context, share.num_blocks * share.block_size)
        self.max_blocks = -(-max_positions // share.block_size)
        self.max_head_rows = min(share.max_sequences, share.max_step_tokens)

        embed = head = None
        if share.has_embed or (share.has_head and model.tied_embeddings):
            embed = backend.load_matrix([checkpoint.matrix("embed", None)])
        if share.has_head:
            head = embed if model.tied_embeddings else backend.load_matrix([checkpoint.matrix("head", None)])
        self._embed, self._head = embed, head
        self._layers = [_load_layer(model, checkpoint, layer, backend) for layer in _layers_of(share)]

        def floats(*shape: int) -> Array:
            return backend.empty(shape, "float32")

        rows = share.max_step_tokens
        self._token_ids = backend.empty((rows,), "int32")
        self._residual = floats(rows, model.hidden_size)
        if share.num_layers:
            self._normed = backend.activations(rows, model.hidden_size)
            self._qkv = floats(rows, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
            self._attended = backend.activations(rows, model.num_heads * model.head_dim)
            self._gated = backend.activations(rows, model.intermediate_size)
            self._rows = Rows(
                count=0,
                positions=backend.empty((rows,), "int32"),
                slots=backend.empty((rows,), "int32"),
                sequences=backend.empty((rows,), "int32"),
                block_tables=backend.empty((share.max_sequences, self.max_blocks), "int32"),
            )
            self._ropes = [_load_rope(rope, max_positions, share.max_context, backend) for rope in model.ropes]
            self._cache = backend.allocate_kv(
                KVLayout(
                    num_layers=share.num_layers,
                    num_blocks=share.num_blocks,
                    block_size=share.block_size,
                    num_kv_heads=model.num_kv_heads,
                    head_dim=model.head_dim,
                    dtype=share.kv_dtype,
                )
            )
        if share.has_head:
            self._final_norm = backend.upload(checkpoint.vector("final_norm", None))
            self._head_rows = backend.empty((self.max_head_rows,), "int32")
            self._gathered = floats(self.max_head_rows, model.hidden_size)
            self._head_normed = backend.activations(self.max_head_rows, model.hidden_size)
            self._logits = floats(self.max_head_rows, model.vocab_size)

    def forward(self, step: StepRows, hidden: NDArray[np.float32] | None) -> None:
        """Enqueue the share's layers on a step's rows; the residual stream stays on the device.

        hidden: float32 [rows, hidden_size], of the stage before; None if this one owns the embedding.
        """
        count = len(step.positions)
        if hidden is None:
            self._backend.write(self._token_ids, step.token_ids)
        else:
            self._backend.write(self._residual, hidden)
        if self._layers:
            self._backend.write(self._rows.positions, step.positions)
            self._backend.write(self._rows.slots, step.slots)
            self._backend.write(self._rows.sequences, step.sequences)
            self._backend.write(self._rows.block_tables, step.block_tables)
        if self._layers or self._share.has_embed:
            self._backend.replay(("layers", count), lambda: self._issue_layers(count))

    def hidden(self, count: int) -> NDArray[np.float32]:
        """Wait, then return the residual stream of the step's `count` rows: what the next stage goes on from."""
        return self._backend.read(self._residual[:count])

    def logits(self, rows: NDArray[np.int32]) -> Array:
        """Enqueue final norm and head on some rows of the step: device float32 [>= len(rows), vocab].

        rows: int32, indices of the step's rows, at most `max_head_rows`. The next call overwrites the result.
        """
        count = len(rows)
        assert 0 < count <= self.max_head_rows, count
        self._backend.write(self._head_rows, rows)
        self._backend.replay(("head", count), lambda: self._issue_head(count))
        return self._logits

    def _issue_layers(self, count: int) -> None:
        backend, model, x = self._backend, self._model, self._residual
        if self._share.has_embed:
            backend.embedding(self._token_ids, self._embed, x, count)
        if not self._layers:
            return
        shared = self._rows
        rows = Rows(count, shared.positions, shared.slots, shared.sequences, shared.block_tables)
        backend.begin_step(rows, self._cache, model.num_heads)
        for index, layer in enumerate(self._layers):
            backend.rms_norm(x, layer.attention_norm, model.norm_eps, self._normed, count)
            backend.linear(self._normed, layer.qkv, self._qkv, count, bias=layer.qkv_bias)
            backend.rope_kv_write(
                self._qkv,
                rows,
                self._ropes[0],
                self._cache,
                index,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=model.norm_eps,
            )
            backend.paged_attention(self._qkv, rows, self._cache, index, model.head_dim**-0.5, self._attended)
            backend.linear(self._attended, layer.output, x, count, accumulate=True)
            backend.rms_norm(x, layer.mlp_norm, model.norm_eps, self._normed, count)
            backend.gated_linear(self._normed, layer.gate_up, self._gated, count)
            backend.linear(self._gated, layer.down, x, count, accumulate=True)

    def _issue_head(self, count: int) -> None:
        self._backend.gather_rows(self._residual, self._head_rows, self._gathered, count)
        self._backend.rms_norm(self._gathered, self._final_norm, self._model.norm_eps, self._head_normed, count)
        self._backend.linear(self._head_normed, self._head, self._logits, count)


def _layers_of(share: StageSpec) -> range:
    return range(share.first_layer, share.end_layer)


def _load_layer(model: ModelSpec, checkpoint: Checkpoint, layer: int, backend: Backend) -> _Layer:
    def vector(role: str) -> Array:
        return backend.upload(checkpoint.vector(role, layer))

    bias = None
    if model.qkv_bias:
        bias = backend.upload(np.concatenate([checkpoint.vector(f"{part}_bias", layer) for part in "qkv"]))
    return _Layer(
        attention_norm=vector("attention_norm"),
        qkv=backend.load_matrix([checkpoint.matrix(part, layer) for part in "qkv"]),
        qkv_bias=bias,
        q_norm=vector("q_norm") if model.qk_norm else None,
        k_norm=vector("k_norm") if model.qk_norm else None,
        output=backend.load_matrix([checkpoint.matrix("o", layer)]),
        mlp_norm=vector("mlp_norm"),
        gate_up=backend.load_gated(checkpoint.matrix("gate", layer), checkpoint.matrix("up", layer)),
        down=backend.load_matrix([checkpoint.matrix("down", layer)]),
    )


def _load_rope(rope: RopeSpec, positions: int, max_context: int, backend: Backend) -> RopeTable:
    cos, sin = rope_tables(rope, positions, max_context)
    return RopeTable(backend.upload(cos), backend.upload(sin), rope.interleaved)
