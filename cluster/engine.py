"""The engine: text in, streams of deltas out, one loop between the scheduler and the pipeline. Asyncio, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from shardline.cluster.errors import DeadlyRequestError, EngineDeadError, ShardlineError, StageLostError
from shardline.cluster.inbox import Failure, Inbox
from shardline.cluster.live_request import LiveRequest
from shardline.cluster.pipeline import Pipeline, StageStats
from shardline.cluster.request import Delta, Request, checked_id
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.cluster.text.model_text import ModelText
from shardline.cluster.token_rate import TokenRate
from shardline.scheduler import (
    InvalidParameterError,
    NewRequest,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    SequenceUpdate,
    StepResult,
)

# No request of a user has an empty id.
PROBE = NewRequest("", (0,), SamplingParams(max_tokens=1, ignore_eos=True, seed=0), priority=-(2**40))
"""What runs first where it is to be seen whether any step runs at all."""

MOST_RETRY_SECONDS = 60.0
"""The longest wait between two tries to bring a stage back."""

DELIVERED_AT_ONCE = 16
"""Tokens whose text is made before the event loop looks for a result again: a stage may wait for its next plan."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's own settings.

    Attributes:
        max_losses: How often in a row a stage may be lost, or not be brought back, without a step between before the
            engine gives up.
        retry_seconds: How long it waits after a try to bring a stage back that failed; twice as long after each further
            one.
        rate_seconds: The span that `EngineStatus.tokens_per_second` looks back.
    """

    max_losses: int = 3
    retry_seconds: float = 5.0
    rate_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine.

    Attributes:
        state: "new", "starting", "ready", "recovering", "dead" or "closed".
        reason: Why it is dead; empty otherwise.
        requests: Requests that have not ended.
        scheduler: Queue, running sequences and blocks.
        stages: One for each stage that answers.
        generated_tokens: Since the start.
        tokens_per_second: Generated, over the last `EngineConfig.rate_seconds`.
        losses: How often a stage was lost and the pipeline brought back.
        uptime_seconds: Since it became ready.
    """

    state: str
    reason: str
    requests: int
    scheduler: SchedulerStats
    stages: tuple[StageStats, ...]
    generated_tokens: int
    tokens_per_second: float
    losses: int
    uptime_seconds: float


