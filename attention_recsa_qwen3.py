"""`recsa_attention`: the operator at the heart of RecSA, its PyTorch reference, and the choice of backend.

The reference is the definition: plain, vectorised over queries, blockwise (nothing of size N x N or N x M x heads is
ever alive), differentiable in queries, keys, values and, through them, the pooler. It reads level tensors and never
touches caches, padding or modules.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from .float8_recsa_qwen3 import unpack
from .tree_recsa_qwen3 import Levels, TreeGeometry, accumulation_dtype

# Triton may be missing, or fail in its own ways where there is no driver; the reference runs everywhere.
_kernels_error: Exception | None = None
try:
    from .kernels_backward_recsa_qwen3 import attend_with_gradients
    from .kernels_walk_recsa_qwen3 import TritonWalk, unsupported
except Exception as error:
    _kernels_error = error

logger = logging.get_logger(__name__)

# Elements that one temporary of the reference may hold: few enough to stay in a CPU's cache, enough to fill a GPU.
# `blocks` in benchmarks/bench_reference.json has the times that chose the CPU's value.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
# Elements of a level's keys that may be held rotated (256 MiB in float32).
_ROTATED_ELEMENTS = 1 << 26
# Elements of the token-level matrix that `return_weights` may build (4 GiB in float32).
_MAX_WEIGHTS = 1 << 30

# query [S, H, W, D], key and value [S, H_kv, P, D] (both rotated), mask [S, 1, W, P] bool or None (= causal)
# -> [S, H, W, D]
DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Selection = Mapping[int, torch.Tensor]


class RecSAOutput(NamedTuple):
    """What `recsa_attention` returns.

    Attributes:
        output: `[S, H, W, D]` in the dtype of the queries; zeros past a sequence's end.
        selection: level (>= 1) -> chosen nodes `[S, H_kv, W, k]` int64, ascending, -1 where a query chose none.
        weights: the token-level matrix A `[S, H, W, N]` in the accumulation dtype, or `None`. [paper]
        backend: what ran, joined by "+": "dense" for queries with t + 1 <= M, "reference" or "triton" for others.
    """

    output: torch.Tensor
    selection: dict[int, torch.Tensor] | None
    weights: torch.Tensor | None
    backend: str


_rotary_tables: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}


def rotary_tables(config, device: torch.device, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the positions 0 ... length - 1, made in float32 from integers, the attention factor included.

    Computed from the configuration at first use and shared, rather than kept in a buffer: a buffer would be cast by
    `model.half()` and be garbage after a load through the meta device.

    Args:
        config: any configuration that the installed `Qwen3RotaryEmbedding` accepts.
        device: where the tables go.
        length: positions needed.

    Returns:
        cos and sin, `[>= length, D]` float32.
    """
    fields = [config.rope_parameters, config.head_dim, config.max_position_embeddings]
    key = (str(device), json.dumps(fields, sort_keys=True, default=str))
    tables = _rotary_tables.get(key)
    if tables is None or len(tables[0]) < length:
        size = 1 << max(length - 1, 255).bit_length()
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            cos, sin = Qwen3RotaryEmbedding(config=config)(
                torch.empty(0, dtype=torch.float32), torch.arange(size)[None]
            )
        tables = (cos[0].to(device), sin[0].to(device))
        if type(tables[0]) is torch.Tensor:  # tensors of a tracing run must not outlive it
            while len(_rotary_tables) >= 16:
                _rotary_tables.pop(next(iter(_rotary_tables)))
            _rotary_tables[key] = tables
    return tables


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the dtype of `states` (`[..., D]`, tables broadcast), halves paired as in Qwen3."""
    first, second = states.chunk(2, -1)
    return states * cos.to(states.dtype) + torch.cat((-second, first), -1) * sin.to(states.dtype)


def recsa_attention(
    query: torch.Tensor,
    levels: Levels,
    starts: Sequence[int],
    counts: Sequence[int],
    geometry: TreeGeometry,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    scaling: float | None = None,
    dense_attention: DenseAttention | None = None,
    dropout: float = 0.0,
    selection: Selection | None = None,
    return_selection: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
    training: bool = False,
    block_elements: int | None = None,
) -> RecSAOutput:
    """Recursive Sparse Attention of new queries over the tokens of their own sequences.

    Sequence s has `starts[s]` older tokens; its queries j = 0 ... counts[s] - 1 stand at logical positions
    t = starts[s] + j, and `levels` already holds all starts[s] + counts[s] tokens. A query with t + 1 <= M attends
    densely; any other walks the tree from `geometry.depth(t)` down to the tokens. [paper; limits: our decision]

    Args:
        query: before RoPE, `[S, H, W, D]`, W >= max(counts).
        levels: keys before RoPE and values per level, `[S, H_kv, n_l, D]`, up to the depth of the last query.
        starts, counts: S ints each.
        geometry: r, k, s, M.
        rope: cos and sin tables `[>= M, D]` (all positions where `top_k` is `None`), float32.
        scaling: factor on the logits, D ** -0.5 by default.
        dense_attention: runs the dense queries; scaled_dot_product_attention by default.
        dropout: probability with which attention weights are dropped, within each level.
        selection: chosen nodes per level as returned before, instead of choosing.
        return_selection: also returns the chosen nodes.
        return_weights: also returns the token-level matrix A; for short inputs.
        backend: "reference", "triton", or "auto": the kernels on a CUDA device, where they can do what is asked, else
            the reference, with one notice a reason where there is such a device. [our decision]
        training: the kernels compute without gradients as they do with them, so that a forward that checkpointing
            computes twice chooses alike.
        block_elements: most elements of one temporary; by device where `None`.

    Returns:
        `RecSAOutput`.

    Raises:
        ValueError: a backend that is not available or cannot do this, a selection that does not fit the tree, or a
            matrix A that is too large.
    """
    check_backend(backend)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    job = OperatorCall(query, levels, tuple(starts), tuple(counts), geometry, rope, scaling, dropout)
    job.block_elements = block_elements or _BLOCK_ELEMENTS.get(query.device.type, 1 << 22)
    job.given = selection
    if prefers_kernels(backend, query.device):
        lack = _lack_of_kernels(query, levels, geometry, dropout, return_weights)
        if lack is None:
            job.make_walk = partial(
                TritonWalk, starts=job.starts, geometry=geometry, rope=rope, scaling=scaling, given=selection,
                training=training or job.wants_gradients(),
            )  # fmt: skip
            job.kernels = job.make_walk(query, levels)
        elif backend == "triton":
            raise ValueError(f"recsa_backend='triton': {lack}; use 'auto' or 'reference' (PyTorch).")
        elif job.has_sparse_queries():
            logger.warning_once(f"recsa_backend='auto': runs the PyTorch reference; the Triton backend {lack}.")
    if return_weights:
        job.allocate_weights()
    dense = job.run_dense(dense_attention)
    with maybe_autocast(query.device.type, enabled=False):  # rounded logits would select other nodes
        sparse = job.run_sparse(keep_selection=return_selection)
        if return_weights:
            job.weigh_values()
    ran = [name for name, did in (("dense", dense), ("triton" if job.kernels else "reference", sparse)) if did]
    return RecSAOutput(job.assemble(), job.chosen if return_selection else None, job.weights, "+".join(ran) or "dense")


def check_backend(backend: str) -> None:
    """Refuses a backend that does not exist, and the kernels where Triton cannot be imported."""
    if backend == "triton" and _kernels_error is not None:
        raise ValueError(
            f"recsa_backend='triton': Triton cannot be used here ({type(_kernels_error).__name__}: {_kernels_error}); "
            "install a triton that fits this torch, or use 'auto' or 'reference' (PyTorch)."
        )
    if backend not in ("auto", "triton", "reference"):
        raise ValueError(f"recsa_backend={backend!r}: must be 'auto', 'triton' or 'reference'.")


def prefers_kernels(backend: str, device: torch.device) -> bool:
    """Whether this backend runs the kernels on this device where they can do what is asked."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def _lack_of_kernels(query, levels, geometry, dropout, return_weights) -> str | None:
    """Why the kernels cannot run this call; `None` where they can."""
    if _kernels_error is not None:
        return f"cannot be used here ({type(_kernels_error).__name__}: {_kernels_error})"
    if dropout:
        return "has no dropout: set attention_dropout to 0"
    if return_weights:
        return "cannot return attention matrices (output_attentions)"
    first = levels.exponents is not None  # level 0 has a dtype of its own
    dtypes = {tensor.dtype for tensor in (query, *levels.keys[first:], *levels.values[first:])}
    if len(dtypes) > 1:
        return f"needs queries, keys and values of one dtype, not {', '.join(sorted(map(str, dtypes)))}"
    return unsupported(query, geometry, query.shape[3], levels.exponents is not None)


