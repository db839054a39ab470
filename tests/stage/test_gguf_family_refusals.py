"""What files of each family are refused for: by key and value, by tensor and shape; and damaged headers."""

from __future__ import annotations

import random

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.stage import CheckpointError, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.roles import EXPERT_ROLES


def keyed(family: str, keys: dict) -> dict:
    return {f"{family}.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen2", {"expert_count": 8}, r"expert_count: 8: a mixture of experts in a qwen2 model is not supported"),
        ("qwen3moe", {"expert_count": None}, r"expert_count: a qwen3moe model without experts is not supported"),
        ("qwen3moe", {"expert_used_count": 9}, r"expert_used_count: 9 is not one integer from 1 to 8"),
        ("qwen3moe", {"expert_used_count": 0}, r"expert_used_count: 0 is not one integer from 1 to 8"),
        (
            "qwen3moe",
            {"expert_count": 7},
            r"tensor blk\.0\.ffn_gate_exps\.weight: has shape \[8, 32, 64\]; .* \[7, 32, 64\]",
        ),
        ("qwen3moe", {"expert_count": 2**31}, r"expert_count: 2147483648 is not one integer from 0 to 4096"),
        ("qwen3moe", {"expert_feed_forward_length": 64}, r"ffn_gate_exps\.weight: has shape .* \[8, 64, 64\]"),
        ("qwen3moe", {"expert_gating_func": 4}, r"expert_gating_func: 4 is not one of 1, 2, 3"),
        ("qwen3moe", {"expert_gating_func": "softmax"}, r"expert_gating_func: softmax is not one of"),
        ("qwen3moe", {"expert_weights_norm": 1}, r"expert_weights_norm: 1 is not a truth value"),
        ("qwen3moe", {"expert_weights_scale": -1.0}, r"expert_weights_scale: -1\.0 is not a finite number"),
        ("qwen3moe", {"expert_group_count": 3}, r"expert_group_count: 3 does not divide the 8 experts"),
        ("qwen3moe", {"expert_group_count": 8}, r"expert_group_count: 8 groups of one expert"),
        (
            "qwen3moe",
            {"expert_group_count": 4, "expert_group_used_count": 5},
            r"group_used_count: 5 is not one integer",
        ),
        (
            "qwen3moe",
            {"expert_group_count": 4, "expert_used_count": 3},
            r"expert_used_count: 3 experts a token, but 1 groups of 2 are chosen from",
        ),
        ("qwen3moe", {"expert_shared_count": 1}, r"expert_shared_count: 1: a shared expert is not supported"),
        ("glm4moe", {"expert_shared_count": None}, r"expert_shared_count: the key is missing"),
        ("glm4moe", {"expert_shared_count": 3}, r"ffn_gate_shexp\.weight: has shape \[64, 64\]; .* \[96, 64\]"),
        ("glm4moe", {"leading_dense_block_count": 1}, r"tensor blk\.0\.ffn_gate\.weight: is missing"),
        ("glm4moe", {"leading_dense_block_count": 4}, r"leading_dense_block_count: 4 is not one integer from 0 to 3"),
        ("glm4moe", {"nextn_predict_layers": 3}, r"nextn_predict_layers: 3 leaves no layer"),
        (
            "glm4moe",
            {"rope.dimension_sections": [4, 2, 2, 0]},
            r"dimension_sections: \[4, 2, 2, 0\]: the key is unknown",
        ),
        ("llama", {"nextn_predict_layers": 1}, r"nextn_predict_layers: 1: the key is unknown here"),
        (
            "qwen2",
            {"attention.sliding_window": 128},
            r"sliding_window: 128 is a window of a qwen2 model: not supported",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True, False]},
            r"sliding_window_pattern: \[True, False\] is not 3 truth values",
        ),
        (
            "gemma3",
            {"attention.sliding_window": 64, "attention.sliding_window_pattern": [1, 0, 1]},
            r"sliding_window_pattern: \[1, 0, 1\] is not 3 truth values",
        ),
        ("gemma3", {"attention.sliding_window_pattern": "all"}, r"sliding_window_pattern: all is not one integer"),
        ("gemma3", {"rope.freq_base_swa": 0.0}, r"freq_base_swa: 0\.0 is not a finite number above zero"),
        ("gemma2", {"router_logit_softcapping": 1.0}, r"router_logit_softcapping: 1\.0: the key is unknown"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 0.5},
            r"rope\.scaling: beta_fast 0\.5 is not",
        ),
        ("qwen2", {"rope.scaling.type": "yarn", "rope.freq_base": 1.0}, r"rope\.scaling: base 1\.0 is not"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5},
            r"yarn_ext_factor: 0\.5: another",
        ),
        ("qwen2", {"rope.scaling.yarn_beta_fast": 32.0}, r"yarn_beta_fast: 32\.0: the key is unknown here"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 0},
            r"context_length: 0 is not one",
        ),
    ],
    ids=str,
)
def test_refused_by_key_and_value(tiny_model, family, keys, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny_model(family, keys=keyed(family, keys)))


