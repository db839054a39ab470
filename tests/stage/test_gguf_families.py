"""What each family's files say of their model, and where its matrices lie in them."""

from __future__ import annotations

import math

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from shardline.kernels import RouterRule
from shardline.stage import CheckpointError, ModelSpec, open_checkpoint, rope_scaling


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
