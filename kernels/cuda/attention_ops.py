"""Attention of the CUDA backend over its paged pool."""

from __future__ import annotations

from typing import Any

from shardline.kernels import checks
from shardline.kernels.backend import Array, KVCache, KVLayout, RopeTable, Rows
from shardline.kernels.cuda import tables
from shardline.kernels.cuda.core import CudaCore, float32, int32
from shardline.kernels.cuda.workspace import attends_whole, split_sums
from shardline.kernels.errors import UnsupportedOperationError

LOG2_E = 1.4426950408889634

MOST_HEADS_A_KV_HEAD = 16
"""They share a tile of the tensor cores' 16 rows."""

NORM_THREADS = 256
"""Of the norm over all heads of a row. Part of the bit contract: they order its sum."""


class AttentionOps(CudaCore):
    """The ops of `Backend` on queries, keys and values."""

    def begin_step(self, rows: Rows, cache: KVCache, query_heads: int) -> None:
        group = query_heads // cache.layout.num_kv_heads
        if group > MOST_HEADS_A_KV_HEAD:
            raise UnsupportedOperationError(f"{group} query heads a KV head (at most {MOST_HEADS_A_KV_HEAD})", "cuda")
        tiles = self._buffer("query tiles", 2 * rows.positions.shape[0], "int32")
        self._launch(
            ("attention", "query_tiles"),
            (1,),
            1024,
            (rows.positions, rows.sequences, tiles, int32(rows.count), int32(16 // group), int32(rows.count)),
            **cache.defines,
        )

    def rope_kv_write(
        self,
        qkv: Array,
        rows: Rows,
        rope: RopeTable | None,
        cache: KVCache,
        layer: int,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None:
        layout = cache.layout
        checks.rope_kv_write(qkv, rows, rope, layout, layer, q_norm, k_norm)
        query_heads = qkv.shape[1] // layout.head_dim - 2 * layout.num_kv_heads
        a_head = q_norm is not None and q_norm.shape == (layout.head_dim,)
        if q_norm is not None and not a_head:
            self._norm_heads(qkv, rows.count, q_norm, k_norm, eps)
        unread = rows.positions  # an address for what the kernel is not compiled to read
        self._launch(
            ("rope_kv_write", "rope_kv_write"),
            (rows.count, query_heads + layout.num_kv_heads),
            32,
            (
                qkv,
                rows.positions,
                rows.slots,
                unread if rope is None else rope.cos,
                unread if rope is None else rope.sin,
                cache.keys[layer],
                cache.values[layer],
                q_norm if a_head else unread,
                k_norm if a_head else unread,
                float32(eps),
                int32(query_heads),
                int32(layout.num_kv_heads),
                # No channel turns without a rope.
                int32(0 if rope is None else 2 * rope.cos.shape[1]),
                int32(_shift(layout)),
                *cache.scales(layer),
            ),
            **cache.defines,
            INTERLEAVED=int(rope is not None and rope.interleaved),
            NORMS=int(a_head),
        )

    def _norm_heads(self, qkv: Array, rows: int, q_norm: Array, k_norm: Any, eps: float) -> None:
        sizes = (int32(q_norm.shape[0]), int32(k_norm.shape[0]))
        arguments = (qkv, q_norm, k_norm, float32(eps), *sizes)
        self._launch(("norms", "norm_heads"), (rows, 2), NORM_THREADS, arguments, THREADS=NORM_THREADS)

    def paged_attention(
        self,
        qkv: Array,
        rows: Rows,
        cache: KVCache,
        layer: int,
        scale: float,
        out: Array,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
    ) -> None:
        layout = cache.layout
        query_heads = checks.heads(qkv, rows, layout, layer)
        group = query_heads // layout.num_kv_heads
        assert group <= MOST_HEADS_A_KV_HEAD, "begin_step refuses it"
        max_splits = -(-rows.block_tables.shape[1] * layout.block_size // tables.ATTENTION_SPLIT)
        # Both ways give the same bits; splits over blocks where rows alone would not fill the device.
        whole = attends_whole(rows.count, layout.num_kv_heads, group, self._processors)
        need = 0 if whole else split_sums(rows.count, query_heads, layout.head_dim, max_splits)
        partial = self._buffer("split sums", need)
        # The splits that a tile can see.
        seen = min(max_splits, tables.splits_of_window(window)) if window else max_splits
        width = min(seen, max(1, -(-4 * self._processors // (rows.count * layout.num_kv_heads))))
        extra: list[Any] = []
        defines = cache.defines
        factor = scale * LOG2_E
        if window:
            extra.append(int32(window))
            defines["WINDOW"] = 1
        if softcap:
            factor = 2 * LOG2_E * scale / softcap
            extra.append(float32(softcap * LOG2_E))
            defines["SOFTCAP"] = 1
        if sinks is not None:
            checks.vector("sinks", sinks, query_heads)
            extra.append(sinks)
            defines["SINKS"] = 1
        self._launch(
            ("attention", "attend_rows" if whole else "attend_splits"),
            (1 if whole else width, layout.num_kv_heads, rows.count),
            128,
            (
                qkv,
                cache.keys[layer],
                cache.values[layer],
                self._buffers["query tiles"],
                rows.positions,
                rows.sequences,
                rows.block_tables,
                partial,
                self._arrived,
                out.values,
                out.fragments,
                out.sums,
                int32(out.blocks),
                int32(rows.block_tables.shape[1]),
                int32(_shift(layout)),
                int32(group),
                int32(layout.num_kv_heads),
                int32(max_splits),
                float32(factor),
                *extra,
                *cache.scales(layer),
            ),
            shared=tables.attention_shared_bytes(layout.head_dim, defines.get("KV_BITS", 16)),
            **defines,
        )
        if layout.head_dim % 32:
            self._make_fragments(out, rows.count, unit=True)


def _shift(layout: KVLayout) -> int:
    return layout.block_size.bit_length() - 1
