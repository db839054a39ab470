"""From a few options to an engine: open the model, look at the devices, plan, put the parts together."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.cluster import hub
from shardline.cluster.engine import Engine
from shardline.cluster.errors import PlanningError
from shardline.cluster.gpus import NodeGpu, gpus_here, gpus_of, nobody
from shardline.cluster.local_pipeline import LocalPipeline
from shardline.cluster.models import Progress, resolve
from shardline.cluster.planning.gpu_speed import gpu_speed
from shardline.cluster.planning.placement import Device, ModelBytes, PipelinePlan, Wanted
from shardline.cluster.planning.planner import plan_pipeline
from shardline.cluster.planning.stage_costs import mib
from shardline.cluster.stage_options import check_stage_options, gpu_numbers
from shardline.cluster.text.model_text import ModelText
from shardline.kernels import cuda_device
from shardline.scheduler import InvalidParameterError, SchedulerConfig
from shardline.stage import Checkpoint, matrix_shapes, open_checkpoint, vector_shapes
from shardline.stage.roles import EXPERT_ROLES
from shardline.stage.workspace import FileTraits

if TYPE_CHECKING:
    from shardline.cluster.ray_runtime import NodeInfo, StagePlacement

CHANNEL_BLOCK = 64
"""The CPU backend pads a matrix to whole blocks of this many output channels."""

THREAD_BYTES_PER_SECOND = 8e9
THREAD_FLOPS_PER_SECOND = 7e10
"""What one core of a server with AVX-512 does on 4-bit weights; `shardline subset` measures the one at hand. On hosts
of one kind only predictions depend on them, the split does not."""

HOP_SECONDS = 5e-4
"""A step's way from a stage's process to the next: frames, sockets, threads that wake."""

PROCESS_BYTES = 300 * 2**20
"""A stage's process before it has loaded anything: the interpreter, Ray, compiled code."""

GPU_WORKSPACE_BYTES = 512 * 2**20
"""Of a GPU's memory, for what CUDA itself takes: the context, loaded kernels, recorded steps."""

MOST = 2**20
"""Of sequences, and of the tokens of a step."""

MEMORY_SHARE = 0.9
"""Of a host's available memory; the rest stays for everything else."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user chooses. Pickles, so that an engine can be built from it elsewhere.

    Attributes:
        model: A path, a known name, or `hf:owner/name[@revision]`.
        stages: How many stages; None for one, or what `split` or the cluster gives.
        split: Layers of each stage, to force it.
        address: A Ray cluster: "auto", "host:port" or "local"; None for no Ray unless there is more than one stage.
        context: The most tokens of one sequence; None for what the model was made for and the memory holds.
        concurrency: Sequences of that length that the pool is made for.
        threads: CPU threads of each stage; None for all cores that this process may use.
        device: "cpu"; "gpu" for all GPUs of the cluster; "cuda:0,cuda:2" for some of this machine; "cuda:N" alone is
            one stage in this process, unless there are to be more.
        memory: Bytes that each CPU stage may take; None shares what is free.
        gpu_memory: Bytes that each stage's process may take of its GPU, or one number for all; None shares what is
            free. More numbers than GPUs put several stages on one.
        block_size, kv_dtype, max_sequences, max_step_tokens, prefill_chunk, prefix_cache: See `Wanted` and
            `SchedulerConfig`.
    """

    model: str
    stages: int | None = None
    split: tuple[int, ...] | None = None
    address: str | None = None
    context: int | None = None
    concurrency: int = 8
    threads: int | None = None
    device: str = "cpu"
    memory: tuple[int, ...] | None = None
    gpu_memory: tuple[int, ...] | None = None
    block_size: int = 16
    kv_dtype: str = "float16"
    max_sequences: int = 64
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefix_cache: bool = True

    @property
    def stage_count(self) -> int | None:
        """How many stages are asked for, if that is said; a list of memory says it too."""
        if self.split is not None:
            return len(self.split)
        if self.stages is not None:
            return self.stages
        if self.gpu_memory is not None and len(self.gpu_memory) > 1:
            return len(self.gpu_memory)
        return None if self.memory is None else len(self.memory)

    @property
    def uses_ray(self) -> bool:
        """Whether the stages are Ray actors."""
        several_gpus = self.device == "gpu" or "," in self.device
        return several_gpus or self.address is not None or (self.stage_count or 1) > 1


