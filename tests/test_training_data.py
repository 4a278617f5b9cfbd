"""Rows of training data: borders, needles, shares, and that the stream goes on where it stopped."""

import argparse
import json
import random
import re
import sys
import time

import pytest
import torch

import long_text
import needle_text
import training_data
from conftest import tiny_model
from fresh import tiny_tokenizer
from needle_rows import KINDS, NeedleWriter
from test_long_text import CHAT, make
from training_data import DataOptions, TrainingBatches, TrainingRows, collate, data_options

TOKENIZERS = ("tiny", "word level", "byte level", "prefix and frame", "metaspace, first", "python")


def load(name: str):
    return tiny_tokenizer() if name == "tiny" else make(name)


@pytest.fixture
def draw():
    return random.Random(int(torch.randint(2**31, ())))


def words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(3, 320)}" for _ in range(count))


def story(draw: random.Random, length: int) -> str:
    """Plain sentences in the words of the small model, no question among them."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return needle_text.decode(needle_text.haystack().draw(length // 16, generator=generator).flatten())


def write_jsonl(path, texts, **more):
    path.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


@pytest.fixture
def corpus(tmp_path, draw):
    """A JSONL file of documents of 1 to 90 words, a text file of 150, and the texts."""
    texts = [words(draw, draw.choice([1, 2, 15, 16, 40, 90])) for _ in range(25)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_text(words(draw, 150))
    return (source, str(tmp_path / "b.txt")), [*texts, (tmp_path / "b.txt").read_text()]


def documents_of(row) -> list[list[int]]:
    """The ids of a packed row, cut where positions restart."""
    starts = [i for i, position in enumerate(row["position_ids"].tolist()) if position == 0]
    ids = row["input_ids"].tolist()
    return [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


def split_at_end(ids: list[int], end: int = 1) -> list[list[int]]:
    """The documents of a stream of ids, each up to and with its end token; what follows the last one is left out."""
    ends = [i + 1 for i, token in enumerate(ids) if token == end]
    return [ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def answers_of(tokenizer, row) -> list[str]:
    """The runs of answer tokens as text."""
    found, run = [], []
    for token, marked in [*zip(row["input_ids"].tolist(), row["answer_mask"].tolist(), strict=True), (0, False)]:
        if marked:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run, clean_up_tokenization_spaces=False).strip())
            run = []
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------------


def test_rows_are_the_documents_one_after_another(corpus):
    sources, texts = corpus
    tokenizer = tiny_tokenizer()
    expected = sorted([*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts)
    total = sum(map(len, expected))
    rows = TrainingRows(DataOptions(sources, 32), tokenizer)
    taken = [next(rows) for _ in range(-(-total // 32))]
    for row in taken:
        assert all(len(value) == 32 for value in row.values()) and "attention_mask" not in row
        assert not row["answer_mask"].any()
        position, previous = 0, None
        for token, at, label in zip(*(row[n].tolist() for n in ("input_ids", "position_ids", "labels")), strict=True):
            position = 0 if previous in (None, tokenizer.eos_token_id) else position + 1
            assert at == position and label == (token if position else -100)
            previous = token
    # each epoch holds each document once, whole but for the cuts at the ends of rows, in an order of its own
    taken += [next(rows) for _ in taken]
    documents = split_at_end(torch.cat([row["input_ids"] for row in taken]).tolist())
    first, second = documents[: len(texts)], documents[len(texts) : 2 * len(texts)]
    assert sorted(first) == sorted(second) == expected and first != second


def test_ranks_share_the_rows_of_one_process(corpus):
    options = DataOptions(corpus[0], 48, needles=0.4, needle_kinds=("needle", "alias"))
    tokenizer = tiny_tokenizer()
    alone = TrainingRows(options, tokenizer)
    single = [next(alone) for _ in range(36)]
    for world in (2, 3):
        ranks = [TrainingRows(options, tokenizer, rank, world) for rank in range(world)]
        shared = [next(rows) for _ in range(36 // world) for rows in ranks]
        assert all(same(a, b) for a, b in zip(single, shared, strict=True))
        assert all(rows.state_dict() == alone.state_dict() for rows in ranks)


@pytest.mark.parametrize("packed", [True, False])
def test_goes_on_where_it_stopped(corpus, packed):
    options = DataOptions(corpus[0], 40, packed=packed, needles=0.3, needle_kinds=("needle", "alias"), seed=3)
    tokenizer = tiny_tokenizer()
    rows = TrainingRows(options, tokenizer)
    states, taken = [], []
    for _ in range(60):  # more than an epoch
        states.append(json.loads(json.dumps(rows.state_dict())))
        taken.append(next(rows))
    other = TrainingRows(options, tokenizer)
    for at in range(60):
        other.load_state_dict(states[at])
        assert other.state_dict() == states[at]
        assert all(same(next(other), row) for row in taken[at : at + 2])
    two = [TrainingRows(options, tokenizer, rank, 2) for rank in range(2)]
    for rows in two:
        rows.load_state_dict(states[7])
    assert same(next(two[0]), taken[7]) and same(next(two[1]), taken[8])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_state_belongs_to_its_text(name, tmp_path, draw):
    """A file that was edited between a run and the one that goes on: refused by name, never read on for ever."""
    texts = [words(draw, 200), words(draw, 200)]
    write = {"a.txt": lambda path, texts: path.write_text(" ".join(texts)), "a.jsonl": write_jsonl}[name]
    write(tmp_path / name, texts)
    options = DataOptions((str(tmp_path / name),), 40)
    rows = TrainingRows(options, tiny_tokenizer())
    for _ in range(6):
        next(rows)
    for other in (texts[:1], texts[::-1]):
        write(tmp_path / name, other)
        with pytest.raises(ValueError, match=re.escape(name)):
            TrainingRows(options, tiny_tokenizer()).load_state_dict(rows.state_dict())


def test_records_without_text_are_skipped_with_a_notice(tmp_path, draw, caplog):
    """The rows are those of the other records, from any state on; the notice names file and record."""
    texts = [words(draw, 20) for _ in range(8)]
    path = tmp_path / "a.jsonl"
    write_jsonl(path, texts)
    bad = ['{"text": null}', '{"body": "w3"}', '{"text": "w3 \\ud800"}', "w3", b'{"text": "\xff"}']
    with path.open("ab") as file:
        file.writelines((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in bad)
    rows = TrainingRows(DataOptions((str(path),), 21), tiny_tokenizer())
    # 20 words, end of text; the second epoch has another order
    states, taken = zip(*[(rows.state_dict(), next(rows)) for _ in range(16)], strict=True)
    expected = sorted([*tiny_tokenizer()(text).input_ids, 1] for text in texts)
    for epoch in (taken[:8], taken[8:]):
        assert sorted(documents_of({k: torch.cat([r[k] for r in epoch]) for k in epoch[0]})) == expected
    assert re.search(r"a\.jsonl, record (9|1[0-3]): .*skipped, 1 so far", caplog.text)
    other = TrainingRows(DataOptions((str(path),), 21), tiny_tokenizer())
    other.load_state_dict(states[9])
    assert same(next(other), taken[9])


def test_a_suffix_counts_in_any_case(tmp_path, draw):
    text = words(draw, 90)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "A.TXT").write_text(text)
    write_jsonl(tmp_path / "A.JSONL", [text])
    rows = [next(TrainingRows(DataOptions((str(tmp_path / n),), 40), tiny_tokenizer())) for n in ("A.JSONL", "texts")]
    assert same(*rows)


def test_other_seeds_give_other_rows_and_a_state_belongs_to_its_options(corpus):
    tokenizer = tiny_tokenizer()
    rows = TrainingRows(DataOptions(corpus[0], 40), tokenizer)
    assert not same(next(rows), next(TrainingRows(DataOptions(corpus[0], 40, seed=1), tokenizer)))
    with pytest.raises(ValueError, match=r"length \(40, now 48\)"):
        TrainingRows(DataOptions(corpus[0], 48), tokenizer).load_state_dict(rows.state_dict())


def test_without_packing_each_row_is_one_padded_document(corpus):
    sources, texts = corpus
    tokenizer = tiny_tokenizer()
    rows = TrainingRows(DataOptions(sources, 64, packed=False), tokenizer)
    expected = []
    for text in texts:
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        expected += [ids[i : i + 64] for i in range(0, len(ids), 64)]
    expected = sorted(piece for piece in expected if len(piece) > 1)
    found = []
    for _ in expected:
        row = next(rows)
        kept = row["attention_mask"].bool()
        size = int(kept.sum())
        assert kept[:size].all() and torch.equal(row["position_ids"][:size], torch.arange(size))
        assert (row["labels"][size:] == -100).all() and row["labels"][0] == -100
        assert torch.equal(row["labels"][1:size], row["input_ids"][1:size])
        assert (row["input_ids"][size:] == tokenizer.pad_token_id).all()
        found.append(row["input_ids"][:size].tolist())
    assert sorted(found) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_stand_as_the_tokenizer_puts_them(name, tmp_path, draw):
    tokenizer = load(name)
    texts = [words(draw, 30) if name == "tiny" else story(draw, 32) for _ in range(6)]
    end = tokenizer.eos_token_id
    expected = []
    for text in texts:
        ids = tokenizer(text, verbose=False).input_ids
        expected.append(ids if end is None or ids[-1] == end else [*ids, end])
    rows = TrainingRows(DataOptions((write_jsonl(tmp_path / "a.jsonl", texts),), 16), tokenizer)
    total = sum(map(len, expected))
    flat = torch.cat([next(rows)["input_ids"] for _ in range(-(-total // 16))]).tolist()[:total]
    rest = list(expected)
    while rest:
        first = next(document for document in rest if flat[: len(document)] == document)
        rest.remove(first)
        flat = flat[len(first) :]


def test_the_model_reads_packed_documents_apart(corpus):
    rows = TrainingRows(DataOptions(corpus[0], 64), tiny_tokenizer())
    row = next(row for row in rows if len(documents_of(row)) > 2)
    model = tiny_model()
    inputs = {name: row[name][None] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[0]
        apart = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in documents_of(row)]
    torch.testing.assert_close(packed, torch.cat(apart), atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Needles
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_marks_the_answers_and_the_facts_come_first(name, kind, draw):
    tokenizer = load(name)
    writer = NeedleWriter(tokenizer, [kind])
    written = []
    group = writer._group
    writer._group = lambda *args: written.append(group(*args)) or written[-1]
    writer.check(4000)
    written.clear()
    needles = writer.write(draw, 4000)
    text = torch.randint(100, 200, (4000 - needles.size,))
    ids, mask = writer.insert(text, needles)
    assert len(ids) == len(mask) == 4000
    # the text itself is all there, in its order
    inserted = torch.cat(needles.ids).tolist()
    assert sorted([*text.tolist(), *inserted]) == sorted(ids.tolist())
    assert needles.size == len(inserted) <= 1000 and int(mask.sum()) == sum(int(m.sum()) for m in needles.masks)
    blocks = [(block.tolist(), mask.tolist()) for block, mask in zip(needles.ids, needles.masks, strict=True)]
    for facts, asks in written[:-1]:  # the last one no longer had room
        for ask in asks:
            ids_of_ask, mask_of_ask = writer.tokens(ask)
            at = blocks.index((ids_of_ask, mask_of_ask))
            assert all(blocks.index(writer.tokens(fact)) < at for fact in facts)
            if name == "python":  # cannot decode
                continue
            answer = "".join(piece for piece, marked in ask if marked)
            kept = [token for token, marked in zip(ids_of_ask, mask_of_ask, strict=True) if marked]
            # these tokenizers mark a blank in several ways
            assert re.sub("[▁Ġ ]", "", tokenizer.decode(kept)) == answer.replace(" ", "")


def read_facts(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Values by key and keys by alias in a text of the small model's style, in order."""
    notes: dict[str, list[str]] = {}
    for key, value in re.findall(r"note : (\w+ \w+) = ([\w ]+) ;", text):
        notes.setdefault(key, []).append(value)
    return notes, dict(re.findall(r"link : (\w+ \w+) -> (\w+ \w+) ;", text))


