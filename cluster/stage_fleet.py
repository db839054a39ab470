"""The stages' processes as a whole: placed, loaded, asked, replaced, ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray

from shardline._version import __version__
from shardline.cluster.errors import ShardlineError, StageLostError, TransportError
from shardline.cluster.gpu_bundles import GpuKey, hold_gpus
from shardline.cluster.gpus import GpuFinder
from shardline.cluster.pipeline import StageStats
from shardline.cluster.ray_runtime import Seat, StageBundles, StagePlacement, describe_cluster
from shardline.cluster.stage_loading import HubLoader, ModelIdentity, StageLoader
from shardline.cluster.stage_process import NoAnswerError, StageProcess
from shardline.cluster.wire.stage_worker import Progress
from shardline.stage import CheckpointError, StageSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RayPipelineConfig:
    """Limits of a pipeline over Ray.

    Attributes:
        max_in_flight: The most plans on their way; None takes four for each stage and four more. Each stage reserves
            address space for the hidden states of that many steps, and uses memory only for those that come.
        step_seconds: The longest time without any result while plans are in flight; then a stage is taken to hang.
        load_seconds: The longest time for a node to load its stage; and, where it fetches files first, however long
            that takes, the longest time without any more of them.
        look_seconds: How often a node that fetches is asked how far it is.
        placement_seconds: The longest time for Ray to find room for the stages.
        control_seconds: The longest time for a stage to answer a control call.
    """

    max_in_flight: int | None = None
    step_seconds: float = 180.0
    load_seconds: float = 900.0
    look_seconds: float = 10.0
    placement_seconds: float = 60.0
    control_seconds: float = 15.0


class StageFleet:
    """One process a stage, and the bundles that they sit in. Belongs to one event loop.

    Attributes:
        processes: One a stage, in order; empty before `start`.
    """

    def __init__(
        self,
        specs: tuple[StageSpec, ...],
        loader: StageLoader,
        identity: ModelIdentity,
        placements: Sequence[StagePlacement],
        config: RayPipelineConfig,
        max_in_flight: int,
        on_death: Callable[[int], None],
        finder: GpuFinder,
        tell: Callable[[str], None],
    ) -> None:
        """`on_death` is called in the event loop with the index of a stage whose process died unasked; `finder` says
        what GPU a process has; `tell` hears how far nodes are that fetch files."""
        assert len(placements) == len(specs)
        self._specs = specs
        self._loader = loader
        self._identity = identity
        self._placements = list(placements)
        self._config = config
        self._max_in_flight = max_in_flight
        self._on_death = on_death
        self._finder = finder
        self._tell = tell
        self._groups: list[StageBundles] = []
        # Of each stage by its index.
        self._seats: dict[int, Seat] = {}
        # Every node that was seen, and at which address.
        self._addresses: dict[str, str] = {}
        self._successors: dict[str, str] = {}
        self.processes: list[StageProcess] = []

    async def start(self) -> None:
        """Place and load every stage. Raises as `RayPipeline.start` does."""
        nodes = describe_cluster()
        self._addresses = {node.node_id: node.address for node in nodes}
        # A GPU is a certain node's: where there is but one node, nobody has to name it.
        self._placements = [replace(p, node_id=p.node_id or nodes[0].node_id) if p.gpu else p for p in self._placements]
        await self._place(range(len(self._specs)))
        self.processes = [self._new_process(index) for index in range(len(self._specs))]
        await all_of(self._load(process) for process in self.processes)

    async def replace_lost(self) -> None:
        """A fresh process for each one that was lost: in the same bundle, or on the node that came back in the place of
        a node that is gone. Raises as `RayPipeline.start` does."""
        gone = self.lost()
        await asyncio.gather(*(process.end() for process in gone))
        alive = {node.node_id: node.address for node in describe_cluster()}
        moved = []
        for process in gone:
            node_id = self._placements[process.stage].node_id
            if node_id is not None and node_id not in alive:
                self._follow(process, node_id, alive)
                moved.append(process.stage)
        # The bundles of the old groups wait for the old node; those groups' others hold stages that are well.
        await self._place(moved)
        fresh = [self._new_process(process.stage) for process in gone]
        for process in fresh:
            self.processes[process.stage] = process
        await all_of(self._load(process) for process in fresh)

    def _follow(self, process: StageProcess, node_id: str, alive: Mapping[str, str]) -> None:
        """Choose anew for a stage whose node is gone: where it has joined again, Ray knows it by another id."""
        successor = self._successors.get(node_id)
        if successor not in alive:
            back = (new for new, address in alive.items() if address == self._addresses.get(node_id))
            successor = next((new for new in back if new not in self._addresses), None)
        if successor is None:
            host = process.info.host if process.info else node_id
            raise StageLostError(
                process.stage, f"its node {host} is gone from the cluster, and has not joined again ({process.lost})"
            )
        # Two stages of one node follow it together.
        self._successors[node_id] = successor
        self._addresses[successor] = alive[successor]
        self._placements[process.stage] = replace(self._placements[process.stage], node_id=successor)

    async def _place(self, stages: Sequence[int]) -> None:
        """Get these stages their seats. Raises PlanningError."""
        on_cpus = [stage for stage in stages if self._placements[stage].gpu is None]
        if on_cpus:
            bundles = StageBundles([self._placements[stage] for stage in on_cpus])
            self._groups.append(bundles)
            await bundles.wait(self._config.placement_seconds)
            self._seats |= {stage: bundles.seat(place) for place, stage in enumerate(on_cpus)}
        sharing: dict[GpuKey, list[int]] = {}
        for stage in stages:
            placement = self._placements[stage]
            if placement.gpu is not None:
                assert placement.node_id is not None
                sharing.setdefault((placement.node_id, placement.gpu), []).append(stage)
        held = await hold_gpus(sharing, self._finder, self._config.placement_seconds)
        self._groups += held.values()
        for key, together in sharing.items():
            # Ray counts in ten-thousandths; rounded down, so that the parts of a GPU are never more than it.
            part = math.floor(10_000 / len(together)) / 10_000
            self._seats |= {stage: Seat(held[key], 0, {"GPU": part}) for stage in together}

    async def end(self) -> None:
        """End every process and give the bundles back."""
        if not ray.is_initialized():
            return
        await asyncio.gather(*(process.end() for process in self.processes))
        for group in self._groups:
            group.remove()

    def lost(self) -> list[StageProcess]:
        """Those that must be replaced."""
        return [process for process in self.processes if process.lost is not None]

    def nodes(self) -> list[str]:
        """Ray's id of each stage's node."""
        return [process.info.node_id if process.info else "" for process in self.processes]

    async def loss(self, process: StageProcess, reason: str) -> StageLostError:
        """Mark a process as lost: the error, with what it left in its log."""
        process.lost = process.lost or reason
        words = await process.last_words()
        return StageLostError(process.stage, f"{process.lost}\nThe end of its log:\n{words}" if words else process.lost)

    async def control(self, process: StageProcess, method: str, *args: object) -> Any:
        """A control call of the wiring. Raises StageLostError."""
        try:
            return await process.call(method, *args, timeout=self._config.control_seconds)
        except NoAnswerError as error:
            raise await self.loss(process, str(error)) from error
        except TransportError as error:
            if method == "listen":
                # Its last step still runs, or it has no such address.
                raise await self.loss(process, str(error)) from error
            raise StageLostError(None, str(error)) from error

    async def stats(self) -> list[StageStats]:
        """Figures of every stage that answers."""
        answers = await self._ask("stats", self._config.control_seconds)
        return [answer for answer in answers if isinstance(answer, StageStats)]

    async def find_hung(self, overdue_seconds: float | None) -> list[str]:
        """Ask every stage how it stands, and mark as lost those that do not answer or, if anything is overdue, have
        been in one step for half of that time. Returns what the others say of their connections."""
        answers = await self._ask("progress", min(2.0, self._config.control_seconds))
        reports = []
        for process, answer in zip(self.processes, answers, strict=True):
            if not isinstance(answer, Progress):
                continue
            if overdue_seconds and answer.running is not None and answer.running_seconds >= 0.5 * overdue_seconds:
                process.lost = (
                    f"{process.where} has been computing step {answer.running} for {answer.running_seconds:.1f} s"
                )
            elif answer.ended is not None:
                reports.append(f"stage {process.stage} says: {answer.ended}")
        return reports

    async def _ask(self, method: str, timeout: float) -> list[Any]:
        return await asyncio.gather(
            *(process.call(method, timeout=timeout) for process in self.processes), return_exceptions=True
        )

    def _new_process(self, index: int) -> StageProcess:
        return StageProcess(index, self._seats[index], self._died)

    def _died(self, process: StageProcess) -> None:
        if self.processes[process.stage : process.stage + 1] == [process]:
            self._on_death(process.stage)

    async def _load(self, process: StageProcess) -> None:
        """Load a stage in its process. Raises as `start` does."""
        index = process.stage
        try:
            gpu = self._placements[index].gpu
            finder = self._finder if gpu is not None else None
            process.info = info = await process.call("describe", finder, timeout=self._config.placement_seconds)
            if info.version != __version__:
                raise StageLostError(
                    index, f"node {info.host} has shardline {info.version}, the engine has {__version__}: install one"
                )
            if info.gpu != gpu:
                raise StageLostError(index, f"on {info.host} it has the GPU {info.gpu}, and {gpu} is planned for it")
            if isinstance(self._loader, HubLoader):
                await self._fetch(process, info.host, self._loader)
            found = await process.call(
                "load",
                index,
                self._specs,
                self._loader,
                self._identity,
                self._max_in_flight,
                timeout=self._config.load_seconds,
            )
        except NoAnswerError as error:
            raise await self.loss(process, str(error)) from error
        except (ShardlineError, CheckpointError):
            raise
        except Exception as error:
            raise await self.loss(process, f"{type(error).__name__}: {error}") from error
        if found != self._identity:
            raise CheckpointError(
                getattr(self._loader, "path", "model"),
                "fingerprint",
                f"node {info.host} has another file at this path ({found.fingerprint}) than the engine "
                f"({self._identity.fingerprint})",
            )

    async def _fetch(self, process: StageProcess, host: str, loader: HubLoader) -> None:
        """Have a stage's files on its node: it may take hours, but something must come. Raises as `call` does."""
        fetching = asyncio.ensure_future(process.call("fetch", loader, self._specs[process.stage], timeout=None))
        loop, seconds = asyncio.get_running_loop(), self._config.load_seconds
        held, since = -1, loop.time()
        try:
            while not (await asyncio.wait([fetching], timeout=self._config.look_seconds))[0]:
                now = await process.call("held_bytes", loader, timeout=seconds)
                if now != held:
                    held, since = now, loop.time()
                    self._tell(f"stage {process.stage} on {host}: {held / 1e9:.1f} GB of {loader.path} are there")
                elif loop.time() - since > seconds:
                    process.lost = f"{process.where} has fetched nothing more of {loader.path} for {seconds:g} s"
                    raise NoAnswerError(process.lost)
            await fetching
        finally:
            fetching.cancel()


async def all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results; waits for all of them before it raises the first error, so that nothing goes on behind its back."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
