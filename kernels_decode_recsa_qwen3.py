"""Decoding by Triton kernels: the walk of a few new queries, each level's candidates split over many programs.

All lengths are read on the device and every grid follows from capacities, so that a step can be one CUDA graph; a
query that starts from a lower level, or is dense, leaves the programs of the levels above idle. One launch a level
scores its candidates (or attends to the tokens) and accumulates the unchosen nodes of the level above; the choice
between two levels is `kernels_select_recsa_qwen3`; a last launch merges all partial outputs. [our decision]
"""

import torch

from .kernels_common_recsa_qwen3 import LOG2E, load_angles, load_halves, rotate_halves, slot_tables, tl, triton
from .kernels_select_recsa_qwen3 import choose

# Candidates of one program.
CANDIDATES = 64


@triton.jit
def _candidate_nodes(PARENTS, path, o_c, scored, top, row, R: tl.constexpr, K: tl.constexpr):
    """The node that each candidate is: itself at the top, else a child of the parent in its slot."""
    parent = tl.load(PARENTS + row * K + o_c // R, mask=scored & (top == 0), other=0)
    return tl.where(top, o_c, parent * R + o_c % R)


@triton.jit
def _store_part(PARTS, LSE, part, weights, value_first, value_second, highest, total, bias, HALF: tl.constexpr,
                HP: tl.constexpr):  # fmt: skip
    """One program's normalised output and log-sum-exp for one head; -inf where it had no candidate."""
    some = total > 0
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    o_d = tl.arange(0, HP)
    first = tl.sum(weights[:, None] * value_first.to(tl.float32), 0) * inverse
    second = tl.sum(weights[:, None] * value_second.to(tl.float32), 0) * inverse
    tl.store(PARTS + part * 2 * HALF + o_d, first, mask=o_d < HALF)
    tl.store(PARTS + part * 2 * HALF + HALF + o_d, second, mask=o_d < HALF)
    tl.store(LSE + part, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)) + bias, float("-inf")))