def model_bytes(checkpoint: Checkpoint) -> ModelBytes:
    """Resident bytes of a model on the CPU backend, from its header."""
    spec = checkpoint.spec

    def padded(role: str, layer: int | None, channels: int) -> int:
        return checkpoint.matrix_bytes(role, layer) // channels * (-(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK)

    layers, experts = [], []
    for layer in range(spec.num_layers):
        matrices = {role: padded(role, layer, shape[0]) for role, shape in matrix_shapes(spec, layer).items()}
        vectors = 4 * sum(math.prod(shape) for shape in vector_shapes(spec, layer).values())
        layers.append(sum(matrices.values()) + vectors)
        experts.append(sum(matrices[role] for role in EXPERT_ROLES if role in matrices))
    return ModelBytes(
        layers=tuple(layers),
        embed=padded("embed", None, spec.vocab_size),
        head=padded("head", None, spec.vocab_size) + 4 * spec.hidden_size,
        tied=spec.tied_embeddings,
        experts=tuple(experts) if spec.experts is not None else (),
        traits=file_traits(checkpoint),
    )


def file_traits(checkpoint: Checkpoint) -> FileTraits:
    """What a file's header says of the formats of its matrices."""
    spec = checkpoint.spec
    pairs = (("gate", "up"), ("shared_gate", "shared_up"), ("expert_gate", "expert_up"))
    # Matrices of one shape and of other formats have other sizes.
    apart = any(
        checkpoint.matrix_bytes(gate, layer) != checkpoint.matrix_bytes(up, layer)
        for layer in range(spec.num_layers)
        for gate, up in pairs
        if gate in matrix_shapes(spec, layer)
    )
    # Formats of folders may order columns; whether these do stands in their data.
    return FileTraits(apart=apart, ordered=checkpoint.path.is_dir())


