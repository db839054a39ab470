"""What a file says of its model: taken exactly, or refused by key and value."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.stage import CheckpointError, LayerSpec, ModelSpec, RopeSpec, open_checkpoint


def spec_of(path) -> ModelSpec:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.spec


def test_the_real_model(smollm2):
    assert spec_of(smollm2) == ModelSpec(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        context_length=8192,
        norm_eps=float(np.float32(1e-5)),
        layers=(LayerSpec(),) * 30,
        ropes=(RopeSpec(base=100000.0, rotary_dim=64, interleaved=True),),
        tied_embeddings=True,
    )


def test_families_differ_as_they_should(tiny_model):
    llama, qwen2, qwen3 = (spec_of(tiny_model(name)) for name in ("llama", "qwen2", "qwen3"))
    assert (llama.ropes[0].interleaved, llama.qkv_bias, llama.qk_norm) == (True, False, None)
    assert (qwen2.ropes[0].interleaved, qwen2.qkv_bias, qwen2.qk_norm) == (False, True, None)
    assert (qwen3.ropes[0].interleaved, qwen3.qkv_bias, qwen3.qk_norm) == (False, False, "head")
    assert spec_of(tiny_model("llama", bias=True)).qkv_bias
    assert llama.tied_embeddings
    assert not spec_of(tiny_model("qwen2", tied=False)).tied_embeddings


def test_a_head_beside_a_tied_looking_embedding_is_used(tiny_model):
    checkpoint = open_checkpoint(tiny_model(tied=False))
    assert not np.array_equal(checkpoint.matrix("head", None).q, checkpoint.matrix("embed", None).q)
    checkpoint.close()
    checkpoint = open_checkpoint(tiny_model(tied=True))
    assert np.array_equal(checkpoint.matrix("head", None).q, checkpoint.matrix("embed", None).q)
    assert checkpoint.matrix_bytes("head", None) == checkpoint.matrix_bytes("embed", None)
    checkpoint.close()


def test_defaults(tiny_model):
    """Keys that files leave out: the heads' size, the KV heads, the rotary size and base."""
    left_out = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")
    spec = spec_of(tiny_model(kv_heads=4, keys={f"llama.{key}": None for key in left_out}))
    assert (spec.head_dim, spec.num_kv_heads, spec.ropes[0].rotary_dim, spec.ropes[0].base) == (16, 4, 16, 10000.0)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
    ],
)
def test_rope_scaling(tiny_model, keys, factor):
    rope = spec_of(tiny_model(keys={f"llama.{key}": value for key, value in keys.items()})).ropes[0]
    assert rope.factors == (None if factor is None else (factor,) * 8)


def test_an_attention_scale_in_float32_is_the_usual_one(tiny_model):
    """1 / sqrt(24) is no float32: the file's is its rounding."""
    open_checkpoint(tiny_model(head_dim=24, keys={"llama.attention.scale": 24**-0.5})).close()


