"""Decoding by Triton kernels: the walk of a few new queries, each level's candidates split over many programs.

All lengths are read on the device and every grid follows from capacities, so that a step can be one CUDA graph; a
query that starts from a lower level, or is dense, leaves the programs of the levels above idle. One launch a level
scores its candidates (or attends to the tokens) and accumulates the unchosen nodes of the level above; the choice
between two levels is `kernels_select_recsa_qwen3`; a last launch merges all partial outputs. [our decision]
"""

import torch

from .kernels_common_recsa_qwen3 import (
    LOG2E,
    halves_product,
    load_angles,
    load_halves,
    load_states,
    rotate_halves,
    slot_tables,
    tl,
    triton,
)
from .kernels_select_recsa_qwen3 import choose

# Candidates of one program.
CANDIDATES = 64


@triton.jit
def _candidate_nodes(PARENTS, path, o_c, scored, top, row, R: tl.constexpr, K: tl.constexpr):
    """The node that each candidate is: itself at the top, else a child of the parent in its slot."""
    parent = tl.load(PARENTS + row * K + o_c // R, mask=scored & (top == 0), other=0)
    return tl.where(top, o_c, parent * R + o_c % R)


@triton.jit
def _store_parts(
    PARTS, LSE, part, weights, value_first, value_second, highest, bias,
    SLOTS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """One program's normalised output and log-sum-exp for each head; -inf where it had no candidate.

    `weights` `[SLOTS * GP, BN]` and `highest` `[GP]`: a head's row of each slot, which are summed.
    """
    total = tl.sum(tl.reshape(tl.sum(weights, 1), (SLOTS, GP)), 0)
    some = total != 0  # a total that is not a number counts, and shows in the output
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    weights = weights.to(value_first.dtype)
    first = tl.dot(weights, value_first, input_precision="ieee")
    second = tl.dot(weights, value_second, input_precision="ieee")
    first = tl.sum(tl.reshape(first, (SLOTS, GP, HP)), 0) * inverse[:, None]
    second = tl.sum(tl.reshape(second, (SLOTS, GP, HP)), 0) * inverse[:, None]
    o_g = tl.arange(0, GP)
    o_d = tl.arange(0, HP)
    inside = (o_g < G)[:, None] & (o_d < HALF)[None, :]
    where = PARTS + (part + o_g)[:, None] * (2 * HALF) + o_d[None, :]
    tl.store(where, first, mask=inside)
    tl.store(where + HALF, second, mask=inside)
    lse = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)) + bias, float("-inf"))
    tl.store(LSE + part + o_g, lse, mask=o_g < G)


