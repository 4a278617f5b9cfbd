"""Gradients of the sparse walk by Triton kernels, for queries, keys and values; the selection is fixed.

Per block of queries and level, from the final log-sum-exp of the forward: the top level in ordinary tiles, once by
queries and once by nodes; the levels below by parent, as in prefill, each pair leaving its part of the query's
gradient and each program its part of the children's. The parts are summed in a fixed order: no atomics, the same bits
each time; for that the pairs are sorted stably. Gradients of nodes go on to the tokens and the pooler through
`build_levels`. [our decision]

Logits are in units of log2, as in prefill. What is kept between forward and backward is the output, its log-sum-exp
and the chosen nodes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .kernels_common_recsa_qwen3 import (
    LOG2E,
    halves_product,
    launching_on,
    load_angles,
    load_halves,
    rotate_halves,
    slot_tables,
    tl,
    triton,
)
from .kernels_prefill_recsa_qwen3 import NODE_BYTES, PrefillBlock, children_of, pairs_of_item, slot_angles
from .tree_recsa_qwen3 import Levels

# Rows (queries x heads of a group) of a tile, fewer of long vectors, more where a parent has WIDE children; the pairs
# whose sum a program leaves.
ROWS, LONG_ROWS, WIDE_ROWS, WIDE = 64, 16, 128, 64
PAIRS_OF_PROGRAM = 512


# ---- the top level --------------------------------------------------------------------------------------------------


@triton.jit
def _rotate_back(first, second, cos, sin):
    """The transpose of the rotary embedding, in float32."""
    return first * cos + second * sin, second * cos - first * sin


@triton.jit(do_not_specialize=["begin", "width", "nodes", "words", "span"])
def top_query_gradient_kernel(
    QUERY,
    KEY,
    VALUE,
    MARKS,
    UPSTREAM,
    DELTA,
    LSE,
    GRADIENT,
    COS,
    SIN,
    ROWS,
    STARTS,
    begin,
    width,
    nodes,
    words,
    span,
    bias,
    scaling,
    stride_s,
    stride_h,
    stride_n,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    """GRADIENT of the queries before RoPE, `[S' * H_kv, w, G, D]` float32, through the unchosen nodes of the top.

    QUERY and KEY are rotated; UPSTREAM `[S' * H_kv, w, G, D]` in their dtype; DELTA (upstream times output) and LSE
    `[S' * H_kv, w, G]` float32.
    """
    head = tl.program_id(1).to(tl.int64)
    row = head // KV_HEADS
    start = tl.load(STARTS + row) + begin
    value = VALUE + tl.load(ROWS + row).to(tl.int64) * stride_s + head % KV_HEADS * stride_h
    o_row = tl.arange(0, BQ * GP)
    first_query = tl.program_id(0) * BQ
    o_q = first_query + o_row // GP
    o_g = o_row % GP
    m_row = (o_q < width) & (o_g < G)
    path = (start + o_q) // span
    at = (head * width + o_q) * G + o_g
    query_first, query_second = load_halves(QUERY, at * (2 * HALF), m_row, HALF, HP)
    upstream_first, upstream_second = load_halves(UPSTREAM, at * (2 * HALF), m_row, HALF, HP)
    lse = tl.load(LSE + at, mask=m_row, other=float("inf"))
    delta = tl.load(DELTA + at, mask=m_row, other=0.0)
    last = tl.minimum((start + tl.minimum(first_query + BQ, width) - 1) // span, nodes)

    gradient_first = tl.zeros([BQ * GP, HP], tl.float32)
    gradient_second = tl.zeros([BQ * GP, HP], tl.float32)
    for n in range(0, last, BN):
        o_n = n + tl.arange(0, BN)
        inside = o_n < last
        key_first, key_second = load_halves(KEY, (head * nodes + o_n) * (2 * HALF), inside, HALF, HP)
        value_first, value_second = load_halves(value, o_n.to(tl.int64) * stride_n, inside, HALF, HP)
        # a tile lies within one word
        marks = tl.load(MARKS + (head * width + o_q) * words + n // 64, mask=m_row, other=0)
        counts = ((marks[:, None] >> (n % 64 + tl.arange(0, BN)).to(tl.int64)[None, :]) & 1) == 0
        counts = counts & (o_n[None, :] < path[:, None])
        logits = halves_product(query_first, query_second, key_first, key_second) + (bias - lse)[:, None]
        weights = tl.where(counts, tl.exp2(logits), 0.0)
        product = halves_product(upstream_first, upstream_second, value_first, value_second)
        slopes = (weights * (product - delta[:, None])).to(key_first.dtype)
        gradient_first = tl.dot(slopes, key_first, gradient_first, input_precision="ieee")
        gradient_second = tl.dot(slopes, key_second, gradient_second, input_precision="ieee")

    cos, sin = load_angles(COS, SIN, path, m_row, STRIDE, HALF, HP)
    gradient_first, gradient_second = _rotate_back(gradient_first, gradient_second, cos * scaling, sin * scaling)
    o_d = tl.arange(0, HP)
    inside = m_row[:, None] & (o_d < HALF)[None, :]
    where = GRADIENT + (at * 2 * HALF)[:, None] + o_d[None, :]
    tl.store(where, gradient_first, mask=inside)
    tl.store(where + HALF, gradient_second, mask=inside)


@triton.jit(do_not_specialize=["begin", "width", "nodes", "words", "span", "entries"])
def top_node_gradient_kernel(
    QUERY,
    KEY,
    VALUE,
    MARKS,
    UPSTREAM,
    DELTA,
    LSE,
    KEY_GRADIENT,
    VALUE_GRADIENT,
    COS,
    SIN,
    ROWS,
    STARTS,
    begin,
    width,
    nodes,
    words,
    span,
    bias,
    unit,
    entries,
    stride_s,
    stride_h,
    stride_n,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    """Adds to the gradients `[S, H_kv, entries, D]` float32 of the top level's keys before RoPE and values.

    One program per tile of nodes, so nobody else writes there; `unit` turns logits of log2 into natural ones.
    """
    head = tl.program_id(1).to(tl.int64)
    row = head // KV_HEADS
    sequence = tl.load(ROWS + row).to(tl.int64)
    start = tl.load(STARTS + row) + begin
    first_node = tl.program_id(0) * BN
    o_n = first_node + tl.arange(0, BN)
    # what the block's last query may read; beyond it storage may hold anything
    inside = o_n < tl.minimum((start + width - 1) // span, nodes)
    key_first, key_second = load_halves(KEY, (head * nodes + o_n) * (2 * HALF), inside, HALF, HP)
    value = sequence * stride_s + head % KV_HEADS * stride_h + o_n.to(tl.int64) * stride_n
    value_first, value_second = load_halves(VALUE, value, inside, HALF, HP)

    o_row = tl.arange(0, BQ * GP)
    o_g = o_row % GP
    key_gradient_first = tl.zeros([BN, HP], tl.float32)
    key_gradient_second = tl.zeros([BN, HP], tl.float32)
    value_gradient_first = tl.zeros([BN, HP], tl.float32)
    value_gradient_second = tl.zeros([BN, HP], tl.float32)
    # the first query that has the first node before its path
    first_query = tl.maximum((first_node + 1) * span - start, 0) // BQ * BQ
    for q in range(first_query, width, BQ):
        o_q = q + o_row // GP
        m_row = (o_q < width) & (o_g < G)
        at = (head * width + o_q) * G + o_g
        query_first, query_second = load_halves(QUERY, at * (2 * HALF), m_row, HALF, HP)
        upstream_first, upstream_second = load_halves(UPSTREAM, at * (2 * HALF), m_row, HALF, HP)
        lse = tl.load(LSE + at, mask=m_row, other=float("inf"))
        delta = tl.load(DELTA + at, mask=m_row, other=0.0)
        path = (start + o_q) // span
        marks = tl.load(MARKS + (head * width + o_q) * words + first_node // 64, mask=m_row, other=0)
        counts = ((marks[None, :] >> (first_node % 64 + tl.arange(0, BN)).to(tl.int64)[:, None]) & 1) == 0
        counts = counts & (o_n[:, None] < path[None, :])
        logits = halves_product(key_first, key_second, query_first, query_second) + (bias - lse)[None, :]
        weights = tl.where(counts, tl.exp2(logits), 0.0)
        product = halves_product(value_first, value_second, upstream_first, upstream_second)
        slopes = (weights * (product - delta[None, :])).to(key_first.dtype)
        weights = weights.to(key_first.dtype)
        value_gradient_first = tl.dot(weights, upstream_first, value_gradient_first, input_precision="ieee")
        value_gradient_second = tl.dot(weights, upstream_second, value_gradient_second, input_precision="ieee")
        key_gradient_first = tl.dot(slopes, query_first, key_gradient_first, input_precision="ieee")
        key_gradient_second = tl.dot(slopes, query_second, key_gradient_second, input_precision="ieee")

    cos, sin = load_angles(COS, SIN, o_n, inside, STRIDE, HALF, HP)
    key_gradient_first, key_gradient_second = _rotate_back(
        key_gradient_first, key_gradient_second, cos * unit, sin * unit
    )
    o_d = tl.arange(0, HP)
    inside = inside[:, None] & (o_d < HALF)[None, :]
    where = ((sequence * KV_HEADS + head % KV_HEADS) * entries + o_n)[:, None] * (2 * HALF) + o_d[None, :]
    for half in tl.static_range(2):
        key_gradient = key_gradient_second if half else key_gradient_first
        value_gradient = value_gradient_second if half else value_gradient_first
        target = KEY_GRADIENT + where + half * HALF
        tl.store(target, tl.load(target, mask=inside, other=0.0) + key_gradient, mask=inside)
        target = VALUE_GRADIENT + where + half * HALF
        tl.store(target, tl.load(target, mask=inside, other=0.0) + value_gradient, mask=inside)


# ---- gathered levels ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["begin", "width", "parents", "items", "children", "span"])
def children_gradient_kernel(
    QUERY,
    KEY,
    VALUE,
    MARKS,
    UPSTREAM,
    DELTA,
    LSE,
    QUERY_PARTS,
    KEY_PARTS,
    VALUE_PARTS,
    COS,
    SIN,
    SLOT_COS,
    SLOT_SIN,
    ROWS,
    STARTS,
    SORTED,
    ENDS,
    COUNTS,
    PARENT_OF_ITEM,
    ITEM_ENDS,
    begin,
    width,
    parents,
    items,
    children,
    span,
    bias,
    unit,
    stride_ks,
    stride_kh,
    stride_kn,
    stride_vs,
    stride_vh,
    stride_vn,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BP: tl.constexpr,
    ITEM: tl.constexpr,
):
    """One program per (item, sequence and KV head): the children of one parent, for up to ITEM pairs that chose it.

    Leaves QUERY_PARTS `[S' * H_kv, w, K, G, D]` in the dtype of the queries, at the path's offset in the parent, and
    KEY_PARTS and VALUE_PARTS `[S' * H_kv, items, R, D]` float32, the keys' before RoPE.
    """
    item = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    parent = tl.load(PARENT_OF_ITEM + head * items + item)
    if parent < parents:
        row = head // KV_HEADS
        sequence = tl.load(ROWS + row).to(tl.int64)
        start = tl.load(STARTS + row) + begin
        sorted_pairs, first_pair, last_pair = pairs_of_item(
            SORTED + head * width * K, ENDS, COUNTS, ITEM_ENDS, head * parents + parent, item, ITEM
        )
        o_o, node, stored = children_of(parent, (start + width - 1) // span, children, R, RP, TOKENS)
        key = sequence * stride_ks + head % KV_HEADS * stride_kh + node.to(tl.int64) * stride_kn
        key_first, key_second = load_halves(KEY, key, stored, HALF, HP)
        cos, sin = load_angles(COS, SIN, o_o, stored, STRIDE, HALF, HP)
        key_first, key_second = rotate_halves(key_first, key_second, cos, sin)
        value = sequence * stride_vs + head % KV_HEADS * stride_vh + node.to(tl.int64) * stride_vn
        value_first, value_second = load_halves(VALUE, value, stored, HALF, HP)

        # offsets within a head fit 32 bits; a block's last rows repeat the last pair and head, and do not count
        QUERY += head * width * (G * 2 * HALF)
        UPSTREAM += head * width * (G * 2 * HALF)
        LSE += head * width * G
        DELTA += head * width * G
        pairs = head * width * K
        QUERY_PARTS += pairs * (G * 2 * HALF)
        o_row = tl.arange(0, BP * GP)
        o_g = tl.minimum(o_row % GP, G - 1)
        o_d = tl.arange(0, HP)
        m_row = o_row >= 0
        key_gradient_first = tl.zeros([RP, HP], tl.float32)
        key_gradient_second = tl.zeros([RP, HP], tl.float32)
        value_gradient_first = tl.zeros([RP, HP], tl.float32)
        value_gradient_second = tl.zeros([RP, HP], tl.float32)
        for p in range(first_pair, last_pair, BP):
            block = tl.load(sorted_pairs + tl.minimum(p + tl.arange(0, BP), last_pair - 1))
            real = (p + o_row // GP < last_pair) & (o_row % GP < G)
            pair = tl.reshape(tl.broadcast_to(block[:, None], (BP, GP)), (BP * GP,))
            query = pair // K
            at = query * G + o_g
            query_first, query_second = load_halves(QUERY, at * (2 * HALF), m_row, HALF, HP)
            slot_cos, slot_sin = slot_angles(SLOT_COS, SLOT_SIN, K - 1 - block % K, GP, BP, HALF, HP)
            query_first, query_second = rotate_halves(query_first, query_second, slot_cos, slot_sin)
            lse = tl.load(LSE + at)
            logits = halves_product(query_first, query_second, key_first, key_second) + (bias - lse)[:, None]
            path = (start + query) // span
            if TOKENS:
                path += 1
            counts = stored[None, :] & (node[None, :] < path[:, None]) & real[:, None]
            if not TOKENS:
                marks = tl.load(MARKS + pairs + pair)
                counts = counts & (((marks[:, None] >> o_o[None, :].to(tl.int64)) & 1) == 0)
            weights = tl.where(counts, tl.exp2(logits), 0.0)
            upstream_first, upstream_second = load_halves(UPSTREAM, at * (2 * HALF), m_row, HALF, HP)
            product = halves_product(upstream_first, upstream_second, value_first, value_second)
            slopes = (weights * (product - tl.load(DELTA + at)[:, None])).to(key_first.dtype)
            columns = tl.trans(weights.to(key_first.dtype))
            value_gradient_first = tl.dot(columns, upstream_first, value_gradient_first, input_precision="ieee")
            value_gradient_second = tl.dot(columns, upstream_second, value_gradient_second, input_precision="ieee")
            columns = tl.trans(slopes)
            key_gradient_first = tl.dot(columns, query_first, key_gradient_first, input_precision="ieee")
            key_gradient_second = tl.dot(columns, query_second, key_gradient_second, input_precision="ieee")
            part_first, part_second = _rotate_back(
                tl.dot(slopes, key_first, input_precision="ieee"),
                tl.dot(slopes, key_second, input_precision="ieee"),
                slot_cos,
                slot_sin,
            )
            where = QUERY_PARTS + ((pair * G + o_g) * (2 * HALF))[:, None] + o_d[None, :]
            inside = real[:, None] & (o_d < HALF)[None, :]
            tl.store(where, part_first.to(key_first.dtype), mask=inside)
            tl.store(where + HALF, part_second.to(key_first.dtype), mask=inside)

        key_gradient_first, key_gradient_second = _rotate_back(
            key_gradient_first, key_gradient_second, cos * unit, sin * unit
        )
        where = ((head * items + item) * R + o_o)[:, None] * (2 * HALF) + o_d[None, :]
        inside = (o_o < R)[:, None] & (o_d < HALF)[None, :]
        tl.store(KEY_PARTS + where, key_gradient_first, mask=inside)
        tl.store(KEY_PARTS + where + HALF, key_gradient_second, mask=inside)
        tl.store(VALUE_PARTS + where, value_gradient_first, mask=inside)
        tl.store(VALUE_PARTS + where + HALF, value_gradient_second, mask=inside)


@triton.jit(do_not_specialize=["parents", "items", "entries"])
def sum_children_kernel(
    KEY_PARTS,
    VALUE_PARTS,
    KEY_GRADIENT,
    VALUE_GRADIENT,
    ROWS,
    COUNTS,
    ITEM_ENDS,
    parents,
    items,
    entries,
    KV_HEADS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Adds the parts of each parent's items to the gradients `[S, H_kv, entries, D]` float32 of its children."""
    parent = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(COUNTS + head * parents + parent)
    if count > 0:
        last = tl.load(ITEM_ENDS + head * parents + parent)
        o_o = tl.arange(0, RP)
        o_d = tl.arange(0, DP)
        child = parent * R + o_o
        inside = (o_d < D)[None, :] & ((o_o < R) & (child < entries))[:, None]
        sequence = tl.load(ROWS + head // KV_HEADS).to(tl.int64)
        target = ((sequence * KV_HEADS + head % KV_HEADS) * entries + child)[:, None] * D + o_d[None, :]
        key_gradient = tl.load(KEY_GRADIENT + target, mask=inside, other=0.0)
        value_gradient = tl.load(VALUE_GRADIENT + target, mask=inside, other=0.0)
        for item in range(last - tl.cdiv(count, ITEM), last):
            where = ((head * items + item) * R + o_o)[:, None] * D + o_d[None, :]
            key_gradient += tl.load(KEY_PARTS + where, mask=inside, other=0.0)
            value_gradient += tl.load(VALUE_PARTS + where, mask=inside, other=0.0)
        tl.store(KEY_GRADIENT + target, key_gradient, mask=inside)
        tl.store(VALUE_GRADIENT + target, value_gradient, mask=inside)


@triton.jit(do_not_specialize=["begin", "width", "span"])
def sum_pairs_kernel(
    PARTS,
    GRADIENT,
    COS,
    SIN,
    STARTS,
    begin,
    width,
    span,
    scaling,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BK: tl.constexpr,
):
    """Adds the K parts of each query, rotated back from its path's offset, to GRADIENT `[S' * H_kv, w, G, D]`."""
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offset = (tl.load(STARTS + head // KV_HEADS) + begin + query) // span % R
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, HP)
    inside = (o_g < G)[:, None] & (o_d < HALF)[None, :]
    first = tl.zeros([BK, GP, HP], tl.float32)
    second = tl.zeros([BK, GP, HP], tl.float32)
    for k in range(0, K, BK):
        o_b = k + tl.arange(0, BK)
        part = ((head * width + query) * K + o_b[:, None]) * G + o_g[None, :]
        m_part = ((o_b < K)[:, None] & (o_g < G)[None, :])[:, :, None] & (o_d < HALF)[None, None, :]
        where = PARTS + part[:, :, None] * (2 * HALF) + o_d[None, None, :]
        first += tl.load(where, mask=m_part, other=0.0).to(tl.float32)
        second += tl.load(where + HALF, mask=m_part, other=0.0).to(tl.float32)
    angles = offset * STRIDE + o_d
    cos = tl.load(COS + angles, mask=o_d < HALF, other=0.0)[None, :] * scaling
    sin = tl.load(SIN + angles, mask=o_d < HALF, other=0.0)[None, :] * scaling
    gradient_first, gradient_second = _rotate_back(tl.sum(first, 0), tl.sum(second, 0), cos, sin)
    where = GRADIENT + (((head * width + query) * G + o_g) * (2 * HALF))[:, None] + o_d[None, :]
    tl.store(where, tl.load(where, mask=inside, other=0.0) + gradient_first, mask=inside)
    tl.store(where + HALF, tl.load(where + HALF, mask=inside, other=0.0) + gradient_second, mask=inside)


# ---- one block of queries -------------------------------------------------------------------------------------------


class GradientBlock(PrefillBlock):
    """The gradients of one block of queries, whose forward is `PrefillBlock.run`; the same arguments."""

    def gradients(
        self,
        depth: int,
        chosen: dict[int, torch.Tensor],
        upstream: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        into: "Gradients",
    ) -> None:
        """Adds the block's gradients to `into`.

        Args:
            depth: the level where these queries start.
            chosen: level -> nodes `[S', H_kv, w, k]` int32, as the forward chose them.
            upstream: of the output, `[S', H_kv, w, G, D]`.
            output: of the forward, same shape.
            lse: of the forward, `[S', H_kv, w, G]` float32 in units of log2.
            into: where to add.
        """
        upstream = upstream.to(self.query.dtype).contiguous()
        delta = (upstream.float() * output.float()).sum(-1)
        about = (upstream, delta, lse)
        gradient = self._top_gradients(depth, chosen[depth], about, into)
        for level in range(depth - 1, -1, -1):
            self._gradients_below(level, chosen[level + 1], chosen.get(level), about, gradient, into)
        end = self.begin + self.width
        into.query[self.rows.long(), :, :, self.begin : end] = gradient.transpose(2, 3).to(into.query.dtype)

    def _rows(self) -> int:
        return ROWS if self.row_bytes <= 256 else LONG_ROWS

    def _children_tile(self) -> dict[str, int]:
        """Pairs of a tile, warps and stages; benchmarks/kernels_notes.md has the times."""
        short, r = self.row_bytes <= 256, self.geometry.branching
        if short and r >= WIDE:
            return dict(BP=self._queries(WIDE_ROWS), num_warps=8, num_stages=1)
        return dict(BP=self._queries(self._rows()), num_warps=4, num_stages=2 if short and r <= 16 else 1)

    def _top_gradients(self, level: int, chosen, about, into: "Gradients") -> torch.Tensor:
        span = self.geometry.branching**level
        query, keys, nodes = self._rotated_queries(span, top=True), self._rotated_keys(level), self.last // span
        values, words = self.levels.values[level], triton.cdiv(nodes + 1, 64)
        marks = self._marks(None, chosen, words)
        nodes_of_tile = min(max(NODE_BYTES // self.row_bytes, 16), 64)
        queries = self._queries(self._rows())
        tiles: dict[str, Any] = dict(
            **self.heads, GP=self.group_block, STRIDE=self.rope[0].shape[1], **self.halves, BQ=queries,
            BN=nodes_of_tile, num_stages=2 if self.row_bytes <= 256 else 1,
        )  # fmt: skip
        gradient = self._empty(self.group, self.head_dim)
        read = (query, keys, values, marks, *about)
        where = (self.rows, self.starts, self.begin, self.width, nodes, words, span, self._bias(level))
        top_query_gradient_kernel[(triton.cdiv(self.width, queries), self.programs)](
            *read, gradient, *self.rope, *where, self.scale / LOG2E, *values.stride()[:3], **tiles
        )
        top_node_gradient_kernel[(triton.cdiv(nodes, nodes_of_tile), self.programs)](
            *read, into.keys[level], into.values[level], *self.rope, *where, 1 / LOG2E, into.keys[level].shape[2],
            *values.stride()[:3], **tiles,
        )  # fmt: skip
        return gradient

    def _gradients_below(self, level: int, parents, chosen, about, gradient, into: "Gradients") -> None:
        """One gathered level: the queries' part into `gradient`, the children's into `into`."""
        r, k = self.geometry.branching, self.geometry.top_k
        span = r**level
        sort = self._sort_pairs(parents, self.last // (span * r) + 1, PAIRS_OF_PROGRAM, stable=True)
        keys, values = self.levels.keys[level], self.levels.values[level]
        query_parts = self._empty(k, self.group, self.head_dim, dtype=self.query.dtype)
        key_parts, value_parts = (
            torch.empty(self.programs, sort["items"], r, self.head_dim, device=keys.device) for _ in range(2)
        )
        children = dict(**self.heads, GP=self.group_block, R=r, K=k, STRIDE=self.rope[0].shape[1], **self.halves)
        children_gradient_kernel[(sort["items"], self.programs)](
            self._rotated_queries(span, top=False), keys, values,
            None if level == 0 else self._marks(parents, chosen, k), *about, query_parts, key_parts, value_parts,
            *self.rope, *slot_tables(self.rope, r, k, self.query.dtype), self.rows, self.starts, **sort,
            begin=self.begin, width=self.width, children=keys.shape[2], span=span, bias=self._bias(level),
            unit=1 / LOG2E,
            stride_ks=keys.stride(0), stride_kh=keys.stride(1), stride_kn=keys.stride(2),
            stride_vs=values.stride(0), stride_vh=values.stride(1), stride_vn=values.stride(2),
            **children, RP=max(r, 16), TOKENS=level == 0, ITEM=PAIRS_OF_PROGRAM, **self._children_tile(),
        )  # fmt: skip
        sum_children_kernel[(sort["parents"], self.programs)](
            key_parts, value_parts, into.keys[level], into.values[level], self.rows, sort["COUNTS"],
            sort["ITEM_ENDS"], sort["parents"], sort["items"], into.keys[level].shape[2], KV_HEADS=self.kv_heads,
            R=r, RP=max(r, 16), D=self.head_dim, DP=triton.next_power_of_2(self.head_dim), ITEM=PAIRS_OF_PROGRAM,
        )  # fmt: skip
        vector = self.group_block * self.halves["HP"]
        sum_pairs_kernel[(self.width, self.programs)](
            query_parts, gradient, *self.rope, self.starts, self.begin, self.width, span, self.scale / LOG2E,
            **children, BK=min(max(512 // vector, 1), 8), num_warps=max(vector // 2048, 1),
        )  # fmt: skip


# ---- autograd -------------------------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients that blocks are added to.

    Attributes:
        query: `[S, H_kv, G, W, D]` in the dtype of the queries.
        keys, values: per level `[S, H_kv, n_l, D]` float32.
    """

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


Block = tuple[list[int], int, int, int]  # rows, first column, end, depth


def attend_with_gradients(
    make_walk: Callable[[torch.Tensor, Levels], Any],
    blocks: Sequence[Block],
    keep: Callable[[Block, int, torch.Tensor], None],
    query: torch.Tensor,
    levels: Levels,
) -> list[torch.Tensor]:
    """The sparse walk, differentiable in queries and in the keys and values of all levels.

    Args:
        make_walk: from queries and levels, a `TritonWalk` for them.
        blocks: as `OperatorCall` cuts them.
        keep: called with (block, level, chosen nodes) in the forward.
        query: before RoPE, `[S, H, W, D]`.
        levels: keys before RoPE and values per level.

    Returns:
        Per block its output `[S', H_kv, w, G, D]` in the dtype of the queries.
    """
    return list(_Walk.apply(make_walk, blocks, keep, query, *levels.keys, *levels.values))


class _Walk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, make_walk, blocks, keep, query, *states):
        walk = make_walk(query, _levels(states))
        outputs, kept = [], []
        ctx.chosen_levels = []
        for block in blocks:
            chosen: dict[int, torch.Tensor] = {}

            def remember(level, nodes, block=block, chosen=chosen):
                chosen[level] = nodes
                keep(block, level, nodes)

            output, lse = walk.run_block(*block, remember)
            outputs.append(output.to(query.dtype))
            ctx.chosen_levels.append(list(chosen))
            kept += [lse, *chosen.values()]
        # through autograd, so that checkpointing may drop them
        ctx.save_for_backward(query, *states, *outputs, *kept)
        ctx.make_walk, ctx.blocks, ctx.number = make_walk, blocks, len(states)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstreams):
        query, *rest = ctx.saved_tensors
        states, outputs = rest[: ctx.number], rest[ctx.number : ctx.number + len(ctx.blocks)]
        kept = iter(rest[ctx.number + len(ctx.blocks) :])
        walk = ctx.make_walk(query, _levels(states))
        kv_heads = states[0].shape[1]
        gradients = [torch.zeros(state.shape, dtype=torch.float32, device=state.device) for state in states]
        into = Gradients(
            query.new_zeros(query.shape).unflatten(1, (kv_heads, -1)),
            gradients[: ctx.number // 2],
            gradients[ctx.number // 2 :],
        )
        for block, levels, output, upstream in zip(ctx.blocks, ctx.chosen_levels, outputs, upstreams, strict=True):
            lse = next(kept)
            chosen = {level: next(kept) for level in levels}
            if upstream is not None:
                with launching_on(query.device):
                    walk.block(*block, GradientBlock).gradients(block[3], chosen, upstream, output, lse, into)
        done = [gradient.to(state.dtype) for gradient, state in zip(gradients, states, strict=True)]
        return None, None, None, into.query.flatten(1, 2), *done


def _levels(states: Sequence[torch.Tensor]) -> Levels:
    half = len(states) // 2
    return Levels(tuple(states[:half]), tuple(states[half:]))
