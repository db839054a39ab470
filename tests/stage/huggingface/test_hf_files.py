"""Folders that strangers made: whatever is wrong with their files is one clear error, soon, and in little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from shardline.stage import CheckpointError, open_checkpoint
from shardline.stage.huggingface.files import MAX_JSON_PARTS
from shardline.stage.huggingface.folder import Folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def folder_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Folder(path)
    return str(caught.value)


def touch_everything(path: Path) -> None:
    """Open a folder, and check and read all that there is."""
    checkpoint = open_checkpoint(path)
    try:
        for role in ("q", "k", "v", "o", "gate", "up", "down"):
            for layer in range(checkpoint.spec.num_layers):
                checkpoint.matrix_bytes(role, layer)
                checkpoint.matrix(role, layer)
        for role in ("embed", "head"):
            checkpoint.matrix_bytes(role, None)
        checkpoint.vector("final_norm", None)
        assert len(checkpoint.fingerprint) == 16
    finally:
        checkpoint.close()


class TestHeader:
    @pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 0), struct.pack("<Q", 2) + b"[]"])
    def test_no_header(self, tmp_path, raw):
        (tmp_path / SINGLE).write_bytes(raw)
        assert "header" in folder_error(tmp_path)

    def test_padding_and_metadata_are_fine(self, tmp_path):
        header = json.dumps({"__metadata__": {"format": "pt"}, "a": entry(), "none": entry("U8", [0], [8, 8])})
        write(tmp_path / SINGLE, header.encode() + b"   ", struct.pack("<2f", 1, 2))
        folder = Folder(tmp_path)
        assert folder.read("a", 0, 8).view("<f4").tolist() == [1, 2]
        assert folder.info("none").shape == (0,)
        folder.close()

    @pytest.mark.parametrize(
        ("header", "says"),
        [
            ({"a": entry(offsets=[0, 12])}, "12 bytes lie at"),
            ({"a": entry(shape=[3], offsets=[0, 12])}, "is cut, or damaged"),
            ({"a": entry(offsets=[4, 12])}, "leaves 4 bytes unused"),
            ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlaps with a"),
            ({"a": entry(), "b": entry()}, "overlaps with a"),
            ({"a": entry(shape=[], offsets=[0, 4])}, "is cut, or damaged"),
            ({"a": entry("F128")}, "dtype F128 is unknown"),
            ({"a": entry(7)}, "dtype 7 is unknown"),
            ({"a": entry("F4", [3], [0, 1])}, "takes 1.5"),
            ({"a": entry(shape=[-2])}, "not a list of up to"),
            ({"a": entry(shape=[True, 2])}, "not a list of up to"),
            ({"a": entry(shape=[2.0])}, "not a list of up to"),
            ({"a": entry(shape=[1 << 63, 1 << 63], offsets=[0, 8])}, "not a list of up to"),
            ({"a": entry(shape=[1 << 62, 1 << 62], offsets=[0, 8])}, "8 bytes lie at"),
            ({"a": entry(shape=[1] * 9)}, "not a list of up to"),
            ({"a": entry(offsets=[8, 0])}, "not a beginning and an end"),
            ({"a": entry(offsets=[0])}, "not a beginning and an end"),
            ({"a": entry() | {"more": 1}}, "is not a dtype"),
            ({"a": [1]}, "is not a dtype"),
            ({"": entry()}, "name of 0 characters"),
            ({"x" * 600: entry()}, "name of 600 characters"),
            ({"__metadata__": {"a": 1}, "a": entry()}, "not an object of texts"),
            (b'{"a": 1, "a": 2}', "the key a occurs twice"),
            (b'{"a": NaN}', "NaN is not a number"),
            (b"[" * 100000, "nested too deeply"),
            (b'{"a": ' + b"9" * 6000 + b"}", "is no JSON"),
            (b'{"a\xff": 1}', "is no JSON"),
            (b"[" + b"{}," * (MAX_JSON_PARTS // 2) + b"{}]", "parts, more than"),
        ],
    )
    def test_damage(self, tmp_path, header, says):
        write(tmp_path / SINGLE, header, bytes(8))
        assert says in folder_error(tmp_path)

    @pytest.mark.parametrize("length", [64 << 20, (1 << 63) - 1, (1 << 64) - 1])
    def test_a_long_header_is_not_read(self, tmp_path, length):
        write(tmp_path / SINGLE, {}, length=length)
        os.truncate(tmp_path / SINGLE, 1 << 40)
        tracemalloc.start()
        assert "header" in folder_error(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()

    def test_a_file_that_is_cut_in_use(self, tiny_folder):
        path, _ = tiny_folder()
        checkpoint = open_checkpoint(path)
        os.truncate(path / SINGLE, os.path.getsize(path / SINGLE) // 2)
        errors = 0
        for layer in range(3):
            for role in ("q", "down"):
                try:
                    checkpoint.matrix(role, layer)
                except CheckpointError as error:
                    errors += "model.safetensors: tensor" in str(error) and "became shorter" in str(error)
        assert 0 < errors < 6
        checkpoint.close()
        with pytest.raises(CheckpointError, match="closed"):
            checkpoint.matrix("down", 0)


class TestMutations:
    """Thousands of damaged files: each is refused with an error of ours, or is still a model."""

    def is_refused(self, path: Path) -> bool:
        """Open the folder, check all that is read of headers, and read a little."""
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            return str(path) in str(error) and len(str(error)) < 1000
        try:
            for layer in range(checkpoint.spec.num_layers):
                checkpoint.matrix_bytes("q", layer)
            checkpoint.matrix_bytes("embed", None)
            checkpoint.vector("final_norm", None)
            return len(checkpoint.fingerprint) != 16
        except CheckpointError as error:
            return str(path) in str(error) and len(str(error)) < 1000
        finally:
            checkpoint.close()

    def try_all(self, path: Path, name: str, limit: int, count: int) -> int:
        good = (path / name).read_bytes()
        draw = random.Random(name)
        refused = 0
        tracemalloc.start()
        for _ in range(count):
            raw = bytearray(good)
            for _ in range(draw.choice((1, 1, 2, 8))):
                at = draw.randrange(min(limit, len(raw)))
                kind = draw.randrange(5)
                if kind == 0:
                    raw[at] = draw.randrange(256)
                elif kind == 1:
                    raw[at] = ord(draw.choice('0123456789{}[],:"-eE'))
                elif kind == 2:
                    del raw[at : at + draw.randrange(1, 30)]
                elif kind == 3:
                    raw[at:at] = raw[at - draw.randrange(1, 40) : at] or b"9"
                else:
                    del raw[draw.randrange(len(raw)) :]
                if not raw:
                    raw += b"{"
            (path / name).write_bytes(raw)
            refused += self.is_refused(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()
        return refused

    @pytest.mark.timeout(120)
    def test_header(self, tiny_folder):
        path, _ = tiny_folder()
        assert self.try_all(path, SINGLE, 6000, 1500) > 700

    @pytest.mark.timeout(120)
    def test_index(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        assert self.try_all(path, INDEX, 1 << 20, 1000) > 500

    @pytest.mark.timeout(120)
    def test_config(self, tiny_folder):
        path, _ = tiny_folder()
        assert self.try_all(path, "config.json", 1 << 20, 1500) > 700


class TestIndex:
    @pytest.mark.parametrize(
        "shard",
        [
            "../model.safetensors",
            "/etc/model.safetensors",
            "a/b.safetensors",
            "a\\b.safetensors",
            "..",
            "",
            ".safetensors",
            "model.bin",
            "x\0.safetensors",
            "x" * 300 + ".safetensors",
            5,
            None,
            ["a.safetensors"],
        ],
    )
    def test_names_stay_in_the_folder(self, tiny_folder, shard):
        path, _ = tiny_folder(shards=2)
        index = json.loads((path / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = shard
        (path / INDEX).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"weight_map: model\.norm\.weight: .* is not the name of"):
            open_checkpoint(path)

    @pytest.mark.parametrize("weight_map", [None, {}, [], 3, {"": FIRST}])
    def test_no_map(self, tiny_folder, weight_map):
        path, _ = tiny_folder(shards=2)
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match="weight_map"):
            open_checkpoint(path)

    def test_shards_are_whole(self, tiny_folder):
        touch_everything(tiny_folder(shards=2)[0])

    def change(self, path: Path, name: str, shard: str | None) -> None:
        index = json.loads((path / INDEX).read_text())
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
        (path / INDEX).write_text(json.dumps(index))

    def test_a_tensor_in_another_shard(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        self.change(path, "model.layers.0.mlp.up_proj.weight", SECOND)
        with pytest.raises(CheckpointError, match=r"00001.*tensor model\.layers\.0\.mlp\.up_proj.*places in .*00002"):
            touch_everything(path)

    def test_a_tensor_of_another_model(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        self.change(path, "model.layers.1.self_attn.q_proj.bias", SECOND)
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.bias: is not part of"):
            open_checkpoint(path)

    def test_a_shard_under_another_name(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        shutil.copy(path / FIRST, path / SECOND)
        with pytest.raises(CheckpointError, match=r"00002.*is in this file, but .* places in .*00001"):
            open_checkpoint(path).matrix("q", 1)

    def test_a_tensor_that_the_index_leaves_out(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        self.change(path, "model.layers.2.mlp.up_proj.weight", None)
        with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight: is missing"):
            open_checkpoint(path)

    def test_a_shard_with_less_than_the_index_says(self, tiny_folder):
        path, tensors = tiny_folder(shards=2)
        small = {name: tensors[name] for name in tensors if ".1." in name and "k_proj" not in name}
        from safetensors.numpy import save_file

        save_file(small, path / SECOND)
        with pytest.raises(CheckpointError, match=r"00002.*is missing, but .*index\.json places it in this file"):
            open_checkpoint(path).matrix("q", 1)

    def test_single_and_index(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        shutil.copy(path / FIRST, path / SINGLE)
        assert "remove the one that is old" in folder_error(path)
        path, _ = tiny_folder()
        names = dict.fromkeys(Folder(path).shards, SINGLE)
        (path / INDEX).write_text(json.dumps({"weight_map": names}))
        touch_everything(path)

    def test_only_the_shards_that_are_needed_are_opened(self, tiny_folder):
        """Layers 0 and 2 lie in the first shard, layer 1 and the model's own tensors in the second."""
        path, tensors = tiny_folder(shards=2)
        for damage in ("garbage", "gone"):
            if damage == "garbage":
                (path / SECOND).write_bytes(b"no shard")
            else:
                (path / SECOND).unlink()
            checkpoint = open_checkpoint(path)
            for layer in (0, 2):
                got = checkpoint.matrix("q", layer).dequantize()
                assert np.abs(got - tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]).max() < 0.05
                checkpoint.vector("mlp_norm", layer)
                checkpoint.matrix_bytes("down", layer)
            with pytest.raises(CheckpointError, match="00002-of-00002"):
                checkpoint.matrix("q", 1)
            with pytest.raises(CheckpointError, match="00002-of-00002"):
                checkpoint.matrix_bytes("embed", None)
            with pytest.raises(CheckpointError, match="00002-of-00002"):
                _ = checkpoint.fingerprint
            checkpoint.close()

    def test_of_the_models_own_tensors_too(self, tiny_folder):
        """A first stage that has the embedding needs no shard with the head and the final norm."""
        path, _ = tiny_folder()
        from safetensors.numpy import load_file, save_file

        tensors = load_file(path / SINGLE)
        (path / SINGLE).unlink()
        place = {name: SECOND if name in ("lm_head.weight", "model.norm.weight") else FIRST for name in tensors}
        (path / INDEX).write_text(json.dumps({"weight_map": place}))
        save_file({name: tensors[name] for name in tensors if place[name] == FIRST}, path / FIRST)
        checkpoint = open_checkpoint(path)
        checkpoint.matrix("embed", None)
        checkpoint.matrix_bytes("embed", None)
        with pytest.raises(CheckpointError, match="00002-of-00002"):
            checkpoint.vector("final_norm", None)
        checkpoint.close()


