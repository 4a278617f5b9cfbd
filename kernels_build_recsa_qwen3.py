"""Appending one token a row to the tree by a Triton kernel, with the row's length read on the device.

A node is complete with its last token, and no query reads a node before the next token comes. So one program per row
and KV head writes the token and then, level by level, the node that it completes, as `build_nodes` would.
"""

import torch

from .kernels_common_recsa_qwen3 import tl, triton
from .tree_recsa_qwen3 import RecSAPooler


@triton.jit
def append_kernel(
    KEY,
    VALUE,
    KEYS,
    VALUES,
    POOLED,
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
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KEYS, VALUES and POOLED hold a tensor `[B, H_kv, CAPACITIES[l], D]` a level; POOLED[0] is KEYS[0]."""
    head = tl.program_id(0).to(tl.int64)
    row, kv_head = head // KV_HEADS, head % KV_HEADS
    position = tl.load(LENGTHS + row)
    o_d = tl.arange(0, DP)
    m_d = o_d < D
    key = tl.load(KEY + row * stride_ks + kv_head * stride_kh + o_d, mask=m_d, other=0.0)
    value = tl.load(VALUE + row * stride_vs + kv_head * stride_vh + o_d, mask=m_d, other=0.0)
    target = (head * CAPACITIES[0] + position) * D + o_d
    tl.store(KEYS[0] + target, key, mask=m_d)
    tl.store(VALUES[0] + target, value, mask=m_d)

    o_r = tl.arange(0, R)
    complete = position + 1  # nodes of the level below, the new one included
    for level in tl.static_range(1, LEVELS):
        if (complete > 0) & (complete % R == 0):
            tl.debug_barrier()  # what this program wrote at the level below
            children = (head * CAPACITIES[level - 1] + complete - R + o_r)[:, None] * D + o_d[None, :]
            inside = m_d[None, :]
            wide = tl.load(POOLED[level - 1] + children, mask=inside, other=0.0).to(tl.float32)
            query = tl.load(POOLER_QUERY + kv_head * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            scores = tl.sum(wide * query[None, :], 1) + tl.load(SLOT_BIAS + o_r).to(tl.float32)
            weights = tl.exp(scores - tl.max(scores, 0))
            weights = weights / tl.sum(weights, 0)
            pooled = tl.sum(weights[:, None] * wide, 0).to(key.dtype)
            mean = tl.sum(tl.load(VALUES[level - 1] + children, mask=inside, other=0.0).to(tl.float32), 0) / R
            node = (head * CAPACITIES[level] + complete // R - 1) * D
            tl.store(POOLED[level] + node + o_d, pooled, mask=m_d)
            tl.store(VALUES[level] + node + o_d, mean.to(value.dtype), mask=m_d)
            for first in range(0, D, BLOCK):
                o_out = first + tl.arange(0, BLOCK)
                matrix = tl.load(
                    PROJ + (kv_head * D + o_out)[:, None] * D + o_d[None, :],
                    mask=(o_out < D)[:, None] & m_d[None, :],
                    other=0.0,
                )
                read = tl.sum(matrix.to(tl.float32) * pooled.to(tl.float32)[None, :], 1)
                tl.store(KEYS[level] + node + o_out, read.to(key.dtype), mask=o_out < D)
            complete = complete // R
        else:
            complete = 0


def append_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, ...],
    pooled: tuple[torch.Tensor, ...],
    lengths: torch.Tensor,
    pooler: RecSAPooler,
) -> None:
    """Writes each row's next token and every node that it completes; `lengths` are not advanced.

    Args:
        key, value: the new tokens, `[B, H_kv, 1, D]`, last dimension contiguous.
        keys, values: storage of each level, `[B, H_kv, capacity, D]` contiguous.
        pooled: what the recursion carries on each level; the keys at level 0.
        lengths: tokens that each row holds, `[B]` int32.
        pooler: the layer's pooler, with the parameters of all heads here.
    """
    batch, kv_heads, _, head_dim = key.shape
    append_kernel[(batch * kv_heads,)](
        key, value, keys, values, pooled, tuple(tensor.shape[2] for tensor in keys), lengths,
        pooler.query, pooler.slot_bias, pooler.proj, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV_HEADS=kv_heads, LEVELS=len(keys), R=pooler.slot_bias.shape[0], D=head_dim,
        DP=triton.next_power_of_2(head_dim), BLOCK=32,
    )  # fmt: skip
