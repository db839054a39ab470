"""What the commands that run a model do before and after: plan, start, connect, stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardline.cluster.build import EngineOptions, Prepared, build_engine, prepare
from shardline.cluster.cli.output import plan_lines, plan_table, say, stderr, waiting
from shardline.cluster.client import Client


@contextmanager
def planned(options: EngineOptions, *, quiet_alone: bool = False) -> Iterator[Prepared]:
    """The plan, printed (not for a single stage if `quiet_alone`); inside, Ray is connected if the options need it.

    A local Ray is started only when the plan is made, and stopped at the end.
    """
    with ExitStack() as stack:
        cluster = options.address not in (None, "local")
        if cluster:
            _connect(stack, f"joining Ray at {options.address}", options.address)
        prepared = prepare(options, progress=say)
        if not (quiet_alone and len(prepared.plan.stages) == 1):
            stderr().print(plan_table(prepared.plan))
            for line in plan_lines(prepared.plan, options.concurrency):
                say(line)
        if options.uses_ray and not cluster:
            counts = {"num_cpus": len(prepared.plan.stages), "num_gpus": prepared.num_gpus}
            _connect(stack, "starting a local Ray", None, **counts)
        yield prepared


@contextmanager
def running(options: EngineOptions) -> Iterator[Client]:
    """The client of an engine that is ready; everything that was started is stopped at the end."""
    with planned(options, quiet_alone=True) as prepared:
        with waiting("loading the model"):
            client = Client.over(lambda: build_engine(prepared, progress=say))
        try:
            yield client
        finally:
            client.close()


def _connect(stack: ExitStack, what: str, address: str | None, **counts: int | None) -> None:
    from shardline.cluster.ray_runtime import connected

    # Ray puts a handler of its own in the place of ours.
    handler = signal.getsignal(signal.SIGTERM)
    with waiting(what):
        stack.enter_context(connected(address, **counts))
    signal.signal(signal.SIGTERM, handler)
