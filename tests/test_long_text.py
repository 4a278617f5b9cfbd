"""Long texts in pieces: the ids of the whole text, whatever the tokenizer, in linear time and without warnings."""

import io
import logging
import random
import re
import sys
import time

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import generate
import long_text
import needle_text
from conftest import ROOT

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# what a random text is made of, beside words
BLANKS = [" ", " ", " ", " ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", " \n ", "\n    ", "\u00a0", "\u2003"]
BLANKS += ["\u3000", "\u200b", "\u2028", "\x0b", "\x1c", "\x85", " " * 70, "\n" * 70, "", ""]
ODD = [
    "don't",
    "it'S",
    "3.14",
    "1234567",
    "...",
    "?!\n",
    ".\r\n\r\n",
    "->",
    "e\u0301",
    "\u0301",
    "a\u0323\u0307",
    "ﬁ",
    "ΟΔΟΣ",
]
ODD += [
    "你好，世界。",
    "日本語のテキスト",
    "한국어",
    "नमस्ते",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "🙂",
    "\ufeff",
    "Å\u212b",
    "x" * 90,
    "=" * 90,
    "中" * 90,
]
ODD += [*SPECIALS, "<mask>", "<|im_", "start|>", "<s>", "</s>", "<unk>", "<eos>", "▁", "▁▁x"]


def random_text(length: int, blanks: list[str] | None = None) -> str:
    """A random text of at least `length` characters; reproducible with the seed that a failing test prints."""
    draw = random.Random(int(torch.randint(2**31, ())))
    words = needle_text.make_example(300, "needle", draw.randrange(1000)).prompt.split()
    parts: list[str] = []
    size = 0
    while size < length:
        word = draw.choice(ODD) if draw.random() < 0.2 else draw.choice(words)
        parts += [word.capitalize() if draw.random() < 0.1 else word, draw.choice(blanks or BLANKS)]
        size += len(parts[-1]) + len(parts[-2])
    return "".join(parts)


def random_pieces(text: str, most: int) -> list[str]:
    """The text in pieces of 1 to `most` characters."""
    draw = random.Random(int(torch.randint(2**31, ())))
    pieces, begin = [], 0
    while begin < len(text):
        end = begin + draw.randint(1, most)
        pieces.append(text[begin:end])
        begin = end
    return pieces


def wrap(tokenizer: Tokenizer, **fields) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **fields)


def corpus() -> list[str]:
    torch.manual_seed(0)
    return [random_text(20_000)]


def train(tokenizer: Tokenizer, alphabet: list[str], specials: list[str], size: int) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def word_level():
    return AutoTokenizer.from_pretrained(ROOT / "models" / "small-dense")


def byte_level():
    """As Qwen3's: byte-level BPE behind the same pre-tokeniser and normaliser, no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, pre_tokenizers.ByteLevel.alphabet(), SPECIALS, 700)
    # takes the blanks on both sides with it
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return wrap(tokenizer, eos_token="<|im_end|>", chat_template=CHAT)


def gpt2_level():
    """Byte-level BPE with a blank before every text, and BOS and EOS around it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    train(tokenizer, pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"], 600)
    frame = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=frame)
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>")


