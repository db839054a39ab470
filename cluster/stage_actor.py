"""The Ray actor around one stage: control calls only. Hidden states and plans never pass through Ray."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline._version import __version__
from shardline.cluster.gpus import GpuFinder, wait_until_free
from shardline.cluster.pipeline import StageStats
from shardline.cluster.stage_loading import HubLoader, LoadedStage, ModelIdentity, StageLoader, plan_hash
from shardline.cluster.wire.handshake import Credentials
from shardline.cluster.wire.stage_worker import Progress, StageWorker
from shardline.stage.errors import CheckpointError
from shardline.stage.spec import StageSpec

LOOPBACK = "127.0.0.1"
FREE_SECONDS = 10.0
"""For a GPU to get back what a killed process had on it."""
FREE_SHARE = 0.9
"""Of a stage's limit, what is waited for: a plan uses no more, and others on the card may have grown a little."""
CONTROL_THREADS = 4
"""Actor threads: one sits in `sentinel`; `load`, `fetch` or `listen` may wait while a third says how it stands."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Where an actor runs.

    Attributes:
        pid: Its process.
        start_ticks: When that process started, so that a reused pid is never taken for it.
        node_id: Ray's id of its node.
        host: The node's name.
        version: shardline's version there.
        error_log: The file that has its standard error, or None.
        gpu: The PCI address of its GPU; None if it has none.
    """

    pid: int
    start_ticks: int
    node_id: str
    host: str
    version: str
    error_log: str | None
    gpu: str | None = None


def start_ticks(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None if there is none or it is a zombie."""
    try:
        # The second field, the command's name, may contain anything, brackets and blanks too.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class StageActor:
    """One stage's process. Created with max_restarts=0: when it dies the pipeline replaces it, once, knowingly."""

    def __init__(self) -> None:
        # A crash in native code leaves its trace in the worker's log: the guilty thread's, not forty idle ones'.
        faulthandler.enable(all_threads=False)
        # The data threads must get the interpreter soon after a step's Python part has it; the default is 5 ms.
        sys.setswitchinterval(0.0005)
        self._loaded: LoadedStage | None = None
        self._worker: StageWorker | None = None
        self._spec: StageSpec | None = None
        self._finder: GpuFinder | None = None

    def describe(self, finder: GpuFinder | None) -> ProcessInfo:
        """Where this actor runs. finder: Says which GPU it has; None if it needs none. Raises KernelsError."""
        import ray

        self._finder = finder
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        return ProcessInfo(
            os.getpid(),
            ticks,
            ray.get_runtime_context().get_node_id(),
            platform.node(),
            __version__,
            _error_log(),
            finder.held() if finder is not None else None,
        )

    def fetch(self, loader: HubLoader, spec: StageSpec) -> None:
        """Have what the stage reads on this node's disk. Raises ModelNotFoundError, CheckpointError."""
        loader.fetch(spec)

    def held_bytes(self, loader: HubLoader) -> int:
        """How far `fetch` is."""
        return loader.held_bytes()

    def load(
        self, index: int, specs: Sequence[StageSpec], loader: StageLoader, identity: ModelIdentity, max_in_flight: int
    ) -> ModelIdentity:
        """Load stage `index` from this node's own disk. Returns the identity of what was found here; when it is not the
        engine's nothing is loaded."""
        spec = specs[index]
        # Read by numba and by numeric libraries when they are first imported, which is now.
        os.environ["NUMBA_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
        try:
            found = loader.identity()
            if found != identity:
                return found
            if self._finder is not None and spec.memory_bytes is not None:
                # Of a stage that was replaced the old process is gone, but what it had may not have come back yet.
                wait_until_free(int(FREE_SHARE * spec.memory_bytes), FREE_SECONDS, self._finder.free_bytes)
            self._loaded = loader.load(spec)
        except CheckpointError as error:
            raise CheckpointError(error.path, error.field, f"{error.problem} (on node {platform.node()})") from error
        self._spec = spec
        self._worker = StageWorker(
            index, len(specs), self._loaded.runner, identity.hidden_size, spec.max_step_tokens, max_in_flight
        )
        self._plan_hash = plan_hash(specs, identity)
        return self._loaded.identity

    def listen(
        self, key: bytes, epoch: int, from_this_host: bool, last_on_this_host: bool | None = None
    ) -> tuple[tuple[str, int], tuple[str, int] | None]:
        """Begin an epoch: forget every sequence and wait for the stage before, and on the first of several stages for
        the last one too. Returns both addresses. Raises TransportError."""
        worker = self._ready_worker()
        address = worker.listen(_host(from_this_host), Credentials(key, epoch, self._plan_hash))
        return address, None if last_on_this_host is None else worker.listen_for_tokens(_host(last_on_this_host))

    def connect(self, address: tuple[str, int], first: tuple[str, int] | None = None) -> None:
        """Connect to the next stage, and the last one to the first. Raises TransportError."""
        self._ready_worker().connect(address, first)

    def sentinel(self) -> None:
        """Never returns: its reference fails when this process dies."""
        threading.Event().wait()

    def progress(self) -> Progress:
        """Where it stands."""
        return self._ready_worker().progress()

    def stats(self) -> StageStats:
        """Its figures."""
        counters = self._ready_worker().counters()
        assert self._spec is not None
        assert self._loaded is not None
        return StageStats(
            self._spec,
            f"{platform.node()} {_gpu_name() or self._loaded.device}",
            os.getpid(),
            self._loaded.resident_bytes(),
            counters.steps,
            counters.rows,
            counters.busy_seconds,
            counters.wall_seconds,
            counters.send_seconds,
            counters.receive_seconds,
            self._loaded.numeric_class,
        )

    def _ready_worker(self) -> StageWorker:
        assert self._worker is not None, "load first"
        return self._worker


def _host(from_this_host: bool) -> str:
    return LOOPBACK if from_this_host else host_address()


def host_address() -> str:
    """The address at which other hosts reach this one: SHARDLINE_HOST_IP, or the one that Ray knows this node by."""
    import ray.util

    util: Any = ray.util
    return os.environ.get("SHARDLINE_HOST_IP") or str(util.get_node_ip_address())


def _gpu_name() -> str:
    """ "GPU 1", as Ray counts them on this node; empty without one."""
    import ray

    numbers = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return f"GPU {','.join(numbers)}" if numbers else ""


def _error_log() -> str | None:
    try:
        path = os.readlink(f"/proc/{os.getpid()}/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and Path(path).is_file() else None