def test_answers_follow_from_the_row(tmp_path, draw):
    tokenizer = make("word level")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(story(draw, 4000))
    rows = TrainingRows(DataOptions((str(tmp_path),), 2048, needles=1.0, labels="answers"), tokenizer)
    asked = 0
    for _ in range(4):
        row = next(rows)
        assert torch.equal(row["labels"] != -100, row["answer_mask"])
        assert torch.equal(row["position_ids"], torch.arange(2048))
        text = tokenizer.decode(row["input_ids"])
        expected = []
        for match in re.finditer(r"ask : (\w+ \w+) (->|=)", text):
            notes, links = read_facts(text[: match.start()])  # what the text has said so far
            if match[2] == "->":
                expected += [links[match[1]], *notes[links[match[1]]]]
            else:
                expected += notes[match[1]]
        assert answers_of(tokenizer, row) == expected
        asked += len(expected)
    assert asked > 60


@pytest.mark.parametrize("between", [" ", "\n"])
def test_english_rows_are_the_text_with_sentences_between(tmp_path, draw, monkeypatch, between):
    tokenizer = make("byte level")
    sentences = [f"{sentence.strip().capitalize()}." for sentence in story(draw, 40_000).split(".")[:-1]]
    (tmp_path / "a.txt").write_text(between.join(sentences))
    calls = []
    insert = NeedleWriter.insert
    monkeypatch.setattr(NeedleWriter, "insert", lambda *args: calls.append(args) or insert(*args))
    row = next(TrainingRows(DataOptions((str(tmp_path / "a.txt"),), 4096, needles=1.0), tokenizer))
    _, text, needles = calls[0]
    shown = tokenizer.decode(row["input_ids"])
    # the tokens are those of the row as it would be typed
    assert tokenizer(shown, verbose=False).input_ids == row["input_ids"].tolist()
    blocks = [tokenizer.decode(ids) for ids in needles.ids]
    assert len(blocks) > 20 and all(block[0] == " " and block[1] != " " for block in blocks)
    rest, kept, at_ends = shown, "", 0
    for block in blocks:  # in their order
        before, _, rest = rest.partition(block)
        kept += before
        at_ends += (kept[-1:] in ".;") and rest[:1] in " \n"
    assert kept + rest == tokenizer.decode(text)
    assert kept + rest in between.join(sentences)
    assert between == "\n" or at_ends > 0.9 * len(blocks)