@triton.jit
def level_kernel(
    QUERY,
    KEY,
    VALUE,
    VALUE_ABOVE,
    PARENTS,
    PARENTS_ABOVE,
    LOGITS,
    LOGITS_ABOVE,
    PARTS,
    LSE,
    COS,
    SIN,
    SLOT_COS,
    SLOT_SIN,
    ROWS,
    STARTS,
    begin,
    width,
    span,
    splits,
    capacity,
    capacity_above,
    first_part,
    all_parts,
    scale,
    bias_above,
    stride_qs,
    stride_qh,
    stride_qw,
    stride_ks,
    stride_kh,
    stride_kn,
    stride_vs,
    stride_vh,
    stride_vn,
    stride_as,
    stride_ah,
    stride_an,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BN: tl.constexpr,
):
    """Programs (split, sequence and KV head, query): `splits` score this level, the rest add up the one above.

    PARENTS and PARENTS_ABOVE `[S' * H_kv, w, K]` int32 are the parents of the candidates of this level and of the
    level above; the former are also what the level above chose. LOGITS `[S' * H_kv, w, G, capacity]` float32.
    PARTS `[S' * H_kv, w, all_parts, G, D]`: this launch writes those from `first_part` on, the tokens' first.
    """
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(2)
    sequence_row = head // KV_HEADS
    sequence = tl.load(ROWS + sequence_row).to(tl.int64)
    position = tl.load(STARTS + sequence_row) + begin + query
    row = head * width + query
    o_c = split * BN + tl.arange(0, BN)
    if split < splits:
        path = position // span
        top = path < M
        number = tl.where(top, path, (K - 1) * R + path % R)
        if TOKENS:
            number += 1
            walks = number > split * BN
        else:
            walks = (position // (span // R) >= M) & (number > split * BN)
        part = (row * all_parts + first_part + split) * G
        if walks:
            scored = o_c < number
            node = _candidate_nodes(PARENTS, path, o_c, scored, top, row, R, K).to(tl.int64)
            key = sequence * stride_ks + head % KV_HEADS * stride_kh + node * stride_kn
            key_first, key_second = load_halves(KEY, key, scored, HALF, HP)
            cos, sin = load_angles(COS, SIN, tl.where(top, o_c, o_c % R), scored, STRIDE, HALF, HP)
            key_first, key_second = rotate_halves(key_first, key_second, cos, sin)
            key_first = tl.reshape(key_first, (BN // R, R, HP)).to(tl.float32)
            key_second = tl.reshape(key_second, (BN // R, R, HP)).to(tl.float32)
            if TOKENS:
                value = sequence * stride_vs + head % KV_HEADS * stride_vh + node * stride_vn
                value_first, value_second = load_halves(VALUE, value, scored, HALF, HP)
            o_d = tl.arange(0, HP)
            inside = o_d < HALF
            turn = tl.where(top, path, path % R) * STRIDE
            query_cos = tl.load(COS + turn + o_d, mask=inside, other=0.0).to(tl.float32)
            query_sin = tl.load(SIN + turn + o_d, mask=inside, other=0.0).to(tl.float32)
            slot = split * (BN // R) + tl.arange(0, BN // R)
            slot_row = tl.where(top, 0, tl.maximum(K - 1 - slot, 0))
            slot_cos, slot_sin = load_angles(SLOT_COS, SLOT_SIN, slot_row, slot >= 0, HALF, HALF, HP)
            for g in tl.static_range(G):
                where = (
                    QUERY
                    + sequence * stride_qs
                    + (head % KV_HEADS * G + g) * stride_qh
                    + (begin + query).to(tl.int64) * stride_qw
                    + o_d
                )
                first = tl.load(where, mask=inside, other=0.0)
                second = tl.load(where + HALF, mask=inside, other=0.0)
                first, second = rotate_halves(first, second, query_cos * scale, query_sin * scale)
                first, second = rotate_halves(first[None, :], second[None, :], slot_cos, slot_sin)
                products = tl.sum(first.to(tl.float32)[:, None, :] * key_first, 2)
                products += tl.sum(second.to(tl.float32)[:, None, :] * key_second, 2)
                logits = tl.where(scored, tl.reshape(products, (BN,)), float("-inf"))
                if TOKENS:
                    highest = tl.max(logits, 0)
                    weights = tl.exp2(logits - highest)
                    total = tl.sum(weights, 0)
                    _store_part(
                        PARTS, LSE, part + g, weights, value_first, value_second, highest, total, 0.0, HALF, HP
                    )
                else:
                    tl.store(LOGITS + (row * G + g) * capacity + o_c, logits, mask=scored)
        elif TOKENS:
            for g in tl.static_range(G):
                tl.store(LSE + part + g, float("-inf"))
    else:
        split -= splits
        o_c -= splits * BN
        path = position // (span * R)
        top = path < M
        number = tl.where(top, path, (K - 1) * R + path % R)
        part = (row * all_parts + first_part + split) * G
        if TOKENS:
            part += splits * G
        if (position // span >= M) & (number > split * BN):
            scored = o_c < number
            node = _candidate_nodes(PARENTS_ABOVE, path, o_c, scored, top, row, R, K)
            o_k = tl.arange(0, KP)
            chosen = tl.load(PARENTS + row * K + o_k, mask=o_k < K, other=-1)
            unchosen = scored & (tl.max((node[:, None] == chosen[None, :]).to(tl.int32), 1) == 0)
            value = sequence * stride_as + head % KV_HEADS * stride_ah + node.to(tl.int64) * stride_an
            value_first, value_second = load_halves(VALUE_ABOVE, value, unchosen, HALF, HP)
            for g in tl.static_range(G):
                logits = tl.load(
                    LOGITS_ABOVE + (row * G + g) * capacity_above + o_c, mask=unchosen, other=float("-inf")
                )
                highest = tl.max(logits, 0)
                weights = tl.exp2(logits - tl.where(highest > float("-inf"), highest, 0.0))
                total = tl.sum(weights, 0)
                _store_part(
                    PARTS, LSE, part + g, weights, value_first, value_second, highest, total, bias_above, HALF, HP
                )
        else:
            for g in tl.static_range(G):
                tl.store(LSE + part + g, float("-inf"))


@triton.jit
def merge_parts_kernel(
    PARTS,
    LSE,
    OUTPUT,
    parts,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PP: tl.constexpr,
    BP: tl.constexpr,
):
    """Programs (sequence, KV head and query; head of the group): the softmax over all partial outputs."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    o_p = tl.arange(0, PP)
    o_d = tl.arange(0, DP)
    lse = tl.load(LSE + (row * parts + o_p) * G + g, mask=o_p < parts, other=float("-inf"))
    highest = tl.max(lse, 0)
    merged = highest + tl.log2(tl.sum(tl.exp2(lse - highest), 0))
    output = tl.zeros([DP], tl.float32)
    for p in range(0, parts, BP):
        o_b = p + tl.arange(0, BP)
        part = (row * parts + o_b) * G + g
        weight = tl.exp2(tl.load(LSE + part, mask=o_b < parts, other=float("-inf")) - merged)
        # what was not written has no weight, and may be anything
        read = (weight > 0)[:, None] & (o_d < D)[None, :]
        values = tl.load(PARTS + part[:, None] * D + o_d[None, :], mask=read, other=0.0)
        output += tl.sum(values * weight[:, None], 0)
    tl.store(OUTPUT + (row * G + g) * D + o_d, output, mask=o_d < D)


def decode_block(
    query: torch.Tensor,
    levels,
    rows: torch.Tensor,
    starts: torch.Tensor,
    begin: int,
    width: int,
    candidates: list[int],
    geometry,
    rope: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    given=None,
    keep=None,
) -> torch.Tensor:
    """The walk of a few columns of some sequences, whatever the depth of each query; dense queries too.

    Args:
        query: before RoPE, `[S, H, W, D]`, last dimension contiguous.
        levels: keys before RoPE and values per level.
        rows: the sequences, `[S']` int32.
        starts: tokens before column 0 of each of them, `[S']` int32.
        begin, width: the columns.
        candidates: the most that any query reads at each level, level 0 first; its length fixes the launches.
        geometry: r, k, s, M.
        rope: cos and sin `[>= M, D]` float32.
        scaling: on the logits.
        given: level -> chosen nodes `[S', H_kv, w, k]` int32, or `None` to choose.
        keep: called with (level, chosen nodes) as they are chosen.

    Returns:
        Output `[S', H_kv, w, G, D]` float32.
    """
    kv_heads, head_dim = levels.keys[0].shape[1], query.shape[3]
    group, r, k = query.shape[1] // kv_heads, geometry.branching, geometry.top_k
    programs, half = len(rows) * kv_heads, head_dim // 2
    block = max(CANDIDATES, r)
    splits = [triton.cdiv(number, block) for number in candidates]
    tables = slot_tables(rope, r, k, query.dtype)

    def empty(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(len(rows), kv_heads, width, *shape, dtype=dtype, device=query.device)

    parts, lse = empty(sum(splits), group, head_dim), empty(sum(splits), group)
    # of each level's candidates; the top has none, and some pointer must stand there
    parents, logits = [starts] * (len(candidates) + 1), [lse] * (len(candidates) + 1)
    for level in range(len(candidates) - 1, -1, -1):
        above = level + 1
        has_above = above < len(candidates)
        capacity, span = splits[level] * block, r**level
        if level:
            logits[level] = empty(group, capacity)
        values, values_above = levels.values[level], levels.values[above if has_above else level]
        level_kernel[(splits[level] + (splits[above] if has_above else 0), programs, width)](
            query, levels.keys[level], values, values_above, parents[level], parents[above], logits[level],
            logits[above], parts, lse, *rope, *tables, rows, starts, begin, width, span, splits[level], capacity,
            splits[above] * block if has_above else 0, sum(splits[:above]) if level else 0, sum(splits),
            scaling * LOG2E, above * (r.bit_length() - 1.0) if geometry.count_bias else 0.0,
            *query.stride()[:3], *levels.keys[level].stride()[:3], *values.stride()[:3], *values_above.stride()[:3],
            KV_HEADS=kv_heads, G=group, R=r, K=k, KP=triton.next_power_of_2(k), M=geometry.top_capacity,
            TOKENS=level == 0, STRIDE=rope[0].shape[1], HALF=half, HP=triton.next_power_of_2(half), BN=block,
        )  # fmt: skip
        if not level:
            break
        chosen = given[level] if given is not None else empty(k, dtype=torch.int32)
        if given is None:
            choose(
                logits[level], parents[level], chosen, starts, begin=begin, span=span, candidates=candidates[level],
                geometry=geometry, group=group, strides=(group * capacity, capacity, r),
            )  # fmt: skip
            if keep is not None:
                keep(level, chosen)
        parents[level - 1] = chosen
    output = empty(group, head_dim)
    merge_parts_kernel[(programs * width, group)](
        parts, lse, output, sum(splits), G=group, D=head_dim, DP=triton.next_power_of_2(head_dim),
        PP=triton.next_power_of_2(sum(splits)), BP=32,
    )  # fmt: skip
    return output
