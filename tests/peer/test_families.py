"""Every supported family against transformers' own class: tiny models that are made there and written as GGUF here.

Tensor names come from the gguf package's map, the permutation of llama's q and k from its definition, and llama3's
rotary factors from the frequencies that transformers computes.
"""

from __future__ import annotations

from pathlib import Path

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
MODELS = {
    "llama": ("Llama", DEFAULT, {}),
    "llama-untied": ("Llama", DEFAULT, {"tie_word_embeddings": False}),
    "llama-linear": ("Llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, {}),
    "llama3": ("Llama", LLAMA3, {}),
    "qwen2": ("Qwen2", {**DEFAULT, "rope_theta": 1e6}, {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", DEFAULT, {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {**DEFAULT, "rope_theta": 1e6}, {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("Qwen3", DEFAULT, {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": False}),
}
KINDS = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]


def make(name: str):
    """A model with random weights, its biases and norms too, each of which its own initialization leaves at 0 or 1."""
    import torch
    import transformers

    family, rope, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "tie_word_embeddings": family == "Llama", **changes, "rope_parameters": rope}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def write(model, path: Path) -> None:
    """Quantize the model's matrices, the model itself included, and write them as GGUF."""
    import torch

    config = model.config
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if architecture != "qwen2" else 16)
    writer.add_value_length(config.head_dim if architecture != "qwen2" else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.double().numpy()
        plain = rope["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        assert (plain / frequencies).max() > 2
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).astype(np.float32))

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    matrices = 0
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        part = name.split(".")[-2]
        if architecture == "llama" and part in ("q_proj", "k_proj"):
            count = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            values = interleaved(values, count)
        if values.ndim == 1:
            writer.add_tensor(target, values)
            continue
        kind = KINDS[matrices % len(KINDS)]
        matrices += 1
        quantized = gguf.quantize(values, kind)
        writer.add_tensor(target, quantized, raw_dtype=kind)
        values = gguf.dequantize(quantized, kind)
        if architecture == "llama" and part in ("q_proj", "k_proj"):
            values = halves(values, count)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(values)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Channels i and i + half of each head become 2i and 2i + 1."""
    return np.ascontiguousarray(values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


def halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    return np.ascontiguousarray(values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path, whole_model):
    import torch

    model = make(name)
    write(model, tmp_path / "model.gguf")
    token_ids = np.random.default_rng(4).integers(0, SIZES["vocab_size"], 300).tolist()
    with torch.inference_mode():
        expected = model.double()(input_ids=torch.tensor([token_ids])).logits[0].numpy()
    got = whole_model(tmp_path / "model.gguf", 320)(token_ids)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
