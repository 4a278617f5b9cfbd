"""RULER's 13 tasks: a task, a tokenizer, a length and a seed make a prompt of at most that many tokens.

Where RULER is silent, or this differs from it [our decision]:
- A length counts every token: chat template, special tokens, answer prefix and the tokens to generate. A haystack is
  as long as fits, to 1/256 of the length or to one unit of the haystack; RULER grows it in coarser steps.
- A sample follows from its task, length and seed alone, never from the samples before it; haystacks repeat at any
  length, and what runs out is an error.
- Keys are distinct, and no distractor has the key or the value that is asked for.
- Words are this repository's (``haystacks.py``). Common words are single words up to ``SINGLE_WORDS`` tokens and
  pairs beyond; RULER changes to a longer list, too.
- The example before a variable-tracking question has a fixed number of lines, about the 500 tokens of RULER's.
- Blanks at the end of an answer prefix, and at its begin behind a chat template, are left out.
"""

from __future__ import annotations

import math
import random
import string
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from long_text import chat_pieces, encode, token_parts
from ruler.haystacks import NOISE, PAIRS, WORDS, Questions, Texts, pair, plain_sentences, split_sentences

DEPTHS = 40  # places in essays, evenly spaced [RULER]
SINGLE_WORDS = 8192
SHORT = 4096  # below it common words are less frequent [RULER]
EXAMPLE_LINES = 14
TOLERANCE = 256
# A longer text is measured by slices when its size is estimated.
WHOLE, SLICES, SLICE = 2**16, 32, 2048


@dataclass(frozen=True)
class Draft:
    """A sample whose haystack has no size yet; ``render(size)`` is the message with a haystack of ``size`` units.

    ``size`` is from ``smallest`` to ``largest``, which only a list of words has.
    """

    prefix: str
    references: tuple[str, ...]
    smallest: int
    render: Callable[[int], str]
    largest: int = sys.maxsize


@dataclass(frozen=True)
class Task:
    """A task's tokens to generate, its metric (:func:`ruler.metric.score`), and how a sample is drafted.

    ``needs`` names the text that must be given. ``counting`` tasks ask for several hops or for counts.
    """

    new_tokens: int
    draft: Callable[[str, int, Texts], Draft]
    any_of: bool = False
    needs: str | None = None
    counting: bool = False


@dataclass(frozen=True)
class Sample:
    """A prompt ``ids`` int64 [N], which ends with the answer prefix; N + ``new_tokens`` is at most the length.

    ``message`` is what the user says, ``size`` the number of units in its haystack.
    """

    task: str
    ids: torch.Tensor
    references: tuple[str, ...]
    new_tokens: int
    message: str
    prefix: str
    size: int


# ---- needles --------------------------------------------------------------------------------------------------------

NEEDLE = "One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class Needles:
    """The form of a needle task; ``haystack`` is ``noise``, ``essays`` or ``needles`` (distractors alone)."""

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1


def draw(rng: random.Random, kind: str) -> str:
    if kind == "words":
        return pair(rng.randrange(PAIRS))
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_other(rng: random.Random, kind: str, taken: set[str]) -> str:
    while (drawn := draw(rng, kind)) in taken:
        pass
    return drawn


