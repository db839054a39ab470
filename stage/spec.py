"""A model's shape and a stage's share of it: data that is settled before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.kernels import Activation, RouterRule, kv_head_bytes


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding; every kind of scaling is resolved to factors when the file is read (`rope_scaling`).

    Attributes:
        base: The frequency base.
        rotary_dim: How many of a head's channels turn.
        interleaved: Pairs (2i, 2i + 1) as GGUF's llama files have them; False pairs (i, i + rotary_dim / 2).
        factors: What each of the rotary_dim / 2 frequencies is divided by; None for 1.
        long_factors: Those of an engine whose context is longer than `original_context` (longrope); None: the same.
        original_context: See `long_factors`; 0 without them.
        attention_factor: Multiplies cosines and sines (yarn, longrope).
    """

    base: float
    rotary_dim: int
    interleaved: bool
    factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    original_context: int = 0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What sets one layer apart; a model has one for each layer, by its number in the whole model.

    Attributes:
        window: Positions that its attention sees, the row's own included; 0: all before.
        rope: Which of the model's `ropes`; None: its queries and keys do not turn.
        experts: Its MLP is the model's mixture of experts.
    """

    window: int = 0
    rope: int | None = 0
    experts: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts.

    Attributes:
        num_experts, intermediate_size: How many, and the width of each.
        rule: How the router chooses.
        router_bias: The router's logits have a bias.
        choice_bias: The router's choice has a bias of its own ("choice_bias"; sigmoid routers).
        biases: Gate, up and down of each expert have biases.
        shared_size: Width of the shared expert that every row goes to; 0: there is none.
        shared_gate: It is gated by the sigmoid of a product of its own.
    """

    num_experts: int
    intermediate_size: int
    rule: RouterRule
    router_bias: bool = False
    choice_bias: bool = False
    biases: bool = False
    shared_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a decoder needs to know of a model; a model family is a mapping from its files to this.

    Attributes:
        architecture: The file's name for the family ("llama", "qwen2", ...).
        num_layers, hidden_size, num_heads, num_kv_heads, head_dim, vocab_size: Sizes.
        intermediate_size: Width of the MLP of layers without experts; 0 if there is none.
        context_length: The longest sequence it was made for.
        norm_eps: Of every RMSNorm.
        layers: One a layer.
        ropes: The rotary embeddings that the layers name.
        qkv_bias, output_bias, mlp_bias: Whether q, k and v; the attention's output; gate, up and down have biases.
        qk_norm: "head" normalises each query and key head before it turns, "row" all heads of a row as one vector.
        sinks: Each head has an attention sink.
        attention_scale: Multiplies scores; 0 stands for head_dim ** -0.5.
        attention_softcap, final_softcap: See `Backend.paged_attention` and `soft_cap`; 0: none.
        post_norms: Attention's and the MLP's results are normalised before they are added to the residual stream.
        activation: Of every MLP.
        embedding_scale: Multiplies embeddings.
        experts: The mixture of experts of the layers that have it.
        tied_embeddings: The head is the embedding matrix.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    sinks: bool = False
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    experts: ExpertsSpec | None = None

    def __post_init__(self) -> None:
        assert len(self.layers) == self.num_layers, (len(self.layers), self.num_layers)
        assert self.experts is not None or not any(layer.experts for layer in self.layers)
        assert all(layer.rope is None or layer.rope < len(self.ropes) for layer in self.layers)
        # Experts add to the residual stream themselves.
        assert not (self.post_norms and any(layer.experts for layer in self.layers))

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in one layer, int8's scales included."""
        return 2 * self.num_kv_heads * kv_head_bytes(self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage's share.

    Attributes:
        index: Place in the pipeline, from 0.
        first_layer, end_layer: Layers first_layer <= i < end_layer; may be empty on a stage with the head only.
        has_embed, has_head: Whether it owns the embedding and the final norm with the head.
        num_blocks: Blocks of its KV pool.
        block_size: Tokens a block.
        kv_dtype: "float32", "float16" or "int8"; see `KVLayout`.
        max_step_tokens: The most rows of one step.
        max_sequences: The most sequences it may know at once.
        max_context: The most tokens of one sequence.
        num_threads: CPU threads.
        device: What computes: "cpu", or "cuda:N" for the Nth GPU that the stage's process sees.
        num_tokens: Ids from here on are padding of the vocabulary, and are never taken or sampled; 0: none are.
        memory_bytes: The most that its process may take of its GPU's memory, CUDA's own part included; None: no limit.
    """

    index: int
    first_layer: int
    end_layer: int
    has_embed: bool
    has_head: bool
    num_blocks: int
    block_size: int
    kv_dtype: str
    max_step_tokens: int
    max_sequences: int
    max_context: int
    num_threads: int
    device: str = "cpu"
    num_tokens: int = 0
    memory_bytes: int | None = None

    @property
    def num_layers(self) -> int:
        """How many layers it runs."""
        return self.end_layer - self.first_layer


def table_rows(max_sequences: int) -> int:
    """Rows of a stage's table of sequences, of which it knows so many at most.

    Twice as many: those that a plan starts have free rows though it forgets others.
    """
    return 2 * max_sequences