def test_shares_are_kept_in_every_process(corpus):
    options = DataOptions((*corpus[0], "needle_text"), 24, needles=0.25)
    for share, step in ((0.25, training_data.NEEDLE_STEP), (2 / 3, training_data.SOURCE_STEP)):
        for world in (1, 2, 3, 8):
            for rank in range(world):
                hits = sum(n * step % 1 < share for n in range(rank, 400 * world, world))
                assert abs(hits / 400 - share) < 0.02
    with pytest.raises(ValueError, match="needle_text"):
        TrainingRows(options, tiny_tokenizer())


def test_needle_text_is_a_source_with_its_mask(tmp_path, draw):
    tokenizer = make("word level")
    rows = TrainingRows(DataOptions(("needle_text",), 300, labels="answers"), tokenizer)
    state = rows.state_dict()
    first = next(rows)
    assert first["input_ids"][0] == tokenizer.bos_token_id and first["answer_mask"].any()
    assert torch.equal(first["labels"], torch.where(first["answer_mask"], first["input_ids"], -100))
    text = tokenizer.decode(first["input_ids"])
    for match in re.finditer(r"ask : (\w+ \w+) = (\w+ \w+ \w+ \w+) ;", text):
        assert read_facts(text[: match.start()])[0][match[1]] == [match[2]]
        assert match[2] in answers_of(tokenizer, first)
    assert not same(first, next(rows))
    rows.load_state_dict(state)
    assert same(first, next(rows))
    (tmp_path / "a.txt").write_text(story(draw, 2000))
    mixed = TrainingRows(DataOptions(("needle_text", str(tmp_path / "a.txt")), 128), tokenizer)
    assert sum(bool(next(mixed)["answer_mask"].any()) for _ in range(40)) in range(18, 23)


