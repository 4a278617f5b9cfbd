"""`RecSACache`: keys before RoPE, values and the tree levels above them, per layer and row.

Rows are ragged inside: padding is never stored, so row b's tokens lie at indices 0 ... lengths[b] - 1 whatever the
batch looked like. The cache appends, grows, crops and rearranges; it never touches queries or selection, and hands the
operator plain level tensors.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from .rows_recsa_qwen3 import RowHistory, Rows
from .tree_recsa_qwen3 import Levels, Nodes, RecSAPooler, TreeGeometry, build_nodes

# Growth beyond what is needed: half again, so that appending to a short cache copies each entry a few times at most,
# but never more than this many entries, so that a long one holds little that it does not use.
_GROWTH = 1.5
_MOST_SPARE = 4096
_FIRST_TOKENS = 64


class _Level:
    """Preallocated storage of one level: named tensors `[B, H_kv, capacity, D]` that grow together.

    Capacities are multiples of r so that siblings form whole groups; unused entries are zero, hence finite.
    `version` counts the times that the tensors were replaced, for those who keep their addresses.
    """

    def __init__(self, names: Sequence[str], branching: int, like: torch.Tensor, capacity: int):
        self.branching = branching
        self.version = 0
        self.tensors = {name: self._zeros(like, capacity) for name in names}

    def _zeros(self, like: torch.Tensor, capacity: int) -> torch.Tensor:
        capacity += -capacity % self.branching
        return like.new_zeros(like.shape[0], like.shape[1], capacity, like.shape[3])

    @property
    def capacity(self) -> int:
        return next(iter(self.tensors.values())).shape[2]

    def ensure(self, needed: int, used: int, reserve: int) -> None:
        """Makes room for `needed` entries, keeping the first `used`; grows to `reserve` at once where that is more."""
        stale = next(iter(self.tensors.values())).is_inference() and not torch.is_inference_mode_enabled()
        if needed <= self.capacity and not stale:
            return
        capacity = self.capacity
        if needed > capacity:
            capacity = max(needed, reserve, min(int(capacity * _GROWTH), capacity + _MOST_SPARE))
        self.version += 1
        for name, old in self.tensors.items():
            new = self._zeros(old, capacity)
            new[:, :, :used] = old[:, :, :used]
            self.tensors[name] = new

    def write(self, name: str, row: slice, begin: int, states: torch.Tensor) -> None:
        self.tensors[name][row, :, begin : begin + states.shape[2]] = states

    def map(self, function) -> None:
        self.version += 1
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}


class RecSALayer(DynamicLayer):
    """The tree of one layer: level 0 and the levels above, for every row.

    Args:
        geometry: fixes r.
        reserve: tokens to allocate for at first use; 0 = grow as needed.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, geometry: TreeGeometry, reserve: int = 0):
        # not `super().__init__()`: there `keys` and `values` are attributes, here they are views of the storage
        self.geometry = geometry
        self.reserve = reserve
        self.is_initialized = False
        self.history = RowHistory()
        self.levels: list[_Level] = []

    def __repr__(self) -> str:
        return f"RecSALayer(columns={self.history.columns}, lengths={self.history.lengths}, levels={len(self.levels)})"

    # ---- what is stored ----------------------------------------------------------------------------------------

    def _stored(self, level: int, name: str) -> torch.Tensor | None:
        if not self.is_initialized or level >= len(self.levels):
            return None
        longest = max(self.history.lengths, default=0) // self.geometry.branching**level
        return self.levels[level].tensors[name][:, :, :longest]

    @property
    def keys(self) -> torch.Tensor | None:
        """Level-0 keys before RoPE, `[B, H_kv, longest row, D]`; `None` before first use."""
        return self._stored(0, "keys")

    @property
    def values(self) -> torch.Tensor | None:
        """Level-0 values, `[B, H_kv, longest row, D]`; `None` before first use."""
        return self._stored(0, "values")

    def node_keys(self, level: int) -> torch.Tensor | None:
        """Read keys of the complete nodes of `level` >= 1 (tokens for 0), `[B, H_kv, n_l of the longest row, D]`."""
        return self._stored(level, "keys")

    def node_values(self, level: int) -> torch.Tensor | None:
        """Mean values of the complete nodes of a level, shaped like `node_keys`."""
        return self._stored(level, "values")

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before first use."""
        return self.levels[0].tensors["keys"].shape[0] if self.is_initialized else -1

    def get_seq_length(self) -> int:
        """Columns seen, padding included: what `generate` slices its inputs by."""
        return self.history.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns after `query_length` more, offset 0): the size of the mask that a forward takes."""
        return self.history.columns + int(query_length), 0

    def get_max_length(self) -> int:
        """-1: grows without limit."""
        return -1

    get_max_cache_shape = get_max_length

    # ---- appending ---------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates level 0 like the given states `[B, H_kv, *, D]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(self.reserve, _FIRST_TOKENS)
        self.levels = [_Level(("keys", "values"), self.geometry.branching, key_states, capacity)]
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Refused: building nodes needs the layer's pooler; RecSA's attention calls `append`."""
        raise TypeError(
            "RecSACache.update: a RecSA cache is filled through RecSAQwen3 models (RecSACache.append), "
            "since the levels above the tokens need the layer's pooler."
        )

    def append(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        rows: Rows,
        columns: int,
        pooler: RecSAPooler,
        build: Callable[[RecSAPooler, torch.Tensor, torch.Tensor, int], Nodes] | None = None,
    ) -> Levels:
        """Stores new tokens and every node that they complete: O(levels) nodes per token.

        Args:
            key_states: keys before RoPE in sequence form, `[B, H_kv, W, D]`.
            value_states: `[B, H_kv, W, D]`.
            rows: where the tokens go.
            columns: columns of the batch that they came from.
            pooler: the layer's pooler.
            build: makes nodes of their children; `build_nodes` where `None`.

        Returns:
            The level tensors for the operator (views of the storage, nothing is copied).
        """
        if not self.history.columns and self.batch_size not in (-1, key_states.shape[0]):
            self.reset()  # cropped to nothing, and filled with another batch now
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_like(key_states)
        old, new = rows.starts, rows.lengths
        if list(old) != (self.history.lengths or [0] * len(old)):
            raise RuntimeError(
                f"RecSACache: this layer holds {self.history.lengths} tokens where {list(old)} were expected "
                "(an interrupted forward leaves layers at different lengths); call cache.reset() and prefill again."
            )
        longest, used = max(new), max(old)
        r = self.geometry.branching
        level = self.levels[0]
        level.ensure(longest, used, self.reserve)
        for row, begin, end in _row_groups(old, new):
            level.write("keys", row, begin, key_states[row, :, : end - begin])
            level.write("values", row, begin, value_states[row, :, : end - begin])
        below, carried = level, "keys"
        for depth in range(1, len(self.geometry.node_counts(longest))):
            span = r**depth
            level = self._level_with_room(depth, longest, used)
            for row, begin, end in _row_groups([n // span for n in old], [n // span for n in new]):
                children = slice(begin * r, end * r)
                nodes = (build or build_nodes)(
                    pooler, below.tensors[carried][row, :, children], below.tensors["values"][row, :, children], r
                )
                level.write("pooled", row, begin, nodes.pooled)
                level.write("keys", row, begin, nodes.keys)
                level.write("values", row, begin, nodes.values)
            below, carried = level, "pooled"
        self.history.append(rows, columns)
        return Levels(
            tuple(level.tensors["keys"] for level in self.levels),
            tuple(level.tensors["values"] for level in self.levels),
        )

    def _level_with_room(self, depth: int, tokens: int, used: int) -> _Level:
        """The level at `depth` >= 1, made or grown for the nodes of `tokens` tokens, `used` of them kept."""
        span = self.geometry.branching**depth
        if depth == len(self.levels):
            names, reserved = ("pooled", "keys", "values"), max(self.reserve // span, 1)
            self.levels.append(
                _Level(names, self.geometry.branching, self.levels[depth - 1].tensors["keys"], reserved)
            )
        self.levels[depth].ensure(tokens // span, used // span, self.reserve // span)
        return self.levels[depth]

    def make_room(self, tokens: int) -> None:
        """Room for `tokens` tokens a row, and on every level for the nodes of as many as level 0 then has room for."""
        used = max(self.history.lengths)
        self.levels[0].ensure(tokens, used, self.reserve)
        for depth in range(1, len(self.geometry.node_counts(self.levels[0].capacity))):
            self._level_with_room(depth, self.levels[0].capacity, used)

    def _check_like(self, key_states: torch.Tensor) -> None:
        held = self.levels[0].tensors["keys"]
        ours, theirs = ((t.shape[1], t.shape[3], t.dtype) for t in (held, key_states))
        if ours != theirs:
            raise ValueError(
                f"cache: holds {ours[0]} KV heads of width {ours[1]} in {ours[2]}, the model has {theirs[0]} of "
                f"{theirs[1]} in {theirs[2]}; make the cache with this model, or call cache.move_to(dtype=...)."
            )

    # ---- rearranging -------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last |n| columns for n <= 0; keeps the first n columns for n > 0 (the older convention).

        Nodes are complete or absent, so each level keeps exactly its first `length // r^l` nodes.
        """
        number = int(tokens_to_remove)  # assisted decoding passes a tensor on some versions
        self.history.crop(-number if number <= 0 else max(self.history.columns - number, 0))

    def reset(self) -> None:
        """Forgets all tokens and frees the storage."""
        self.history = RowHistory()
        self.levels = []
        self.is_initialized = False

    def _rearrange(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        if indices.dtype == torch.bool:
            indices = torch.nonzero(indices).flatten()
        indices = indices.long()
        self.history.select(indices.tolist())
        for level in self.levels:
            level.map(lambda tensor: tensor[indices.to(tensor.device)])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes the former row `beam_idx[i]`, on every level."""
        self._rearrange(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` (int64, or a bool mask over rows), on every level."""
        self._rearrange(torch.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, on every level."""
        if self.is_initialized:
            self._rearrange(torch.arange(self.batch_size).repeat_interleave(repeats))

    def move_to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Moves every level to a device and / or dtype."""
        if self.is_initialized:
            for level in self.levels:
                level.map(lambda tensor: tensor.to(device=device, dtype=dtype))
            keys = self.levels[0].tensors["keys"]
            self.dtype, self.device = keys.dtype, keys.device

    def offload(self) -> None:
        """Refused: half a tree elsewhere would be read as zeros."""
        raise NotImplementedError("RecSACache: offloading is not supported; use a smaller batch or a shorter prompt.")

    prefetch = offload


class RecSACache(DynamicCache):
    """The cache of a RecSA model: a growing `transformers` cache whose layers hold a tree.

    The cache does not record token ids. A later turn must extend the prefix that it was filled with; a mask that
    disagrees is refused, other ids under the same mask cannot be noticed.

    Args:
        config: the model's `RecSAQwen3Config`.
        reserve: tokens to allocate for at first use, where the final length is known; 0 = grow as needed.
    """

    def __init__(self, config, reserve: int = 0):
        super().__init__()
        self.geometry = TreeGeometry.from_config(config)
        self.layer_class_to_replicate = None
        self.layers = [RecSALayer(self.geometry, reserve) for _ in range(config.num_hidden_layers)]
        self.step = None  # the decoding step that a model keeps for this cache

    def __getstate__(self):
        # copies have storage of their own
        return {**self.__dict__, "step": None}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Refused by the layer: see `RecSALayer.update`."""
        return self.layers[layer_idx].update(key_states, value_states)

    def prefetch(self, layer_idx: int, *args, **kwargs) -> None:
        """Refused by the layer: see `RecSALayer.offload`."""
        self.layers[layer_idx].prefetch()

    def reset(self) -> None:
        """Forgets all tokens and frees the storage, which a step would hold."""
        self.step = None
        super().reset()

    def make_room(self, tokens: int) -> None:
        """Grows every layer to hold `tokens` tokens a row, where it does not yet."""
        for layer in self.layers:
            layer.make_room(tokens)

    def reserve(self, tokens: int) -> None:
        """Grows to `tokens` per row at once when it next has to grow, instead of little by little."""
        for layer in self.layers:
            layer.reserve = max(layer.reserve, tokens)

    @property
    def history(self) -> RowHistory:
        """What has been seen, as the first layer recorded it."""
        return self.layers[0].history

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per row, padding left out."""
        return list(self.history.lengths)

    def move_to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "RecSACache":
        """Moves all layers to one device and / or dtype; returns itself.

        Not called `to`: accelerate's hooks would move a cache spread over several devices onto one.
        """
        for layer in self.layers:
            layer.move_to(device, dtype)
        return self


def _row_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, int, int]]:
    """(rows, first new index, end) of what each row gained; one group where all rows gained the same."""
    if len(set(zip(old, new, strict=True))) == 1:
        return [(slice(None), old[0], new[0])] if new[0] > old[0] else []
    return [
        (slice(row, row + 1), begin, end) for row, (begin, end) in enumerate(zip(old, new, strict=True)) if end > begin
    ]
