"""Building nodes by Triton kernels: many at once, or those that one more token a row completes.

Both make a node by the same instructions, so it does not depend on how its tokens came. Appending reads each row's
length on the device; a node is complete with its last token, and no query reads it before the next token comes.
"""

import torch

from .float8_recsa_qwen3 import CODES, LEAST_EXPONENT, Packed
from .kernels_common_recsa_qwen3 import launching_on, power_of_two, tl, triton
from .tree_recsa_qwen3 import Nodes, RecSAPooler


@triton.jit
def _pack(wide, m_d, LEAST: tl.constexpr):
    """`float8_recsa_qwen3.pack` of float32 vectors `[n, DP]`: codes as their bits, exponents `[n]`, both int32.

    By integers, since not every GPU, and no interpreter, casts as PyTorch does.
    """
    finite = (wide == wide) & (tl.abs(wide) < float("inf"))
    bits = tl.max(tl.where(finite & m_d[None, :], tl.abs(wide), 0.0), 1).to(tl.int32, bitcast=True)
    exponents = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponents = tl.minimum(tl.maximum(exponents, LEAST), 120)
    codes = wide * power_of_two(-exponents)[:, None]
    size = tl.abs(codes)
    bits = size.to(tl.int32, bitcast=True)
    # half to even: to four significant bits, below 2 ** -6 to multiples of 2 ** -9, which adding 2 ** 14 leaves over
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    bits = tl.minimum(tl.where(size < 0.015625, small, normal), 0x7E)
    bits = tl.where(codes < 0, bits | 0x80, bits)
    return tl.where(finite, bits, 0x7F), exponents


