"""Deltas on their way to one consumer, who may be slower than the engine: what waits is merged, never refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardline.cluster.request import Delta


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error instead of a finish reason; nothing follows for it."""

    request_id: str
    error: Exception


class Inbox:
    """What one consumer has not taken yet. Belongs to one event loop; one task takes.

    An inbox may carry many requests. Deltas of one sequence keep their order, and all that wait for one sequence come
    as one; so a slow consumer costs memory for its text and nothing else.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int], list[Delta]] = {}
        self._failures: dict[str, Failure] = {}
        # Of the task that takes, while it waits: an asyncio.Event costs each token several times as much.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Add a delta; never waits."""
        self._pending.setdefault((delta.request_id, delta.index), []).append(delta)
        self._wake()

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error, behind the deltas that it has already."""
        self._failures[request_id] = Failure(request_id, error)
        self._wake()

    def discard(self, request_id: str) -> None:
        """Drop what waits for a request."""
        for key in [key for key in self._pending if key[0] == request_id]:
            del self._pending[key]
        self._failures.pop(request_id, None)

    async def take(self, timeout: float | None = None) -> list[Delta | Failure]:
        """Everything that waits, at most one delta a sequence; waits for something, or until `timeout` seconds passed
        and then returns nothing."""
        try:
            while not self._pending and not self._failures:
                self._waiter = asyncio.get_running_loop().create_future()
                if timeout is None:
                    await self._waiter
                else:
                    async with asyncio.timeout(timeout):
                        await self._waiter
        except TimeoutError:
            return []
        finally:
            self._waiter = None
        taken: list[Delta | Failure] = [merge(deltas) for deltas in self._pending.values()]
        taken.extend(self._failures.values())
        self._pending.clear()
        self._failures.clear()
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one sequence as one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )
