"""Every family of Hugging Face folders against transformers' own class.

A tiny random model is made there and saved by it. Then the reference's matrices are replaced by what the quantizer
makes of them, row by row and tensor by tensor: so the test knows nothing of roles and names, and a tensor that is read
for another, a part cut at the wrong row or a key that is not understood shows in the logits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import CheckpointError, Stage, StageSpec, open_checkpoint
from shardline.stage.huggingface.config import read_config
from shardline.stage.huggingface.formats import quantize

pytestmark = pytest.mark.peer

VOCAB = 211
LENGTH = 150
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
ORIGINAL = 64
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
OSS_YARN = {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def longrope(pairs: int) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        **THETA,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 1.5 * i for i in range(pairs)],
    }


MODELS = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", **THETA}}),
    "llama3-tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "llama-biases-linear": (
        "Llama",
        {"rope_parameters": {**LINEAR, **THETA}, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 24}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 60,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "head_dim": 32,
        },
    ),
    "qwen3-moe-normalised": (
        "Qwen3Moe",
        {"num_experts": 60, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 8}),
    "phi3-longrope": ("Phi3", {"rope_parameters": longrope(8), "original_max_position_embeddings": ORIGINAL}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"partial_rotary_factor": 0.5, **THETA}, "sliding_window": 24}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 48}),
    "gemma2-caps": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", **THETA},
            },
        },
    ),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "head_dim": 32,
            "sliding_window": 24,
            "rope_parameters": OSS_YARN,
        },
    ),
}


# Of each mixture of experts, the key that says how many there are.
MIXTURES = {
    "mixtral": "num_local_experts",
    "qwen2-moe": "num_experts",
    "qwen3-moe": "num_experts",
    "qwen3-moe-normalised": "num_experts",
    "olmoe": "num_experts",
    "glm4-moe": "n_routed_experts",
    "gpt-oss": "num_local_experts",
}


def make(name: str, **others: object):
    """A model with random weights, its biases, norms and sinks too, that its own initialization leaves at 0 or 1."""
    import torch
    import transformers

    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes, **others})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 1 and "inv_freq" not in key and "embed_scale" not in key:
                value.add_(torch.randn_like(value) * 0.3)
            elif key.endswith(("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight", "router.weight")):
                value.normal_(0, 0.15)
            elif key.endswith(("experts.gate_up_proj_bias", "experts.down_proj_bias")):
                value.normal_(0, 0.3)
    return model


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """What the quantizer makes of a matrix [N, K]."""
    values = np.ascontiguousarray(values, np.float32)
    return quantize([values], values.shape, bits).dequantize()


def round_matrices(model) -> None:
    """Quantize every matrix but the routers', in place."""
    import torch

    inputs_first = type(model).__name__.startswith("GptOss")
    with torch.no_grad():
        for key, value in model.named_parameters():
            floats = ("mlp.gate.weight", "router.weight", "shared_expert_gate.weight", "_bias")
            if value.ndim == 1 or key.endswith(floats):
                continue
            bits = 8 if "embed" in key or "lm_head" in key else 4
            before = value.numpy()
            if before.ndim == 2:
                after = rounded(before, bits)
            elif inputs_first:
                after = np.stack([rounded(expert.T, bits).T for expert in before])
            else:
                after = np.stack([rounded(expert, bits) for expert in before])
            value.copy_(torch.from_numpy(after))


