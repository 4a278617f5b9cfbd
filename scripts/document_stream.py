"""Documents from text files, JSONL and `datasets`, as an endless stream of tokens that can be resumed anywhere.

A document is tokenised in pieces as it is read, in time linear in its length, however long it is. A local file is read
once before: a text must be UTF-8, and a stream goes on only in files that are as they were. Records are read as their
turn comes: the first one of a file or dataset must hold text; a later one that does not is an empty document, with a
notice. This file knows neither rows nor models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from long_text import read_pieces, token_parts

TEXT_SUFFIXES, JSONL_SUFFIXES = (".txt", ".md"), (".jsonl", ".ndjson")
OTHER_SUFFIXES = (".json", ".parquet", ".csv", ".gz", ".zst", ".zip")
SHUFFLED_AHEAD = 1000  # documents of a streamed dataset among which the next one is drawn
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A text in pieces; `special` says whether the tokenizer's special tokens belong around it (a chat has its
    own)."""

    pieces: Iterable[str]
    special: bool = True


class Source:
    """What text is taken from.

    Attributes:
        name: as messages call it.
        digests: of local files by path, which tell whether they are the same as before.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, column: str, seed: int):
        self.name, self._tokenizer, self._column, self._seed = name, tokenizer, column, seed
        self.digests: dict[str, str] = {}
        self._skipped = 0

    def documents(self, epoch: int, begin: int) -> Iterator[Document]:
        """The documents of an epoch from number `begin` of its order on."""
        raise NotImplementedError

    def _or_empty(self, read: Callable[..., Document], *arguments: Any) -> Document:
        """What `read` returns; an empty document at a `ValueError`, told at the 1st, 2nd, 4th, ... one."""
        try:
            return read(*arguments)
        except ValueError as error:
            self._skipped += 1
            if self._skipped.bit_count() == 1:
                logger.warning("%s; skipped, %d so far", error, self._skipped)
            return Document([])


class Files(Source):
    """Documents of local files, in an order of their own in each epoch.

    A JSONL file is read once to learn where its lines begin, so that any line can be read at any time.

    Raises:
        ValueError: if a text is not UTF-8, a JSONL file's first record holds no text, or there is no document at all.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, column: str, seed: int):
        name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        super().__init__(name, tokenizer, column, seed)
        self._paths = paths
        self._lines = [_line_starts(path) if path.suffix.lower() in JSONL_SUFFIXES else None for path in paths]
        for path, lines in zip(paths, self._lines, strict=True):
            self.digests[str(path)] = _digest(path)
            if lines is None:
                for _ in _read_text(path):
                    pass
        self._ends = array("q")  # documents in each file and all before it
        for lines in self._lines:
            self._ends.append((self._ends[-1] if self._ends else 0) + (1 if lines is None else len(lines)))
        for number, lines in enumerate(self._lines):
            if lines:
                self._document(self._ends[number] - len(lines))
        if not self._ends[-1]:
            raise ValueError(f"--data {self.name}: no document in it, 0 tokens found")

    def documents(self, epoch: int, begin: int) -> Iterator[Document]:
        generator = torch.Generator().manual_seed(_seed(self._seed, epoch))
        for number in torch.randperm(self._ends[-1], generator=generator)[begin:].tolist():
            yield self._or_empty(self._document, number)

    def _document(self, number: int) -> Document:
        file = bisect_right(self._ends, number)
        path, lines = self._paths[file], self._lines[file]
        if lines is None:
            return Document(_read_text(path))
        line = number - self._ends[file] + len(lines)
        with path.open("rb") as stream:
            stream.seek(lines[line])
            text = stream.readline()
        where = f"{path}, record {line + 1}"
        try:
            record = json.loads(text)
        except ValueError as error:  # not JSON, or not UTF-8
            raise ValueError(f"--data {where}: not a line of JSON ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f'--data {where}: expected an object such as {{"text": "..."}}, got {text[:40]!r}')
        return _read_record(record, where, self._tokenizer, self._column)


class Streamed(Source):
    """Documents of `name[:config][:split]` as `datasets` streams them, shuffled among `SHUFFLED_AHEAD`.

    Raises:
        ValueError: if `datasets` is not installed, cannot load the source, or its records hold no text.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, column: str, seed: int):
        super().__init__(name, tokenizer, column, seed)
        try:
            import datasets
        except ImportError as error:
            raise ValueError(f"--data {name}: not a file, and datasets needs `pip install datasets`") from error
        path, config, split = (*name.split(":"), "", "")[:3]
        try:
            self._dataset = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
            first = next(iter(self._dataset), None)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"--data {name}: no such file, and datasets cannot load it as name[:config][:split] "
                f"({type(error).__name__}: {error})"
            ) from error
        if first is None:
            raise ValueError(f"--data {name}: no record in it, 0 tokens found")
        _read_record(first, name, tokenizer, column)

    def documents(self, epoch: int, begin: int) -> Iterator[Document]:
        # those before `begin` are read and dropped
        seed = _seed(self._seed, self.name, epoch) % 2**32
        records = self._dataset.shuffle(seed=seed, buffer_size=SHUFFLED_AHEAD).skip(begin)
        for number, record in enumerate(records, begin + 1):
            where = f"{self.name}, document {number} of epoch {epoch}"
            yield self._or_empty(_read_record, record, where, self._tokenizer, self._column)


def find_files(source: str) -> list[Path]:
    """The local files that `source` names; none if it must be a dataset's name.

    Raises:
        ValueError: if it is written like a file but there is none, or is a file of an unknown kind.
    """
    path, known = Path(source).expanduser(), TEXT_SUFFIXES + JSONL_SUFFIXES
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix.lower() in known and p.is_file())
    if path.is_file():
        if path.suffix.lower() not in known:
            raise ValueError(
                f"--data {source}: files are read by their suffix, {', '.join(known)}; save it as JSONL or plain text"
            )
        return [path]
    if Path(source.partition(":")[0]).expanduser().is_dir():
        return []
    if path.suffix.lower() in known + OTHER_SUFFIXES or source.startswith((".", "/", "~")):
        raise ValueError(f"--data {source}: no such file; check the path")
    return []


class DocumentStream:
    """The tokens of the documents of all sources, which take turns, document by document and epoch after epoch.

    A text's document ends with the tokenizer's end-of-text token, if it has one.
    """

    def __init__(self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase):
        self._sources, self._tokenizer = sources, tokenizer
        self._digests = {path: digest for source in sources for path, digest in source.digests.items()}
        self.load_state_dict({"turn": 0, "places": [[0, 0] for _ in sources], "offset": 0, "digests": self._digests})

    def state_dict(self) -> dict[str, Any]:
        """Whose turn it is, each source's epoch and document, how many tokens of the present one were taken, and which
        files they came from."""
        places = [list(place) for place in self._places]
        return {"turn": self._turn, "places": places, "offset": self._offset, "digests": self._digests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the token at which `state` was taken.

        Raises:
            ValueError: the text has changed since; names the file.
        """
        was, now = state["digests"], self._digests
        if changed := [path for path in was | now if was.get(path) != now.get(path)]:
            raise ValueError(f"--data {', '.join(changed[:9])}: not the text that it was when the run began")
        self._turn, self._places = state["turn"], [list(place) for place in state["places"]]
        self._documents = [s.documents(*place) for s, place in zip(self._sources, self._places, strict=True)]
        self._offset = 0
        self._open()
        while self._offset < state["offset"]:
            if not len(self._read(min(state["offset"] - self._offset, 2**20))):
                raise ValueError(f"--data {self._sources[self._turn].name}: not the text that it was")

    def piece(self, most: int) -> torch.Tensor:
        """The next 1 to `most` tokens of one document, int64 `[n]`: less than `most` only at its end."""
        while not len(ids := self._read(most)):
            self._places[self._turn][1] += 1
            self._turn = (self._turn + 1) % len(self._sources)
            self._open()
        return ids

    def pieces(self, total: int) -> list[torch.Tensor]:
        """The next `total` tokens in pieces, each of one document."""
        taken = []
        while total:
            taken.append(self.piece(total))
            total -= len(taken[-1])
        return taken

    def _open(self) -> None:
        turn, place = self._turn, self._places[self._turn]
        document = next(self._documents[turn], None)
        if document is None:
            place[:] = place[0] + 1, 0
            self._documents[turn] = self._sources[turn].documents(*place)
            document = next(self._documents[turn])
        self._parts = document_parts(self._tokenizer, document)
        self._rest = torch.empty(0, dtype=torch.long)
        self._offset = 0

    def _read(self, most: int) -> torch.Tensor:
        got = [self._rest]
        have = len(self._rest)
        while have < most and (part := next(self._parts, None)) is not None:
            got.append(torch.tensor(part, dtype=torch.long))
            have += len(part)
        ids = torch.cat(got) if len(got) > 1 else got[0]  # no copy of a long rest
        self._rest = ids[most:]
        self._offset += min(have, most)
        return ids[:most]


def document_parts(tokenizer: PreTrainedTokenizerBase, document: Document) -> Iterator[list[int]]:
    """Ids of a document as they are made; nothing of a blank one."""
    pieces = iter(document.pieces)
    head = []
    for piece in pieces:
        head.append(piece)
        if piece.strip():
            break
    else:
        return
    last, end = None, tokenizer.eos_token_id
    for ids in token_parts(tokenizer, chain(head, pieces), special=document.special):
        last = ids[-1] if ids else last
        yield ids
    if document.special and end is not None and last != end:
        yield [end]


def open_sources(names: Iterable[str], tokenizer: PreTrainedTokenizerBase, column: str, seed: int) -> list[Source]:
    """The sources of documents: local files are one source together, each dataset is one of its own.

    Args:
        names: as `--data` has them.
        column: field of a record that holds the text; where a record has none, its `messages` are read as a chat.
        seed: of the order of the documents.

    Raises:
        ValueError: if a source cannot be read, naming it.
    """
    files: list[Path] = []
    opened: list[Source] = []
    for name in names:
        if found := find_files(name):
            files += found
        else:
            opened.append(Streamed(name, tokenizer, column, seed))
    if files:
        opened.insert(0, Files(files, tokenizer, column, seed))
    return opened


def count_tokens(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, enough: int) -> int:
    """The tokens of all sources, counted in each until there are `enough`.

    Raises:
        ValueError: if one holds none, naming it.
    """
    total = 0
    for source in sources:
        found = 0
        parts = chain.from_iterable(document_parts(tokenizer, document) for document in source.documents(0, 0))
        while found < enough and (part := next(parts, None)) is not None:
            found += len(part)
        if not found:
            raise ValueError(f"--data {source.name}: 0 tokens found, there is no text in it")
        total += found
    return total


def _line_starts(path: Path) -> array[int]:
    """Byte offsets of the lines that are not blank."""
    starts, at = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)
    return starts


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _read_text(path: Path) -> Iterator[str]:
    try:
        yield from read_pieces(str(path))
    except UnicodeDecodeError as error:
        bad = error.object[error.start : error.end]
        raise ValueError(f"--data {path}: not UTF-8 text ({error.reason}: {bad!r})") from error


def _read_record(record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase, column: str) -> Document:
    """The document of a record: its text column, else its `messages` as the tokenizer's chat template writes them.

    Raises:
        ValueError: there is no text, naming `where`.
    """
    text, chat = record.get(column), None
    if text is None and isinstance(record.get("messages"), list):
        if not tokenizer.chat_template:
            raise ValueError(f"--data {where}: has `messages`, but the tokenizer has no chat template")
        try:
            text = chat = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        except Exception as error:  # a template may raise anything
            raise ValueError(f"--data {where}: not a chat for the template ({error})") from error
    if not isinstance(text, str):
        raise ValueError(
            f"--data {where}: no text in column {column!r}; its columns are {', '.join(record)}: name the "
            "right one with --text-column"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ValueError(f"--data {where}: not Unicode text ({error.reason})") from error
    return Document([text], special=chat is None)


def _seed(*what: str | int) -> int:
    return random.Random(repr(what)).getrandbits(63)
