"""A node that fetches its stage's files from a hub: for as long as something comes, and it says how far it is."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from huggingface_hub import constants

from shardline.cluster import StageLostError, hub
from shardline.cluster.engine import Engine
from shardline.cluster.engine_actor import serve, stop_serving
from shardline.cluster.ray_pipeline import RayPipeline
from shardline.cluster.ray_runtime import connected
from shardline.cluster.stage_fleet import RayPipelineConfig
from shardline.cluster.stage_loading import HubLoader, LoadedStage, ModelIdentity
from shardline.cluster.text.model_text import ModelText
from shardline.scheduler import SchedulerConfig
from shardline.stage import StageSpec

pytestmark = pytest.mark.ray

# The workers cannot import this file: what it defines goes to them by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class NodeLoader(HubLoader):
    """Of a node with a cache of its own.

    Attributes:
        url: The hub's.
        cache: The node's.
        computes: Whether what it loads does.
    """

    url: str = ""
    cache: str = ""
    computes: bool = False

    def _here(self) -> None:
        constants.ENDPOINT = self.url
        constants.HUGGINGFACE_CO_URL_TEMPLATE = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_CACHE = self.cache
        # A piece of the usual size would be more than the whole model.
        constants.DOWNLOAD_CHUNK_SIZE = 1 << 12

    def identity(self) -> ModelIdentity:
        return ModelIdentity(self.model.fingerprint, 64, 101)

    def fetch(self, spec: StageSpec) -> Path:
        self._here()
        return HubLoader.fetch(self, spec)

    def held_bytes(self) -> int:
        self._here()
        return HubLoader.held_bytes(self)

    def load(self, spec: StageSpec) -> LoadedStage:
        self._here()
        if self.computes:
            return HubLoader.load(self, spec)
        assert (hub.fetch_small(self.model) / f"layer{spec.first_layer}.safetensors").exists()

        class Nothing:
            def reset(self) -> None:
                pass

        runner: Any = Nothing()
        return LoadedStage(runner, self.identity(), "pretend", lambda: 0)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with connected(num_cpus=2):
        yield


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    files = _sibling("test_hub")
    made = files.Hub()
    made.publish(files.write_model(tmp_path / "published"))
    files.point_to(made.url, tmp_path, monkeypatch)
    yield made
    made.close()


def specs_of() -> list[StageSpec]:
    return [StageSpec(i, 2 * i, i + 2, i == 0, i == 1, 8, 16, "float32", 16, 2, 64, 1) for i in range(2)]


def pipeline_of(server: Any, tmp_path: Path, seconds: float) -> tuple[RayPipeline, list[str]]:
    """Of two stages on one node, and what it tells."""
    loader = NodeLoader(hub.pin("hf:maker/tiny"), server.url, str(tmp_path / "node"))
    told: list[str] = []
    config = RayPipelineConfig(load_seconds=seconds, look_seconds=0.5)
    return RayPipeline(specs_of(), loader, config=config, tell=told.append), told


def test_a_slow_fetch_is_waited_for_and_told(server: Any, tmp_path: Path) -> None:
    """It takes longer than a node may take to load."""
    pipeline, told = pipeline_of(server, tmp_path, 6.0)
    # Layers have 15 such pieces.
    server.slow = 1.0

    async def work() -> None:
        try:
            began = time.monotonic()
            await pipeline.start()
            assert time.monotonic() - began > 12
        finally:
            await pipeline.close()

    asyncio.run(work())
    assert {line.split(" on ")[0] for line in told} == {"stage 0", "stage 1"}
    assert all(line.endswith(f" GB of {hub.pin('hf:maker/tiny').name} are there") for line in told)
    assert len(told) > 6


def engine_of(url: str, folder: Path, published: Path, progress: Callable[[str], None]) -> Engine:
    """In the actor of the engine."""
    (commit,) = (path.name for path in (folder / "hub").glob("models--maker--tiny/snapshots/*"))
    loader = NodeLoader(hub.HubModel("maker/tiny", commit), url, str(folder / "node"), computes=True)
    pipeline = RayPipeline(specs_of(), loader, config=RayPipelineConfig(look_seconds=0.5), tell=progress)
    limits = SchedulerConfig(8, 16, 64, 2, 16, 16, 2)
    return Engine(pipeline, ModelText.from_folder(published, 101), limits)


def test_whoever_starts_an_engine_for_others_is_told_too(server: Any, tmp_path: Path) -> None:
    hub.pin("hf:maker/tiny")
    server.slow = 0.5
    told: list[str] = []
    serve(partial(engine_of, server.url, tmp_path, tmp_path / "published"), progress=told.append)
    stop_serving()
    assert {line.split(" on ")[0] for line in told} == {"stage 0", "stage 1"}
    # A line each half second and stage at the most, and none twice.
    assert 4 < len(told) < 100


def test_a_fetch_that_stands_still_is_given_up(server: Any, tmp_path: Path) -> None:
    pipeline, _ = pipeline_of(server, tmp_path, 6.0)
    server.slow = None

    async def work() -> None:
        with pytest.raises(StageLostError, match=r"pid \d+ on .* has fetched nothing more of hf:maker/tiny@.* for 6 s"):
            await pipeline.start()
        await pipeline.close()

    asyncio.run(work())
