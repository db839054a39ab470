"""What each family's files say of their model: taken exactly, or refused by key and value, by tensor and shape."""

from __future__ import annotations

import math
import random

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.kernels import RouterRule
from shardline.stage import CheckpointError, ModelSpec, matrix_shapes, open_checkpoint, rope_scaling, vector_shapes
from shardline.stage.roles import EXPERT_ROLES


def spec_of(path) -> ModelSpec:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.spec


def keyed(family: str, keys: dict) -> dict:
    return {f"{family}.{key}": value for key, value in keys.items()}


def windows(spec: ModelSpec) -> list[int]:
    return [layer.window for layer in spec.layers]


def test_experts(tiny_model, experts):
    spec = spec_of(tiny_model("llama", experts=experts(count=8, used=2, ffn=32)))
    assert spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.intermediate_size, spec.intermediate_size) == (8, 32, 0)
    assert spec.experts.rule == RouterRule(2, "softmax", normalise=True)
    assert (spec.experts.shared_size, spec.experts.shared_gate, spec.experts.biases) == (0, False, False)
    assert all(layer.experts for layer in spec.layers)

    qwen2 = spec_of(tiny_model("qwen2moe", experts=experts(shared=96))).experts
    assert qwen2 is not None
    assert qwen2.rule == RouterRule(2, "softmax", normalise=False)
    assert (qwen2.shared_size, qwen2.shared_gate) == (96, True)

    gpt_oss = spec_of(tiny_model("gpt-oss"))
    assert gpt_oss.experts is not None
    assert gpt_oss.experts.rule.scoring == "softmax_of_chosen"
    assert gpt_oss.experts.router_bias
    assert gpt_oss.experts.biases
    assert (gpt_oss.sinks, gpt_oss.output_bias, gpt_oss.qkv_bias, gpt_oss.activation) == (
        True,
        True,
        True,
        "clamped_swiglu",
    )

    glm = spec_of(tiny_model("glm4moe", layers=4, predicts=1, experts=experts(dense_layers=2)))
    assert glm.experts is not None
    assert (glm.num_layers, glm.intermediate_size) == (4, 96)
    assert [layer.experts for layer in glm.layers] == [False, False, True, True]
    assert glm.experts.rule == RouterRule(2, "sigmoid", normalise=True, scale=1.5)
    assert (glm.experts.choice_bias, glm.experts.shared_size, glm.experts.shared_gate) == (True, 64, False)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"expert_gating_func": 2}, RouterRule(2, "sigmoid")),
        ({"expert_gating_func": 3}, RouterRule(2, "softmax_of_chosen")),
        ({"expert_gating_func": 0, "expert_weights_norm": False}, RouterRule(2, "softmax", normalise=False)),
        ({"expert_weights_scale": 2.5}, RouterRule(2, scale=2.5)),
        ({"expert_weights_scale": 0.0}, RouterRule(2)),
        ({"expert_group_count": 4, "expert_group_used_count": 2}, RouterRule(2, num_groups=4, groups_kept=2)),
    ],
    ids=str,
)
def test_keys_of_the_router(tiny_model, keys, rule):
    experts = spec_of(tiny_model("qwen3moe", keys=keyed("qwen3moe", keys))).experts
    assert experts is not None
    assert experts.rule == rule


