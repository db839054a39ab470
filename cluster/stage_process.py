"""One stage's process as the engine sees it: calls with a deadline, news of its death, its last words, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardline.cluster.ray_runtime import Seat
from shardline.cluster.stage_actor import CONTROL_THREADS, ProcessInfo, StageActor, start_ticks

LAST_LINES = 12
_TAIL_SECONDS = 3.0


class NoAnswerError(Exception):
    """A call to a stage's process got no answer: it died, or it hangs."""


class StageProcess:
    """A stage actor. Belongs to one event loop.

    Attributes:
        stage: Index of the stage.
        info: Where it runs; None until `describe` has answered.
        lost: Why it must be replaced; None while it is well.
        died: Whether Ray says that the process has ended.
    """

    def __init__(self, stage: int, seat: Seat, on_death: Callable[[StageProcess], None]) -> None:
        """Create the actor; does not wait for it."""
        resources = dict(seat.resources)
        self.stage = stage
        self.info: ProcessInfo | None = None
        self.lost: str | None = None
        self.died = False
        self._on_death = on_death
        actor_class: Any = ray.remote(StageActor)
        self._actor: Any = actor_class.options(
            max_restarts=0,
            max_concurrency=CONTROL_THREADS,
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=seat.bundles.strategy(seat.place),
        ).remote()
        self._loop = asyncio.get_running_loop()
        sentinel: Future[None] = self._actor.sentinel.remote().future()
        sentinel.add_done_callback(self._sentinel_done)

    @property
    def where(self) -> str:
        """For people."""
        return f"pid {self.info.pid} on {self.info.host}" if self.info else "its process"

    async def call(self, method: str, *args: object, timeout: float | None) -> Any:
        """Call the actor; without a timeout, for as long as it lives.

        Raises:
            NoAnswerError: it died, or did not answer in time; `lost` then says which.
            Exception: what the method raised, as it was raised.
        """
        future = asyncio.wrap_future(getattr(self._actor, method).remote(*args).future())
        # An answer that comes when nobody waits any more must not be reported as an exception that nobody took.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait([future], timeout=timeout)
        if not done:
            silence = f"has not answered '{method}' for" if self.info else "has not been started by Ray within"
            self.lost = self.lost or f"{self.where} {silence} {timeout:g} s"
            raise NoAnswerError(self.lost)
        try:
            return future.result()
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except RayError as error:
            self.died = True
            self.lost = self.lost or f"{self.where}: {death_notice(error)}"
            raise NoAnswerError(self.lost) from error

    async def last_words(self) -> str:
        """The end of its standard error: what a crash in native code leaves. Empty if there is none to be had."""
        if not self.died or self.info is None or self.info.error_log is None:
            return ""
        if self.info.node_id == ray.get_runtime_context().get_node_id():
            return tail_of(self.info.error_log)
        reader: Any = ray.remote(num_cpus=0, max_retries=0)(tail_of).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.info.node_id, soft=False)
        )
        future = asyncio.wrap_future(reader.remote(self.info.error_log).future())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait([future], timeout=_TAIL_SECONDS)
        if not done or future.exception() is not None:
            return ""
        return str(future.result())

    async def end(self) -> None:
        """End the process, also one that is stopped or that Ray has lost sight of, and wait until it is gone. On other
        hosts that is Ray's business, and not waited for."""
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        # A process that cannot end itself keeps its place for the 5 s that Ray waits. Here we need not wait so long.
        if not await self._gone_within(0.3) and self.info is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.info.pid, signal.SIGKILL)
            await self._gone_within(5.0)

    async def _gone_within(self, seconds: float) -> bool:
        deadline = self._loop.time() + seconds
        while self._runs_here():
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def _runs_here(self) -> bool:
        return (
            self.info is not None
            and self.info.node_id == ray.get_runtime_context().get_node_id()
            and start_ticks(self.info.pid) == self.info.start_ticks
        )

    def _sentinel_done(self, future: Future[None]) -> None:
        error = future.exception()
        # The loop may be closed by the time that the process is: nobody is interested then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._died, error)

    def _died(self, error: BaseException | None) -> None:
        self.died = True
        self.lost = self.lost or f"{self.where}: {death_notice(error)}"
        self._on_death(self)


def death_notice(error: BaseException | None) -> str:
    """The part of Ray's notice that says what happened, on one line."""
    text = str(error)
    if isinstance(error, RayActorError):
        _, found, rest = text.partition("The actor is dead because ")
        text = rest if found else text
        # What follows is general advice, the same for every death.
        text = text.partition(" Some common causes include")[0]
    return " ".join(text.split())


def tail_of(path: str) -> str:
    """The last lines of a worker's log; empty if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 16 * 1024, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    # Lines like ":job_id:01000000" are Ray's own marks.
    lines = [line for line in lines if line.strip() and not line.startswith(":")]
    crashes = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    # Of a crash's long trace the beginning says what and where.
    shown = lines[crashes[-1] :][:LAST_LINES] if crashes else lines[-LAST_LINES:]
    return "\n".join(shown)
