"""Puts facts, and questions about them with their answers, into any text: retrieval-dense rows for any tokenizer.

    ... The secret code of the crimson harbor is seven amber delta. ...     a fact, somewhere in the text
    ... What is the secret code of the crimson harbor? It is seven amber delta. ...    a question, later in the text

The kinds are ``needle`` (one fact), ``lookalike`` (facts whose keys share a word), ``alias`` (two hops: one fact says
what another name stands for) and ``values`` (several facts about one key, all of them asked for). The small model's
own world of texts is ``needle_text.py``; its lists of words are used here. Everything follows from the random
generator that is passed; this file never touches the disk. All of it is [our decision].
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

import needle_text
from long_text import encode

KINDS = ("needle", "lookalike", "alias", "values")
LOOKALIKES, VALUES_A_KEY = 4, 3
VALUE_WORDS = (2, 4)  # fewest and most
BORDER_WINDOW = 64  # tokens before a drawn place among which a better one is looked for
FEWEST_WORDS = 8  # of each list; fewer would make most keys of a row the same
SENTENCE_ENDS, UNSPACED_ENDS = (".", "!", "?", "…"), ("。", "！", "？")

Piece = tuple[str, bool]  # text, and whether it is part of an answer
Block = tuple[Piece, ...]


@dataclass(frozen=True)
class Style:
    """How facts and questions are worded. An answer is a value after ``ask``, or key, ``bridge`` and value after
    ``ask_alias``; ``joiner`` stands between several values, ``end`` after the last."""

    fact: str
    link: str
    ask: str
    ask_alias: str
    bridge: str
    joiner: str
    end: str

    def literals(self) -> list[str]:
        """Every word of the style itself."""
        parts = (self.fact, self.link, self.ask, self.ask_alias, self.bridge, self.joiner, self.end)
        return " ".join(parts).format(key="", alias="", value="").split()


STYLES = (
    Style(
        "The secret code of the {key} is {value}.",
        "The {alias} is now called the {key}.",
        "What is the secret code of the {key}? It is",
        "What is the secret code of the {alias}? That is the",
        ", so it is",
        ",",
        ".",
    ),
    Style(
        "Remember this: {key} means {value}.",
        "Remember this: {alias} stands for {key}.",
        "Now recall what was to be remembered: {key} means",
        "Now recall what was to be remembered: {alias} stands for",
        ", which means",
        " and",
        ".",
    ),
    # the small model's own
    Style(
        "note : {key} = {value} ;",
        "link : {alias} -> {key} ;",
        "ask : {key} =",
        "ask : {alias} ->",
        " =",
        " =",
        " ;",
    ),
)
# For a vocabulary without the words above: a key is always followed by what belongs to it.
BARE = Style("{key} {value}", "{alias} {key}", "{key}", "{alias}", "", "", "")


@dataclass(frozen=True)
class Needles:
    """What goes into one row. ``places`` in [0, 1) rise, ``ids`` (int64) and ``masks`` (bool) are those of each block;
    ``size`` is their tokens in all."""

    places: list[float]
    ids: list[torch.Tensor]
    masks: list[torch.Tensor]
    size: int


class NeedleWriter:
    """Writes the needles of rows with one tokenizer.

    Args:
        kinds: which of ``KINDS``, each drawn equally often.
        density: most tokens of facts and questions, as a share of a row's (one group of them is always there).

    Raises:
        ValueError: for unknown kinds, a density outside (0, 0.5], or a vocabulary with too few words.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str] = KINDS, density: float = 0.25
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"--needle-kinds: {', '.join(unknown) or 'none'} given; choose from {', '.join(KINDS)}")
        if not 0 < density <= 0.5:
            raise ValueError(f"--needle-density must be above 0 and at most 0.5, got {density}")
        self.tokenizer, self.kinds, self.density = tokenizer, tuple(kinds), density
        lists = [self._known(words) for words in (needle_text.KEY_FIRST, needle_text.KEY_SECOND, needle_text.VALUES)]
        if min(map(len, lists)) < FEWEST_WORDS:
            words = self._vocabulary_words(3 * len(needle_text.VALUES))
            lists = [words[i::3] for i in range(3)]
            if min(map(len, lists)) < FEWEST_WORDS:
                raise ValueError(
                    f"--needles: the tokenizer knows {len(words)} words, too few for keys and values; "
                    "set --needles 0 or use a tokenizer with a larger vocabulary"
                )
        self._first, self._second, self._values = lists
        self._numbers = bool(self._known(["1234567890"]))
        self._styles = [s for s in STYLES if self._known(s.literals()) == s.literals()] or [BARE]
        self._text = lru_cache(maxsize=2**18)(self._decode)

    def check(self, length: int) -> None:
        """Raises ``ValueError`` if the facts and questions of some kind take more than half of ``length`` tokens."""
        for kind in self.kinds:
            rng = random.Random(kind)
            groups = [self._group(kind, rng, style, set()) for style in self._styles for _ in range(4)]
            size = max(sum(len(self.tokens(block)[0]) for block in facts + asks) for facts, asks in groups)
            if size > length // 2:
                raise ValueError(
                    f"--needle-kinds: {kind} takes {size} tokens, more than half of a row of {length} (--length); "
                    f"rows of {2 * size} or more would do, or leave {kind} out of --needle-kinds"
                )

    def write(self, rng: random.Random, length: int) -> Needles:
        """Facts and questions for a row of ``length`` tokens in all, in an order in which each question can be
        answered. ``length`` must have passed :meth:`check`."""
        style, used = rng.choice(self._styles), set[tuple[str, str]]()
        placed: list[tuple[float, list[int], list[bool]]] = []
        size = 0
        while True:
            facts, asks = self._group(rng.choice(self.kinds), rng, style, used)
            blocks = [self.tokens(block) for block in facts + asks]
            more = sum(len(ids) for ids, _ in blocks)
            if size + more > (length * self.density if placed else length - 1):
                if placed:
                    break
                continue
            places = sorted(rng.random() for _ in blocks)
            placed += [(place, *block) for place, block in zip(places, blocks, strict=True)]
            size += more
        placed.sort(key=lambda block: block[0])
        ids = [torch.tensor(block[1]) for block in placed]
        masks = [torch.tensor(block[2]) for block in placed]
        return Needles([block[0] for block in placed], ids, masks, size)

    def insert(self, text: torch.Tensor, needles: Needles) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts ``needles`` between the tokens of ``text``, at ends of sentences or between words where there are any.

        Args:
            text: ``[N]`` int64.

        Returns:
            ``ids`` int64 and ``answer_mask`` bool, both ``[N + needles.size]``.
        """
        numbers = text.tolist()
        pieces, masks, done = [], [], 0
        for place, ids, mask in zip(needles.places, needles.ids, needles.masks, strict=True):
            upto = max(done, self._border(numbers, 1 + int(place * len(numbers))))
            pieces += [text[done:upto], ids]
            masks += [torch.zeros(upto - done, dtype=torch.bool), mask]
            done = upto
        pieces.append(text[done:])
        masks.append(torch.zeros(len(text) - done, dtype=torch.bool))
        return torch.cat(pieces), torch.cat(masks)

    def tokens(self, block: Block) -> tuple[list[int], list[bool]]:
        """Ids of a block as they follow other words, and for each whether it belongs to an answer.

        A piece's ids are those that its text adds to the text before it, which is what a model meets that reads the
        question and writes the answer. Where tokens would reach across the border the piece is tokenised alone, so
        the mask is exact with any tokenizer.
        """
        text = "."  # stands for the words before; a tokenizer may write a first word differently
        ids = list(encode(self.tokenizer, text).input_ids)
        begin = len(ids)
        mask: list[bool] = []
        for piece, marked in block:
            longer = encode(self.tokenizer, text + piece).input_ids
            if longer[: len(ids)] != ids:
                longer = ids + encode(self.tokenizer, piece).input_ids
            mask += [marked] * (len(longer) - len(ids))
            text, ids = text + piece, list(longer)
        return ids[begin:], mask

    def _group(
        self, kind: str, rng: random.Random, style: Style, used: set[tuple[str, str]]
    ) -> tuple[list[Block], list[Block]]:
        """Facts, and questions that may come once all of them are known."""
        key = self._key(rng, used)
        name = " ".join(key)

        def fact(name: str, value: str) -> Block:
            return ((" " + style.fact.format(key=name, value=value), False),)

        def ask(name: str, *values: str) -> Block:
            pieces: list[Piece] = [(" " + style.ask.format(key=name), False)]
            for i, value in enumerate(values):
                pieces += [(style.joiner, False)] * (i > 0) + [(" " + value, True)]
            return (*pieces, (style.end, False))

        if kind == "needle":
            value = self._value(rng)
            return [fact(name, value)], [ask(name, value)] * rng.randint(1, 2)
        if kind == "values":
            values = [self._value(rng) for _ in range(VALUES_A_KEY)]
            return [fact(name, value) for value in values], [ask(name, *values)]
        if kind == "lookalike":
            twins = [
                self._key(rng, used, *((key[0], None) if i % 2 else (None, key[1]))) for i in range(LOOKALIKES - 1)
            ]
            known = [(" ".join(k), self._value(rng)) for k in (key, *twins)]
            return [fact(*k) for k in known], [ask(*k) for k in rng.sample(known, 2)]
        alias, value = " ".join(self._key(rng, used)), self._value(rng)
        facts = [fact(name, value), ((" " + style.link.format(alias=alias, key=name), False),)]
        rng.shuffle(facts)
        question = (" " + style.ask_alias.format(alias=alias), False)
        return facts, [(question, (" " + name, True), (style.bridge, False), (" " + value, True), (style.end, False))]

    def _key(
        self, rng: random.Random, used: set[tuple[str, str]], first: str | None = None, second: str | None = None
    ) -> tuple[str, str]:
        """A key that the row does not have yet; in a row so long that it has nearly all, perhaps one that it has."""
        for _ in range(32):
            key = (first or rng.choice(self._first), second or rng.choice(self._second))
            if key not in used:
                break
        used.add(key)
        return key

    def _value(self, rng: random.Random) -> str:
        if self._numbers and rng.random() < 0.5:
            return str(rng.randrange(100_000, 1_000_000))
        return " ".join(rng.choices(self._values, k=rng.randint(*VALUE_WORDS)))

    def _known(self, words: Iterable[str]) -> list[str]:
        """Those of ``words`` that are more than the unknown token."""
        unknown = self.tokenizer.unk_token_id
        kept = []
        for word in words:
            ids = encode(self.tokenizer, word).input_ids
            if ids and (unknown is None or unknown not in ids):
                kept.append(word)
        return kept

    def _vocabulary_words(self, most: int) -> list[str]:
        """Entries of the vocabulary that are words, in the order of their ids."""
        special = set(self.tokenizer.all_special_tokens)
        entries = sorted(self.tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        words = (word for word, _ in entries if word.isalnum() and word not in special and self._known([word]))
        return list(islice(words, most))

    def _border(self, ids: list[int], place: int) -> int:
        """The last end of a sentence or line shortly before ``place``, else the last place between words, else
        ``place``. What follows begins with a blank or a newline wherever the script has them, as a block itself does.
        """
        between = None
        for at in range(min(place, len(ids) - 1), max(place - BORDER_WINDOW, 0), -1):
            left = self._text(ids[at - 1])
            if left.endswith(UNSPACED_ENDS):
                return at
            ends = left.endswith(SENTENCE_ENDS)
            if not ends and between is not None:
                continue
            follows = self._text(ids[at - 1], ids[at])[len(left) :][:1]
            if follows in ("\n", "\r") or (ends and follows.isspace()):
                return at
            if follows.isspace():
                between = at
        return place if between is None else between

    def _decode(self, *ids: int) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
