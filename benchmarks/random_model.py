"""A model of random weights in the resident format, written in seconds: a few layers are made, all others are links.

    python -m benchmarks.random_model qwen3-30b-a3b FOLDER

Layer i has the weights of layer i modulo `--variants`, in the same file: 17 GB of 30B-A3B take 3 GB of disk and of page
cache. Every part counts in the result, and nothing grows without bound: embeddings, and what each matrix makes of a
normed row, have a size near 1; queries look at few keys (`QK_NORM`); a router's logits differ by about 1; each sublayer
adds `SUBLAYER` to the residual stream. Integers are symmetric about zero, for a mean would pull all rows into one
direction over many layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from benchmarks.geometries import MODELS
from numpy.typing import NDArray

from shardline import __version__
from shardline.kernels import GroupedMatrix
from shardline.stage import ModelSpec
from shardline.stage.resident.checkpoint import ResidentCheckpoint, hash_file
from shardline.stage.resident.layout import MANIFEST, file_name
from shardline.stage.resident.manifest import FileRecord, Manifest, Shard, encode
from shardline.stage.resident.writer import write_shard
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes

SUBLAYER = 0.3
QK_NORM = 4.0
"""Of each query head; keys have 1. Scores then differ by about 4, and a query looks at few positions."""

LOGITS = 3.0
END = "<|end|>"

# Of integers from -7 to 7, where 0 comes twice.
_DEVIATION = (280 / 16) ** 0.5
# Odd, so that no two rows of one matrix are the same bytes.
_POOL_BYTES = (1 << 25) + 12345


class RandomCheckpoint:
    """See `Checkpoint`: weights in 4 bits without minimums, the same for the same seed, layer, role and expert."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0, group_size: int = 128) -> None:
        self.path = Path("random")
        self.spec = spec
        self._seed = seed
        self._group_size = group_size
        # Nibbles 1 to 15 with 8 twice as often: symmetric about 8, which stands for zero.
        table = np.array([(8 if b & 15 == 0 else b & 15) | ((8 if b >> 4 == 0 else b >> 4) << 4) for b in range(256)])
        drawn = np.frombuffer(np.random.default_rng(seed).bytes(_POOL_BYTES), np.uint8)
        self._pool = table.astype(np.uint8)[drawn]

    @property
    def text_folder(self) -> Path | None:
        """There is none before the model is written."""
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """None."""
        return {}

    @property
    def fingerprint(self) -> str:
        """Of the shape and the seed."""
        return hashlib.sha256(repr((self.spec, self._seed, self._group_size)).encode()).hexdigest()[:16]

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """Of 4 bits, with a scale and a minimum of two bytes a group."""
        n, k = matrix_shapes(self.spec, layer)[role]
        count = self.spec.experts.num_experts if self.spec.experts and role in EXPERT_ROLES else 1
        return count * n * (k // 2 + 4 * (k // self._group_size))

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """Random integers, and scales that differ from group to group."""
        n, k = matrix_shapes(self.spec, layer)[role]
        draw = self._draw(role, layer, expert)
        q = self._window(int(draw.integers(len(self._pool))), n * k // 2).reshape(n, k // 2)
        wanted = self._size(role) / (_DEVIATION * (1.0 if role == "embed" else k**0.5))
        scale = (wanted * draw.uniform(0.75, 1.25, (n, k // self._group_size))).astype(np.float16)
        return GroupedMatrix(4, self._group_size, q, scale, scale * np.float16(-8))

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """Norms near 1, and a router's matrix."""
        shape = vector_shapes(self.spec, layer)[role]
        draw = self._draw(role, layer, None)
        if role == "router":
            return (draw.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        assert role.endswith("_norm"), f"no geometry here has {role}"
        return (draw.uniform(0.9, 1.1, shape) * (QK_NORM if role == "q_norm" else 1.0)).astype(np.float32)

    def close(self) -> None:
        """Nothing is open."""

    def _size(self, role: str) -> float:
        """Root mean square of what the matrix makes of a row of size 1."""
        if role == "expert_down":
            assert self.spec.experts is not None
            # A mean of that many experts is smaller than one.
            return SUBLAYER * float(self.spec.experts.rule.experts_per_token) ** 0.5
        return {"o": SUBLAYER, "down": SUBLAYER, "shared_down": SUBLAYER, "head": LOGITS}.get(role, 1.3)

    def _draw(self, *place: Any) -> np.random.Generator:
        key = hashlib.sha256(repr((self._seed, place)).encode()).digest()
        return np.random.default_rng(np.frombuffer(key, np.uint32))

    def _window(self, start: int, count: int) -> NDArray[np.uint8]:
        """`count` bytes of the pool from there on, and around its end."""
        pieces = [self._pool[start : start + count]]
        missing = count - len(pieces[0])
        while missing > 0:
            pieces.append(self._pool[:missing])
            missing -= len(pieces[-1])
        return np.concatenate(pieces)


def write_model(
    spec: ModelSpec, out: Path, *, seed: int = 0, variants: int = 4, group_size: int = 128, name: str = "random"
) -> None:
    """Write a folder that `open_checkpoint` and `Engine` take; it appears at `out` when all of it is there.

    Raises OSError.
    """
    checkpoint = RandomCheckpoint(spec, seed=seed, group_size=group_size)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.part-", dir=out.parent))
    try:
        text = _write_text(spec, part)
        shards: dict[int | None, Shard] = {None: write_shard(part, checkpoint, None)}
        first: dict[Any, int] = {}
        for layer, about in enumerate(spec.layers):
            source = first.setdefault((about, layer % variants), layer)
            if source == layer:
                shards[layer] = write_shard(part, checkpoint, layer)
            else:
                _link(part / file_name(source), part / file_name(layer))
                shards[layer] = shards[source]
        manifest = Manifest(f"shardline {__version__}", name, spec, text, shards)
        (part / MANIFEST).write_bytes(encode(manifest))
        ResidentCheckpoint(part).close()
        part.chmod(0o755)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def model_folder(
    geometry: str, work: Path, *, layers: int | None = None, seed: int = 0, variants: int = 4, group_size: int = 128
) -> Path:
    """The folder of a geometry under `work`, written if it is not there. `layers` shortens it."""
    spec = MODELS[geometry]
    if layers is not None:
        spec = replace(spec, num_layers=layers, layers=spec.layers[:layers])
    # Another shape or another way of making weights must not be taken for this one.
    made = (repr(spec), seed, variants, group_size, Path(__file__).read_text())
    key = hashlib.sha256(repr(made).encode()).hexdigest()[:8]
    out = work / f"{geometry}-{spec.num_layers}-layers-{key}"
    if not out.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_model(spec, out, seed=seed, variants=variants, group_size=group_size, name=f"random {geometry}")
    return out


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except OSError:
        # A file system without hard links.
        shutil.copyfile(source, to)


def _write_text(spec: ModelSpec, folder: Path) -> dict[str, FileRecord]:
    """A tokenizer with a token for every row of the embedding: bytes, made-up words, and an end."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"t{index}" for index in range(len(alphabet), spec.vocab_size - 1))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    assert made.get_vocab_size() == spec.vocab_size
    made.save(str(folder / "tokenizer.json"), pretty=False)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    marks = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    return {name: hash_file(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")}


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--variants", type=int, default=4, help="layers that differ")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    spec = MODELS[given.geometry]
    if given.layers is not None:
        spec = replace(spec, num_layers=given.layers, layers=spec.layers[: given.layers])
    began = time.perf_counter()
    write_model(spec, given.out, seed=given.seed, variants=given.variants, group_size=given.group_size)
    files = list(given.out.iterdir())
    size = sum(file.stat().st_size for file in files)
    held = sum(512 * blocks for blocks in {file.stat().st_ino: file.stat().st_blocks for file in files}.values())
    sys.stdout.write(
        f"{given.out}: {size / 1e9:.2f} GB of model, {held / 1e9:.2f} GB on the disk, "
        f"{time.perf_counter() - began:.1f} s\n"
    )


if __name__ == "__main__":
    main()
