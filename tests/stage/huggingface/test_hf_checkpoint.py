"""Roles of a folder's tensors: each is read from where its family has it, in the form that it is stored in."""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardline.stage import CheckpointError, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.huggingface.folder import Folder
from shardline.stage.huggingface.formats import quantize
from shardline.stage.roles import EXPERT_ROLES

SINGLE = "model.safetensors"
PROMPT = tuple(range(3, 43))


def same(got, expected: np.ndarray, bits: int = 4) -> bool:
    """Whether a matrix is what the quantizer makes of those floats."""
    want = quantize([np.ascontiguousarray(expected)], expected.shape, bits)
    return all(np.array_equal(getattr(got, part), getattr(want, part)) for part in ("q", "scale", "minimum", "bits"))


@pytest.fixture
def opened(tiny_folder):
    """Opens folders of that kind, closed at the test's end."""
    made = []

    def make(*args, **kwargs):
        path, tensors = tiny_folder(*args, **kwargs)
        made.append(open_checkpoint(path))
        return made[-1], tensors

    yield make
    for checkpoint in made:
        checkpoint.close()


class TestPlaces:
    def test_llama(self, opened):
        checkpoint, tensors = opened(shards=3)
        for layer in range(3):
            prefix = f"model.layers.{layer}."
            for role in ("q", "k", "v", "o"):
                assert same(checkpoint.matrix(role, layer), tensors[f"{prefix}self_attn.{role}_proj.weight"])
            for role in ("gate", "up", "down"):
                assert same(checkpoint.matrix(role, layer), tensors[f"{prefix}mlp.{role}_proj.weight"])
            for role, name in {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}.items():
                assert np.array_equal(checkpoint.vector(role, layer), tensors[f"{prefix}{name}.weight"])
        assert same(checkpoint.matrix("embed", None), tensors["model.embed_tokens.weight"], 8)
        assert same(checkpoint.matrix("head", None), tensors["lm_head.weight"], 8)
        assert np.array_equal(checkpoint.vector("final_norm", None), tensors["model.norm.weight"])

    def test_fused(self, opened):
        checkpoint, tensors = opened("phi3")
        for layer in range(3):
            prefix = f"model.layers.{layer}."
            qkv, gate_up = (
                tensors[f"{prefix}{name}_proj.weight"] for name in ("self_attn.qkv", "mlp.gate_up")
            )  # [128, 64], [192, 64]
            for role, rows in {"q": slice(0, 64), "k": slice(64, 96), "v": slice(96, 128)}.items():
                assert same(checkpoint.matrix(role, layer), qkv[rows])
            assert same(checkpoint.matrix("gate", layer), gate_up[:96])
            assert same(checkpoint.matrix("up", layer), gate_up[96:])

    def test_experts(self, opened):
        checkpoint, tensors = opened("qwen2_moe")
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp."
            for expert in range(5):
                for part in ("gate", "up", "down"):
                    got = checkpoint.matrix(f"expert_{part}", layer, expert)
                    assert same(got, tensors[f"{prefix}experts.{expert}.{part}_proj.weight"])
            assert same(checkpoint.matrix("shared_up", layer), tensors[f"{prefix}shared_expert.up_proj.weight"])
            assert np.array_equal(checkpoint.vector("router", layer), tensors[f"{prefix}gate.weight"])
            gate = checkpoint.vector("shared_expert_gate", layer)
            assert np.array_equal(gate, tensors[f"{prefix}shared_expert_gate.weight"][0])
        assert same(checkpoint.matrix("up", 1), tensors["model.layers.1.mlp.up_proj.weight"])
        assert np.array_equal(checkpoint.vector("k_bias", 1), tensors["model.layers.1.self_attn.k_proj.bias"])

    def test_stacked_experts_with_inputs_first(self, opened):
        checkpoint, tensors = opened("gpt_oss")
        experts = "model.layers.1.mlp.experts."
        for expert in range(5):
            gate_up = tensors[f"{experts}gate_up_proj"][expert]
            assert same(checkpoint.matrix("expert_gate", 1, expert), gate_up[:, 0::2].T)
            assert same(checkpoint.matrix("expert_up", 1, expert), gate_up[:, 1::2].T)
            assert same(checkpoint.matrix("expert_down", 1, expert), tensors[f"{experts}down_proj"][expert].T)
        biases = tensors[f"{experts}gate_up_proj_bias"]
        assert np.array_equal(checkpoint.vector("expert_gate_bias", 1), biases[:, 0::2])
        assert np.array_equal(checkpoint.vector("expert_up_bias", 1), biases[:, 1::2])
        assert np.array_equal(checkpoint.vector("expert_down_bias", 1), tensors[f"{experts}down_proj_bias"])
        assert np.array_equal(checkpoint.vector("router_bias", 1), tensors["model.layers.1.mlp.router.bias"])
        assert np.array_equal(checkpoint.vector("sinks", 1), tensors["model.layers.1.self_attn.sinks"])

    def test_norms_of_one_plus_w(self, opened):
        checkpoint, tensors = opened("gemma3_with_images")
        prefix = "language_model.model.layers.2."
        for role, name in {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "q_norm": "self_attn.q_norm",
        }.items():
            got = checkpoint.vector(role, 2)
            assert got.dtype == np.float32
            assert np.array_equal(got, np.float32(1) + tensors[f"{prefix}{name}.weight"])
        assert np.array_equal(checkpoint.vector("final_norm", None), 1 + tensors["language_model.model.norm.weight"])
        assert checkpoint.spec.tied_embeddings
        assert same(checkpoint.matrix("head", None), tensors["language_model.model.embed_tokens.weight"], 8)

    @pytest.mark.parametrize("family", ["llama", "phi3", "qwen2_moe", "gpt_oss", "gemma3_with_images"])
    def test_bytes_and_shapes(self, opened, family):
        checkpoint, _ = opened(family)
        spec = checkpoint.spec
        for layer in (None, *range(spec.num_layers)):
            for role, shape in matrix_shapes(spec, layer).items():
                experts = range(spec.experts.num_experts) if role in EXPERT_ROLES else (None,)
                made = [checkpoint.matrix(role, layer, expert) for expert in experts]
                assert {matrix.shape for matrix in made} == {shape}
                assert checkpoint.matrix_bytes(role, layer) == sum(matrix.nbytes for matrix in made)
            for role, shape in vector_shapes(spec, layer).items():
                assert checkpoint.vector(role, layer).shape == shape
        assert checkpoint.metadata == {}
        assert checkpoint.text_folder == checkpoint.path

    @pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "gemma3_with_images"])
    def test_any_split_has_the_same_bits(self, tiny_folder, stage_row, family):
        path, _ = tiny_folder(family)
        rows = [stage_row(path, cuts, max_context=128) for cuts in ((), (1,), (1, 2))]
        whole, *others = [row.logits(row.plan({0: PROMPT}))[0] for row in rows]
        assert np.isfinite(whole).all()
        for other in others:
            assert np.array_equal(other, whole)


