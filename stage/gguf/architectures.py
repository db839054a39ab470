"""Model families as data: from a GGUF file's keys and tensor names to a `ModelSpec` and the tensors it needs.

A file is accepted when every key of its family is understood and every tensor of it is used. What would change the
arithmetic and is not implemented is refused by key and value: to ignore it would be to run another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.stage.errors import shown
from shardline.stage.gguf.blocks import FLOAT_TYPES, FORMATS
from shardline.stage.gguf.header import TensorInfo
from shardline.stage.roles import matrix_shapes, vector_shapes
from shardline.stage.spec import LayerSpec, ModelSpec, RopeSpec

ReadFloats = Callable[[TensorInfo], NDArray[np.float32]]

MAX_CONTEXT = 1 << 24
MAX_SIZE = 1 << 24


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets a family apart.

    Attributes:
        name: `general.architecture` in the file, and the prefix of its keys.
        interleaved: How rotary pairs lie; see `RopeSpec`. GGUF's llama files have q and k permuted for it.
        qkv_bias: q, k and v have biases; None when that depends on the file.
        qk_norm: Query and key heads are normalised.
    """

    name: str
    interleaved: bool
    qkv_bias: bool | None
    qk_norm: bool


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", interleaved=True, qkv_bias=None, qk_norm=False),
        Architecture("qwen2", interleaved=False, qkv_bias=True, qk_norm=False),
        Architecture("qwen3", interleaved=False, qkv_bias=False, qk_norm=True),
    )
}

_MODEL_TENSORS = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_TENSORS = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class UnsupportedError(Exception):
    """A field of the file and what is wrong with it; the reader adds the file."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem


def tensor_name(role: str, layer: int | None) -> str:
    """The file's name for a role of `Checkpoint`. Raises KeyError for a role that there is not."""
    return _MODEL_TENSORS[role] if layer is None else f"blk.{layer}.{_LAYER_TENSORS[role]}"


class _Keys:
    """The keys of one family: typed reads that note what was read, so that what was not can be refused."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str) -> None:
        self._metadata = metadata
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def get(self, key: str) -> Any:
        name = self.name(key)
        self._read.add(name)
        return self._metadata.get(name)

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A count from 1; a list a layer is taken when all its entries agree."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UnsupportedError(self.name(key), "the key is missing")
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UnsupportedError(self.name(key), f"{shown(value)} is not one integer from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise UnsupportedError(self.name(key), "the key is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedError(self.name(key), f"{shown(value)} is not a finite number above zero")
        return float(value)

    def only(self, key: str, allowed: Callable[[Any], bool], meaning: str) -> None:
        """Refuse the key unless it is absent or has a value that changes nothing."""
        value = self.get(key)
        if value is not None and not allowed(value):
            raise UnsupportedError(self.name(key), f"{shown(value)}: {meaning} is not supported")

    def refuse_unread(self) -> None:
        for name, value in self._metadata.items():
            if name.startswith(self._prefix + ".") and name not in self._read:
                raise UnsupportedError(
                    shown(name), f"{shown(value)}: the key is unknown here and may change what the model computes"
                )


def read_spec(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], read_floats: ReadFloats) -> ModelSpec:
    """The model that a file holds. `read_floats` reads a small tensor of a float type. Raises UnsupportedError."""
    _refuse_other_files(metadata)
    name = metadata.get("general.architecture")
    if name is None:
        raise UnsupportedError("general.architecture", "the key is missing")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedError(
            "general.architecture", f"{shown(name)} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    keys = _Keys(metadata, architecture.name)

    num_layers = keys.size("block_count")
    if num_layers > len(tensors):
        raise UnsupportedError(
            keys.name("block_count"), f"{num_layers} layers, but the file has {len(tensors)} tensors"
        )
    hidden_size = keys.size("embedding_length")
    num_heads = keys.size("attention.head_count")
    num_kv_heads = keys.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedError(
            keys.name("attention.head_count_kv"), f"{num_kv_heads} does not divide the {num_heads} query heads"
        )
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise UnsupportedError(
            keys.name("attention.head_count"), f"{num_heads} does not divide embedding_length {hidden_size}"
        )
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    keys.only("attention.value_length", lambda v: v == head_dim, f"a value length other than the key length {head_dim}")
    context_length = keys.size("context_length", most=MAX_CONTEXT)
    embedding = tensors.get(tensor_name("embed", None))
    if embedding is None:
        raise UnsupportedError(f"tensor {tensor_name('embed', None)}", "is missing")
    vocab_size = keys.size("vocab_size", embedding.shape[0])
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        raise UnsupportedError("tokenizer.ggml.tokens", f"{len(tokens)} tokens, but the vocabulary has {vocab_size}")
    qkv_bias = architecture.qkv_bias
    if qkv_bias is None:
        qkv_bias = tensor_name("q_bias", 0) in tensors

    spec = ModelSpec(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=keys.size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        context_length=context_length,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        layers=(LayerSpec(),) * num_layers,
        ropes=(_rope(keys, architecture, head_dim, tensors, read_floats),),
        qkv_bias=qkv_bias,
        qk_norm="head" if architecture.qk_norm else None,
        tied_embeddings=tensor_name("head", None) not in tensors,
    )
    _refuse_other_arithmetic(keys, spec)
    _check_tensors(spec, tensors)
    return spec


def _refuse_other_files(metadata: Mapping[str, Any]) -> None:
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError("general.type", f"{shown(kind)} is not a model")
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise UnsupportedError(
            "split.count", f"the file is one of {shown(parts)} parts; merge them first (llama-gguf-split --merge)"
        )
    version = metadata.get("general.quantization_version", 2)
    if version != 2:
        raise UnsupportedError("general.quantization_version", f"{shown(version)} is not supported; 2 is")


def _rope(
    keys: _Keys,
    architecture: Architecture,
    head_dim: int,
    tensors: Mapping[str, TensorInfo],
    read_floats: ReadFloats,
) -> RopeSpec:
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedError(
            keys.name("rope.dimension_count"), f"{rotary_dim} is odd or more than the head's {head_dim} channels"
        )
    # Older files have one key, scale_linear; a factor without a type means linear too. "none" switches a factor off.
    factor = 1.0
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        if keys.get(key) not in (None, 0):
            factor = keys.number(key)
    scaling = keys.get("rope.scaling.type")
    if scaling is None:
        scaling = "none" if factor == 1.0 else "linear"
    if scaling not in ("none", "linear"):
        raise UnsupportedError(
            keys.name("rope.scaling.type"),
            f"{shown(scaling)} is not supported; none, linear and the factors of a tensor rope_freqs.weight are",
        )
    factors = _frequency_factors(tensors.get(_ROPE_FACTORS), rotary_dim // 2, read_floats)
    if scaling == "linear" and factor != 1.0:
        factors = tuple(value * factor for value in factors or (1.0,) * (rotary_dim // 2))
    return RopeSpec(keys.number("rope.freq_base", 10000.0), rotary_dim, architecture.interleaved, factors)


def _frequency_factors(info: TensorInfo | None, count: int, read_floats: ReadFloats) -> tuple[float, ...] | None:
    """Llama 3's scaling as GGUF has it: a tensor that divides each frequency."""
    if info is None:
        return None
    if info.shape != (count,):
        raise UnsupportedError(f"tensor {info.name}", f"has shape {list(info.shape)}; the model's keys say {[count]}")
    if info.kind not in FLOAT_TYPES:
        raise UnsupportedError(f"tensor {info.name}", f"type {info.kind.name} is not supported here")
    factors = tuple(float(value) for value in read_floats(info))
    if not all(0 < value < math.inf for value in factors):
        raise UnsupportedError(f"tensor {info.name}", "an element is not a finite number above zero")
    return factors


