"""What a model family is: a reading of its config.json, and a table from roles to the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from shardline.kernels import Activation
from shardline.stage.errors import shown
from shardline.stage.huggingface.families.rope import extended_context
from shardline.stage.huggingface.keys import MAX_HEAD_DIM, MAX_LAYERS, Keys
from shardline.stage.spec import ExpertsSpec, LayerSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tensor of a role lies.

    Attributes:
        module: Its name between the layer's and the suffix; "{}" stands for the expert's number.
        suffix: What follows the module's name: "weight", "bias"; "" if the tensor is called as the module is.
        parts: The roles that lie in that one tensor along its output channels; () if it holds this role alone.
        interleaved: The parts take turns, channel by channel, instead of following one another.
        stacked: It holds all experts, as [experts, K, N] if it is of floats.
    """

    module: str
    suffix: str = "weight"
    parts: tuple[str, ...] = ()
    interleaved: bool = False
    stacked: bool = False


def places(weights: Mapping[str, str], biases: Mapping[str, str] | None = None) -> dict[str, Place]:
    """Role -> module for tensors that are called MODULE.weight and MODULE.bias."""
    found = {role: Place(module) for role, module in weights.items()}
    return found | {role: Place(module, "bias") for role, module in (biases or {}).items()}


ATTENTION = places(
    {
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
    },
    {
        "q_bias": "self_attn.q_proj",
        "k_bias": "self_attn.k_proj",
        "v_bias": "self_attn.v_proj",
        "o_bias": "self_attn.o_proj",
    },
)
MLP = places(
    {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    {"gate_bias": "mlp.gate_proj", "up_bias": "mlp.up_proj", "down_bias": "mlp.down_proj"},
)
FUSED_MLP = {
    "gate": Place("mlp.gate_up_proj", parts=("gate", "up")),
    "up": Place("mlp.gate_up_proj", parts=("gate", "up")),
    "down": Place("mlp.down_proj"),
}
EXPERTS = places(
    {
        "router": "mlp.gate",
        "expert_gate": "mlp.experts.{}.gate_proj",
        "expert_up": "mlp.experts.{}.up_proj",
        "expert_down": "mlp.experts.{}.down_proj",
    }
)
MODEL = places({"embed": "embed_tokens", "final_norm": "norm"})


def _nothing_unused(keys: Keys, spec: ModelSpec) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Family:
    """One class of transformers' models.

    Attributes:
        architecture: The class, as config.json's `architectures` names it.
        model_type: config.json's.
        read: The model that a config.json describes. Raises CheckpointError.
        layer: The places of a layer's roles, after "layers.N.".
        defaults: Values of keys that a file may leave out; an explicit null stands.
        section: The key under which the text model's own keys are.
        beside: Keys beside that one, of what a model with more than text has.
        prefixes: What precedes every name but the head's, and the head's name: the first whose embedding is there.
        norm_offset: What is added to the weight of every norm.
        unused: Beginnings of the names of tensors that this class does not use either.
    """

    architecture: str
    model_type: str
    read: Callable[[Keys], ModelSpec]
    layer: Mapping[str, Place]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    section: str | None = None
    beside: tuple[str, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = (("model.", "lm_head"),)
    norm_offset: float = 0.0
    unused: Callable[[Keys, ModelSpec], tuple[str, ...]] = _nothing_unused


class Features(TypedDict, total=False):
    """Fields of `ModelSpec` that a family sets; the sizes are read the same way for all."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: str | None
    sinks: bool
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    post_norms: bool
    activation: Activation
    embedding_scale: float
    experts: ExpertsSpec | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that all families have under the same keys."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    @classmethod
    def read(cls, keys: Keys) -> Sizes:
        """Raises CheckpointError."""
        hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
        num_kv_heads = keys.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise keys.error("num_key_value_heads", f"{num_kv_heads} does not divide the {num_heads} query heads")
        if keys.get("head_dim") is None and hidden_size % num_heads:
            raise keys.error("num_attention_heads", f"{num_heads} does not divide hidden_size {hidden_size}")
        return cls(
            num_layers=keys.size("num_hidden_layers", most=MAX_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=keys.size("head_dim", hidden_size // num_heads, most=MAX_HEAD_DIM),
            context=extended_context(keys, keys.size("max_position_embeddings")),
        )

    def spec(
        self,
        keys: Keys,
        architecture: str,
        ropes: Sequence[RopeSpec],
        layers: Sequence[LayerSpec],
        **features: Unpack[Features],
    ) -> ModelSpec:
        """The model. Whether the head is the embedding is what the file says; see `HuggingFaceCheckpoint`."""
        dense = not all(layer.experts for layer in layers)
        # Where every layer has experts the width of the others is there too, and used by none.
        intermediate_size = keys.size("intermediate_size", None if dense else 1)
        return ModelSpec(
            architecture=architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=intermediate_size if dense else 0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=keys.size("vocab_size"),
            context_length=self.context,
            norm_eps=keys.number("rms_norm_eps"),
            layers=tuple(layers),
            ropes=tuple(ropes),
            tied_embeddings=keys.flag("tie_word_embeddings", False),
            **features,
        )


def silu(keys: Keys, key: str = "hidden_act") -> None:
    """Refuse another activation than SiLU. Raises CheckpointError."""
    keys.only(key, lambda value: value in ("silu", "swish"), "another activation than silu here")


def sliding_layers(keys: Keys, num_layers: int, default: Callable[[int], bool]) -> list[bool]:
    """Which layers have the sliding window: as `layer_types` says, or by the family's older pattern.

    Raises CheckpointError.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        return [default(layer) for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise keys.error("layer_types", f"{shown(kinds)} is not a list of {num_layers} kinds")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.error(f"layer_types[{layer}]", f"{shown(kind)} is not supported")
    return [kind == "sliding_attention" for kind in kinds]


def window_of_all(keys: Keys, sizes: Sizes) -> int:
    """The window of a family in which all layers have the same; 0: there is none. Raises CheckpointError."""
    window = 0 if keys.get("sliding_window") is None else keys.size("sliding_window")
    if sliding_layers(keys, sizes.num_layers, lambda layer: window > 0) != [window > 0] * sizes.num_layers:
        raise keys.error("layer_types", "says something else than sliding_window, which is of all layers here")
    return window
