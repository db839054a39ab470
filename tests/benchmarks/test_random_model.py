"""Random weights must be good enough for equal tokens to mean something."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.geometries import MODELS
from benchmarks.random_model import RandomCheckpoint, model_folder, write_model

from shardline.cluster.build import EngineOptions, build_engine, prepare
from shardline.cluster.request import Request
from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams
from shardline.stage import open_checkpoint
from shardline.stage.resident.checkpoint import check_files

STEPS = 24


@pytest.fixture(scope="module", params=["tiny", "tiny-experts"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / request.param
    write_model(MODELS[request.param], out)
    return out


def answers(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    async def run() -> list[tuple[int, ...]]:
        engine = build_engine(prepare(EngineOptions(model=str(folder), context=128, threads=1)))
        await engine.start()

        async def one(ids: tuple[int, ...]) -> tuple[int, ...]:
            params = SamplingParams(max_tokens=STEPS, ignore_eos=True, seed=0)
            stream = engine.generate(Request(token_ids=ids, params=params))
            return tuple([token async for delta in stream for token in delta.token_ids])

        try:
            return await asyncio.gather(*map(one, prompts))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_every_file_is_as_the_format_wants_it_and_layers_share_theirs(folder: Path) -> None:
    assert len(list(check_files(folder))) == 9
    inodes = {path.stat().st_ino for path in folder.glob("layer-*.safetensors")}
    assert len(inodes) == 4, "six layers of four variants"


def test_tokens_vary_and_hang_on_the_whole_prompt(folder: Path) -> None:
    rng = np.random.default_rng(1)
    first = tuple(map(int, rng.integers(1000, size=48)))
    # One token of the prompt, near its beginning, is another.
    changed = (*first[:5], (first[5] + 1) % 1000, *first[6:])
    others = [tuple(map(int, rng.integers(1000, size=48))) for _ in range(3)]
    given = answers(folder, [first, changed, *others])
    assert given[0] != given[1]
    for tokens in given:
        assert len(set(tokens)) >= STEPS // 2, tokens
    counts = Counter(token for tokens in given for token in tokens)
    assert counts.most_common(1)[0][1] <= len(given) * STEPS // 4


def test_another_seed_is_another_model_and_the_same_seed_the_same(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_model(MODELS["tiny"], tmp_path / name, seed=seed)
    prints = []
    for name in "abc":
        checkpoint = open_checkpoint(tmp_path / name)
        prints.append(checkpoint.fingerprint)
        checkpoint.close()
    assert prints[0] == prints[1] != prints[2]


def test_a_router_spreads_rows_over_all_experts() -> None:
    spec = MODELS["tiny-experts"]
    assert spec.experts is not None
    checkpoint = RandomCheckpoint(spec)
    rows = np.random.default_rng(0).standard_normal((512, spec.hidden_size)).astype(np.float32)
    rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    logits = rows @ checkpoint.vector("router", 0).T
    chosen = np.argsort(logits, axis=1)[:, -spec.experts.rule.experts_per_token :]
    counts = np.bincount(chosen.reshape(-1), minlength=spec.experts.num_experts)
    fair = chosen.size / spec.experts.num_experts
    assert counts.min() > 0.5 * fair
    assert counts.max() < 2 * fair


def test_no_two_rows_of_a_matrix_larger_than_the_pool_are_the_same() -> None:
    checkpoint = RandomCheckpoint(MODELS["tiny"])
    checkpoint._pool = checkpoint._pool[:4099]
    matrix = checkpoint.matrix("embed", None)
    assert len(np.unique(matrix.q, axis=0)) == len(matrix.q)


def test_each_part_of_a_matrix_has_the_size_that_is_wanted() -> None:
    checkpoint = RandomCheckpoint(MODELS["tiny"])
    matrix = checkpoint.matrix("gate", 0)
    values = (matrix.integers().astype(np.float32) - 8) * np.repeat(matrix.scale.astype(np.float32), 128, axis=1)
    rows = np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32)
    assert np.sqrt(np.mean((rows @ values.T) ** 2)) == pytest.approx(1.3, rel=0.15)
    assert abs(values.mean()) < 5 * values.std() / np.sqrt(values.size)


def test_the_folder_is_made_once_and_another_shape_is_another_folder(tmp_path: Path) -> None:
    made = model_folder("tiny", tmp_path)
    stamp = (made / "shardline.json").stat().st_mtime_ns
    assert model_folder("tiny", tmp_path) == made
    assert (made / "shardline.json").stat().st_mtime_ns == stamp
    assert model_folder("tiny", tmp_path, layers=3) != made
    assert model_folder("tiny", tmp_path, seed=1) != made


def test_the_backend_takes_its_matrices() -> None:
    backend = cpu_backend(1)
    try:
        backend.load_matrix([RandomCheckpoint(MODELS["tiny"]).matrix("q", 0)])
    finally:
        backend.close()