class TestReads:
    def test_only_what_is_asked_for(self, opened, monkeypatch):
        counted = []
        preadv = os.preadv

        def counting(descriptor, buffers, offset):
            count = preadv(descriptor, buffers, offset)
            counted.append(count)
            return count

        checkpoint, tensors = opened("gpt_oss")
        checkpoint.matrix_bytes("q", 1)
        checkpoint.matrix_bytes("embed", None)
        monkeypatch.setattr(os, "preadv", counting)
        for role in ("expert_gate", "expert_up", "expert_down"):
            counted.clear()
            checkpoint.matrix(role, 1, 3)
            part = "down_proj" if role == "expert_down" else "gate_up_proj"
            assert sum(counted) == tensors[f"model.layers.1.mlp.experts.{part}"][3].nbytes
        counted.clear()
        checkpoint.matrix_bytes("expert_up", 1)
        checkpoint.matrix_bytes("embed", None)
        assert not counted
        monkeypatch.undo()

        checkpoint, _ = opened("phi3")
        checkpoint.matrix_bytes("q", 0)
        monkeypatch.setattr(os, "preadv", counting)
        for role, rows in {"q": 64, "k": 32, "up": 96}.items():
            counted.clear()
            checkpoint.matrix(role, 0)
            assert sum(counted) == rows * 64 * 4

    def test_float_types(self, tiny_folder, tmp_path):
        """bfloat16, float16 and float32 files of the same numbers are the same model."""
        path, tensors = tiny_folder()
        rounded = {name: (values.view(np.uint32) >> 24 << 24).view(np.float32) for name, values in tensors.items()}
        dtypes = {
            "F32": lambda values: values,
            "F16": lambda values: values.astype(np.float16),
            "BF16": lambda values: (values.view(np.uint32) >> 16).astype(np.uint16),
        }
        found = []
        for dtype, cast in dtypes.items():
            folder = tmp_path / dtype
            shutil.copytree(path, folder)
            header, data = {}, b""
            for name, values in rounded.items():
                raw = cast(values).tobytes()
                header[name] = {
                    "dtype": dtype,
                    "shape": values.shape,
                    "data_offsets": [len(data), len(data) + len(raw)],
                }
                data += raw
            raw_header = json.dumps(header).encode()
            (folder / SINGLE).write_bytes(struct.pack("<Q", len(raw_header)) + raw_header + data)
            checkpoint = open_checkpoint(folder)
            found.append(
                (checkpoint.matrix("down", 1), checkpoint.vector("mlp_norm", 2), checkpoint.matrix("embed", None))
            )
            checkpoint.close()
        for down, norm, embed in found:
            assert same(down, rounded["model.layers.1.mlp.down_proj.weight"])
            assert np.array_equal(norm, rounded["model.layers.2.post_attention_layernorm.weight"])
            assert np.array_equal(embed.q, found[0][2].q)

    def test_it_says_that_floats_are_quantized(self, opened, caplog):
        checkpoint, _ = opened()
        checkpoint.vector("final_norm", None)
        assert not caplog.records
        for role in ("q", "k"):
            checkpoint.matrix(role, 0)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "quantized to 4 bits in the layers, to 8 in the embedding and the head" in caplog.text

    def test_fingerprint(self, tiny_folder, tmp_path):
        path, _ = tiny_folder(shards=2)
        shutil.copytree(path, tmp_path / "copy")

        def fingerprint(folder: Path) -> str:
            checkpoint = open_checkpoint(folder)
            try:
                return checkpoint.fingerprint
            finally:
                checkpoint.close()

        seen = {fingerprint(path)}
        assert seen == {fingerprint(tmp_path / "copy")}

        def other(tensors):
            tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(1.01)

        seen.add(fingerprint(tiny_folder(shards=2, edit=other)[0]))
        seen.add(fingerprint(tiny_folder(shards=2, keys={"rms_norm_eps": 2e-5})[0]))
        seen.add(fingerprint(tiny_folder()[0]))
        assert len(seen) == 4

    @pytest.mark.parametrize("change", ["dtype", "metadata", "length", "middle", "another training's shard"])
    def test_fingerprint_sees_a_change_of_one_shard(self, tiny_folder, tmp_path, change):
        path, _ = tiny_folder(shards=2)
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        shard = copy / "model-00002-of-00002.safetensors"
        raw = shard.read_bytes()
        tensors = load_file(shard)
        if change == "dtype":
            tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
            save_file(tensors, shard)
        elif change == "metadata":
            save_file(tensors, shard, {"format": "pt"})
        elif change == "length":
            # The header's own padding grows: same tensors, other offsets in the file.
            length = int.from_bytes(raw[:8], "little")
            shard.write_bytes((length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :])
        elif change == "middle":
            name = "model.layers.1.mlp.down_proj.weight"
            tensors[name][32, 48] += np.float32(2**-20)
            save_file(tensors, shard)
        else:
            # Same names, types and sizes in every header; only one file is from elsewhere.
            rng = np.random.default_rng(1)
            save_file({n: rng.permuted(t, axis=None) for n, t in tensors.items()}, shard)
            assert shard.stat().st_size == len(raw)
        found = [open_checkpoint(folder) for folder in (path, copy)]
        assert found[0].fingerprint != found[1].fingerprint
        for checkpoint in found:
            checkpoint.close()

    def test_fingerprint_reads_a_kilobyte_a_tensor_and_no_dates(self, tiny_folder, tmp_path, monkeypatch):
        path, tensors = tiny_folder(shards=2)
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        for file in copy.iterdir():
            os.utime(file, (1, 1))
        checkpoint, same = open_checkpoint(path), open_checkpoint(copy)
        assert checkpoint.fingerprint == same.fingerprint
        same.close()
        checkpoint.close()
        read = []
        whole = Folder.read
        monkeypatch.setattr(Folder, "read", lambda folder, *where: read.append(where) or whole(folder, *where))
        again = open_checkpoint(path)
        assert read == []
        assert again.fingerprint == checkpoint.fingerprint
        again.close()
        assert sorted(name for name, _, _ in read) == sorted(tensors)
        assert all(nbytes <= 1024 for _, _, nbytes in read)
        assert sum(t.nbytes for t in tensors.values()) > 3 * sum(nbytes for _, _, nbytes in read)


