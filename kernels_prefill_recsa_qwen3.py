"""Prefill by Triton kernels: the walk of a block of queries that all start from the same level.

The top level is contiguous and the same for all queries: ordinary tiles. Below it the (query, parent) pairs are
sorted by parent, so that a program reads the children of one parent once and streams the queries that chose it: rows =
queries x G fill the tensor cores even where G is small. Each pair leaves a partial output, and a second kernel merges
them. [our decision]

Logits are in units of log2, partial outputs normalised, their log-sum-exp in log2. Programs are numbered
(block, sequence and KV head).
"""

import torch

from .kernels_common_recsa_qwen3 import (
    LOG2E,
    halves_product,
    load_angles,
    load_halves,
    load_states,
    rotate_halves,
    shared_memory,
    slot_tables,
    tl,
    triton,
)
from .kernels_select_recsa_qwen3 import choose

# Rows (queries x heads of a group) of a tile or block, of a tile that is only scored, and its most bytes; bytes of a
# tile of nodes; pairs a program.
ROWS, SCORE_ROWS, ROW_BYTES = 64, 128, 32_768
NODE_BYTES = 16_384
PAIRS_OF_PROGRAM = 256
# Shared memory from which loads are pipelined one stage deeper.
LARGE_SHARED_MEMORY = 160 * 1024


