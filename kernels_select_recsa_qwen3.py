"""Choosing nodes: the k - 1 - s most important free candidates of each query, the s before the path, and the path.

Used by prefill and by decoding, so that both choose alike from the same logits. Exact: the threshold is found by
bisection on the bits of the importance, and ties go to the lower index. Nothing here reads keys or values.
"""

import torch

from .kernels_common_recsa_qwen3 import tl, triton


@triton.jit
def select_kernel(
    SOURCE,
    PARENTS,
    CHOSEN,
    STARTS,
    begin,
    width,
    span,
    stride_query,
    stride_group,
    stride_slot,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    RECENT: tl.constexpr,
    M: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    N: tl.constexpr,
):
    """One program per (query, sequence and KV head); idle where the query's walk starts below this level.

    SOURCE holds importance (one value a candidate) or, with FROM_LOGITS, G logits a candidate in units of log2;
    candidate c lies at (c // R) * stride_slot + c % R, its heads stride_group apart. PARENTS and CHOSEN are
    `[S * H_kv, width, K]` int32: the parents of the candidates (not read at the top), and the nodes chosen.
    """
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    position = tl.load(STARTS + head // KV_HEADS) + begin + query
    path = position // span
    top = path < M
    number = tl.where(top, path + 1, (K - 1) * R + path % R + 1)
    if position // (span // R) >= M:
        o_c = tl.arange(0, N)
        base = SOURCE + (head * width + query) * stride_query + (o_c // R).to(tl.int64) * stride_slot + o_c % R
        scored = o_c < number - 1
        if FROM_LOGITS:
            importance = tl.zeros([N], tl.float32)
            for g in tl.static_range(G):
                logits = tl.load(base + g * stride_group, mask=scored, other=float("-inf"))
                weight = tl.exp2(logits - tl.max(logits, 0))
                importance += weight / tl.sum(weight, 0)
        else:
            importance = tl.load(base, mask=scored, other=0.0)
        # NaN inputs give a NaN output, not an arbitrary selection
        importance = tl.where(importance == importance, importance, 0.0)
        free = o_c < number - 1 - RECENT
        places = K - 1 - RECENT
        # positive floats are ordered as their bits; -1 is below all
        bits = tl.where(free, importance.to(tl.int32, bitcast=True), -1)
        low = 0  # at least `places` free candidates reach it
        high = tl.max(bits, 0) + 1  # fewer do
        reached = tl.sum((bits >= 0).to(tl.int32), 0)
        while (low + 1 < high) & (reached != places):
            middle = low + (high - low) // 2
            count = tl.sum((bits >= middle).to(tl.int32), 0)
            if count >= places:
                low = middle
                reached = count
            else:
                high = middle
        above = bits > low
        ties = bits == low
        # both running counts in one scan: N < 2^15
        counts = tl.cumsum((above.to(tl.int32) << 16) | ties.to(tl.int32), 0)
        room = places - tl.sum(above.to(tl.int32), 0)
        chosen = above | (ties & ((counts & 0xFFFF) <= room))
        place = (counts >> 16) + tl.minimum(counts & 0xFFFF, room) - 1
        place = tl.where(free, place, places + o_c - (number - 1 - RECENT))
        chosen = chosen | ((o_c < number) & (o_c >= number - 1 - RECENT))
        row = (head * width + query) * K
        parent = tl.load(PARENTS + row + o_c // R, mask=chosen & (top == 0), other=0)
        tl.store(CHOSEN + row + place, tl.where(top, o_c, parent * R + o_c % R), mask=chosen)


def choose(
    source: torch.Tensor,
    parents: torch.Tensor | None,
    chosen: torch.Tensor,
    starts: torch.Tensor,
    *,
    begin: int,
    span: int,
    candidates: int,
    geometry,
    group: int,
    strides: tuple[int, int, int] | None = None,
) -> None:
    """Writes the chosen nodes of one level, ascending, the path last.

    Args:
        source: importance `[S, H_kv, w, n]` float32; or, where `strides` is given, logits in units of log2.
        parents: the level above's chosen nodes, `[S, H_kv, w, k]` int32; `None` where this level is the top for all.
        chosen: `[S, H_kv, w, k]` int32, written; not touched for queries whose walk starts below this level.
        starts: tokens before the first column per sequence, `[S]` int32.
        begin: first column.
        span: r^l.
        candidates: most candidates of any query.
        geometry: r, k, s, M.
        group: G.
        strides: of the logits, in elements: from a query to the next, from head to head, from slot to slot.
    """
    sequences, kv_heads, width = chosen.shape[:3]
    from_logits = strides is not None
    stride_query, stride_group, stride_slot = strides or (source.shape[-1], 0, geometry.branching)
    # few variants: nothing is compiled anew as a prompt grows
    block = triton.next_power_of_2(max(candidates, geometry.max_candidates))
    select_kernel[(width, sequences * kv_heads)](
        source,
        chosen if parents is None else parents,
        chosen,
        starts,
        begin,
        width,
        span,
        stride_query,
        stride_group,
        stride_slot,
        KV_HEADS=kv_heads,
        G=group,
        R=geometry.branching,
        K=geometry.top_k,
        RECENT=geometry.recent,
        M=geometry.top_capacity,
        FROM_LOGITS=from_logits,
        N=block,
        num_warps=max(1, min(8, block // 512)),
    )
