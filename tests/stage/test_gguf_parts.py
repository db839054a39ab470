"""A model in several files: opened by any of them, or refused with the name of the file that is missing or wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardline.stage import CheckpointError, open_checkpoint


@pytest.fixture
def parts(tiny_model, tmp_path) -> list[Path]:
    """Three files of one model, in a folder of the test's own."""
    first = tiny_model("qwen3", layers=2, tensors_a_part=10)
    found = sorted(first.parent.glob(re.sub("-00001-of-.*", "-*", first.name)))
    assert len(found) == 3
    return [Path(shutil.copy(path, tmp_path / f"model-{path.name[-19:]}")) for path in found]


def put(path: Path, key: str, value: int) -> None:
    """Change a number of the file's header."""
    field = gguf.GGUFReader(path).fields[key]
    index = field.data[0]
    with path.open("r+b") as file:
        file.seek(field.offset + sum(part.nbytes for part in field.parts[:index]))
        file.write(np.array([value], field.parts[index].dtype).tobytes())


def test_any_part_stands_for_all(tiny_model, parts, reference, stage_row):
    whole = tiny_model("qwen3", layers=2)
    one = open_checkpoint(whole)
    fingerprints = set()
    for path in parts:
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == path
        assert checkpoint.spec == one.spec
        assert checkpoint.metadata["general.architecture"] == "qwen3"
        for role in ("q", "down"):
            matrix = checkpoint.matrix(role, 1)
            assert np.array_equal(matrix.q, one.matrix(role, 1).q)
        assert np.array_equal(checkpoint.vector("final_norm", None), one.vector("final_norm", None))
        fingerprints.add(checkpoint.fingerprint)
        checkpoint.close()
        with pytest.raises(CheckpointError, match="the file is closed"):
            checkpoint.matrix("q", 1)
    assert len(fingerprints) == 1
    one.close()
    row, other = stage_row(parts[2], (1,)), stage_row(whole)
    tokens = list(range(20))
    assert np.array_equal(row.logits(row.plan({0: tokens}))[0], other.logits(other.plan({0: tokens}))[0])


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(parts, missing):
    parts[missing].unlink()
    given = parts[missing - 1]
    with pytest.raises(
        CheckpointError, match=rf"model-{missing + 1:05}-of-00003\.gguf: file: cannot be opened: No such"
    ):
        open_checkpoint(given)


def test_every_descriptor_is_given_back(parts):
    """When they are parts of one model, and when they are not."""
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    open_checkpoint(parts[1]).close()
    parts[2].write_bytes(parts[2].read_bytes()[:100])
    with pytest.raises(CheckpointError):
        open_checkpoint(parts[1])
    parts[0].unlink()
    with pytest.raises(CheckpointError):
        open_checkpoint(parts[1])
    assert len(list(descriptors.iterdir())) == before


@pytest.mark.parametrize(
    "name", ["model.gguf", "model-00001-of-00004.gguf", "model-00004-of-00003.gguf", "-of-00003.gguf"]
)
def test_a_part_of_another_name_cannot_find_the_others(parts, name):
    renamed = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(CheckpointError, match=r"split\.count: the file is one of 3 parts.* NAME-00001-of-00003\.gguf"):
        open_checkpoint(renamed)


def test_parts_in_another_order_are_refused(parts):
    parts[1].rename(parts[1].with_name("spare"))
    parts[2].rename(parts[1])
    parts[1].with_name("spare").rename(parts[2])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: split\.no: 2, but by its name it is 1"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        (0, "split.count", 0, r"tensor .*: is missing"),
        (0, "split.count", 4097, r"00001-of-00003\.gguf: split\.count: 4097 is not an integer from 0 to 4096"),
        (0, "split.count", 2, r"split\.count: the file is one of 2 parts"),
        (1, "split.count", 2, r"00002-of-00003\.gguf: split\.count: 2, but model-00001-of-00003\.gguf says 3"),
        (2, "split.no", 7, r"00003-of-00003\.gguf: split\.no: 7, but by its name it is 2"),
        (0, "split.tensors.count", 26, r"00002-of-00003\.gguf: split\.tensors\.count: 2[0-9], but 26 in model-00001"),
    ],
)
def test_numbers_that_disagree_are_refused(parts, part, key, value, message):
    put(parts[part], key, value)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(parts[0])


def test_fewer_tensors_than_all_parts_say_are_refused(parts):
    for path in parts:
        put(path, "split.tensors.count", 99)
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count: 99, but the parts have \d+ tensors"):
        open_checkpoint(parts[1])


def test_a_part_of_another_model_is_refused(tiny_model, parts):
    """Another architecture; and the same one of another size, whose tensors are there twice or not at all."""
    other = tiny_model("qwen3", layers=2, tensors_a_part=10, seed=1)
    shutil.copy(other, parts[1])
    put(parts[1], "split.no", 1)
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: tensor .*: is in model-00001-of-00003\.gguf too"):
        open_checkpoint(parts[0])
    other = tiny_model("qwen2", layers=2, bias=False, tensors_a_part=10)
    shutil.copy(other, parts[1])
    put(parts[1], "split.no", 1)
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: (general\.architecture|split\.[a-z.]*): .*, but"):
        open_checkpoint(parts[0])
