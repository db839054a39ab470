"""One layer's weights on the device, read from a checkpoint tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardline.kernels import Array, Backend, Expert, Weight
from shardline.stage.checkpoint import Checkpoint
from shardline.stage.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP: of a layer, or its shared expert. `gate_up_bias` is the gate's, then the up's."""

    gate_up: Weight
    gate_up_bias: Array | None
    down: Weight
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A mixture of experts: `experts` and `router`, whose biases may be None; the shared expert, if there is one, and
    what gates it."""

    router: Array
    router_bias: Array | None
    choice_bias: Array | None
    experts: Weight
    shared: MlpWeights | None
    shared_gate: Array | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer computes with; None for what the model does not have. It has one of `mlp` and `experts`."""

    attention_norm: Array
    qkv: Weight
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    sinks: Array | None
    output: Weight
    output_bias: Array | None
    attention_post_norm: Array | None
    mlp_norm: Array
    mlp: MlpWeights | None
    experts: ExpertsWeights | None
    mlp_post_norm: Array | None


def load_layer(model: ModelSpec, checkpoint: Checkpoint, layer: int, backend: Backend) -> LayerWeights:
    """Bring a layer, by its number in the whole model, to the device. Raises CheckpointError."""
    return _Loader(model, checkpoint, layer, backend).layer()


class _Loader:
    def __init__(self, model: ModelSpec, checkpoint: Checkpoint, layer: int, backend: Backend) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._layer = layer
        self._backend = backend

    def layer(self) -> LayerWeights:
        model = self._model
        has_experts = model.layers[self._layer].experts
        return LayerWeights(
            attention_norm=self._vectors(True, "attention_norm"),
            qkv=self._matrix("q", "k", "v"),
            qkv_bias=self._vectors(model.qkv_bias, "q_bias", "k_bias", "v_bias"),
            q_norm=self._vectors(model.qk_norm is not None, "q_norm"),
            k_norm=self._vectors(model.qk_norm is not None, "k_norm"),
            sinks=self._vectors(model.sinks, "sinks"),
            output=self._matrix("o"),
            output_bias=self._vectors(model.output_bias, "o_bias"),
            attention_post_norm=self._vectors(model.post_norms, "attention_post_norm"),
            mlp_norm=self._vectors(True, "mlp_norm"),
            mlp=None if has_experts else self._mlp("", model.mlp_bias),
            experts=self._experts() if has_experts else None,
            mlp_post_norm=self._vectors(model.post_norms, "mlp_post_norm"),
        )

    def _mlp(self, prefix: str, biases: bool) -> MlpWeights:
        gate, up = (self._checkpoint.matrix(f"{prefix}{part}", self._layer) for part in ("gate", "up"))
        return MlpWeights(
            gate_up=self._backend.load_gated(gate, up),
            gate_up_bias=self._vectors(biases, f"{prefix}gate_bias", f"{prefix}up_bias"),
            down=self._matrix(f"{prefix}down"),
            down_bias=self._vectors(biases, f"{prefix}down_bias"),
        )

    def _experts(self) -> ExpertsWeights:
        experts = self._model.experts
        assert experts is not None
        return ExpertsWeights(
            router=self._vectors(True, "router"),
            router_bias=self._vectors(experts.router_bias, "router_bias"),
            choice_bias=self._vectors(experts.choice_bias, "choice_bias"),
            experts=self._backend.load_experts(
                _Experts(self._checkpoint, self._layer, experts.num_experts),
                activation=self._model.activation,
                gate_bias=self._vectors(experts.biases, "expert_gate_bias"),
                up_bias=self._vectors(experts.biases, "expert_up_bias"),
                down_bias=self._vectors(experts.biases, "expert_down_bias"),
            ),
            shared=self._mlp("shared_", biases=False) if experts.shared_size else None,
            shared_gate=self._vectors(experts.shared_gate, "shared_expert_gate"),
        )

    def _matrix(self, *roles: str) -> Weight:
        """The roles' matrices, stacked along their channels."""
        return self._backend.load_matrix([self._checkpoint.matrix(role, self._layer) for role in roles])

    def _vectors(self, present: bool, *roles: str) -> Array | None:
        """The roles' tensors end to end, if the model has them."""
        if not present:
            return None
        values = [self._checkpoint.vector(role, self._layer) for role in roles]
        return self._backend.upload(values[0] if len(values) == 1 else np.concatenate(values))


class _Experts:
    """A layer's experts, each read when it is asked for: their number is known before the first."""

    def __init__(self, checkpoint: Checkpoint, layer: int, count: int) -> None:
        self._checkpoint = checkpoint
        self._layer = layer
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Expert]:
        for expert in range(self._count):
            yield Expert(
                *(self._checkpoint.matrix(f"expert_{part}", self._layer, expert) for part in ("gate", "up", "down"))
            )
