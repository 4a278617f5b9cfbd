"""One layer of a `RecSACache`: level 0 and the tree levels above it, as tensors that grow, are shared and rearranged.

Rows are ragged inside: padding is never stored, so row b's tokens lie at indices 0 ... lengths[b] - 1 whatever the
batch looked like. A layer never touches queries or selection, and hands the operator plain level tensors.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import gt

import torch
from transformers.cache_utils import DynamicLayer

from .float8_recsa_qwen3 import CODES, Packed, pack, unpack
from .memory_recsa_qwen3 import host_zeros
from .rows_recsa_qwen3 import RowHistory, Rows
from .tree_recsa_qwen3 import Levels, Nodes, RecSAPooler, TreeGeometry, build_nodes

# Growth beyond what is needed: half again, so that appending to a short cache copies each entry a few times at most,
# but never more than this many entries, so that a long one holds little that it does not use.
_GROWTH = 1.5
_MOST_SPARE = 4096
_FIRST_TOKENS = 64
# Beside level 0's codes.
_EXPONENTS = {"keys": "key_exponents", "values": "value_exponents"}


class LevelStorage:
    """Preallocated storage of one level: named tensors `[B, H_kv, capacity, ...]` that grow together.

    Capacities are multiples of r so that siblings form whole groups; unused entries are zero, hence finite.
    `version` counts the times that the tensors were replaced, for those who keep their addresses.

    Args:
        fields: name -> (shape of an entry, dtype).
        branching: r.
        like: gives B, H_kv and the device.
        capacity: entries a row.
        on_host: capacity -> whether vectors lie in host memory that the device addresses; never where `None`.
    """

    def __init__(
        self,
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]],
        branching: int,
        like: torch.Tensor,
        capacity: int,
        on_host: Callable[[int], bool] | None = None,
    ):
        self.fields, self.branching, self.on_host = fields, branching, on_host
        self.version = 0
        self.tensors = self._zeros(like, capacity)

    def _zeros(self, like: torch.Tensor, capacity: int) -> dict[str, torch.Tensor]:
        capacity += -capacity % self.branching
        on_host, tensors = self.is_on_host(capacity), {}
        for name, (entry, dtype) in self.fields.items():
            shape = (*like.shape[:2], capacity, *entry)
            if on_host and entry:
                tensors[name] = host_zeros(shape, dtype, like.device)
            else:
                tensors[name] = torch.zeros(shape, dtype=dtype, device=like.device)
        return tensors

    def is_on_host(self, capacity: int) -> bool:
        """Whether vectors lie on the host where there is room for this many entries a row."""
        return self.on_host is not None and self.on_host(capacity)

    @property
    def capacity(self) -> int:
        return next(iter(self.tensors.values())).shape[2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def ensure(self, needed: int, used: int, reserve: int, anew: bool = False) -> None:
        """Makes room for `needed` entries, keeping the first `used`; grows to `reserve` at once where that is more.

        `anew` replaces the tensors even where they have room.
        """
        first = next(iter(self.tensors.values()))
        stale = first.is_inference() and not torch.is_inference_mode_enabled()
        if needed <= self.capacity and not stale and not anew:
            return
        capacity = self.capacity
        if needed > capacity:
            capacity = max(needed, reserve, min(int(capacity * _GROWTH), capacity + _MOST_SPARE))
        grown = self._zeros(first, capacity)
        for name, new in grown.items():
            new[:, :, :used] = self.tensors[name][:, :, :used]
        self.tensors = grown  # all at once: an interrupted growth changes nothing
        self.version += 1

    def write(self, name: str, row: slice, begin: int, states: torch.Tensor) -> None:
        self.tensors[name][row, :, begin : begin + states.shape[2]] = states

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces each tensor, which stays where it lies."""
        tensors = {}
        for name, tensor in self.tensors.items():
            tensors[name] = function(tensor)
            if self.fields[name][0] and self.is_on_host(self.capacity):
                moved = host_zeros(tuple(tensors[name].shape), tensor.dtype, tensor.device)
                tensors[name] = moved.copy_(tensors[name])
        self.tensors = tensors
        self.version += 1

    def move_to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Moves to a device and casts what is not packed."""
        if dtype is not None:
            self.fields = {
                name: (entry, held if held in (CODES, torch.int8) else dtype)
                for name, (entry, held) in self.fields.items()
            }
        self.tensors = {
            name: tensor.to(device=device, dtype=self.fields[name][1]) for name, tensor in self.tensors.items()
        }
        self.version += 1

    def __deepcopy__(self, memo) -> "LevelStorage":
        copied = copy.copy(self)
        copied.map(torch.clone)
        return copied


class RecSALayer(DynamicLayer):
    """The tree of one layer: level 0 and the levels above, for every row.

    Args:
        geometry: fixes r.
        reserve: tokens to allocate for at first use; 0 = grow as needed.
        packed: whether level 0 is stored as float8 codes and exponents.
        on_host: (keys, tokens a row) -> whether level 0 goes to the host; never where `None`.

    Attributes:
        dtype, device: of what is appended; of the stored nodes, too.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        geometry: TreeGeometry,
        reserve: int = 0,
        packed: bool = False,
        on_host: Callable[[torch.Tensor, int], bool] | None = None,
    ):
        # not `super().__init__()`: there `keys` and `values` are attributes, here they are views of the storage
        self.geometry = geometry
        self.reserve = reserve
        self.packed = packed
        self._on_host = on_host
        self.is_initialized = False
        self.history = RowHistory()
        self.levels: list[LevelStorage] = []
        self._forks: weakref.WeakSet[RecSALayer] | None = None  # those made of one another, this one included

    def __getstate__(self):
        # copies share nothing
        return {**self.__dict__, "_forks": None}

    def __repr__(self) -> str:
        return f"RecSALayer(columns={self.history.columns}, lengths={self.history.lengths}, levels={len(self.levels)})"

    # ---- what is stored ----------------------------------------------------------------------------------------

    def _stored(self, level: int, name: str) -> torch.Tensor | None:
        if not self.is_initialized or level >= len(self.levels):
            return None
        longest = max(self.history.lengths, default=0) // self.geometry.branching**level
        return self._read(level, name, slice(None), slice(0, longest))

    def _read(self, level: int, name: str, row: slice, entries: slice) -> torch.Tensor:
        """Stored vectors as the operator understands them."""
        tensors = self.levels[level].tensors
        exponents = tensors.get(_EXPONENTS[name]) if level == 0 else None
        if exponents is None:
            return tensors[name][row, :, entries]
        return unpack(tensors[name][row, :, entries], exponents[row, :, entries], self.dtype)

    @property
    def keys(self) -> torch.Tensor | None:
        """Level-0 keys before RoPE, `[B, H_kv, longest row, D]`, made anew from float8; `None` before first use."""
        return self._stored(0, "keys")

    @property
    def values(self) -> torch.Tensor | None:
        """Level-0 values, `[B, H_kv, longest row, D]`, made anew from float8; `None` before first use."""
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
        vector = ((key_states.shape[3],), CODES if self.packed else key_states.dtype)
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"keys": vector, "values": vector}
        if self.packed:
            fields |= {"key_exponents": ((), torch.int8), "value_exponents": ((), torch.int8)}
        # only what a device is told about is kept, no tensor
        like = torch.empty(*key_states.shape[:2], 0, key_states.shape[3], dtype=self.dtype, device=self.device)
        on_host = None if self._on_host is None else partial(self._on_host, like)
        self.levels = [LevelStorage(fields, self.geometry.branching, like, capacity, on_host)]
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
        encode: Callable[[torch.Tensor], Packed] | None = None,
    ) -> Levels:
        """Stores new tokens and every node that they complete: O(levels) nodes per token.

        Args:
            key_states: keys before RoPE in sequence form, `[B, H_kv, W, D]`.
            value_states: `[B, H_kv, W, D]`.
            rows: where the tokens go.
            columns: columns of the batch that they came from.
            pooler: the layer's pooler.
            build: makes nodes of their children; `build_nodes` where `None`.
            encode: makes float8 codes; `pack` where `None`.

        Returns:
            The level tensors for the operator (views of the storage, nothing is copied).
        """
        if not self.history.columns and self.batch_size not in (-1, key_states.shape[0]):
            self.reset()  # cropped to nothing, and filled with another batch now
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_like(key_states)
        if self.packed and torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "recsa_cache_dtype='fp8_e4m3': codes carry no gradient; run under torch.no_grad(), pass "
                "use_cache=False, or a RecSACache(config, dtype='auto')."
            )
        old, new = rows.starts, rows.lengths
        if list(old) != (self.history.lengths or [0] * len(old)):
            raise RuntimeError(
                f"RecSACache: this layer holds {self.history.lengths} tokens where {list(old)} were expected "
                "(an interrupted forward leaves layers at different lengths); call cache.reset() and prefill again."
            )
        longest, used = max(new), max(old)
        r = self.geometry.branching
        level = self.levels[0]
        level.ensure(longest, used, self.reserve, self._read_by_fork(0))
        for row, begin, end in _row_groups(old, new):
            for name, states in (("keys", key_states), ("values", value_states)):
                states = states[row, :, : end - begin]
                if self.packed:
                    states, exponents = (encode or pack)(states)
                    level.write(_EXPONENTS[name], row, begin, exponents)
                level.write(name, row, begin, states)
        carried = "keys"
        for depth in range(1, len(self.geometry.node_counts(longest))):
            span = r**depth
            level = self._level_with_room(depth, longest, used)
            for row, begin, end in _row_groups([n // span for n in old], [n // span for n in new]):
                children = slice(begin * r, end * r)
                nodes = (build or build_nodes)(
                    pooler,
                    self._read(depth - 1, carried, row, children),
                    self._read(depth - 1, "values", row, children),
                    r,
                )
                level.write("pooled", row, begin, nodes.pooled)
                level.write("keys", row, begin, nodes.keys)
                level.write("values", row, begin, nodes.values)
            carried = "pooled"
        self.history.append(rows, columns)
        return self.stored_levels()

    def stored_levels(self) -> Levels:
        """The whole storage as the operator reads it; nothing is copied."""
        return operator_levels(self.levels)

    def _level_with_room(self, depth: int, tokens: int, used: int) -> LevelStorage:
        """The level at `depth` >= 1, made or grown for the nodes of `tokens` tokens, `used` of them kept.

        It has room for as many as level 0 has, so that it grows no more often.
        """
        span = self.geometry.branching**depth
        room = self.levels[0].capacity // span
        if depth == len(self.levels):
            like = self.levels[0].tensors["keys"]
            fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(
                ("pooled", "keys", "values"), ((like.shape[3],), self.dtype)
            )
            self.levels.append(LevelStorage(fields, self.geometry.branching, like, max(room, 1)))
        self.levels[depth].ensure(tokens // span, used // span, room, self._read_by_fork(depth))
        return self.levels[depth]

    def make_room(self, tokens: int) -> None:
        """Room for `tokens` tokens a row, and on every level for the nodes of as many as level 0 then has room for."""
        used = max(self.history.lengths)
        self.levels[0].ensure(tokens, used, self.reserve, self._read_by_fork(0))
        for depth in range(1, len(self.geometry.node_counts(self.levels[0].capacity))):
            self._level_with_room(depth, self.levels[0].capacity, used)

    def _check_like(self, key_states: torch.Tensor) -> None:
        held = self.levels[0].tensors["keys"]
        ours = held.shape[1], held.shape[3], self.dtype
        theirs = key_states.shape[1], key_states.shape[3], key_states.dtype
        if ours != theirs:
            raise ValueError(
                f"cache: holds {ours[0]} KV heads of width {ours[1]} in {ours[2]}, the model has {theirs[0]} of "
                f"{theirs[1]} in {theirs[2]}; make the cache with this model, or call cache.move_to(dtype=...)."
            )

    def allocate(self, like: torch.Tensor, tokens: int, reserve: int = 0) -> None:
        """Makes storage for `tokens` tokens a row like `[B, H_kv, *, D]`, with room for `reserve`; nothing is held."""
        self.reserve = max(tokens, reserve)
        self.lazy_initialization(like, like)
        for depth in range(1, len(self.geometry.node_counts(tokens))):
            self._level_with_room(depth, tokens, 0)
        self.reserve = reserve

    def entries(self) -> dict[tuple[int, str], torch.Tensor]:
        """(level, name) -> what is in use of each stored tensor, `[B, H_kv, n_l of the longest row, ...]`, views."""
        longest = max(self.history.lengths, default=0)
        return {
            (depth, name): tensor[:, :, : longest // self.geometry.branching**depth]
            for depth, level in enumerate(self.levels[: len(self.geometry.node_counts(longest))])
            for name, tensor in level.tensors.items()
        }

    # ---- sharing -----------------------------------------------------------------------------------------------

    def fork(self) -> "RecSALayer":
        """A layer that holds the same and shares the storage."""
        twin = copy.copy(self)
        twin.history = self.history.copy()
        twin.levels = [copy.copy(level) for level in self.levels]
        if self._forks is None:
            self._forks = weakref.WeakSet((self,))
        self._forks.add(twin)
        twin._forks = self._forks
        return twin

    def _longer_forks(self) -> "list[RecSALayer]":
        if self._forks is None:
            return []
        ours = self.history.lengths or [0] * self.batch_size
        return [fork for fork in self._forks if any(map(gt, fork.history.lengths, ours))]

    def _read_by_fork(self, depth: int, forks: "list[RecSALayer] | None" = None) -> bool:
        """Whether what this layer writes next on a level would be seen: a fork holds entries there, in this storage.

        A fork that holds no more than this layer sees nothing, so that forks one after another share the prefix.
        """
        forks = self._longer_forks() if forks is None else forks
        if not forks or depth >= len(self.levels):
            return False
        span, storage = self.geometry.branching**depth, self.levels[depth].tensors["keys"]
        ours = [length // span for length in self.history.lengths or [0] * self.batch_size]
        return any(
            depth < len(fork.levels)
            and fork.levels[depth].tensors["keys"] is storage
            and any(theirs // span > held for theirs, held in zip(fork.history.lengths, ours, strict=True))
            for fork in forks
        )

    def writes_in_place(self) -> bool:
        """Whether the storage may be written behind what this layer holds."""
        forks = self._longer_forks()
        return not any(self._read_by_fork(depth, forks) for depth in range(len(self.levels) if forks else 0))

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
                level.move_to(device, dtype)
            self.dtype, self.device = dtype or self.dtype, self.levels[0].tensors["keys"].device

    def offload(self) -> None:
        """Refused: half a tree elsewhere would be read as zeros."""
        raise NotImplementedError(
            "RecSACache: offloading layer by layer is not supported; recsa_gpu_budget keeps tokens in host memory."
        )

    prefetch = offload


def operator_levels(storages: Sequence[LevelStorage]) -> Levels:
    """Storages, level 0 first, as the operator reads them; nothing is copied."""
    tokens = storages[0].tensors
    return Levels(
        tuple(storage.tensors["keys"] for storage in storages),
        tuple(storage.tensors["values"] for storage in storages),
        (tokens["key_exponents"], tokens["value_exponents"]) if "key_exponents" in tokens else None,
    )


def _row_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[slice, int, int]]:
    """(rows, first new index, end) of what each row gained; one group where all rows gained the same."""
    if len(set(zip(old, new, strict=True))) == 1:
        return [(slice(None), old[0], new[0])] if new[0] > old[0] else []
    return [
        (slice(row, row + 1), begin, end) for row, (begin, end) in enumerate(zip(old, new, strict=True)) if end > begin
    ]
