"""Reaching Ray: a local cluster of our own, or one that runs already; what nodes it has; where stages go."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shardline.cluster.errors import EngineNotFoundError, PlanningError
from shardline.cluster.ray_head import require_head

NAMESPACE = "shardline"

# Many of Ray's functions have no types.
_ray: Any = ray

SETTINGS = {
    # Ray runs workers at nice 15 otherwise, and a stage then loses to any other process of the host.
    "RAY_worker_niceness": "0",
    # A node that is gone is noticed in about 10 s instead of a minute; the data plane notices sooner.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""Environment of every Ray process that we start; launch.sh sets the same."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of a Ray cluster.

    Attributes:
        node_id: Ray's id.
        host: Its name.
        address: The IP address that Ray knows it by.
        cpus: Logical CPUs that it offers.
        gpus: GPUs that it offers.
        memory_bytes: Memory that it offers to tasks and actors.
        is_this: Whether this process runs on it.
    """

    node_id: str
    host: str
    address: str
    cpus: float
    gpus: float
    memory_bytes: int
    is_this: bool


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """Where a stage goes.

    Attributes:
        node_id: The node; None leaves it to Ray.
        resources: What the stage's bundle reserves, in Ray's names; None for one CPU, or for its part of a node that
            has more stages than CPUs.
        gpu: The PCI address of the GPU that it computes on; None for the CPU. Stages with the same one share it.
    """

    node_id: str | None = None
    resources: Mapping[str, float] | None = None
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """What a stage's actor gets.

    Attributes:
        bundles: The group that its bundle is in.
        place: Which of the group's bundles it sits in.
        resources: What of that bundle is its own.
    """

    bundles: StageBundles
    place: int
    resources: Mapping[str, float]


@contextmanager
def connected(address: str | None = None, num_cpus: int | None = None, num_gpus: int | None = None) -> Iterator[None]:
    """Be connected to Ray inside the block.

    With `address` None a local cluster is started and stopped again; "auto" or "host:port" joins one that runs. A
    process that is connected already (an actor, say) just goes on, and nothing is stopped.

    Args:
        address: See above.
        num_cpus, num_gpus: Logical CPUs and GPUs of a local cluster; None takes the machine's.

    Raises:
        EngineNotFoundError: no cluster answers at `address`.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if address is not None:
        before_joining(address)
    try:
        ray.init(
            address=address or "local",
            num_cpus=None if address else num_cpus,
            num_gpus=None if address else num_gpus,
            namespace=NAMESPACE,
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EngineNotFoundError(
            f"no Ray cluster can be reached at {address or 'local'}: {str(error).rstrip('.')}. "
            "Start one with cluster/launch.sh, or leave the address out for a local one"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def before_joining(address: str) -> None:
    """What Ray leaves out when it joins a cluster by address: see whether anybody is there, and send the user's token.

    Raises EngineNotFoundError, as `require_head`.
    """
    require_head(address)
    # Ray 2.60 does this for "auto" alone, though clusters want the token wherever they are. Its own switch is private,
    # and ray is pinned to a version.
    loader = _ray._raylet.AuthenticationTokenLoader.instance()
    if "RAY_AUTH_MODE" not in os.environ and loader.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_MODE"] = "token"
        _ray._raylet.Config.initialize("")


def describe_cluster(address: str | None = None) -> list[NodeInfo]:
    """The cluster's living nodes, this one first, then by address. Connects for the while if it is not connected yet.

    Raises EngineNotFoundError.
    """
    with connected(address):
        this = ray.get_runtime_context().get_node_id()
        nodes = [
            NodeInfo(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
                int(node["Resources"].get("memory", 0)),
                node["NodeID"] == this,
            )
            for node in _ray.nodes()
            if node["Alive"]
        ]
    return sorted(nodes, key=lambda node: (not node.is_this, node.address, node.node_id))


class StageBundles:
    """The pipeline's placement group: one bundle a stage, neighbours on one host where Ray was free to choose."""

    def __init__(self, placements: Sequence[StagePlacement]) -> None:
        """Ask for the bundles. Nothing waits yet."""
        selectors = [{"ray.io/node-id": p.node_id} if p.node_id else {} for p in placements]
        self._placements = tuple(placements)
        self._resources = _resolved(placements)
        self.group: PlacementGroup = placement_group(
            [dict(resources) for resources in self._resources],
            strategy="PACK",
            bundle_label_selector=selectors if any(selectors) else None,
        )
        self._order: tuple[int, ...] = tuple(range(len(placements)))

    async def wait(self, timeout: float) -> None:
        """Wait for the bundles. Raises PlanningError with what was asked and what there is."""
        deadline = time.monotonic() + timeout
        while not (placed := self.group.wait(0)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if not placed:
            wanted = ", ".join(
                f"stage {index}: {_amounts(self._resources[index])}"
                + (f" on node {p.node_id[:8]}" if p.node_id else "")
                for index, p in enumerate(self._placements)
            )
            self.remove()
            raise PlanningError(
                f"Ray could not place the stages within {timeout:g} s. Wanted {wanted}; the cluster has free "
                f"{_amounts(_ray.available_resources())} of {_amounts(_ray.cluster_resources())}"
            )
        self._order = self._neighbours_together()

    def _neighbours_together(self) -> tuple[int, ...]:
        # Ray does not promise which host a bundle gets. Where all are alike, stages take them host by host.
        if any(p.node_id for p in self._placements) or any(r != self._resources[0] for r in self._resources):
            return self._order
        nodes: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        this = ray.get_runtime_context().get_node_id()
        return tuple(sorted(nodes, key=lambda bundle: (nodes[bundle] != this, nodes[bundle], bundle)))

    def strategy(self, place: int) -> PlacementGroupSchedulingStrategy:
        """How to schedule an actor into the bundle of the `place`-th placement."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self._order[place])

    def seat(self, place: int) -> Seat:
        """All of that bundle for one actor."""
        return Seat(self, place, self._resources[self._order[place]])

    def remove(self) -> None:
        """Give the bundles back."""
        remove_placement_group(self.group)


def _resolved(placements: Sequence[StagePlacement]) -> list[Mapping[str, float]]:
    cpus: dict[str | None, float] = {node.node_id: node.cpus for node in describe_cluster()}
    cpus[None] = sum(cpus.values())
    stages = Counter(p.node_id for p in placements)

    def share(node_id: str | None) -> float:
        # Ray counts in ten-thousandths; rounded down, so that the parts of one CPU are never more than it.
        return min(1.0, math.floor(cpus.get(node_id, 1.0) / stages[node_id] * 1000) / 1000)

    return [{"CPU": share(p.node_id)} if p.resources is None else p.resources for p in placements]


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources[name]:g}" for name in sorted(resources) if name in ("CPU", "GPU"))