# ---- rotations ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["begin", "width", "span"])
def rotate_queries_kernel(
    QUERY,
    ROTATED,
    COS,
    SIN,
    ROWS,
    STARTS,
    begin,
    width,
    span,
    scale,
    stride_s,
    stride_h,
    stride_w,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    TOP: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Queries `[S, H, W, D]`, scaled, at their path's position (at the top) or its offset in the parent.

    ROTATED `[S', H_kv, w, G, D]` in the dtype of the queries.
    """
    head = tl.program_id(1).to(tl.int64)
    row = head // KV_HEADS
    sequence = tl.load(ROWS + row).to(tl.int64)
    o_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_q = o_row // G
    mask = o_q < width
    path = (tl.load(STARTS + row) + begin + o_q) // span
    if not TOP:
        path = path % R
    source = sequence * stride_s + (head % KV_HEADS * G + o_row % G) * stride_h + (begin + o_q).to(tl.int64) * stride_w
    first, second = load_halves(QUERY, source, mask, HALF, HP)
    cos, sin = load_angles(COS, SIN, path, mask, STRIDE, HALF, HP)
    first, second = rotate_halves(first, second, cos * scale, sin * scale)
    o_d = tl.arange(0, HP)
    inside = mask[:, None] & (o_d < HALF)[None, :]
    target = ROTATED + (head * width * G + o_row)[:, None] * (2 * HALF) + o_d[None, :]
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def rotate_keys_kernel(
    KEY,
    ROTATED,
    COS,
    SIN,
    ROWS,
    nodes,
    stride_s,
    stride_h,
    stride_n,
    KV_HEADS: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first `nodes` keys of a level at their own positions, `[S', H_kv, nodes, D]`."""
    head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(ROWS + head // KV_HEADS).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_n < nodes
    source = sequence * stride_s + head % KV_HEADS * stride_h + o_n.to(tl.int64) * stride_n
    first, second = load_halves(KEY, source, mask, HALF, HP)
    cos, sin = load_angles(COS, SIN, o_n, mask, STRIDE, HALF, HP)
    first, second = rotate_halves(first, second, cos, sin)
    o_d = tl.arange(0, HP)
    inside = mask[:, None] & (o_d < HALF)[None, :]
    target = ROTATED + (head * nodes + o_n)[:, None] * (2 * HALF) + o_d[None, :]
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


# ---- the top level --------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of_rows(BQ: tl.constexpr, GP: tl.constexpr):
    """Query and head of each row of a tile of the top level, `[BQ * GP]`.

    On the tensor cores a thread holds rows 8 apart and 64 apart: where these are heads of one query, four warps that
    hold four heads of 32 queries add them up without exchanging anything.
    """
    LOW: tl.constexpr = min(GP, 2)
    RUN: tl.constexpr = min(BQ, 8)
    o_row = tl.arange(0, BQ * GP)
    query = o_row // (RUN * LOW) % (BQ // RUN) * RUN + o_row % RUN
    return query, o_row // (BQ * LOW) * LOW + o_row // RUN % LOW


@triton.jit
def _sum_of_heads(tile, BQ: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr):
    """`[BQ, BN]`: the sums over the heads of `[BQ * GP, BN]`, whose rows lie as `_tile_of_rows` says."""
    LOW: tl.constexpr = min(GP, 2)
    RUN: tl.constexpr = min(BQ, 8)
    tile = tl.sum(tl.reshape(tile, (GP // LOW, BQ // RUN, LOW, RUN, BN)), 2)
    return tl.reshape(tl.sum(tile, 0), (BQ, BN))


@triton.jit(do_not_specialize=["begin", "width", "nodes", "span"])
def top_importance_kernel(
    QUERY,
    KEY,
    IMPORTANCE,
    STARTS,
    begin,
    width,
    nodes,
    pitch,
    span,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    """Importance `[S', H_kv, w, pitch]` float32 of the complete nodes before each query's path."""
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(STARTS + head // KV_HEADS) + begin
    first_query = tl.program_id(0) * BQ
    o_q, o_g = _tile_of_rows(BQ, GP)
    o_q += first_query
    m_row = (o_q < width) & (o_g < G)
    path = (start + o_q) // span
    query_first, query_second = load_halves(QUERY, ((head * width + o_q) * G + o_g) * (2 * HALF), m_row, HALF, HP)
    last = tl.minimum((start + tl.minimum(first_query + BQ, width) - 1) // span, nodes)
    # nodes before the path of all these queries come in whole tiles
    whole = tl.minimum((start + first_query) // span, nodes) // BN * BN

    highest = tl.full([BQ * GP], float("-inf"), tl.float32)
    total = tl.zeros([BQ * GP], tl.float32)
    for border in tl.static_range(2):
        for n in range(whole if border else 0, last if border else whole, BN):
            o_n = n + tl.arange(0, BN)
            inside = o_n < nodes if border else o_n >= 0
            key_first, key_second = load_halves(KEY, (head * nodes + o_n) * (2 * HALF), inside, HALF, HP)
            logits = halves_product(query_first, query_second, key_first, key_second)
            if border:
                logits = tl.where(o_n[None, :] < path[:, None], logits, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher) if border else higher
            total = total * tl.exp2(highest - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
            highest = higher

    lse = tl.where(m_row, highest + tl.log2(total), float("inf"))
    o_query = first_query + tl.arange(0, BQ)
    IMPORTANCE += head * width * pitch
    for border in tl.static_range(2):
        for n in range(whole if border else 0, last if border else whole, BN):
            o_n = n + tl.arange(0, BN)
            inside = o_n < nodes if border else o_n >= 0
            key_first, key_second = load_halves(KEY, (head * nodes + o_n) * (2 * HALF), inside, HALF, HP)
            logits = halves_product(query_first, query_second, key_first, key_second)
            weights = tl.exp2(logits - lse[:, None])
            if border:
                weights = tl.where(o_n[None, :] < path[:, None], weights, 0.0)
            tl.store(
                IMPORTANCE + o_query[:, None].to(tl.int64) * pitch + o_n[None, :],
                _sum_of_heads(weights, BQ, GP, BN),
                mask=(o_query < width)[:, None] & inside[None, :],
            )


@triton.jit(do_not_specialize=["begin", "width", "nodes", "words", "span"])
def top_output_kernel(
    QUERY,
    KEY,
    VALUE,
    MARKS,
    OUTPUT,
    LSE,
    ROWS,
    STARTS,
    begin,
    width,
    nodes,
    words,
    span,
    bias,
    stride_s,
    stride_h,
    stride_n,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    """Attention over the unchosen nodes of the top level: `[S', H_kv, w, G, D]` float32 and its log-sum-exp.

    MARKS `[S' * H_kv, w, words]` int64 has a bit for each chosen node.
    """
    head = tl.program_id(1).to(tl.int64)
    row = head // KV_HEADS
    start = tl.load(STARTS + row) + begin
    value = VALUE + tl.load(ROWS + row).to(tl.int64) * stride_s + head % KV_HEADS * stride_h
    o_row = tl.arange(0, BQ * GP)
    o_q = tl.program_id(0) * BQ + o_row // GP
    o_g = o_row % GP
    m_row = (o_q < width) & (o_g < G)
    path = (start + o_q) // span
    query_first, query_second = load_halves(QUERY, ((head * width + o_q) * G + o_g) * (2 * HALF), m_row, HALF, HP)
    first_query = tl.program_id(0) * BQ
    last = tl.minimum((start + tl.minimum(first_query + BQ, width) - 1) // span, nodes)
    # nodes before the path of all these queries come in whole tiles
    whole = tl.minimum((start + first_query) // span, nodes) // BN * BN

    highest = tl.full([BQ * GP], float("-inf"), tl.float32)
    total = tl.zeros([BQ * GP], tl.float32)
    output_first = tl.zeros([BQ * GP, HP], tl.float32)
    output_second = tl.zeros([BQ * GP, HP], tl.float32)
    for border in tl.static_range(2):
        for n in range(whole if border else 0, last if border else whole, BN):
            o_n = n + tl.arange(0, BN)
            inside = o_n < nodes if border else o_n >= 0
            key_first, key_second = load_halves(KEY, (head * nodes + o_n) * (2 * HALF), inside, HALF, HP)
            logits = halves_product(query_first, query_second, key_first, key_second)
            # a tile lies within one word
            marks = tl.load(MARKS + (head * width + o_q) * words + n // 64, mask=m_row, other=0)
            counts = ((marks[:, None] >> (n % 64 + tl.arange(0, BN)).to(tl.int64)[None, :]) & 1) == 0
            if border:
                counts = counts & (o_n[None, :] < path[:, None])
            logits = tl.where(counts, logits, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(logits - safe[:, None])
            decay = tl.exp2(highest - safe)
            total = total * decay + tl.sum(weights, 1)
            # no weight makes a value harmless that is not a number
            inside = o_n < last if border else o_n >= 0
            value_first, value_second = load_halves(value, o_n.to(tl.int64) * stride_n, inside, HALF, HP)
            weights = weights.to(value_first.dtype)
            output_first = tl.dot(weights, value_first, output_first * decay[:, None], input_precision="ieee")
            output_second = tl.dot(weights, value_second, output_second * decay[:, None], input_precision="ieee")
            highest = higher

    some = total != 0
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    o_d = tl.arange(0, HP)
    inside = m_row[:, None] & (o_d < HALF)[None, :]
    target = (head * width + o_q) * G + o_g
    where = OUTPUT + (target * 2 * HALF)[:, None] + o_d[None, :]
    tl.store(where, output_first * inverse[:, None], mask=inside)
    tl.store(where + HALF, output_second * inverse[:, None], mask=inside)
    lse = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)) + bias, float("-inf"))
    tl.store(LSE + target, lse, mask=m_row)


# ---- pairs sorted by parent -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs", "parents"])
def count_pairs_kernel(CHOSEN, COUNTS, PLACES, pairs, parents, BLOCK: tl.constexpr):
    """Counts the pairs of each parent `[S' * H_kv, parents]`; PLACES is each pair's place among its parent's.

    The places depend on the order in which programs run, results do not: each pair is computed by itself.
    """
    head = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_p < pairs
    parent = tl.load(CHOSEN + head * pairs + o_p, mask=mask, other=0)
    place = tl.atomic_add(COUNTS + head * parents + parent, 1, mask=mask, sem="relaxed")
    tl.store(PLACES + head * pairs + o_p, place, mask=mask)


@triton.jit(do_not_specialize=["pairs", "parents"])
def sort_pairs_kernel(CHOSEN, ENDS, COUNTS, PLACES, SORTED, pairs, parents, BLOCK: tl.constexpr):
    """SORTED `[S' * H_kv, pairs]`: the pairs (query * K + slot), grouped by parent."""
    head = tl.program_id(1).to(tl.int64)
    o_p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_p < pairs
    parent = head * parents + tl.load(CHOSEN + head * pairs + o_p, mask=mask, other=0)
    first = tl.load(ENDS + parent, mask=mask, other=0) - tl.load(COUNTS + parent, mask=mask, other=0)
    place = tl.load(PLACES + head * pairs + o_p, mask=mask, other=0)
    tl.store(SORTED + head * pairs + first + place, o_p, mask=mask)


@triton.jit(do_not_specialize=["words"])
def mark_chosen_kernel(
    PARENTS, CHOSEN, MARKS, words, TOP: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr
):
    """A bit for each chosen node: `[S' * H_kv * w, words]` int64, zero before; at the top a word holds 64 nodes.

    Below it a word holds the children of the parent in one slot, which is found by bisection.
    """
    query = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, KP)
    node = tl.load(CHOSEN + query * K + o_k, mask=o_k < K, other=0)
    if TOP:
        word = node // 64
        bit = node % 64
    else:
        word = tl.zeros([KP], tl.int32)
        step = KP // 2
        while step > 0:
            parent = tl.load(PARENTS + query * K + word + step, mask=word + step < K, other=2147483647)
            word = tl.where(parent <= node // R, word + step, word)
            step //= 2
        bit = node % R
    tl.atomic_or(
        MARKS + query * words + word, tl.full([KP], 1, tl.int64) << bit.to(tl.int64), mask=o_k < K, sem="relaxed"
    )


# ---- gathered levels ------------------------------------------------------------------------------------------------


@triton.jit
def pairs_of_item(sorted_pairs, ENDS, COUNTS, ITEM_ENDS, parent, item, ITEM: tl.constexpr):
    """Where a parent's pairs lie among its head's, and which of them this item takes: (pointer, first, end)."""
    count = tl.load(COUNTS + parent)
    sorted_pairs += tl.load(ENDS + parent) - count
    # the place of this item among those of its parent, from the end
    later = tl.load(ITEM_ENDS + parent) - 1 - item
    first_pair = (tl.cdiv(count, ITEM) - 1 - later) * ITEM
    return sorted_pairs, first_pair, tl.minimum(first_pair + ITEM, count)


@triton.jit
def children_of(parent, limit, children, R: tl.constexpr, RP: tl.constexpr, TOKENS: tl.constexpr):
    """Places 0 ... RP - 1, the children there, and which of them the block's last query, of path `limit`, may read.

    Beyond them storage may hold anything.
    """
    o_o = tl.arange(0, RP)
    node = parent * R + o_o
    if TOKENS:
        limit += 1
    return o_o, node, (o_o < R) & (node < tl.minimum(limit, children))


@triton.jit
def slot_angles(
    SLOT_COS, SLOT_SIN, slots, GP: tl.constexpr, BP: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr
):  # fmt: skip
    """Cosine and sine `[BP * GP, HP]` of slots `[BP]`, loaded once a pair for all its heads."""
    cos, sin = load_angles(SLOT_COS, SLOT_SIN, slots, slots >= 0, HALF, HALF, HP)
    cos = tl.reshape(tl.broadcast_to(cos[:, None, :], (BP, GP, HP)), (BP * GP, HP))
    sin = tl.reshape(tl.broadcast_to(sin[:, None, :], (BP, GP, HP)), (BP * GP, HP))
    return cos, sin


@triton.jit(do_not_specialize=["begin", "width", "parents", "items", "children", "span"])
def children_kernel(
    QUERY,
    KEY,
    VALUE,
    KEY_EXPONENTS,
    VALUE_EXPONENTS,
    LOGITS,
    MARKS,
    OUTPUT,
    LSE,
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
    stride_ks,
    stride_kh,
    stride_kn,
    stride_vs,
    stride_vh,
    stride_vn,
    stride_es,
    stride_eh,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    SCORE: tl.constexpr,
    ATTEND: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BP: tl.constexpr,
    ITEM: tl.constexpr,
):
    """One program per (item, sequence and KV head): the children of one parent, for up to ITEM pairs that chose it.

    SCORE computes logits, else they are read; without ATTEND they are stored, `[S' * H_kv, w, K, G, R]` float32.
    ATTEND leaves the pair's output `[S' * H_kv, w, K, G, D]` over the children that the query did not choose itself
    (TOKENS: over all up to the query), and its log-sum-exp. PACKED: keys and values are float8 codes.
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
        dtype: tl.constexpr = QUERY.dtype.element_ty
        exponents = sequence * stride_es + head % KV_HEADS * stride_eh + node
        if SCORE:
            key = sequence * stride_ks + head % KV_HEADS * stride_kh + node.to(tl.int64) * stride_kn
            key_first, key_second = load_states(KEY, key, KEY_EXPONENTS, exponents, stored, dtype, PACKED, HALF, HP)
            cos, sin = load_angles(COS, SIN, o_o, stored, STRIDE, HALF, HP)
            key_first, key_second = rotate_halves(key_first, key_second, cos, sin)
        if ATTEND:
            value = sequence * stride_vs + head % KV_HEADS * stride_vh + node.to(tl.int64) * stride_vn
            value_first, value_second = load_states(
                VALUE, value, VALUE_EXPONENTS, exponents, stored, dtype, PACKED, HALF, HP
            )

        # offsets within a head fit 32 bits; a block's last rows repeat the last pair and head, and are not stored
        QUERY += head * width * (G * 2 * HALF)
        pairs = head * width * K
        o_row = tl.arange(0, BP * GP)
        o_g = tl.minimum(o_row % GP, G - 1)
        o_d = tl.arange(0, HP)
        m_row = o_row >= 0
        for p in range(first_pair, last_pair, BP):
            block = tl.load(sorted_pairs + tl.minimum(p + tl.arange(0, BP), last_pair - 1))
            real = (p + o_row // GP < last_pair) & (o_row % GP < G)
            pair = tl.reshape(tl.broadcast_to(block[:, None], (BP, GP)), (BP * GP,))
            query = pair // K
            target = pair * G + o_g
            if SCORE:
                query_first, query_second = load_halves(QUERY, (query * G + o_g) * (2 * HALF), m_row, HALF, HP)
                slot_cos, slot_sin = slot_angles(SLOT_COS, SLOT_SIN, K - 1 - block % K, GP, BP, HALF, HP)
                query_first, query_second = rotate_halves(query_first, query_second, slot_cos, slot_sin)
                logits = halves_product(query_first, query_second, key_first, key_second)
            else:
                logits = tl.load(
                    LOGITS + pairs * (G * R) + (target * R)[:, None] + o_o[None, :],
                    mask=(o_o < R)[None, :],
                    other=float("-inf"),
                )
            path = (start + query) // span
            if TOKENS:
                path += 1
            scored = stored[None, :] & (node[None, :] < path[:, None])
            logits = tl.where(scored, logits, float("-inf"))
            if ATTEND:
                if not TOKENS:
                    marks = tl.load(MARKS + pairs + pair)
                    chosen = ((marks[:, None] >> o_o[None, :].to(tl.int64)) & 1) != 0
                    logits = tl.where(chosen, float("-inf"), logits)
                highest = tl.max(logits, 1)
                some = highest > float("-inf")
                weights = tl.exp2(logits - tl.where(some, highest, 0.0)[:, None])
                total = tl.where(some, tl.sum(weights, 1), 1.0)
                weights = (weights / total[:, None]).to(value_first.dtype)
                output_first = tl.dot(weights, value_first, input_precision="ieee")
                output_second = tl.dot(weights, value_second, input_precision="ieee")
                where = OUTPUT + pairs * (G * 2 * HALF) + (target * (2 * HALF))[:, None] + o_d[None, :]
                inside = real[:, None] & (o_d < HALF)[None, :]
                tl.store(where, output_first.to(value_first.dtype), mask=inside)
                tl.store(where + HALF, output_second.to(value_first.dtype), mask=inside)
                lse = tl.where(some, highest + tl.log2(total) + bias, float("-inf"))
                tl.store(LSE + pairs * G + target, lse, mask=real)
            else:
                where = LOGITS + pairs * (G * R) + (target * R)[:, None] + o_o[None, :]
                tl.store(where, logits, mask=real[:, None] & (o_o < R)[None, :])


@triton.jit(do_not_specialize=["width"])
def merge_kernel(
    PARTS,
    PART_LSE,
    OUTPUT,
    LSE,
    width,
    G: tl.constexpr,
    GP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BK: tl.constexpr,
):
    """Merges the K partial outputs of each query into its output so far, `[S' * H_kv, w, G, D]` float32."""
    query = tl.program_id(1).to(tl.int64) * width + tl.program_id(0)
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_k = tl.arange(0, KP)
    before = tl.load(LSE + query * G + o_g, mask=o_g < G, other=0.0)
    lse = tl.load(
        PART_LSE + (query * K + o_k[:, None]) * G + o_g[None, :],
        mask=(o_k < K)[:, None] & (o_g < G)[None, :],
        other=float("-inf"),
    )
    highest = tl.maximum(before, tl.max(lse, 0))
    total = tl.exp2(before - highest) + tl.sum(tl.exp2(lse - highest[None, :]), 0)
    merged = highest + tl.log2(total)
    inside = (o_g < G)[:, None] & (o_d < D)[None, :]
    where = (query * G + o_g)[:, None] * D + o_d[None, :]
    merging = tl.zeros([BK, GP, DP], tl.float32)
    for k in range(0, K, BK):
        o_b = k + tl.arange(0, BK)
        part = (query * K + o_b[:, None]) * G + o_g[None, :]
        m_part = (o_b < K)[:, None] & (o_g < G)[None, :]
        weight = tl.exp2(tl.load(PART_LSE + part, mask=m_part, other=float("-inf")) - merged[None, :])
        values = tl.load(
            PARTS + part[:, :, None] * D + o_d[None, None, :],
            mask=m_part[:, :, None] & (o_d < D)[None, None, :],
            other=0.0,
        )
        merging += values.to(tl.float32) * weight[:, :, None]
    output = tl.load(OUTPUT + where, mask=inside, other=0.0) * tl.exp2(before - merged)[:, None]
    tl.store(OUTPUT + where, output + tl.sum(merging, 0), mask=inside)
    tl.store(LSE + query * G + o_g, merged, mask=o_g < G)


# ---- one block of queries -------------------------------------------------------------------------------------------


class PrefillBlock:
    """The walk of the columns begin ... begin + w - 1 of some sequences, all of one depth.

    Args:
        query: before RoPE, `[S, H, W, D]`, last dimension contiguous.
        levels: keys before RoPE and values per level.
        rows: the sequences of the block, `[S']` int32.
        starts: tokens before column 0 of each of them, `[S']` int32.
        begin, width: the columns.
        last: the last position of any query.
        geometry: r, k, s, M.
        rope: cos and sin `[>= M, D]` float32.
        scaling: on the logits.
    """

    def __init__(self, query, levels, rows, starts, begin, width, last, geometry, rope, scaling):
        self.query, self.levels, self.rows, self.starts = query, levels, rows, starts
        self.begin, self.width, self.last = begin, width, last
        self.geometry, self.rope, self.scale = geometry, rope, scaling * LOG2E
        self.kv_heads = levels.keys[0].shape[1]
        self.group = query.shape[1] // self.kv_heads
        self.head_dim = query.shape[3]
        self.programs = len(rows) * self.kv_heads
        half = self.head_dim // 2
        self.halves = dict(HALF=half, HP=max(triton.next_power_of_2(half), 16))
        self.heads = dict(KV_HEADS=self.kv_heads, G=self.group)
        self.group_block = triton.next_power_of_2(self.group)
        self.row_bytes = 2 * self.halves["HP"] * query.element_size()

    def run(self, depth: int, given, keep) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[S', H_kv, w, G, D]` float32 and its log-sum-exp `[S', H_kv, w, G]` in units of log2.

        Args:
            depth: the level where these queries start.
            given: level -> chosen nodes `[S', H_kv, w, k]` int32, or `None` to choose.
            keep: called with (level, chosen nodes) as they are chosen.
        """
        chosen, output, lse = self._top(depth, given, keep)
        for level in range(depth - 1, -1, -1):
            chosen = self._below(level, chosen, output, lse, given, keep)
        return output, lse

    def _empty(self, *shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(len(self.rows), self.kv_heads, self.width, *shape, dtype=dtype, device=self.query.device)

    def _queries(self, rows: int) -> int:
        """Queries of a tile or block of so many rows, fewer where vectors are long."""
        return max(min(rows, ROW_BYTES // self.row_bytes) // self.group_block, 1)

    def _bias(self, level: int) -> float:
        return level * (self.geometry.branching.bit_length() - 1) if self.geometry.count_bias else 0.0

    def _rotated_queries(self, span: int, top: bool) -> torch.Tensor:
        rotated = self._empty(self.group, self.head_dim, dtype=self.query.dtype)
        block = 32
        rotate_queries_kernel[(triton.cdiv(self.width * self.group, block), self.programs)](
            self.query, rotated, *self.rope, self.rows, self.starts, self.begin, self.width, span, self.scale,
            *self.query.stride()[:3],
            **self.heads, R=self.geometry.branching, TOP=top, STRIDE=self.rope[0].shape[1], **self.halves, BLOCK=block,
        )  # fmt: skip
        return rotated

    def _rotated_keys(self, level: int) -> torch.Tensor:
        """The complete nodes of the top level before the last query's path, at their positions."""
        keys, nodes, block = self.levels.keys[level], self.last // self.geometry.branching**level, 32
        rotated = torch.empty(
            len(self.rows), self.kv_heads, nodes, self.head_dim, dtype=keys.dtype, device=keys.device
        )
        rotate_keys_kernel[(triton.cdiv(nodes, block), self.programs)](
            keys, rotated, *self.rope, self.rows, nodes, *keys.stride()[:3],
            KV_HEADS=self.kv_heads, STRIDE=self.rope[0].shape[1], **self.halves, BLOCK=block,
        )  # fmt: skip
        return rotated

    def _top(self, level: int, given, keep):
        span = self.geometry.branching**level
        nodes = self.last // span  # complete nodes before the last query's path
        query, rotated, values = (
            self._rotated_queries(span, top=True),
            self._rotated_keys(level),
            self.levels.values[level],
        )
        nodes_of_tile = min(max(NODE_BYTES // self.row_bytes, 16), 64)
        tiles = dict(**self.heads, GP=self.group_block, BN=nodes_of_tile, **self.halves)
        stages = 3 if shared_memory(self.query.device) >= LARGE_SHARED_MEMORY else 2
        if given is None:
            # rows of 16 bytes' alignment, whatever the number of nodes
            importance = self._empty(triton.cdiv(nodes, 16) * 16)
            queries = self._queries(SCORE_ROWS)
            top_importance_kernel[(triton.cdiv(self.width, queries), self.programs)](
                query, rotated, importance, self.starts, self.begin, self.width, nodes, importance.shape[-1], span,
                **tiles, BQ=queries, num_stages=2,
            )  # fmt: skip
            chosen = self._choose(importance, None, span, nodes + 1)
            del importance
            keep(level, chosen)
        else:
            chosen = given[level]
        words = triton.cdiv(nodes + 1, 64)
        marks = self._marks(None, chosen, words)
        output, lse = self._empty(self.group, self.head_dim), self._empty(self.group)
        queries = self._queries(ROWS)
        top_output_kernel[(triton.cdiv(self.width, queries), self.programs)](
            query, rotated, values, marks, output, lse, self.rows, self.starts, self.begin, self.width, nodes, words,
            span, self._bias(level), *values.stride()[:3], **tiles,
            BQ=queries, num_stages=stages if self.row_bytes <= 256 else 1,
        )  # fmt: skip
        return chosen, output, lse

    def _marks(self, parents: torch.Tensor | None, chosen: torch.Tensor, words: int) -> torch.Tensor:
        marks = self._empty(words, dtype=torch.int64).zero_()
        top_k = self.geometry.top_k
        mark_chosen_kernel[(self.programs * self.width,)](
            parents, chosen, marks, words, TOP=parents is None, R=self.geometry.branching, K=top_k,
            KP=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
        return marks

    def _choose(self, source, parents, span, candidates, strides=None) -> torch.Tensor:
        chosen = self._empty(self.geometry.top_k, dtype=torch.int32)
        choose(
            source, parents, chosen, self.starts, begin=self.begin, span=span, candidates=candidates,
            geometry=self.geometry, group=self.group, strides=strides,
        )  # fmt: skip
        return chosen

    def _below(self, level, parents, output, lse, given, keep) -> torch.Tensor | None:
        """One gathered level, merged into `output` and `lse`; returns its chosen nodes."""
        r, k = self.geometry.branching, self.geometry.top_k
        span = r**level
        sort = self._sort_pairs(parents, self.last // (span * r) + 1, PAIRS_OF_PROGRAM)
        query = self._rotated_queries(span, top=False)
        if level == 0:
            chosen, parts = None, self._children(level, query, sort, None, None, score=True, attend=True)
        else:
            logits = marks = None
            if given is None:
                logits = self._empty(k, self.group, r)
                self._children(level, query, sort, logits, None, score=True, attend=False)
                chosen = self._choose(logits, parents, span, k * r, (k * self.group * r, r, self.group * r))
                keep(level, chosen)
            else:
                chosen = given[level]
            marks = self._marks(parents, chosen, k)
            parts = self._children(level, query, sort, logits, marks, score=logits is None, attend=True)
        dim_block = triton.next_power_of_2(self.head_dim)
        vectors = self.group_block * dim_block // 4096  # elements of a query in units of what one warp holds
        merge_kernel[(self.width, self.programs)](
            *parts, output, lse, self.width, G=self.group, GP=self.group_block, K=k, KP=triton.next_power_of_2(k),
            D=self.head_dim, DP=dim_block, BK=min(max(4096 // (self.group_block * dim_block), 1), 8),
            num_warps=max(vectors, 1),
        )  # fmt: skip
        return chosen

    def _sort_pairs(self, chosen: torch.Tensor, parents: int, pairs_of_item: int, stable: bool = False) -> dict:
        """The pairs (query * K + slot) grouped by parent, and the items of at most so many pairs that programs take.

        `stable`: each parent's pairs are in order, where sums over them must come out the same each time.
        """
        pairs = self.width * self.geometry.top_k
        if stable:
            ordered, by_parent = chosen.view(self.programs, pairs).sort(dim=1, stable=True)
            index = torch.arange(parents, dtype=torch.int32, device=chosen.device).expand(self.programs, -1)
            ends = torch.searchsorted(ordered, index.contiguous(), right=True, out_int32=True)
            counts, by_parent = ends.diff(dim=1, prepend=ends.new_zeros(self.programs, 1)), by_parent.int()
        else:
            grid = (triton.cdiv(pairs, 1024), self.programs)
            counts = torch.zeros(self.programs, parents, dtype=torch.int32, device=chosen.device)
            places, by_parent = torch.empty_like(chosen), torch.empty_like(chosen)
            count_pairs_kernel[grid](chosen, counts, places, pairs, parents, BLOCK=1024)
            ends = counts.cumsum(1, dtype=torch.int32)
            sort_pairs_kernel[grid](chosen, ends, counts, places, by_parent, pairs, parents, BLOCK=1024)
        items = pairs // pairs_of_item + min(parents, pairs)
        item_ends = ((counts + (pairs_of_item - 1)) // pairs_of_item).cumsum(1, dtype=torch.int32)
        index = torch.arange(items, dtype=torch.int32, device=chosen.device).expand(self.programs, -1).contiguous()
        parent_of_item = torch.searchsorted(item_ends, index, right=True, out_int32=True)
        return dict(
            SORTED=by_parent, ENDS=ends, COUNTS=counts, PARENT_OF_ITEM=parent_of_item, ITEM_ENDS=item_ends,
            parents=parents, items=items,
        )  # fmt: skip

    def _children(self, level, query, sort, logits, marks, *, score: bool, attend: bool):
        keys, values = self.levels.keys[level], self.levels.values[level]
        geometry, k = self.geometry, self.geometry.top_k
        parts = part_lse = None
        if attend:
            parts = self._empty(k, self.group, self.head_dim, dtype=self.query.dtype)
            part_lse = self._empty(k, self.group)
        # short vectors: fewer registers, so that five programs share a multiprocessor and hide each other's loads
        limits: dict = dict(num_stages=2, maxnreg=96) if self.row_bytes <= 256 else dict(num_stages=1)
        packed = level == 0 and self.levels.exponents is not None
        exponents = self.levels.exponents if packed else (self.starts, self.starts)  # some pointer must stand there
        children_kernel[(sort["items"], self.programs)](
            query, keys, values, *exponents, logits, marks, parts, part_lse, *self.rope,
            *slot_tables(self.rope, geometry.branching, k, self.query.dtype), self.rows, self.starts, **sort,
            begin=self.begin, width=self.width, children=keys.shape[2], span=geometry.branching**level,
            bias=self._bias(level),
            stride_ks=keys.stride(0), stride_kh=keys.stride(1), stride_kn=keys.stride(2),
            stride_vs=values.stride(0), stride_vh=values.stride(1), stride_vn=values.stride(2),
            stride_es=exponents[0].stride(0) if packed else 0, stride_eh=exponents[0].stride(1) if packed else 0,
            **self.heads, GP=self.group_block, R=geometry.branching, RP=max(geometry.branching, 16), K=k,
            TOKENS=level == 0, PACKED=packed, SCORE=score, ATTEND=attend, STRIDE=self.rope[0].shape[1], **self.halves,
            BP=self._queries(ROWS), ITEM=PAIRS_OF_PROGRAM, **limits,
        )  # fmt: skip
        return parts, part_lse