def test_widths_that_older_files_leave_out(tiny_model, experts):
    """The dense width divided by the experts a token; and the dense width is the shared expert's."""
    left_out = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    spec = spec_of(
        tiny_model(
            "qwen2moe", ffn=96, experts=experts(used=3, shared=96), keys=keyed("qwen2moe", dict.fromkeys(left_out))
        )
    )
    assert spec.experts is not None
    assert (spec.experts.intermediate_size, spec.experts.shared_size) == (32, 96)


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {"attention.sliding_window": 100}, [100] * 7),
        ("phi3", {"attention.sliding_window": 100}, [100] * 7),
        ("phi3", {"attention.sliding_window": 0}, [0] * 7),
        ("phi3", {"attention.sliding_window": 512}, [0] * 7),
        ("gemma2", {"context_length": 8192}, [4096, 0, 4096, 0, 4096, 0, 4096]),
        ("gemma2", {"attention.sliding_window": 64}, [64, 0, 64, 0, 64, 0, 64]),
        ("gpt-oss", {"attention.sliding_window": 64}, [64, 0, 64, 0, 64, 0, 64]),
        ("gemma3", {"attention.sliding_window": 64}, [64, 64, 64, 64, 64, 0, 64]),
        ("gemma3", {}, [0] * 7),
        ("gemma3", {"attention.sliding_window": 64, "attention.sliding_window_pattern": 3}, [64, 64, 0, 64, 64, 0, 64]),
        ("gemma3", {"attention.sliding_window": 64, "attention.sliding_window_pattern": [True] * 8}, [64] * 7),
    ],
    ids=str,
)
def test_windows_are_of_the_layers_number(tiny_model, family, keys, expected):
    assert windows(spec_of(tiny_model(family, layers=7, keys=keyed(family, keys)))) == expected


def test_rotations_of_gemma3(tiny_model):
    """Layers with a window turn by a base of their own and are not scaled, even where the window sees everything."""
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    for window in (64, 512):
        keys = {**scaling, "attention.sliding_window": window}
        spec = spec_of(tiny_model("gemma3", layers=7, keys=keyed("gemma3", keys)))
        assert [layer.rope for layer in spec.layers] == [1, 1, 1, 1, 1, 0, 1]
        assert (spec.ropes[0].base, spec.ropes[0].factors) == (1e6, (8.0,) * 8)
        assert (spec.ropes[1].base, spec.ropes[1].factors) == (10000.0, None)
    assert len(spec_of(tiny_model("gemma3", keys=keyed("gemma3", scaling))).ropes) == 1


def test_layers_that_do_not_turn(tiny_model):
    assert [layer.rope for layer in spec_of(tiny_model("smollm3", layers=5)).layers] == [0, 0, 0, None, 0]


def test_scales_and_caps(tiny_model):
    gemma2 = spec_of(tiny_model("gemma2", heads=4, kv_heads=2, head_dim=32))
    assert (gemma2.attention_softcap, gemma2.final_softcap) == (50.0, 30.0)
    assert gemma2.embedding_scale == 8.0
    assert gemma2.attention_scale == 0
    assert spec_of(tiny_model("gemma2", layers=46, head_dim=32)).attention_scale == 0.25  # (64 / 4) ** -0.5
    assert spec_of(tiny_model("gemma3", layers=62, head_dim=32)).attention_scale == 0.25
    assert spec_of(tiny_model("llama", keys={"llama.attention.scale": 0.125})).attention_scale == 0.125
    gemma3 = spec_of(tiny_model("gemma3", keys={"gemma3.final_logit_softcapping": 20.0}))
    assert (gemma3.attention_softcap, gemma3.final_softcap) == (0, 20.0)


def test_yarn(tiny_model):
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    for family, truncate in (("qwen2", True), ("gpt-oss", False)):
        rope = spec_of(tiny_model(family, keys=keyed(family, keys))).ropes[0]
        assert rope.factors == rope_scaling.yarn(10000.0, 16, 32.0, 64, 16.0, 1.0, truncate)
        assert rope.attention_factor == rope_scaling.yarn_attention_factor(32.0)
    for more, expected in (
        ({"rope.scaling.yarn_log_multiplier": 1.0}, 1.0),
        ({"rope.scaling.yarn_attn_factor": 1.25}, 1.25),
        ({"rope.scaling.attn_factor": 2.0}, 2 * rope_scaling.yarn_attention_factor(32.0)),
    ):
        rope = spec_of(tiny_model("qwen2", keys=keyed("qwen2", keys | more))).ropes[0]
        assert rope.attention_factor == expected
    # The original context of a file that does not name it is its context.
    without = spec_of(tiny_model("qwen2", keys=keyed("qwen2", keys | {"rope.scaling.original_context_length": None})))
    assert without.ropes[0].factors == rope_scaling.yarn(10000.0, 16, 32.0, 512, 16.0, 1.0, True)


