"""What poolers learn from: dense attention's mass on each node against what queries make of the node's key.

Teacher: the softmax of dense attention over the tokens that a query reads, from the same queries and keys with RoPE at
their true positions, summed over each node's tokens. Student: the softmax of the candidates' logits at each level of
the query's own walk, and over all nodes at the levels above it. The loss is KL(teacher || student); gradients reach
poolers only. [paper: distilled from dense attention; form: our decision]
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import maybe_autocast

from .attention_recsa_qwen3 import OperatorCall, rotary_tables, rotate
from .configuration_recsa_qwen3 import TRAINED_TOKENS, RecSAQwen3Config
from .sampling_recsa_qwen3 import SampledQueries
from .tree_recsa_qwen3 import RecSAPooler, TreeGeometry, accumulation_dtype, build_levels

# Elements of the dense attention of a block of sampled queries (512 MiB in float32).
_BLOCK_ELEMENTS = 1 << 27


class Distillation(NamedTuple):
    """What `distillation_loss` returns.

    Attributes:
        loss: sum of `levels`, a scalar in the accumulation dtype.
        levels: level (>= 1) -> KL in nats, the (weighted) mean over query heads and sampled queries with two nodes or
            more there.
    """

    loss: torch.Tensor
    levels: dict[int, torch.Tensor]


def layer_loss(
    query: torch.Tensor,
    key: torch.Tensor,
    pooler: RecSAPooler,
    config: RecSAQwen3Config,
    lengths: Sequence[int],
    sampled: SampledQueries,
    scaling: float,
) -> torch.Tensor:
    """The distillation loss of one layer in training; until backward it keeps the keys and the sampled queries alone.

    Args:
        query, key: before RoPE, `[S, H, N, D]` and `[S, H_kv, N, D]`; whole sequences.
        pooler: the layer's, which the gradient goes to.
        config: the model's.
        lengths: tokens of each sequence, S ints.
        sampled: at which queries.
        scaling: factor on the logits.

    Returns:
        A scalar; without a query, a zero that every parameter of the pooler takes part in.

    Raises:
        ValueError: tensor parallelism, where each process would sample its own queries; or as `teacher_tables`.
    """
    if pooler.mesh is not None:
        raise ValueError(
            "recsa_distill_weight: not available under tensor parallelism; use DDP or FSDP, or set it to 0."
        )
    if not sampled.shares:
        return zero_of(pooler, key, config.recsa_branching)
    geometry = TreeGeometry.from_config(config)
    rope = rotary_tables(config, key.device, geometry.top_capacity)
    teacher_rope = teacher_tables(config, key.device, lengths)
    query, key = query.detach(), key.detach()

    def score(strategy: str, positions: torch.Tensor) -> torch.Tensor:
        pool = queries_at(query, positions)
        return far_scores(pool, key, positions, teacher_rope, geometry.branching, strategy, scaling=scaling)

    positions, weights = sampled.choose(score)

    def loss(queries: torch.Tensor) -> torch.Tensor:
        return distillation_loss(
            queries, key, pooler, geometry, positions, rope, teacher_rope, weights=weights, scaling=scaling
        ).loss

    return _recomputed(loss, queries_at(query, positions))


def zero_of(pooler: RecSAPooler, like: torch.Tensor, branching: int) -> torch.Tensor:
    """A zero made of a node of zeros, so that every parameter of a pooler has the gradient that DDP waits for."""
    return pooler(like.new_zeros(1, like.shape[1], 1, branching, like.shape[-1]))[1].sum()


def queries_at(query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of queries `[S, H, N, D]` those at `positions` `[S, n]`, `[S, H, n, D]`; any of them where it is -1."""
    index = positions.clamp(min=0).to(query.device, non_blocking=True)[:, None, :, None]
    return query.gather(2, index.expand(-1, query.shape[1], -1, query.shape[3]))


