"""Vectors in 8 bits: float8 (e4m3) codes with one power of two a vector as their scale.

A code has four significant bits, so code times scale is exact in float32 and bfloat16: reading rounds nothing, and the
reference and the kernels read the same numbers. Nothing here knows trees or caches. [our decision; the granularity is
measured in benchmarks/float8_cache.json]
"""

from typing import NamedTuple

import torch

CODES = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
LEAST_EXPONENT = -120  # keeps 2 ** -exponent a finite float32


class Packed(NamedTuple):
    """Vectors `[..., D]` as codes `[..., D]` float8_e4m3fn and exponents `[...]` int8: code * 2 ** exponent."""

    codes: torch.Tensor
    exponents: torch.Tensor


def pack(states: torch.Tensor) -> Packed:
    """The codes nearest to `states` `[..., D]`, each vector under the least scale at which none overflows.

    What is not finite becomes NaN.
    """
    wide = states.float()
    finite = wide.isfinite()
    largest = torch.where(finite, wide, 0.0).abs().amax(-1)
    # largest = (1 + fraction) * 2 ** power; 448 = 1.75 * 2 ** 8
    bits = largest.view(torch.int32)
    power, fraction = (bits >> 23) - 127, bits & 0x7FFFFF
    exponents = (power - 8 + (fraction > 0x600000).int()).clamp(LEAST_EXPONENT, 120)
    scaled = torch.ldexp(wide, -exponents[..., None])
    scaled = torch.where(finite, scaled.clamp(-LARGEST, LARGEST), float("nan"))
    return Packed(scaled.to(CODES), exponents.to(torch.int8))


def unpack(codes: torch.Tensor, exponents: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The vectors in `dtype`; `exponents` is `None` where `codes` are no codes, but the vectors themselves."""
    if exponents is None:
        return codes.to(dtype)
    return torch.ldexp(codes.float(), exponents[..., None].int()).to(dtype)
