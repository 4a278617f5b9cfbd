"""What poolers learn from: dense attention's mass on each node against what queries make of the node's key.

Teacher: the softmax of dense attention over the tokens that a query reads, from the same queries and keys with RoPE at
their true positions, summed over each node's tokens. Student: the softmax of the candidates' logits at each level of
the query's own walk, and over all nodes at the levels above it. The loss is KL(teacher || student); gradients reach
poolers only. [paper: distilled from dense attention; form: our decision]
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import maybe_autocast

from .attention_recsa_qwen3 import OperatorCall, rotate
from .tree_recsa_qwen3 import RecSAPooler, TreeGeometry, build_levels

# Elements of the dense attention of a block of sampled queries (256 MiB in float32).
_BLOCK_ELEMENTS = 1 << 26


class Distillation(NamedTuple):
    """What `distillation_loss` returns.

    Attributes:
        loss: sum of `levels`, a scalar in the accumulation dtype.
        levels: level (>= 1) -> KL in nats, the mean over query heads and sampled queries with two nodes or more there.
    """

    loss: torch.Tensor
    levels: dict[int, torch.Tensor]


def distillation_loss(
    query: torch.Tensor,
    key: torch.Tensor,
    pooler: RecSAPooler,
    geometry: TreeGeometry,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    teacher_rope: tuple[torch.Tensor, torch.Tensor],
    *,
    scaling: float | None = None,
    block_elements: int | None = None,
) -> Distillation:
    """KL of one layer at sampled queries; neither N x N nor anything of size N per query is alive beyond a block.

    Args:
        query: before RoPE, `[S, H, N, D]`; whole sequences from their first token on.
        key: before RoPE, `[S, H_kv, N, D]`.
        pooler: the layer's, which the gradient goes to.
        geometry: r, k, s, M of the student.
        positions: of the sampled queries, `[S, n]` int64; -1 where a row has fewer.
        rope: the student's cos and sin `[>= M, D]`, float32.
        teacher_rope: the teacher's `[>= N, D]`, float32: ordinary, or YaRN beyond the training length.
        scaling: factor on the logits, D ** -0.5 by default.
        block_elements: most elements of the teacher's attention at one time.

    Raises:
        ValueError: `top_k=None`, positions outside the sequences, or no query that has two nodes at any level.
    """
    sequences, _, tokens, head_dim = query.shape
    if geometry.top_k is None:
        raise ValueError("recsa_top_k=None: dense attention has no selection to distil; set recsa_top_k.")
    if positions.shape[0] != sequences or positions.dim() != 2:
        raise ValueError(f"positions: shape {list(positions.shape)}, must be [{sequences}, queries].")
    sampled = [row[row >= 0] for row in positions.cpu()]
    last = max((int(row.max()) for row in sampled if len(row)), default=-1)
    if int(positions.min()) < -1 or last >= tokens:
        raise ValueError(f"positions: must be -1 or in 0 ... {tokens - 1}, got {int(positions.min())} ... {last}.")
    highest = _highest_level(last, geometry)
    if highest == 0:
        first = 2 * geometry.branching
        raise ValueError(f"positions: none has two nodes at a level; sample from position {first} on.")
    query, key = query.detach(), key.detach()
    scaling = head_dim**-0.5 if scaling is None else scaling
    with maybe_autocast(query.device.type, enabled=False):
        # no value is read: those of the tree have no width
        levels = build_levels(key, key[..., :0], pooler, geometry.branching, highest)
        call = OperatorCall(query, levels, (0,) * sequences, (tokens,) * sequences, geometry, rope, scaling, 0.0)
        teacher = _Teacher(call, key, teacher_rope)
        width = max((block_elements or _BLOCK_ELEMENTS) // (query.shape[1] * tokens), 1)
        sums: dict[int, list[torch.Tensor]] = {}
        counts: dict[int, int] = {}
        for row, depth, on_host in _blocks(sampled, geometry, width):
            block = on_host.to(query.device)

            def block_sums(row=row, depth=depth, block=block) -> tuple[torch.Tensor, ...]:
                return tuple(_block_kl(call, teacher, row, depth, block, highest))

            found = checkpoint(block_sums, use_reentrant=False) if torch.is_grad_enabled() else block_sums()
            for level, total in enumerate(found, 1):
                sums.setdefault(level, []).append(total)
                counts[level] = counts.get(level, 0) + int((on_host // geometry.branching**level >= 2).sum())
    heads = query.shape[1]
    means = {level: torch.stack(sums[level]).sum() / (counts[level] * heads) for level in sums if counts[level]}
    return Distillation(torch.stack(list(means.values())).sum(), means)


def _highest_level(position: int, geometry: TreeGeometry) -> int:
    """The highest level at which a query has two complete nodes besides its path; 0 where there is none."""
    level = 0
    while position // geometry.branching ** (level + 1) >= 2:
        level += 1
    return level


def _blocks(
    sampled: list[torch.Tensor], geometry: TreeGeometry, width: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(row, depth, positions): queries of one row that start their walk at the same level, at most `width`."""
    for row, positions in enumerate(sampled):
        by_depth: dict[int, list[int]] = {}
        for position in positions.tolist():
            by_depth.setdefault(geometry.depth(position), []).append(position)
        for depth, found in by_depth.items():
            for part in torch.tensor(found).split(width):
                yield row, depth, part


