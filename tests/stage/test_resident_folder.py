"""Folders of per-layer shards: the same bits as what they were made from, and clear errors for what is damaged."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from shardline.kernels import GroupedMatrix
from shardline.stage import Checkpoint, CheckpointError, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.resident.checkpoint import ResidentCheckpoint, check_files
from shardline.stage.resident.layout import MANIFEST, METADATA
from shardline.stage.resident.manifest import Manifest, encode
from shardline.stage.resident.writer import shard_bytes, write_shard
from shardline.stage.roles import EXPERT_ROLES

Writer = Callable[[Checkpoint], Path]


def resident(checkpoint: Checkpoint, folder: Path) -> Path:
    folder.mkdir()
    shards = {layer: write_shard(folder, checkpoint, layer) for layer in (None, *range(checkpoint.spec.num_layers))}
    (folder / MANIFEST).write_bytes(encode(Manifest("shardline", "tiny", checkpoint.spec, {}, shards)))
    return folder


def assert_same(actual: GroupedMatrix, expected: GroupedMatrix) -> None:
    assert (actual.bits, actual.group_size) == (expected.bits, expected.group_size)
    assert (actual.input_order is None) == (expected.input_order is None)
    for name in ("q", "scale", "minimum", "input_order"):
        left, right = getattr(actual, name), getattr(expected, name)
        if right is not None:
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)


def assert_same_model(actual: Checkpoint, expected: Checkpoint) -> None:
    spec = expected.spec
    assert actual.spec == spec
    for layer in (None, *range(spec.num_layers)):
        for role in matrix_shapes(spec, layer):
            assert actual.matrix_bytes(role, layer) == expected.matrix_bytes(role, layer)
            experts = range(spec.experts.num_experts) if spec.experts and role in EXPERT_ROLES else (None,)
            for expert in experts:
                assert_same(actual.matrix(role, layer, expert), expected.matrix(role, layer, expert))
        for role in vector_shapes(spec, layer):
            np.testing.assert_array_equal(actual.vector(role, layer), expected.vector(role, layer))
    assert_same(actual.matrix("head", None), expected.matrix("head", None))


@pytest.fixture(scope="module")
def folders() -> Any:
    """The fixtures of the tests of Hugging Face folders."""
    path = Path(__file__).parent / "huggingface" / "conftest.py"
    spec = importlib.util.spec_from_file_location("shardline_tests_folders", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GGUF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kinds": (Kind.Q4_1, Kind.Q8_0, Kind.Q5_0), "rope_factors": True},
    "llama in K-quants": {"kinds": (Kind.Q4_K, Kind.Q6_K, Kind.Q5_K), "hidden": 256, "ffn": 256, "heads": 16},
    "qwen2moe": {"kinds": (Kind.Q4_0, Kind.Q8_0)},
    "gpt-oss": {"kinds": (Kind.MXFP4, Kind.Q8_0), "layers": 4, "keys": {"gpt-oss.attention.sliding_window": 16}},
    "glm4moe": {"kinds": (Kind.Q4_1,)},
    "gemma3": {"kinds": (Kind.Q4_0,)},
    "phi3": {"long_factors": True, "keys": {"phi3.rope.scaling.original_context_length": 64}},
}


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_model_stays_the_same(tiny_model, stage_row, tmp_path, name):
    path = tiny_model(name.split()[0], **GGUF_MODELS[name])
    source = open_checkpoint(path)
    out = resident(source, tmp_path / "out")
    made = open_checkpoint(out)
    assert isinstance(made, ResidentCheckpoint)
    assert_same_model(made, source)
    source.close()
    made.close()
    tokens = {0: list(range(2, 40)), 1: [3, 5, 7]}
    wholes = [stage_row(each) for each in (path, out)]
    expected, actual = (row.logits(row.plan(tokens))[0] for row in wholes)
    split = stage_row(out, [1])
    assert np.array_equal(actual, expected)
    assert np.array_equal(split.logits(split.plan(tokens))[0], expected)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "gpt_oss", "gemma3_with_images"])
def test_a_folder_of_floats_stays_the_same(folders, tmp_path, family):
    path, _ = folders.TinyFolders(tmp_path)(family)
    source = open_checkpoint(path)
    made = open_checkpoint(resident(source, tmp_path / "out"))
    assert_same_model(made, source)
    source.close()
    made.close()


class Changed:
    """A checkpoint some of whose matrices are others."""

    def __init__(self, checkpoint: Checkpoint, change: Callable[[str, int | None, GroupedMatrix], GroupedMatrix]):
        self._checkpoint, self._change = checkpoint, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        return self._change(role, expert, self._checkpoint.matrix(role, layer, expert))

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        experts = range(self.spec.experts.num_experts) if role in EXPERT_ROLES else (None,)
        return sum(self.matrix(role, layer, expert).nbytes for expert in experts)


def test_orders_of_columns_are_kept(tiny_model, tmp_path):
    """As act-order has them, also where every expert has its own."""

    def ordered(role, expert, matrix):
        if role not in ("q", "k", "down", "expert_gate", "expert_down"):
            return matrix
        order = np.random.default_rng([len(role), expert or 0]).permutation(matrix.shape[1])
        return replace(matrix, input_order=order.astype(np.int32))

    source = Changed(open_checkpoint(tiny_model("qwen3moe")), ordered)
    made = open_checkpoint(resident(source, tmp_path / "out"))
    assert made.matrix("expert_down", 1, 3).input_order is not None
    assert_same_model(made, source)


def test_experts_of_a_layer_are_slices_of_one_tensor(tiny_model, tmp_path, experts):
    source = open_checkpoint(tiny_model("qwen3moe", experts=experts(count=5)))
    out = resident(source, tmp_path / "out")
    tensors = load_file(out / "layer-00001.safetensors")
    for expert in range(5):
        np.testing.assert_array_equal(tensors["expert_up.q"][expert], source.matrix("expert_up", 1, expert).q)
        np.testing.assert_array_equal(tensors["expert_up.scale"][expert], source.matrix("expert_up", 1, expert).scale)


def test_experts_that_differ_in_form_lie_apart(tiny_model, tmp_path, experts):
    def other(role, expert, matrix):
        if role == "expert_up" and expert == 3:
            return replace(matrix, scale=matrix.scale.astype(np.float32), minimum=matrix.minimum.astype(np.float32))
        return matrix

    source = Changed(open_checkpoint(tiny_model("qwen3moe", experts=experts(count=5))), other)
    made = open_checkpoint(resident(source, tmp_path / "out"))
    assert_same_model(made, source)
    assert "expert_up.3.q" in load_file(tmp_path / "out" / "layer-00000.safetensors")
    assert made.matrix("expert_up", 0, 3).scale.dtype == np.float32
    assert made.matrix("expert_up", 0, 2).scale.dtype == np.float16


def test_floats_can_have_another_form(folders, tmp_path):
    from shardline.stage.huggingface.checkpoint import HuggingFaceCheckpoint

    path, _ = folders.TinyFolders(tmp_path)("llama")
    source = HuggingFaceCheckpoint(path, bits=8, group_size=16)
    made = open_checkpoint(resident(source, tmp_path / "out"))
    assert_same_model(made, source)
    matrix = made.matrix("gate", 0)
    assert (matrix.bits, matrix.group_size) == (8, 16)


def test_a_stage_opens_only_its_own_files(tiny_model, stage_row, tmp_path):
    source = open_checkpoint(tiny_model(layers=3))
    out = resident(source, tmp_path / "out")
    for name in ("ends", "layer-00000", "layer-00002"):
        (out / f"{name}.safetensors").unlink()
    made = open_checkpoint(out)
    made.matrix("q", 1)
    made.vector("mlp_norm", 1)
    assert made.fingerprint
    assert sum(made.matrix_bytes(role, 2) for role in matrix_shapes(made.spec, 2)) > 0
    with pytest.raises(CheckpointError, match=r"layer-00002\.safetensors: file: cannot be opened"):
        made.matrix("q", 2)


def test_the_size_is_foreseen(tiny_model, tmp_path):
    source = open_checkpoint(tiny_model("qwen3moe"))
    out = resident(source, tmp_path / "out")
    for layer, name in ((None, "ends"), (1, "layer-00001")):
        assert os.path.getsize(out / f"{name}.safetensors") == shard_bytes(source, layer)


def test_one_expert_is_in_memory_at_a_time(tiny_model, tmp_path, experts):
    path = tiny_model("qwen3moe", layers=1, hidden=256, ffn=256, experts=experts(count=32, ffn=256, shared=0))
    source = open_checkpoint(path)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    write_shard(tmp_path / "out", source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = source.matrix("expert_gate", 0, 0).nbytes
    # Reading a block format takes some copies of a piece, hashing a file a piece of it.
    assert peak < 16 * one + (4 << 20) < 3 * 32 * one + (4 << 20)


def test_fingerprints_tell_models_apart(tiny_model, tmp_path):
    one, same, other = (open_checkpoint(tiny_model(seed=seed)) for seed in (1, 1, 2))
    found = [
        open_checkpoint(resident(each, tmp_path / f"{n}")).fingerprint for n, each in enumerate((one, same, other))
    ]
    assert found[0] == found[1] != found[2]


class TestDamage:
    @pytest.fixture
    def folder(self, tiny_model, experts, tmp_path):
        source = open_checkpoint(tiny_model("qwen3moe", layers=2, experts=experts(count=3, shared=0)))
        return resident(source, tmp_path / "out")

    @pytest.mark.parametrize(
        ("where", "value", "says"),
        [
            (("format",), 2, "format: 2 is not 1"),
            (("format",), True, "format: True is not 1"),
            (("more",), 1, "file.more: is unknown"),
            (("model", "num_layers"), 3, "layers: has 2 entries"),
            (("model", "num_layers"), True, "not an integer"),
            (("model", "hidden_size"), 1 << 40, "not an integer from 0"),
            (("model", "hidden_size"), 0, "hidden_size: is 0"),
            (("model", "num_kv_heads"), 3, "does not divide"),
            (("model", "norm_eps"), 0, "not above zero"),
            (("model", "qk_norm"), "rows", "not null, head or row"),
            (("model", "activation"), "relu", "not one of silu"),
            (("model", "layers", 0, "rope"), 7, "layers[0].rope: is 7"),
            (("model", "layers", 0, "experts"), 1, "not true or false"),
            (("model", "ropes", 0, "rotary_dim"), 15, "no even part"),
            (("model", "ropes", 0, "factors"), [1.0], "are not 8 numbers"),
            (("model", "experts", "num_experts"), 1 << 20, "is not 1 to 4096"),
            (("model", "experts", "rule", "experts_per_token"), 9, "experts_per_token"),
            (("model", "experts", "rule", "scoring"), "max", "not one of softmax"),
            (("model", "unheard_of"), 1, "is unknown"),
            (("text",), {"../../etc/passwd": {}}, "not the name of a file of text"),
            (("text",), {"chat_templates/../x": {}}, "not the name of a file of text"),
            (("text",), {"/etc/passwd": {}}, "not the name of a file of text"),
            (("shards", "../ends.safetensors"), {}, "is unknown"),
            (("shards", "ends.safetensors", "bytes"), -1, "not a file's size"),
            (("shards", "ends.safetensors", "sha256"), "0" * 63, "not 64 hexadecimal"),
            (("shards", "layer-00000.safetensors", "matrices", "q"), [], "not a list of 1"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "bits"), 5, "4 and 8 are known"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "bits"), 4.0, "of the wrong type"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "group_size"), 128, "does not divide"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "scale"), "F64", "F16 and F32 are known"),
            (("shards", "ends.safetensors", "bytes"), 1000, "json says 1000"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "bits"), 8, "tensor q.q: is U8"),
            (("shards", "layer-00000.safetensors", "matrices", "q", 0, "ordered"), True, "tensor q.order: is missing"),
            (("model", "qk_norm"), None, "is not one that shardline.json knows"),
        ],
    )
    def test_what_shardline_json_says(self, folder, where, value, says):
        data = json.loads((folder / MANIFEST).read_bytes())
        place = data
        for key in where[:-1]:
            place = place[key]
        place[where[-1]] = value
        (folder / MANIFEST).write_text(json.dumps(data))
        with pytest.raises(CheckpointError) as caught:
            read_a_little(folder)
        assert says in str(caught.value)
        assert str(folder) in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "edit", "says"),
        [
            ("q.scale", lambda values: values * np.float16(np.nan), "q.scale: an element is not a finite"),
            ("attention_norm", lambda values: values * np.float32(np.inf), "attention_norm: an element is not"),
        ],
    )
    def test_what_is_no_number(self, folder, name, edit, says):
        self.edited(folder, name, edit)
        with pytest.raises(CheckpointError, match=says):
            read_a_little(folder)

    def test_an_order_that_is_none(self, tiny_model, tmp_path):
        def twice(role, expert, matrix):
            return replace(matrix, input_order=np.arange(matrix.shape[1], dtype=np.int32)) if role == "q" else matrix

        folder = resident(Changed(open_checkpoint(tiny_model(layers=2)), twice), tmp_path / "out")
        open_checkpoint(folder).matrix("q", 0)
        for order in (np.zeros(64), np.arange(64) + 1, np.arange(64) - 1):
            self.edited(folder, "q.order", lambda values, order=order: order.astype(np.int32))
            with pytest.raises(CheckpointError, match=r"q\.order: does not name every input channel once"):
                open_checkpoint(folder).matrix("q", 0)

    def edited(self, folder, name, edit):
        path = folder / "layer-00000.safetensors"
        tensors = load_file(path)
        tensors[name] = edit(tensors[name])
        save_file(tensors, path)
        data = json.loads((folder / MANIFEST).read_bytes())
        data["shards"][path.name]["bytes"] = os.path.getsize(path)
        (folder / MANIFEST).write_text(json.dumps(data))

    def test_a_shard_that_is_cut_or_changed(self, folder):
        assert len(list(check_files(folder))) == 3
        path = folder / "layer-00001.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        # One flipped bit is seen by its hash alone.
        read_a_little(folder)
        with pytest.raises(CheckpointError, match=r"layer-00001.*is another than was written"):
            list(check_files(folder))
        path.write_bytes(raw[:-1])
        with pytest.raises(CheckpointError, match="says"):
            read_a_little(folder)

    def test_files_that_are_none(self, folder):
        path = folder / "layer-00000.safetensors"
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_a_little(folder)
        path.unlink()
        path.symlink_to(path)
        with pytest.raises(CheckpointError, match="cannot be opened"):
            read_a_little(folder)
        with pytest.raises(CheckpointError, match="give the folder"):
            open_checkpoint(folder / MANIFEST)
        (folder / MANIFEST).unlink()
        (folder / MANIFEST).mkdir()
        with pytest.raises(CheckpointError, match="not a regular file"):
            open_checkpoint(folder)

    def test_metadata_that_is_damaged(self, folder):
        data = json.loads((folder / MANIFEST).read_bytes())
        data["text"][METADATA] = {"bytes": 1, "sha256": "0" * 64}
        (folder / MANIFEST).write_text(json.dumps(data))
        checkpoint = open_checkpoint(folder)
        assert checkpoint.text_folder is None
        with pytest.raises(CheckpointError, match=r"metadata\.json"):
            checkpoint.metadata  # noqa: B018
        (folder / METADATA).write_text("[]")
        with pytest.raises(CheckpointError, match="not a JSON object"):
            checkpoint.metadata  # noqa: B018

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize(
        ("name", "limit", "count"), [(MANIFEST, 1 << 20, 1200), ("layer-00000.safetensors", 3000, 800)]
    )
    def test_mutations(self, folder, name, limit, count):
        """Each is refused with an error of ours, or is still a model; none takes memory by what it says."""
        good = (folder / name).read_bytes()
        draw = random.Random(name)
        refused = 0
        peak = 0
        for number in range(count):
            # It makes all else slow.
            if number == 0:
                tracemalloc.start()
            elif number == 50:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            raw = bytearray(good)
            for _ in range(draw.choice((1, 1, 2, 8))):
                at = draw.randrange(min(limit, len(raw)))
                kind = draw.randrange(5)
                if kind == 0:
                    raw[at] = draw.randrange(256)
                elif kind == 1:
                    raw[at] = ord(draw.choice('0123456789{}[],:"-eE'))
                elif kind == 2 and name == MANIFEST:
                    del raw[at : at + draw.randrange(1, 30)]
                elif kind == 3 and name == MANIFEST:
                    raw[at:at] = raw[at - draw.randrange(1, 40) : at] or b"9"
                else:
                    raw[at : at + 4] = raw[at + 1 : at + 5]
            (folder / name).write_bytes(raw)
            try:
                read_a_little(folder)
            except CheckpointError as error:
                refused += str(folder) in str(error) and len(str(error)) < 1000
        assert 0 < peak < 64 << 20
        assert refused > count // 3, refused


def read_a_little(folder: Path) -> None:
    """Open it, and read something of every file."""
    checkpoint = open_checkpoint(folder)
    try:
        for layer in range(checkpoint.spec.num_layers):
            checkpoint.matrix("q", layer)
            checkpoint.vector("attention_norm", layer)
            for role in matrix_shapes(checkpoint.spec, layer):
                checkpoint.matrix_bytes(role, layer)
        checkpoint.matrix_bytes("embed", None)
        checkpoint.vector("final_norm", None)
    finally:
        checkpoint.close()
