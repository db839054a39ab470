"""Matrices packed on a GPU: every word where linear.cu's header says, written out once more on the host."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardline.kernels import Expert, GroupedMatrix

pytestmark = pytest.mark.gpu
SHAPES = [(1, 128), (63, 640), (64, 4096), (331, 896), (200, 1280)]


def fragments(q: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [N, K], N a multiple of 16, K of 64, to A fragments: uint32 [N / 16, K / 64, bits / 4, 32, 4]."""
    n, k = q.shape
    # tile, row half, row, block, k16 step, column half, lane column, element
    parts = q.reshape(n // 16, 2, 8, k // 64, 4, 2, 4, 2)
    if bits == 4:
        words = np.zeros((n // 16, k // 64, 8, 4, 4), np.uint32)  # tile, block, row, lane column, step
        for half in range(2):
            for column in range(2):
                for element in range(2):
                    nibbles = parts[:, half, :, :, :, column, :, element].astype(np.uint32)
                    words |= nibbles.transpose(0, 2, 1, 4, 3) << np.uint32(4 * (half + 2 * column + 4 * element))
        return words.reshape(n // 16, k // 64, 1, 32, 4)
    # A step's two words: (a0, a1) and (a2, a3), a byte an element: byte = element + 2 * row half, word = column half.
    octets = np.ascontiguousarray(parts.transpose(0, 3, 4, 2, 6, 5, 1, 7))
    words = octets.reshape(-1, 4).view(np.uint32).reshape(n // 16, k // 64, 2, 2, 32, 2)
    return np.ascontiguousarray(words.transpose(0, 1, 2, 4, 3, 5)).reshape(n // 16, k // 64, 2, 32, 4)


def scales(values: np.ndarray) -> np.ndarray:
    """[N, groups] to [N / 16, groups, 8, 2]: channels r and r + 8 of a tile side by side."""
    n, groups = values.shape
    return np.ascontiguousarray(values.reshape(n // 16, 2, 8, groups).transpose(0, 3, 2, 1))


def expected(q: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int, zero: int | None) -> list[np.ndarray]:
    """The bytes of integers, scales and minimums (none where there is a zero point), padding included."""
    channels, inputs = q.shape
    rows, columns = -(-channels // 64) * 64, -(-inputs // 128) * 128
    centre = 8 if bits == 4 else 128
    whole = np.full((rows, columns), centre, np.uint8)
    whole[:channels, :inputs] = q if zero is None else q + np.uint8(centre - zero)
    arrays = [fragments(whole, bits)]
    for values in (scale, minimum)[: 1 + (zero is None)]:
        padded = np.zeros((rows, columns * scale.shape[1] // inputs), scale.dtype)
        padded[:channels, : scale.shape[1]] = values
        arrays.append(scales(padded))
    return [array.reshape(-1).view(np.uint8) for array in arrays]


def interleaved(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Tiles of 16 channels of each in turn, padded with zeros to whole ones."""
    padded = -(-len(a) // 16) * 16
    pair = np.zeros((padded // 16, 2, 16, a.shape[1]), a.dtype)
    for index, array in enumerate((a, b)):
        whole = np.zeros((padded, a.shape[1]), a.dtype)
        whole[: len(a)] = array
        pair[:, index] = whole.reshape(-1, 16, a.shape[1])
    return pair.reshape(2 * padded, -1)


def resident(cuda: Any, part: Any) -> list[np.ndarray]:
    names = ("integers", "scale", "minimum")[: 2 + part.has_minimum]
    return [cuda.read(getattr(part, name)).reshape(-1).view(np.uint8) for name in names]


def same(got: list[np.ndarray], wanted: list[np.ndarray]) -> bool:
    return len(got) == len(wanted) and all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("piece", [1, 60_000, 1 << 23])
@pytest.mark.parametrize(("channels", "inputs"), SHAPES)
def test_every_word_is_in_its_place(
    cuda: Any, weights: Any, channels: int, inputs: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.kernels.cuda.pack.PIECE_BYTES", piece)
    matrix = weights.matrix(channels, inputs)
    (part,) = cuda.load_matrix([matrix]).parts
    wanted = expected(matrix.integers(), matrix.scale, matrix.minimum, weights.bits, weights.zero)
    assert same(resident(cuda, part), wanted)


def test_stacked_matrices_follow_each_other(cuda: Any, weights: Any) -> None:
    run = [weights.matrix(channels, 640, channels) for channels in (32, 48, 33)]
    (part,) = cuda.load_matrix(run).parts
    arrays = [np.concatenate([getattr(m, name) for m in run]) for name in ("scale", "minimum")]
    integers = np.concatenate([m.integers() for m in run])
    assert same(resident(cuda, part), expected(integers, *arrays, weights.bits, weights.zero))


@pytest.mark.parametrize("piece", [1, 20_000, 1 << 23])
@pytest.mark.parametrize("channels", [16, 40, 96, 100])
def test_gate_and_up_alternate(
    cuda: Any, weights: Any, channels: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.kernels.cuda.pack.PIECE_BYTES", piece)
    gate, up = weights.matrix(channels, 640, 1), weights.matrix(channels, 640, 2)
    (part,) = cuda.load_gated(gate, up).parts
    arrays = [interleaved(getattr(gate, name), getattr(up, name)) for name in ("scale", "minimum")]
    # Padding within a pair of tiles, too, multiplies to zeros: its integers are the centre.
    zero = 8 if weights.bits == 4 else 128
    blank = zero if weights.zero is None else weights.zero
    integers = interleaved(gate.integers() - np.uint8(blank), up.integers() - np.uint8(blank)) + np.uint8(blank)
    assert same(resident(cuda, part), expected(integers, *arrays, weights.bits, weights.zero))


def test_no_more_of_a_matrix_is_on_its_way_than_a_piece(
    cuda: Any, formats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.kernels.cuda.pack.PIECE_BYTES", 20_000)
    sent: list[weakref.ref[Any]] = []
    upload = cuda._packer._upload

    def recorded(host: np.ndarray) -> Any:
        assert sum(array() is not None for array in sent) < 2, "pieces that are packed stay"
        assert host.nbytes <= 20_000
        array = upload(host)
        sent.append(weakref.ref(array))
        return array

    monkeypatch.setattr(cuda._packer, "_upload", recorded)
    gate, up = (formats(4, 32, "float32", None).matrix(300, 640, seed) for seed in (1, 2))
    cuda.load_gated(gate, up)
    assert len(sent) > 20


def test_a_zero_point_is_shifted_only_where_there_is_room(cuda: Any, formats: Any) -> None:
    low = formats(8, 32, "float16", 32).matrix(64, 256)
    assert not cuda.load_matrix([low]).parts[0].has_minimum
    high = replace(low, q=np.where(low.q == low.q.max(), np.uint8(200), low.q))
    (part,) = cuda.load_matrix([high]).parts
    assert part.has_minimum
    assert same(resident(cuda, part), expected(high.q, high.scale, high.minimum, 8, None))


def test_experts_lie_as_single_matrices_do(cuda: Any, formats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardline.kernels.cuda import experts as resident_experts

    form = formats(4, 32, "float16", None)
    made = [Expert(*(form.matrix(n, k, 7 * e + n) for n, k in ((96, 256), (96, 256), (256, 96)))) for e in range(7)]

    def bytes_of(matrices: Any, expert: int) -> list[np.ndarray]:
        raw = {chunk.data.ptr: cuda.read(chunk) for chunk in matrices.chunks}
        found = []
        for start, size in zip(cuda.read(matrices.table)[expert].tolist(), sizes(matrices), strict=True):
            base = max(base for base in raw if base <= start)
            found.append(raw[base].reshape(-1)[start - base : start - base + size])
        return found

    def sizes(matrices: Any) -> list[int]:
        weights = matrices.tiles * 16 * matrices.blocks * 64
        return [weights // 2, weights // 32 * 2, weights // 32 * 2]

    class Said(list[Expert]):
        """Says another number than come."""

        def __init__(self, number: int) -> None:
            super().__init__(made)
            self.number = number

        def __len__(self) -> int:
            return self.number

    # Of a list the number is known before the first one comes, of what a generator yields it is not.
    sources = [lambda: made, lambda: (expert for expert in made), lambda: Said(9)]
    for chunk_bytes, source in itertools.product((1, 100_000, 1 << 26), sources):
        monkeypatch.setattr(resident_experts, "CHUNK_BYTES", chunk_bytes)
        loaded = cuda.load_experts(source())
        assert sum(chunk.shape[0] for chunk in loaded.down.chunks) == len(made), chunk_bytes
        for e, expert in enumerate(made):
            (gate_up,) = cuda.load_gated(expert.gate, expert.up).parts
            (down,) = cuda.load_matrix([expert.down]).parts
            assert same(bytes_of(loaded.gate_up[0], e), resident(cuda, gate_up)), (chunk_bytes, e)
            assert same(bytes_of(loaded.down, e), resident(cuda, down)), (chunk_bytes, e)
    with pytest.raises(AssertionError, match="more experts than the 5"):
        cuda.load_experts(Said(5))


def test_a_mapped_file_s_arrays_are_taken_as_they_are(cuda: Any, formats: Any, tmp_path: Any) -> None:
    matrix: GroupedMatrix = formats(4, 32, "float16", None).matrix(96, 256)
    np.save(tmp_path / "q.npy", matrix.q)
    mapped = replace(matrix, q=np.load(tmp_path / "q.npy", mmap_mode="r"))
    (part,), (wanted,) = cuda.load_matrix([mapped]).parts, cuda.load_matrix([matrix]).parts
    assert same(resident(cuda, part), resident(cuda, wanted))