@triton.jit(do_not_specialize=["vectors"])
def pack_kernel(
    STATES, CODES, EXPONENTS, vectors, width, heads, stride_s, stride_h, stride_n, LEAST: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """STATES `[S, H_kv, W, D]` to contiguous CODES and EXPONENTS."""
    o_v = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, DP)
    inside = (o_v < vectors)[:, None] & (o_d < D)[None, :]
    head = o_v // width
    source = head // heads * stride_s + head % heads * stride_h + o_v % width * stride_n
    wide = tl.load(STATES + source[:, None] + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    codes, exponents = _pack(wide, o_d < D, LEAST)
    tl.store(CODES + o_v[:, None] * D + o_d[None, :], codes.to(tl.uint8), mask=inside)
    tl.store(EXPONENTS + o_v, exponents.to(tl.int8), mask=o_v < vectors)


def pack_by_kernel(states: torch.Tensor) -> Packed:
    """`float8_recsa_qwen3.pack` of `[S, H_kv, W, D]` by a kernel, last dimension contiguous."""
    sequences, heads, width, head_dim = states.shape
    codes = torch.empty(states.shape, dtype=torch.uint8, device=states.device)
    exponents = torch.empty(states.shape[:3], dtype=torch.int8, device=states.device)
    vectors, block = sequences * heads * width, 32
    if vectors:
        with launching_on(states.device):
            pack_kernel[(triton.cdiv(vectors, block),)](
                states, codes, exponents, vectors, width, heads, *states.stride()[:3], LEAST=LEAST_EXPONENT,
                D=head_dim, DP=triton.next_power_of_2(head_dim), BLOCK=block,
            )  # fmt: skip
    return Packed(codes.view(CODES), exponents)


@triton.jit
def _store_node(
    POOLED, VALUES, OUT_POOLED, OUT_KEYS, OUT_VALUES, pooled_rows, value_rows, node, POOLER_QUERY, SLOT_BIAS, PROJ,
    kv_head, KEY_EXPONENTS, VALUE_EXPONENTS, exponents, PACKED: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The node whose R children lie at these offsets (elements, `[R]`), to the offset `node`.

    PACKED: the children are float8 codes with these offsets of their exponents.
    """
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    inside = m_d[None, :]
    wide = tl.load(POOLED + pooled_rows[:, None] + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        wide = wide * power_of_two(tl.load(KEY_EXPONENTS + exponents))[:, None]
        wide = wide.to(OUT_POOLED.dtype.element_ty).to(tl.float32)
    query = tl.load(POOLER_QUERY + kv_head * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    scores = tl.sum(wide * query[None, :], 1) + tl.load(SLOT_BIAS + tl.arange(0, R)).to(tl.float32)
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    pooled = tl.sum(weights[:, None] * wide, 0).to(OUT_POOLED.dtype.element_ty)
    tl.store(OUT_POOLED + node + o_d, pooled, mask=m_d)
    values = tl.load(VALUES + value_rows[:, None] + o_d[None, :], mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        values = values * power_of_two(tl.load(VALUE_EXPONENTS + exponents))[:, None]
        values = values.to(OUT_VALUES.dtype.element_ty).to(tl.float32)
    mean = tl.sum(values, 0) / R
    tl.store(OUT_VALUES + node + o_d, mean.to(OUT_VALUES.dtype.element_ty), mask=m_d)
    for first in range(0, D, BLOCK):
        o_out = first + tl.arange(0, BLOCK)
        matrix = tl.load(
            PROJ + (kv_head * D + o_out)[:, None] * D + o_d[None, :],
            mask=(o_out < D)[:, None] & m_d[None, :],
            other=0.0,
        )
        read = tl.sum(matrix.to(tl.float32) * pooled.to(tl.float32)[None, :], 1)
        tl.store(OUT_KEYS + node + o_out, read.to(OUT_KEYS.dtype.element_ty), mask=o_out < D)


@triton.jit(do_not_specialize=["nodes"])
def build_kernel(
    POOLED,
    VALUES,
    OUT_POOLED,
    OUT_KEYS,
    OUT_VALUES,
    POOLER_QUERY,
    SLOT_BIAS,
    PROJ,
    nodes,
    stride_ps,
    stride_ph,
    stride_pn,
    stride_vs,
    stride_vh,
    stride_vn,
    KV_HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (node, sequence and KV head)."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    sequence, kv_head = head // KV_HEADS, head % KV_HEADS
    children = node * R + tl.arange(0, R)
    _store_node(
        POOLED, VALUES, OUT_POOLED, OUT_KEYS, OUT_VALUES,
        sequence * stride_ps + kv_head * stride_ph + children * stride_pn,
        sequence * stride_vs + kv_head * stride_vh + children * stride_vn,
        (head * nodes + node) * D, POOLER_QUERY, SLOT_BIAS, PROJ, kv_head, POOLED, POOLED, children, False,
        R, D, DP, BLOCK,
    )  # fmt: skip


@triton.jit
def append_kernel(
    KEY,
    VALUE,
    KEYS,
    VALUES,
    POOLED,
    KEY_EXPONENTS,
    VALUE_EXPONENTS,
    CAPACITIES,
    LENGTHS,
    POOLER_QUERY,
    SLOT_BIAS,
    PROJ,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    KV_HEADS: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    LEAST: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KEYS, VALUES and POOLED hold a tensor `[B, H_kv, CAPACITIES[l], D]` a level; POOLED[0] is KEYS[0].

    PACKED: at level 0 these are float8 codes, with exponents `[B, H_kv, CAPACITIES[0]]`.
    """
    head = tl.program_id(0).to(tl.int64)
    row, kv_head = head // KV_HEADS, head % KV_HEADS
    position = tl.load(LENGTHS + row)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    key = tl.load(KEY + row * stride_ks + kv_head * stride_kh + o_d, mask=m_d, other=0.0)
    value = tl.load(VALUE + row * stride_vs + kv_head * stride_vh + o_d, mask=m_d, other=0.0)
    target = (head * CAPACITIES[0] + position) * D + o_d
    if PACKED:
        codes, exponents = _pack(key.to(tl.float32)[None, :], m_d, LEAST)
        key = tl.reshape(codes, (DP,)).to(tl.uint8).to(KEYS[0].dtype.element_ty, bitcast=True)
        tl.store(KEY_EXPONENTS + head * CAPACITIES[0] + position + tl.arange(0, 1), exponents.to(tl.int8))
        codes, exponents = _pack(value.to(tl.float32)[None, :], m_d, LEAST)
        value = tl.reshape(codes, (DP,)).to(tl.uint8).to(VALUES[0].dtype.element_ty, bitcast=True)
        tl.store(VALUE_EXPONENTS + head * CAPACITIES[0] + position + tl.arange(0, 1), exponents.to(tl.int8))
    tl.store(KEYS[0] + target, key, mask=m_d)
    tl.store(VALUES[0] + target, value, mask=m_d)

    o_r = tl.arange(0, R)
    complete = position + 1  # nodes of the level below, the new one included
    for level in tl.static_range(1, LEVELS):
        if (complete > 0) & (complete % R == 0):
            tl.debug_barrier()  # what this program wrote at the level below
            entries = head * CAPACITIES[level - 1] + complete - R + o_r
            children = entries * D
            node = (head * CAPACITIES[level] + complete // R - 1) * D
            _store_node(
                POOLED[level - 1], VALUES[level - 1], POOLED[level], KEYS[level], VALUES[level], children, children,
                node, POOLER_QUERY, SLOT_BIAS, PROJ, kv_head, KEY_EXPONENTS, VALUE_EXPONENTS, entries,
                PACKED and level == 1, R, D, DP, BLOCK,
            )  # fmt: skip
            complete = complete // R
        else:
            complete = 0


def build_nodes_by_kernel(pooler: RecSAPooler, pooled: torch.Tensor, values: torch.Tensor, branching: int) -> Nodes:
    """`build_nodes` by a kernel, without gradients; the last dimension must be contiguous.

    Args:
        pooler: the layer's pooler.
        pooled: what the recursion carries for the children, `[S, H_kv, n * r, D]`.
        values: the children's (mean) values, same shape.
        branching: r.

    Returns:
        `Nodes` with n nodes.
    """
    sequences, kv_heads, children, head_dim = pooled.shape
    nodes = children // branching
    parents, keys, means = (pooled.new_empty(sequences, kv_heads, nodes, head_dim) for _ in range(3))
    if nodes:
        with launching_on(pooled.device):
            build_kernel[(nodes, sequences * kv_heads)](
                pooled, values, parents, keys, means, *_contiguous(pooler, kv_heads), nodes,
                *pooled.stride()[:3], *values.stride()[:3],
                KV_HEADS=kv_heads, R=branching, D=head_dim, DP=triton.next_power_of_2(head_dim), BLOCK=32,
            )  # fmt: skip
    return Nodes(parents, keys, means)


def _contiguous(pooler: RecSAPooler, kv_heads: int) -> list[torch.Tensor]:
    return [parameter.contiguous() for parameter in pooler.parameters_of_heads(kv_heads)]


def append_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    pooled: tuple[torch.Tensor, ...],
    lengths: torch.Tensor,
    pooler: RecSAPooler,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes each row's next token and every node that it completes; `lengths` are not advanced.

    Args:
        key, value: the new tokens, `[B, H_kv, 1, D]`, last dimension contiguous.
        keys, values: storage of each level, `[B, H_kv, capacity, D]` contiguous.
        pooled: what the recursion carries on each level; the keys at level 0.
        lengths: tokens that each row holds, `[B]` int32.
        pooler: the layer's pooler, with the parameters of all heads here.
        exponents: of keys and values at level 0, `[B, H_kv, capacity]` int8 contiguous, where it holds float8 codes.
    """
    batch, kv_heads, _, head_dim = key.shape
    append_kernel[(batch * kv_heads,)](
        key, value, keys, values, pooled, *(exponents or (lengths, lengths)),
        tuple(tensor.shape[2] for tensor in keys), lengths,
        *_contiguous(pooler, kv_heads), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, LEVELS=len(keys), PACKED=exponents is not None, LEAST=LEAST_EXPONENT,
        R=pooler.slot_bias.shape[0], D=head_dim,
        DP=triton.next_power_of_2(head_dim), BLOCK=32,
    )  # fmt: skip
