"""Operands of one call of the operator, the same call to the float64 oracle, and how a selection is judged."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import oracle
from conftest import RELATIVE_RMS, relative_rms
from recsa_qwen3 import Levels, RecSAPooler, TreeGeometry, build_levels, recsa_attention
from recsa_qwen3.attention_recsa_qwen3 import RecSAOutput
from recsa_qwen3.rows_recsa_qwen3 import PendingRows, Rows

# (r, k, s, M)
GEOMETRIES = [(2, 2, 0, 4), (4, 2, 0, 8), (4, 4, 1, 16), (4, 4, 1, 48), (8, 4, 1, 32)]
# Largest importance by which a chosen candidate may lie below one left out, for float32 against float64.
IMPORTANCE_GAP = 1e-5


def rows_of_batch(*arguments, **named) -> Rows:
    """The sequences of a batch, waited for at once."""
    return PendingRows(*arguments, **named).read()


@contextmanager
def recorded_walks() -> Iterator[list[tuple[int, dict, dict]]]:
    """Collects (t, selection, importance) of every query that the oracle walks inside the block."""
    walks: list[tuple[int, dict, dict]] = []
    attend = oracle.attend

    def recording(q, levels, t, **options):
        result = attend(q, levels, t, **options)
        walks.append((t, result[1], result[3]))
        return result

    oracle.attend = recording
    try:
        yield walks
    finally:
        oracle.attend = attend


def importance_gap(walks: Sequence[tuple[int, dict, dict]], r: int, k: int, s: int) -> float:
    """Checks what each selection must hold, and returns by how much a choice fell short of the best one at most."""
    worst = 0.0
    for t, selection, importance in walks:
        for level, chosen in selection.items():
            others = list(importance[level])  # all candidates but the path node, in order
            forced = others[len(others) - s :] + [t // r**level]
            assert len(chosen) == k and set(forced) <= set(chosen)
            taken = [importance[level][node] for node in chosen if node not in forced]
            left = [importance[level][node] for node in others if node not in chosen]
            if taken and left:
                worst = max(worst, max(left) - min(taken))
    return worst


def selections_of(selection: dict[int, torch.Tensor], row: int, queries: int) -> list[list[dict[int, list[int]]]]:
    """One sequence's selection as the oracle takes it, [H_kv][T]: level -> nodes."""
    nodes = {level: chosen[row, :, :queries].tolist() for level, chosen in selection.items()}
    kv_heads = next(iter(selection.values())).shape[1] if selection else 0
    return [
        [{level: n[h][i] for level, n in nodes.items() if n[h][i][-1] >= 0} for i in range(queries)]
        for h in range(kv_heads)
    ]


@dataclasses.dataclass
class Case:
    """Random operands of one call of the operator, and the same call to the oracle."""

    geometry: TreeGeometry
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pooler: RecSAPooler
    rope: tuple[torch.Tensor, torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def levels(self) -> Levels:
        depth = self.geometry.depth(max(self.lengths) - 1)
        return build_levels(self.keys, self.values, self.pooler, self.geometry.branching, depth)

    def run(self, **options):
        options.setdefault("return_selection", True)
        return recsa_attention(
            options.pop("query", self.query),
            options.pop("levels", None) or self.levels(),
            self.starts,
            self.counts,
            self.geometry,
            self.rope,
            **options,
        )

    def oracle(self, row: int, selection: dict[int, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [H, T, D] and A [H, T, N] of one sequence's queries, given the selection or choosing itself."""
        start, count, g = self.starts[row], self.counts[row], self.geometry
        tokens = start + count
        rows = (
            self.query[row : row + 1, :, :count],
            *(t[row : row + 1, :, :tokens] for t in (self.keys, self.values)),
        )
        output, _, weights = oracle.attention(
            *(t.cpu() for t in (*rows, self.pooler.query, self.pooler.slot_bias, self.pooler.proj)),
            r=g.branching,
            k=g.top_k,
            s=g.recent,
            M=g.top_capacity,
            scaling=self.query.shape[-1] ** -0.5,
            cos=self.rope[0].cpu(),
            sin=self.rope[1].cpu(),
            count_bias=g.count_bias,
            positions=[range(start, tokens)],
            selections=None if selection is None else [selections_of(selection, row, count)] if selection else None,
        )
        return output[0], weights[0]


def make_case(
    starts: Sequence[int] = (0, 11, 70),
    counts: Sequence[int] = (23, 23, 23),
    *,
    r: int = 4,
    k: int | None = 3,
    s: int = 1,
    M: int = 12,
    count_bias: bool = False,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
) -> Case:
    geometry = TreeGeometry(r, k, s, M, count_bias)
    sequences, width = len(starts), max(counts)
    tokens = max(start + count for start, count in zip(starts, counts, strict=True))
    pooler = RecSAPooler(kv_heads, r, head_dim).double()
    with torch.no_grad():
        pooler.query.normal_()
        pooler.slot_bias.normal_()
        pooler.proj.normal_().mul_(head_dim**-0.5)
    return Case(
        geometry,
        tuple(starts),
        tuple(counts),
        torch.randn(sequences, heads, width, head_dim).to(dtype),
        torch.randn(sequences, kv_heads, tokens, head_dim).to(dtype),
        torch.randn(sequences, kv_heads, tokens, head_dim).to(dtype),
        pooler.to(dtype).requires_grad_(False),
        oracle.rope_tables(1e4, head_dim, range(max(M, tokens))),
    )


def check_case(case: Case, **options) -> RecSAOutput:
    """Output against the oracle given the same selection, zeros past each end, nothing unwritten."""
    result = case.run(**options)
    assert result.output.dtype == case.query.dtype and result.output.shape == case.query.shape
    for row, count in enumerate(case.counts):
        assert torch.all(result.output[row, :, count:] == 0)
        if count:
            expected, _ = case.oracle(row, result.selection)
            error = relative_rms(result.output[row, :, :count], expected)
            assert error <= RELATIVE_RMS[case.query.dtype], (row, error)
    return result


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers as a view of a larger buffer whose rest is NaN."""
    if how == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "columns":
        buffer = torch.full(
            (*tensor.shape[:3], tensor.shape[3] + 5), float("nan"), dtype=tensor.dtype, device=tensor.device
        )
        view = buffer[..., 2:-3]
    elif how == "strided":
        shape = (tensor.shape[0], tensor.shape[1], 2 * tensor.shape[2], tensor.shape[3])
        view = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)[:, :, ::2]
    else:
        shape = (tensor.shape[0] + 1, tensor.shape[1] + 1, tensor.shape[2] + 7, tensor.shape[3])
        view = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)[
            1:, :-1, 3 : 3 + tensor.shape[2]
        ]
    return view.copy_(tensor)
