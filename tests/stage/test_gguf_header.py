"""Damaged and hostile files: one clear error each, in bounded time and memory."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from shardline.stage import CheckpointError, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.gguf.header import HEADER_LIMIT, read_header

VOCAB = 20
KEYS = {
    "general.alignment": 32,
    "general.name": "a tiny model",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"<{i}>" for i in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.scores": [0.5] * VOCAB,
    "tokenizer.ggml.add_bos_token": False,
}


@pytest.fixture(scope="module")
def good(tiny_model) -> tuple[bytes, int]:
    """A valid file with keys of most types, and the length of its header."""
    path = tiny_model(layers=1, vocab=VOCAB, keys=KEYS)
    return path.read_bytes(), header_length(path)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def file_of(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return header + bytes(-len(header) % 32 + data)


def header_length(path: Path) -> int:
    """Where the last tensor's description ends, by the gguf package's own account."""
    last = max(gguf.GGUFReader(path).tensors, key=lambda tensor: tensor.field.offset).field
    return last.offset + sum(int(part.nbytes) for part in last.parts)


def read_all(path: Path) -> None:
    """Open a file and read every tensor."""
    checkpoint = open_checkpoint(path)
    try:
        for layer in (None, *range(checkpoint.spec.num_layers)):
            for role in matrix_shapes(checkpoint.spec, layer):
                matrix = checkpoint.matrix(role, layer)
                assert np.isfinite(matrix.scale).all()
            for role in vector_shapes(checkpoint.spec, layer):
                checkpoint.vector(role, layer)
    finally:
        checkpoint.close()


def outcome(path: Path, raw: bytes) -> CheckpointError | None:
    """The error that such a file gives, which must be the one kind that there is, or None."""
    path.write_bytes(raw)
    found = None
    try:
        read_all(path)
    except CheckpointError as error:
        found = error
    if found is not None:
        assert found.path == str(path)
        assert found.field
        assert found.problem
        assert len(str(found)) < len(str(path)) + 400
        assert str(found).isprintable()
    return found


def test_the_file_itself_is_good(tmp_path, good):
    assert outcome(tmp_path / "good.gguf", good[0]) is None


def test_every_truncation_is_refused(tmp_path, good):
    """At every byte of the header, and at some of the data."""
    whole, end = good
    path = tmp_path / "short.gguf"
    for length in [*range(end), *range(end, len(whole), 499)]:
        assert outcome(path, whole[:length]) is not None, length


def test_random_bits_and_bytes(tmp_path, good):
    """Either an error that names a field, or a file that reads: some bits are data, names and the like."""
    whole, end = good
    rng = random.Random(7)
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(end if rng.random() < 0.9 else len(raw))
            raw[place] = raw[place] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else rng.randrange(256)
        refused += outcome(path, bytes(raw)) is not None
    assert refused > 1500


def test_absurd_numbers_everywhere(tmp_path, good):
    """Each aligned or unaligned place of the header in turn holds an absurd length, count, offset or type; memory stays
    within a few times the file's size."""
    whole, end = good
    path = tmp_path / "absurd.gguf"
    values = [struct.pack("<Q", value) for value in (0, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)]
    tracemalloc.start()
    try:
        for number, place in enumerate(range(4, end)):
            value = values[number % len(values)]
            tracemalloc.reset_peak()
            outcome(path, whole[:place] + value + whole[place + 8 :])
            assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 8 * len(whole), place
    finally:
        tracemalloc.stop()