class TestLinks:
    def test_a_cache_of_blobs(self, tiny_folder, tmp_path):
        """As huggingface-hub lays out its cache: names are links to files elsewhere that are called by their hash."""
        path, _ = tiny_folder(shards=2)
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(path.iterdir())):
            shutil.copy(file, blobs / f"hash{number}")
            (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
        touch_everything(snapshot)
        assert open_checkpoint(snapshot).fingerprint == open_checkpoint(path).fingerprint

    @pytest.mark.parametrize("name", ["config.json", INDEX, FIRST])
    def test_a_loop(self, tiny_folder, name):
        path, _ = tiny_folder(shards=2)
        (path / name).unlink()
        (path / name).symlink_to(name)
        with pytest.raises(CheckpointError, match=f"{name}: file: cannot be opened: Too many levels of symbolic links"):
            touch_everything(path)

    @pytest.mark.parametrize("name", ["config.json", INDEX, FIRST])
    def test_no_file(self, tiny_folder, name):
        path, _ = tiny_folder(shards=2)
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(CheckpointError, match=f"{name}: file: is not a regular file"):
            touch_everything(path)
        (path / name).unlink()
        (path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name}: file: is not a regular file"):
            touch_everything(path)


class TestOtherFiles:
    def test_pickles(self, tiny_folder):
        path, _ = tiny_folder()
        (path / SINGLE).rename(path / "pytorch_model.bin")
        (path / "old.pt").touch()
        with pytest.raises(CheckpointError, match=r"old\.pt, pytorch_model\.bin can run code .* safetensors"):
            open_checkpoint(path)

    def test_other_names(self, tiny_folder):
        path, _ = tiny_folder()
        (path / SINGLE).rename(path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            open_checkpoint(path)

    def test_a_part_of_a_folder(self, tiny_folder):
        path, _ = tiny_folder(shards=2)
        for name in ("config.json", INDEX, FIRST):
            with pytest.raises(CheckpointError, match="give the folder"):
                open_checkpoint(path / name)

    def test_no_config(self, tiny_folder, tmp_path):
        with pytest.raises(CheckpointError, match=r"config\.json: file: cannot be opened: No such file"):
            open_checkpoint(tmp_path)

    def test_a_config_of_100_mb(self, tiny_folder):
        path, _ = tiny_folder()
        os.truncate(path / "config.json", 100 << 20)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=r"config\.json: file: has 104857600 bytes, more than"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