class WalkedLevel(NamedTuple):
    """One level as the queries of a block see it.

    Attributes:
        level: l.
        logits: of all candidates, `[S', H_kv, w, G, n]`; those not `scored` are to be masked.
        scored: complete candidates, `[S', 1 or H_kv, w, n]` bool; at level 0 the tokens read, the query's own too.
        summed: those that one softmax sums at this level: the scored ones that were not chosen; all at level 0.
        parents: whose children the candidates are, `[S', H_kv, w, k]`; `None` at the top, where all nodes are.
        nodes: the candidates, `[S', H_kv, w, n]`; `None` at the top: 0 ... n - 1.
        chosen: `[S', H_kv, w, k]`, ascending, the path node last; `None` at level 0.
    """

    level: int
    logits: torch.Tensor
    scored: torch.Tensor
    summed: torch.Tensor
    parents: torch.Tensor | None
    nodes: torch.Tensor | None
    chosen: torch.Tensor | None


class OperatorCall:
    """One call of the operator: the inputs, and the pieces of the output `[rows, columns] -> [S', H_kv, w, G, D]`."""

    block_elements: int
    given: Selection | None = None
    kernels: "TritonWalk | None" = None
    make_walk: "Callable[[torch.Tensor, Levels], TritonWalk]"

    def __init__(self, query, levels, starts, counts, geometry, rope, scaling, dropout):
        kv_heads = levels.keys[0].shape[1]
        self.query = query.unflatten(1, (kv_heads, -1)).transpose(2, 3)  # [S, H_kv, W, G, D]
        self.levels = levels
        self.starts, self.counts = starts, counts
        self.geometry = geometry
        self.scaling = scaling
        self.dropout = dropout
        self.dtype = accumulation_dtype(query.dtype)
        self.cos, self.sin = (table.to(self.dtype) for table in rope)
        self.pieces: list[tuple[list[int], int, torch.Tensor]] = []
        self.chosen: dict[int, torch.Tensor] = {}
        self.weights: torch.Tensor | None = None
        self.rotated: dict[int, torch.Tensor] = {}  # levels' keys, rotated ahead by their places among siblings

    # ---- dense queries -----------------------------------------------------------------------------------------

    def run_dense(self, dense_attention: DenseAttention | None) -> bool:
        """Queries with t + 1 <= M: ordinary causal attention over the tokens, in the dtype of the queries."""
        limit = self.geometry.top_capacity
        dense = [
            count if self.geometry.top_k is None else max(min(limit - start, count), 0)
            for start, count in zip(self.starts, self.counts, strict=True)
        ]
        rows = [s for s, number in enumerate(dense) if number]
        if not rows:
            return False
        width, tokens = max(dense), max(self.starts[s] + dense[s] for s in rows)
        query = _take_rows(self.query[:, :, :width], rows)
        key, value = (self.states(which, 0, tokens, rows, query.dtype) for which in ("keys", "values"))
        start = torch.tensor([self.starts[s] for s in rows], device=query.device)
        position = start[:, None] + torch.arange(width, device=query.device)  # [S', w]
        # a slot past the row's end stands beyond the table and is discarded below
        slot = position.clamp(max=tokens - 1)[:, None, :, None]
        query = rotate(query, self.cos[slot], self.sin[slot])
        key = rotate(key, self.cos[:tokens], self.sin[:tokens])
        same = len({(self.starts[s], dense[s]) for s in rows}) == 1
        if self.weights is not None:
            logits = _product(query.to(self.dtype), key.to(self.dtype).transpose(-1, -2)) * self.scaling
            unread = ~_causal_mask(position, tokens)[..., None, :]
            weights = torch.softmax(logits.masked_fill(unread, float("-inf")), -1)
            for index, s in enumerate(rows):
                self._spread([s], 0, dense[s], weights[index : index + 1, :, : dense[s]], None, 0)
            return True
        attend = dense_attention or self._scaled_dot_product
        heads = query.transpose(2, 3).flatten(1, 2)
        causal = not any(self.starts[s] for s in rows)  # square: the callee's own causal flag is the fast way
        alone = same and width == 1  # one query reads all keys
        out = attend(heads, key, value, None if causal or alone else _causal_mask(position, tokens))
        out = out.unflatten(1, (key.shape[1], -1)).transpose(2, 3)
        if same:
            self.pieces.append((rows, 0, out))
            return True
        for index, s in enumerate(rows):
            self.pieces.append(([s], 0, out[index : index + 1, :, : dense[s]]))
        return True

    def _scaled_dot_product(self, query, key, value, mask):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None and query.shape[2] > 1,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    # ---- sparse queries ----------------------------------------------------------------------------------------

    def has_sparse_queries(self) -> bool:
        return any(
            count and not self.geometry.is_dense(start + count - 1)
            for start, count in zip(self.starts, self.counts, strict=True)
        )

    def wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (self.query, *self.levels.keys, *self.levels.values)
        )

    def run_sparse(self, keep_selection: bool) -> bool:
        """Queries with t + 1 > M, in blocks of equal depth."""
        ran = False
        recompute = self.wants_gradients()
        if not recompute and self.kernels is None and self.has_sparse_queries():
            self._rotate_ahead()
        if recompute and self.kernels is not None:
            return self._run_sparse_with_gradients(keep_selection)
        for rows, begin, end, depth in self._blocks():
            ran = True
            if self.kernels is not None:
                keep = partial(self._keep_selection, rows, begin, end) if keep_selection else lambda *_: None
                out = self.kernels.run(rows, begin, end, depth, keep)
            elif recompute and self.weights is None:
                # the gathered entries of all blocks together would be N x C x D
                out = checkpoint(self._walk, rows, begin, end, depth, keep_selection, use_reentrant=False)
            else:
                out = self._walk(rows, begin, end, depth, keep_selection)
            self.pieces.append((rows, begin, out))
        return ran

    def _run_sparse_with_gradients(self, keep_selection: bool) -> bool:
        def keep(block, level, nodes):
            if keep_selection:
                rows, begin, end, _ = block
                self._keep_selection(rows, begin, end, level, nodes)

        blocks, query = list(self._blocks()), self.query.transpose(2, 3).flatten(1, 2)
        if blocks:
            outputs = attend_with_gradients(self.make_walk, blocks, keep, query, self.levels)
            self.pieces += [(rows, begin, out) for (rows, begin, *_), out in zip(blocks, outputs, strict=True)]
        return bool(blocks)

    def _blocks(self) -> Iterator[tuple[list[int], int, int, int]]:
        """(rows, first column, end, depth): in each block all queries start at the same level."""
        if self.geometry.top_k is None:
            return
        borders: set[int] = set()
        for start, count in zip(self.starts, self.counts, strict=True):
            first = max(self.geometry.top_capacity - start, 0)
            if first >= count:
                continue
            borders |= {first, count}
            last_depth = self.geometry.depth(start + count - 1)
            for depth in range(2, last_depth + 1):
                column = self.geometry.first_position(depth) - start
                if first < column < count:
                    borders.add(column)
        edges = sorted(borders)
        for begin, end in zip(edges, edges[1:], strict=False):
            by_depth: dict[int, list[int]] = {}
            for s, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
                if begin < count and not self.geometry.is_dense(start + begin):
                    by_depth.setdefault(self.geometry.depth(start + begin), []).append(s)
            for depth, rows in by_depth.items():
                widest = self.kernels.width(len(rows)) if self.kernels is not None else self._block_width(len(rows))
                step = -(-(end - begin) // -(-(end - begin) // widest))  # blocks of about equal width
                for column in range(begin, end, step):
                    yield rows, column, min(column + step, end), depth

    def _block_width(self, rows: int) -> int:
        kv_heads, group, head_dim = self.query.shape[1], self.query.shape[3], self.query.shape[4]
        candidates = self.geometry.max_candidates * max(head_dim, group)
        per_query = rows * kv_heads * max(candidates, self.geometry.top_capacity * group)
        return max(self.block_elements // per_query, 1)

    def _walk(self, rows: list[int], begin: int, end: int, depth: int, keep_selection: bool) -> torch.Tensor:
        """One block from its top level down to the tokens: the output `[S', H_kv, w, G, D]`."""
        query = _take_rows(self.query[:, :, begin:end], rows).to(self.dtype)
        start = torch.tensor([self.starts[s] for s in rows], device=query.device)
        position = (start[:, None] + torch.arange(begin, end, device=query.device))[:, None]  # [S', 1, w]
        given = None
        if self.given is not None:
            given = {level: _take_rows(nodes[:, :, begin:end], rows) for level, nodes in self.given.items()}
        # output [S', H_kv, w, G, D] and log-sum-exp [S', H_kv, w, G] of each level
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        spreads = []
        for at in self.walk(rows, query, position, depth, given):
            if keep_selection and at.chosen is not None:
                self._keep_selection(rows, begin, end, at.level, at.chosen)
            logits = at.logits.masked_fill(~at.summed[..., None, :], float("-inf"))
            total = torch.logsumexp(logits, -1)
            weights = torch.softmax(logits, -1)
            if at.parents is None:
                values = self.states("values", at.level, logits.shape[-1], rows, self.dtype)
            else:
                values = self._gather("values", at.level, rows, at.parents)
                # the path parent's children may lie beyond the row's end, where anything was left: 0 * NaN is NaN
                last = slice(-self.geometry.branching, None)
                values[..., last, :].masked_fill_(~at.summed[..., last, None], 0.0)
            parts.append((_product(self._drop(weights), values), total))
            if self.weights is not None:
                spreads.append((at.level, weights, total, at.nodes))
        totals = torch.stack([total for _, total in parts])
        share = torch.softmax(totals, 0)
        for index, (level, weights, _, nodes) in enumerate(spreads):
            self._spread(rows, begin, end, weights * share[index][..., None], nodes, level)
        return torch.stack([out * share[index][..., None] for index, (out, _) in enumerate(parts)]).sum(0)

    def walk(
        self,
        rows: list[int],
        query: torch.Tensor,
        position: torch.Tensor,
        depth: int,
        given: Selection | None = None,
    ) -> "Iterator[WalkedLevel]":
        """The levels that queries `[S', H_kv, w, G, D]` at `position` `[S', 1, w]` see, from the top to the tokens."""
        r, k = self.geometry.branching, self.geometry.top_k
        assert k is not None
        parents = nodes = None
        for level in range(depth, -1, -1):
            path = position // r**level
            if parents is None:  # the top: all nodes, the same for every query
                number = path + 1
                keys = self.states("keys", level, int(position.max()) // r**level, rows, self.dtype)
            else:
                number = (k - 1) * r + path - (position // r ** (level + 1)) * r + 1
                nodes = (parents[..., None] * r + torch.arange(r, device=query.device)).flatten(-2)  # [S', H_kv, w, C]
                keys = self._gather("keys", level, rows, parents)
            logits = self.logits(query, keys, number, level)
            slots = torch.arange(logits.shape[-1], device=query.device)
            if level == 0:
                read = (slots < number[..., None]).expand(*logits.shape[:3], -1)
                yield WalkedLevel(level, logits, read, read, parents, nodes, None)
                return
            scored = slots < number[..., None] - 1  # all candidates but the path node
            if given is None:
                taken = self._choose(logits, scored, number)
            else:
                taken = self._chosen_before(given, slots, scored, level, nodes, path)
            others = taken.nonzero()[:, -1].view(*taken.shape[:3], k - 1)
            if nodes is not None:
                others = nodes.gather(-1, others)
            chosen = torch.cat((others, path[..., None].expand(*others.shape[:3], 1)), -1)
            yield WalkedLevel(level, logits, scored, scored & ~taken, parents, nodes, chosen)
            parents = chosen

    def logits(self, query, keys, number, level) -> torch.Tensor:
        """`[S', H_kv, w, G, n]`: the n candidates at positions 0, 1, ..., the query at the path node's.

        Keys that all queries share, `[S', H_kv, n, D]`, are rotated here. Those of each query, `[S', H_kv, w, n, D]`,
        are gathered and rotated by their places among their siblings already: only differences of positions count, so
        the query takes the rest, once a parent rather than once a child.
        """
        bias = level * math.log(self.geometry.branching) if self.geometry.count_bias else 0.0
        path = number - 1  # [S', 1, w]
        if keys.dim() == query.dim() - 1:  # shared by all queries
            keys = rotate(keys, self.cos[: keys.shape[-2]], self.sin[: keys.shape[-2]])
            query = rotate(query, self.cos[path[..., None]], self.sin[path[..., None]])
            return _product(query, keys.transpose(-1, -2)) * self.scaling + bias
        r = self.geometry.branching
        ahead = path[..., None] - torch.arange(0, keys.shape[-2], r, device=path.device)  # [S', 1, w, k]
        cos, sin = self.cos[ahead[..., None]], self.sin[ahead[..., None]]
        query = rotate(query[..., None, :, :], cos, sin)  # [S', H_kv, w, k, G, D]
        logits = query @ keys.unflatten(-2, (-1, r)).transpose(-1, -2)  # [S', H_kv, w, k, G, r]
        return logits.transpose(-2, -3).flatten(-2) * self.scaling + bias

    def _exponents(self, which: str, level: int) -> torch.Tensor | None:
        """Of float8 codes, which level 0 may hold; `which` is "keys" or "values"."""
        packed = level == 0 and self.levels.exponents is not None
        return self.levels.exponents[which == "values"] if packed else None

    def states(self, which: str, level: int, number: int, rows: list[int], dtype: torch.dtype) -> torch.Tensor:
        """The first entries of a level, `[S', H_kv, number, D]`."""
        states, exponents = getattr(self.levels, which)[level], self._exponents(which, level)
        if exponents is not None:
            exponents = _take_rows(exponents[:, :, :number], rows)
        # what is rounded at all is rounded to the dtype of the queries
        taken = unpack(_take_rows(states[:, :, :number], rows), exponents, self.query.dtype).to(dtype)
        ends = [(self.starts[s] + self.counts[s]) // self.geometry.branching**level for s in rows]
        if min(ends) < number:  # beyond a row's end anything may be left: 0 * NaN is NaN
            end = torch.tensor(ends, device=taken.device)[:, None, None, None]
            taken = taken.masked_fill(torch.arange(number, device=taken.device)[:, None] >= end, 0.0)
        return taken

    def _gather(self, which: str, level: int, rows: list[int], parents: torch.Tensor) -> torch.Tensor:
        """The r children of each parent: `[S', H_kv, w, k]` -> `[S', H_kv, w, k * r, D]`, widened; keys rotated."""
        if which == "keys" and level in self.rotated:
            return self._pick(self.rotated[level], rows, parents)
        states, exponents = getattr(self.levels, which)[level], self._exponents(which, level)
        picked = self._pick(states, rows, parents)
        if exponents is not None:
            picked = unpack(picked, self._pick(exponents[..., None], rows, parents)[..., 0], self.query.dtype)
        picked = picked.to(self.dtype)
        return self._rotate_siblings(picked) if which == "keys" else picked

    def _rotate_siblings(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotates `[..., n * r, D]` by the places of siblings, 0 ... r - 1."""
        r = self.geometry.branching
        return rotate(keys.unflatten(-2, (-1, r)), self.cos[:r], self.sin[:r]).flatten(-3, -2)

    def _rotate_ahead(self) -> None:
        """`_rotate_siblings` of whole levels, where queries will gather more than they hold; the same to the bit."""
        r, all_rows = self.geometry.branching, list(range(len(self.starts)))
        longest = max(start + count for start, count in zip(self.starts, self.counts, strict=True))
        gathered = sum(self.counts) * self.geometry.max_candidates
        for level, keys in enumerate(self.levels.keys[:-1]):  # the highest is a top level
            number = min(-(-longest // r ** (level + 1)) * r, keys.shape[2])
            if len(all_rows) * number <= gathered and keys[:, :, :number].numel() <= _ROTATED_ELEMENTS:
                self.rotated[level] = self._rotate_siblings(self.states("keys", level, number, all_rows, self.dtype))

    def _pick(self, states: torch.Tensor, rows: list[int], parents: torch.Tensor) -> torch.Tensor:
        """`_gather` as stored: `[S, H_kv, n, x]` -> `[S', H_kv, w, k * r, x]`."""
        r, kv_heads = self.geometry.branching, states.shape[1]
        groups = states.unflatten(2, (-1, r)).flatten(3)  # [S, H_kv, n / r, r * x]
        number = groups.shape[2]
        base = torch.tensor(rows, device=states.device)[:, None] * kv_heads + torch.arange(
            kv_heads, device=states.device
        )
        # the path parent may have no complete child; what is read instead is masked
        index = base[..., None, None] * number + parents.clamp(max=number - 1)
        picked = groups.flatten(0, 2).index_select(0, index.flatten())
        return picked.view(*parents.shape[:3], -1, states.shape[3])

    @torch.no_grad()
    def _choose(self, logits, scored, number) -> torch.Tensor:
        """Marks the k - 1 chosen candidates besides the path node, `[S', H_kv, w, n]` bool."""
        slots = torch.arange(logits.shape[-1], device=logits.device)
        recent = self.geometry.recent
        importance = torch.softmax(logits.masked_fill(~scored[..., None, :], float("-inf")), -1).sum(-2)
        free = slots < number[..., None] - 1 - recent
        # NaN inputs give a NaN output, not an unclear error here
        importance = importance.nan_to_num(0.0).masked_fill(~free, -1.0)
        places = self.geometry.top_k - 1 - recent
        threshold = importance.topk(places, -1).values[..., -1:]
        above = importance > threshold
        ties = importance == threshold
        lowest_ties = ties & (ties.cumsum(-1) <= places - above.sum(-1, keepdim=True))
        return above | lowest_ties | (scored & ~free)

    def _chosen_before(self, given, slots, scored, level, nodes, path) -> torch.Tensor:
        """The same marks from a selection made earlier, level -> `[S', H_kv, w, k]`."""
        if level not in given:
            raise ValueError(f"selection: has no level {level}, at which queries choose; it has {sorted(given)}.")
        before = given[level].to(slots.device)
        nodes = slots.expand(*before.shape[:3], -1) if nodes is None else nodes
        place = torch.searchsorted(before.contiguous(), nodes.contiguous()).clamp(max=before.shape[-1] - 1)
        taken = (before.gather(-1, place) == nodes) & scored
        fits = (taken.sum(-1) == self.geometry.top_k - 1) & (before[..., -1] == path)
        if not bool(fits.all()):
            raise ValueError(
                f"selection[{level}]: must hold top_k = {self.geometry.top_k} ascending nodes per sparse query, each "
                "a candidate at its level, the query's own path node last."
            )
        return taken

    def _drop(self, weights: torch.Tensor) -> torch.Tensor:
        return F.dropout(weights, self.dropout) if self.dropout else weights

    # ---- results -----------------------------------------------------------------------------------------------

    def _keep_selection(self, rows: list[int], begin: int, end: int, level: int, chosen: torch.Tensor) -> None:
        if level not in self.chosen:
            shape = (*self.query.shape[:3], self.geometry.top_k)
            self.chosen[level] = torch.full(shape, -1, dtype=torch.long, device=chosen.device)
        self.chosen[level][rows, :, begin:end] = chosen.long()

    def allocate_weights(self) -> None:
        """Prepares the token-level matrix A `[S, H_kv, W, G, N]`; refuses one that is too large."""
        tokens = max(start + count for start, count in zip(self.starts, self.counts, strict=True))
        shape = (*self.query.shape[:4], tokens)
        if torch.Size(shape).numel() > _MAX_WEIGHTS:
            raise ValueError(
                f"output_attentions: the matrix of {self.query.shape[2]} queries by {tokens} tokens is too large; "
                "ask for it on a shorter input, or use recsa_trace to see which nodes were chosen."
            )
        self.weights = self.query.new_zeros(shape, dtype=self.dtype)

    def _spread(self, rows, begin, end, weights, nodes, level) -> None:
        """Adds node weights `[S', H_kv, w, G, n]` to A, each spread evenly over its r^l tokens."""
        assert self.weights is not None
        span, tokens = self.geometry.branching**level, self.weights.shape[-1]
        if nodes is not None:
            width = max(tokens // span, int(nodes.max())) + 1
            index = nodes[..., None, :].expand_as(weights)
            weights = weights.new_zeros(*weights.shape[:-1], width).scatter_add(-1, index, weights)
        spread = (weights / span).repeat_interleave(span, -1)[..., :tokens]
        self.weights[rows, :, begin:end, :, : spread.shape[-1]] += spread

    def weigh_values(self) -> None:
        """The output as A . V, so that it depends on the matrix that is returned. [paper: the output equals A . V]"""
        assert self.weights is not None
        kv_heads, width, group, tokens = self.weights.shape[1:]
        values = self.states("values", 0, tokens, list(range(len(self.starts))), self.dtype)
        self.weights = self.weights.transpose(2, 3).flatten(1, 2)  # [S, H, W, N], the tensor that the caller gets
        out = self._drop(self.weights).view(-1, kv_heads, group * width, tokens) @ values
        self.pieces = [(list(range(len(self.starts))), 0, out.unflatten(2, (group, width)).transpose(2, 3))]

    def assemble(self) -> torch.Tensor:
        """Joins the pieces to `[S, H, W, D]`; columns past a sequence's end are zero."""
        sequences, kv_heads, width, group, head_dim = self.query.shape
        all_rows = list(range(sequences))
        if all(rows == all_rows for rows, _, _ in self.pieces) and self.pieces:
            pieces = [out.to(self.query.dtype) for _, _, out in sorted(self.pieces, key=lambda piece: piece[1])]
            joined = torch.cat(pieces, 2) if len(pieces) > 1 else pieces[0]
            joined = F.pad(joined, (0, 0, 0, 0, 0, width - joined.shape[2])) if joined.shape[2] < width else joined
        else:
            joined = self.query.new_zeros(self.query.shape)
            for rows, begin, out in self.pieces:
                joined[rows, :, begin : begin + out.shape[2]] = out.to(joined.dtype)
        return joined.transpose(2, 3).flatten(1, 2)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[S, H_kv, w, G, x]` times what all queries share, `[S, H_kv, x, y]`, or each its own, `[S, H_kv, w, x, y]`."""
    if right.dim() == left.dim():
        return left @ right
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _causal_mask(position: torch.Tensor, tokens: int) -> torch.Tensor:
    """Which of the first `tokens` tokens queries at these positions `[S, w]` read: `[S, 1, w, tokens]` bool."""
    return torch.arange(tokens, device=position.device) <= position[:, None, :, None]


def _take_rows(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The sequences `rows` of `[S, ...]`; no copy where they are all of them."""
    if len(rows) == states.shape[0]:
        return states
    return states.index_select(0, torch.tensor(rows, device=states.device))