def test_rope_factors(tiny_model):
    factors = spec_of(tiny_model(rope_factors=True)).ropes[0].factors
    assert factors is not None
    assert len(factors) == 8
    assert min(factors) >= 1
    assert len(set(factors)) == 8


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 0, "expert_used_count": 0},
        {"attention.sliding_window": 0},
        {"attention.sliding_window": 512},
        {"attention.causal": True},
        {"attention.scale": 0.25},
        {"rope.scaling.attn_factor": 1.0},
        {"rope.scaling.original_context_length": 128, "rope.scaling.finetuned": True},
        {"tensor_data_layout": "Meta AI original pth"},
        {"vocab_size": 101},
        {"feed_forward_length": [96, 96, 96]},
    ],
    ids=str,
)
def test_keys_that_change_nothing_are_taken(tiny_model, keys):
    assert spec_of(tiny_model(keys={f"llama.{key}": value for key, value in keys.items()})) == spec_of(tiny_model())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "general.architecture",
            "mamba",
            "general.architecture: mamba is not supported; llama, qwen2, .*, smollm3 are",
        ),
        ("general.type", "adapter", "general.type: adapter is not a model"),
        ("general.quantization_version", 1, "general.quantization_version: 1 is not supported"),
        ("split.count", 3, "split.count: the file is one of 3 parts"),
        ("llama.block_count", None, r"llama\.block_count: the key is missing"),
        ("llama.block_count", 2**32 - 1, r"llama\.block_count: 4294967295 is not one integer from 1"),
        ("llama.block_count", 2**20, r"llama\.block_count: 1048576 layers, but the file has 29 tensors"),
        ("llama.block_count", "three", r"llama\.block_count: three is not one integer"),
        ("llama.block_count", True, r"llama\.block_count: True is not one integer"),
        ("llama.block_count", 4, r"tensor blk\.3\.attn_q\.weight: is missing"),
        ("llama.block_count", 2, r"tensor blk\.2\.attn_norm\.weight: is not part of a llama model"),
        ("llama.embedding_length", 65, r"tensor token_embd\.weight: has shape \[101, 64\]; .* \[101, 65\]"),
        ("llama.embedding_length", 0, r"llama\.embedding_length: 0 is not one integer"),
        ("llama.feed_forward_length", None, r"llama\.feed_forward_length: the key is missing"),
        ("llama.feed_forward_length", [96, 96, 64], r"feed_forward_length: \[96, 96, 64\] is not one integer"),
        ("llama.attention.head_count", 3, r"head_count_kv: 2 does not divide the 3 query heads"),
        ("llama.attention.head_count_kv", 3, r"head_count_kv: 3 does not divide the 4 query heads"),
        ("llama.attention.head_count", 8, r"tensor blk\.0\.attn_q\.weight: has shape \[64, 64\]; .* \[128, 64\]"),
        ("llama.attention.value_length", 32, r"value_length: 32: a value length other than the key length 16"),
        ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon: the key is missing"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon: nan is not a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, r"layer_norm_rms_epsilon: -1\.0 is not a finite number above"),
        ("llama.context_length", 2**32 - 1, r"llama\.context_length: 4294967295 is not one integer from 1"),
        ("llama.vocab_size", 102, r"tensor token_embd\.weight: has shape \[101, 64\]; .* \[102, 64\]"),
        ("tokenizer.ggml.tokens", ["a", "b"], r"tokenizer\.ggml\.tokens: 2 tokens, but the vocabulary has 101"),
        ("llama.rope.dimension_count", 15, r"rope\.dimension_count: 15 is odd"),
        ("llama.rope.dimension_count", 18, r"rope\.dimension_count: 18 is odd or more than the head's 16"),
        ("llama.rope.freq_base", float("inf"), r"rope\.freq_base: inf is not a finite number"),
        ("llama.rope.freq_base", 0.0, r"rope\.freq_base: 0\.0 is not a finite number above zero"),
        (
            "llama.rope.scaling.type",
            "ntk",
            r"rope\.scaling\.type: ntk is not supported; none, linear, yarn and longrope",
        ),
        ("llama.rope.scaling.type", "longrope", r"tensor rope_factors_short\.weight: is missing; longrope needs it"),
        ("llama.rope.scaling.factor", -2.0, r"rope\.scaling\.factor: -2\.0 is not"),
        ("llama.rope.scaling.attn_factor", -1.5, r"attn_factor: -1\.5 is not a finite number above zero"),
        ("llama.expert_count", 8, r"llama\.expert_used_count: the key is missing"),
        ("llama.expert_count", 5000, r"llama\.expert_count: 5000 is not one integer from 0 to 4096"),
        ("llama.expert_used_count", 2, r"expert_used_count: 2: a mixture of experts in a llama model is not supported"),
        ("llama.attention.sliding_window", "wide", r"attention\.sliding_window: wide is not one integer from 0"),
        ("llama.attention.causal", False, r"attention\.causal: False: attention that is not causal"),
        ("llama.attention.scale", -0.5, r"attention\.scale: -0\.5 is not a finite number above zero"),
        ("llama.attn_logit_softcapping", float("inf"), r"attn_logit_softcapping: inf is not a finite number above"),
        ("llama.pooling_type", 1, r"llama\.pooling_type: 1: an embedding model"),
        ("llama.logit_scale", 0.5, r"llama\.logit_scale: 0\.5: a logit scale"),
        ("llama.use_parallel_residual", True, r"use_parallel_residual: True: a parallel residual"),
        ("llama.tensor_data_layout", "other", r"tensor_data_layout: other: another tensor layout"),
        ("llama.something.new", 7, r"llama\.something\.new: 7: the key is unknown here and may change"),
    ],
)
def test_refused_by_key_and_value(tiny_model, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny_model(keys={key: value}))


def renamed(old: str, new: str):
    def edit(tensors):
        tensors[new] = tensors.pop(old)

    return edit


def added(name: str, *shape: int):
    return lambda tensors: tensors.update({name: (np.ones(shape, np.float32), Kind.F32)})