def logits(folder: os.PathLike[str], cuts: Sequence[int], token_ids: Sequence[int], context: int) -> np.ndarray:
    """Of every position, float32 [tokens, vocab], by stages that are cut before those layers."""
    checkpoint = open_checkpoint(folder)
    bounds = [0, *cuts, checkpoint.spec.num_layers]
    base = StageSpec(0, 0, 0, False, False, context // 16, 16, "float32", len(token_ids), 4, context, 2)
    start = SequenceStart(0, SamplingParams(seed=0), len(token_ids), tuple(token_ids), ())
    run = SequenceRun(0, 0, tuple(token_ids), tuple(range(-(-len(token_ids) // 16))), False)
    plan = StepPlan(0, (), (start,), (run,))
    hidden = None
    for index in range(len(cuts) + 1):
        last = index == len(cuts)
        spec = replace(
            base,
            index=index,
            first_layer=bounds[index],
            end_layer=bounds[index + 1],
            has_embed=index == 0,
            has_head=last,
        )
        stage = Stage(spec, checkpoint, cpu_backend(2))
        if last:
            result = stage.logits(plan, hidden)
        else:
            hidden = stage.run(plan, hidden).hidden
        stage.close()
    checkpoint.close()
    return result


def check_equal(got: np.ndarray, expected: np.ndarray) -> None:
    """Distributions are close at every position, and the first choice is the same wherever it is clear."""

    def log_softmax(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float64)
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(got)
    assert (np.exp(p) * (p - q)).sum(-1).max() < 1e-4
    best = np.sort(expected, -1)
    clear = best[:, -1] - best[:, -2] > 1e-2
    assert clear.mean() > 0.5, "the reference says too little"
    assert np.array_equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


def reference_logits(model, token_ids: Sequence[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(token_ids)])).logits[0].float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits(name, tmp_path):
    model = make(name)
    model.save_pretrained(tmp_path)
    round_matrices(model)
    token_ids = np.random.default_rng(4).integers(0, VOCAB, LENGTH).tolist()
    whole = logits(tmp_path, (), token_ids, 160)
    check_equal(whole, reference_logits(model, token_ids))
    assert np.array_equal(logits(tmp_path, (1,), token_ids, 160), whole)
    assert np.array_equal(logits(tmp_path, (1, 2), token_ids, 160), whole)


@pytest.mark.parametrize("used", [1, 2, 8])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name, used, tmp_path):
    """Twelve experts, of which a token has one, two or eight."""
    groups = {"n_group": 3, "topk_group": 2} if name == "glm4-moe" else {}
    model = make(name, **{MIXTURES[name]: 12, "num_experts_per_tok": used, **groups})
    model.save_pretrained(tmp_path)
    round_matrices(model)
    token_ids = np.random.default_rng(8).integers(0, VOCAB, LENGTH).tolist()
    check_equal(logits(tmp_path, (1,), token_ids, 160), reference_logits(model, token_ids))


def older(config: dict[str, object]) -> dict[str, object]:
    """A config.json as transformers 4 wrote it: patterns of layers by number, rotary keys of their own."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    else:
        config.pop("layer_types", None)
    rope = dict(rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    return config


@pytest.mark.parametrize("name", MODELS)
def test_older_keys(name, tmp_path):
    import transformers

    family, changes = MODELS[name]
    getattr(transformers, f"{family}Config")(**{**SIZES, **changes}).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["architectures"] = [f"{family.removesuffix('Text')}ForCausalLM"]

    def spec(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_config(tmp_path).spec

    assert spec(older(values)) == spec(values)


@pytest.mark.parametrize("family", sorted({family for family, _ in MODELS.values()}))
def test_keys_that_are_left_out(family, tmp_path):
    """A key that a file leaves out has the value that the class gives it, or is asked for."""
    import transformers

    getattr(transformers, f"{family}Config")(**SIZES).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["architectures"] = [f"{family.removesuffix('Text')}ForCausalLM"]

    def spec(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_config(tmp_path).spec

    whole = spec(values)
    for key in values.keys() - SIZES.keys() - {"architectures", "model_type"}:
        try:
            without = spec({name: value for name, value in values.items() if name != key})
        except CheckpointError as error:
            assert "is missing" in str(error), key  # noqa: PT017
        else:
            assert without == whole, key


def test_gemma3_with_images(tmp_path):
    """The text of a model that sees images too: its keys lie in text_config, its tensors under another prefix."""
    import torch
    import transformers

    text = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
    config = transformers.Gemma3Config(
        text_config={**text, "head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    round_matrices(model.model.language_model)
    token_ids = np.random.default_rng(6).integers(0, VOCAB - 3, LENGTH).tolist()
    check_equal(logits(tmp_path, (2,), token_ids, 160), reference_logits(model, token_ids))


def test_gpt_oss_in_mxfp4(tmp_path):
    """Experts in blocks of four-bit floats, as they are published."""
    import torch
    from safetensors.numpy import load_file, save_file

    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    model = make("gpt-oss")
    model.save_pretrained(tmp_path)
    round_matrices(model)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = dict(model.named_parameters())
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        codes = rng.integers(0, 16, (experts, n, k // 32, 16, 2), np.uint8)
        scales = rng.integers(121, 125, (experts, n, k // 32), np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes[..., 0] | codes[..., 1] << 4, scales
        values = numbers[codes].reshape(experts, n, -1, 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(values.reshape(experts, n, k).swapaxes(1, 2).copy()))
    # What is not in blocks is kept at 8 bits.
    with torch.no_grad():
        for name, value in parameters.items():
            if value.ndim == 2 and "self_attn" in name:
                value.copy_(torch.from_numpy(rounded(tensors[name], 8)))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    token_ids = np.random.default_rng(7).integers(0, VOCAB, LENGTH).tolist()
    check_equal(logits(tmp_path, (1,), token_ids, 160), reference_logits(model, token_ids))


def test_longrope_keeps_the_short_factors_in_a_short_engine(tmp_path):
    model = make("phi3-longrope")
    model.save_pretrained(tmp_path)
    round_matrices(model)
    token_ids = np.random.default_rng(5).integers(0, VOCAB, ORIGINAL - 4).tolist()
    short = logits(tmp_path, (), token_ids, ORIGINAL)
    check_equal(short, reference_logits(model, token_ids))
    assert not np.array_equal(logits(tmp_path, (), token_ids, 2 * ORIGINAL), short)
