"""What the Triton kernels share: loads, rotations, the walk's arithmetic and the rotation tables.

Kernels address a head of D elements as two halves of HALF elements (padded to HP, a power of two), the pairs of
Qwen3's rotary embedding. Each rotation is rounded to the dtype of the inputs, in prefill and in decoding alike, so
that both choose the same nodes. Nothing here knows caches, padding or modules.
"""

import functools
from contextlib import nullcontext

import torch
from torch.utils.weak import WeakIdKeyDictionary

try:  # guarded: transformers' loader refuses remote code with unguarded imports of what is not installed
    import triton
    import triton.language as tl
    from triton import knobs
except ImportError:
    raise

LOG2E = 1.4426950408889634  # logits are kept in units of log2


@triton.jit
def load_halves(pointer, offsets, mask, HALF: tl.constexpr, HP: tl.constexpr):
    """Both halves `[n, HP]` of the vectors at these element offsets `[n]`; zeros where masked."""
    o_d = tl.arange(0, HP)
    inside = mask[:, None] & (o_d < HALF)[None, :]
    where = pointer + offsets[:, None] + o_d[None, :]
    return tl.load(where, mask=inside, other=0.0), tl.load(where + HALF, mask=inside, other=0.0)


@triton.jit
def power_of_two(exponent):
    """2 ** exponent as float32, exactly, for integers from -126 to 127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_states(
    pointer, offsets, EXPONENTS, exponents, mask, dtype: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr,
):  # fmt: skip
    """`load_halves` of vectors, or of float8 codes with their exponents at the offsets `exponents` `[n]`."""
    first, second = load_halves(pointer, offsets, mask, HALF, HP)
    if PACKED:
        scale = power_of_two(tl.load(EXPONENTS + exponents, mask=mask, other=0))[:, None]
        first, second = (first.to(tl.float32) * scale).to(dtype), (second.to(tl.float32) * scale).to(dtype)
    return first, second


@triton.jit
def load_angles(cos, sin, rows, mask, STRIDE: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):
    """Cosine and sine `[n, HP]` float32 in these rows `[n]` of a table whose rows are STRIDE elements apart."""
    o_d = tl.arange(0, HP)
    inside = mask[:, None] & (o_d < HALF)[None, :]
    offsets = rows[:, None] * STRIDE + o_d[None, :]
    return (
        tl.load(cos + offsets, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + offsets, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def rotate_halves(first, second, cos, sin):
    """The rotary embedding in float32, rounded to the dtype of the input."""
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    return (
        (wide_first * cos - wide_second * sin).to(first.dtype),
        (wide_second * cos + wide_first * sin).to(first.dtype),
    )


@triton.jit
def halves_product(query_first, query_second, key_first, key_second):
    """Products `[m, n]` float32 of the rows of both, `[m, HP]` and `[n, HP]` a half."""
    product = tl.dot(query_first, tl.trans(key_first), input_precision="ieee")
    return tl.dot(query_second, tl.trans(key_second), product, input_precision="ieee")


def slot_tables(
    rope: tuple[torch.Tensor, torch.Tensor], branching: int, top_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[k, D / 2]` of the rotations by 0, r, ... (k - 1) r positions, without the attention factor.

    A query stands (k - 1 - slot) r + (its path's offset in the parent) positions after the first child of the parent
    in that slot. Half-precision queries get float16 tables, four times as fine as bfloat16 for values up to 1.

    Args:
        rope: cos and sin `[>= C, D]` float32, whose position 0 holds the attention factor.
        branching: r.
        top_k: k.
        dtype: of the queries.
    """
    cos, sin = rope
    made = _slot_tables.setdefault(cos, {})
    wanted = torch.float32 if dtype == torch.float32 else torch.float16
    if (branching, top_k, wanted) not in made:
        half = cos.shape[1] // 2
        made[branching, top_k, wanted] = tuple(
            (table[: branching * top_k : branching, :half] / cos[0, 0]).to(wanted).contiguous() for table in (cos, sin)
        )
    return made[branching, top_k, wanted]


_slot_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def launching_on(device: torch.device):
    """Makes the device current, which decides where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 99 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (`TRITON_INTERPRET=1`), which takes CPU tensors too."""
    return bool(knobs.runtime.interpret)