class _Teacher:
    """Dense attention from the operator's own queries and keys."""

    def __init__(self, call: OperatorCall, key: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]):
        self.call = call
        self.cos, self.sin = (table.to(call.dtype) for table in rope)
        tokens = key.shape[2]
        self.key = rotate(key.to(call.dtype), self.cos[:tokens], self.sin[:tokens])

    @torch.no_grad()
    def masses(self, query: torch.Tensor, row: int, positions: torch.Tensor, highest: int) -> list[torch.Tensor]:
        """What queries `[1, H_kv, w, G, D]` give to the nodes of levels 1 ... highest, each `[1, H_kv, w, G, n_l]`."""
        r, tokens = self.call.geometry.branching, int(positions.max()) + 1
        at = positions[:, None]
        query = rotate(query, self.cos[at], self.sin[at])
        logits = (query.flatten(2, 3) @ self.key[row : row + 1, :, :tokens].transpose(-1, -2)).unflatten(
            2, query.shape[2:4]
        ) * self.call.scaling
        unread = torch.arange(tokens, device=at.device) > at
        mass = torch.softmax(logits.masked_fill(unread[:, None], float("-inf")), -1)
        masses = []
        for _ in range(highest):
            mass = F.pad(mass, (0, -mass.shape[-1] % r)).unflatten(-1, (-1, r)).sum(-1)
            masses.append(mass)
        return masses


def _block_kl(
    call: OperatorCall, teacher: _Teacher, row: int, depth: int, positions: torch.Tensor, highest: int
) -> list[torch.Tensor]:
    """Sums of KL over heads and queries, for levels 1 ... highest."""
    query = call.query[row : row + 1, :, positions].to(call.dtype)
    position = positions[None, None]
    masses = teacher.masses(query, row, positions, highest)
    sums = []
    for level in range(highest, depth, -1):  # above the walk a query would see every node
        path = position // call.geometry.branching**level
        nodes = call.states("keys", level, int(path.max()), [row], call.dtype)
        logits = call.logits(query, nodes, path + 1, level)
        scored = torch.arange(logits.shape[-1], device=logits.device) < path[..., None]
        sums.append(_kl(masses[level - 1][..., : logits.shape[-1]], logits, scored))
    if depth:
        for at in call.walk([row], query, position, depth):
            mass = masses[at.level - 1]
            if at.nodes is None:
                mass = mass[..., : at.logits.shape[-1]]
            else:
                # candidates beyond the last token are not scored
                index = at.nodes.clamp(max=mass.shape[-1] - 1)
                mass = mass.gather(-1, index[..., None, :].expand_as(at.logits))
            sums.append(_kl(mass, at.logits, at.scored))
            if at.level == 1:
                break
    return sums[::-1]


def _kl(mass: torch.Tensor, logits: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Sum over heads and queries of KL(mass || softmax(logits)), both over the scored candidates: two at least."""
    scored = scored[..., None, :]
    mass = mass.masked_fill(~scored, 0.0)
    share = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    student = torch.log_softmax(logits.masked_fill(~scored, float("-inf")), -1)
    terms = torch.xlogy(share, share) - share * student.masked_fill(~scored, 0.0)
    return terms.sum(-1).masked_fill(scored.sum(-1) < 2, 0.0).sum()
