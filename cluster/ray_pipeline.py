"""The pipeline over Ray: wiring, watching, and bringing a lost stage back.

Ray places and starts the stages' processes, carries control calls and says when one dies (stage_fleet.py). Plans,
hidden states and results go over sockets of our own (wire/engine_link.py, wire/stage_worker.py). A life of the pipeline
between two wirings is an *epoch*; whatever breaks ends it, and `recover` begins the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from shardline.cluster.errors import ShardlineError, StageLostError, TransportError
from shardline.cluster.gpus import CudaFinder, GpuFinder, nobody
from shardline.cluster.pipeline import StageStats
from shardline.cluster.ray_runtime import StagePlacement
from shardline.cluster.stage_actor import LOOPBACK, host_address
from shardline.cluster.stage_fleet import RayPipelineConfig, StageFleet, all_of
from shardline.cluster.stage_loading import CheckpointLoader, StageLoader, plan_hash
from shardline.cluster.wire.engine_link import EngineLink
from shardline.cluster.wire.frames import Frame, FrameKind, StageFailure, decode_failure, decode_result, encode_message
from shardline.cluster.wire.handshake import Credentials
from shardline.scheduler import StepPlan, StepResult
from shardline.stage import CheckpointError, StageSpec


class RayPipeline:
    """Implements `Pipeline` with one Ray actor a stage. Ray must be connected (`ray_runtime.connected`)."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        model: Path | str | StageLoader,
        placements: Sequence[StagePlacement] | None = None,
        config: RayPipelineConfig | None = None,
        finder: GpuFinder | None = None,
        tell: Callable[[str], None] = nobody,
    ) -> None:
        """
        Args:
            specs: The stages' shares, in order.
            model: A model file, which every node has at the same path; or how a node gets its stage otherwise.
            placements: Where each stage goes; None leaves it to Ray.
            config: Limits.
            finder: How processes learn which GPU they have; None asks the driver.
            tell: Called in the event loop with a line about how far a node is that fetches its files.

        Raises:
            ModelNotFoundError, CheckpointError: this host's own copy of the file is missing or cannot be used.
        """
        self._specs = tuple(specs)
        loader = CheckpointLoader(Path(model).absolute()) if isinstance(model, (Path, str)) else model
        self._identity = loader.identity()
        self._config = config or RayPipelineConfig()
        self._max_in_flight = self._config.max_in_flight or 4 * len(self._specs) + 4
        self._fleet = StageFleet(
            self._specs,
            loader,
            self._identity,
            placements or [StagePlacement() for _ in self._specs],
            self._config,
            self._max_in_flight,
            lambda stage: self._diagnose(f"the process of stage {stage} died"),
            finder or CudaFinder(),
            tell,
        )
        self._key = secrets.token_bytes(32)
        self._plan_hash = plan_hash(self._specs, self._identity)
        self._epoch = 0
        self._link: EngineLink | None = None
        self._in_flight: deque[int] = deque()
        self._results: deque[StepResult] = deque()
        self._last_progress = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.Future[bytes] | None = None
        self._lost: StageLostError | None = StageLostError(None, "the pipeline has not been started")
        self._diagnosis: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def specs(self) -> tuple[StageSpec, ...]:
        """The stages' shares, in order."""
        return self._specs

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._identity.vocab_size

    # -- the engine's calls ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Place, load and connect the stages, and send a probe through all of them.

        Raises:
            PlanningError: Ray has no room for the stages.
            ModelNotFoundError, CheckpointError: a node lacks the file, has another one or cannot use it; names it.
            StageLostError: a stage's process failed, in its own words.
        """
        try:
            await self._fleet.start()
            await self._wire()
        except BaseException:
            await self.close()
            raise

    async def submit(self, plan: StepPlan) -> None:
        """Send a plan on its way; waits while `max_in_flight` are. Raises StageLostError."""
        while self._lost is None and len(self._in_flight) >= self._max_in_flight:
            await self._changed.wait()
        self._raise_if_lost()
        assert self._link is not None
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._in_flight.append(plan.step_id)
        self._link.send(Frame(FrameKind.STEP, plan.step_id, encode_message(plan)))
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._config.step_seconds, self._check_deadline)

    async def result(self) -> StepResult:
        """The oldest plan's result; waits for a plan too. Raises StageLostError, when anything is in flight soon after
        `step_seconds` without a result at the latest."""
        while not self._results:
            self._raise_if_lost()
            await self._changed.wait()
        return self._results.popleft()

    async def recover(self) -> None:
        """Replace the stages that were lost, reset the others, and wire them anew. Raises StageLostError."""
        self._end_epoch(StageLostError(None, "the pipeline is being rewired"))
        error = StageLostError(None, "the pipeline was closed")
        # A stage that seemed well may turn out to be lost when it is asked to listen again: hence more than one round.
        for _ in range(len(self._specs) + 1):
            if self._diagnosis is not None:
                await asyncio.wait([self._diagnosis])
            if self._closed:
                break
            try:
                await self._fleet.replace_lost()
                await self._wire()
            except StageLostError as again:
                error = again
                self._end_epoch(again)
                if not self._fleet.lost():
                    break
            except (ShardlineError, CheckpointError) as problem:
                raise StageLostError(None, str(problem)) from problem
            else:
                return
        raise error

    async def stats(self) -> list[StageStats]:
        """Figures of every stage that answers."""
        return await self._fleet.stats()

    async def close(self) -> None:
        """End every process that was started and give its place back. Idempotent."""
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.create_task(self._close())
        # It goes on when a caller is cancelled, and a second caller waits for it.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._end_epoch(StageLostError(None, "the pipeline was closed"))
        if self._diagnosis is not None:
            self._diagnosis.cancel()
            await asyncio.wait([self._diagnosis])
        await self._fleet.end()

    # -- wiring ------------------------------------------------------------------------------------------------------

    async def _wire(self) -> None:
        """Begin an epoch: connect engine, stages, engine; see that a probe comes round. Raises StageLostError."""
        self._epoch += 1
        self._lost = None
        processes = self._fleet.processes
        seconds = self._config.control_seconds
        nodes = self._fleet.nodes()
        engine_node = ray.get_runtime_context().get_node_id()
        upstream = [engine_node, *nodes]
        self._link = link = self._new_link(LOOPBACK if nodes[-1] == engine_node else host_address())
        last = len(processes) - 1
        addresses = await all_of(
            self._fleet.control(
                p,
                "listen",
                self._key,
                self._epoch,
                nodes[p.stage] == upstream[p.stage],
                nodes[0] == nodes[last] if p.stage == 0 < last else None,
            )
            for p in processes
        )
        (first, for_tokens), *behind = addresses
        following = [*(address for address, _ in behind), link.address]
        await all_of(
            [
                *(
                    self._fleet.control(p, "connect", following[p.stage], for_tokens if p.stage == last else None)
                    for p in processes
                ),
                _open(link, first, seconds),
            ]
        )
        self._raise_if_lost()
        self._probe = asyncio.get_running_loop().create_future()
        link.send(Frame(FrameKind.PROBE, 0, b""))
        try:
            passed = await asyncio.wait_for(self._probe, seconds)
        except TimeoutError:
            raise StageLostError(None, f"a probe did not come back within {seconds:g} s") from None
        finally:
            self._probe = None
        if passed != bytes(range(len(processes))):
            raise StageLostError(None, f"a probe passed stages {list(passed)}")

    def _new_link(self, host: str) -> EngineLink:
        epoch = self._epoch
        loop = asyncio.get_running_loop()

        def in_loop(call: Any, argument: object) -> None:
            # The loop may be closed already when a link that nobody needs any more says its last.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call, epoch, argument)

        try:
            return EngineLink(
                host,
                Credentials(self._key, epoch, self._plan_hash),
                len(self._specs),
                lambda frame: in_loop(self._arrived, _decode(frame)),
                lambda reason: in_loop(self._link_ended, reason),
            )
        except TransportError as error:
            raise StageLostError(None, str(error)) from error

    # -- what comes from the link ------------------------------------------------------------------------------------

    def _arrived(self, epoch: int, message: StepResult | StageFailure | bytes | TransportError) -> None:
        if epoch != self._epoch or self._lost is not None:
            return
        match message:
            case StepResult():
                due = self._in_flight[0] if self._in_flight else None
                if message.step_id != due:
                    came = f"the result of step {message.step_id} came where step {due}'s was due"
                    self._end_epoch(StageLostError(None, came))
                    return
                self._in_flight.popleft()
                self._results.append(message)
                self._last_progress = time.monotonic()
                self._wake()
            case StageFailure():
                if not message.keeps_state:
                    self._fleet.processes[message.stage].lost = message.text
                self._end_epoch(StageLostError(message.stage, f"{message.error}: {message.text}"))
            case TransportError():
                self._end_epoch(StageLostError(None, str(message)))
            case bytes():
                if self._probe is not None and not self._probe.done():
                    self._probe.set_result(message)

    def _link_ended(self, epoch: int, reason: str) -> None:
        if epoch == self._epoch:
            self._diagnose(reason)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageLostError(self._lost.stage, self._lost.reason)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_epoch(self, error: StageLostError) -> None:
        """Plans in flight are gone; whoever waits learns why. Of several reasons the first counts."""
        if self._lost is None:
            self._lost = error
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._probe is not None and not self._probe.done():
            self._probe.set_exception(StageLostError(self._lost.stage, self._lost.reason))
        self._in_flight.clear()
        self._results.clear()
        self._wake()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _check_deadline(self) -> None:
        self._deadline = None
        if not self._in_flight:
            return
        seconds = self._config.step_seconds
        left = self._last_progress + seconds - time.monotonic()
        if left > 0:
            self._deadline = asyncio.get_running_loop().call_later(left, self._check_deadline)
        else:
            self._diagnose(f"no result of step {self._in_flight[0]} within {seconds:g} s", overdue=True)

    def _diagnose(self, symptom: str, *, overdue: bool = False) -> None:
        """Find out which stage it was, then end the epoch with what is known."""
        if self._lost is None and (self._diagnosis is None or self._diagnosis.done()):
            self._diagnosis = asyncio.get_running_loop().create_task(self._end_with_culprit(symptom, overdue))

    async def _end_with_culprit(self, symptom: str, overdue: bool) -> None:
        epoch = self._epoch
        try:
            error = await self._culprit(symptom, overdue)
        except Exception as problem:
            # Whatever goes wrong in finding out, those who wait must not wait for ever.
            error = StageLostError(None, f"{symptom}; and finding the stage failed: {problem!r}")
        if epoch == self._epoch:
            self._end_epoch(error)

    async def _culprit(self, symptom: str, overdue: bool) -> StageLostError:
        if self._link is not None:
            # Every stage learns of it at once, and none waits for a neighbour that is gone.
            self._link.close()
        # A closed connection is seen some milliseconds before Ray's notice of the death behind it.
        patience = time.monotonic() + 1.0
        while not overdue and not self._fleet.lost() and time.monotonic() < patience:
            await asyncio.sleep(0.005)
        reports: list[str] = []
        if not self._fleet.lost():
            reports = await self._fleet.find_hung(self._config.step_seconds if overdue else None)
        lost = self._fleet.lost()
        if not lost:
            return StageLostError(None, "; ".join([symptom, *reports]))
        loss = await self._fleet.loss(lost[0], symptom)
        others = "".join(f"; also stage {process.stage}: {process.lost}" for process in lost[1:])
        return StageLostError(loss.stage, f"{loss.reason}{others}" + (f" ({symptom})" if overdue else ""))


def _decode(frame: Frame) -> StepResult | StageFailure | bytes | TransportError:
    """On the link's thread, so that the event loop is spared of it."""
    try:
        match frame.kind:
            case FrameKind.RESULT:
                return decode_result(frame.meta)
            case FrameKind.FAILURE:
                return decode_failure(frame.meta)
            case _:
                return bytes(frame.meta)
    except TransportError as error:
        return error


async def _open(link: EngineLink, first: tuple[str, int], seconds: float) -> None:
    try:
        await asyncio.to_thread(link.open, first, seconds)
    except TransportError as error:
        raise StageLostError(None, str(error)) from error
