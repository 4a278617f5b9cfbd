"""Which tokens of a batch belong to which sequence: padding, packed documents, and what a cache has seen.

Attention works on sequences: `S` of them, each starting at index 0, without padding inside. A batch `[B, T]` with
padding or with several documents packed in one row is mapped to that form and back here. This file never touches keys,
levels or selection.
"""

import copy
import functools
from collections.abc import Sequence

import torch


class Rows:
    """The sequences of one forward pass.

    Attributes:
        starts: tokens that each sequence already has in the cache, S ints.
        counts: new tokens of each sequence, S ints.
        width: W, the largest of `counts`.
        column_mask: `[B, T]` bool on the CPU, False at padding; `None` where every column is a token.
        offsets: per row, position id less logical position of its first new token; empty where none were given.
    """

    def __init__(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        index: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
        column_mask: torch.Tensor | None = None,
    ):
        self.starts = tuple(starts)
        self.counts = tuple(counts)
        self.width = max(self.counts)
        self.column_mask = column_mask
        self.offsets: list[int | None] = []
        self._index = index  # [S * W] flat column b * T + i of each sequence slot (0 where there is none)
        self._slot = slot  # [B, T] flat sequence slot s * W + j of each column (-1 at padding)

    @classmethod
    def whole(cls, batch: int, width: int, starts: Sequence[int] | None = None) -> "Rows":
        """One sequence per row, every column a token."""
        return cls(starts or (0,) * batch, (width,) * batch)

    @classmethod
    def from_columns(cls, sequence: torch.Tensor, starts: Sequence[int]) -> "Rows":
        """From the sequence number of each column.

        Args:
            sequence: `[B, T]` int64 on the CPU, the sequence each column belongs to, -1 at padding; the columns of one
                sequence lie in one row, in order.
            starts: cached tokens of each sequence.
        """
        flat = sequence.flatten()
        columns = torch.nonzero(flat >= 0).flatten()
        owner = flat[columns]
        counts = torch.bincount(owner, minlength=len(starts))
        width = max(int(counts.max()), 1) if len(counts) else 1
        # sequences are numbered in the order of their columns, so a running index gives the place inside each
        place = torch.arange(len(columns)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        index = torch.zeros(len(starts) * width, dtype=torch.long)
        index[owner * width + place] = columns
        slot = torch.full_like(flat, -1)
        slot[columns] = owner * width + place
        rows = cls(starts, counts.tolist(), index, slot.view_as(sequence), sequence >= 0)
        rows.width = width
        return rows

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after this forward."""
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether each row is one sequence and each column a token."""
        return self._index is None

    def members(self) -> list[list[int]]:
        """The sequences of each row, B lists."""
        if self._slot is None:
            return [[sequence] for sequence in range(len(self.counts))]
        return [(row[row >= 0] // self.width).unique().tolist() for row in self._slot]

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Columns `[B, H, T, D]` to sequences `[S, H, W, D]`; slots past a sequence's end are some finite column."""
        if self._index is None:
            return states
        flat = states.transpose(1, 2).flatten(0, 1)
        picked = flat.index_select(0, self._index.to(states.device))
        return picked.unflatten(0, (len(self.starts), self.width)).transpose(1, 2)

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """Sequences `[S, H, W, ...]` to columns `[B, H, T, ...]`, zeros at padding."""
        if self._slot is None:
            return states
        flat = states.transpose(1, 2).flatten(0, 1)
        slot = self._slot.to(states.device)
        picked = flat.index_select(0, slot.clamp(min=0).flatten()).unflatten(0, slot.shape)
        keep = (slot >= 0).view(*slot.shape, *(1,) * (picked.dim() - 2))
        return torch.where(keep, picked, 0).transpose(1, 2)

    def split(self, size: int) -> list[tuple[slice, "Rows"]]:
        """Cuts the columns into chunks of `size`; each chunk starts where the one before it ended."""
        total = self._slot.shape[1] if self._slot is not None else self.width
        starts, chunks = self.starts, []
        for begin in range(0, total, size):
            part = slice(begin, min(begin + size, total))
            if self.column_mask is None:
                rows = Rows.whole(len(starts), part.stop - part.start, starts)
            else:
                rows = Rows.from_columns(_row_numbers(self.column_mask[:, part]), starts)
            chunks.append((part, rows))
            starts = rows.lengths
        chunks[0][1].offsets = self.offsets
        return chunks


def _row_numbers(column_mask: torch.Tensor) -> torch.Tensor:
    """Sequence numbers `[B, T]` where each row is one sequence."""
    numbers = torch.arange(len(column_mask))[:, None].expand_as(column_mask)
    return torch.where(column_mask, numbers, -1)


class RowHistory:
    """What a cache has seen: tokens per row, and which of its columns were padding (needed to crop by columns).

    Attributes:
        lengths: tokens stored per row.
        columns: columns seen, padding included; what `Cache.get_seq_length` reports.
        offsets: per row, position id less logical position, where position ids were given; `None` = not known.
    """

    def __init__(self):
        self.lengths: list[int] = []
        self.columns = 0
        self.offsets: list[int | None] = []
        # runs of columns: (width, mask [B, width] on the CPU or None where every column is a token)
        self._runs: list[tuple[int, torch.Tensor | None]] = []

    @classmethod
    def of(
        cls, lengths: Sequence[int], columns: int, offsets: Sequence[int | None], mask: torch.Tensor | None
    ) -> "RowHistory":
        """What these attributes say, with the columns' mask as `column_mask` returns it."""
        history = cls()
        history.lengths, history.columns, history.offsets = list(lengths), columns, list(offsets)
        history._runs = [(columns, mask)] if columns else []
        return history

    def copy(self) -> "RowHistory":
        """The same, apart."""
        history = copy.copy(self)
        history._runs = list(self._runs)  # the other lists are replaced, never changed
        return history

    def column_mask(self) -> torch.Tensor | None:
        """`[B, columns]` bool on the CPU, False at padding; `None` where every column is a token."""
        return None if all(mask is None for _, mask in self._runs) else self.column_positions() >= 0

    def append(self, rows: Rows, columns: int) -> None:
        """Records one forward of `columns` columns."""
        self.lengths = list(rows.lengths)
        self.columns += columns
        if rows.offsets:
            before = self.offsets or [None] * len(rows.offsets)
            self.offsets = [old if new is None else new for new, old in zip(rows.offsets, before, strict=True)]
        if rows.column_mask is not None:
            self._runs.append((columns, rows.column_mask))
        elif self._runs and self._runs[-1][1] is None:
            self._runs[-1] = (self._runs[-1][0] + columns, None)
        else:
            self._runs.append((columns, None))

    def crop(self, columns: int) -> None:
        """Forgets the last `columns` columns."""
        columns = min(columns, self.columns)
        self.columns -= columns
        while columns:
            width, mask = self._runs.pop()
            removed = min(width, columns)
            columns -= removed
            if mask is None:
                self.lengths = [length - removed for length in self.lengths]
            else:
                lost = mask[:, width - removed :].sum(1).tolist()
                self.lengths = [length - n for length, n in zip(self.lengths, lost, strict=True)]
            if removed < width:
                self._runs.append((width - removed, None if mask is None else mask[:, : width - removed]))

    def select(self, indices: Sequence[int]) -> None:
        """Keeps (or repeats) rows in the order given."""
        if not self.lengths:  # storage may exist before the first token
            return
        self.lengths = [self.lengths[i] for i in indices]
        self.offsets = [self.offsets[i] for i in indices] if self.offsets else []
        self._runs = [(width, None if mask is None else mask[list(indices)]) for width, mask in self._runs]

    def check_mask(self, attention_mask: torch.Tensor | None) -> None:
        """Refuses a mask `[B, >= columns]` whose cached part contradicts what was stored; `None` = all tokens.

        Raises:
            ValueError: the mask marks other tokens.
        """
        given = None if attention_mask is None else attention_mask[:, : self.columns]
        held = self.column_mask()
        if held is None:
            agrees = given is None or bool(given.all())
        else:
            agrees = bool(held.all()) if given is None else torch.equal(given.ne(0).cpu(), held)
        if not agrees:
            raise ValueError(
                "attention_mask: its cached part marks other tokens than the cache holds; "
                "the mask must extend the one the cache was filled with."
            )

    def column_positions(self) -> torch.Tensor:
        """Logical position `[B, columns]` int64 (CPU) of each column seen, -1 at padding."""
        batch = len(self.lengths)
        masks = [torch.ones(batch, width, dtype=torch.bool) if m is None else m for width, m in self._runs]
        mask = torch.cat(masks, 1) if masks else torch.ones(batch, 0, dtype=torch.bool)
        return torch.where(mask, mask.cumsum(1) - 1, -1)


class PendingRows:
    """The sequences in what callers pass to `forward`, in two halves.

    Making one checks shapes and sends what lies on a GPU on its way to the host, behind the work that is queued there;
    `read` waits for that and no longer. What is launched in between runs meanwhile.

    Args:
        batch: B.
        width: T, new columns.
        attention_mask: `[B, columns seen + T]`, 0 at padding, or `None`. Only padding is expressed by it.
        position_ids: `[B, T]` or `[1, T]`. Only checked: the positions of a row's tokens must rise by one (from any
            start, since RoPE is relative, but on from those in the cache); a restart at 0 begins a packed document.
        cu_seq_lens: cumulative document lengths over the flattened batch, as the flattening collator gives them.
        history: the cache's, where there is one.

    Raises:
        ValueError: for a mask or position ids of another shape, or inputs of another batch size than the cache's.
    """

    def __init__(
        self,
        batch: int,
        width: int,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cu_seq_lens: torch.Tensor | None = None,
        history: RowHistory | None = None,
    ):
        self._shape = batch, width
        self._mask, self._cu_seq_lens, self._history = attention_mask, cu_seq_lens, history or RowHistory()
        seen = self._history.columns
        if seen and len(self._history.lengths) != batch:
            raise ValueError(
                f"input_ids: batch of {batch}, but the cache holds {len(self._history.lengths)} rows; "
                "use cache.batch_repeat_interleave or cache.batch_select_indices to match them."
            )
        if position_ids is not None and tuple(position_ids.shape) not in ((batch, width), (1, width)):
            raise ValueError(f"position_ids: shape {tuple(position_ids.shape)}, expected {(batch, width)}.")
        sent = {} if position_ids is None else {"positions": position_ids}
        if attention_mask is not None:
            if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
                raise ValueError(
                    "attention_mask: RecSA takes a 2D mask [batch, columns] of padding only; 4D masks, block masks "
                    "and mask dictionaries would fix what a query reads, which is what the selection decides."
                )
            if attention_mask.shape != (batch, seen + width):
                raise ValueError(
                    f"attention_mask: shape {tuple(attention_mask.shape)}, expected {(batch, seen + width)} "
                    f"({seen} cached columns + {width} new ones)."
                )
            sent["mask"] = attention_mask[:, seen:].ne(0)
            # a decode step mostly repeats what it was given; counting writes nothing as long as the cache
            sent["counts"] = attention_mask[:, :seen].count_nonzero(1)
        self._sent = _Sent(sent)

    def read(self) -> Rows:
        """Waits for the inputs.

        Raises:
            ValueError: for a mask that disagrees with the cache, position ids with gaps, or packed documents together
                with a filled cache.
        """
        (batch, width), history = self._shape, self._history
        sent = self._sent.arrived()
        position_ids, tokens = sent.get("positions"), None
        if "mask" in sent:
            if history.columns and (width > 1 or sent["counts"].tolist() != history.lengths):
                history.check_mask(self._mask)
            tokens = None if bool(sent["mask"].all()) else sent["mask"].bool()
        starts = list(history.lengths) if history.columns else [0] * batch
        first = _document_starts(batch, width, tokens, position_ids, self._cu_seq_lens)
        if first is None:
            whole = Rows.whole(batch, width, starts)
            rows = whole if tokens is None else Rows.from_columns(_row_numbers(tokens), starts)
            if position_ids is not None:
                rows.offsets = _offsets(position_ids.expand(batch, width), tokens, starts, history)
            return rows
        if history.columns:
            raise ValueError("position_ids: packed documents cannot continue a filled cache; run them without one.")
        mask = tokens if tokens is not None else torch.ones(batch, width, dtype=torch.bool)
        sequence = first.flatten().cumsum(0).view(batch, width) - 1
        sequence = torch.where(mask, sequence, -1)
        return Rows.from_columns(sequence, [0] * int(first.sum()))


class _Sent:
    """Small tensors of integers on their way to the host; in one copy where they share a GPU, as each costs."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            self._flat = flat.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(device).record_event()

    def arrived(self) -> dict[str, torch.Tensor]:
        """The tensors on the host, in the shapes they had; booleans may have become integers."""
        if self._event is None:
            return {name: tensor.cpu() for name, tensor in self._tensors.items()}
        self._event.synchronize()
        parts = self._flat.split([tensor.numel() for tensor in self._tensors.values()])
        return {name: p.view(t.shape) for p, (name, t) in zip(parts, self._tensors.items(), strict=True)}


def _document_starts(
    batch: int,
    width: int,
    tokens: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
) -> torch.Tensor | None:
    """Columns `[B, T]` at which a sequence begins, where some row holds several; else `None`."""
    by_position = None
    if position_ids is not None and width > 1:
        by_position = _starts_by_position(position_ids.expand(batch, width), tokens)
    if cu_seq_lens is None:
        return by_position
    by_length = _starts_by_length(batch, width, tokens, cu_seq_lens)
    if by_position is not None and (by_length is None or not torch.equal(by_position, by_length)):
        raise ValueError("cu_seq_lens_q: marks other documents than position_ids; pass one of them.")
    return by_length


def _starts_by_position(position: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor | None:
    first = torch.zeros_like(position, dtype=torch.bool)
    for row, places in enumerate(position):
        columns = torch.arange(len(places)) if tokens is None else torch.nonzero(tokens[row]).flatten()
        places = places[columns]
        jumps = torch.ones_like(places, dtype=torch.bool)
        jumps[1:] = places[1:] != places[:-1] + 1
        if bool((jumps[1:] & (places[1:] != 0)).any()):
            raise ValueError(
                "position_ids: positions of a row's tokens must rise by one, or restart at 0 where a packed document "
                "begins; RecSA places tokens by their order, padding left out, and cannot leave positions out."
            )
        first[row, columns] = jumps
        first[row, 0] |= len(columns) == 0  # a row of padding alone is an empty sequence
    return first if int(first.sum()) > len(first) else None


def _starts_by_length(
    batch: int, width: int, tokens: torch.Tensor | None, cu_seq_lens: torch.Tensor
) -> torch.Tensor | None:
    borders = cu_seq_lens.cpu().long()
    if tokens is not None and len(borders) > batch + 1:
        raise ValueError("cu_seq_lens_q: cannot be combined with an attention_mask that marks padding.")
    if int(borders[0]) != 0 or int(borders[-1]) != batch * width or bool((borders[1:] <= borders[:-1]).any()):
        raise ValueError(f"cu_seq_lens_q: must rise from 0 to the {batch * width} tokens; got {borders.tolist()}.")
    first = torch.zeros(batch * width, dtype=torch.bool)
    first[borders[:-1]] = True
    first = first.view(batch, width)
    first[:, 0] = True
    return first if int(first.sum()) > batch else None


def _offsets(
    position: torch.Tensor, tokens: torch.Tensor | None, starts: list[int], history: RowHistory
) -> list[int | None]:
    """Position id less logical position of each row's first new token; it may not change behind cached tokens."""
    offsets: list[int | None] = []
    for row, start in enumerate(starts):
        columns = torch.arange(1) if tokens is None else torch.nonzero(tokens[row]).flatten()[:1]
        if not len(columns):
            offsets.append(None)
            continue
        offsets.append(int(position[row, columns]) - start)
        known = history.offsets[row] if history.offsets else None
        # without earlier position ids both usual countings are right: of tokens, and of columns
        allowed = (0, history.columns - start) if known is None else (known,)
        if start and offsets[-1] not in allowed:
            raise ValueError(
                f"position_ids: row {row} goes on at {int(position[row, columns])} behind {start} cached tokens; "
                f"expected {start + allowed[0]}, since positions must follow those of the cached tokens."
            )
    return offsets