def available_memory() -> int:
    """Bytes that this process's host, or its container, can still give."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_devices(
    count: int,
    *,
    node: str | None = None,
    free_bytes: int | None = None,
    memory: Sequence[int] | None = None,
    threads: int | None = None,
    host_cores: int | None = None,
) -> list[Device]:
    """Shares of one host's cores and memory, one for each of `count` stages that take turns on it.

    Args:
        count: How many.
        node: The host's name; None for this one.
        free_bytes: Of the host; None asks this one.
        memory: Of each share; None divides `free_bytes`.
        threads: Of each stage; None for all of the host's cores, which stages use in turn.
        host_cores: Of the host; None for what this process may use.
    """
    node = node or platform.node() or "localhost"
    host_cores = host_cores or cores()
    threads = threads or host_cores
    if memory is None:
        whole = free_bytes if free_bytes is not None else int(MEMORY_SHARE * available_memory())
        memory = [max(0, whole // count - PROCESS_BYTES)] * count
    rate = min(threads, host_cores)
    return [
        Device(
            name=f"{node} cpu" if count == 1 else f"{node} cpu {index}",
            node=node,
            free_bytes=free,
            bytes_per_second=rate * THREAD_BYTES_PER_SECOND,
            flops_per_second=rate * THREAD_FLOPS_PER_SECOND,
            threads=threads,
            compute=f"{node} cores",
            step_seconds=HOP_SECONDS if count > 1 else 0.0,
        )
        for index, free in enumerate(memory)
    ]


def gpu_device(name: str, limit: int | None) -> Device:
    """The GPU "cuda:N" of this machine, with what of its memory is free now, or as much as the limit allows.

    Raises DeviceUnavailableError, PlanningError.
    """
    card = cuda_device(int(name.removeprefix("cuda:")))
    here = platform.node() or "localhost"
    return gpu_shares([NodeGpu(here, here, True, card)], 1, None if limit is None else (limit,))[0]


def gpu_shares(gpus: Sequence[NodeGpu], count: int, limits: Sequence[int] | None) -> list[Device]:
    """Shares of GPUs for `count` stages, or more to choose from where there are more GPUs.

    More stages than GPUs are dealt over them evenly, those of one GPU side by side, and take turns on it.

    Args:
        gpus: In the order of the pipeline.
        count: Of stages.
        limits: Bytes of each stage's process, CUDA's context included; one number for all; None shares what is free.

    Raises:
        PlanningError: the limits of a GPU are more than what is free on it.
    """
    each = limits if limits is not None and len(limits) > 1 else None
    if each is not None:
        # The list is the stages': further GPUs have no limit of their own, so they stay out.
        gpus = gpus[: len(each)]
    devices: list[Device] = []
    for index, gpu in enumerate(gpus):
        stages = max(1, len(range(index, count, len(gpus))))
        if each is not None:
            sizes = list(each[len(devices) : len(devices) + stages])
        else:
            sizes = [limits[0] if limits else gpu.card.free_bytes // stages] * stages
        if sum(sizes) > gpu.card.free_bytes:
            raise PlanningError(_too_much(gpu, sizes))
        speed = gpu_speed(gpu.card)
        for place, size in enumerate(sizes):
            share = size if limits else int(MEMORY_SHARE * size)
            devices.append(
                Device(
                    name=gpu.name + f" {place + 1}/{stages}" * (stages > 1),
                    node=gpu.node,
                    free_bytes=max(0, share - GPU_WORKSPACE_BYTES),
                    bytes_per_second=speed.bytes_per_second,
                    flops_per_second=speed.flops_per_second,
                    layer_seconds=speed.layer_seconds,
                    experts_seconds=speed.experts_seconds,
                    compute=f"{gpu.node} {gpu.card.bus_id or gpu.card.index}",
                    step_seconds=HOP_SECONDS if count > 1 else 0.0,
                    numeric_class=gpu.card.numeric_class,
                    backend=f"cuda:{gpu.card.index}",
                    gpu=gpu.card.bus_id or None,
                    memory_limit=size,
                    arch=gpu.card.arch,
                    processors=gpu.card.processors,
                )
            )
    return devices


def _too_much(gpu: NodeGpu, sizes: Sequence[int]) -> str:
    card = gpu.card
    what = " + ".join(mib(size) for size in sizes) + f" = {mib(sum(sizes))}" * (len(sizes) > 1)
    return (
        f"{gpu.name} has {mib(card.free_bytes)} of {mib(card.total_bytes)} free, and --gpu-memory gives its "
        f"{'stages' if len(sizes) > 1 else 'stage'} {what}: give less, end what else runs there (nvidia-smi lists it), "
        "or add a GPU"
    )


def wanted(options: EngineOptions) -> Wanted:
    """The planner's wish for these options. Raises InvalidParameterError for what no plan could satisfy."""
    numbers = () if options.device == "cpu" else gpu_numbers(options.device)
    check_stage_options(
        block_size=options.block_size,
        kv_dtype=options.kv_dtype,
        threads=options.threads,
        device=options.device if options.device == "cpu" else f"cuda:{(*numbers, 0)[0]}",
    )
    for field in ("concurrency", "max_sequences", "max_step_tokens", "prefill_chunk"):
        if not 1 <= getattr(options, field) <= MOST:
            raise InvalidParameterError(field, getattr(options, field), f"an integer from 1 to {MOST}")
    _check_memory(options)
    if options.memory is not None and options.stage_count != len(options.memory):
        raise InvalidParameterError(
            "memory", _listed(options.memory), f"one number for each of {options.stage_count} stages"
        )
    return Wanted(
        context=options.context,
        concurrency=options.concurrency,
        block_size=options.block_size,
        kv_dtype=options.kv_dtype,
        max_step_tokens=options.max_step_tokens,
        max_sequences=options.max_sequences,
        stages=options.stages if options.split is not None else options.stage_count,
        split=options.split,
    )