@triton.jit(do_not_specialize=["begin", "width", "span", "splits", "first_part", "all_parts"])
def level_kernel(
    QUERY,
    KEY,
    VALUE,
    VALUE_ABOVE,
    KEY_EXPONENTS,
    VALUE_EXPONENTS,
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
    stride_es,
    stride_eh,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    GA: tl.constexpr,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    BN: tl.constexpr,
):
    """Programs (split, sequence and KV head, query): `splits` score this level, the rest add up the one above.

    PARENTS and PARENTS_ABOVE `[S' * H_kv, w, K]` int32 are the parents of the candidates of this level and of the
    level above; the former are also what the level above chose. LOGITS `[S' * H_kv, w, G, capacity]` float32.
    PARTS `[S' * H_kv, w, all_parts, G, D]`: this launch writes those from `first_part` on, the tokens' first.
    PACKED: keys and values of this level are float8 codes.
    """
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    query = tl.program_id(2)
    kv_head = head % KV_HEADS
    sequence = tl.load(ROWS + head // KV_HEADS).to(tl.int64)
    position = tl.load(STARTS + head // KV_HEADS) + begin + query
    row = head * width + query
    o_g = tl.arange(0, GP)
    if split < splits:
        o_c = split * BN + tl.arange(0, BN)
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
            key = sequence * stride_ks + kv_head * stride_kh + node * stride_kn
            exponents = sequence * stride_es + kv_head * stride_eh + node
            dtype: tl.constexpr = QUERY.dtype.element_ty
            key_first, key_second = load_states(KEY, key, KEY_EXPONENTS, exponents, scored, dtype, PACKED, HALF, HP)
            cos, sin = load_angles(COS, SIN, tl.where(top, o_c, o_c % R), scored, STRIDE, HALF, HP)
            key_first, key_second = rotate_halves(key_first, key_second, cos, sin)
            # rows: each head once a slot, rotated for it; of the products those with the slot's own children count
            o_row = tl.arange(0, SLOTS * GP)
            slot = split * SLOTS + o_row // GP
            every = o_row >= 0
            first_query = sequence * stride_qs + (begin + query).to(tl.int64) * stride_qw + kv_head * G * stride_qh
            query_first, query_second = load_halves(
                QUERY, first_query + tl.minimum(o_row % GP, G - 1).to(tl.int64) * stride_qh, every, HALF, HP
            )
            turn = tl.where(top, path, path % R) + tl.zeros([1], tl.int32)
            cos, sin = load_angles(COS, SIN, turn, turn >= 0, STRIDE, HALF, HP)
            query_first, query_second = rotate_halves(query_first, query_second, cos * scale, sin * scale)
            slot_row = tl.where(top, 0, tl.maximum(K - 1 - slot, 0))
            slot_cos, slot_sin = load_angles(SLOT_COS, SLOT_SIN, slot_row, every, HALF, HALF, HP)
            query_first, query_second = rotate_halves(query_first, query_second, slot_cos, slot_sin)
            logits = halves_product(query_first, query_second, key_first, key_second)
            own = scored[None, :] & ((o_c // R)[None, :] == slot[:, None])
            logits = tl.where(own, logits, float("-inf"))
            if TOKENS:
                value = sequence * stride_vs + kv_head * stride_vh + node * stride_vn
                value_first, value_second = load_states(
                    VALUE, value, VALUE_EXPONENTS, exponents, scored, dtype, PACKED, HALF, HP
                )
                highest = tl.max(tl.reshape(tl.max(logits, 1), (SLOTS, GP)), 0)
                spread = tl.reshape(tl.broadcast_to(highest[None, :], (SLOTS, GP)), (SLOTS * GP,))
                weights = tl.exp2(logits - spread[:, None])
                _store_parts(
                    PARTS, LSE, part, weights, value_first, value_second, highest, 0.0, SLOTS, G, GP, HALF, HP
                )
            else:
                where = LOGITS + (row * G + o_row % GP)[:, None] * capacity + o_c[None, :]
                tl.store(where, logits, mask=own & (o_row % GP < G)[:, None])
        elif TOKENS:
            tl.store(LSE + part + o_g, tl.full([GP], float("-inf"), tl.float32), mask=o_g < G)
    else:
        split -= splits
        o_c = split * BN + tl.arange(0, BN)
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
            value = sequence * stride_as + kv_head * stride_ah + node.to(tl.int64) * stride_an
            value_first, value_second = load_halves(VALUE_ABOVE, value, unchosen, HALF, HP)
            # a product has 16 rows at least: GA of them, the last head repeated
            o_a = tl.arange(0, GA)
            where = LOGITS_ABOVE + (row * G + tl.minimum(o_a, G - 1))[:, None] * capacity_above + o_c[None, :]
            logits = tl.load(where, mask=unchosen[None, :], other=float("-inf"))
            highest = tl.max(logits, 1)
            weights = tl.exp2(logits - tl.where(highest > float("-inf"), highest, 0.0)[:, None])
            _store_parts(PARTS, LSE, part, weights, value_first, value_second, highest, bias_above, 1, G, GA, HALF, HP)
        else:
            tl.store(LSE + part + o_g, tl.full([GP], float("-inf"), tl.float32), mask=o_g < G)


@triton.jit(do_not_specialize=["parts"])
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
        Output `[S', H_kv, w, G, D]` in the dtype of the query.
    """
    kv_heads, head_dim = levels.keys[0].shape[1], query.shape[3]
    group, r, k = query.shape[1] // kv_heads, geometry.branching, geometry.top_k
    programs, half = len(rows) * kv_heads, head_dim // 2
    block = max(CANDIDATES, r)
    group_block = max(triton.next_power_of_2(group), 16 * r // block)  # a product has 16 rows at least
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
        packed = level == 0 and levels.exponents is not None
        exponents = levels.exponents if packed else (starts, starts)
        values, values_above = levels.values[level], levels.values[above if has_above else level]
        level_kernel[(splits[level] + (splits[above] if has_above else 0), programs, width)](
            query, levels.keys[level], values, values_above, *exponents, parents[level], parents[above], logits[level],
            logits[above], parts, lse, *rope, *tables, rows, starts, begin, width, span, splits[level], capacity,
            splits[above] * block if has_above else 0, sum(splits[:above]) if level else 0, sum(splits),
            scaling * LOG2E, above * (r.bit_length() - 1.0) if geometry.count_bias else 0.0,
            *query.stride()[:3], *levels.keys[level].stride()[:3], *values.stride()[:3], *values_above.stride()[:3],
            *(exponents[0].stride()[:2] if packed else (0, 0)),
            KV_HEADS=kv_heads, G=group, GP=group_block, GA=max(group_block, 16), R=r, SLOTS=block // r, K=k,
            KP=triton.next_power_of_2(k), M=geometry.top_capacity, TOKENS=level == 0, PACKED=packed,
            STRIDE=rope[0].shape[1], HALF=half, HP=max(triton.next_power_of_2(half), 16), BN=block,
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
    output = empty(group, head_dim, dtype=query.dtype)
    merge_parts_kernel[(programs * width, group)](
        parts, lse, output, sum(splits), G=group, D=head_dim, DP=triton.next_power_of_2(head_dim),
        PP=triton.next_power_of_2(sum(splits)), BP=32,
    )  # fmt: skip
    return output
