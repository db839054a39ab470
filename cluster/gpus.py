"""What GPUs the nodes have, and how a stage's process makes sure that it has the one it was given.

Whoever looks at a GPU may get a CUDA context there, some hundreds of MiB for as long as its process lives. So it is a
process of its own that looks, and ends: a Ray task on the nodes of a cluster, a child process where Ray is not up yet.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardline.cluster.errors import PlanningError
from shardline.kernels import CudaDevice, KernelsError, cuda_bus_id, cuda_devices, cuda_free_bytes

if TYPE_CHECKING:
    from shardline.cluster.ray_runtime import NodeInfo

LOOK_SECONDS = 120.0
"""For a node to start a process and look; the first one may have to wake the driver."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What one process sees: its GPUs, and the problem with those that cannot be used, with its remedy."""

    devices: tuple[CudaDevice, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """A GPU of a node.

    Attributes:
        node: Ray's id of the node; for this machine, where Ray is not up yet, its name.
        host: The node, for people.
        is_here: Whether it is of this machine.
        card: The GPU.
    """

    node: str
    host: str
    is_here: bool
    card: CudaDevice

    @property
    def name(self) -> str:
        """For people: "node-a GPU 1 (NVIDIA GeForce RTX 3060)"."""
        return f"{self.host} GPU {self.card.index} ({self.card.name})"


class GpuFinder(Protocol):
    """How a process learns what GPUs it has. Pickled to other processes."""

    def look(self) -> GpuReport:
        """All that it sees."""
        ...

    def held(self) -> str:
        """The PCI address of the first one it sees, without a context on it. Raises KernelsError if it sees none."""
        ...

    def free_bytes(self) -> int:
        """What is free on that one now."""
        ...


@dataclass(frozen=True, slots=True)
class CudaFinder:
    """Asks the driver."""

    def look(self) -> GpuReport:
        """See `GpuFinder`."""
        try:
            found, refused = cuda_devices()
        except KernelsError as error:
            return GpuReport((), str(error))
        return GpuReport(tuple(found), "; ".join(refused))

    def held(self) -> str:
        """See `GpuFinder`."""
        return cuda_bus_id(0)

    def free_bytes(self) -> int:
        """See `GpuFinder`."""
        return cuda_free_bytes(0)


def nobody(problem: str) -> None:
    """Tells nobody."""


def gpus_here(tell: Callable[[str], None] = nobody) -> list[NodeGpu]:
    """The GPUs of this machine. `tell` hears of those that cannot be used. Raises PlanningError when none can."""
    host = platform.node() or "localhost"
    report = _report_of_child()
    if not report.devices:
        raise PlanningError(f"on {host}: {report.problem}")
    if report.problem:
        tell(f"{host}: {report.problem}")
    return [NodeGpu(host, host, True, card) for card in report.devices]


def gpus_of(
    nodes: Sequence[NodeInfo], finder: GpuFinder | None = None, tell: Callable[[str], None] = nobody
) -> list[NodeGpu]:
    """The GPUs of a cluster's nodes, in their order; nodes to which Ray gives no GPU are not asked. Ray is connected.

    Args:
        nodes: Which.
        finder: Looks, on each; None asks the driver.
        tell: Hears of each node that has a GPU which cannot be used.

    Raises:
        PlanningError: no node has one that can be used; what each one lacks.
    """
    finder = finder or CudaFinder()
    asked = [node for node in nodes if node.gpus >= 1]
    found: list[NodeGpu] = []
    problems: list[str] = []
    for node, report in zip(asked, _reports(asked, finder), strict=True):
        host = f"{node.host} {node.address}"
        found += [NodeGpu(node.node_id, host, node.is_this, card) for card in report.devices]
        if report.problem:
            problems.append(f"{node.host}: {report.problem}")
    if not found:
        problems += [f"{node.host}: Ray has no GPU there" for node in nodes if node.gpus < 1]
        raise PlanningError(
            f"no node has a GPU that can be used ({'; '.join(problems)}). Start nodes that have one (`ray start` "
            "counts those that the driver shows), or leave --device out for the CPU"
        )
    for problem in problems:
        tell(problem)
    return found


def _reports(nodes: Sequence[NodeInfo], finder: GpuFinder) -> list[GpuReport]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # No GPU is asked for, so that the task runs beside whoever holds them all, and sees every one; max_calls=1 ends its
    # process, and with it the contexts.
    look: Any = ray.remote(num_cpus=0, num_gpus=0, max_calls=1, max_retries=0)(_look_with)
    references = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(finder)
        for node in nodes
    ]
    deadline = time.monotonic() + LOOK_SECONDS
    reports = []
    for reference in references:
        try:
            reports.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            reports.append(GpuReport((), f"it has not said within {LOOK_SECONDS:g} s what GPUs it has"))
        except RayError as error:
            reports.append(GpuReport((), f"the process that looked for GPUs failed: {_first_line(error)}"))
    return reports


def _look_with(finder: GpuFinder) -> GpuReport:
    return finder.look()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _report_of_child() -> GpuReport:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "shardline.cluster.gpus"],
            capture_output=True,
            text=True,
            timeout=LOOK_SECONDS,
            check=True,
        )
        data = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        words = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        return GpuReport((), f"the process that looked for GPUs failed: {words[0]}")
    except subprocess.TimeoutExpired:
        return GpuReport((), f"the driver has not answered within {LOOK_SECONDS:g} s; does nvidia-smi?")
    return GpuReport(tuple(CudaDevice(**card) for card in data["devices"]), data["problem"])


def wait_until_free(wanted: int, seconds: float, free: Callable[[], int], pause: float = 0.05) -> bool:
    """Wait until that many bytes are free on this process's GPU: the driver gives back what a killed process had a
    little after the process is gone. Returns whether they are; if not, the allocation that fails says what lacks."""
    deadline = time.monotonic() + seconds
    while free() < wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


if __name__ == "__main__":
    json.dump(dataclasses.asdict(CudaFinder().look()), sys.stdout)