def _check_memory(options: EngineOptions) -> None:
    """That each kind of memory is limited by its own option. Raises InvalidParameterError."""
    if options.gpu_memory is None:
        if options.memory is not None and options.device != "cpu":
            raise InvalidParameterError(
                "memory", _listed(options.memory), "--gpu-memory instead: --memory is for CPU stages"
            )
        return
    if options.device == "cpu":
        raise InvalidParameterError("gpu_memory", _listed(options.gpu_memory), "--device gpu too")
    if options.memory is not None:
        raise InvalidParameterError("memory", _listed(options.memory), "--gpu-memory alone")
    if len(options.gpu_memory) not in (1, options.stage_count):
        allowed = f"one size for all, or one for each of {options.stage_count} stages"
        raise InvalidParameterError("gpu_memory", _listed(options.gpu_memory), allowed)


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A planned engine that has not been built yet. Pickles.

    Attributes:
        options: As given.
        path: The model file or folder; with `hub_model` an outline of it here, which any host can make.
        plan: The plan.
        node_ids: Ray's id of each stage's node; None leaves the placement to Ray.
        hub_model: That of the Hugging Face hub whose files the stages' nodes fetch, each its own stage's.
        num_gpus: How many GPUs a local Ray must count; None: as many as it finds.
    """

    options: EngineOptions
    path: Path
    plan: PipelinePlan
    node_ids: tuple[str, ...] | None
    hub_model: hub.HubModel | None = None
    num_gpus: int | None = None

    @property
    def placements(self) -> list[StagePlacement] | None:
        """Where Ray shall put the stages; None leaves it to Ray."""
        from shardline.cluster.ray_runtime import StagePlacement

        gpus = [stage.device.gpu for stage in self.plan.stages]
        if self.node_ids is None and not any(gpus):
            return None
        nodes = self.node_ids or (None,) * len(gpus)
        return [StagePlacement(node, gpu=gpu) for node, gpu in zip(nodes, gpus, strict=True)]


def prepare(options: EngineOptions, *, progress: Progress | None = None) -> Prepared:
    """Find the model and plan. Where `options.address` names a cluster, its nodes are asked for.

    Raises:
        ModelNotFoundError, CheckpointError: the model cannot be had or used.
        PlanningError, InvalidParameterError: the options cannot be met.
        EngineNotFoundError: no cluster answers at the address.
    """
    wish = wanted(options)
    hub_model = hub.pin(options.model) if options.uses_ray and hub.is_hub_name(options.model) else None
    path = hub.outline(hub_model, progress) if hub_model else resolve(options.model, progress=progress)
    checkpoint = open_checkpoint(path)
    try:
        model, size = checkpoint.spec, model_bytes(checkpoint)
    finally:
        checkpoint.close()
    on_cluster = options.address not in (None, "local")
    if options.device != "cpu" and options.uses_ray:
        unusable: list[str] = []
        gpus = chosen_gpus(options, unusable.append)
        devices = gpu_shares(gpus, options.stage_count or len(gpus), options.gpu_memory)
        if wish.stages is None and wish.split is None:
            wish = replace(wish, stages=min(len(devices), model.num_layers))
        plan = plan_pipeline(model, size, devices, wish)
        plan = replace(plan, notes=(*plan.notes, *(f"not used, on {problem}" for problem in unusable)))
        nodes = tuple(stage.device.node for stage in plan.stages) if on_cluster else None
        count = None if on_cluster else 1 + max(gpu.card.index for gpu in gpus)
        return Prepared(options, path, plan, nodes, hub_model, count)
    if not on_cluster:
        if options.device == "cpu":
            count = 1 if options.stage_count is None else max(1, options.stage_count)
            devices = cpu_devices(count, memory=options.memory, threads=options.threads)
        else:
            devices = [gpu_device(options.device, options.gpu_memory[0] if options.gpu_memory else None)]
        return Prepared(options, path, plan_pipeline(model, size, devices, wish), None, hub_model)
    from shardline.cluster.ray_runtime import describe_cluster

    found = describe_cluster(options.address)
    if wish.stages is None and wish.split is None:
        wish = replace(wish, stages=min(len(found), model.num_layers))
    plan = plan_pipeline(model, size, cluster_devices(found, options), wish)
    return Prepared(options, path, plan, tuple(stage.device.node for stage in plan.stages), hub_model)


def chosen_gpus(options: EngineOptions, tell: Callable[[str], None] = nobody) -> list[NodeGpu]:
    """The GPUs that the options name; `tell` hears of those that cannot be used. Raises PlanningError when there is
    none, or not that one."""
    if options.address in (None, "local"):
        found = gpus_here(tell)
    else:
        from shardline.cluster.ray_runtime import connected, describe_cluster

        with connected(options.address):
            found = gpus_of(describe_cluster(options.address), tell=tell)
    if options.device == "gpu":
        return found
    here = {gpu.card.index: gpu for gpu in found if gpu.is_here}
    numbers = gpu_numbers(options.device)
    missing = [f"cuda:{number}" for number in numbers if number not in here]
    if missing:
        there = ", ".join(f"cuda:{number} ({gpu.card.name})" for number, gpu in here.items()) or "none"
        raise PlanningError(f"there is no {', '.join(missing)} here that can be used; there is {there}")
    return [here[number] for number in numbers]


def cluster_devices(nodes: Sequence[NodeInfo], options: EngineOptions) -> list[Device]:
    """Shares of a cluster's nodes: one a node, more only where more stages are asked for than there are nodes.

    With fewer stages than nodes the planner chooses among all of them; with `options.memory`, one number a stage, they
    are the first ones.
    """
    count = max(options.stage_count or 0, len(nodes))
    devices: list[Device] = []
    for index, node in enumerate(nodes):
        devices += [
            replace(device, node=node.node_id)
            for device in cpu_devices(
                len(range(index, count, len(nodes))),
                node=f"{node.host} {node.address}",
                free_bytes=node.memory_bytes,
                threads=options.threads,
                host_cores=max(1, int(node.cpus)),
            )
        ]
    if options.memory is not None:
        devices = [replace(d, free_bytes=size) for d, size in zip(devices, options.memory, strict=False)]
    return devices


def build_engine(prepared: Prepared, *, in_process: bool = False, progress: Progress = nobody) -> Engine:
    """The engine, not started yet. `progress` hears how far nodes are that fetch their files.

    Its stages are Ray actors, and Ray must be connected, where the options say so and not `in_process`. Raises
    CheckpointError.
    """
    options, plan = prepared.options, prepared.plan
    here, path = in_process or not options.uses_ray, prepared.path
    if prepared.hub_model is not None:
        # The plan may have been made on another host.
        path = hub.fetch_all(prepared.hub_model, progress) if here else hub.outline(prepared.hub_model, progress)
    checkpoint = open_checkpoint(path)
    try:
        text = ModelText.from_checkpoint(checkpoint)
        specs = tuple(replace(spec, num_tokens=text.num_ids) for spec in plan.specs)
        scheduler = SchedulerConfig(
            num_blocks=plan.num_blocks,
            block_size=options.block_size,
            max_context=plan.context,
            depth=plan.depth,
            max_step_tokens=options.max_step_tokens,
            prefill_chunk=min(options.prefill_chunk, options.max_step_tokens),
            max_sequences=options.max_sequences,
            min_microbatch=plan.min_microbatch,
            ahead=plan.ahead,
            prefix_cache=options.prefix_cache,
            eos_token_ids=tuple(text.tokenizer.eos_ids),
            vocab_size=text.num_ids,
        )
        if here:
            return Engine(LocalPipeline(specs, checkpoint, owns_checkpoint=True), text, scheduler)
    except BaseException:
        checkpoint.close()
        raise
    checkpoint.close()
    from shardline.cluster.ray_pipeline import RayPipeline
    from shardline.cluster.stage_loading import HubLoader

    source = path if prepared.hub_model is None else HubLoader(prepared.hub_model)
    placements = prepared.placements
    if placements is not None and any(placement.gpu for placement in placements):
        # A stage's process sees its own GPU alone, so it is the first one there.
        specs = tuple(replace(spec, device="cuda:0") for spec in specs)
    return Engine(RayPipeline(specs, source, placements, tell=progress), text, scheduler)
