"""Choosing nodes: the k - 1 - s most important free candidates of each query, the s before the path, and the path.

Used by prefill and by decoding, so that both choose alike from the same logits. Exact: the threshold is found by
bisection on the bits of the importance, and ties go to the lower index. Nothing here reads keys or values.
"""

import torch

from .kernels_common_recsa_qwen3 import tl, triton

# Candidates of a run, of which only the highest counts at first.
RUN = 8


@triton.jit
def _highest(bits, places: tl.constexpr):
    """Which `places` of these are highest, ties to the lower index: (chosen, its rank by index); all, where fewer.

    `bits` `[n]` int32: bits of positive floats, which order alike; -1 is never chosen.
    """
    low = tl.min(tl.where(bits >= 0, bits, 2147483647), 0)  # at least `places` reach it, or all do
    high = tl.max(bits, 0) + 1  # fewer do
    reached = tl.sum((bits >= 0).to(tl.int32), 0)
    beyond = 0  # how many reach `high`
    rounds = 0
    wanted = tl.log2(tl.full([], places, tl.float32))
    while (low + 1 < high) & (reached > places):
        # the logarithm of the number falls about linearly; every third round halves, whatever the values are
        most = tl.log2(reached * 1.0)
        least = tl.log2(tl.maximum(beyond * 1.0, 0.5))
        share = tl.where(rounds % 3 == 2, 0.5, (most - wanted) / (most - least))
        middle = low + ((high - low).to(tl.float32) * share).to(tl.int32)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        count = tl.sum((bits >= middle).to(tl.int32), 0)
        low = tl.where(count >= places, middle, low)
        reached = tl.where(count >= places, count, reached)
        high = tl.where(count >= places, high, middle)
        beyond = tl.where(count >= places, beyond, count)
        rounds += 1
    above = bits > low
    ties = bits == low
    # both running counts in one scan: n < 2^15
    counts = tl.cumsum((above.to(tl.int32) << 16) | ties.to(tl.int32), 0)
    room = places - tl.sum(above.to(tl.int32), 0)
    chosen = above | (ties & ((counts & 0xFFFF) <= room))
    return chosen, (counts >> 16) + tl.minimum(counts & 0xFFFF, room) - 1


@triton.jit
def _free_bits(importance, free):
    """Bits that order as the importance does; a NaN, which gives a NaN output anyway, counts as zero."""
    return tl.where(free, tl.where(importance == importance, importance, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit(do_not_specialize=["begin", "width", "span"])
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
    GP: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    RECENT: tl.constexpr,
    M: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    N: tl.constexpr,
    RUN: tl.constexpr,
    LAST: tl.constexpr,
):
    """One program per (query, sequence and KV head); idle where the query's walk starts below this level.

    SOURCE holds importance (one value a candidate) or, with FROM_LOGITS, G logits a candidate in units of log2;
    candidate c lies at (c // R) * stride_slot + c % R, its heads stride_group apart. PARENTS and CHOSEN are
    `[S * H_kv, width, K]` int32: the parents of the candidates (not read at the top), and the nodes chosen.
    With importance the runs of RUN candidates that hold the highest are chosen first; they hold all that is chosen.
    """
    query = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    position = tl.load(STARTS + head // KV_HEADS) + begin + query
    path = position // span
    top = path < M
    number = tl.where(top, path + 1, (K - 1) * R + path % R + 1)
    if position // (span // R) >= M:
        row = (head * width + query) * K
        source = SOURCE + (head * width + query) * stride_query
        free_end = number - 1 - RECENT
        places: tl.constexpr = K - 1 - RECENT
        if FROM_LOGITS:
            o_c = tl.arange(0, N)
            scored = o_c < number - 1
            base = source + (o_c // R).to(tl.int64) * stride_slot + o_c % R
            o_g = tl.arange(0, GP)
            logits = tl.load(
                base[None, :] + o_g[:, None] * stride_group,
                mask=scored[None, :] & (o_g < G)[:, None],
                other=float("-inf"),
            )
            highest = tl.max(logits, 1)
            weights = tl.exp2(logits - tl.where(o_g < G, highest, 0.0)[:, None])
            total = tl.where(o_g < G, tl.sum(weights, 1), 1.0)
            bits = _free_bits(tl.sum(weights / total[:, None], 0), o_c < free_end)
        elif RUN == 1:
            o_c = tl.arange(0, N)
            bits = _free_bits(tl.load(source + o_c, mask=o_c < free_end, other=0.0), o_c < free_end)
        else:
            o_all = tl.reshape(tl.arange(0, N), (N // RUN, RUN))
            importance = tl.load(source + o_all, mask=o_all < free_end, other=0.0)
            runs, place = _highest(tl.max(_free_bits(importance, o_all < free_end), 1), places)
            # through memory: the row of this program's result
            tl.store(CHOSEN + row + place, tl.arange(0, N // RUN), mask=runs)
            tl.debug_barrier()
            kept = tl.minimum(tl.cdiv(free_end, RUN), places)
            o_k = tl.arange(0, KP)
            run = tl.load(CHOSEN + row + o_k, mask=o_k < kept, other=N)
            tl.debug_barrier()
            o_c = tl.reshape(run[:, None] * RUN + tl.arange(0, RUN)[None, :], (KP * RUN,))
            bits = _free_bits(tl.load(source + o_c, mask=o_c < free_end, other=0.0), o_c < free_end)
        chosen, place = _highest(bits, places)
        parent = tl.load(PARENTS + row + o_c // R, mask=chosen & (top == 0), other=0)
        tl.store(CHOSEN + row + place, tl.where(top, o_c, parent * R + o_c % R), mask=chosen)
        # the nodes before the path, and the path
        o_last = tl.arange(0, LAST)
        o_c = number - 1 - RECENT + o_last
        last = o_last <= RECENT
        parent = tl.load(PARENTS + row + o_c // R, mask=last & (top == 0), other=0)
        tl.store(CHOSEN + row + places + o_last, tl.where(top, o_c, parent * R + o_c % R), mask=last)


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
    slots, group_block = triton.next_power_of_2(geometry.top_k), triton.next_power_of_2(group)
    run = 1 if from_logits or block // RUN < slots else RUN
    # measured on an H200: few warps each where programs are many, else as many as have work
    if from_logits:
        warps = max(1, min(16, block * group_block // (2048 if width * sequences * kv_heads > 512 else 1024)))
    else:
        warps = max(min(2, block // 1024), block // 4096, 1)
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
        GP=group_block,
        R=geometry.branching,
        K=geometry.top_k,
        KP=slots,
        RECENT=geometry.recent,
        M=geometry.top_capacity,
        FROM_LOGITS=from_logits,
        N=block,
        RUN=run,
        LAST=triton.next_power_of_2(geometry.recent + 1),
        num_warps=warps,
    )