# ---------------------------------------------------------------------------------------------------------------------
# Batches and lengths
# ---------------------------------------------------------------------------------------------------------------------


def test_every_other_step_has_a_long_row(corpus):
    options = DataOptions(corpus[0], 16, long_rows=((128, 0.5),))
    batches = TrainingBatches(options, tiny_tokenizer(), rows=4)
    shapes, states, taken = [], [], []
    for _ in range(9):
        states.append(json.loads(json.dumps(batches.state_dict())))
        taken.append(next(batches))
        shapes.append(tuple(taken[-1]["input_ids"].shape))
    assert shapes == [(4, 16), (1, 128)] * 4 + [(4, 16)]
    other = TrainingBatches(options, tiny_tokenizer(), rows=4)
    for at, state in enumerate(states):
        other.load_state_dict(state)
        assert same(next(other), taken[at])
    options = DataOptions(corpus[0], 16, long_rows=((32, 0.3), (64, 0.1)))
    batches = TrainingBatches(options, tiny_tokenizer(), rows=1)
    lengths = [next(batches)["input_ids"].shape[1] for _ in range(50)]
    assert [lengths.count(n) for n in (16, 32, 64)] == [30, 15, 5]


def test_collate_stacks_rows_of_one_length(corpus):
    rows = TrainingRows(DataOptions(corpus[0], 32), tiny_tokenizer())
    some = [next(rows) for _ in range(3)]
    batch = collate(some)
    assert all(torch.equal(batch[name], torch.stack([row[name] for row in some])) for name in some[0])
    longer = next(TrainingRows(DataOptions(corpus[0], 48), tiny_tokenizer()))
    with pytest.raises(ValueError, match=r"\[32, 48\]"):
        collate([some[0], longer])


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


