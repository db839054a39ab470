"""A model's shape and a stage's share of it: data that is settled before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding.

    Attributes:
        base: The frequency base.
        rotary_dim: How many of a head's channels turn.
        interleaved: Pairs (2i, 2i + 1) as GGUF's llama files have them; False pairs (i, i + rotary_dim / 2).
        scaling: "none" or "linear" (positions divided by `factor`).
        factor: The scaling factor.
        has_frequency_factors: The file has a tensor that divides each frequency (llama3 scaling in GGUF).
    """

    base: float
    rotary_dim: int
    interleaved: bool
    scaling: str = "none"
    factor: float = 1.0
    has_frequency_factors: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a decoder needs to know of a model; a model family is a mapping from its file to this.

    Attributes:
        architecture: The file's name for the family ("llama", "qwen2", "qwen3").
        num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size: Sizes.
        context_length: The longest sequence it was made for.
        norm_eps: Of every RMSNorm.
        rope: Rotary embedding.
        qkv_bias: q, k and v have a bias (Qwen2).
        qk_norm: Query and key heads are normalised before they turn (Qwen3).
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
    rope: RopeSpec
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * {"float32": 4, "float16": 2}[dtype]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage's share.

    Attributes:
        index: Place in the pipeline, from 0.
        first_layer, end_layer: Layers first_layer <= i < end_layer; may be empty on a stage with the head only.
        has_embed, has_head: Whether it owns the embedding and the final norm with the head.
        num_blocks: Blocks of its KV pool.
        block_size: Tokens a block.
        kv_dtype: "float32" or "float16".
        max_step_tokens: The most rows of one step.
        max_sequences: The most sequences it may know at once.
        max_context: The most tokens of one sequence.
        num_threads: CPU threads.
        device: What computes: "cpu", or "cuda:N" for the Nth GPU that the stage's process sees.
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

    @property
    def num_layers(self) -> int:
        """How many layers it runs."""
        return self.end_layer - self.first_layer
