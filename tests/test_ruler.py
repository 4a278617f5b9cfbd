"""The RULER tasks: what is in a prompt, how long it is, what its references are, the metric, and the command."""

import json
import random
import re
import string
import time
from collections import Counter
from functools import cache

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import evaluate_ruler
import needle_text
from conftest import ROOT, tiny_model
from ruler import TASKS, Texts, make_sample, missing_text, score, wilson_interval
from ruler.haystacks import NOISE, PAIRS, plain_sentences

# what Qwen3's template puts around a message where thinking is off
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = random.randrange(10**6)
NIAH = [task for task in TASKS if task.startswith("niah")]


@cache
def bpe_tokenizer():
    """A byte-level BPE of English sentences that splits as Qwen's, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain_sentences(random.Random(0), 3000) + [NOISE] * 100, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT
    )


@cache
def byte_tokenizer():
    """Every byte is a token, and one stands before each text; no chat template."""
    vocabulary = {letter: i for i, letter in enumerate(["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


TOKENIZERS = {"bpe": bpe_tokenizer, "bytes": byte_tokenizer}


def squad_json(rng, articles=6):
    """SQuAD's layout; a question's answer is in its paragraph alone, every third cannot be answered."""
    data = []
    for article in range(articles):
        paragraphs = []
        for number in range(4):
            name, year = f"{rng.choice(needle_text.PLACES)} {article} {number}", str(rng.randint(1000, 9999))
            context = f"The {name} was built in {year}. " + " ".join(plain_sentences(rng, 3))
            asked = {"question": f"When was the {name} built?", "answers": [{"text": year}, {"text": year}]}
            impossible = {"question": "Why?", "answers": [], "is_impossible": True}
            paragraphs.append({"context": context, "qas": [{**asked, "is_impossible": False}, impossible]})
        data.append({"title": str(article), "paragraphs": paragraphs})
    return {"data": data}


def hotpotqa_json(rng, questions=8):
    rows = []
    for number in range(questions):
        answer = f"{rng.choice(needle_text.PEOPLE)} {number}"
        context = [[f"title {number} {i}", [f"{s} " for s in plain_sentences(rng, 2)]] for i in range(10)]
        context[3][1].append(f"It was the {answer}.")
        rows.append({"question": f"Who was it, {number}?", "answer": answer, "context": context})
    return rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files as the user would have them, by option."""
    rng, folder = random.Random(SEED), tmp_path_factory.mktemp("texts")
    (folder / "essays.txt").write_text("\n\n".join(" ".join(plain_sentences(rng, 40)) for _ in range(5)))
    (folder / "squad.json").write_text(json.dumps(squad_json(rng)))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpotqa_json(rng)))
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def texts(sources):
    return Texts.read("essays", **sources)


def read_back(sample, tokenizer):
    """The whole prompt as text, from its ids."""
    return tokenizer.decode(sample.ids, clean_up_tokenization_spaces=False)


# ---- every task -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_counted_whole_and_nearly_as_long_as_asked(task, name, texts):
    tokenizer = TOKENIZERS[name]()
    for length in (14_000, 30_011):
        sample = make_sample(task, tokenizer, length, SEED, texts)
        assert sample.ids.dtype == torch.int64 and sample.ids.dim() == 1
        text = read_back(sample, tokenizer)
        if name == "bpe":
            frame = tokenizer.apply_chat_template(
                [{"role": "user", "content": sample.message}],
                tokenize=False, add_generation_prompt=True, enable_thinking=False,
            )  # fmt: skip
            assert text == frame + sample.prefix.strip() and "<think>\n\n</think>\n\n" in frame
            assert sample.ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids
        else:
            assert text == "<bos>" + sample.message + sample.prefix.rstrip()
            assert sample.ids.tolist() == tokenizer(text.removeprefix("<bos>")).input_ids
        missing = length - len(sample.ids) - sample.new_tokens
        unit = max(map(len, texts.squad.documents + texts.hotpotqa.documents)) + 20
        unit = unit if task[:2] == "qa" else 150  # bytes of a document or of a line, and so tokens at most
        assert 0 <= missing <= max(length / 256, unit)
        assert set(sample.references) and all(reference in sample.message for reference in sample.references)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_follows_from_its_seed_alone(task, texts):
    tokenizer = bpe_tokenizer()
    made = [make_sample(task, tokenizer, 6000, f"{SEED}/{number}", texts) for number in range(3)]
    again = make_sample(task, tokenizer, 6000, f"{SEED}/2", texts)  # with none before it
    assert torch.equal(made[2].ids, again.ids) and made[2].references == again.references
    assert len({sample.message for sample in made}) == 3


