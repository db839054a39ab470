"""Tiny Hugging Face folders, written with the safetensors package; names and keys as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 101, 3
EXPERTS = 5

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


class Draw:
    """Random tensors."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def matrix(self, *shape: int) -> np.ndarray:
        return self._rng.normal(0, 0.15, shape).astype(np.float32)

    def vector(self, *shape: int) -> np.ndarray:
        return self._rng.uniform(0.5, 1.5, shape).astype(np.float32)


def attention(draw: Draw, prefix: str) -> Tensors:
    shapes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {f"{prefix}self_attn.{part}_proj.weight": draw.matrix(count, HIDDEN) for part, count in shapes.items()}
    tensors[f"{prefix}self_attn.o_proj.weight"] = draw.matrix(HIDDEN, HEADS * HEAD_DIM)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = draw.vector(HIDDEN)
    return tensors


def mlp(draw: Draw, prefix: str, width: int = WIDTH) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": draw.matrix(width, HIDDEN),
        f"{prefix}.up_proj.weight": draw.matrix(width, HIDDEN),
        f"{prefix}.down_proj.weight": draw.matrix(HIDDEN, width),
    }


def ends(draw: Draw, prefix: str = "model.", head: str | None = "lm_head") -> Tensors:
    tensors = {f"{prefix}embed_tokens.weight": draw.matrix(VOCAB, HIDDEN), f"{prefix}norm.weight": draw.vector(HIDDEN)}
    return tensors | ({} if head is None else {f"{head}.weight": draw.matrix(VOCAB, HIDDEN)})


def llama(draw: Draw) -> tuple[dict[str, Any], Tensors]:
    tensors = ends(draw)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= attention(draw, prefix) | mlp(draw, f"{prefix}mlp")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}, tensors


def phi3(draw: Draw) -> tuple[dict[str, Any], Tensors]:
    tensors = ends(draw)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made = attention(draw, prefix) | mlp(draw, f"{prefix}mlp")
        for fused, names in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            folder = fused.partition(".")[0]
            parts = [made.pop(f"{prefix}{folder}.{name}_proj.weight") for name in names]
            made[f"{prefix}{fused}_proj.weight"] = np.concatenate(parts)
        tensors |= made
    return {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, tensors


def qwen2_moe(draw: Draw) -> tuple[dict[str, Any], Tensors]:
    tensors = ends(draw)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= attention(draw, prefix)
        for part, count in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            tensors[f"{prefix}self_attn.{part}_proj.bias"] = draw.vector(count * HEAD_DIM)
        if layer == 1:
            tensors |= mlp(draw, f"{prefix}mlp")
            continue
        for expert in range(EXPERTS):
            tensors |= mlp(draw, f"{prefix}mlp.experts.{expert}", 32)
        tensors |= mlp(draw, f"{prefix}mlp.shared_expert", 64)
        tensors[f"{prefix}mlp.shared_expert_gate.weight"] = draw.matrix(1, HIDDEN)
        tensors[f"{prefix}mlp.gate.weight"] = draw.matrix(EXPERTS, HIDDEN)
    config = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 3,
    }
    return config, tensors


def gpt_oss(draw: Draw) -> tuple[dict[str, Any], Tensors]:
    tensors = ends(draw)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= attention(draw, prefix)
        for part, count in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "o": HEADS}.items():
            tensors[f"{prefix}self_attn.{part}_proj.bias"] = draw.vector(count * HEAD_DIM)
        tensors[f"{prefix}self_attn.sinks"] = draw.vector(HEADS)
        tensors[f"{prefix}mlp.router.weight"] = draw.matrix(EXPERTS, HIDDEN)
        tensors[f"{prefix}mlp.router.bias"] = draw.vector(EXPERTS)
        tensors[f"{prefix}mlp.experts.gate_up_proj"] = draw.matrix(EXPERTS, HIDDEN, 2 * WIDTH)
        tensors[f"{prefix}mlp.experts.gate_up_proj_bias"] = draw.vector(EXPERTS, 2 * WIDTH)
        tensors[f"{prefix}mlp.experts.down_proj"] = draw.matrix(EXPERTS, WIDTH, HIDDEN)
        tensors[f"{prefix}mlp.experts.down_proj_bias"] = draw.vector(EXPERTS, HIDDEN)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": HEAD_DIM,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    }
    return config, tensors


def gemma3_with_images(draw: Draw) -> tuple[dict[str, Any], Tensors]:
    tensors = ends(draw, "language_model.model.", None)
    for layer in range(LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        tensors |= attention(draw, prefix) | mlp(draw, f"{prefix}mlp")
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = draw.vector(HIDDEN)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{norm}.weight"] = draw.vector(HEAD_DIM)
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = draw.matrix(3, 3, 2, 2)
    tensors["multi_modal_projector.mm_input_projection_weight"] = draw.matrix(8, 8)
    own = {**COMMON, "head_dim": HEAD_DIM, "model_type": "gemma3_text", "sliding_window": 20}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": own,
        "vision_config": {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 256,
    }
    return config, tensors


FAMILIES = {
    "llama": llama,
    "phi3": phi3,
    "qwen2_moe": qwen2_moe,
    "gpt_oss": gpt_oss,
    "gemma3_with_images": gemma3_with_images,
}


class TinyFolders:
    """Writes folders; a call returns one's path and its tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        family: str = "llama",
        *,
        keys: dict[str, Any] | None = None,
        edit: Callable[[Tensors], None] | None = None,
        shards: int = 1,
    ) -> tuple[Path, Tensors]:
        """`keys` are set in config.json (None: left out); `edit` changes the tensors; more shards than one take layers
        in turn, and the model's own tensors lie in the last."""
        config, tensors = FAMILIES[family](Draw())
        if edit:
            edit(tensors)
        if "text_config" not in config:
            config = COMMON | config
        config = {key: value for key, value in (config | (keys or {})).items() if value is not None}
        self._count += 1
        path = self._folder / f"{family}-{self._count}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, path / "model.safetensors", {"format": "pt"})
            return path, tensors
        names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
        place = {}
        for name in tensors:
            _, _, rest = name.partition("layers.")
            place[name] = names[int(rest.split(".")[0]) % shards] if rest else names[-1]
        for shard in names:
            save_file({name: tensors[name] for name in tensors if place[name] == shard}, path / shard)
        index = {"metadata": {"total_size": 1}, "weight_map": place}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path, tensors


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolders:
    """Makes folders."""
    return TinyFolders(tmp_path_factory.mktemp("folders"))
