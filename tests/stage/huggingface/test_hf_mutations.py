"""Damaged folders of quantized modules, of every format: each is one clear error, or is still a model."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import tracemalloc
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shardline.stage import CheckpointError, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.roles import EXPERT_ROLES


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quantized = _sibling("test_hf_quantized")
SINGLE, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(params=[*quantized.FORMATS, "mxfp4"])
def folder(request, tiny_folder):
    if request.param == "mxfp4":
        mxfp4 = quantized.TestMxfp4()
        return tiny_folder("gpt_oss", edit=mxfp4.made, keys={"quantization_config": mxfp4.CONFIG})[0]
    packer = quantized.Packer(request.param)
    return tiny_folder("llama", edit=packer, keys={"quantization_config": packer.config})[0]


def read_everything(path: Path) -> None:
    """Every matrix and vector of the model, as stages read them."""
    checkpoint = open_checkpoint(path)
    try:
        spec = checkpoint.spec
        for layer in (None, *range(spec.num_layers)):
            for role in matrix_shapes(spec, layer):
                checkpoint.matrix_bytes(role, layer)
                for expert in range(spec.experts.num_experts) if role in EXPERT_ROLES else (None,):
                    checkpoint.matrix(role, layer, expert)
            for role in vector_shapes(spec, layer):
                checkpoint.vector(role, layer)
    finally:
        checkpoint.close()


def refusal(path: Path) -> str:
    """The error's text; empty: it is a model."""
    try:
        read_everything(path)
    except CheckpointError as error:
        return str(error)
    return ""


def is_refused(path: Path) -> bool:
    text = refusal(path)
    assert not text or str(path) in text
    assert len(text) < 1000
    return bool(text)


def mutated(good: bytes, start: int, end: int, draw: random.Random) -> bytes:
    """A few characters between the two places become others, or are cut out, or doubled."""
    raw = bytearray(good)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = min(draw.randrange(start, end), len(raw) - 1)
        kind = draw.randrange(4)
        if kind == 0:
            raw[at] = draw.randrange(256)
        elif kind == 1:
            raw[at] = ord(draw.choice('0123456789{}[],:"-eE'))
        elif kind == 2:
            del raw[at : at + draw.randrange(1, 30)]
        else:
            raw[at:at] = raw[max(at - draw.randrange(1, 40), 0) : at]
    return bytes(raw)


@pytest.mark.timeout(120)
def test_headers(folder):
    good = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    assert not is_refused(folder)
    draw = random.Random(1)
    refused = 0
    tracemalloc.start()
    for _ in range(150):
        # The header's own length is mended, so that it is what is inside of it that is damaged.
        raw = mutated(good, 8, 8 + length, draw)
        header = raw[8 : len(raw) - (len(good) - 8 - length)]
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + good[8 + length :])
        refused += is_refused(folder)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert refused > 100


# Of one size each, so that the file's own bookkeeping has nothing to say.
SAME_SIZE = [
    {"U8", "I8", "BOOL", "F8_E4M3"},
    {"F16", "BF16", "I16", "U16"},
    {"F32", "I32", "U32"},
    {"F64", "I64", "U64"},
]


def other_fields(entry: dict) -> list[dict]:
    """What else a header could say of the same bytes."""
    dtypes = next(same for same in SAME_SIZE if entry["dtype"] in same) - {entry["dtype"]}
    if entry["dtype"] in ("F16", "BF16"):
        # Scales of either are scales.
        dtypes -= {"F16", "BF16"}
    first, *rest = shape = entry["shape"]
    shapes = [shape[::-1], [1, *shape], [*shape, 1], [first * 2, *rest[:-1], *(n // 2 for n in rest[-1:])]]
    shapes += [[first // 2, 2, *rest], [first * int(np.prod(rest))]]
    same = [found for found in shapes if found != shape and np.prod(found) == np.prod(shape)]
    return [{"dtype": dtype} for dtype in sorted(dtypes)] + [{"shape": found} for found in same]


def test_tensors_of_another_type_or_shape(folder):
    """Every quantized tensor in turn: a header without a fault that says another type or shape than the format has."""
    good = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    endings = ("qweight", "qzeros", "scales", "g_idx", "packed", "scale", "zero_point", "weight_shape", "blocks")
    names = [name for name in header if "layers.1." in name and name.endswith(endings)]
    assert len(names) >= 4
    for name in names:
        assert len(other_fields(header[name])) >= 4
        for fields in other_fields(header[name]):
            raw = json.dumps(header | {name: header[name] | fields}).encode()
            (folder / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + good[8 + length :])
            assert is_refused(folder), (name, fields)


def test_bits_of_the_data(folder):
    """Any integers are weights; what is no number, or no group, is refused. Nothing else may come of it."""
    good = np.fromfile(folder / SINGLE, np.uint8)
    (length,) = struct.unpack("<Q", good[:8].tobytes())
    draw = np.random.default_rng(2)
    for _ in range(30):
        raw = good.copy()
        at = draw.integers(8 + length, len(raw), 2000)
        raw[at] = draw.integers(0, 256, 2000)
        raw.tofile(folder / SINGLE)
        is_refused(folder)


@pytest.mark.timeout(120)
def test_quantization_config(folder):
    good = (folder / CONFIG).read_bytes()
    start = good.index(b'"quantization_config"')
    assert not is_refused(folder)
    draw = random.Random(3)
    refused = 0
    for _ in range(300):
        (folder / CONFIG).write_bytes(mutated(good, start, len(good), draw))
        refused += is_refused(folder)
    assert refused > 150