def test_tokens_to_generate_and_metric_are_ruler_s():
    budgets = dict.fromkeys(NIAH, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {name: task.new_tokens for name, task in TASKS.items()} == budgets
    assert [name for name, task in TASKS.items() if task.any_of] == ["qa_1", "qa_2"]


# ---- references by brute force --------------------------------------------------------------------------------------


@pytest.mark.parametrize("haystack", ["essays", "noise", "sentences"])
@pytest.mark.parametrize("task", NIAH)
def test_the_needles_of_the_keys_asked_for_hold_the_references(task, haystack, sources):
    texts = Texts.read(haystack, essays=sources["essays"])
    tokenizer = bpe_tokenizer()
    depths = []
    for seed in range(4):
        sample = make_sample(task, tokenizer, 5000, f"{SEED}/{seed}", texts)
        body, question = sample.message.rsplit("\n", 1)
        needles = re.findall(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.", body)
        asked = [key for _, key, _ in needles if re.search(rf"(for|,|and) {key}(,| mentioned)", question)]
        found = [value for _, key, value in needles if key in asked]
        assert sorted(found) == sorted(sample.references)
        assert all(body.count(value) == 1 for value in sample.references)
        kinds = {"niah_single_3": "uuids", "niah_multikey_3": "uuids"}
        assert {kind for kind, _, _ in needles} == {kinds.get(task, "numbers")}
        counts = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
        if task in ("niah_multikey_2", "niah_multikey_3"):
            assert len(needles) == sample.size + 1 > 20
        else:
            assert len(needles) == counts.get(task, 1)
        assert len(sample.references) == {"niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
        several = len(sample.references) > 1
        assert sample.prefix.startswith(
            " The special magic " + ("numbers" if several else kinds.get(task, "numbers")[:-1])
        )
        assert sample.message.startswith("Some special" if several else "A special")
        uses = task in ("niah_single_1",) or (haystack == "noise" and not task.startswith("niah_multikey_"))
        assert (NOISE in body) == (uses or (haystack == "noise" and task == "niah_multikey_1"))
        depths.append(body.index(sample.references[0]) / len(body))
    assert max(depths) - min(depths) > 0.02


def test_essays_are_the_user_s_and_repeat(sources):
    texts = Texts.read("essays", essays=sources["essays"])
    sample = make_sample("niah_single_2", bpe_tokenizer(), 30_000, SEED, texts)
    body = sample.message.split("\n")[1]
    (needle,) = re.findall(r"One of the special magic .*?: \d+\. ?", body)
    rest = body.replace(needle, "").split()
    assert len(rest) > 2 * len(texts.essays)
    assert rest == [texts.essays[i % len(texts.essays)] for i in range(len(rest))]


def test_chains_of_variables_resolve_to_the_references():
    sample = make_sample("vt", bpe_tokenizer(), 6000, SEED)
    example, text = sample.message.split("\n\nMemorize and track")
    for part, letters, names in ((text, 5, sample.references), (example, 3, example.rsplit(": ", 1)[1].split())):
        values = {}
        for name, given in re.findall(r"^VAR ([A-Z]+) = (.+)$", part, re.MULTILINE):
            values[name] = values[given.removeprefix("VAR ")] if given.startswith("VAR") else given
        value = re.search(r"assigned the value (\d+)", part).group(1)
        assert {name for name, held in values.items() if held == value} == set(names)
        assert len(names) == 5 and all(
            len(name) == letters and set(name) <= set(string.ascii_uppercase) for name in names
        )
    assert value in example and sample.prefix.endswith("they are: ") and "5 variables" in sample.prefix


@pytest.mark.parametrize("length, often, seldom", [(2500, 6, 1), (6000, 30, 3), (25_000, 30, 3)])
def test_common_words_are_counted_again(length, often, seldom):
    sample = make_sample("cwe", bpe_tokenizer(), length, SEED)
    example, text = sample.message.split("\nBelow is a numbered list")
    counts = Counter(re.findall(r"\d+\. (\S+)", text))
    assert {word for word, number in counts.items() if number == often} == set(sample.references)
    assert len(sample.references) == 10 and set(counts.values()) == {often, seldom}
    listed, answer = example.split(" Answer: The top 10 words")
    shown = Counter(re.findall(r"\d+\. (\S+)", listed))
    best = [word for word, _ in shown.most_common(10)]
    assert set(re.findall(r"\d+\. (\S+)", answer)) == set(best) and not set(best) & set(counts)
    assert any("-" in word for word in counts) == (length > 8192)


@pytest.mark.parametrize("length", [700, 5000, 60_000])
def test_frequent_coded_words_are_counted_again(length):
    sample = make_sample("fwe", bpe_tokenizer(), length, SEED)
    coded = re.search(r"coded words\. (.*)\nQuestion", sample.message, re.DOTALL).group(1).split()
    counts = Counter(coded)
    dots, *best = counts.most_common(5)
    assert dots[0] == "..." and [word for word, _ in best[:3]] == list(sample.references)
    assert best[2][1] > best[3][1]
    assert dots[1] / best[0][1] == pytest.approx(4, rel=0.5)  # rank ** 2


@pytest.mark.parametrize("task, own", [("qa_1", 1), ("qa_2", 10)])
def test_a_question_has_its_documents(task, own, texts):
    data = texts.squad if task == "qa_1" else texts.hotpotqa
    for length in (3000, 40_000):  # the second repeats them all
        sample = make_sample(task, bpe_tokenizer(), length, SEED, texts)
        documents = re.split(r"Document \d+:\n", sample.message.split("\n\nAnswer the question")[0])[1:]
        documents = [document.removesuffix("\n\n") for document in documents]
        assert len(documents) == sample.size and set(documents) <= set(data.documents)
        (question,) = [question for question in data.questions if sample.message.endswith(question.text)]
        assert question.answers == sample.references and len(question.own) == own
        assert {data.documents[i] for i in question.own} <= set(documents)
        counts = Counter(documents)
        assert max(counts.values()) - min(counts.values()) <= 1
        if length > 3000:
            assert len(counts) == len(data.documents) < sample.size


# ---- long, short, missing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_3", "cwe", "fwe", "niah_single_2"])
def test_a_long_prompt_is_made_fast_and_is_as_long(task):
    tokenizer, texts = bpe_tokenizer(), Texts("sentences")
    began = time.perf_counter()
    sample = make_sample(task, tokenizer, 300_000, SEED, texts)
    took = time.perf_counter() - began
    assert 0 <= 300_000 - len(sample.ids) - sample.new_tokens <= 300_000 / 256
    assert took < 20  # seconds; a few on an idle core


def test_what_does_not_fit_or_is_missing_is_refused_by_name(texts):
    tokenizer = bpe_tokenizer()
    with pytest.raises(ValueError, match="task niah_multivalue of 200 tokens: its facts and question alone take"):
        make_sample("niah_multivalue", tokenizer, 200, SEED, texts)
    with pytest.raises(ValueError, match="unknown task 'niah'"):
        make_sample("niah", tokenizer, 4096, SEED)
    with pytest.raises(ValueError, match="--no-chat"):
        make_sample("vt", byte_tokenizer(), 4096, SEED, chat=True)
    for task, option in (("niah_single_2", "--haystack noise"), ("qa_1", "--squad"), ("qa_2", "--hotpotqa")):
        with pytest.raises(ValueError, match=f"task {task} needs.*{option}"):
            make_sample(task, tokenizer, 4096, SEED)
    needing = [
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multivalue",
        "niah_multiquery",
        "qa_1",
        "qa_2",
    ]
    assert [task for task in TASKS if missing_text(task, Texts())] == needing
    assert [task for task in TASKS if missing_text(task, Texts("noise"))] == ["qa_1", "qa_2"]


def test_words_that_run_out_are_an_error():
    tokenizer = needle_text.build_tokenizer()  # each word a token, each number one, too
    with pytest.raises(ValueError, match="words that there are make"):
        make_sample("cwe", tokenizer, 30 * PAIRS, SEED)


def test_the_columns_of_datasets_are_read_too(sources, tmp_path):
    rng = random.Random(SEED)
    squad, hotpotqa = squad_json(rng), hotpotqa_json(rng)
    rows = [
        {"title": a["title"], "context": p["context"], "question": q["question"],
         "answers": {"text": [answer["text"] for answer in q["answers"]]}}
        for a in squad["data"] for p in a["paragraphs"] for q in p["qas"]
    ]  # fmt: skip
    columns = [
        {**row, "context": {"title": [t for t, _ in row["context"]], "sentences": [s for _, s in row["context"]]}}
        for row in hotpotqa
    ]
    for name, data, other in (("squad", squad, rows), ("hotpotqa", hotpotqa, columns)):
        (tmp_path / "a.json").write_text(json.dumps(data))
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, other)))
        one, two = (Texts.read("noise", **{name: str(tmp_path / file)}) for file in ("a.json", "b.jsonl"))
        assert getattr(one, name) == getattr(two, name) and one.digests == two.digests
    essays = tmp_path / "essays.json"  # RULER's own layout
    essays.write_text(json.dumps({"text": open(sources["essays"]).read()}))
    assert Texts.read("essays", essays=str(essays)).essays == Texts.read("essays", essays=sources["essays"]).essays
    for name, text in (("squad", "[{}]"), ("hotpotqa", "[{}]"), ("essays", "[1]"), ("squad", "no")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=f"--{name} "):
            Texts.read("essays", **{name: str(tmp_path / "bad.json")})