def reshaped(name: str, *shape: int):
    return lambda tensors: tensors.update({name: (np.ones(shape, np.float32), Kind.F32)})


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        (
            "qwen3moe",
            lambda t: t.pop("blk.1.ffn_down_exps.weight"),
            r"tensor blk\.1\.ffn_down_exps\.weight: is missing",
        ),
        ("qwen3moe", lambda t: t.pop("blk.2.ffn_gate_inp.weight"), r"tensor blk\.2\.ffn_gate_inp\.weight: is missing"),
        (
            "qwen3moe",
            reshaped("blk.0.ffn_gate_inp.weight", 9, 64),
            r"ffn_gate_inp\.weight: has shape \[9, 64\]; .* \[8, 64\]",
        ),
        ("qwen3moe", reshaped("blk.0.ffn_up_exps.weight", 8, 64, 32), r"ffn_up_exps\.weight: has shape \[8, 64, 32\]"),
        ("qwen3moe", reshaped("blk.0.ffn_up_exps.weight", 256, 64), r"ffn_up_exps\.weight: has shape \[256, 64\]"),
        (
            "qwen3moe",
            reshaped("blk.0.ffn_up.weight", 96, 64),
            r"tensor blk\.0\.ffn_up\.weight: is not part of a qwen3moe",
        ),
        (
            "qwen3moe",
            reshaped("blk.0.ffn_gate_up_exps.weight", 8, 64, 64),
            r"tensor blk\.0\.ffn_gate_exps\.weight: is not",
        ),
        ("qwen2moe", lambda t: t.pop("blk.0.ffn_gate_inp_shexp.weight"), r"ffn_gate_inp_shexp\.weight: is missing"),
        ("qwen2moe", lambda t: t.pop("output.weight"), r"tensor output\.weight: is missing"),
        ("olmoe", reshaped("blk.0.attn_k_norm.weight", 16), r"attn_k_norm\.weight: has shape \[16\]; .* \[32\]"),
        ("gpt-oss", lambda t: t.pop("blk.1.attn_sinks.weight"), r"tensor blk\.1\.attn_sinks\.weight: is missing"),
        ("gpt-oss", lambda t: t.pop("blk.1.ffn_up_exps.bias"), r"tensor blk\.1\.ffn_up_exps\.bias: is missing"),
        ("gpt-oss", reshaped("blk.1.ffn_up_exps.bias", 32, 8), r"ffn_up_exps\.bias: has shape \[32, 8\]; .* \[8, 32\]"),
        ("phi3", reshaped("blk.0.attn_qkv.weight", 64, 64), r"attn_qkv\.weight: has shape \[64, 64\]; .* \[128, 64\]"),
        ("phi3", reshaped("blk.0.attn_q.weight", 64, 64), r"tensor blk\.0\.attn_q\.weight: is not part of a phi3"),
        ("phi3", reshaped("blk.0.ffn_up.weight", 96, 64), r"ffn_up\.weight: has shape \[96, 64\]; .* \[192, 64\]"),
        ("phi3", reshaped("rope_factors_long.weight", 8), r"tensor rope_factors_short\.weight: is missing"),
        ("glm4", reshaped("blk.1.attn_q.bias", 64), r"tensor blk\.1\.attn_q\.bias: is not part of a glm4 model"),
        ("glm4moe", lambda t: t.pop("blk.2.exp_probs_b.bias"), r"tensor blk\.2\.exp_probs_b\.bias: is missing"),
        ("glm4moe", lambda t: t.pop("blk.0.attn_k_norm.weight"), r"tensor blk\.0\.attn_k_norm\.weight: is missing"),
        ("gemma2", lambda t: t.pop("blk.0.post_ffw_norm.weight"), r"tensor blk\.0\.post_ffw_norm\.weight: is missing"),
        ("smollm3", reshaped("blk.9.attn_norm.weight", 64), r"tensor blk\.9\.attn_norm\.weight: is not part of"),
        ("glm4moe", reshaped("blk.3.attn_norm.weight", 64), r"tensor blk\.3\.attn_norm\.weight: is not part of"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_tensors_that_do_not_fit_are_refused(tiny_model, family, edit, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny_model(family, edit=edit))


def test_a_missing_expert_of_its_own_tensor_is_named(tiny_model, experts):
    for edit, message in (
        (lambda t: t.pop("blk.1.ffn_up.3.weight"), r"tensor blk\.1\.ffn_up\.3\.weight: is missing"),
        (reshaped("blk.1.ffn_up.5.weight", 32, 64), r"tensor blk\.1\.ffn_up\.5\.weight: is not part of a llama"),
        (reshaped("blk.1.ffn_up.4.weight", 64, 32), r"blk\.1\.ffn_up\.4\.weight: has shape \[64, 32\]; .* \[32, 64\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tiny_model("llama", experts=experts(count=5, apart=True), edit=edit))


def error_of(path) -> CheckpointError | None:
    """What opening a file and reading all of it gives, one expert a layer."""
    try:
        checkpoint = open_checkpoint(path)
        spec = checkpoint.spec
        for layer in (None, *range(spec.num_layers)):
            for role, shape in matrix_shapes(spec, layer).items():
                matrix = checkpoint.matrix(role, layer, 0 if role in EXPERT_ROLES else None)
                assert matrix.shape == shape
            for role, wanted in vector_shapes(spec, layer).items():
                assert checkpoint.vector(role, layer).shape == wanted
        checkpoint.close()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("family", ["gpt-oss", "glm4moe", "phi3"])
def test_damaged_headers_are_one_clear_error_or_still_a_model(tiny_model, tmp_path, family):
    """Bits and bytes of the header in turn, where most of it is numbers: nothing else is raised, whatever they say."""
    keys = {"attention.sliding_window": 16, "rope.scaling.original_context_length": 64}
    keys |= {} if family == "phi3" else {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    if family == "glm4moe":
        keys |= {"expert_group_count": 4, "expert_group_used_count": 2, "nextn_predict_layers": 0}
        del keys["attention.sliding_window"]
    path = tiny_model(family, layers=2, vocab=20, long_factors=family == "phi3", keys=keyed(family, keys))
    whole = path.read_bytes()
    end = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors)
    rng = random.Random(11)
    damaged, refused = tmp_path / "damaged.gguf", 0
    for _ in range(400):
        raw = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            place = rng.randrange(end)
            raw[place] = raw[place] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else rng.randrange(256)
        damaged.write_bytes(raw)
        error = error_of(damaged)
        if error is not None:
            refused += 1
            assert error.field
            assert len(str(error)) < len(str(damaged)) + 400
            assert str(error).isprintable()
    assert 100 < refused < 400
