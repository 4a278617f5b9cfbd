"""The text world of scripts/needle_text.py: its words, its questions, its training batches, its tokenizer on disk."""

import time

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

import needle_text as nt


def read_facts(words: list[str]) -> tuple[dict, dict]:
    """What a reader learns from a text: values by key, and keys by alias."""
    notes, links = {}, {}
    for i, word in enumerate(words):
        fact = words[i : i + nt.NOTE_LENGTH]
        if word == "note" and len(fact) == nt.NOTE_LENGTH:
            assert fact[1::3] == [":", "=", words[i + 7]] and fact[-1] == ";"
            notes[tuple(fact[2:4])] = fact[5:9]
        if word == "link" and len(fact) >= nt.LINK_LENGTH:
            assert fact[4] == "->" and fact[7] == ";"
            links[tuple(fact[2:4])] = tuple(fact[5:7])
    return notes, links


def read_answer(words: list[str]) -> list[str]:
    """The answer to the question at the end of a text, found by reading the text."""
    notes, links = read_facts(words)
    ask, colon, first, second, sign = words[-5:]
    assert (ask, colon) == ("ask", ":")
    if sign == "->":
        key = links[first, second]
        return [*key, "=", *notes[key], ";"]
    assert sign == "="
    return [*notes[first, second], ";"]


def test_words_are_distinct_and_classes_have_the_stated_sizes():
    assert len(set(nt.WORDS)) == len(nt.WORDS) == 1024
    assert (len(nt.KEY_FIRST), len(nt.KEY_SECOND), len(nt.VALUES)) == (128, 128, 256)
    assert nt.Haystack().sentences.shape == (512, 16)
    assert nt.WORDS[nt.NOTE : nt.PERIOD + 1] == nt.SIGNS


@pytest.mark.parametrize("task", nt.TASKS)
def test_answers_follow_from_the_text(task):
    for seed in range(20):
        example = nt.make_example(400 + seed, task, seed)
        words = example.prompt.split()
        assert example.answer.split() == read_answer(words)
        notes, links = read_facts(words)
        assert (len(notes), len(links)) == {"needle": (1, 0), "lookalike": (16, 0), "alias": (16, 6)}[task]
        asked = example.answer.split()[:2] if task == "alias" else words[-3:-1]
        at = example.needle_at - 1  # the prompt has no <bos>
        assert words[at : at + 4] == ["note", ":", *asked]
        if task == "alias":
            assert words[example.link_at - 1 :][:4] == ["link", ":", *words[-3:-1]]
            assert tuple(words[-3:-1]) not in notes
        else:
            assert example.link_at is None


@pytest.mark.parametrize("task", ["lookalike", "alias"])
def test_lookalike_keys_share_halves(task):
    for seed in range(20):
        example = nt.make_example(600, task, seed)
        words = example.prompt.split()
        notes, _ = read_facts(words)
        first, second = words[example.needle_at + 1 : example.needle_at + 3]
        others = [key for key in notes if key != (first, second)]
        assert len(notes) == 16
        assert any(key[0] == first for key in others) and any(key[1] == second for key in others)
        assert len({key[0] for key in notes}) <= nt.FIRST_HALVES


@pytest.mark.parametrize("task", nt.TASKS)
def test_lengths_are_exact_down_to_the_shortest(task):
    shortest = nt.minimum_length(task)
    for length in [*range(shortest, shortest + 40), 2048, 4097]:
        example = nt.make_example(length, task, seed=length)
        assert len(example.prompt_ids) + len(example.answer_ids) == length
        assert len(example.prompt.split()) == len(example.prompt_ids) - 1
        assert example.answer.split() == read_answer(example.prompt.split())
    with pytest.raises(ValueError, match=f"at least {shortest}"):
        nt.make_example(shortest - 1, task, 0)