def draft_needles(form: Needles, seed: str, length: int, texts: Texts) -> Draft:
    rng = random.Random(seed)
    taken: set[str] = set()

    def distinct(kind: str) -> str:
        taken.add(drawn := draw_other(rng, kind, taken))
        return drawn

    values = {distinct(form.key): [distinct(form.value) for _ in range(form.values)] for _ in range(form.keys)}
    needles = [NEEDLE.format(kind=form.value, key=key, value=value) for key in values for value in values[key]]
    rng.shuffle(needles)
    asked = rng.sample(list(values), form.queries)
    query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    haystack = texts.haystack if form.haystack == "essays" else form.haystack
    prose = haystack in ("essays", "sentences")
    if prose:
        depths = [depth / (DEPTHS - 1) for depth in sorted(rng.sample(range(DEPTHS), len(needles)))]
    else:
        depths = sorted(rng.random() for _ in needles)
    one = form.queries * form.values == 1  # answer
    kind = form.value.removesuffix("s") if one else form.value
    some, are, ask = ("A", "is", "is") if one else ("Some", "are", "are all")

    def render(size: int) -> str:
        hay = random.Random(f"{seed}/haystack")
        if haystack == "essays":
            words = texts.essays or ()
            whole, part = divmod(size, len(words))
            units = split_sentences(" ".join(words * whole + words[:part]))
        elif haystack == "sentences":
            units = plain_sentences(hay, size)
        elif haystack == "noise":
            units = [NOISE] * size
        else:
            units = [
                NEEDLE.format(
                    kind=form.value, key=draw_other(hay, form.key, taken), value=draw_other(hay, form.value, taken)
                )
                for _ in range(size)
            ]
        context = (" " if prose else "\n").join(insert(units, needles, depths))
        return (
            f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {kind} afterwards.\n{context}\n"
            f"What {ask} the special magic {kind} for {query} mentioned in the provided text?"
        )

    prefix = f" The special magic {kind} for {query} mentioned in the provided text {are}"
    references = tuple(value for key in asked for value in values[key])
    return Draft(prefix, references, len(needles), render)


def insert(units: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> list[str]:
    """``units`` with each fact before the unit at its depth; depths in [0, 1], rising."""
    lines: list[str] = []
    done = 0
    for fact, depth in zip(facts, depths, strict=True):
        upto = int(depth * len(units))
        lines += [*units[done:upto], fact]
        done = upto
    return lines + list(units[done:])


# ---- variable tracking ----------------------------------------------------------------------------------------------

HOPS = 4
VT_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {number} variables are assigned the "
    "value {value}, they are: "
)


def draft_tracking(seed: str, length: int, texts: Texts) -> Draft:
    """One chain of four hops in noise, after an example with shorter names."""
    rng = random.Random(seed)

    def assignments(letters: int) -> tuple[list[str], str, list[str], list[float]]:
        names: list[str] = []
        while len(names) <= HOPS:
            name = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if name not in (*names, "VAR"):
                names.append(name)
        value = str(rng.randint(10_000, 99_999))
        given = [value, *(f"VAR {name}" for name in names[:-1])]
        facts = [f"VAR {name} = {before}" for name, before in zip(names, given, strict=True)]
        return names, value, facts, sorted(rng.random() for _ in facts)

    def question(value: str, facts: list[str], depths: list[float], size: int) -> str:
        return VT_QUESTION.format(context="\n".join(insert([NOISE] * size, facts, depths)), value=value)

    shown, value, facts, depths = assignments(3)
    prefix = VT_PREFIX.format(number=HOPS + 1, value=value)
    example = f"{question(value, facts, depths, EXAMPLE_LINES)}{prefix.rstrip()} {' '.join(shown)}\n\n"
    names, value, facts, depths = assignments(5)

    def render(size: int) -> str:
        return example + question(value, facts, depths, size)

    return Draft(VT_PREFIX.format(number=HOPS + 1, value=value), tuple(names), HOPS + 1, render)


# ---- common and frequent words --------------------------------------------------------------------------------------

COMMON = 10
CWE_QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


