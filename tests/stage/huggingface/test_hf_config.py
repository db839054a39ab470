"""config.json: published ones are understood, and what would change the arithmetic is refused by key and value."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shardline.kernels import RouterRule
from shardline.stage import CheckpointError, ModelSpec, rope_scaling
from shardline.stage.huggingface.config import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.04,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 4,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "lm_head_bias": None,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GLM_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1],
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


@pytest.fixture
def read(tmp_path):
    """The model of a config.json."""

    def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
        values = {key: value for key, value in (config | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_config(tmp_path).spec

    return spec


class TestPublished:
    def test_smollm2(self, read):
        spec = read(LLAMA)
        assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 4, 576, 1536)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
        assert (spec.context_length, spec.norm_eps, spec.tied_embeddings) == (8192, 1e-5, True)
        assert [(rope.base, rope.rotary_dim, rope.interleaved, rope.factors) for rope in spec.ropes] == [
            (1e5, 64, False, None)
        ]
        assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.experts) == (False, False, False, None)

    def test_qwen3_30b_a3b(self, read):
        spec = read(QWEN3_MOE)
        assert spec.qk_norm == "head"
        assert spec.head_dim == 128
        assert all(layer.experts and layer.window == 0 for layer in spec.layers)
        assert spec.experts.rule == RouterRule(8, "softmax", normalise=True)
        assert (spec.experts.num_experts, spec.experts.intermediate_size, spec.experts.shared_size) == (128, 768, 0)
        spec = read(QWEN3_MOE, mlp_only_layers=[3], decoder_sparse_step=2)
        assert [layer.experts for layer in spec.layers] == [False, True, False, False]

    def test_phi4_mini(self, read):
        spec = read(PHI4_MINI)
        assert spec.tied_embeddings
        assert spec.layers[0].window == 262144
        (rope,) = spec.ropes
        assert (rope.rotary_dim, rope.original_context) == (96, 4096)
        assert rope.factors == (1.0,) * 48
        assert rope.long_factors == (2.0,) * 48
        assert rope.attention_factor == rope_scaling.longrope_attention_factor(32, 4096)

    def test_gemma3_4b(self, read):
        spec = read(GEMMA3_4B)
        assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2560, 8, 4, 256)
        assert (spec.vocab_size, spec.context_length, spec.tied_embeddings) == (262208, 131072, True)
        assert [layer.window for layer in spec.layers] == [1024] * 5 + [0] + [1024] * 5 + [0]
        assert [layer.rope for layer in spec.layers] == [1] * 5 + [0] + [1] * 5 + [0]
        assert [(rope.base, rope.factors) for rope in spec.ropes] == [(1e6, (8.0,) * 128), (1e4, None)]
        assert spec.attention_scale == 256**-0.5
        assert spec.embedding_scale == 2560**0.5
        assert spec.post_norms
        assert spec.activation == "gelu_tanh"

    def test_glm_air(self, read):
        spec = read(GLM_AIR)
        assert [layer.experts for layer in spec.layers] == [False, True, True, True]
        assert spec.experts.rule == RouterRule(8, "sigmoid", normalise=True, scale=1.5)
        assert (spec.experts.choice_bias, spec.experts.shared_size, spec.experts.shared_gate) == (True, 1408, False)
        assert (spec.ropes[0].rotary_dim, spec.ropes[0].interleaved) == (64, False)
        assert spec.qkv_bias
        assert not spec.output_bias

    def test_layers_that_guess_further_tokens_are_left_out(self, tmp_path):
        for count, expected in ((1, ("model.layers.4.",)), (0, ()), (2, ("model.layers.4.", "model.layers.5."))):
            (tmp_path / "config.json").write_text(json.dumps(GLM_AIR | {"num_nextn_predict_layers": count}))
            config = read_config(tmp_path)
            assert config.family.unused(config.keys, config.spec) == expected

    def test_gpt_oss_20b(self, read):
        spec = read(GPT_OSS)
        assert [layer.window for layer in spec.layers] == [128, 0, 128, 0]
        assert spec.experts.rule == RouterRule(4, "softmax_of_chosen")
        assert spec.sinks
        assert spec.output_bias
        assert spec.ropes[0].factors == rope_scaling.yarn(150000, 64, 32, 4096, 32, 1, False)
        assert spec.ropes[0].attention_factor == rope_scaling.yarn_attention_factor(32)

    def test_smollm3(self, read):
        spec = read(SMOLLM3)
        assert [layer.rope for layer in spec.layers] == [0, 0, 0, None]
        assert spec.tied_embeddings
        assert read(SMOLLM3, no_rope_layers=None, no_rope_layer_interval=2).layers[1].rope is None


LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 2048,
    "rope_type": "llama3",
}


class TestRope:
    def test_both_forms_are_one(self, read):
        older = read(LLAMA, rope_scaling=LLAMA3, rope_theta=5e5)
        newer = read(LLAMA, rope_scaling=..., rope_theta=..., rope_parameters={**LLAMA3, "rope_theta": 5e5})
        assert older == newer
        assert older.ropes[0].factors == rope_scaling.llama3(5e5, 64, 8, 1, 4, 2048)
        assert read(LLAMA, rope_parameters={**LLAMA3, "rope_theta": 1e5}) == read(LLAMA, rope_scaling=LLAMA3)

    def test_type_and_rope_type(self, read):
        linear = read(LLAMA, rope_scaling={"type": "linear", "factor": 2.0})
        assert linear.ropes[0].factors == (2.0,) * 32
        assert read(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2}) == linear
        assert read(LLAMA, rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2}) == linear

    def test_yarn_extends_the_context(self, read):
        yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
        assert read(LLAMA, rope_scaling=yarn).context_length == 32768
        assert read(LLAMA, rope_scaling=yarn, max_position_embeddings=40000).context_length == 40000

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type: dynamic is not supported"),
            ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope is not supported"),
            ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "say different things"),
            ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: the key is missing"),
            ({"rope_scaling": {"type": "linear", "factor": -1}}, "is not a number above zero"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}},
                "rope_scaling.mscale: 1: the key is unknown",
            ),
            ({"rope_scaling": {"rope_type": "default", "factor": 2}}, "rope_scaling.factor: 2: the key is unknown"),
            ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "llama3: high_freq_factor 1.0 is not above"),
            ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor: the key is missing"),
            ({"rope_scaling": []}, "[] is not an object"),
            ({"rope_scaling": {"type": 3}}, "3 is not a text"),
            ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}, "it is said twice"),
            ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "is another"),
            ({"rope_parameters": {"rope_theta": 2e5}}, "rope_parameters.rope_theta: [100000.0, 200000.0]"),
            ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
            ({"partial_rotary_factor": 0.4}, "no even part"),
            ({"partial_rotary_factor": 2.0}, "no even part"),
        ],
    )
    def test_refused(self, read, changes, says):
        with pytest.raises(CheckpointError) as caught:
            read(LLAMA, **changes)
        assert says in str(caught.value)

    @pytest.mark.parametrize(
        "factors", [{"long_factor": [1.0]}, {"short_factor": None}, {"long_factor": ["a"] * 48}, {"short_mscale": 1.1}]
    )
    def test_longrope_factors(self, read, factors):
        with pytest.raises(CheckpointError, match=r"rope_scaling\.(long|short)_"):
            read(PHI4_MINI, rope_scaling=PHI4_MINI["rope_scaling"] | factors)


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "changes", "says"),
        [
            (LLAMA, {"architectures": ["BertModel"]}, "architectures: BertModel is not supported; LlamaForCausalLM,"),
            (LLAMA, {"architectures": None}, "architectures: None is not a list"),
            (LLAMA, {"architectures": ["a", "b"]}, "is not a list of one"),
            (LLAMA, {"model_type": "mistral"}, "model_type: mistral is not llama"),
            (LLAMA, {"new_thing": 3}, "new_thing: 3: the key is unknown here and may change"),
            (LLAMA, {"hidden_act": "relu"}, "hidden_act: relu: another activation"),
            (LLAMA, {"hidden_size": ...}, "hidden_size: the key is missing"),
            (LLAMA, {"hidden_size": 576.0}, "hidden_size: 576.0 is not an integer"),
            (LLAMA, {"hidden_size": True}, "hidden_size: True is not an integer"),
            (LLAMA, {"hidden_size": 10**30}, "is not an integer from 1 to"),
            (LLAMA, {"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000 is not an integer"),
            (LLAMA, {"num_key_value_heads": 2}, "2 does not divide the 9"),
            (LLAMA, {"num_attention_heads": 7, "num_key_value_heads": 1}, "7 does not divide hidden_size 576"),
            (
                LLAMA,
                {"head_dim": 1 << 20, "rope_scaling": LLAMA3},
                "head_dim: 1048576 is not an integer from 1 to 4096",
            ),
            (LLAMA, {"hidden_size": 1 << 20, "num_attention_heads": 1, "num_key_value_heads": 1}, "head_dim: 1048576"),
            (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps: 1e-5 is not a number"),
            (LLAMA, {"attention_bias": 1}, "attention_bias: 1 is neither true nor false"),
            (LLAMA, {"sliding_window": 4096}, "sliding_window: 4096: LlamaForCausalLM has no window"),
            (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder: True: the key is unknown"),
            (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
            (LLAMA, {"use_mrope": 0}, "use_mrope"),
            (LLAMA, {"per_layer_config": {"0": {}}}, "per_layer_config"),
            (LLAMA, {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config: quant_method"),
            (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
            (LLAMA, {"quantization_config": {}}, "quant_method is missing"),
            (LLAMA, {"quantization_config": []}, "quantization_config: [] is not an object"),
            (QWEN3_MOE, {"num_experts_per_tok": 200}, "num_experts_per_tok: 200 is not an integer from 1 to 128"),
            (QWEN3_MOE, {"num_local_experts": 64}, "say different things"),
            (QWEN3_MOE, {"mlp_only_layers": [9]}, "mlp_only_layers: [9] is not a list of integers from 0 to 3"),
            (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
            (QWEN3_MOE, {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
            (QWEN3_MOE, {"layer_types": ["full_attention"] * 3}, "is not a list of 4 kinds"),
            (QWEN3_MOE, {"layer_types": ["chunked_attention"] * 4}, "layer_types[0]: chunked_attention is not"),
            (QWEN3_MOE, {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
            (GLM_AIR, {"n_group": 3}, "n_group: 128 experts are not 3 groups"),
            (GLM_AIR, {"n_group": 64, "topk_group": 2}, "num_experts_per_tok: 8 is not an integer from 1 to 4"),
            (GLM_AIR, {"scoring_func": "softmax"}, "scoring_func: softmax"),
            (GPT_OSS, {"swiglu_limit": 6.0}, "swiglu_limit: 6.0: another limit"),
            (GPT_OSS, {"experts_per_token": 5}, "experts_per_token: 5"),
            (GPT_OSS, {"initial_context_length": 8192}, "it is said twice"),
            (GPT_OSS, {"rope_scaling": None}, "rope_scaling: the key is missing"),
            (SMOLLM3, {"no_rope_layers": [1, 0]}, "has 2 entries for 4 layers"),
            (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
            (GEMMA3_4B, {"text_config": None}, "text_config: None is not an object"),
            (GEMMA3_4B, {"audio_config": {"a": 1}}, "audio_config"),
            (
                GEMMA3_4B,
                {"text_config": GEMMA3_4B["text_config"] | {"use_bidirectional_attention": True}},
                "text_config.use_bidirectional_attention: True",
            ),
            (
                GEMMA3_4B,
                {"text_config": GEMMA3_4B["text_config"] | {"hidden_activation": "gelu"}},
                "text_config.hidden_activation: gelu",
            ),
        ],
    )
    def test_by_key_and_value(self, read, config, changes, says):
        with pytest.raises(CheckpointError) as caught:
            read(config, **changes)
        assert says in str(caught.value)
        assert "config.json: " in str(caught.value)

    @pytest.mark.parametrize(
        "auto_map",
        [
            {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
            {"AutoModelForCausalLM": ["a", "b"]},
            "modeling_my.My",
        ],
    )
    def test_code_of_its_own(self, read, auto_map):
        with pytest.raises(CheckpointError, match=r"auto_map: .* code of the folder's own, which is never run"):
            read(LLAMA, auto_map=auto_map)

    def test_code_of_a_known_class_is_let_be(self, read, caplog, tmp_path: Path):
        with caplog.at_level(logging.INFO):
            read(PHI4_MINI)
        assert "is not run: Phi3ForCausalLM is known here" in caplog.text

    def test_layers_with_and_without_windows_in_a_family_where_all_have_one(self, read):
        mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        assert [layer.window for layer in read(mistral, sliding_window=...).layers] == [4096] * 4
        assert [layer.window for layer in read(mistral, sliding_window=None).layers] == [0] * 4
        assert [layer.window for layer in read(mistral, sliding_window=100).layers] == [100] * 4
        for kinds in (["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2):
            with pytest.raises(CheckpointError, match="layer_types"):
                read(mistral, sliding_window=100, layer_types=kinds)