def test_chats_are_written_by_the_template(tmp_path, draw):
    tokenizer = make("byte level")
    chats = [
        [{"role": "user", "content": story(draw, 32)}, {"role": "assistant", "content": story(draw, 16)}]
        for _ in range(3)
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("\n\n".join(json.dumps({"messages": chat}) for chat in chats))  # blank lines between
    rows = TrainingRows(DataOptions((str(source),), 64), tokenizer)
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ids = {tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in rendered}
    total = sum(map(len, ids))
    flat = torch.cat([next(rows)["input_ids"] for _ in range(-(-total // 64))]).tolist()[:total]
    while ids:
        first = next(one for one in ids if tuple(flat[: len(one)]) == one)
        ids.remove(first)
        flat = flat[len(first) :]
    assert CHAT == tokenizer.chat_template


def test_a_dataset_is_streamed_and_resumed(tmp_path, draw):
    datasets = pytest.importorskip("datasets")
    texts = [words(draw, draw.randrange(5, 40)) for _ in range(30)]
    table = datasets.Dataset.from_dict({"body": texts, "number": list(range(30))})
    (tmp_path / "set").mkdir()
    table.to_json(tmp_path / "set" / "train.json")
    tokenizer = tiny_tokenizer()
    options = DataOptions((f"{tmp_path}/set::train",), 32, text_column="body")
    rows = TrainingRows(options, tokenizer)
    expected = sorted([*tokenizer(text).input_ids, 1] for text in texts)
    total = sum(map(len, expected))
    states, taken = [], []
    for _ in range(-(-total // 32) + 5):
        states.append(rows.state_dict())
        taken.append(next(rows))
    flat = torch.cat([row["input_ids"] for row in taken]).tolist()[:total]
    assert sorted(split_at_end(flat)) == expected
    other = TrainingRows(options, tokenizer)
    for at in (0, 1, 7, len(states) - 1):
        other.load_state_dict(states[at])
        assert same(next(other), taken[at])
    with pytest.raises(ValueError, match="columns are body, number.*--text-column"):
        TrainingRows(DataOptions((f"{tmp_path}/set",), 32), tokenizer)
    with pytest.raises(ValueError, match="name.*config.*split"):
        TrainingRows(DataOptions((f"{tmp_path}/set::other",), 32, text_column="body"), tokenizer)


def test_datasets_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        TrainingRows(DataOptions(("some/name",), 32), tiny_tokenizer())


def test_sources_take_turns(tmp_path, draw):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict({"text": ["w5 w5 w5"] * 4}).to_json(tmp_path / "set" / "train.json")
    source = write_jsonl(tmp_path / "a.jsonl", ["w7"] * 9)
    rows = TrainingRows(DataOptions((f"{tmp_path}/set", source), 16), tiny_tokenizer())
    flat = torch.cat([next(rows)["input_ids"] for _ in range(12)]).tolist()
    assert flat == ([7, 1, 5, 5, 5, 1] * 40)[: len(flat)]


def test_long_documents_take_linear_time(tmp_path, draw):
    tokenizer = make("byte level")
    text = story(draw, 40_000)
    times = []
    for copies in (1, 8):
        (tmp_path / "a.txt").write_text(text * copies)
        rows = TrainingRows(DataOptions((str(tmp_path / "a.txt"),), 512), tokenizer)
        count = copies * 100
        begin = time.process_time()
        for _ in range(count):
            next(rows)
        times.append(time.process_time() - begin)
    assert times[1] < 8 * 2.5 * times[0] + 0.2


def test_a_rest_is_not_copied_for_each_row(tmp_path, monkeypatch):
    """A tokenizer that cannot be cut gives a document at once; rows are then views of it."""
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(long_text, "special_frame", lambda tokenizer: None)
    (tmp_path / "a.txt").write_text("w5 " * 60_000)
    rows = TrainingRows(DataOptions((str(tmp_path / "a.txt"),), 16), tokenizer)
    next(rows)
    storage = rows._stream._rest.untyped_storage().data_ptr()
    for _ in range(10):
        next(rows)
    assert rows._stream._rest.untyped_storage().data_ptr() == storage


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sources": ()}, "--data"),
        ({"length": 15}, "--length must be at least 16"),
        ({"needles": 1.5}, "--needles"),
        ({"labels": "some"}, "--labels some: unknown, choose from all, answers"),
        ({"labels": "answers"}, "--labels answers.*--needles 1"),
        ({"sources": ("needle_text",), "needles": 0.5}, "--needles"),
        ({"long_rows": ((8, 0.5),)}, "--long-rows 8:0.5"),
        ({"long_rows": ((64, 0.5), (128, 0.5))}, "--long-rows"),
        ({"long_rows": ((32, 0.5),)}, "--long-rows"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataOptions(**{"sources": ("a.txt",), "length": 32, **changes})


@pytest.mark.parametrize(
    "content, name, message",
    [
        (None, "a.txt", "a.txt: no such file"),
        ("", "a.txt", "0 tokens found"),
        (" \n\n ", "a.txt", "0 tokens found"),
        ("w3 w4", "a.txt", r"3 tokens found, fewer than one row of 32 \(--length\)"),
        ("", "a.jsonl", "0 tokens found"),
        ('{"body": "w3"}', "a.jsonl", "columns are body: name the right one with --text-column"),
        ('{"messages": [{"role": "user", "content": "w3"}]}', "a.jsonl", "no chat template"),
        ("w3 w4", "a.jsonl", "record 1: not a line of JSON"),
        ("[1]", "a.jsonl", "record 1: expected an object"),
        ("{}", "a.json", "save it as JSONL"),
        ("w3", "a.tsv", "save it as JSONL"),
        (b"w3 " * 2**20 + b"\xff\xfe", "a.txt", "a.txt: not UTF-8"),
    ],
)
def test_unreadable_sources_are_refused_before_the_first_row(tmp_path, content, name, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        TrainingRows(DataOptions((str(path),), 32), tiny_tokenizer())


def test_needles_that_cannot_be_are_refused(corpus):
    with pytest.raises(ValueError, match="--needle-kinds: many given; choose from needle"):
        TrainingRows(DataOptions(corpus[0], 64, needles=0.5, needle_kinds=("many",)), tiny_tokenizer())
    with pytest.raises(ValueError, match="--needle-density"):
        TrainingRows(DataOptions(corpus[0], 64, needles=0.5, needle_density=0), tiny_tokenizer())
    with pytest.raises(ValueError, match="lookalike takes .* more than half of a row of 48"):
        TrainingRows(DataOptions(corpus[0], 48, needles=0.5), tiny_tokenizer())
    with pytest.raises(ValueError, match="at least 65 tokens"):
        TrainingRows(DataOptions(("needle_text",), 64), make("word level"))


def test_arguments_become_options(corpus, tmp_path):
    parser = argparse.ArgumentParser()
    training_data.add_data_arguments(parser)
    args = parser.parse_args(["--data", *corpus[0]])
    assert data_options(args, 64) == DataOptions(corpus[0], 64)
    more = ["--no-packing", "--needles", "1", "--labels", "answers", "--text-column", "body", "--data-seed", "5"]
    more += ["--needle-kinds", "alias", "--needle-density", "0.1", "--long-rows", "128:0.25"]
    assert data_options(parser.parse_args(["--data", "needle_text", corpus[0][1], *more]), 64) == DataOptions(
        sources=("needle_text", corpus[0][1]),
        length=64,
        packed=False,
        needles=1,
        seed=5,
        text_column="body",
        labels="answers",
        needle_kinds=("alias",),
        needle_density=0.1,
        long_rows=((128, 0.25),),
    )
    with pytest.raises(ValueError, match="no such file"):
        data_options(parser.parse_args(["--data", str(tmp_path / "none.jsonl")]), 64)
    with pytest.raises(ValueError, match="LENGTH:SHARE"):
        data_options(parser.parse_args(["--data", *corpus[0], "--long-rows", "128"]), 64)