def test_longrope(tiny_model):
    keys = keyed("phi3", {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25})
    path = tiny_model("phi3", long_factors=True, keys=keys)
    rope = spec_of(path).ropes[0]
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert rope.factors == tuple(float(value) for value in tensors["rope_factors_short.weight"])
    assert rope.long_factors == tuple(float(value) for value in tensors["rope_factors_long.weight"])
    assert (rope.original_context, rope.attention_factor) == (128, 1.25)


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
    ids=str,
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


@pytest.mark.parametrize("how", ["merged", "apart", "together"])
def test_an_expert_is_read_without_the_others(tiny_model, experts, how):
    """Each is the file's own; where another one's scales are no numbers, only that one is refused."""
    mixture = experts(count=6, ffn=64, apart=how == "apart", together=how == "together")

    def poison(tensors):
        name = {"merged": "ffn_up_exps", "apart": "ffn_up.4", "together": "ffn_gate_up_exps"}[how]
        data, kind = tensors[f"blk.1.{name}.weight"]
        data = data.copy()
        (data if how == "apart" else data[4])[-1, :2] = 255
        tensors[f"blk.1.{name}.weight"] = (data, kind)

    path = tiny_model("llama", experts=mixture, kinds=[Kind.Q4_1, Kind.Q8_0], edit=poison)
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }

    def expected(part: str, expert: int) -> np.ndarray:
        if how == "apart":
            return tensors[f"blk.1.ffn_{part}.{expert}.weight"]
        if how == "together" and part != "down":
            return np.split(tensors["blk.1.ffn_gate_up_exps.weight"][expert], 2)[part == "up"]
        return tensors[f"blk.1.ffn_{part}_exps.weight"][expert]

    checkpoint = open_checkpoint(path)
    for part in ("gate", "up", "down"):
        size = 0
        for expert in range(6):
            if (part, expert) == ("up", 4):
                with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_.*: .* is not a finite number"):
                    checkpoint.matrix("expert_up", 1, 4)
                size += size // 4
                continue
            matrix = checkpoint.matrix(f"expert_{part}", 1, expert)
            assert np.array_equal(matrix.dequantize(), expected(part, expert)), (part, expert)
            size += matrix.nbytes
        if how != "apart":  # where every expert may be of its own type
            assert checkpoint.matrix_bytes(f"expert_{part}", 1) == size
    checkpoint.close()


def test_fused_matrices_are_sliced_by_rows(tiny_model):
    path = tiny_model("glm4", fused_qkv=True, bias=True)
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    checkpoint = open_checkpoint(path)
    for name, roles in (("attn_qkv", "q k v"), ("ffn_up", "gate up")):
        parts = [checkpoint.matrix(role, 2) for role in roles.split()]
        assert np.array_equal(np.concatenate([part.dequantize() for part in parts]), tensors[f"blk.2.{name}.weight"])
        assert sum(part.nbytes for part in parts) == sum(checkpoint.matrix_bytes(role, 2) for role in roles.split())
    biases = np.concatenate([checkpoint.vector(f"{part}_bias", 2) for part in "qkv"])
    assert np.array_equal(biases, tensors["blk.2.attn_qkv.bias"])
    checkpoint.close()


def test_gemma_norms_are_the_files_own(tiny_model):
    """GGUF has 1 + w in them already."""
    path = tiny_model("gemma3")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    assert np.array_equal(checkpoint.vector("mlp_post_norm", 1), tensors["blk.1.post_ffw_norm.weight"])
    assert math.isclose(checkpoint.spec.embedding_scale, 8.0)
    checkpoint.close()


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
