"""What an op's arguments must be, checked once at a backend's edge, the same for every backend.

A wrong argument is a fault of our own callers, never of a user; so these are assertions. They read only what every
device's arrays have: dtype, shape and `flags.c_contiguous`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.backend import Array, KVLayout, RopeTable, Rows
from shardline.kernels.experts import RouterRule
from shardline.kernels.sampling import SamplingBatch


def table(name: str, array: Array, rows: int, columns: int) -> None:
    """float32 [>= rows, columns], C-contiguous."""
    _array(name, array, "float32", 2)
    assert array.shape[1] == columns, f"{name} is {array.shape}, not [.., {columns}]"
    assert array.shape[0] >= rows, f"{name} is {array.shape}: fewer than {rows} rows"


def vector(name: str, array: Array, length: int, dtype: str = "float32") -> None:
    """[>= length], C-contiguous; float32 vectors are weights and have that length exactly."""
    _array(name, array, dtype, 1)
    enough = array.shape[0] == length or (array.shape[0] > length and dtype != "float32")
    assert enough, f"{name} is {array.shape}, not [{length}]"


def count(name: str, rows: int) -> None:
    """A number of rows: positive."""
    assert rows >= 1, f"{name} is {rows}"


def embedding(token_ids: Array, inputs: int, out: Array, rows: int, last_tokens: Array | None) -> None:
    """Of `Backend.embedding`."""
    count("rows", rows)
    vector("token_ids", token_ids, rows, "int32")
    if last_tokens is not None:
        _array("last_tokens", last_tokens, "int32", 1)
    table("out", out, rows, inputs)


def rms_norm(x: Array, weight: Array, out: Array, rows: int) -> None:
    """Of `Backend.rms_norm`."""
    count("rows", rows)
    size = weight.shape[0]
    vector("weight", weight, size)
    table("x", x, rows, size)
    table("out", out, rows, size)
    assert x is not out, "out overlaps x"


def linear(x: Array, channels: int, inputs: int, out: Array, rows: int, bias: Array | None) -> None:
    """Of `Backend.linear`."""
    count("rows", rows)
    table("x", x, rows, inputs)
    table("out", out, rows, channels)
    assert x is not out, "out overlaps x"
    if bias is not None:
        vector("bias", bias, channels)


def gated_linear(x: Array, channels: int, inputs: int, out: Array, rows: int, bias: Array | None) -> None:
    """Of `Backend.gated_linear`."""
    linear(x, channels, inputs, out, rows, None)
    if bias is not None:
        vector("bias", bias, 2 * channels)


def expert_biases(
    experts: int, width: int, inputs: int, gate_bias: Array | None, up_bias: Array | None, down_bias: Array | None
) -> None:
    """Of `Backend.load_experts`, for experts whose gate is [width, inputs]."""
    biases = (("gate_bias", gate_bias, width), ("up_bias", up_bias, width), ("down_bias", down_bias, inputs))
    for name, bias, channels in biases:
        assert (bias is None) == (gate_bias is None), "an expert's biases go together"
        if bias is not None:
            table(name, bias, experts, channels)


def route(
    router: Array,
    rule: RouterRule,
    expert_ids: Array,
    shares: Array,
    rows: int,
    bias: Array | None,
    choice_bias: Array | None,
) -> None:
    """Of `Backend.route`, all but x."""
    count("rows", rows)
    experts = int(router.shape[0])
    table("router", router, experts, router.shape[1])
    groups, kept = rule.num_groups, rule.groups_kept
    even = groups >= 1 and experts % groups == 0 and 1 <= kept <= groups
    assert even, f"{experts} experts in {groups} groups, of which {kept} are kept"
    chosen, choice = rule.experts_per_token, kept * (experts // groups)
    assert 1 <= chosen <= choice, f"{chosen} experts a token of {choice}"
    _chosen(expert_ids, shares, rows, chosen)
    for name, array in (("bias", bias), ("choice_bias", choice_bias)):
        if array is not None:
            vector(name, array, experts)


def expert_mlp(inputs: int, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
    """Of `Backend.expert_mlp`, all but x, which has `inputs` columns."""
    count("rows", rows)
    _chosen(expert_ids, shares, rows, expert_ids.shape[1])
    table("out", out, rows, inputs)


def add_gated(gate: Array, y: Array, out: Array, rows: int) -> None:
    """Of `Backend.add_gated`, all but x, which has as many columns as the gate."""
    count("rows", rows)
    vector("gate", gate, gate.shape[0])
    table("y", y, rows, y.shape[1])
    table("out", out, rows, y.shape[1])
    assert y is not out, "out overlaps y"


def _chosen(expert_ids: Array, shares: Array, rows: int, chosen: int) -> None:
    _array("expert_ids", expert_ids, "int32", 2)
    enough = expert_ids.shape[0] >= rows and expert_ids.shape[1] == chosen
    assert enough, f"expert_ids is {expert_ids.shape}, not [>= {rows}, {chosen}]"
    table("shares", shares, rows, chosen)


def heads(qkv: Array, rows: Rows, layout: KVLayout, layer: int) -> int:
    """Of both attention ops. Returns Hq."""
    count("rows.count", rows.count)
    assert 0 <= layer < layout.num_layers, f"layer {layer} of {layout.num_layers}"
    columns = qkv.shape[1]
    table("qkv", qkv, rows.count, columns)
    query_heads = int(columns) // layout.head_dim - 2 * layout.num_kv_heads
    whole = columns % layout.head_dim == 0 and query_heads > 0 and query_heads % layout.num_kv_heads == 0
    assert whole, f"qkv has {columns} columns: not (Hq + 2 * {layout.num_kv_heads}) * {layout.head_dim}"
    vector("rows.positions", rows.positions, rows.count, "int32")
    return query_heads


def rope_kv_write(
    qkv: Array,
    rows: Rows,
    rope: RopeTable | None,
    layout: KVLayout,
    layer: int,
    q_norm: Array | None,
    k_norm: Array | None,
) -> None:
    """Of `Backend.rope_kv_write`."""
    query_heads = heads(qkv, rows, layout, layer)
    vector("rows.slots", rows.slots, rows.count, "int32")
    if rope is not None:
        max_positions, half = rope.cos.shape
        assert 2 * half <= layout.head_dim, f"rope turns {2 * half} of {layout.head_dim} channels"
        for name, array in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
            table(name, array, max_positions, half)
    assert (q_norm is None) == (k_norm is None), "q_norm and k_norm go together"
    if q_norm is not None and k_norm is not None:
        whole_row = q_norm.shape != (layout.head_dim,)
        vector("q_norm", q_norm, layout.head_dim * (query_heads if whole_row else 1))
        vector("k_norm", k_norm, layout.head_dim * (layout.num_kv_heads if whole_row else 1))


def paged_attention(
    qkv: Array,
    rows: Rows,
    layout: KVLayout,
    layer: int,
    out: Array,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> None:
    """Of `Backend.paged_attention`."""
    query_heads = heads(qkv, rows, layout, layer)
    vector("rows.sequences", rows.sequences, rows.count, "int32")
    _array("rows.block_tables", rows.block_tables, "int32", 2)
    table("out", out, rows.count, query_heads * layout.head_dim)
    assert window >= 0, f"window is {window}"
    assert 0 <= softcap < float("inf"), f"softcap is {softcap}"
    if sinks is not None:
        vector("sinks", sinks, query_heads)


def soft_cap(x: Array, cap: float, rows: int) -> None:
    """Of `Backend.soft_cap`."""
    count("rows", rows)
    table("x", x, rows, x.shape[1])
    assert 0 < cap < float("inf"), f"cap is {cap}"


def gather_rows(x: Array, indices: Array, out: Array, number: int) -> None:
    """Of `Backend.gather_rows`."""
    count("count", number)
    vector("indices", indices, number, "int32")
    table("x", x, 1, x.shape[1])
    table("out", out, number, x.shape[1])
    assert x is not out, "out overlaps x"


_DTYPES = {name: np.dtype(name) for name in ("float32", "int32", "int64", "uint64")}
"""A name is slow to compare with."""


def _array(name: str, array: Array, dtype: str, dimensions: int) -> None:
    right = array.dtype == _DTYPES[dtype] and array.ndim == dimensions and array.flags.c_contiguous
    assert right, (
        f"{name} is {array.dtype} {array.shape}, {'' if array.flags.c_contiguous else 'not '}C-contiguous;"
        f" it must be {dtype} with {dimensions} dimensions, C-contiguous"
    )


def sample(
    logits: Array, batch: SamplingBatch, last_tokens: Array | None = None, places: NDArray[np.int32] | None = None
) -> None:
    """Of `Backend.sample_later`; the batch's arrays and the places are the host's."""
    rows, vocab = batch.rows, logits.shape[1]
    count("rows", rows)
    table("logits", logits, rows, vocab)
    for name, dtype in _SAMPLED_ROWS:
        array = getattr(batch, name)
        # First without a call: this is on the way of every step.
        if array.dtype != _DTYPES[dtype] or array.shape != (rows,) or not array.flags.c_contiguous:
            _of_length(name, array, dtype, rows)
    _entries("bias", batch.bias_offsets, batch.bias_ids, batch.bias_values, "float32", rows, vocab)
    _entries("history", batch.history_offsets, batch.history_ids, batch.history_counts, "int32", rows, vocab)
    assert (last_tokens is None) == (places is None), "last_tokens and places go together"
    if last_tokens is not None and places is not None:
        _array("last_tokens", last_tokens, "int32", 1)
        _of_length("places", places, "int32", rows)
        # Of what is below 0 the bits are those of a large number.
        inside = places.view(np.uint32).max() < last_tokens.shape[0]
        assert inside, f"places are {places.min()} to {places.max()}, of {last_tokens.shape[0]}"


_SAMPLED_ROWS = (
    *((name, "float32") for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
    ("top_k", "int32"),
    ("logprobs", "int32"),
    ("seed", "uint64"),
    ("position", "int64"),
)
"""Of `SamplingBatch`: one number a row."""


def _entries(
    kind: str,
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    values: NDArray[Any],
    dtype: str,
    rows: int,
    vocab: int,
) -> None:
    """Biases or histories, any number a row."""
    _of_length(f"{kind}_offsets", offsets, "int64", rows + 1)
    _array(f"{kind}_ids", ids, "int32", 1)
    _array(f"{kind} values", values, dtype, 1)
    if len(ids) == len(values) == 0 and not offsets.any():
        return
    assert offsets[0] == 0, f"{kind}_offsets start at {offsets[0]}"
    assert offsets[-1] == len(ids) == len(values), f"{kind}_offsets end at {offsets[-1]} of {len(ids)} entries"
    assert (offsets[1:] >= offsets[:-1]).all(), f"{kind}_offsets descend"
    assert len(ids) == 0 or (ids.min() >= 0 and ids.max() < vocab), f"a {kind} id is outside of 0..{vocab - 1}"


def _of_length(name: str, array: NDArray[Any], dtype: str, length: int) -> None:
    _array(name, array, dtype, 1)
    assert array.shape[0] == length, f"{name} is {array.shape}, not [{length}]"
