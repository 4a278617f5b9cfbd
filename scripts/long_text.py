"""Tokenises a text of any length piece by piece: the ids are those of the whole text, in time linear in its length.

A tokenizer that gets a text at once holds a record of every token beside its id, and may warn that the text is too
long. Here the text is cut where its pre-tokeniser splits anyway, each part is tokenised alone, and only ids are kept.
This file knows no model and no particular tokenizer: every cut is checked against the tokenizer at hand.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils import logging

# Characters that are read, and tokenised, at a time.
PIECE = 2**20
PART = 2**16
# Characters on each side of a cut that its check looks at: more than any token, any word in most texts.
WINDOW = 512
# Borders where a cut is tried, best first, each written for the text reversed: the match ends at the cut.
BORDERS = (
    re.compile(r"\S(?=[\r\n])"),  # a line begins: sure for Qwen's pre-tokeniser
    re.compile(r"[^\S\r\n](?=\S)"),  # a blank after a word: it belongs to the next word in most vocabularies
    re.compile(r"\S(?=\s)"),  # a word begins
)
TRIES = 8  # of each kind of border in a part


def read_pieces(path: str) -> Iterator[str]:
    """Yields a UTF-8 text file, or standard input for `-`, in pieces of `PIECE` characters.

    Line ends are translated as `Path.read_text` does.

    Raises:
        OSError, UnicodeDecodeError: as soon as the file cannot be opened, read or decoded.
    """
    if path != "-":
        with open(path, encoding="utf-8") as file:
            yield from iter(lambda: file.read(PIECE), "")
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale says
    yield from iter(lambda: sys.stdin.read(PIECE), "")


def not_blank(pieces: Iterable[str]) -> Iterator[str]:
    """Yields `pieces` unchanged.

    Raises:
        ValueError: at the end, if they hold nothing but whitespace.
    """
    blank = True
    for piece in pieces:
        blank = blank and not piece.strip()
        yield piece
    if blank:
        raise ValueError("the text is empty")


def chat_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str]) -> Iterable[str]:
    """The chat prompt of one user's message that is given in pieces, in pieces again.

    A template that does anything but put text around the message (some strip it) gets the message as a whole.
    """

    def render(message: str) -> str:
        messages = [{"role": "user", "content": message}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )

    probe, other = "\n <&>'first'\n ", " \n{{ 'Second' }} \n"
    before, _, after = render(probe).partition(probe)
    if render(other) == f"{before}{other}{after}":
        return chain([before], pieces, [after])
    return [render("".join(pieces))]


def tokenize_text(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], part: int = PART) -> torch.Tensor:
    """Tokenises a text that is given in pieces, however they are cut.

    A text or a tokenizer that leaves no place to cut (no whitespace; a prefix added to every text) is tokenised as a
    whole: slower and with more memory, the ids are right all the same.

    Args:
        pieces: the text; consumed once.
        part: characters to tokenise at a time, about.

    Returns:
        `[1, N]` int64: `tokenizer(text).input_ids` with its special tokens, without a warning about their number.
    """
    ids: list[torch.Tensor] = []
    # shown after a second: short texts need no bar
    with logging.tqdm(desc="tokenizing", unit="char", unit_scale=True, delay=1) as bar:

        def counted() -> Iterator[str]:
            for piece in regroup(pieces, part):
                yield piece
                bar.update(len(piece))

        ids.extend(torch.tensor(some, dtype=torch.long) for some in token_parts(tokenizer, counted(), part))
    return torch.cat(ids)[None]


def token_parts(
    tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], part: int = PART, special: bool = True
) -> Iterator[list[int]]:
    """Yields the ids of :func:`tokenize_text` as they are made, without its special tokens unless `special`."""
    frame: tuple[list[int], list[int]] | None = ([], [])
    if special:
        frame = special_frame(tokenizer)
    if frame is None:
        yield encode(tokenizer, "".join(pieces), special=True).input_ids
        return
    before, after = frame
    yield before
    for text in split_text(tokenizer, pieces, part):
        yield encode(tokenizer, text).input_ids
    yield after


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> BatchEncoding:
    """The ids of `text`, without the special tokens around it unless `special`."""
    return tokenizer(
        text,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # the warning about the length is about a limit that dense attention has
    )


def special_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """The ids that the tokenizer puts before and after any text, or `None` if a sample does not tell."""
    ids, framed = encode(tokenizer, "a").input_ids, encode(tokenizer, "a", special=True).input_ids
    places = [i for i in range(len(framed)) if framed[i : i + len(ids)] == ids]
    if not ids or len(places) != 1:
        return None
    return framed[: places[0]], framed[places[0] + len(ids) :]


def split_text(tokenizer: PreTrainedTokenizerBase, pieces: Iterable[str], part: int) -> Iterator[str]:
    """Yields the text in parts of about `part` characters whose ids, put together, are those of the whole text."""
    # text that may be cut no more, and the text after it
    settled: list[str] = []
    text = ""
    for more in regroup(pieces, part):
        text += more
        # the last part needs no cut
        cut = find_cut(tokenizer, text) if len(more) == part else None
        if cut is not None:
            yield "".join((*settled, text[:cut]))
            settled, text = [], text[cut:]
        elif len(text) > 2 * WINDOW:
            # looked at once and not again: time stays linear where no cut is possible
            settled.append(text[: -2 * WINDOW])
            text = text[-2 * WINDOW :]
    yield "".join((*settled, text))


def regroup(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Yields the text of `pieces` in strings of `size` characters, the last one shorter."""
    waiting: list[str] = []
    missing = size
    for piece in pieces:
        begin = 0
        while len(piece) - begin >= missing:
            yield "".join((*waiting, piece[begin : begin + missing]))
            begin += missing
            waiting, missing = [], size
        waiting.append(piece[begin:])
        missing -= len(piece) - begin
    yield "".join(waiting)


def find_cut(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The last place in `text`, at least `WINDOW` characters from both ends, where it may be cut."""
    backwards = text[::-1]
    for border in BORDERS:
        for match in islice(border.finditer(backwards, WINDOW, max(len(text) - WINDOW, 0)), TRIES):
            cut = len(text) - match.end()
            if may_cut(tokenizer, text[cut - WINDOW : cut], text[cut : cut + WINDOW]):
                return cut
    return None


def may_cut(tokenizer: PreTrainedTokenizerBase, left: str, right: str) -> bool:
    """Whether the ids of `left` and `right`, which need not begin or end at words, are those of both together.

    Equal ids alone could be chance: tokens across words may pair up from wherever a text begins. So the pre-tokeniser
    must split there too, which only a tokenizer written in Python does not tell.
    """
    both = encode(tokenizer, left + right)
    first = encode(tokenizer, left).input_ids
    if both.input_ids != first + encode(tokenizer, right).input_ids:
        return False
    if not both.is_fast:
        return True
    words = both.word_ids()
    return 0 < len(first) < len(words) and words[len(first) - 1] != words[len(first)]
