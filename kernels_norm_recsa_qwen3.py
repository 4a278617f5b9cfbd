"""Qwen3's RMSNorm in one kernel: PyTorch takes eight, which at a step of one token cost more than the attention."""

import torch

from .kernels_common_recsa_qwen3 import launching_on, tl, triton


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(INPUT, WEIGHT, OUTPUT, rows, eps, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, DP)
    mask = (o_row < rows)[:, None] & (o_d < D)[None, :]
    offsets = o_row[:, None] * D + o_d[None, :]
    states = tl.load(INPUT + offsets, mask=mask, other=0.0)
    wide = states.to(tl.float32)
    variance = tl.sum(wide * wide, 1) / D
    # rounded before the weight is applied, as Qwen3 does
    normed = (wide * tl.rsqrt(variance + eps)[:, None]).to(states.dtype).to(tl.float32)
    weight = tl.load(WEIGHT + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(OUTPUT + offsets, (normed * weight[None, :]).to(states.dtype), mask=mask)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, rounded as Qwen3's module rounds.

    Args:
        states: `[..., D]`, float16, bfloat16 or float32.
        weight: `[D]` in the same dtype.
        eps: added to the mean square.
    """
    states = states.contiguous()
    output = torch.empty_like(states)
    width = states.shape[-1]
    padded = triton.next_power_of_2(width)
    rows, block = states.numel() // width, max(2048 // padded, 1)
    with launching_on(states.device):
        rms_norm_kernel[(triton.cdiv(rows, block),)](
            states, weight.contiguous(), output, rows, eps, D=width, DP=padded, BLOCK=block
        )
    return output