class TestHead:
    def without_head(self, tensors):
        del tensors["lm_head.weight"]

    def equal_head(self, tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def nearly_equal_head(self, tensors):
        self.equal_head(tensors)
        tensors["lm_head.weight"][-1, -1] += 1

    def test_tied(self, opened, caplog):
        for edit in (self.without_head, self.equal_head):
            checkpoint, tensors = opened(keys={"tie_word_embeddings": True}, edit=edit)
            assert checkpoint.spec.tied_embeddings
            assert same(checkpoint.matrix("head", None), tensors["model.embed_tokens.weight"], 8)
            assert checkpoint.matrix_bytes("head", None) == checkpoint.matrix_bytes("embed", None)
        assert "another matrix" not in caplog.text

    @pytest.mark.parametrize("piece", [1 << 22, 1000])
    def test_said_to_be_tied_but_another(self, opened, caplog, monkeypatch, piece):
        monkeypatch.setattr("shardline.stage.huggingface.checkpoint._PIECE", piece)
        checkpoint, tensors = opened(keys={"tie_word_embeddings": True}, edit=self.nearly_equal_head)
        assert not checkpoint.spec.tied_embeddings
        assert same(checkpoint.matrix("head", None), tensors["lm_head.weight"], 8)
        assert "lm_head.weight is another matrix, and is used" in caplog.text

    @pytest.mark.parametrize("keys", [{"tie_word_embeddings": False}, {"tie_word_embeddings": None}])
    def test_untied(self, opened, keys):
        checkpoint, _ = opened(keys=keys, edit=self.equal_head)
        assert not checkpoint.spec.tied_embeddings
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: is missing.*set tie_word_embeddings to true"):
            opened(keys=keys, edit=self.without_head)


def replaced(name, change):
    def edit(tensors):
        tensors[name] = change(tensors[name])

    return edit


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


class TestWrongTensors:
    @pytest.mark.parametrize(
        ("edit", "says"),
        [
            (lambda tensors: tensors.pop(UP), f"tensor {UP}: is missing"),
            (lambda tensors: tensors.pop(NORM), f"tensor {NORM}: is missing"),
            (lambda tensors: tensors.pop("model.embed_tokens.weight"), "tensor model.embed_tokens.weight: is missing"),
            (lambda tensors: tensors.update(extra=np.ones(3, np.float32)), "tensor extra: is not part of a Llama"),
            (
                lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": tensors[NORM]}),
                "tensor model.layers.3.input_layernorm.weight: is not part of",
            ),
            (
                replaced(UP, lambda values: values[:, :32]),
                f"tensor {UP}: is a matrix [96, 32]; config.json says [96, 64]",
            ),
            (replaced(UP, lambda values: values[None]), f"tensor {UP}: has shape [1, 96, 64], not a matrix's"),
            (replaced(NORM, lambda values: values[:8]), f"tensor {NORM}: has shape [8]; config.json says [64]"),
            (replaced(NORM, lambda values: values[None]), f"tensor {NORM}: has shape [1, 64]"),
            (replaced(UP, lambda values: values.astype(np.float64)), f"tensor {UP}: the type F64 is not supported"),
            (replaced(UP, lambda values: values.astype(np.int8)), f"tensor {UP}: the type I8 is not supported"),
            (replaced(NORM, lambda values: values.astype(np.int32)), f"tensor {NORM}: the type I32 is not supported"),
        ],
    )
    def test_headers(self, opened, edit, says):
        def use():
            checkpoint, _ = opened(edit=edit)
            checkpoint.matrix_bytes("q", 1)

        with pytest.raises(CheckpointError) as caught:
            use()
        assert says in str(caught.value)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_values(self, opened, value):
        def poison(values):
            values.flat[-1] = value
            return values

        checkpoint, _ = opened(edit=replaced(UP, poison))
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: .*finite"):
            checkpoint.matrix("up", 1)
        checkpoint, _ = opened(edit=replaced(NORM, poison))
        with pytest.raises(CheckpointError, match=r"input_layernorm\.weight: an element is not a finite number"):
            checkpoint.vector("attention_norm", 1)

    def test_input_channels(self, opened):
        def narrower(tensors):
            for name in list(tensors):
                if "mlp" in name:
                    tensors[name] = tensors[name][..., :80] if "down" in name else tensors[name][:80]

        checkpoint, _ = opened(keys={"intermediate_size": 80}, edit=narrower)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight: has 80 input channels.*multiple of 32"):
            checkpoint.matrix_bytes("q", 0)

    def test_what_no_class_uses(self, opened):
        def edit(tensors):
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

        opened(edit=edit)
