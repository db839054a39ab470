"""What a stage keeps on a GPU besides weights, pool and tables: foreseen from shapes, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.kernels import StepShape
from shardline.kernels.cuda.workspace import (
    ARRIVALS,
    FORMATS,
    ExpertsShape,
    Product,
    WeightShapes,
    Workspace,
    step_workspace,
)
from shardline.scheduler.params import MAX_LOGPROBS
from shardline.stage.roles import matrix_shapes
from shardline.stage.spec import ModelSpec, StageSpec, table_rows


@dataclass(frozen=True, slots=True)
class FileTraits:
    """What of a model's file, besides its shapes, decides how much a stage keeps.

    Attributes:
        apart: Some gate and its up are of different formats.
        ordered: Some matrix may have its columns in an order of its own.
    """

    apart: bool = False
    ordered: bool = False


PLAIN_FILE = FileTraits()
"""Gates and ups alike, and columns in order."""


def step_shape(model: ModelSpec, share: StageSpec, max_blocks: int) -> StepShape:
    """The largest step of a stage. max_blocks: Columns of its block tables."""
    sampled = min(share.max_sequences, share.max_step_tokens) if share.has_head else 0
    layers = model.layers[share.first_layer : share.end_layer]
    has_experts = model.experts is not None and any(layer.experts for layer in layers)
    return StepShape(
        rows=share.max_step_tokens,
        query_heads=model.num_heads if layers else 0,
        kv_heads=model.num_kv_heads if layers else 0,
        head_dim=model.head_dim if layers else 0,
        max_positions=max_blocks * share.block_size if layers else 0,
        experts_per_token=model.experts.rule.experts_per_token if model.experts and has_experts else 0,
        sampled_rows=sampled,
        vocab=model.vocab_size if sampled else 0,
        distinct_ids=min(max_blocks * share.block_size, model.vocab_size) if sampled else 0,
        logprobs=MAX_LOGPROBS if sampled else 0,
    )


def gpu_workspace_bytes(
    model: ModelSpec, share: StageSpec, traits: FileTraits, *, max_blocks: int, arch: int, processors: int
) -> int:
    """Bytes that a stage allocates on a GPU besides weights, pool and tables, all of them when it is loaded.

    A bound: of what the shapes leave open, such as the formats of matrices, it takes the largest.

    Args:
        model: Its shape.
        share: Which layers, and how large a step may be; its pool does not count.
        traits: Of its file.
        max_blocks: Blocks of the longest sequence.
        arch, processors: The GPU's, 86 for sm_86.
    """
    step = step_shape(model, share, max_blocks)
    kept = step_workspace(step, _weights(model, share, traits), arch, processors)
    return 4 * ARRIVALS + kept.nbytes + _buffers(model, share, step).nbytes


def _buffers(model: ModelSpec, share: StageSpec, step: StepShape) -> Workspace:
    """What `Decoder` allocates, but tables and pool."""
    found = Workspace()
    rows, hidden, heads = share.max_step_tokens, model.hidden_size, step.sampled_rows
    layers = model.layers[share.first_layer : share.end_layer]
    found.want("residual", rows * hidden)
    found.want("inputs", 4 * (rows + 64) + heads, "int32")
    if heads:
        found.want("gathered", heads * hidden)
        found.want("logits", heads * model.vocab_size)
        found.want("last_tokens", table_rows(share.max_sequences), "int32")
        found.want_rows("head", heads, hidden)
    if not layers:
        return found
    found.want("qkv", rows * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    found.want_rows("normed", rows, hidden)
    found.want_rows("attended", rows, model.num_heads * model.head_dim)
    if not all(layer.experts for layer in layers):
        found.want_rows("gated", rows, model.intermediate_size)
    experts = model.experts if any(layer.experts for layer in layers) else None
    if experts is not None:
        found.want("chosen", 2 * rows * experts.rule.experts_per_token)
        if experts.shared_size:
            found.want_rows("shared", rows, experts.shared_size)
    if model.post_norms or (experts is not None and experts.shared_gate):
        found.want("result", rows * hidden)
    return found


def _weights(model: ModelSpec, share: StageSpec, traits: FileTraits) -> WeightShapes:
    found = WeightShapes()
    if share.has_head:
        _add_matrix(found, [(model.vocab_size, model.hidden_size)], traits)
    kinds = {layer.experts: index for index, layer in enumerate(model.layers) if _has(share, index)}
    for index in kinds.values():
        shapes = matrix_shapes(model, index)
        _add_matrix(found, [shapes["q"], shapes["k"], shapes["v"]], traits)
        _add_matrix(found, [shapes["o"]], traits)
        for prefix in ("", "shared_"):
            if f"{prefix}gate" in shapes:
                _add_gated(found, shapes[f"{prefix}gate"], traits)
                _add_matrix(found, [shapes[f"{prefix}down"]], traits)
        if "expert_gate" in shapes:
            assert model.experts is not None
            width, inputs = shapes["expert_gate"]
            ordered = (traits.ordered, traits.ordered)
            found.experts.add(ExpertsShape(model.experts.num_experts, width, inputs, traits.apart, ordered))
    return found


def _has(share: StageSpec, layer: int) -> bool:
    return share.first_layer <= layer < share.end_layer


def _add_matrix(found: WeightShapes, stack: list[tuple[int, int]], traits: FileTraits) -> None:
    """A stack becomes one part, or one for each of its matrices, as their formats are."""
    inputs = stack[0][1]
    _add_products(found, {sum(channels for channels, _ in stack), *(channels for channels, _ in stack)}, inputs)
    if traits.ordered:
        found.ordered |= {(place, inputs) for place in range(len(stack))}


def _add_gated(found: WeightShapes, shape: tuple[int, int], traits: FileTraits) -> None:
    channels, inputs = shape
    _add_products(found, {2 * channels}, inputs, gated=True)
    if traits.apart:
        _add_products(found, {channels}, inputs)
        found.apart.add(channels)
    if traits.ordered:
        found.ordered |= {(0, inputs), (1, inputs)} if traits.apart else {(0, inputs)}


def _add_products(found: WeightShapes, channels: set[int], inputs: int, *, gated: bool = False) -> None:
    for form in FORMATS:
        found.products |= {Product.of(count, inputs, *form, gated=gated) for count in channels}
