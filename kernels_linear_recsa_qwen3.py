"""One token through Qwen3's linear layers: every weight is read once, at the rate of the memory.

A decoding step of one row spends most of its time on weights. The library's products of a matrix and a vector reach a
tenth of the memory's rate where a matrix is small (keys, values) and need a launch each; here the three projections
are one launch, gate, up and activation another, and the residual is added on the way out. Sums are float32 and results
are rounded where Qwen3's modules round. [our decision]
"""

import torch

from .kernels_common_recsa_qwen3 import tl, triton

# Rows of a weight that one program multiplies, and columns at a time.
_ROWS, _COLUMNS = 2, 1024


@triton.jit
def _multiply(STATES, WEIGHT, o_n, rows, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products `[BN]` float32 of these rows of a weight `[rows, K]` and the states `[K]`."""
    total = tl.zeros([BN, BK], tl.float32)
    base = WEIGHT + o_n.to(tl.int64)[:, None] * K
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        mask = (o_n < rows)[:, None] & (o_k < K)[None, :]
        weight = tl.load(base + o_k[None, :], mask=mask, other=0.0).to(tl.float32)
        states = tl.load(STATES + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        total += weight * states[None, :]
    return tl.sum(total, 1)


@triton.jit
def project_kernel(
    STATES, QUERY_WEIGHT, KEY_WEIGHT, VALUE_WEIGHT, OUTPUT, query_rows, key_rows,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """OUTPUT: the products with three weights, of `query_rows`, `key_rows` and `key_rows` rows, one after another."""
    block = tl.program_id(0)
    query_blocks = tl.cdiv(query_rows, BN)
    key_blocks = tl.cdiv(key_rows, BN)
    if block < query_blocks:
        o_n = block * BN + tl.arange(0, BN)
        product = _multiply(STATES, QUERY_WEIGHT, o_n, query_rows, K, BN, BK)
        tl.store(OUTPUT + o_n, product, mask=o_n < query_rows)
    elif block < query_blocks + key_blocks:
        o_n = (block - query_blocks) * BN + tl.arange(0, BN)
        product = _multiply(STATES, KEY_WEIGHT, o_n, key_rows, K, BN, BK)
        tl.store(OUTPUT + query_rows + o_n, product, mask=o_n < key_rows)
    else:
        o_n = (block - query_blocks - key_blocks) * BN + tl.arange(0, BN)
        product = _multiply(STATES, VALUE_WEIGHT, o_n, key_rows, K, BN, BK)
        tl.store(OUTPUT + query_rows + key_rows + o_n, product, mask=o_n < key_rows)


@triton.jit
def gate_kernel(STATES, GATE, UP, OUTPUT, rows, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    dtype = OUTPUT.dtype.element_ty
    gate = _multiply(STATES, GATE, o_n, rows, K, BN, BK).to(dtype).to(tl.float32)
    up = _multiply(STATES, UP, o_n, rows, K, BN, BK).to(dtype).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(OUTPUT + o_n, active * up, mask=o_n < rows)


@triton.jit
def add_product_kernel(STATES, WEIGHT, RESIDUAL, OUTPUT, rows, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    product = _multiply(STATES, WEIGHT, o_n, rows, K, BN, BK).to(OUTPUT.dtype.element_ty).to(tl.float32)
    residual = tl.load(RESIDUAL + o_n, mask=o_n < rows, other=0.0).to(tl.float32)
    tl.store(OUTPUT + o_n, residual + product, mask=o_n < rows)


def project(states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Products of one token with the weights of queries, keys and values.

    Args:
        states: `[1, 1, hidden]`, float16, bfloat16 or float32.
        query, key, value: `[H * D, hidden]`, `[H_kv * D, hidden]` twice, contiguous, in the same dtype.

    Returns:
        `[1, 1, H * D]`, `[1, 1, H_kv * D]` twice.
    """
    sizes = [len(query), len(key), len(value)]
    output = torch.empty(1, 1, sum(sizes), dtype=states.dtype, device=states.device)
    blocks = sum(triton.cdiv(size, _ROWS) for size in sizes)
    project_kernel[(blocks,)](
        states.contiguous(), query, key, value, output, len(query), len(key), K=query.shape[1], BN=_ROWS, BK=_COLUMNS
    )
    return list(output.split(sizes, dim=2))


def gated(states: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate x) * (up x): `[1, 1, hidden]` and two weights `[inner, hidden]` to `[1, 1, inner]`."""
    output = torch.empty(1, 1, len(gate), dtype=states.dtype, device=states.device)
    gate_kernel[(triton.cdiv(len(gate), _ROWS),)](
        states.contiguous(), gate, up, output, len(gate), K=gate.shape[1], BN=_ROWS, BK=_COLUMNS
    )
    return output


def add_product(states: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + weight x: `[1, 1, inner]`, `[hidden, inner]` and `[1, 1, hidden]` to `[1, 1, hidden]`."""
    output = torch.empty_like(residual)
    add_product_kernel[(triton.cdiv(len(weight), _ROWS),)](
        states.contiguous(), weight, residual.contiguous(), output, len(weight),
        K=weight.shape[1], BN=_ROWS, BK=_COLUMNS,
    )  # fmt: skip
    return output