class Engine:
    """Serves requests on a pipeline. Belongs to one event loop; see the module `shardline.cluster.client` for the door.

    A step reads: fill the pipeline first (`schedule`, `submit`), take a result second (`result`, `update`), then make
    its text. Text work happens while the stages already run the next step, and a few tokens at a time, so that the next
    result does not wait for it; a stop string therefore may be found when one more token of its sequence is on its way,
    and that token is ignored.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        text: ModelText,
        scheduler: SchedulerConfig,
        config: EngineConfig | None = None,
    ) -> None:
        """Takes over `pipeline` and `text`: `start` starts the pipeline, `close` closes both."""
        self._pipeline = pipeline
        self._text = text
        self._scheduler = Scheduler(scheduler)
        self._config = config or EngineConfig()
        self._live: dict[str, LiveRequest] = {}
        # What the scheduler has counted and no stream has had yet, and whose it is: by the time that it is delivered
        # another request may have its id.
        self._owed: deque[tuple[LiveRequest, SequenceUpdate]] = deque()
        self._state = "new"
        self._dead: EngineDeadError | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._pending_result: asyncio.Task[StepResult] | None = None
        self._losses_in_a_row = 0
        self._losses = 0
        self._tokens = TokenRate(self._config.rate_seconds)
        self._was_ready = False

    # -- lifetime ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the pipeline and run one token through all of it; on return the engine is ready.

        Raises whatever kept the pipeline from starting, in the stage's own words, and EngineDeadError when it is closed
        meanwhile; everything is given back then.
        """
        assert self._state == "new", "start() is called once"
        self._state = "starting"
        try:
            await self._pipeline.start()
            # It may have been closed meanwhile; here and after the probe.
            self._raise_if_dead()
            self._loop = asyncio.create_task(self._run(), name="shardline engine")
            self._expect_result()
            # One prompt token and one new one never fill a block, so nothing of them stays in the prefix cache.
            probe = Request(token_ids=(0,), params=SamplingParams(max_tokens=1, ignore_eos=True, seed=0))
            async for _ in self.generate(probe):
                pass
            self._raise_if_dead()
        except BaseException:
            await self.close()
            raise
        self._tokens.begin()
        self._was_ready = True
        self._state = "ready"

    async def close(self) -> None:
        """End every request with "abort", stop the loop and close the pipeline. Idempotent."""
        if self._closing is None:
            self._state = "closed"
            if self._dead is None:
                self._dead = EngineDeadError("the engine was closed")
            for request_id in list(self._live):
                self.cancel(request_id)
            self._closing = asyncio.create_task(self._close())
        # It goes on when a caller is cancelled, and a second caller waits for it.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        await self._drop_pending_result()
        await self._pipeline.close()
        self._text.close()

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """How the model's makers advise to sample; a request's own params are taken as they are."""
        return self._text.generation_defaults

    async def status(self) -> EngineStatus:
        """A snapshot; also of a dead engine."""
        stages: tuple[StageStats, ...] = ()
        if self._state == "ready":
            with contextlib.suppress(ShardlineError):
                stages = tuple(await self._pipeline.stats())
        return EngineStatus(
            state=self._state,
            reason="" if self._dead is None else str(self._dead),
            requests=len(self._live),
            scheduler=self._scheduler.stats(),
            stages=stages,
            generated_tokens=self._tokens.total,
            tokens_per_second=self._tokens.per_second(),
            losses=self._losses,
            uptime_seconds=self._tokens.seconds,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Run a request; its deltas, those of all n sequences mixed, end when every sequence has.

        A consumer that stops early (closes the generator, or is cancelled) cancels the request.

        Raises:
            InvalidParameterError, RequestTooLargeError, QueueFullError: it is refused.
            TemplateError: the chat template refuses the messages.
            EngineDeadError: the engine gave up, now or before.
        """
        inbox = Inbox()
        request_id = await self.submit(request, inbox)
        running = request.params.n
        try:
            while running:
                for item in await inbox.take():
                    if isinstance(item, Failure):
                        raise item.error
                    running -= item.finish_reason is not None
                    yield item
        finally:
            self.cancel(request_id, inbox)

    async def submit(self, request: Request, inbox: Inbox) -> str:
        """Accept a request, or raise as `generate` does; its deltas go to `inbox`. Returns its id.

        The request goes on until its sequences end or `cancel` is called, whoever reads the inbox.
        """
        self._raise_if_dead()
        if self._loop is None:
            raise ShardlineError("the engine has not been started: await start() first")
        request_id = checked_id(request)
        if request_id in self._live:
            raise InvalidParameterError("request_id", request_id, "an id that no running request has")
        live = LiveRequest(request_id, request.params, inbox)
        # Known from here on, so that a cancel finds it while its prompt is made.
        self._live[request_id] = live
        try:
            prompt_ids = await self._text.prompt_ids(request, self._scheduler.config.max_context)
            self._raise_if_dead()
            if self._live.get(request_id) is not live:
                return request_id
            self._accept(live, prompt_ids, request.priority)
        except BaseException:
            if self._live.get(request_id) is live:
                del self._live[request_id]
            raise
        return request_id

    def cancel(self, request_id: str, inbox: Inbox | None = None) -> None:
        """End a request now with "abort"; an unknown or ended one is no error.

        With `inbox` only if its deltas go there: an id may be used again as soon as its request has ended.
        """
        live = self._live.get(request_id)
        if live is None or (inbox is not None and live.inbox is not inbox):
            return
        # It may have tokens that came before this call, its last one among them.
        self._deliver_owed()
        if self._live.get(request_id) is not live:
            return
        self._scheduler.abort(request_id)
        for index in live.running:
            live.inbox.put(live.abort(index))
        del self._live[request_id]
        # What it leaves behind may let another request in.
        self._wake.set()

    def _accept(self, live: LiveRequest, prompt_ids: tuple[int, ...], priority: int) -> None:
        params = live.params
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(os.urandom(8), "little"))
        self._scheduler.add(NewRequest(live.request_id, prompt_ids, params, priority))
        live.accept(prompt_ids, self._text)
        self._wake.set()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                try:
                    await self._step()
                except StageLostError as lost:
                    await self._recover(lost)
        except EngineDeadError as dead:
            await self._die(dead)
        except Exception as error:
            # A fault of ours. Streams that wait for ever would be worse than an ugly end.
            words = "".join(traceback.format_exception(error))
            await self._die(EngineDeadError(f"the engine's loop failed: {words}"))

    async def _step(self) -> None:
        try:
            overdue = self._collect()
            while (plan := self._scheduler.schedule()) is not None:
                await self._pipeline.submit(plan)
        except BaseException:
            # Tokens that the scheduler has counted must reach their streams, also when the pipeline broke just now.
            self._deliver_owed()
            raise
        self._deliver_owed(max(DELIVERED_AT_ONCE, overdue))
        if self._owed:
            # Not at once: what came in the meantime goes first.
            asyncio.get_running_loop().call_soon(self._wake.set)

    def _collect(self) -> int:
        """Take a result, if there is one. Returns how many tokens have been owed since the one before: where steps are
        shorter than the making of their text they wait for it, or what is owed would only grow."""
        task = self._pending_result
        if task is None or not task.done():
            return 0
        self._pending_result = None
        result = task.result()
        self._losses_in_a_row = 0
        self._expect_result()
        overdue = len(self._owed)
        for update in self._scheduler.update(result):
            # Whoever was cancelled while this token was on its way is not there any more.
            if (live := self._live.get(update.request_id)) is not None:
                self._owed.append((live, update))
        return overdue

    def _expect_result(self) -> None:
        # Also when nothing is in flight: a stage that is lost then is brought back before anyone asks for it.
        self._pending_result = asyncio.create_task(self._pipeline.result())
        self._pending_result.add_done_callback(lambda _: self._wake.set())

    async def _drop_pending_result(self) -> None:
        task, self._pending_result = self._pending_result, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _recover(self, lost: StageLostError) -> None:
        if self._state != "closed":
            self._state = "recovering"
        await self._drop_pending_result()
        self._blame(lost)
        wait = 0.0
        while True:
            self._losses_in_a_row += 1
            if self._losses_in_a_row > self._config.max_losses:
                raise EngineDeadError(
                    f"gave up after {self._losses_in_a_row} losses without a step between them; the last: {lost}"
                ) from lost
            await asyncio.sleep(wait)
            try:
                await self._pipeline.recover()
                break
            except StageLostError as again:
                lost = again
                # What is gone may need a moment to come back: a node that starts again, say.
                wait = min(max(self._config.retry_seconds, 2 * wait), MOST_RETRY_SECONDS)
        self._losses += 1
        if self._state == "recovering":
            self._state = "ready" if self._was_ready else "starting"
        self._expect_result()
        self._wake.set()

    def _blame(self, lost: StageLostError) -> None:
        """Put what was in flight back into the queue, and end the requests that a stage is lost of each time."""
        blamed = self._scheduler.drop_in_flight()
        self._scheduler.abort(PROBE.request_id)
        for request_id in blamed:
            live = self._live.get(request_id)
            if live is not None:
                words = (
                    f"request {request_id!r} was ended, for a stage is lost each time that it runs; the last: {lost}"
                )
                self._fail(live, DeadlyRequestError(words))
        if self._scheduler.has_suspects():
            # Before they run, each alone: where no step runs it is none of theirs.
            self._scheduler.add(PROBE, alone=True)

    async def _die(self, dead: EngineDeadError) -> None:
        if self._state != "closed":
            self._state = "dead"
        self._dead = dead
        ended, self._live = self._live, {}
        for request_id, live in ended.items():
            live.inbox.fail(request_id, EngineDeadError(*dead.args))
        # Last, for it may be the scheduler that failed.
        with contextlib.suppress(AssertionError):
            for request_id in (*ended, PROBE.request_id):
                self._scheduler.abort(request_id)
        await self._drop_pending_result()
        with contextlib.suppress(ShardlineError):
            await self._pipeline.close()

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(*self._dead.args)

    # -- deltas ------------------------------------------------------------------------------------------------------

    def _deliver_owed(self, at_most: int | None = None) -> None:
        """Give tokens that are owed to their streams, in order."""
        count = len(self._owed) if at_most is None else min(at_most, len(self._owed))
        self._tokens.count(sum(self._deliver(*self._owed.popleft()) for _ in range(count)))

    def _deliver(self, live: LiveRequest, update: SequenceUpdate) -> bool:
        """Give a token to its stream; False when nobody waits for it any more."""
        if self._live.get(live.request_id) is not live or not live.runs(update.index):
            # Ended by a stop string, or by an error, while this token was on its way.
            return False
        try:
            delta = live.advance(update)
        except Exception as error:
            # Making this text failed: that ends this request and no other.
            words = "".join(traceback.format_exception(error))
            self._fail(live, ShardlineError(f"the text of request {live.request_id!r} could not be made: {words}"))
            return True
        if delta.finish_reason is not None and update.finish_reason is None:
            self._scheduler.abort(live.request_id, update.index)
        live.inbox.put(delta)
        if live.has_ended:
            del self._live[live.request_id]
        return True

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        del self._live[live.request_id]
        self._scheduler.abort(live.request_id)
        live.inbox.fail(live.request_id, error)
