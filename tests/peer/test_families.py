"""Every supported family against transformers' own class: tiny models that are made there and written as GGUF here.

Tensor names come from the gguf package's map where it has them, the permutation of llama's q and k from its definition,
and llama3's rotary factors from the frequencies that transformers computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytestmark = pytest.mark.peer

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": np.linspace(1, 2, 6).tolist(),
    "long_factor": np.linspace(2, 9, 6).tolist(),
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
GEMMA3 = {
    "sliding_attention": DEFAULT,
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
HALF = {**DEFAULT, "partial_rotary_factor": 0.5}
MODELS: dict[str, tuple[str, dict, dict]] = {
    "llama": ("Llama", DEFAULT, {}),
    "llama-untied": ("Llama", DEFAULT, {"tie_word_embeddings": False}),
    "llama-linear": ("Llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {}),
    "llama3": ("Llama", LLAMA3, {}),
    "llama-biases": ("Llama", DEFAULT, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", DEFAULT, {"sliding_window": 40}),
    "mixtral": ("Mixtral", DEFAULT, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**DEFAULT, "rope_theta": 1e6}, {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", DEFAULT, {"tie_word_embeddings": False}),
    "qwen2-yarn": ("Qwen2", YARN, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**DEFAULT, "rope_theta": 1e6}, {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("Qwen3", DEFAULT, {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen2moe": (
        "Qwen2Moe",
        DEFAULT,
        {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3moe": (
        "Qwen3Moe",
        DEFAULT,
        {"num_experts": 60, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", DEFAULT, {"num_experts": 12, "num_experts_per_tok": 1}),
    "phi3": ("Phi3", DEFAULT, {"sliding_window": 40}),
    "phi3-longrope": ("Phi3", LONGROPE, {"original_max_position_embeddings": 64}),
    "gemma2": ("Gemma2", DEFAULT, {"query_pre_attn_scalar": 16, "sliding_window": 40}),
    "gemma3": (
        "Gemma3Text",
        GEMMA3,
        {"query_pre_attn_scalar": 16, "sliding_window": 40, "num_hidden_layers": 6},
    ),
    "glm4": ("Glm4", HALF, {"attention_bias": True}),
    "glm4moe": (
        "Glm4Moe",
        HALF,
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {**YARN, "truncate": False, "rope_theta": 150000.0, "beta_fast": 8.0},
        {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 40, "intermediate_size": 96},
    ),
    "smollm3": ("SmolLM3", DEFAULT, {"num_hidden_layers": 5}),
}
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
}
KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


def make(name: str):
    """A model with random weights, its biases and norms too, each of which its own initialization leaves at 0 or 1."""
    import torch
    import transformers

    family, rope, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "tie_word_embeddings": family in ("Llama", "Gemma2"), **changes, "rope_parameters": rope}
    )
    # Those that compute in float64, and with soft caps.
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if (parameter.ndim == 1 and "inv_freq" not in parameter_name) or parameter_name.endswith("_proj_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def keys_of(model, architecture: str) -> dict[str, Any]:
    """The file's keys, without the family's prefix; those that are None are left out."""
    config = model.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    experts = architecture != "gemma3" and (
        getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    )
    experts = experts or getattr(config, "n_routed_experts", None)
    head_dim = getattr(config, "head_dim", None) or 16
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": getattr(config, "sliding_window", None) or None,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "expert_count": experts or None,
        "expert_used_count": config.num_experts_per_tok if experts else None,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        keys["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        keys["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
    if rope["rope_type"] == "longrope":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(rope["factor"]) / np.log(64)))
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "gpt-oss":
        keys["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture == "glm4moe":
        keys |= {
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_gating_func": 2,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    return {key: value for key, value in keys.items() if value is not None}


class Writer:
    """Quantizes a model's matrices, the model itself included, and writes them as GGUF."""

    def __init__(self, model, path: Path) -> None:
        self._model = model
        self._config = model.config
        self._architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
        self._writer = gguf.GGUFWriter(path, self._architecture)
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
        self._matrices = 0

    def write(self) -> None:
        for key, value in keys_of(self._model, self._architecture).items():
            add = {bool: self._writer.add_bool, int: self._writer.add_uint32, float: self._writer.add_float32}
            add.get(type(value), self._writer.add_string)(f"{self._architecture}.{key}", value)
        self._rope_factors()
        for name, parameter in self._model.named_parameters():
            self._parameter(name, parameter)
        for name, buffer in self._model.named_buffers():
            if "e_score_correction_bias" in name:
                self._writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _rope_factors(self) -> None:
        rope = self._config.rope_parameters
        if rope.get("rope_type") == "llama3":
            frequencies = self._model.model.rotary_emb.inv_freq.double().numpy()
            plain = rope["rope_theta"] ** (-np.arange(0, self._config.head_dim, 2) / self._config.head_dim)
            assert (plain / frequencies).max() > 2
            self._writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))
        if rope.get("rope_type") == "longrope":
            for length in ("short", "long"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                self._writer.add_tensor(f"rope_factors_{length}.weight", factors)

    def _parameter(self, name: str, parameter) -> None:
        import torch

        values = parameter.detach().numpy()
        if ".mlp.experts." in name:
            changed = self._experts(name, values)
        elif values.ndim == 1 or ".mlp.gate." in name or ".mlp.router." in name or "shared_expert_gate" in name:
            self._floats(name, values)
            return
        else:
            heads = 0
            if self._architecture in ("llama", "smollm3"):
                part = name.split(".")[-2]
                heads = {"q_proj": self._config.num_attention_heads, "k_proj": self._config.num_key_value_heads}.get(
                    part, 0
                )
            changed = self._quantized(self._target(name), interleaved(values, heads))
            changed = halves(changed, heads)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(changed)))

    def _floats(self, name: str, values: np.ndarray) -> None:
        part = name.split(".")[-2]
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if self._architecture in ("llama", "smollm3") and part in ("q_proj", "k_proj"):
            heads = self._config.num_attention_heads if part == "q_proj" else self._config.num_key_value_heads
            values = interleaved(values, heads)
        if name.endswith("sinks"):
            name += ".weight"
        self._writer.add_tensor(self._target(name), values.squeeze())

    def _experts(self, name: str, values: np.ndarray) -> np.ndarray:
        """One tensor of gate and up, or of down: of gpt-oss transposed, and gate and up in turn."""
        prefix, part = f"blk.{name.split('.')[2]}.ffn", name.split(".")[-1]
        is_gpt_oss = self._architecture == "gpt-oss"
        if part.endswith("_bias"):
            if part == "down_proj_bias":
                self._writer.add_tensor(f"{prefix}_down_exps.bias", values)
            else:
                self._writer.add_tensor(f"{prefix}_gate_exps.bias", np.ascontiguousarray(values[:, 0::2]))
                self._writer.add_tensor(f"{prefix}_up_exps.bias", np.ascontiguousarray(values[:, 1::2]))
            return values
        if is_gpt_oss:
            values = np.ascontiguousarray(values.swapaxes(1, 2))
        if part == "down_proj":
            changed = self._quantized(f"{prefix}_down_exps.weight", values)
        else:
            width = values.shape[1] // 2
            halves_of = (slice(0, None, 2), slice(1, None, 2)) if is_gpt_oss else (slice(0, width), slice(width, None))
            changed = np.empty_like(values)
            for half, which in zip(halves_of, ("gate", "up"), strict=True):
                changed[:, half] = self._quantized(
                    f"{prefix}_{which}_exps.weight", np.ascontiguousarray(values[:, half])
                )
        return changed.swapaxes(1, 2) if is_gpt_oss else changed

    def _quantized(self, target: str, values: np.ndarray) -> np.ndarray:
        kind = KINDS[self._matrices % len(KINDS)]
        self._matrices += 1
        quantized = gguf.quantize(values, kind)
        self._writer.add_tensor(target, quantized, raw_dtype=kind)
        return gguf.dequantize(quantized, kind)

    def _target(self, name: str) -> str:
        target = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        return target


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Channels i and i + half of each head become 2i and 2i + 1; without heads nothing is changed."""
    if not heads:
        return values
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


def halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    if not heads:
        return values
    return np.ascontiguousarray(values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path, whole_model):
    import torch

    model = make(name)
    Writer(model, tmp_path / "model.gguf").write()
    token_ids = np.random.default_rng(4).integers(0, SIZES["vocab_size"], 160).tolist()
    with torch.inference_mode():
        expected = model.double()(input_ids=torch.tensor([token_ids])).logits[0].numpy()
    got = whole_model(tmp_path / "model.gguf", 160)(token_ids)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
