"""Words, haystacks and question-answering data that the tasks are made of, from this repository or the user's files.

RULER takes its words from the package wonderwords and a list of English words; here they are those of
``needle_text.py``: single words, and pairs of an adjective and a noun. Nothing is downloaded unless a source is named
that is no local file.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import needle_text

# What the needles of an essay task lie in: RULER's own essays, its noise, or this repository's generated sentences.
HAYSTACKS = ("essays", "noise", "sentences")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."  # [RULER]

ADJECTIVES = tuple(dict.fromkeys(needle_text.KEY_FIRST + needle_text.QUALITIES))
_OBJECTS = needle_text.VALUES[needle_text.VALUES.index("ruby") :]  # numbers and letters come before
NOUNS = tuple(
    dict.fromkeys(needle_text.KEY_SECOND + needle_text.PEOPLE + needle_text.THINGS + needle_text.PLACES + _OBJECTS)
)
_VERBS = needle_text.ACTIONS + needle_text.DEEDS
WORDS = tuple(dict.fromkeys([*ADJECTIVES, *NOUNS, *_VERBS]))
PAIRS = len(ADJECTIVES) * len(NOUNS)

TEXT_SUFFIXES = (".txt", ".md")


def pair(number: int) -> str:
    """One of the ``PAIRS`` hyphenated pairs, such as ``crimson-harbor``."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"


def plain_sentences(rng: random.Random, number: int) -> list[str]:
    """Sentences of fifteen words of the small model's world, with a capital and a full stop."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    rows = needle_text.haystack().draw(number, generator=generator)[:, :-1].tolist()
    return [" ".join(needle_text.WORDS[i] for i in row).capitalize() + "." for row in rows]


def split_sentences(text: str) -> list[str]:
    """Sentences, each ending with ``.``, ``!`` or ``?`` and its quotes; RULER asks NLTK instead."""
    return re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+", text.strip())


@dataclass(frozen=True)
class Question:
    """``own`` are the numbers of the documents that belong to the question, ``more`` of those of the same article."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    more: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Texts:
    """What samples are made of beside the tasks' own words.

    Args:
        haystack: one of ``HAYSTACKS``, for the five tasks that RULER hides in essays.
        essays: the words of the essays.
    """

    haystack: str = "essays"
    essays: tuple[str, ...] | None = None
    squad: Questions | None = None
    hotpotqa: Questions | None = None
    digests: dict[str, str] = field(default_factory=dict)  # of what was read, by option

    @classmethod
    def read(
        cls, haystack: str, essays: str | None = None, squad: str | None = None, hotpotqa: str | None = None
    ) -> Texts:
        """Reads each source that is named: a file, a folder, or ``name[:config][:split]`` for ``datasets``.

        Essays: text, a folder of texts, JSON with ``text`` (RULER's file), or JSONL with ``text``. SQuAD and HotpotQA:
        the publishers' JSON, or JSONL with the columns of ``datasets``.

        Raises:
            ValueError: a source cannot be read, or holds something else; the message names the option.
        """
        words = None if essays is None else tuple(read_essays(essays).split())
        if words == ():
            raise ValueError(f"--essays {essays}: holds no word")
        read_squad = None if squad is None else squad_questions(squad)
        read_hotpotqa = None if hotpotqa is None else hotpotqa_questions(hotpotqa)
        found = {"essays": words, "squad": read_squad, "hotpotqa": read_hotpotqa}
        digests = {
            name: hashlib.sha256(repr(data).encode()).hexdigest()[:16]
            for name, data in found.items()
            if data is not None
        }
        return cls(haystack, words, read_squad, read_hotpotqa, digests)


def read_essays(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES)
        if files:
            return "\n".join(file.read_text(encoding="utf-8") for file in files)
    if path.is_file() and path.suffix in TEXT_SUFFIXES:
        return path.read_text(encoding="utf-8")
    data = read_rows("essays", source, "train")
    rows = [data] if isinstance(data, dict) else data
    try:
        return "\n".join(row["text"] for row in rows)
    except (TypeError, KeyError) as error:
        raise ValueError(f'--essays {source}: expected records such as {{"text": "..."}}') from error


def read_rows(option: str, source: str, split: str) -> Any:
    """The content of a JSON file, or the records of a JSONL file or a dataset."""
    path = Path(source).expanduser()
    try:
        if path.is_file() and path.suffix in (".jsonl", ".ndjson"):
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--{option} {source}: not JSON ({error})") from error
    name, config, part = (*source.split(":"), "", "")[:3]
    try:
        import datasets

        return list(datasets.load_dataset(name, config or None, split=part or split))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--{option} {source}: no such file, and datasets cannot load it as name[:config][:split] "
            f"({type(error).__name__}: {error})"
        ) from error


def squad_questions(source: str) -> Questions:
    """SQuAD's paragraphs and answerable questions. RULER reads the development set of version 2.0."""
    data = read_rows("squad", source, "validation")
    rows: list[tuple[Any, str, str, Sequence[str]]] = []  # article, paragraph, question, answers
    try:
        if isinstance(data, dict):
            for number, article in enumerate(data["data"]):
                for paragraph in article["paragraphs"]:
                    for asked in paragraph["qas"]:
                        answers = [answer["text"] for answer in asked["answers"]]
                        answers = [] if asked.get("is_impossible") else answers
                        rows.append((number, paragraph["context"], asked["question"], answers))
        else:
            rows = [(row["title"], row["context"], row["question"], row["answers"]["text"]) for row in data]
    except (TypeError, KeyError) as error:
        raise ValueError(f"--squad {source}: not SQuAD's layout (no {error})") from error
    documents = tuple(sorted({row[1] for row in rows}))
    numbers = {document: number for number, document in enumerate(documents)}
    articles: dict[Any, dict[int, None]] = {}
    for title, paragraph, _, _ in rows:
        articles.setdefault(title, {})[numbers[paragraph]] = None
    questions = []
    for title, paragraph, asked, given in rows:
        own = numbers[paragraph]
        known = tuple(dict.fromkeys(answer for answer in given if answer.strip()))
        if known:
            questions.append(Question(asked, known, (own,), tuple(i for i in articles[title] if i != own)))
    return checked("squad", source, Questions(documents, tuple(questions)))


def hotpotqa_questions(source: str) -> Questions:
    """HotpotQA's paragraphs and questions. RULER reads the development set with distractors."""
    data = read_rows("hotpotqa", source, "validation")
    rows: list[tuple[str, str, list[str]]] = []
    try:
        for row in data:
            context = row["context"]
            if isinstance(context, dict):
                context = zip(context["title"], context["sentences"], strict=True)
            documents = [f"{title}\n{''.join(sentences)}" for title, sentences in context]
            rows.append((row["question"], row["answer"], documents))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"--hotpotqa {source}: not HotpotQA's layout ({error})") from error
    known = tuple(sorted({document for _, _, documents in rows for document in documents}))
    number = {document: i for i, document in enumerate(known)}
    questions = tuple(
        Question(asked, (answer,), tuple(dict.fromkeys(number[document] for document in documents)))
        for asked, answer, documents in rows
    )
    return checked("hotpotqa", source, Questions(known, questions))


def checked(option: str, source: str, questions: Questions) -> Questions:
    if not questions.questions:
        raise ValueError(f"--{option} {source}: holds no question with an answer")
    return questions