# ---- the metric -----------------------------------------------------------------------------------------------------


def test_the_score_is_the_share_found_or_any():
    assert score("It is CRIMSON, and 1234567.", ["crimson", "1234567", "7654321", "x"], any_of=False) == 0.5
    assert score("paris", ["Paris, France", "Paris"], any_of=True) == 1
    assert score("par is", ["Paris"], any_of=True) == 0 and score("", ["a", "b"], any_of=False) == 0
    assert score("new\x0bline", ["new\nline"], any_of=True) == 1  # control characters are line ends


def test_the_interval_solves_wilson_s_equation():
    for share, number in ((0.0, 10), (0.3, 200), (1.0, 50), (0.995, 1000)):
        for bound in wilson_interval(share, number):
            if 0 < bound < 1:
                assert (share - bound) ** 2 == pytest.approx(1.96**2 * bound * (1 - bound) / number, rel=1e-9)
    low, high = wilson_interval(1.0, 50)
    assert high == pytest.approx(1) and low == pytest.approx(50 / (50 + 1.96**2))


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random RecSA model with the BPE tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = bpe_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny_model(
        vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=4096, recsa_top_capacity=64,
        recsa_branching=4, recsa_top_k=4, pad_token_id=0, bos_token_id=None, eos_token_id=end,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(checkpoint, output, *more):
    fixed = ["--model", str(checkpoint), "--device", "cpu", "--samples", "2", "--output", str(output)]
    return evaluate_ruler.main([*fixed, "--lengths", "1300", *more])


def test_the_command_runs_resumes_and_says_what_it_skips(checkpoint, sources, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.json"
    some = ["--tasks", "niah_single_1", "fwe", "qa_1"]
    assert run(checkpoint, output, *some) == 0
    out = capsys.readouterr().out
    assert "qa_1: skipped, it needs --squad" in out and "answers cut off" in out and "over 2 tasks" in out
    report = json.loads(output.read_text())
    assert str(checkpoint.parent) not in output.read_text() and report["skipped"] == {"qa_1": "needs --squad"}
    assert [(cell["method"], cell["task"], cell["length"]) for cell in report["cells"]] == [
        ("recsa", "niah_single_1", 1300),
        ("recsa", "fwe", 1300),
    ]
    for cell in report["cells"]:
        fewest, most = cell["tokens"]
        assert 1200 < fewest + cell["new_tokens"] <= most + cell["new_tokens"] <= 1300
        assert cell["backend"] == "reference" and 0 <= cell["cut_off"] <= 2 and cell["samples"] == 2
        assert cell["interval"][0] <= cell["score"] <= cell["interval"][1]
    assert report["settings"]["recsa"]["recsa_top_k"] == 4 and report["settings"]["haystack"] == "essays"

    made = []
    before = evaluate_ruler.one_cell
    monkeypatch.setattr(evaluate_ruler, "one_cell", lambda *args: made.append(args[2:4]) or before(*args))
    assert run(checkpoint, output, *some) == 0 and made == []
    assert run(checkpoint, output, "--tasks", "niah_single_1", "vt", "--lengths", "1400") == 0
    assert made == [("niah_single_1", 1400), ("vt", 1400)]
    again = json.loads(output.read_text())
    assert again["cells"][:2] == report["cells"] and len(again["cells"]) == 4
    other = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    other.save_pretrained(tmp_path / checkpoint.name)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / checkpoint.name)
    with pytest.raises(SystemExit, match="other settings .checkpoint: "):  # all cells are there
        run(tmp_path / checkpoint.name, output, *some)
    with pytest.raises(SystemExit, match="other settings .seed: 0 there, 1 now"):
        run(checkpoint, output, "--seed", "1", "--tasks", "fwe")


def test_answers_are_scored_and_those_cut_off_are_counted(checkpoint, tmp_path, monkeypatch):
    """The model is replaced by one that says what it is told: right and ended, then half of it and never ended."""
    tokenizer = bpe_tokenizer()
    said = []

    class Speaker(torch.nn.Linear):
        def __init__(self, model):
            super().__init__(1, 1)
            self.config, self.generation_config, self.device = (
                model.config,
                model.generation_config,
                torch.device("cpu"),
            )

        def generate(self, ids, max_new_tokens, **_):
            sample = made.pop()
            right = not said
            said.append(tokenizer(" ".join(sample.references[: None if right else 2])).input_ids)
            tail = [tokenizer.eos_token_id] if right else [5] * (max_new_tokens - len(said[-1]))
            return torch.cat([ids, torch.tensor([said[-1] + tail])], 1)

    made, make, load = [], evaluate_ruler.make_sample, evaluate_ruler.load_baseline
    monkeypatch.setattr(evaluate_ruler, "make_sample", lambda *args: made.append(make(*args)) or made[-1])
    monkeypatch.setattr(evaluate_ruler, "load_baseline", lambda *args, **options: Speaker(load(*args, **options)))
    more = ["--tasks", "niah_multiquery", "--haystack", "sentences", "--lengths", "900"]
    assert run(checkpoint, tmp_path / "out.json", *more) == 0
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cell["score"] == 75 and cell["cut_off"] == 1


def test_the_gate_compares_two_methods_on_the_same_prompts(checkpoint, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.json"
    options = ["--tasks", "niah_single_1", "vt", "--against", "dense", "--margin", "10"]
    assert run(checkpoint, output, *options) == 1  # random answers: both are wrong, so nothing is shown
    assert "no task was left to judge; dense answers none" in capsys.readouterr().out
    report = json.loads(output.read_text())
    one, two = (
        {c["task"]: c["prompts"] for c in report["cells"] if c["method"] == method} for method in ("recsa", "dense")
    )
    assert one == two and {c["backend"] for c in report["cells"] if c["method"] == "dense"} == {None}

    def change(task, method, value):
        for cell in report["cells"]:
            if (cell["task"], cell["method"]) == (task, method):
                cell["score"] = value
        output.write_text(json.dumps(report))

    change("vt", "dense", 100.0)
    change("niah_single_1", "dense", 5.0)
    assert run(checkpoint, output, *options) == 0  # counted apart
    assert "vt at 1,300" in capsys.readouterr().out
    change("niah_single_1", "dense", 50.0)
    change("niah_single_1", "recsa", 40.0)
    assert run(checkpoint, output, *options) == 0  # just the margin
    change("niah_single_1", "recsa", 39.5)
    assert run(checkpoint, output, *options) == 1
    assert "FAILED niah_single_1 at 1,300: 39.5 - 50.0 = -10.5" in capsys.readouterr().out


def test_a_stock_checkpoint_is_evaluated_dense(tmp_path):
    tokenizer = bpe_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    more = ["--method", "dense", "--tasks", "niah_single_1", "--lengths", "900"]
    assert run(tmp_path / "stock", tmp_path / "out.json", *more) == 0
    # beyond its own length too
    assert run(tmp_path / "stock", tmp_path / "long.json", *more, "--lengths", "1300") == 0


def test_a_tokenizer_without_the_words_is_refused(tmp_path):
    """Each prompt would be a row of unknown words, and each answer wrong."""
    folder = ROOT / "models" / "small-dense"
    with pytest.raises(SystemExit, match="cannot write the answer .* of task niah_single_1 .*<unk>"):
        run(folder, tmp_path / "out.json", "--method", "dense", "--tasks", "niah_single_1")


def test_impossible_options_are_refused_by_name(checkpoint, tmp_path, capsys):
    output = tmp_path / "out.json"
    for more, word in (
        (["--samples", "0"], "--samples"),
        (["--tasks", "niah"], "--tasks"),
        (["--against", "recsa"], "--against"),
        (["--against", "dense", "--tasks", "vt", "cwe"], "--against"),
    ):
        with pytest.raises(SystemExit):
            run(checkpoint, output, *more)
        assert word in capsys.readouterr().err
    for more, word in (
        (["--tasks", "qa_1"], "--tasks: none is left"),
        (["--tasks", "vt", "--lengths", "300"], "--lengths 300: task vt of 300 tokens"),
        (["--squad", "nowhere.json"], "--squad nowhere.json"),
    ):
        with pytest.raises(SystemExit, match=word):
            run(checkpoint, output, *more)
    output.write_text("{}")
    with pytest.raises(SystemExit, match="no result of this script"):
        run(checkpoint, output, "--tasks", "fwe")