def test_same_seed_same_text_other_seed_other_text():
    texts = [nt.make_example(700, "alias", seed).prompt for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    batches = [nt.train_batch(3, 200, "cpu", torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert all(torch.equal(a, b) for a, b in zip(batches[0], batches[1], strict=True))
    assert not torch.equal(batches[0][0], batches[2][0])


def test_depth_places_the_needle():
    for depth in (0.0, 0.25, 1.0):
        example = nt.make_example(20_000, "lookalike", 1, depth=depth)
        assert abs(example.needle_at / 20_000 - depth) < 0.02
    with pytest.raises(ValueError, match="depth"):
        nt.make_example(2_000, "needle", 1, depth=1.5)
    with pytest.raises(ValueError, match="unknown task"):
        nt.make_example(2_000, "haystack", 1)


def test_batch_stacks_examples():
    prompts, answers = nt.make_batch(3, 300, "alias", seed=7)
    assert prompts.shape == (3, 292) and answers.shape == (3, 8)
    assert torch.equal(prompts[2], nt.make_example(300, "alias", 9).prompt_ids)


def test_one_word_in_ten_changes_and_stays_in_its_class():
    hay = nt.Haystack(seed=3)
    drawn = hay.draw(4000, generator=torch.Generator().manual_seed(0))
    class_of = {nt.WORD_TO_ID[word]: name for name, words in nt.FILLERS.items() for word in words}
    class_of[nt.PERIOD] = "."
    patterns = {(*pattern.split(), ".") for pattern in nt.PATTERNS}
    assert {tuple(class_of[i] for i in row) for row in drawn[:500].tolist()} <= patterns
    nearest = torch.stack([(hay.sentences == row).sum(1).max() for row in drawn])
    assert 13.5 < nearest.float().mean() < 15.5


@pytest.mark.parametrize("length", [64, 65, 256, 1000])
def test_weighted_labels_are_what_a_reader_would_answer(length):
    batch = 16
    ids, labels, weights = nt.train_batch(batch, length, "cpu", torch.Generator().manual_seed(length))
    assert ids.shape == labels.shape == weights.shape == (batch, length)
    assert torch.equal(ids[:, 1:], labels[:, :-1]) and (ids[:, 0] == nt.BOS).all()
    assert not (ids[:, 1:] < len(nt.SPECIAL_TOKENS)).any()
    assert set(weights.unique().tolist()) <= {0.0, 1.0, torch.tensor(nt.TEXT_WEIGHT).item()}
    direct = alias = 0
    for row in range(batch):
        words = [nt.WORDS[i] for i in [*ids[row].tolist(), labels[row, -1].item()]]
        weight = [0.0, *weights[row].tolist()]  # of words[i] as a label
        expected = 0
        for i, word in enumerate(words):
            if word in ("note", "link"):
                size = nt.NOTE_LENGTH if word == "note" else nt.LINK_LENGTH
                assert not any(weight[i : i + size])
            if word == "ask" and i + 5 < len(words):
                answer = read_answer(words[: i + 5])
                found = words[i + 5 : i + 5 + len(answer)]
                assert found == answer[: len(found)]
                expected += sum(w not in ("=", ";") for w in found)
                assert not any(weight[i : i + 5])
                direct, alias = direct + (words[i + 4] == "="), alias + (words[i + 4] == "->")
        assert expected == sum(w == 1 for w in weight)
    if length >= 256:
        assert direct > batch and alias > 0


def test_train_batch_refuses_short_texts():
    with pytest.raises(ValueError, match="64"):
        nt.train_batch(1, 63, "cpu")


def test_tokenizer_round_trip_from_disk(tmp_path):
    nt.build_tokenizer().save_pretrained(tmp_path)
    Qwen3Config().save_pretrained(tmp_path)  # a folder as AutoTokenizer meets it
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    example = nt.make_example(500, "alias", 2)
    ids = tokenizer(example.prompt).input_ids
    assert ids == example.prompt_ids.tolist() == [nt.BOS, *nt.encode(example.prompt)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == example.prompt
    assert tokenizer("Note: crimson harbor=seven;", add_special_tokens=False).tokens() == [
        *("note", ":", "crimson", "harbor", "=", "seven", ";"),
    ]
    assert nt.encode("silver orchard->zyzzyva") == [*nt.encode("silver orchard ->"), nt.UNK]
    assert tokenizer("zyzzyva").input_ids == [nt.BOS, nt.UNK]
    names = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert names == (nt.PAD, nt.BOS, nt.EOS, nt.UNK)
    assert len(tokenizer) == len(nt.WORDS)
    padded = tokenizer(["note", "note : crimson"], padding=True, return_tensors="pt")
    assert padded.input_ids[0].tolist() == [nt.PAD, nt.PAD, nt.BOS, nt.NOTE]


def test_a_million_tokens_take_seconds():
    begin = time.perf_counter()
    example = nt.make_example(1_000_000, "alias", 0)
    words = example.prompt.split()
    assert time.perf_counter() - begin < 10
    assert len(words) + 1 + len(example.answer_ids) == 1_000_000
    assert example.answer.split() == read_answer(words)
