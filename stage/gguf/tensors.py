"""A GGUF file's tensors by role: what each must be called, and that all are there, fit and are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardline.stage.errors import shown
from shardline.stage.gguf.blocks import FLOAT_TYPES, SUPPORTED
from shardline.stage.gguf.families import Family
from shardline.stage.gguf.header import TensorInfo
from shardline.stage.gguf.keys import UnsupportedError
from shardline.stage.gguf.rope import ROPE_TENSORS
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes
from shardline.stage.spec import ModelSpec

_MODEL_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
}
_LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "sinks": "attn_sinks.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "choice_bias": "exp_probs_b.bias",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "expert_gate_bias": "ffn_gate_exps.bias",
    "expert_up_bias": "ffn_up_exps.bias",
    "expert_down_bias": "ffn_down_exps.bias",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_expert_gate": "ffn_gate_inp_shexp.weight",
}

# Roles that a file may have in one tensor, one behind the other.
_TOGETHER: dict[tuple[str, ...], str] = {
    ("q", "k", "v"): "attn_qkv.weight",
    ("q_bias", "k_bias", "v_bias"): "attn_qkv.bias",
    ("expert_gate", "expert_up"): "ffn_gate_up_exps.weight",
}
_TOGETHER_IN_MLP: dict[tuple[str, ...], str] = {("gate", "up"): "ffn_up.weight"}

_EXPERT_TENSOR = {
    "expert_gate": "ffn_gate.{}.weight",
    "expert_up": "ffn_up.{}.weight",
    "expert_down": "ffn_down.{}.weight",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a role lies: in rows first <= i < first + rows of a tensor.

    Attributes:
        tensors: The tensor; or in an expert role one tensor an expert.
        first, rows: Of a float tensor with one dimension these are elements.
        stride: In an expert role with one tensor: from one expert's first row to the next one's.
    """

    tensors: tuple[TensorInfo, ...]
    first: int
    rows: int
    stride: int = 0

    def of(self, expert: int | None) -> tuple[TensorInfo, int]:
        """The tensor and its first row."""
        if expert is None:
            return self.tensors[0], self.first
        if self.stride:
            return self.tensors[0], self.first + expert * self.stride
        return self.tensors[expert], self.first


def has(tensors: Mapping[str, TensorInfo], *roles: str) -> bool:
    """Whether the first layer has a tensor of one of these roles, of whatever shape."""
    names = [_LAYER_NAMES[role] for role in roles]
    names += [name for together, name in _TOGETHER.items() if set(together) & set(roles)]
    return any(f"blk.0.{name}" in tensors for name in names)


def has_head(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the head is a matrix of its own."""
    return _MODEL_NAMES["head"] in tensors


def embedding(tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    """The embedding matrix, of whatever shape. Raises UnsupportedError."""
    return _taken(_MODEL_NAMES["embed"], tensors)


def find_sources(
    spec: ModelSpec, family: Family, tensors: Mapping[str, TensorInfo], unused_layers: int
) -> dict[tuple[str, int | None], Source]:
    """Every role's source, with every tensor checked: it is there in its shape and a supported type, and no other is.

    unused_layers: Layers behind the model's that predict further tokens; what they have is not looked at.

    Raises UnsupportedError.
    """
    used = set(ROPE_TENSORS)
    sources: dict[tuple[str, int | None], Source] = {}
    for layer in (None, *range(spec.num_layers)):
        matrices = matrix_shapes(spec, layer)
        shapes: dict[str, tuple[int, ...]] = {**matrices, **vector_shapes(spec, layer)}
        finder = _Finder(spec, family, tensors, layer, shapes, used)
        for role in shapes:
            sources[role, layer] = finder.find(role, is_matrix=role in matrices)
    beyond = tuple(f"blk.{spec.num_layers + layer}." for layer in range(unused_layers))
    for name in tensors:
        if name not in used and not name.startswith(beyond):
            raise UnsupportedError(
                f"tensor {shown(name)}", f"is not part of a {spec.architecture} model that is supported"
            )
    return sources


class _Finder:
    """Of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        family: Family,
        tensors: Mapping[str, TensorInfo],
        layer: int | None,
        shapes: Mapping[str, tuple[int, ...]],
        used: set[str],
    ) -> None:
        self._tensors = tensors
        self._shapes = shapes
        self._used = used
        self._experts = 0 if spec.experts is None else spec.experts.num_experts
        self._prefix = "" if layer is None else f"blk.{layer}."
        self._names = _MODEL_NAMES if layer is None else {**_LAYER_NAMES, **family.names}
        self._together = {**_TOGETHER, **_TOGETHER_IN_MLP} if family.fused_mlp else _TOGETHER

    def find(self, role: str, *, is_matrix: bool) -> Source:
        shape = self._shapes[role]
        experts = (self._experts,) if role in EXPERT_ROLES else ()
        for together, name in self._together.items():
            if role in together and self._prefix + name in self._tensors:
                rows = [self._shapes[other][0] for other in together]
                index = together.index(role)
                info = self._take(name, (*experts, sum(rows), *shape[1:]), is_matrix)
                return Source((info,), sum(rows[:index]), rows[index], sum(rows) if experts else 0)
        name = self._names[role]
        if experts and self._prefix + name not in self._tensors and self._has_tensor_an_expert(role):
            infos = [self._take(_EXPERT_TENSOR[role].format(i), shape, is_matrix) for i in range(self._experts)]
            return Source(tuple(infos), 0, shape[0])
        return Source((self._take(name, (*experts, *shape), is_matrix),), 0, shape[0], shape[0] if experts else 0)

    def _has_tensor_an_expert(self, role: str) -> bool:
        return any(self._prefix + _EXPERT_TENSOR[role].format(i) in self._tensors for i in range(self._experts))

    def _take(self, name: str, shape: tuple[int, ...], is_matrix: bool) -> TensorInfo:
        name = self._prefix + name
        info = _taken(name, self._tensors)
        self._used.add(name)
        if info.shape != shape:
            raise UnsupportedError(
                f"tensor {name}", f"has shape {list(info.shape)}; the model's keys say {list(shape)}"
            )
        supported = SUPPORTED if is_matrix else FLOAT_TYPES
        if info.kind not in supported:
            raise UnsupportedError(
                f"tensor {name}",
                f"type {info.kind.name} is not supported here; {', '.join(kind.name for kind in supported)} are",
            )
        if is_matrix and shape[-1] % 32:
            raise UnsupportedError(f"tensor {name}", f"has rows of {shape[-1]} elements, not a multiple of 32")
        return info


def _taken(name: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    info = tensors.get(name)
    if info is None:
        raise UnsupportedError(f"tensor {name}", "is missing")
    return info