def metaspace(scheme: str, split: bool = True):
    """As sentencepiece: blanks are letters of the words, and one is put before the text."""

    def make():
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        train(tokenizer, [], ["<unk>", "<s>"], 500)
        bos = [("<s>", tokenizer.token_to_id("<s>"))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
        return wrap(tokenizer, unk_token="<unk>", bos_token="<s>")

    return make


def prepending():
    """As older sentencepiece conversions: the normaliser puts a blank before every text, so no cut is possible."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrap(train(tokenizer, [], ["<unk>"], 500), unk_token="<unk>")


class Syllables(PreTrainedTokenizer):
    """A tokenizer written in Python: up to three letters, with the blank before them."""

    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, **kwargs):
        self.table = {"<unk>": 0}
        super().__init__(unk_token="<unk>", **kwargs)

    @property
    def vocab_size(self):
        return 5000

    def get_vocab(self):
        return dict(self.table)

    def _tokenize(self, text, **kwargs):
        return re.findall(r"\s?\S{1,3}|\s+", text)

    def _convert_token_to_id(self, token):
        return self.table.setdefault(token, len(self.table))

    def _convert_id_to_token(self, index):
        return "?"


MAKERS = {
    "word level": word_level,
    "byte level": byte_level,
    "prefix and frame": gpt2_level,
    "metaspace, first": metaspace("first"),
    "metaspace, always": metaspace("always"),
    "metaspace, across words": metaspace("first", split=False),
    "prepending": prepending,
    "python": Syllables,
}
CUTTING = ("word level", "byte level", "metaspace, always")  # for these, text with blanks is cut at all
_made = {}


def make(name: str):
    """The tokenizer of that name, trained once."""
    if name not in _made:
        _made[name] = MAKERS[name]()
    return _made[name]


@pytest.fixture(params=MAKERS)
def tokenizer(request):
    return make(request.param)


def whole(tokenizer, text: str) -> torch.Tensor:
    """What must come out: `[1, N]`."""
    return torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long)[None]


# ---------------------------------------------------------------------------------------------------------------------
# The same ids
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part, window", [(60, 8), (100, 40), (1500, 200), (long_text.PART, long_text.WINDOW)])
def test_ids_are_those_of_the_whole_text(tokenizer, part, window, monkeypatch):
    monkeypatch.setattr(long_text, "WINDOW", window)
    for most in (1, 7, 50, 10_000):
        text = random_text(4000)
        ids = long_text.tokenize_text(tokenizer, iter(random_pieces(text, most)), part)
        assert ids.dtype == torch.long and torch.equal(ids, whole(tokenizer, text))


@pytest.mark.parametrize("blank", [" ", "\n", "\r\n", "\t", "\u3000", "\n\n  ", ""])
def test_one_kind_of_blank_and_none(tokenizer, blank, monkeypatch):
    monkeypatch.setattr(long_text, "WINDOW", 16)
    text = random_text(3000, [blank])
    assert torch.equal(long_text.tokenize_text(tokenizer, [text], 100), whole(tokenizer, text))


@pytest.mark.parametrize(
    "text", ["", "a", " ", "\n\n", "<|im_start|>", "<s><s>", "<eos>", "ab ab " * 500, "\u0301" * 700]
)
def test_short_and_monotonous_texts(tokenizer, text, monkeypatch):
    monkeypatch.setattr(long_text, "WINDOW", 10)
    for pieces in ([text], list(text), ["", text, ""], []):
        expected = whole(tokenizer, "".join(pieces))
        assert torch.equal(long_text.tokenize_text(tokenizer, pieces, 64), expected)


@pytest.mark.parametrize("name", CUTTING)
def test_parts_are_bounded_where_there_are_blanks(name):
    text = random_text(100_000)
    parts = list(long_text.split_text(make(name), [text], 8_000))
    assert "".join(parts) == text and len(parts) > 10 and max(map(len, parts)) <= 16_000


def test_where_no_cut_is_possible_the_text_stays_whole():
    text = needle_text.make_example(4000, "needle", 0).prompt  # without the special tokens that a text is cut at
    assert list(long_text.split_text(make("prepending"), [text], 4_000)) == [text]
    endless = "中" * 20_000
    assert list(long_text.split_text(make("byte level"), [endless], 4_000)) == [endless]


def test_regrouping():
    text = random_text(1000)
    for most in (1, 30, 900):
        groups = list(long_text.regroup(random_pieces(text, most), 77))
        assert "".join(groups) == text and {len(group) for group in groups[:-1]} == {77} and len(groups[-1]) < 77


# ---------------------------------------------------------------------------------------------------------------------
# Files, chat templates, the command
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 50, 10**6])
def test_files_are_decoded_in_pieces(tmp_path, monkeypatch, size):
    """A piece may end inside a character's bytes, or between CR and LF."""
    monkeypatch.setattr(long_text, "PIECE", size)
    path = tmp_path / "text.txt"
    path.write_bytes(random_text(2000).encode())
    pieces = list(long_text.read_pieces(str(path)))
    assert "".join(pieces) == path.read_text("utf-8") and max(map(len, pieces)) <= size
    # standard input is UTF-8, whatever the locale says
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()), encoding="latin-1"))
    assert "".join(long_text.read_pieces("-")) == path.read_text("utf-8")


