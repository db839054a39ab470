"""The pipeline over Ray: placement, loading, wiring, watching, and bringing a lost stage back.

Ray places and starts the stages' processes, carries control calls and says when one dies. Plans, hidden states and
results go over sockets of our own (engine_link.py, stage_worker.py). A life of the pipeline between two wirings is an
*epoch*; whatever breaks ends it, and `recover` begins the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray

from shardline._version import __version__
from shardline.cluster.engine_link import EngineLink
from shardline.cluster.errors import ShardlineError, StageLostError, TransportError
from shardline.cluster.frames import Frame, FrameKind, StageFailure, decode_failure, decode_result, encode_message
from shardline.cluster.handshake import Credentials
from shardline.cluster.pipeline import StageStats
from shardline.cluster.ray_runtime import StageBundles, StagePlacement
from shardline.cluster.stage_actor import LOOPBACK, host_address
from shardline.cluster.stage_loading import CheckpointLoader, ModelIdentity, StageLoader, plan_hash
from shardline.cluster.stage_process import NoAnswerError, StageProcess
from shardline.cluster.stage_worker import Progress
from shardline.scheduler import StepPlan, StepResult
from shardline.stage import CheckpointError, StageSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RayPipelineConfig:
    """Limits of a pipeline over Ray.

    Attributes:
        max_in_flight: The most plans on their way; None takes four for each stage and four more. Each stage reserves
            address space for the hidden states of that many steps, and uses memory only for those that come.
        step_seconds: The longest time without any result while plans are in flight; then a stage is taken to hang.
        load_seconds: The longest time for a node to load its stage.
        placement_seconds: The longest time for Ray to find room for the stages.
        control_seconds: The longest time for a stage to answer a control call.
    """

    max_in_flight: int | None = None
    step_seconds: float = 120.0
    load_seconds: float = 900.0
    placement_seconds: float = 60.0
    control_seconds: float = 15.0


class RayPipeline:
    """Implements `Pipeline` with one Ray actor a stage. Ray must be connected (`ray_runtime.connected`)."""

    def __init__(
        self,
        specs: Sequence[StageSpec],
        model: Path | str | StageLoader,
        placements: Sequence[StagePlacement] | None = None,
        config: RayPipelineConfig | None = None,
    ) -> None:
        """
        Args:
            specs: The stages' shares, in order.
            model: A model file, which every node has at the same path; or how a node gets its stage otherwise.
            placements: Where each stage goes; None leaves it to Ray, one CPU each.
            config: Limits.

        Raises:
            CheckpointError: this host's own copy of the file cannot be used.
        """
        self._specs = tuple(specs)
        self._loader: StageLoader = (
            CheckpointLoader(Path(model).absolute()) if isinstance(model, (Path, str)) else model
        )
        self._identity: ModelIdentity = self._loader.identity()
        self._placements = tuple(placements) if placements else tuple(StagePlacement() for _ in specs)
        assert len(self._placements) == len(self._specs)
        self._config = config or RayPipelineConfig()
        self._max_in_flight = self._config.max_in_flight or 4 * len(self._specs) + 4
        self._key = secrets.token_bytes(32)
        self._plan_hash = plan_hash(self._specs, self._identity)
        self._epoch = 0
        self._bundles: StageBundles | None = None
        self._stages: list[StageProcess] = []
        self._link: EngineLink | None = None
        self._in_flight: deque[int] = deque()
        self._results: deque[StepResult] = deque()
        self._last_progress = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.Future[bytes] | None = None
        self._lost: StageLostError | None = None
        self._diagnosis: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closed = False

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
        assert not self._stages, "start() is called once"
        try:
            self._bundles = StageBundles(self._placements)
            await asyncio.to_thread(self._bundles.wait, self._config.placement_seconds)
            self._stages = [self._new_process(index) for index in range(len(self._specs))]
            await _all(self._load(process) for process in self._stages)
            await self._wire()
        except BaseException:
            await self.close()
            raise

    async def submit(self, plan: StepPlan) -> None:
        """Send a plan on its way; waits while `max_in_flight` are. Raises StageLostError."""
        while self._lost is None and len(self._in_flight) >= self._max_in_flight:
            await self._changed.wait()
        self._raise_if_lost()
        if self._link is None:
            raise StageLostError(None, "the pipeline is not connected")
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._in_flight.append(plan.step_id)
        self._link.send(Frame(FrameKind.STEP, plan.step_id, encode_message(plan)))
        self._watch()

    async def result(self) -> StepResult:
        """The oldest plan's result. Raises StageLostError, at the latest `step_seconds` after the last result."""
        while not self._results:
            self._raise_if_lost()
            await self._changed.wait()
        return self._results.popleft()

    async def recover(self) -> None:
        """Replace the stages that were lost, reset the others, and wire them anew. Raises StageLostError."""
        if self._closed:
            raise StageLostError(None, "the pipeline was closed")
        self._end_epoch(StageLostError(None, "the pipeline is being rewired"))
        last: StageLostError | None = None
        # A stage that seemed well may turn out to be lost when it is asked to listen again: hence more than one round.
        for _ in range(len(self._specs) + 1):
            if self._diagnosis is not None:
                await asyncio.wait([self._diagnosis])
            try:
                await self._replace_lost()
                await self._wire()
            except StageLostError as error:
                last = error
                self._end_epoch(error)
                if not any(process.lost for process in self._stages):
                    break
            except (ShardlineError, CheckpointError) as error:
                raise StageLostError(None, str(error)) from error
            else:
                return
        assert last is not None
        raise last

    async def stats(self) -> list[StageStats]:
        """Figures of every stage that answers."""
        answers = await asyncio.gather(
            *(p.call("stats", timeout=self._config.control_seconds) for p in self._stages if p.lost is None),
            return_exceptions=True,
        )
        return [answer for answer in answers if isinstance(answer, StageStats)]

    async def close(self) -> None:
        """End every process that was started and give its place back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._end_epoch(StageLostError(None, "the pipeline was closed"))
        if self._diagnosis is not None:
            self._diagnosis.cancel()
            await asyncio.gather(self._diagnosis, return_exceptions=True)
        if not ray.is_initialized():
            return
        await asyncio.gather(*(process.end() for process in self._stages))
        if self._bundles is not None:
            self._bundles.remove()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _new_process(self, index: int) -> StageProcess:
        assert self._bundles is not None
        return StageProcess(index, self._bundles, self._process_died)

    async def _load(self, process: StageProcess) -> None:
        """Load a stage in its process. Raises as `start` does."""
        index = process.stage
        try:
            process.info = info = await process.call("describe", timeout=self._config.placement_seconds)
            if info.version != __version__:
                raise StageLostError(
                    index, f"node {info.host} has shardline {info.version}, the engine has {__version__}: install one"
                )
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
            raise await self._loss(process, str(error)) from error
        except (ShardlineError, CheckpointError):
            raise
        except Exception as error:
            raise await self._loss(process, f"{type(error).__name__}: {error}") from error
        if found != self._identity:
            raise CheckpointError(
                getattr(self._loader, "path", "model"),
                "fingerprint",
                f"node {info.host} has another file at this path ({found.fingerprint}) than the engine "
                f"({self._identity.fingerprint})",
            )

    async def _replace_lost(self) -> None:
        gone = [process for process in self._stages if process.lost is not None]
        await asyncio.gather(*(process.end() for process in gone))
        fresh = [self._new_process(process.stage) for process in gone]
        for process in fresh:
            self._stages[process.stage] = process
        await _all(self._load(process) for process in fresh)

    async def _loss(self, process: StageProcess, reason: str) -> StageLostError:
        """The error of a lost stage, with what its process left in its log."""
        process.lost = process.lost or reason
        words = await process.last_words()
        return StageLostError(process.stage, f"{reason}\nThe end of its log:\n{words}" if words else reason)

    def _process_died(self, process: StageProcess) -> None:
        if not self._closed and self._stages[process.stage : process.stage + 1] == [process]:
            self._diagnose(f"stage {process.stage}'s process died")

    # -- wiring ------------------------------------------------------------------------------------------------------

    async def _wire(self) -> None:
        """Begin an epoch: connect engine, stages, engine; see that a probe comes round. Raises StageLostError."""
        self._epoch += 1
        self._lost = None
        epoch = self._epoch
        loop = asyncio.get_running_loop()

        def from_link(call: Any, *args: object) -> None:
            # The loop may be closed already when a link that nobody needs any more says its last.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(call, epoch, *args)

        nodes = [process.info.node_id if process.info else "" for process in self._stages]
        engine_node = ray.get_runtime_context().get_node_id()
        try:
            link = EngineLink(
                LOOPBACK if nodes[-1] == engine_node else host_address(),
                Credentials(self._key, epoch, self._plan_hash),
                len(self._stages),
                lambda frame: from_link(self._arrived, _decode(frame)),
                lambda reason: from_link(self._link_ended, reason),
            )
        except TransportError as error:
            raise StageLostError(None, str(error)) from error
        self._link = link
        upstream = [engine_node, *nodes]
        seconds = self._config.control_seconds
        addresses: list[tuple[str, int]] = await _all(
            self._control(process, "listen", self._key, epoch, nodes[process.stage] == upstream[process.stage])
            for process in self._stages
        )
        following = [*addresses[1:], link.address]
        await _all(
            [
                *(self._control(process, "connect", following[process.stage]) for process in self._stages),
                self._open(link, addresses[0]),
            ]
        )
        self._probe = loop.create_future()
        link.send(Frame(FrameKind.PROBE, 0, b""))
        try:
            passed = await asyncio.wait_for(self._probe, seconds)
        except TimeoutError:
            raise StageLostError(None, f"a probe did not come back within {seconds:g} s") from None
        finally:
            self._probe = None
        if passed != bytes(range(len(self._stages))):
            raise StageLostError(None, f"a probe passed stages {list(passed)}")

    async def _control(self, process: StageProcess, method: str, *args: object) -> Any:
        try:
            return await process.call(method, *args, timeout=self._config.control_seconds)
        except NoAnswerError as error:
            raise await self._loss(process, str(error)) from error
        except TransportError as error:
            if method == "listen":
                # Its last step still runs, or it has no such address.
                raise await self._loss(process, str(error)) from error
            raise StageLostError(None, str(error)) from error

    async def _open(self, link: EngineLink, first: tuple[str, int]) -> None:
        try:
            await asyncio.to_thread(link.open, first, self._config.control_seconds)
        except TransportError as error:
            raise StageLostError(None, str(error)) from error

    # -- what comes from the link ------------------------------------------------------------------------------------

    def _arrived(self, epoch: int, message: StepResult | StageFailure | bytes | TransportError) -> None:
        if epoch != self._epoch or self._lost is not None:
            return
        match message:
            case bytes():
                if self._probe is not None and not self._probe.done():
                    self._probe.set_result(message)
            case StageFailure():
                if not message.keeps_state:
                    self._stages[message.stage].lost = message.text
                self._end_epoch(StageLostError(message.stage, f"{message.error}: {message.text}"))
            case TransportError():
                self._end_epoch(StageLostError(None, str(message)))
            case StepResult():
                due = self._in_flight[0] if self._in_flight else None
                if message.step_id != due:
                    self._end_epoch(
                        StageLostError(None, f"the result of step {message.step_id} came, step {due}'s is due")
                    )
                    return
                self._in_flight.popleft()
                self._results.append(message)
                self._last_progress = time.monotonic()
                self._wake()

    def _link_ended(self, epoch: int, reason: str) -> None:
        if epoch == self._epoch and self._lost is None:
            self._diagnose(reason)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise StageLostError(self._lost.stage, self._lost.reason)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_epoch(self, error: StageLostError) -> None:
        """Plans in flight are gone; whoever waits learns why."""
        if self._lost is None:
            self._lost = error
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._probe is not None and not self._probe.done():
            self._probe.set_exception(self._lost)
        self._in_flight.clear()
        self._results.clear()
        self._wake()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._config.step_seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        self._deadline = None
        if not self._in_flight:
            return
        left = self._last_progress + self._config.step_seconds - time.monotonic()
        if left > 0:
            self._deadline = asyncio.get_running_loop().call_later(left, self._check_deadline)
        else:
            self._diagnose(
                f"no result of step {self._in_flight[0]} within {self._config.step_seconds:g} s", overdue=True
            )

    def _diagnose(self, symptom: str, *, overdue: bool = False) -> None:
        """Find out which stage it was, then end the epoch with what is known."""
        if self._lost is None and (self._diagnosis is None or self._diagnosis.done()):
            self._diagnosis = asyncio.get_running_loop().create_task(self._find_culprit(symptom, overdue))

    async def _find_culprit(self, symptom: str, overdue: bool) -> None:
        if self._link is not None:
            # Every stage learns of it at once, and none waits for a neighbour that is gone.
            self._link.close()
        # A closed connection is seen some milliseconds before Ray's notice of the death behind it.
        patience = time.monotonic() + 1.0
        while not overdue and not self._dead_stages() and time.monotonic() < patience:
            await asyncio.sleep(0.005)
        reports: list[str] = []
        if not self._dead_stages():
            reports = await self._ask_for_progress(overdue)
        dead = self._dead_stages()
        if dead:
            loss = await self._loss(dead[0], str(dead[0].lost))
            others = "".join(f"; also stage {process.stage}: {process.lost}" for process in dead[1:])
            error = StageLostError(loss.stage, f"{loss.reason}{others}")
        else:
            error = StageLostError(None, "; ".join([symptom, *reports]))
        self._end_epoch(error)

    def _dead_stages(self) -> list[StageProcess]:
        return [process for process in self._stages if process.lost is not None]

    async def _ask_for_progress(self, overdue: bool) -> list[str]:
        """Ask the stages how they stand; those that do not answer, or that hang in a step, are marked as lost."""
        answers = await asyncio.gather(
            *(process.call("progress", timeout=min(2.0, self._config.control_seconds)) for process in self._stages),
            return_exceptions=True,
        )
        reports = []
        for process, answer in zip(self._stages, answers, strict=True):
            if not isinstance(answer, Progress):
                continue
            if overdue and answer.running is not None and answer.running_seconds >= 0.5 * self._config.step_seconds:
                process.lost = (
                    f"{process.where} has been computing step {answer.running} for {answer.running_seconds:.1f} s"
                )
            elif answer.ended is not None:
                reports.append(f"stage {process.stage} says: {answer.ended}")
        return reports


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


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results; waits for all of them before it raises the first error, so that nothing goes on behind its back."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
