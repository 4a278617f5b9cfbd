"""Rows of tokens to train on: from text files, JSONL, `datasets` or made up, packed, resumable, split over processes.

A row is a dictionary of 1-D tensors, all of the same length T:

    input_ids     int64
    labels        int64, the ids themselves (the model shifts them); -100 at what is not to be learnt, which is the
                  first token of each document at least
    position_ids  int64, from 0 in each document: documents of a row do not attend to each other
    answer_mask   bool, tokens that answer a question about what the row said before
    attention_mask  int64, 0 at padding; only without packing

The rows are one sequence that options and seed determine, whatever the number of processes; of `world` processes,
`rank` gets rows `rank`, `rank + world`, and so on. All read and tokenise the whole text for that, since where a row
begins depends on those before it. This file knows no model. Everything in it is [our decision].
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import needle_text
from document_stream import DocumentStream, count_tokens, find_files, open_sources
from long_text import encode
from needle_rows import KINDS, NeedleWriter

IGNORED = -100
SHORTEST = 16
LABELS = ("all", "answers")
NEEDLE_TEXT = "needle_text"
# Irrational steps: the n-th multiple's fractional part is below p for a share p of any long run of rows, those of one
# process alone included.
NEEDLE_STEP, SOURCE_STEP = 0.6180339887498949, 0.4142135623730951


@dataclass(frozen=True)
class DataOptions:
    """What rows are made of.

    Attributes:
        sources: each a text file (one document), a JSONL file with texts or chats, a folder of such files,
            `name[:config][:split]` of `datasets`, or `needle_text`, the small model's own world.
        length: T.
        packed: documents, or pieces of them, one after another in rows without padding; else one a row.
        needles: share of the rows of text into which facts and questions are put (`needle_rows.py`). Such a row is
            one document.
        seed: of the order of the documents, and of everything drawn.
        text_column: field that holds the text; where a record has none, its `messages` are read as a chat.
        labels: `all` tokens, or `answers` alone.
        needle_kinds, needle_density: see `NeedleWriter`.
        long_rows: further lengths and the share of the steps that each gets, for `TrainingBatches`.

    Raises:
        ValueError: for values out of range, naming the flag.
    """

    sources: tuple[str, ...]
    length: int
    packed: bool = True
    needles: float = 0.0
    seed: int = 0
    text_column: str = "text"
    labels: str = "all"
    needle_kinds: tuple[str, ...] = KINDS
    needle_density: float = 0.25
    long_rows: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("--data: no source; name a text or JSONL file, a dataset, or needle_text")
        if self.length < SHORTEST:
            raise ValueError(f"--length must be at least {SHORTEST} tokens, got {self.length}")
        if not 0 <= self.needles <= 1:
            raise ValueError(f"--needles is a share between 0 and 1, got {self.needles}")
        if self.labels not in LABELS:
            raise ValueError(f"--labels {self.labels}: unknown, choose from {', '.join(LABELS)}")
        is_text = any(source != NEEDLE_TEXT for source in self.sources)
        if self.labels == "answers" and is_text and self.needles < 1:
            raise ValueError("--labels answers: rows of plain text have no answers; add --needles 1")
        if self.needles and not is_text:
            raise ValueError(
                "--needles: needle_text has its own questions; leave --needles out or add a text to --data"
            )
        for length, share in self.long_rows:
            if length < SHORTEST or not 0 < share < 1:
                raise ValueError(
                    f"--long-rows {length}:{share}: expected LENGTH:SHARE with at least {SHORTEST} tokens and a share "
                    "of the steps between 0 and 1"
                )
        lengths = [self.length, *(length for length, _ in self.long_rows)]
        if len(set(lengths)) < len(lengths):
            raise ValueError(f"--long-rows: each length once, and none the ordinary one; got {lengths}")
        if sum(share for _, share in self.long_rows) >= 1:
            raise ValueError("--long-rows: the shares must leave something for rows of the ordinary length")


class TrainingRows:
    """An endless iterator over rows of `options.length` tokens.

    Args:
        rank, world: this process among how many.

    Raises:
        ValueError: before the first row, if a source cannot be read or all together hold less than one row.
    """

    def __init__(self, options: DataOptions, tokenizer: PreTrainedTokenizerBase, rank: int = 0, world: int = 1):
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world} processes")
        self.options, self.tokenizer, self.rank, self.world = options, tokenizer, rank, world
        self._row = 0
        if NEEDLE_TEXT in options.sources:
            _check_needle_text(options, tokenizer)
        self._pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self._writer = None
        if options.needles:
            self._writer = NeedleWriter(tokenizer, options.needle_kinds, options.needle_density)
            self._writer.check(options.length)
        self._stream: DocumentStream | None = None
        if texts := [source for source in options.sources if source != NEEDLE_TEXT]:
            sources = open_sources(texts, tokenizer, options.text_column, _seed(options, "documents"))
            found = count_tokens(sources, tokenizer, options.length)
            if found < options.length and (options.packed or options.needles):
                raise ValueError(
                    f"--data: {found:,} tokens found, fewer than one row of {options.length:,} (--length); add text, "
                    "choose a smaller --length, or pass --no-packing without --needles"
                )
            self._stream = DocumentStream(sources, tokenizer)
        self._text_share = 1 - (NEEDLE_TEXT in options.sources) / len(options.sources)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The next row of this process; those of the other processes are passed over."""
        mine = None
        for rank in range(self.world):
            row = self._make(self._row, rank == self.rank)
            mine = row or mine
            self._row += 1
        assert mine is not None
        return mine

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator stands: small, fit for JSON, the same in every process."""
        stream = None if self._stream is None else self._stream.state_dict()
        return {"options": _identity(self.options), "row": self._row, "stream": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the row at which `state` was taken, perhaps by another number of processes.

        Raises:
            ValueError: if `state` belongs to other options.
        """
        options = _identity(self.options)
        changed = [name for name, value in options.items() if state["options"].get(name) != value]
        if changed:
            raise ValueError(
                "the training data differ from those of the run to be resumed in "
                + ", ".join(f"{name} ({state['options'].get(name)!r}, now {options[name]!r})" for name in changed)
            )
        self._row = state["row"]
        if self._stream is not None:
            self._stream.load_state_dict(state["stream"])

    def _make(self, number: int, wanted: bool) -> dict[str, torch.Tensor] | None:
        """Row `number`, or `None` if it is not wanted; the stream of documents moves on all the same."""
        options = self.options
        rng = random.Random(_seed(options, "row", number))
        if self._stream is None or number * SOURCE_STEP % 1 >= self._text_share:
            return self._needle_text(rng) if wanted else None
        if self._writer is not None and number * NEEDLE_STEP % 1 < options.needles:
            needles = self._writer.write(rng, options.length)
            text = torch.cat(self._stream.pieces(options.length - needles.size))
            if not wanted:
                return None
            ids, answers = self._writer.insert(text, needles)
            return self._example([ids], answers)
        if options.packed:
            pieces = self._stream.pieces(options.length)
        else:
            # one token has nothing to be predicted
            while len((pieces := [self._stream.piece(options.length)])[0]) < 2:
                pass
        return self._example(pieces) if wanted else None

    def _needle_text(self, rng: random.Random) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        answers = torch.zeros(0, dtype=torch.bool)
        while not answers.any():  # a short text may come without a question
            ids, following, weights = needle_text.train_batch(1, self.options.length - 1, "cpu", generator)
            answers = torch.cat([torch.zeros(1, dtype=torch.bool), weights[0] == 1])
        return self._example([torch.cat([ids[0, :1], following[0]])], answers)

    def _example(self, pieces: list[torch.Tensor], answers: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        ids = torch.cat(pieces)
        positions = torch.cat([torch.arange(len(piece)) for piece in pieces])
        answers = torch.zeros(len(ids), dtype=torch.bool) if answers is None else answers
        learnt = positions > 0
        if self.options.labels == "answers":
            learnt = learnt & answers
        row = {
            "input_ids": ids,
            "labels": torch.where(learnt, ids, IGNORED),
            "position_ids": positions,
            "answer_mask": answers,
        }
        if not self.options.packed:
            row["attention_mask"] = torch.ones_like(ids)
            fill = {"input_ids": self._pad, "labels": IGNORED}
            room = self.options.length - len(ids)
            row = {k: torch.nn.functional.pad(v, (0, room), value=fill.get(k, 0)) for k, v in row.items()}
        return row


class TrainingBatches:
    """An endless iterator over batches, each of rows of one length: `options.length`, or one of `options.long_rows`.

    Which length a step has follows from its number, so all processes agree. The lengths read the documents in orders
    of their own. A batch of long rows has as many as hold the tokens of an ordinary one, or one.

    Args:
        rows: rows of the ordinary length in a batch of this process.
    """

    def __init__(
        self, options: DataOptions, tokenizer: PreTrainedTokenizerBase, rows: int, rank: int = 0, world: int = 1
    ):
        if rows < 1:
            raise ValueError(f"a batch must have at least one row, got {rows}")
        long = dict(options.long_rows)
        self._shares = [1 - sum(long.values()), *long.values()]
        lengths = [options.length, *long]
        self._counts = [max(1, rows * options.length // length) for length in lengths]
        changed = [replace(options, length=length, long_rows=()) for length in lengths]
        self._rows = [TrainingRows(one, tokenizer, rank, world) for one in changed]
        self._steps = [0] * len(lengths)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """The batch of the next step, `[rows, length]` each."""
        step = sum(self._steps) + 1
        # the length that is furthest behind its share; rounded, so that equal ones are equal
        behind = [round(share * step - steps, 6) for share, steps in zip(self._shares, self._steps, strict=True)]
        chosen = behind.index(max(behind))
        self._steps[chosen] += 1
        return collate([next(self._rows[chosen]) for _ in range(self._counts[chosen])])

    def state_dict(self) -> dict[str, Any]:
        """See `TrainingRows.state_dict`."""
        return {"shares": self._shares, "steps": list(self._steps), "rows": [rows.state_dict() for rows in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `TrainingRows.load_state_dict`."""
        if state["shares"] != self._shares:
            raise ValueError("--long-rows: other shares than in the run to be resumed")
        for rows, one in zip(self._rows, state["rows"], strict=True):
            rows.load_state_dict(one)
        self._steps = list(state["steps"])


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stacks rows `[T]` to batches `[B, T]`; raises `ValueError` if lengths or fields differ."""
    if len({(tuple(row), len(row["input_ids"])) for row in rows}) != 1:
        lengths = sorted({len(row["input_ids"]) for row in rows})
        raise ValueError(f"rows of a batch must have one length and the same fields; lengths here: {lengths}")
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def add_data_arguments(parser: argparse.ArgumentParser, needles: float = 0.0) -> None:
    """Adds the flags of `DataOptions`, but for the length, to a script's parser.

    Args:
        needles: share where --needles is left out and there is a text to put them into.
    """
    parser.set_defaults(default_needles=needles)
    group = parser.add_argument_group("training data")
    group.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="text files (.txt, .md: one document each), JSONL files with a `text` or `messages` field, folders of "
        "such files, `name[:config][:split]` of Hugging Face datasets (split: train), or needle_text, the world of "
        "the small model; several take turns",
    )
    group.add_argument("--text-column", default="text", help="field or column that holds the text (default: text)")
    group.add_argument("--no-packing", action="store_true", help="one document a row, padded, instead of packed rows")
    group.add_argument(
        "--needles",
        type=float,
        metavar="SHARE",
        help="share of the rows into which facts, and questions about them, are put; each of them one document of the "
        f"whole length (default: {needles:g})",
    )
    group.add_argument("--needle-kinds", nargs="+", default=list(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    group.add_argument(
        "--needle-density", type=float, default=0.25, help="share of such a row's tokens for them (default: 0.25)"
    )
    group.add_argument("--labels", default="all", help=f"tokens to learn: {' or '.join(LABELS)} (default: all)")
    group.add_argument("--data-seed", type=int, default=0, help="order of the documents and all that is drawn")
    group.add_argument(
        "--long-rows",
        nargs="+",
        default=[],
        metavar="LENGTH:SHARE",
        help="further lengths and their share of the steps, such as 524288:0.5 for every other step",
    )


def data_options(args: argparse.Namespace, length: int) -> DataOptions:
    """The options that `args` give for rows of `length` tokens; raises `ValueError` as `DataOptions` does, and for a
    file that does not exist."""
    long_rows = []
    for text in args.long_rows:
        tokens, _, share = text.partition(":")
        try:
            long_rows.append((int(tokens), float(share)))
        except ValueError as error:
            raise ValueError(f"--long-rows {text}: expected LENGTH:SHARE such as 524288:0.5") from error
    needles = args.needles
    if needles is None:
        needles = args.default_needles if any(source != NEEDLE_TEXT for source in args.data) else 0.0
    options = DataOptions(
        sources=tuple(args.data),
        length=length,
        packed=not args.no_packing,
        needles=needles,
        seed=args.data_seed,
        text_column=args.text_column,
        labels=args.labels,
        needle_kinds=tuple(args.needle_kinds),
        needle_density=args.needle_density,
        long_rows=tuple(long_rows),
    )
    for source in options.sources:
        if source != NEEDLE_TEXT:
            find_files(source)
    return options


def _check_needle_text(options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    sample = needle_text.make_example(400, "alias", 0)
    if encode(tokenizer, sample.prompt, special=True).input_ids != sample.prompt_ids.tolist():
        raise ValueError("--data needle_text: written in the words of models/small-dense; use that model's tokenizer")
    if options.length < 65:
        raise ValueError(f"--data needle_text: rows need at least 65 tokens (--length), got {options.length}")


def _seed(options: DataOptions, *what: str | int) -> int:
    """A seed for one purpose, different for each length."""
    return random.Random(repr((options.seed, options.length, *what))).getrandbits(63)


def _identity(options: DataOptions) -> dict[str, Any]:
    """The options as JSON gives them back."""
    return json.loads(json.dumps(asdict(options)))
