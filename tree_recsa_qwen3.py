"""The tree over a layer's keys and values: its geometry, the pooler, and building nodes.

Level 0 holds tokens (keys after `k_norm`, before RoPE, and values); node i of level l + 1 covers nodes
i*r ... i*r + r - 1 of level l and exists only once all of them do. Which node covers which token is decided in
this file and nowhere else. It never touches queries, positions of queries, caches or RoPE.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits, softmax and means are computed: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TreeGeometry:
    """The numbers that fix which nodes exist and which level a query starts from.

    Attributes:
        branching: r, children per node.
        top_k: k, nodes selected per level, the path node included; `None` = dense attention at every length.
        recent: s, candidates just before the path node that are always selected.
        top_capacity: M, most candidates at the top level (`k * r` where the configuration says `None`).
        count_bias: adds l * ln(r) to the logits of level l.
    """

    branching: int
    top_k: int | None
    recent: int
    top_capacity: int
    count_bias: bool = False

    @classmethod
    def from_config(cls, config) -> "TreeGeometry":
        """Reads the `recsa_*` fields of a validated `RecSAQwen3Config`."""
        capacity = config.recsa_top_capacity
        if capacity is None:
            capacity = (config.recsa_top_k or 0) * config.recsa_branching
        return cls(config.recsa_branching, config.recsa_top_k, config.recsa_recent, capacity, config.recsa_count_bias)

    @property
    def max_candidates(self) -> int:
        """C = k * r, the most candidates at a level below the top."""
        return (self.top_k or 0) * self.branching

    def is_dense(self, position: int) -> bool:
        """Whether the query at this logical position attends to every token: t + 1 <= M, or no limit at all."""
        return self.top_k is None or position < self.top_capacity

    def depth(self, position: int) -> int:
        """The level at which a query's walk starts: the smallest l with ceil((t + 1) / r^l) <= M. [our decision]"""
        if self.is_dense(position):
            return 0
        level, nodes = 0, position + 1
        while nodes > self.top_capacity:
            level, nodes = level + 1, -(-nodes // self.branching)
        return level

    def depths(self, positions: torch.Tensor) -> torch.Tensor:
        """`depth` of each of the `positions`, on the host; 0 where one is negative."""
        depths, level = torch.zeros_like(positions), 1
        while self.top_k is not None and bool((above := positions >= self.first_position(level)).any()):
            depths += above
            level += 1
        return depths

    def first_position(self, depth: int) -> int:
        """The first logical position whose walk starts at `depth` or above it (depth >= 1)."""
        return self.top_capacity * self.branching ** (depth - 1)

    def candidates(self, position: int) -> list[int]:
        """Entries that the query at this logical position reads at each level of its walk, the top first."""
        depth = self.depth(position)
        numbers = [position // self.branching**depth + 1]
        for level in range(depth - 1, -1, -1):
            siblings = (
                position // self.branching**level % self.branching
            )  # children of the path parent before the path
            numbers.append(self.max_candidates - self.branching + siblings + 1)
        return numbers

    def node_counts(self, tokens: int) -> list[int]:
        """Complete nodes at each level, level 0 first, up to the last level that has any."""
        counts = [tokens]
        while counts[-1] >= self.branching:
            counts.append(counts[-1] // self.branching)
        return counts


class Levels(NamedTuple):
    """What the operator reads: per level a key and a value tensor `[S, H_kv, n_l, D]`, level 0 (tokens) first.

    Above level 0 the key is the pooler's read key and the value is the mean over the node's tokens. `n_l` may exceed
    the number of complete nodes of a row; entries beyond it are never read into a result. Below the
    highest level `n_l` is a multiple of r, so that siblings lie side by side. Where `exponents` of the keys and of the
    values (`[S, H_kv, n_0]` int8) are given, level 0 holds float8 codes (`float8_recsa_qwen3`).
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None


class Nodes(NamedTuple):
    """Freshly built nodes `[S, H_kv, n, D]`: what the recursion carries, what queries read, the mean value."""

    pooled: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over the processes of a group."""

    @staticmethod
    def forward(ctx, parameter, group):
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class RecSAPooler(nn.Module):
    r"""Makes the key of a node from the keys of its children; one per layer, the same for all levels. [paper]

    Form [our decision]: \(m_{parent} = \sum_i softmax_i(m_i \cdot query_h + slot\_bias_i) m_i\), m = key at level 0;
    the key that a query meets is \(proj_h \cdot m\) and never enters the recursion. At initialisation (query 0,
    slot_bias 0, proj identity) both are the plain mean.

    Args:
        num_key_value_heads: H_kv.
        branching: r.
        head_dim: D.

    Attributes:
        mesh: the processes that share the KV heads under tensor parallelism, else `None`. Each keeps all parameters
            and uses those of its own heads; their gradients are summed, so the parameters stay equal.
    """

    def __init__(self, num_key_value_heads: int, branching: int, head_dim: int):
        super().__init__()
        self.mesh = None
        self.query = nn.Parameter(torch.empty(num_key_value_heads, head_dim))
        self.slot_bias = nn.Parameter(torch.empty(branching))
        self.proj = nn.Parameter(torch.empty(num_key_value_heads, head_dim, head_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets the plain mean."""
        self.query.zero_()
        self.slot_bias.zero_()
        self.proj.copy_(torch.eye(self.proj.shape[-1], dtype=self.proj.dtype, device=self.proj.device))

    def forward(self, children: torch.Tensor, detach: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Pools sibling groups; accumulates in float32 (float64 for float64).

        All use of the parameters is in here: offloading and sharding bring them in for the length of one forward.

        Args:
            children: what the recursion carries, `[S, H_kv, n, r, D]`.
            detach: the parameters get no gradient; `children` does.

        Returns:
            What the recursion carries on and the keys that queries meet, each `[S, H_kv, n, D]`, in the input's dtype.

        Raises:
            ValueError: a tensor-parallel plan that splits the KV heads and leaves out the pooler.
        """
        query, slot_bias, proj = self.parameters_of_heads(children.shape[1])
        if detach:
            query, slot_bias, proj = query.detach(), slot_bias.detach(), proj.detach()
        dtype = accumulation_dtype(children.dtype)
        wide = children.to(dtype)
        scores = (wide * query.to(dtype)[:, None, None]).sum(-1) + slot_bias.to(dtype)
        pooled = (torch.softmax(scores, -1)[..., None] * wide).sum(-2).to(children.dtype)
        with maybe_autocast(children.device.type, enabled=False):
            keys = pooled.to(dtype) @ proj.to(dtype).transpose(-1, -2)
        return pooled, keys.to(children.dtype)

    def parameters_of_heads(self, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The query, slot_bias and proj of the `heads` KV heads that this process holds."""
        if heads == len(self.query):
            return self.query, self.slot_bias, self.proj
        if self.mesh is None:
            raise ValueError(
                f"tp_plan: splits the {len(self.query)} KV heads but not the pooler; "
                "keep the entry 'layers.*.self_attn.pooler' of the configuration's base_model_tp_plan."
            )
        group, first = self.mesh.get_group(), self.mesh.get_local_rank() * heads
        query, slot_bias, proj = (_SumGradients.apply(p, group) for p in (self.query, self.slot_bias, self.proj))
        return query[first : first + heads], slot_bias, proj[first : first + heads]


# A `RecSAPooler`, or one call of it with an option.
Pooler = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def build_nodes(pooler: Pooler, pooled: torch.Tensor, values: torch.Tensor, branching: int) -> Nodes:
    """Builds the parents of whole sibling groups.

    Args:
        pooler: the layer's pooler.
        pooled: what the recursion carries for the children, `[S, H_kv, n * r, D]`; at level 0 the keys.
        values: the children's (mean) values, same shape.
        branching: r.

    Returns:
        `Nodes` with n nodes, in the dtype of the input.
    """
    children = pooled.unflatten(2, (-1, branching))
    parents, keys = pooler(children)
    means = values.unflatten(2, (-1, branching)).to(accumulation_dtype(values.dtype)).mean(-2).to(values.dtype)
    return Nodes(parents, keys, means)


def build_levels(keys: torch.Tensor, values: torch.Tensor, pooler: Pooler, branching: int, depth: int) -> Levels:
    """Builds levels 0 ... depth over whole rows, differentiable in keys, values and pooler.

    Args:
        keys: level-0 keys before RoPE, `[S, H_kv, N, D]`; rows start at index 0, shorter rows end in finite padding.
        values: `[S, H_kv, N, D]`.
        pooler: the layer's pooler.
        branching: r.
        depth: the highest level needed.

    Returns:
        `Levels`; a level below `depth` is padded with zeros to a multiple of r.
    """
    pooled, means = keys.contiguous(), values.contiguous()
    level_keys, level_values = [pooled], [means]
    for _ in range(depth):
        whole = pooled.shape[2] // branching * branching
        nodes = build_nodes(pooler, pooled[:, :, :whole], means[:, :, :whole], branching)
        pooled, means = nodes.pooled, nodes.values
        level_keys.append(nodes.keys)
        level_values.append(nodes.values)

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = -tensor.shape[2] % branching
        return nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor

    return Levels(
        tuple(pad(tensor) for tensor in level_keys[:-1]) + (level_keys[-1],),
        tuple(pad(tensor) for tensor in level_values[:-1]) + (level_values[-1],),
    )