def teacher_tables(
    config: RecSAQwen3Config, device: torch.device, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin of the dense teacher: ordinary up to `recsa_trained_length` tokens, YaRN in longer sequences.

    YaRN's factor is a sequence's length by the trained one; all else is as in Qwen3 (transformers' defaults).
    [our decision]

    Returns:
        `[>= N, D]` float32, or `[S, N, D]` where sequences need different ones; N = max(lengths).

    Raises:
        ValueError: a longer sequence, and RoPE that is neither plain nor YaRN already.
    """
    trained = config.recsa_trained_length or TRAINED_TOKENS
    longest = max(lengths)
    tables = {
        stretched: rotary_tables(_teacher_config(config, stretched, trained), device, longest)
        for stretched in sorted({length if length > trained else 0 for length in lengths})
    }
    if len(tables) == 1:
        return next(iter(tables.values()))
    of_sequence = [tables[length if length > trained else 0] for length in lengths]
    cos, sin = (torch.stack([table[which][:longest] for table in of_sequence]) for which in (0, 1))
    return cos, sin


def _teacher_config(config: RecSAQwen3Config, stretched: int, trained: int) -> RecSAQwen3Config:
    """The configuration with the RoPE of a sequence of `stretched` tokens; as it is for 0."""
    if not stretched:
        return config
    edited = copy.copy(config)
    edited.rope_parameters = yarn_parameters(config.rope_parameters, stretched, trained)
    return edited


def yarn_parameters(rope_parameters: dict[str, Any], tokens: int, trained: int) -> dict[str, Any]:
    """Qwen3's `rope_parameters` with YaRN for sequences of `tokens` tokens, more than the `trained` ones.

    The factor is exactly tokens / trained (or by the original length of a checkpoint that has YaRN already).

    Raises:
        ValueError: RoPE that is neither plain nor YaRN.
    """
    rope = dict(rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"rope_parameters: {tokens} tokens would need YaRN on top of rope_type {kind!r}; use shorter sequences, "
            f"or set the trained length (recsa_trained_length, now {trained}) to what the backbone was trained on."
        )
    original = rope.get("original_max_position_embeddings") or trained
    rope.pop("attention_factor", None)  # goes with the factor
    return rope | {"rope_type": "yarn", "factor": tokens / original, "original_max_position_embeddings": original}


def distillation_loss(
    query: torch.Tensor,
    key: torch.Tensor,
    pooler: RecSAPooler,
    geometry: TreeGeometry,
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    teacher_rope: tuple[torch.Tensor, torch.Tensor],
    *,
    weights: torch.Tensor | None = None,
    scaling: float | None = None,
    block_elements: int | None = None,
) -> Distillation:
    """KL of one layer at sampled queries; neither N x N nor anything of size N per query is alive beyond a block.

    Args:
        query: of the sampled positions, before RoPE, `[S, H, n, D]`.
        key: before RoPE, `[S, H_kv, N, D]`; whole sequences from their first token on.
        pooler: the layer's, which the gradient goes to.
        geometry: r, k, s, M of the student.
        positions: of the sampled queries, `[S, n]` int64; -1 where a row has fewer. Best on the host, which plans.
        rope: the student's cos and sin `[>= M, D]`, float32.
        teacher_rope: the teacher's, float32, `[>= N, D]` or for each sequence `[S, >= N, D]`: ordinary, or YaRN beyond
            the training length.
        weights: of the sampled queries in each level's mean, `[S, n]`; equal where `None`.
        scaling: factor on the logits, D ** -0.5 by default.
        block_elements: most elements of the teacher's attention at one time.

    Raises:
        ValueError: `top_k=None`, positions outside the sequences, or no query that has two nodes at any level.
    """
    sequences, heads, _, head_dim = query.shape
    tokens = key.shape[2]
    if geometry.top_k is None:
        raise ValueError("recsa_top_k=None: dense attention has no selection to distil; set recsa_top_k.")
    if positions.shape != (sequences, query.shape[2]):
        raise ValueError(f"positions: shape {list(positions.shape)}, must be [{sequences}, {query.shape[2]}].")
    positions = positions.cpu()
    first, last = (int(bound(positions)) if positions.numel() else -1 for bound in (torch.min, torch.max))
    if first < -1 or last >= tokens:
        raise ValueError(f"positions: must be -1 or in 0 ... {tokens - 1}, got {first} ... {last}.")
    highest = _highest_level(last, geometry.branching)
    if highest == 0:
        raise ValueError(f"positions: none has two nodes at a level; sample from {2 * geometry.branching} on.")
    weights = torch.ones(positions.shape, dtype=torch.float64) if weights is None else weights.double().cpu()
    query, key = query.detach(), key.detach()
    scaling = head_dim**-0.5 if scaling is None else scaling
    with maybe_autocast(query.device.type, enabled=False):
        # no value is read: those of the tree have no width
        levels = build_levels(key, key[..., :0], pooler, geometry.branching, highest)
        call = OperatorCall(query, levels, (0,) * sequences, (tokens,) * sequences, geometry, rope, scaling, 0.0)
        teacher = Teacher(key, teacher_rope, scaling, call.dtype)
        sums: list[list[torch.Tensor]] = [[] for _ in range(highest)]
        walks = _walk_depths(positions, geometry)
        for level in range(1, int(walks.max())):  # those whose nodes queries gather
            call.rotated[level] = call._rotate_siblings(
                call.states("keys", level, levels.keys[level].shape[2], list(range(sequences)), call.dtype)
            )
        for block in blocks(positions, walks, weights, heads * tokens, block_elements):
            own = block.on(query.device)
            queries = call.query[own.rows[:, None], :, own.columns].transpose(1, 2).to(call.dtype)
            masses = teacher.masses(queries, block, own, geometry.branching)

            def block_sums(masses, block=block, own=own, queries=queries):
                return tuple(_block_kl(call, block, own, queries, masses))

            for level, total in enumerate(_recomputed(block_sums, masses)):
                sums[level].append(total)
    means = {}
    for level, found in enumerate(sums, 1):
        total_weight = weights[positions // geometry.branching**level >= 2].sum().item()
        means[level] = torch.stack(found).sum() / (total_weight * heads)
    return Distillation(torch.stack(list(means.values())).sum(), means)


def far_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    teacher_rope: tuple[torch.Tensor, torch.Tensor],
    branching: int,
    strategy: str,
    *,
    scaling: float | None = None,
    block_elements: int | None = None,
) -> torch.Tensor:
    """How much of dense attention goes far, a sign without labels that a query looks something up. [our decision]

    Far are the tokens further back than a quarter of the query's context; the first r are not counted, where heads put
    what they have no use for.

    Args:
        query, key, positions, teacher_rope, scaling, block_elements: as for `distillation_loss`.
        branching: r.
        strategy: "far_mass", the share of attention that goes to far tokens, the mean over heads; or "peak", the
            greatest that any head gives to one of them.

    Returns:
        `[S, n]` in the accumulation dtype; zero at positions of -1.
    """
    heads, tokens, head_dim = query.shape[1], key.shape[2], query.shape[3]
    dtype = accumulation_dtype(query.dtype)
    teacher = Teacher(key, teacher_rope, head_dim**-0.5 if scaling is None else scaling, dtype)
    grouped = query.unflatten(1, (key.shape[1], -1)).transpose(2, 3)
    scores = torch.zeros(positions.shape, dtype=dtype, device=query.device)
    positions = positions.cpu()
    weights = torch.ones(positions.shape)
    with torch.no_grad(), maybe_autocast(query.device.type, enabled=False):
        for block in blocks(positions, positions.clamp(max=0), weights, heads * tokens, block_elements):
            own = block.on(query.device)
            queries = grouped[own.rows[:, None], :, own.columns].transpose(1, 2).to(dtype)
            mass = teacher.attention(queries, block, own)
            mass = mass.masked_fill(~far_tokens(own.positions, block.last + 1, branching)[:, None, :, None], 0.0)
            found = mass.sum(-1).mean((1, 3)) if strategy == "far_mass" else mass.amax((1, 3, 4))
            # a column that fills a block up stands for a real one, and finds the same
            scores[own.rows[:, None], own.columns] = found
    return scores


def far_tokens(positions: torch.Tensor, tokens: int, branching: int) -> torch.Tensor:
    """Which tokens are far from queries at `positions` `[...]`, see `far_scores`: `[..., tokens]` bool."""
    token = torch.arange(tokens, device=positions.device)
    return (token >= branching) & (token < (positions - positions // 4)[..., None])


def _recomputed(function, *tensors):
    """A call whose intermediate results are not kept until backward; nothing random is inside."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _highest_level(position: int, branching: int) -> int:
    """The highest level at which a query has two complete nodes besides its path; 0 where there is none."""
    level = 0
    while position // branching ** (level + 1) >= 2:
        level += 1
    return level


def _walk_depths(positions: torch.Tensor, geometry: TreeGeometry) -> torch.Tensor:
    """From which level queries walk, 0 where they see all nodes of every level >= 1; -1 where there is nothing."""
    depths = geometry.depths(positions)
    return depths.masked_fill(depths == 1, 0).masked_fill(positions < 2 * geometry.branching, -1)


class BlockOperands(NamedTuple):
    """A block's indices on the device of the queries: `[S']`, and three of `[S', w]`."""

    rows: torch.Tensor
    columns: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


class Block(NamedTuple):
    """Queries that walk from the same level.

    Attributes:
        walk: that level, 0 = they see all nodes.
        members: their sequences, S'.
        columns: which of the sampled queries, `[S', w]` on the host.
        positions, weights: of these, `[S', w]`; where a sequence has fewer, its first one again with weight 0.
        last: the greatest position.
    """

    walk: int
    members: list[int]
    columns: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    last: int

    def on(self, device: torch.device) -> BlockOperands:
        parts = (torch.tensor(self.members), self.columns, self.positions, self.weights)
        return BlockOperands(*(part.to(device, non_blocking=True) for part in parts))


def blocks(
    positions: torch.Tensor, walks: torch.Tensor, weights: torch.Tensor, per_query: int, elements: int | None = None
) -> Iterator[Block]:
    """Sampled queries `[S, n]` in blocks of equal `walks` (>= 0); `elements` bounds those of a block's attention."""
    most = max((elements or _BLOCK_ELEMENTS) // per_query, 1)
    beyond = torch.iinfo(torch.long).max
    for walk in sorted(set(walks[walks >= 0].tolist())):
        mine = walks == walk
        # in the order of their positions, so that a block reads no more tokens than it must
        order = torch.where(mine, positions, beyond).argsort(dim=1, stable=True)
        counts = mine.sum(1)
        rows = counts.nonzero()[:, 0]
        width = min(int(counts.max()), most)
        for members in rows.split(max(most // width, 1)):
            for begin in range(0, int(counts[members].max()), width):
                place = torch.arange(begin, min(begin + width, int(counts[members].max())))
                real = place < counts[members, None]
                columns = torch.where(real, order[members][:, place], order[members, :1])
                at = positions[members].gather(1, columns)
                weight = weights[members].gather(1, columns).masked_fill(~real, 0.0)
                yield Block(walk, members.tolist(), columns, at, weight, int(at.max()))


class Teacher:
    """Dense attention over keys before RoPE, `[S, H_kv, N, D]`."""

    def __init__(self, key: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], scaling: float, dtype: torch.dtype):
        # [1 or S, N, D]
        self.cos, self.sin = (table[..., : key.shape[2], :].to(dtype).reshape(-1, *key.shape[2:]) for table in rope)
        self.scaling = scaling
        with torch.no_grad():
            self.key = rotate(key.to(dtype), self.cos[:, None], self.sin[:, None])

    @torch.no_grad()
    def attention(self, query: torch.Tensor, block: Block, own: BlockOperands) -> torch.Tensor:
        """What queries `[S', H_kv, w, G, D]` give to the tokens up to the block's last, `[S', H_kv, w, G, n]`."""
        members, at, last = block.members, own.positions, block.last
        table = (own.rows if len(self.cos) > 1 else torch.zeros_like(own.rows))[:, None]
        query = rotate(query, self.cos[table, at][:, None, :, None], self.sin[table, at][:, None, :, None])
        if len(members) == members[-1] + 1 - members[0]:  # side by side: no copy
            key = self.key[members[0] : members[-1] + 1, :, : last + 1]
        else:
            key = self.key[:, :, : last + 1].index_select(0, own.rows)
        logits = (query.flatten(2, 3) @ key.transpose(-1, -2)).mul_(self.scaling).unflatten(2, query.shape[2:4])
        unread = torch.arange(last + 1, device=at.device) > at[..., None]
        return torch.softmax(logits.masked_fill_(unread[:, None, :, None], float("-inf")), -1)

    def masses(self, query: torch.Tensor, block: Block, own: BlockOperands, branching: int) -> list[torch.Tensor]:
        """The same summed over the nodes of levels 1, 2, ... that some query has two of, each `[..., n_l]`."""
        mass = self.attention(query, block, own)
        masses = []
        for _ in range(_highest_level(block.last, branching)):
            mass = F.pad(mass, (0, -mass.shape[-1] % branching)).unflatten(-1, (-1, branching)).sum(-1)
            masses.append(mass)
        return masses


def _block_kl(
    call: OperatorCall, block: Block, own: BlockOperands, query: torch.Tensor, masses: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Weighted sums of KL over heads and queries `[S', H_kv, w, G, D]`, for levels 1, 2, ... as in `masses`."""
    position = own.positions[:, None]
    weight = own.weights[:, None, :, None].to(query.dtype)
    sums = []
    for level in range(len(masses), block.walk, -1):  # above the walk a query would see every node
        path = position // call.geometry.branching**level
        nodes = call.states("keys", level, block.last // call.geometry.branching**level, block.members, call.dtype)
        logits = call.logits(query, nodes, path + 1, level)
        scored = torch.arange(logits.shape[-1], device=logits.device) < path[..., None]
        sums.append(_kl(masses[level - 1][..., : logits.shape[-1]], logits, scored, weight))
    if block.walk:
        for at in call.walk(block.members, query, position, block.walk):
            mass = masses[at.level - 1]
            if at.nodes is None:
                mass = mass[..., : at.logits.shape[-1]]
            else:
                # candidates beyond the last token are not scored
                index = at.nodes.clamp(max=mass.shape[-1] - 1)
                mass = mass.gather(-1, index[..., None, :].expand_as(at.logits))
            sums.append(_kl(mass, at.logits, at.scored, weight))
            if at.level == 1:
                break
    return sums[::-1]


def _kl(mass: torch.Tensor, logits: torch.Tensor, scored: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over heads and queries of KL(mass || softmax(logits)), both over the scored candidates: two at least."""
    scored = scored[..., None, :]
    mass = mass.masked_fill(~scored, 0.0)
    share = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    student = torch.log_softmax(logits.masked_fill(~scored, float("-inf")), -1)
    terms = torch.xlogy(share, share) - share * student.masked_fill(~scored, 0.0)
    return (terms.sum(-1).masked_fill(scored.sum(-1) < 2, 0.0) * weight).sum()