def _refuse_other_arithmetic(keys: _Keys, spec: ModelSpec) -> None:
    zero = lambda value: value == 0  # noqa: E731
    one = lambda value: value == 1  # noqa: E731
    keys.only("expert_count", zero, "a mixture of experts")
    keys.only("expert_used_count", zero, "a mixture of experts")
    keys.only(
        "attention.sliding_window",
        lambda value: isinstance(value, int) and (value == 0 or value >= spec.context_length),
        "a sliding window shorter than the context",
    )
    keys.only("attention.causal", lambda value: value is True, "attention that is not causal")
    keys.only("pooling_type", zero, "an embedding model")
    usual = spec.head_dim**-0.5
    keys.only(
        "attention.scale",
        lambda value: isinstance(value, float) and (value == 0 or math.isclose(value, usual, rel_tol=1e-6)),
        "an attention scale of its own",
    )
    keys.only("attention.clamp_kqv", zero, "a clamp")
    keys.only("attention.max_alibi_bias", zero, "ALiBi")
    keys.only("attn_logit_softcapping", zero, "a soft cap")
    keys.only("final_logit_softcapping", zero, "a soft cap")
    keys.only("logit_scale", one, "a logit scale")
    keys.only("residual_scale", one, "a residual scale")
    keys.only("embedding_scale", one, "an embedding scale")
    keys.only("use_parallel_residual", lambda value: value is False, "a parallel residual")
    keys.only("rope.scaling.attn_factor", one, "an attention factor of the rotary embedding")
    keys.only("tensor_data_layout", lambda value: value == "Meta AI original pth", "another tensor layout")
    # What the model was trained with; it changes nothing for the scalings that are supported.
    keys.get("rope.scaling.original_context_length")
    keys.get("rope.scaling.finetuned")
    keys.refuse_unread()


def _check_tensors(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Every tensor that the model needs is there in its shape and a supported type, and no other."""
    unread = {name: info for name, info in tensors.items() if name != _ROPE_FACTORS}
    for layer in (None, *range(spec.num_layers)):
        for role, shape in (matrix_shapes(spec, layer) | vector_shapes(spec, layer)).items():
            name = tensor_name(role, layer)
            info = unread.pop(name, None)
            if info is None:
                raise UnsupportedError(f"tensor {name}", "is missing")
            if info.shape != shape:
                raise UnsupportedError(
                    f"tensor {name}", f"has shape {list(info.shape)}; the model's keys say {list(shape)}"
                )
            is_matrix = role in matrix_shapes(spec, layer)
            supported = (*FLOAT_TYPES, *FORMATS) if is_matrix else FLOAT_TYPES
            if info.kind not in supported:
                raise UnsupportedError(
                    f"tensor {name}",
                    f"type {info.kind.name} is not supported here; {', '.join(kind.name for kind in supported)} are",
                )
            if is_matrix and shape[1] % 32:
                raise UnsupportedError(f"tensor {name}", f"has rows of {shape[1]} elements, not a multiple of 32")
    for name in unread:
        raise UnsupportedError(f"tensor {shown(name)}", f"is not part of a {spec.architecture} model that is supported")
