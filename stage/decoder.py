"""The one decoder: embedding -> layers -> final norm, head. Families differ by their `ModelSpec` only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import Array, Backend, KVLayout, Pending, Rows, SampleOutput, SamplingBatch, Weight
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.layer_weights import ExpertsWeights, LayerWeights, MlpWeights, load_layer
from shardline.stage.rope import load_rope
from shardline.stage.spec import LayerSpec, StageSpec, table_rows
from shardline.stage.workspace import step_shape


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


class _StepInputs:
    """The indices of a step on the device: views of one array, so that a step takes one copy and not five."""

    _ALIGNMENT = 64
    """Numbers; each view begins at a multiple."""

    def __init__(self, backend: Backend, rows: int, sequences: int, max_blocks: int) -> None:
        self._backend = backend
        self._stride = -(-rows // self._ALIGNMENT) * self._ALIGNMENT
        self._tables_at = 4 * self._stride
        size = self._tables_at + sequences * max_blocks
        self._device = backend.empty((size,), "int32")
        self._host = np.zeros(size, np.int32)
        columns = [self._device[place * self._stride :][:rows] for place in range(4)]
        self.token_ids, self._positions, self._slots, self._sequences = columns
        self._block_tables = self._device[self._tables_at :].reshape(sequences, max_blocks)

    def write(self, step: StepRows) -> None:
        """Enqueue one copy of a step's indices."""
        for place, column in enumerate((step.token_ids, step.positions, step.slots, step.sequences)):
            self._host[place * self._stride :][: len(column)] = column
        tables = step.block_tables[: len(self._block_tables)]
        end = self._tables_at + tables.size
        self._host[self._tables_at : end] = tables.reshape(-1)
        self._backend.write(self._device, self._host[:end])

    def rows(self, count: int) -> Rows:
        """The first `count` rows of what was written, for the ops."""
        return Rows(count, self._positions, self._slots, self._sequences, self._block_tables)