def replaced(name: str, data: np.ndarray, kind: Kind):
    return lambda tensors: tensors.update({name: (data, kind)})


@pytest.mark.parametrize(
    ("architecture", "edit", "message"),
    [
        ("llama", lambda t: t.pop("token_embd.weight"), r"tensor token_embd\.weight: is missing"),
        ("llama", lambda t: t.pop("output_norm.weight"), r"tensor output_norm\.weight: is missing"),
        ("llama", lambda t: t.pop("blk.1.ffn_up.weight"), r"tensor blk\.1\.ffn_up\.weight: is missing"),
        ("qwen2", lambda t: t.pop("blk.2.attn_k.bias"), r"tensor blk\.2\.attn_k\.bias: is missing"),
        ("qwen3", lambda t: t.pop("blk.0.attn_q_norm.weight"), r"tensor blk\.0\.attn_q_norm\.weight: is missing"),
        ("llama", added("blk.1.attn_q.bias", 64), r"tensor blk\.1\.attn_q\.bias: is not part of a llama model"),
        ("llama", added("blk.0.attn_q.bias", 64), r"tensor blk\.0\.attn_k\.bias: is missing"),
        ("llama", added("blk.0.attn_output.bias", 64), r"tensor blk\.1\.attn_output\.bias: is missing"),
        ("llama", added("blk.1.attn_output.bias", 64), r"tensor blk\.1\.attn_output\.bias: is not part of"),
        ("llama", added("blk.0.ffn_up.bias", 96), r"tensor blk\.0\.ffn_gate\.bias: is missing"),
        ("qwen3", added("blk.0.attn_output.bias", 64), r"tensor blk\.0\.attn_output\.bias: is not part of a qwen3"),
        ("llama", added("blk.0.attn_q_norm.weight", 16), r"tensor blk\.0\.attn_q_norm\.weight: is not part of"),
        ("qwen3", added("blk.0.attn_q.bias", 64), r"tensor blk\.0\.attn_q\.bias: is not part of a qwen3 model"),
        ("llama", added("blk.3.ffn_gate_inp.weight", 8, 64), r"tensor blk\.3\.ffn_gate_inp\.weight: is not part of"),
        ("llama", renamed("blk.0.ffn_up.weight", "blk.0.ffn_upp.weight"), r"tensor blk\.0\.ffn_up\.weight: is missing"),
        ("llama", added("rope_freqs.weight", 7), r"tensor rope_freqs\.weight: has shape \[7\]; .* \[8\]"),
        ("llama", added("output_norm.weight", 63), r"tensor output_norm\.weight: has shape \[63\]; .* \[64\]"),
        ("llama", added("output_norm.weight", 1, 64), r"tensor output_norm\.weight: has shape \[1, 64\]; .* \[64\]"),
        ("llama", added("output.weight", 64, 101), r"tensor output\.weight: has shape \[64, 101\]; .* \[101, 64\]"),
        (
            "llama",
            replaced("output_norm.weight", np.zeros(68, np.uint8), Kind.Q8_0),
            r"tensor output_norm\.weight: type Q8_0 is not supported here; F32, F16, BF16 are",
        ),
        (
            "llama",
            replaced("blk.0.attn_q.weight", np.zeros((64, 36), np.uint8), Kind.NVFP4),
            r"tensor blk\.0\.attn_q\.weight: type NVFP4 is not supported here; F32, .*Q6_K, MXFP4, .*IQ4_XS are",
        ),
        (
            "llama",
            replaced("blk.0.attn_q.weight", np.zeros((64, 64)), Kind.F64),
            r"tensor blk\.0\.attn_q\.weight: type F64 is not supported here",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tiny_model, architecture, edit, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny_model(architecture, edit=edit))


def test_rows_that_no_group_divides_are_refused(tiny_model):
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight: has rows of 72 elements, not a multiple"):
        open_checkpoint(tiny_model(hidden=72, ffn=72, head_dim=16, kinds=[Kind.F32], embed=Kind.F32))


def test_hostile_text_in_a_message_is_short_and_printable(tiny_model):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tiny_model(keys={"general.architecture": "\x1b[31m" + "x" * 100_000}))
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_the_error_pickles(tiny_model):
    import pickle

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tiny_model(keys={"llama.pooling_type": 1}))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.path, copy.field, copy.problem) == (caught.value.path, caught.value.field, caught.value.problem)
    assert str(copy) == str(caught.value)