def test_pieces_cut_out_or_doubled(tmp_path, good):
    whole, end = good
    rng = random.Random(8)
    path = tmp_path / "moved.gguf"
    refused = 0
    for _ in range(1000):
        start = rng.randrange(end)
        length = rng.choice([1, 4, 8, rng.randrange(1, 200)])
        piece = whole[start : start + length]
        raw = whole[:start] + (piece + piece if rng.random() < 0.5 else b"") + whole[start + length :]
        refused += outcome(path, raw) is not None
    assert refused > 900


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "magic: needs 4 bytes"),
        (b"PK\x03\x04 and so on", r"magic: not a GGUF file: it begins with b'PK"),
        (file_of([], [], version=1), "version: GGUF version 1 is not supported; 2 and 3 are"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: a big-endian GGUF file"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(999),
            "tensor_count: 1152921504606846976 tensors cannot fit",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(999), "kv_count: 1152921504606846976 keys cannot fit"),
        (file_of([struct.pack("<Q", 2**50)], [], 99), "metadata key 1 of 1: a text of 1125899906842624 bytes"),
        (file_of([pair("k", 13, b"")], [], 99), "k: value type 13 is unknown"),
        (file_of([pair("k", 8, struct.pack("<Q", 2**40))], [], 99), "k: a text of 1099511627776 bytes"),
        (file_of([pair("k", 8, struct.pack("<Q", 2) + b"\xff\xff")], [], 99), "k: a text that is not UTF-8"),
        (file_of([pair("k", 9, struct.pack("<IQ", 5, 2**62))], [], 99), "k: 4611686018427387904 elements cannot fit"),
        (file_of([pair("k", 9, struct.pack("<IQ", 99, 1))], [], 99), "k: element type 99 is unknown"),
        (file_of([pair("k", 9, struct.pack("<IQ", 9, 1) * 5)], [], 99), "k: element 0 of 1: .* nested deeper than 3"),
        (file_of([pair("k", 9, struct.pack("<IQQ", 8, 2, 0) + b"\xff" * 8)], [], 99), "k: element 1 of 2: a text of"),
        (file_of([pair("k", 7, b"\x02")], [], 99), "k: a truth value of 2"),
        (file_of([pair("k", 0, b"\x02")] * 2, [], 99), "k: the key occurs twice"),
        (file_of([pair("general.alignment", 4, struct.pack("<I", 24))], [], 99), "alignment: 24 is not a power of two"),
        (file_of([pair("general.alignment", 4, struct.pack("<I", 0))], [], 99), "alignment: 0 is not a power of two"),
        (file_of([pair("general.alignment", 5, struct.pack("<i", 32))], [], 99), "alignment: has value type 5"),
        (file_of([], [tensor("t", (), 0, 0)]), "tensor t: 0 dimensions"),
        (file_of([], [tensor("t", (1,) * 5, 0, 0)]), "tensor t: 5 dimensions"),
        (file_of([], [tensor("t", (0, 4), 0, 0)]), r"tensor t: has dimensions \[0, 4\]"),
        (file_of([], [tensor("t", (2**40, 2**40), 0, 0)]), r"tensor t: has dimensions \[1099511627776"),
        (file_of([], [tensor("t", (8,), 4, 0)], 32), "tensor t: tensor type 4 is unknown"),
        (file_of([], [tensor("t", (48, 2), 2, 0)], 99), "tensor t: has rows of 48 elements, not a multiple of the 32"),
        (file_of([], [tensor("t", (8,), 0, 8)], 64), "tensor t: its offset 8 is not a multiple of the alignment 32"),
        (file_of([], [tensor("t", (8,), 0, 0)], 31), "tensor t: ends at byte 96, but the file ends at 95"),
        (file_of([], [tensor("t", (8,), 0, 2**63)], 64), "tensor t: ends at byte 9223372036854775"),
        (file_of([], [tensor("t", (8,), 0, 0)] * 2, 64), "tensor t: the name occurs twice"),
        (file_of([], [tensor("t", (9,), 0, 0), tensor("u", (8,), 0, 32)], 64), "tensor u: overlaps with tensor t"),
    ],
)
def test_each_fault_names_its_field(tmp_path, raw, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{message}"):
        open_checkpoint(path)


def test_a_sparse_file_cannot_make_the_header_endless(tmp_path):
    """A terabyte of zeros that costs nothing on disk, said to be 2^35 empty texts."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("k", 9, struct.pack("<IQ", 8, 2**35)))
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=f"k: {2**35} elements cannot fit in the"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("k", 9, struct.pack("<IQ", 5, HEADER_LIMIT // 4)))
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=r"k: \d+ elements cannot fit in the"):
        open_checkpoint(path)


def test_a_header_may_not_be_longer_than_the_limit(tiny_model, monkeypatch):
    path = tiny_model(layers=1, vocab=VOCAB, keys=KEYS)
    end = header_length(path)
    monkeypatch.setattr("shardline.stage.gguf.header.HEADER_LIMIT", end)
    open_checkpoint(path).close()
    monkeypatch.setattr("shardline.stage.gguf.header.HEADER_LIMIT", end - 1)
    with pytest.raises(CheckpointError, match=f"the header goes on past {end - 1} bytes"):
        open_checkpoint(path)


@pytest.mark.timeout(20)
def test_what_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="file: cannot be opened: No such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match=r"config\.json: file: cannot be opened: No such file"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="file: is not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


def test_a_file_that_is_cut_while_open(tiny_model, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_model().read_bytes())
    checkpoint = open_checkpoint(path)
    checkpoint.matrix("down", 2)
    os.truncate(path, path.stat().st_size - 20000)
    with pytest.raises(CheckpointError, match=r"tensor blk\.2\.ffn_down\.weight: the file became shorter"):
        checkpoint.matrix("down", 2)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="the file is closed"):
        checkpoint.matrix("embed", None)
    checkpoint.close()


def test_metadata_are_what_the_gguf_package_reads(tiny_model):
    path = tiny_model(vocab=VOCAB, keys=KEYS)
    fields = gguf.GGUFReader(path).fields.items()
    checkpoint = open_checkpoint(path)
    assert dict(checkpoint.metadata) == {
        name: field.contents() for name, field in fields if not name.startswith("GGUF.")
    }
    checkpoint.close()


def test_values_of_every_type(tiny_model, tmp_path):
    """Each scalar type with its extremes, and arrays in arrays."""
    source = tiny_model(layers=1)
    whole, end = source.read_bytes(), header_length(source)
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    values = {
        0: 255,
        1: -128,
        2: 65535,
        3: -32768,
        4: 2**32 - 1,
        5: -(2**31),
        6: 0.1,
        10: 2**64 - 1,
        11: -(2**63),
        12: 0.1,
    }
    pairs = [pair(f"extra.{kind}", kind, struct.pack("<" + formats[kind], value)) for kind, value in values.items()]
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ3i", 5, 3, 1, 2, 3) + struct.pack("<IQ", 8, 1) + text("in")
    pairs += [
        pair("extra.nested", 9, nested),
        pair("extra.empty", 9, struct.pack("<IQ", 8, 0)),
        pair("extra.bool", 7, b"\x01"),
    ]

    num_tensors, num_pairs = struct.unpack_from("<QQ", whole, 8)
    start = whole.index(text("token_embd.weight"))
    data_start = -(-end // 32) * 32
    header = whole[4:8] + struct.pack("<QQ", num_tensors, num_pairs + len(pairs)) + whole[24:start]
    header = b"GGUF" + header + b"".join(pairs) + whole[start:end]
    path = tmp_path / "types.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + whole[data_start:])
    checkpoint = open_checkpoint(path)
    read_all(path)
    got = checkpoint.metadata
    checkpoint.close()
    for kind, value in values.items():
        assert got[f"extra.{kind}"] == (float(np.float32(value)) if kind == 6 else value)
    assert got["extra.nested"] == [[1, 2, 3], ["in"]]
    assert got["extra.empty"] == []
    assert got["extra.bool"] is True


def test_fingerprint(tiny_model, tmp_path):
    """The same for a copy; another when the header, the size or a tensor's bytes differ."""

    def fingerprint(path: Path) -> str:
        checkpoint = open_checkpoint(path)
        try:
            return checkpoint.fingerprint
        finally:
            checkpoint.close()

    path = tiny_model()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert fingerprint(copy) == fingerprint(path)
    copy.write_bytes(path.read_bytes() + b"\0")
    assert fingerprint(copy) != fingerprint(path)
    assert fingerprint(tiny_model(context=256)) != fingerprint(path)

    # Another training of the same model: header and size are the same.
    with path.open("rb") as file:
        tensors = read_header(path, file.fileno(), path.stat().st_size).tensors
    for info in tensors.values():
        data = bytearray(path.read_bytes())
        middle = info.offset + info.nbytes // 2
        data[middle] ^= 1
        copy.write_bytes(data)
        assert fingerprint(copy) != fingerprint(path), info.name
