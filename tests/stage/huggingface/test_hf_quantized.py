"""Folders whose modules are quantized: packed here from the published layouts, by other code than what reads them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from shardline.stage import CheckpointError, open_checkpoint
from shardline.stage.huggingface.formats import quantize

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
PROMPT = np.random.default_rng(3).integers(0, 101, 70).tolist()


class Integers:
    """Random 4-bit integers, zeros and scales of a matrix [N, K]; `weights` is what they mean.

    in_order: Channel i is in group i // 32; else in any.
    """

    def __init__(self, n: int, k: int, seed: int, *, in_order: bool = True) -> None:
        rng = np.random.default_rng(seed)
        self.q = rng.integers(0, 16, (n, k))
        self.zeros = rng.integers(0, 16, (n, k // GROUP))
        self.scales = rng.uniform(0.01, 0.03, (n, k // GROUP)).astype(np.float16)
        self.groups = np.arange(k, dtype=np.int32) // GROUP
        if not in_order:
            rng.shuffle(self.groups)
        self.weights = self.scales[:, self.groups].astype(np.float32) * (self.q - self.zeros[:, self.groups])


def words(values: np.ndarray, axis: int, order=range(8)) -> np.ndarray:
    """Eight 4-bit integers along an axis to one int32, the first of `order` in the lowest bits."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1)
    values = values.reshape(*values.shape[:-1], -1, 8)
    packed = np.zeros(values.shape[:-1], np.uint32)
    for place, channel in enumerate(order):
        packed |= values[..., channel] << np.uint32(4 * place)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def gptq(module: str, made: Integers, less: int = 1) -> dict[str, np.ndarray]:
    return {
        f"{module}.qweight": words(made.q.T, 0),
        f"{module}.qzeros": words((made.zeros.T - less) % 16, 1),
        f"{module}.scales": np.ascontiguousarray(made.scales.T),
        f"{module}.g_idx": made.groups,
    }


def gptq_v2(module: str, made: Integers) -> dict[str, np.ndarray]:
    return gptq(module, made, less=0)


def awq(module: str, made: Integers) -> dict[str, np.ndarray]:
    return {
        f"{module}.qweight": words(made.q.T, 1, AWQ_ORDER),
        f"{module}.qzeros": words(made.zeros.T, 1, AWQ_ORDER),
        f"{module}.scales": np.ascontiguousarray(made.scales.T),
    }


def compressed(module: str, made: Integers) -> dict[str, np.ndarray]:
    return {
        f"{module}.weight_packed": words(made.q, 1),
        f"{module}.weight_scale": made.scales,
        f"{module}.weight_shape": np.array(made.q.shape, np.int64),
        f"{module}.weight_zero_point": words(made.zeros, 0),
    }


def compressed_reordered(module: str, made: Integers) -> dict[str, np.ndarray]:
    return compressed(module, made) | {f"{module}.weight_g_idx": made.groups}