def numbered(words: Iterable[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def word_list(words: Sequence[str], often: int, seldom: int, rng: random.Random) -> str:
    """The first ``COMMON`` of the words ``often`` times each, the others ``seldom`` times, in random order."""
    listed = [*words[:COMMON]] * often + [*words[COMMON:]] * seldom
    rng.shuffle(listed)
    return CWE_QUESTION.format(context=numbered(listed))


def draft_common_words(seed: str, length: int, texts: Texts) -> Draft:
    rng = random.Random(seed)
    often, seldom, example_often, example_seldom, example_size = (
        (6, 1, 3, 1, 20) if length < SHORT else (30, 3, 10, 3, 40)
    )
    if length <= SINGLE_WORDS:
        pool = list(WORDS)
        rng.shuffle(pool)
    else:
        pool = [pair(number) for number in rng.sample(range(PAIRS), PAIRS)]
    shown = [pool.pop() for _ in range(example_size)]
    example = word_list(shown, example_often, example_seldom, rng) + f"{CWE_PREFIX} {numbered(shown[:COMMON])}\n"

    def render(size: int) -> str:
        return example + word_list(pool[:size], often, seldom, random.Random(f"{seed}/order"))

    return Draft(CWE_PREFIX, tuple(pool[:COMMON]), 2 * COMMON, render, largest=len(pool))


FREQUENT, CODED_LETTERS = 3, 6
ZETA = math.pi**2 / 6  # zeta(2): ranks are Zipf distributed with exponent 2 [RULER]


def draft_frequent_words(seed: str, length: int, texts: Texts) -> Draft:
    """Coded words with Zipf's frequencies; the most frequent one is written as dots and does not count."""
    rng = random.Random(seed)
    number = max(length // 50, FREQUENT + 2)
    coded: dict[str, None] = {}
    while len(coded) < number:
        coded["".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
    words = ["...", *list(coded)[1:]]

    def render(size: int) -> str:
        listed = [word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / ZETA))]
        random.Random(f"{seed}/order").shuffle(listed)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text?"
        )

    prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
    # from 73 words on, the ranks that count differ in their numbers, also when rounded down
    return Draft(prefix, tuple(words[1 : 1 + FREQUENT]), 80, render)


# ---- question answering ---------------------------------------------------------------------------------------------


def draft_answering(name: str, seed: str, length: int, texts: Texts) -> Draft:
    """A question's own documents first, then others of its article, then any; all of them again where all are in."""
    data: Questions = getattr(texts, name)
    rng = random.Random(seed)
    question = rng.choice(data.questions)
    more, known = list(question.more), {*question.own, *question.more}
    rest = [number for number in range(len(data.documents)) if number not in known]
    rng.shuffle(more)
    rng.shuffle(rest)
    order = [*question.own, *more, *rest]
    only = "Only give me the answer and do not output any other words."

    def render(size: int) -> str:
        chosen = [order[i % len(order)] for i in range(size)]
        random.Random(f"{seed}/order").shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{data.documents[number]}" for i, number in enumerate(chosen, 1))
        return (
            f"Answer the question based on the given documents. {only}\n\nThe following are given documents.\n\n"
            f"{context}\n\nAnswer the question based on the given documents. {only}\n\nQuestion: {question.text}"
        )

    return Draft(" Answer:", question.answers, len(question.own), render)


# ---- samples --------------------------------------------------------------------------------------------------------


def needle_task(haystack: str, **form: str | int) -> Task:
    needs = "essays" if haystack == "essays" else None
    return Task(128, partial(draft_needles, Needles(haystack, **form)), needs=needs)  # type: ignore[arg-type]


TASKS = {
    "niah_single_1": needle_task("noise"),
    "niah_single_2": needle_task("essays"),
    "niah_single_3": needle_task("essays", value="uuids"),
    "niah_multikey_1": needle_task("essays", keys=4),
    "niah_multikey_2": needle_task("needles"),
    "niah_multikey_3": needle_task("needles", key="uuids", value="uuids"),
    "niah_multivalue": needle_task("essays", values=4),
    "niah_multiquery": needle_task("essays", keys=4, queries=4),
    "vt": Task(30, draft_tracking, counting=True),
    "cwe": Task(120, draft_common_words, counting=True),
    "fwe": Task(50, draft_frequent_words, counting=True),
    "qa_1": Task(32, partial(draft_answering, "squad"), any_of=True, needs="squad"),
    "qa_2": Task(32, partial(draft_answering, "hotpotqa"), any_of=True, needs="hotpotqa"),
}


def missing_text(task: str, texts: Texts) -> str | None:
    """What the task lacks, with the option that gives it; ``None`` if it can be made."""
    needs = TASKS[task].needs
    if needs is None or getattr(texts, needs) is not None or (needs == "essays" and texts.haystack != "essays"):
        return None
    if needs == "essays":
        return "needs essays: give --essays, or choose --haystack noise or --haystack sentences"
    return f"needs --{needs}"


def make_sample(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    seed: int | str,
    texts: Texts | None = None,
    chat: bool | None = None,
) -> Sample:
    """A sample of at most ``length`` tokens, prompt and tokens to generate together.

    Args:
        chat: whether the tokenizer's chat template stands around the message, thinking off; left out, if it has one.

    Raises:
        ValueError: an unknown task, a text that is missing, no chat template, or a length that the task's facts do
            not fit into.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose from {', '.join(TASKS)}")
    texts = texts or Texts()
    if missing := missing_text(task, texts):
        raise ValueError(f"task {task} {missing}")
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if chat and not tokenizer.chat_template:
        raise ValueError("--chat: the tokenizer has no chat template; use --no-chat")
    definition = TASKS[task]
    draft = definition.draft(f"{task}/{length}/{seed}", length, texts)

    def tokenize(message: str) -> torch.Tensor:
        pieces: Iterable[str] = [message, draft.prefix.rstrip()]
        if chat:
            pieces = chain(chat_pieces(tokenizer, [message]), [draft.prefix.strip()])
        return torch.tensor(list(chain.from_iterable(token_parts(tokenizer, pieces, special=not chat))))

    size, ids = fit(draft, tokenizer, tokenize, length - definition.new_tokens, f"task {task} of {length:,} tokens")
    return Sample(task, ids, draft.references, definition.new_tokens, draft.render(size), draft.prefix, size)


def fit(
    draft: Draft,
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[str], torch.Tensor],
    budget: int,
    name: str,
) -> tuple[int, torch.Tensor]:
    """The size and ids of about the longest prompt within ``budget`` tokens.

    Numbers of tokens rise almost evenly with the size. Slices of the text tell where the budget is met, and then a
    whole prompt is tokenised, once or twice for long ones.

    Raises:
        ValueError: the smallest haystack does not fit; the message begins with ``name``.
    """

    def towards(size: float) -> int:
        """A size that may be tried next, larger than what is known to fit."""
        return min(max(int(size), low[0] + 1), high[0] - 1 if high[0] else draft.largest)

    ids = tokenize(draft.render(draft.smallest))
    if len(ids) > budget:
        raise ValueError(f"{name}: its facts and question alone take {len(ids):,} of {budget:,} prompt tokens")
    low, high = (draft.smallest, len(ids)), (0, 0)  # what fits, and what does not: size and tokens
    aim = budget - budget // (2 * TOLERANCE)
    frame = low[1] - estimate(tokenizer, draft.render(low[0]))  # tokens around the message
    guess, slope = towards(low[0] + 64), 1.0
    for _ in range(3):
        more = estimate(tokenizer, draft.render(guess)) + frame - low[1]
        slope = max(more / (guess - low[0]), 0.1)  # a unit more may round down to no word more
        guess = towards(low[0] + (aim - low[1]) / slope)
    tries = 0
    while budget - low[1] > budget // TOLERANCE and high[0] != low[0] + 1:
        if low[0] == draft.largest:
            raise ValueError(f"{name}: the {draft.largest:,} words that there are make {low[1]:,} tokens only")
        made = tokenize(draft.render(guess))
        tries += 1
        if len(made) <= budget:
            low, ids = (guess, len(made)), made
        else:
            high = (guess, len(made))
        if not high[0]:
            guess = towards(low[0] + (aim - low[1]) / slope)
        elif tries > 6:  # uneven units, such as documents
            guess = towards((low[0] + high[0]) / 2)
        else:
            guess = towards(low[0] + (aim - low[1]) / (high[1] - low[1]) * (high[0] - low[0]))
    return low[0], ids


def estimate(tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """About how many tokens a text has: a short one is tokenised, of a long one slices are."""
    if len(text) <= WHOLE:
        return len(encode(tokenizer, text).input_ids)
    step = (len(text) - SLICE) / (SLICES - 1)
    slices = [text[int(i * step) : int(i * step) + SLICE] for i in range(SLICES)]
    # from blank to blank: a cut word has more tokens
    slices = [part[max(part.find(" "), 0) : part.rfind(" ") if " " in part[1:] else None] for part in slices]
    return len(text) * sum(len(encode(tokenizer, part).input_ids) for part in slices) / sum(map(len, slices))