@pytest.mark.parametrize("content", [b"good \xff bad", "cut off: €".encode()[:-1]])
def test_a_file_that_is_not_utf8_is_refused(tmp_path, monkeypatch, content):
    (tmp_path / "text.txt").write_bytes(content)
    arguments = ["--prompt-file", str(tmp_path / "text.txt")]
    with pytest.raises(SystemExit, match="--prompt-file: 'utf-8' codec can't decode"):
        generate.read_prompt(generate.parse_arguments(arguments), make("word level"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), errors="surrogateescape"))
    with pytest.raises(SystemExit, match="--prompt-file: 'utf-8' codec can't decode"):
        generate.read_prompt(generate.parse_arguments(["--prompt-file", "-"]), make("word level"))


TEMPLATES = {
    "as Qwen3's": CHAT,
    "strips": "<|im_start|>{{ messages[0].content | trim }}<|im_end|>",
    "capitals": "{{ messages[0].content | upper }}",
    "JSON": "{{ messages | tojson }}",
    "twice": "{{ messages[0].content }}\n{{ messages[0].content }}",
    "never": "nothing",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(template, monkeypatch):
    tokenizer = make("byte level")
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template])
    text = f" {random_text(3000)} \n"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    pieces = list(long_text.chat_pieces(tokenizer, random_pieces(text, 100)))
    assert "".join(pieces) == rendered and (len(pieces) > 3) == (template == "as Qwen3's")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("question", [None, "Who?", " <|im_end|>"])
def test_the_command_reads_what_the_template_renders(tmp_path, monkeypatch, raw, question):
    monkeypatch.setattr(long_text, "PIECE", 100)
    monkeypatch.setattr(long_text, "WINDOW", 30)
    monkeypatch.setattr(long_text.tokenize_text, "__defaults__", (200,))
    tokenizer, text = make("byte level"), random_text(3000).replace("\r", "")
    (tmp_path / "text.txt").write_text(text, "utf-8", newline="")
    arguments = ["--prompt-file", str(tmp_path / "text.txt"), *(["--raw"] if raw else [])]
    arguments += ["--question", question] if question else []
    ids, example = generate.read_prompt(generate.parse_arguments(arguments), tokenizer)
    prompt = f"{text}\n\n{question}" if question else text
    if not raw:
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert example is None and torch.equal(ids, whole(tokenizer, prompt))


def test_a_blank_text_is_refused_at_its_end():
    assert list(long_text.not_blank([" ", "", "x", "\n"])) == [" ", "", "x", "\n"]
    for pieces in ([], [""], [" \n", "\u3000"]):
        with pytest.raises(ValueError, match="the text is empty"):
            list(long_text.not_blank(pieces))


# ---------------------------------------------------------------------------------------------------------------------
# Time, warnings, progress
# ---------------------------------------------------------------------------------------------------------------------


def seconds(tokenizer, text: str) -> float:
    times = []
    for _ in range(3):
        began = time.process_time()
        long_text.tokenize_text(tokenizer, [text], part=2**15)
        times.append(time.process_time() - began)
    return min(times)


@pytest.mark.parametrize("name", ["word level", "byte level", "metaspace, always", "prepending"])
@pytest.mark.parametrize("blanks", [None, ["\n"], [" "], ["."]], ids=["mixed", "lines", "one line", "no blanks"])
def test_time_is_linear(name, blanks):
    """Also where nothing can be cut: then the text is looked through once and tokenised once."""
    text = random_text(100_000, blanks)
    # quadratic: 16 times as long; tried again, since a busy machine disturbs single timings
    assert any(seconds(make(name), text * 4) < 8 * seconds(make(name), text) for _ in range(3))


@pytest.mark.parametrize("name", ["word level", "byte level", "prepending", "python"])
def test_no_warning_about_the_length(name, caplog, monkeypatch):
    tokenizer = MAKERS[name]()
    tokenizer.model_max_length = 16
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    logger.addHandler(caplog.handler)
    try:
        text = random_text(3000)
        long_text.tokenize_text(tokenizer, [text], 500)
        assert caplog.records == []
        tokenizer(text)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("shown", [True, False])
def test_progress_can_be_silenced(shown, capsys, monkeypatch):
    clock = iter(range(10**6))
    # a tokenizer that takes seconds for each part
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    was = transformers_logging.is_progress_bar_enabled()
    try:
        (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()
        long_text.tokenize_text(make("word level"), [random_text(20_000)], 4000)
    finally:
        (transformers_logging.enable_progress_bar if was else transformers_logging.disable_progress_bar)()
    assert ("tokenizing" in capsys.readouterr().err) == shown