class Decoder:
    """A stage's share of one model on one device: weights, pool, and the buffers of a step.

    Every buffer is allocated here, once, for the largest step (workspace.py foresees them for a GPU); a step fills the
    leading rows. The residual stream is float32, and between stages exactly its bits are passed on.

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
        layers = range(share.first_layer, share.end_layer)
        self._layers = [load_layer(model, checkpoint, layer, backend) for layer in layers]
        self._final_norm = backend.upload(checkpoint.vector("final_norm", None)) if share.has_head else None
        self._allocate(max_positions)
        backend.reserve(step_shape(model, share, self.max_blocks))

    def _allocate(self, max_positions: int) -> None:
        """The buffers of a step: those alone that the share's layers use."""
        backend, model, share = self._backend, self._model, self._share
        rows, hidden = share.max_step_tokens, model.hidden_size

        def floats(*shape: int) -> Array:
            return backend.empty(shape, "float32")

        if self._layers or share.has_embed:
            # Block tables are for layers.
            self._inputs = _StepInputs(backend, rows, share.max_sequences if self._layers else 0, self.max_blocks)
        self._residual = floats(rows, hidden)
        if share.has_head:
            self._head_rows = backend.empty((self.max_head_rows,), "int32")
            self._gathered = floats(self.max_head_rows, hidden)
            self._head_normed = backend.activations(self.max_head_rows, hidden)
            self._logits = floats(self.max_head_rows, model.vocab_size)
            self._last_tokens = backend.upload(np.zeros(table_rows(share.max_sequences), np.int32))
        if not self._layers:
            return
        self._normed = backend.activations(rows, hidden)
        self._qkv = floats(rows, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
        self._attended = backend.activations(rows, model.num_heads * model.head_dim)
        experts = model.experts if any(layer.experts for layer in self._layers) else None
        if any(layer.mlp for layer in self._layers):
            self._gated = backend.activations(rows, model.intermediate_size)
        if experts is not None:
            self._expert_ids = backend.empty((rows, experts.rule.experts_per_token), "int32")
            self._shares = floats(rows, experts.rule.experts_per_token)
            if experts.shared_size:
                self._shared_gated = backend.activations(rows, experts.shared_size)
        if model.post_norms or (experts is not None and experts.shared_gate):
            self._result = floats(rows, hidden)
        used = {spec.rope for spec in self._layer_specs() if spec.rope is not None}
        self._ropes = {
            index: load_rope(model.ropes[index], max_positions, share.max_context, backend) for index in used
        }
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

    def forward(self, step: StepRows, hidden: NDArray[np.float32] | None) -> None:
        """Enqueue the share's layers on a step's rows; the residual stream stays on the device.

        hidden: float32 [rows, hidden_size], of the stage before; None if this one owns the embedding.
        """
        count = len(step.positions)
        if hidden is not None:
            self._backend.write(self._residual, hidden)
        if self._layers or self._share.has_embed:
            self._inputs.write(step)
            self._backend.replay(("layers", count), lambda: self._issue_layers(count))

    def hidden(self, count: int) -> Pending[NDArray[np.float32]]:
        """The residual stream of the step's `count` rows: what the next stage goes on from."""
        return self._backend.read_later(self._residual[:count])

    def passed(self) -> Pending[NDArray[np.float32]]:
        """Arrives when the device has done all that has been enqueued; of a step whose result is nothing else."""
        return self._backend.read_later(self._residual[0, :1])

    def logits(self, rows: NDArray[np.int32]) -> Array:
        """Enqueue final norm and head on some rows of the step: device float32 [>= len(rows), vocab].

        rows: int32, indices of the step's rows, at most `max_head_rows`. The next call overwrites the result.
        """
        count = len(rows)
        assert 0 < count <= self.max_head_rows, count
        self._backend.write(self._head_rows, rows)
        self._backend.replay(("head", count), lambda: self._issue_head(count))
        return self._logits

    def sample(self, rows: NDArray[np.int32], batch: SamplingBatch, places: NDArray[np.int32]) -> Pending[SampleOutput]:
        """Enqueue `logits` of some rows and the choice of a token for each, which is also kept on the device.

        places: int32 [len(rows)], the rows of the stage's table of sequences: an id of -1 - place in a later step is
        the token that was chosen for it last, if the stage has the embedding too.
        """
        return self._backend.sample_later(self.logits(rows), batch, self._last_tokens, places)

    def _layer_specs(self) -> tuple[LayerSpec, ...]:
        return self._model.layers[self._share.first_layer : self._share.end_layer]

    def _issue_layers(self, count: int) -> None:
        backend, model = self._backend, self._model
        if self._share.has_embed:
            backend.embedding(
                self._inputs.token_ids,
                self._embed,
                self._residual,
                count,
                scale=model.embedding_scale,
                last_tokens=self._last_tokens if self._share.has_head else None,
            )
        if not self._layers:
            return
        rows = self._inputs.rows(count)
        backend.begin_step(rows, self._cache, model.num_heads)
        for index, (spec, layer) in enumerate(zip(self._layer_specs(), self._layers, strict=True)):
            self._issue_attention(index, spec, layer, rows)
            if layer.experts is not None:
                backend.rms_norm(self._residual, layer.mlp_norm, model.norm_eps, self._normed, count)
                self._issue_experts(layer.experts, count)
            if layer.mlp is not None:
                self._issue_mlp(layer.mlp_norm, layer.mlp, layer.mlp_post_norm, count)

    def _issue_attention(self, index: int, spec: LayerSpec, layer: LayerWeights, rows: Rows) -> None:
        backend, model = self._backend, self._model
        backend.norm_linear(
            self._residual,
            layer.attention_norm,
            model.norm_eps,
            self._normed,
            layer.qkv,
            self._qkv,
            rows.count,
            bias=layer.qkv_bias,
        )
        backend.rope_kv_write(
            self._qkv,
            rows,
            None if spec.rope is None else self._ropes[spec.rope],
            self._cache,
            index,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=model.norm_eps,
        )
        backend.paged_attention(
            self._qkv,
            rows,
            self._cache,
            index,
            model.attention_scale or model.head_dim**-0.5,
            self._attended,
            window=spec.window,
            softcap=model.attention_softcap,
            sinks=layer.sinks,
        )
        self._add_linear(self._attended, layer.output, layer.output_bias, layer.attention_post_norm, rows.count)

    def _issue_mlp(self, norm: Array, mlp: MlpWeights, post_norm: Array | None, count: int) -> None:
        self._backend.norm_mlp(
            self._residual,
            norm,
            self._model.norm_eps,
            self._normed,
            mlp.gate_up,
            self._gated,
            mlp.down,
            self._residual if post_norm is None else self._result,
            count,
            activation=self._model.activation,
            gate_up_bias=mlp.gate_up_bias,
            down_bias=mlp.down_bias,
            accumulate=post_norm is None,
        )
        if post_norm is not None:
            self._backend.add_rms_norm(self._result, post_norm, self._model.norm_eps, self._residual, count)

    def _issue_experts(self, layer: ExpertsWeights, count: int) -> None:
        backend, model = self._backend, self._model
        assert model.experts is not None
        backend.route(
            self._normed,
            layer.router,
            model.experts.rule,
            self._expert_ids,
            self._shares,
            count,
            bias=layer.router_bias,
            choice_bias=layer.choice_bias,
        )
        backend.expert_mlp(self._normed, layer.experts, self._expert_ids, self._shares, self._residual, count)
        if layer.shared is None:
            return
        backend.gated_linear(self._normed, layer.shared.gate_up, self._shared_gated, count, activation=model.activation)
        if layer.shared_gate is None:
            backend.linear(self._shared_gated, layer.shared.down, self._residual, count, accumulate=True)
        else:
            backend.linear(self._shared_gated, layer.shared.down, self._result, count)
            backend.add_gated(self._normed, layer.shared_gate, self._result, self._residual, count)

    def _add_linear(self, x: Array, weight: Weight, bias: Array | None, post_norm: Array | None, count: int) -> None:
        """Add a sublayer's last product to the residual stream, normalised first where there is a norm behind it."""
        if post_norm is None:
            self._backend.linear(x, weight, self._residual, count, bias=bias, accumulate=True)
        else:
            self._backend.linear(x, weight, self._result, count, bias=bias)
            self._backend.add_rms_norm(self._result, post_norm, self._model.norm_eps, self._residual, count)

    def _issue_head(self, count: int) -> None:
        backend, model = self._backend, self._model
        backend.gather_rows(self._residual, self._head_rows, self._gathered, count)
        backend.rms_norm(self._gathered, self._final_norm, model.norm_eps, self._head_normed, count)
        backend.linear(self._head_normed, self._head, self._logits, count)
        if model.final_softcap:
            backend.soft_cap(self._logits, model.final_softcap, count)