def compressed_config(**weights: object) -> dict[str, object]:
    weights |= {"num_bits": 4, "group_size": GROUP, "symmetric": False, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*layers.2.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FORMATS = {
    "gptq": (gptq, GPTQ),
    "gptq, act-order": (gptq, GPTQ | {"desc_act": True}),
    "gptq v2, act-order": (gptq_v2, GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "compressed-tensors": (compressed, compressed_config()),
    "compressed-tensors, actorder": (compressed_reordered, compressed_config(actorder="group")),
}
REORDERED = tuple(form for form in FORMATS if "order" in form)


class Packer:
    """An `edit` of tiny folders: quantizes every linear module of the layers 0 and 1, and leaves what it made."""

    def __init__(
        self,
        form: str,
        *,
        floats: tuple[str, ...] = ("mlp.gate.weight", "shared_expert_gate.weight"),
        before: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    ) -> None:
        self.pack, self.config = FORMATS[form]
        self.in_order = form not in REORDERED
        self.floats, self.before = floats, before
        self.made: dict[str, np.ndarray] = {}

    def __call__(self, tensors: dict[str, np.ndarray]) -> None:
        self.before(tensors)
        for name in list(tensors):
            if (
                "layers" in name
                and "layers.2" not in name
                and tensors[name].ndim == 2
                and not name.endswith(self.floats)
            ):
                values = tensors.pop(name)
                made = Integers(*values.shape, seed=len(self.made), in_order=self.in_order)
                self.made[name] = made.weights
                tensors.update(self.pack(name.removesuffix(".weight"), made))


@pytest.fixture
def opened(tiny_folder):
    """Opens folders of that kind, closed at the test's end."""
    made = []

    def make(family, packer, edit=None, **keys):
        def change(tensors):
            packer(tensors)
            if edit:
                edit(tensors)

        path, tensors = tiny_folder(family, edit=change, keys={"quantization_config": packer.config, **keys})
        made.append(open_checkpoint(path))
        return made[-1], tensors

    yield make
    for checkpoint in made:
        checkpoint.close()


# What the float64 reference knows them as.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate.": "ffn_gate_inp.",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def reference_name(name: str) -> str:
    name = re.sub(r"mlp\.experts\.(\d+)\.(\w+)_proj", r"ffn_\2.\1", name)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def meant_logits(reference, family: str, packer: Packer, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """In float64, of what the packed integers mean; what is left as floats counts as the quantizer makes it."""
    meant = {name: values for name, values in tensors.items() if name.endswith((".weight", ".bias"))}
    for name, values in meant.items():
        if values.ndim == 2 and not name.endswith(packer.floats):
            meant[name] = quantize([values], values.shape, 8).dequantize()
    meant |= packer.made
    keys = {
        "embedding_length": 64,
        "block_count": 3,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "rope.freq_base": 10000.0,
        "context_length": 512,
        "expert_used_count": 2,
    }
    # Of those that turn a head's halves, as folders have them.
    architecture = {"llama": "qwen2", "qwen2_moe": "qwen2moe"}[family]
    named = {reference_name(name): values.squeeze() for name, values in meant.items()}
    return reference.of(architecture, keys, named).logits(PROMPT)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_logits_are_those_of_the_weights(tiny_folder, reference, stage_row, form, family):
    packer = Packer(form)
    path, tensors = tiny_folder(family, edit=packer, keys={"quantization_config": packer.config})
    expected = meant_logits(reference, family, packer, tensors)
    row = stage_row(path)
    whole, _ = row.logits(row.plan({0: PROMPT}))
    p, q = (values - np.log(np.exp(values).sum(-1, keepdims=True)) for values in (expected, whole.astype(np.float64)))
    assert (np.exp(p) * (p - q)).sum(-1).max() < 1e-6
    assert np.abs(whole - expected).max() <= 1e-4 * np.abs(expected).max()
    for cuts in ((2,), (1, 2)):
        row = stage_row(path, cuts)
        assert np.array_equal(row.logits(row.plan({0: PROMPT}))[0], whole), cuts


@pytest.mark.parametrize("form", FORMATS)
class TestForms:
    def test_dense(self, opened, form):
        packer = Packer(form)
        checkpoint, tensors = opened("llama", packer)
        for layer in (0, 1):
            for role, module in {"q": "self_attn.q", "o": "self_attn.o", "up": "mlp.up", "down": "mlp.down"}.items():
                got = checkpoint.matrix(role, layer)
                assert got.bits == 4
                assert (got.input_order is None) == packer.in_order
                assert np.array_equal(got.dequantize(), packer.made[f"model.layers.{layer}.{module}_proj.weight"])
                assert checkpoint.matrix_bytes(role, layer) == got.nbytes
        # What was left as floats is kept at 8 bits.
        for role, layer, name in (("up", 2, "model.layers.2.mlp.up_proj.weight"), ("head", None, "lm_head.weight")):
            got, want = checkpoint.matrix(role, layer), quantize([tensors[name]], tensors[name].shape, 8)
            assert got.bits == 8
            assert np.array_equal(got.q, want.q)
            assert checkpoint.matrix_bytes(role, layer) == got.nbytes

    def test_fused(self, opened, form):
        packer = Packer(form)
        checkpoint, _ = opened("phi3", packer)
        qkv = packer.made["model.layers.1.self_attn.qkv_proj.weight"]
        gate_up = packer.made["model.layers.1.mlp.gate_up_proj.weight"]
        for role, expected in {"q": qkv[:64], "k": qkv[64:96], "v": qkv[96:], "up": gate_up[96:]}.items():
            got = checkpoint.matrix(role, 1)
            assert np.array_equal(got.dequantize(), expected)
            assert checkpoint.matrix_bytes(role, 1) == got.nbytes

    def test_experts(self, opened, form):
        packer = Packer(form)
        checkpoint, tensors = opened("qwen2_moe", packer)
        prefix = "model.layers.0.mlp."
        for expert in range(5):
            for part in ("gate", "up", "down"):
                got = checkpoint.matrix(f"expert_{part}", 0, expert).dequantize()
                assert np.array_equal(got, packer.made[f"{prefix}experts.{expert}.{part}_proj.weight"])
        assert checkpoint.matrix("expert_up", 2, 4).bits == 8
        assert np.array_equal(checkpoint.vector("router", 0), tensors[f"{prefix}gate.weight"])
        nbytes = sum(checkpoint.matrix("expert_up", 0, expert).nbytes for expert in range(5))
        assert checkpoint.matrix_bytes("expert_up", 0) == nbytes

    def test_half_a_module(self, opened, form):
        packer = Packer(form)
        name = packer.pack("model.layers.1.mlp.up_proj", Integers(96, 64, 0))
        scale = next(tensor for tensor in name if "scale" in tensor)
        with pytest.raises(CheckpointError, match=rf"tensor {scale}: is missing, but model\.layers\.1\.mlp"):
            opened("llama", packer, lambda tensors: tensors.pop(scale))

    def test_two_forms_of_one_module(self, opened, form):
        def edit(tensors):
            tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)

        with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight: is there, and so is model\.layers\.0\.mlp"):
            opened("llama", Packer(form), edit)

    def test_another_shape(self, opened, form):
        packer = Packer(form)

        def edit(tensors):
            tensors.update(packer.pack("model.layers.0.mlp.up_proj", Integers(64, 64, 0)))

        checkpoint, _ = opened("llama", packer, edit)
        with pytest.raises(
            CheckpointError, match=r"up_proj\.\w+: is a matrix \[64, 64\]; config\.json says \[96, 64\]"
        ):
            checkpoint.matrix_bytes("q", 0)


class TestBesides:
    def test_a_bias_of_zeros_that_the_model_has_not(self, opened):
        def edit(tensors, value=0.0):
            tensors["model.layers.0.mlp.up_proj.bias"] = np.full(96, value, np.float16)

        checkpoint, _ = opened("llama", Packer("gptq"), edit)
        checkpoint.matrix("up", 0)
        checkpoint, _ = opened("llama", Packer("gptq"), lambda tensors: edit(tensors, 1e-7))
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.bias: is not zero, but LlamaForCausalLM has no bias"):
            checkpoint.matrix("up", 0)

    def test_a_bias_that_the_model_has(self, opened):
        packer = Packer("gptq")
        checkpoint, tensors = opened("qwen2_moe", packer)
        got = checkpoint.vector("q_bias", 0)
        assert np.array_equal(got, tensors["model.layers.0.self_attn.q_proj.bias"])

    def test_a_router_that_is_quantized_too(self, opened):
        def eight_experts(tensors):
            for name in list(tensors):
                if name.endswith("mlp.gate.weight"):
                    tensors[name] = np.ones((8, 64), np.float32)
                for expert in (5, 6, 7) if "experts.0." in name else ():
                    tensors[name.replace("experts.0.", f"experts.{expert}.")] = tensors[name]

        packer = Packer("awq", floats=("shared_expert_gate.weight",), before=eight_experts)
        checkpoint, _ = opened("qwen2_moe", packer, num_experts=8)
        assert np.array_equal(checkpoint.vector("router", 0), packer.made["model.layers.0.mlp.gate.weight"])

    def test_what_the_config_says_is_not_quantized(self, opened):
        packer = Packer("compressed-tensors")

        def edit(tensors):
            del tensors["model.layers.2.mlp.up_proj.weight"]
            tensors.update(compressed("model.layers.2.mlp.up_proj", Integers(96, 64, 0)))

        with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight_packed: is quantized, but config"):
            opened("llama", packer, edit)

    def test_no_config(self, tiny_folder):
        path, _ = tiny_folder(edit=Packer("gptq"))
        with pytest.raises(
            CheckpointError, match=r"q_proj\.weight: is missing; .*q_proj\.qweight, .*no quantization_config"
        ):
            open_checkpoint(path)


class TestMxfp4:
    CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}  # noqa: RUF012
    NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

    def made(self, tensors):
        """Replaces the experts' matrices of all layers; what they mean, [experts, N, K]."""
        rng, weights = np.random.default_rng(0), {}
        for name in list(tensors):
            if not name.endswith(("gate_up_proj", "down_proj")):
                continue
            experts, k, n = tensors.pop(name).shape
            codes = rng.integers(0, 16, (experts, n, k // 32, 16, 2), np.uint8)
            scales = rng.integers(120, 130, (experts, n, k // 32), np.uint8)
            tensors[f"{name}_blocks"] = codes[..., 0] | codes[..., 1] << 4
            tensors[f"{name}_scales"] = scales
            powers = np.exp2(scales.astype(np.float32) - 127)
            weights[name] = (self.NUMBERS[codes].reshape(experts, n, -1, 32) * powers[..., None]).reshape(experts, n, k)
        return weights

    def test_experts(self, tiny_folder):
        weights = {}
        path, _ = tiny_folder(
            "gpt_oss",
            edit=lambda tensors: weights.update(self.made(tensors)),
            keys={"quantization_config": self.CONFIG},
        )
        checkpoint = open_checkpoint(path)
        gate_up, down = (weights[f"model.layers.2.mlp.experts.{part}_proj"] for part in ("gate_up", "down"))
        for expert in range(5):
            for role, expected in {
                "expert_gate": gate_up[expert, 0::2],
                "expert_up": gate_up[expert, 1::2],
                "expert_down": down[expert],
            }.items():
                assert np.array_equal(checkpoint.matrix(role, 2, expert).dequantize(), expected)
        nbytes = sum(checkpoint.matrix("expert_up", 2, expert).nbytes for expert in range(5))
        assert checkpoint.matrix_bytes("expert_up", 2) == nbytes
        assert checkpoint.matrix("q", 2).bits == 8
        checkpoint.close()

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][:4]}), "has no expert 4"),
            (lambda t, name: t.update({f"{name}_blocks": t[f"{name}_blocks"][:, :8]}), r"is a matrix \[8, 96\]"),
            (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"].astype(np.int8)}), "is of the type I8"),
            (lambda t, name: t.pop(f"{name}_scales"), r"_scales: is missing, but"),
            (lambda t, name: t.update({name: np.ones((5, 96, 64), np.float32)}), "is there, and so is"),
        ],
    )
    def test_wrong_tensors(self, tiny_folder, change, says):
        def edit(tensors):
            self.made(tensors)
            change(tensors, "model.layers.0.mlp.experts.down_proj")

        def use():
            path, _ = tiny_folder("gpt_oss", edit=edit, keys={"quantization_config": self.CONFIG})
            checkpoint = open_checkpoint(path)
            checkpoint.matrix_bytes("q", 0)

        with pytest.raises(CheckpointError, match=rf"mlp\.experts\.down_proj.*{says}"):
            use()
