"""`scripts/distill.py` and `scripts/finetune.py`: what they train, resumption, what they write, what they refuse."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import distill
import finetune
import training
from conftest import ROOT, random_ids, tiny_model
from convert_qwen3 import convert
from fresh import SOURCES, run_fresh, tiny_tokenizer
from recsa_qwen3 import Recall, RecSAQwen3ForCausalLM, needle_recall

torch.set_num_threads(1)

LENGTH = 70  # beyond 4 M


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random model and its tokenizer, and a text that repeats itself, beside it."""
    folder = tmp_path_factory.mktemp("source") / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("of the source")
    draw = random.Random(torch.initial_seed())
    phrases = [" ".join(f"w{draw.randrange(3, 320)}" for _ in range(9)) for _ in range(4)]
    (folder.parent / "text.txt").write_text(" ".join(draw.choice(phrases) for _ in range(700)))
    return folder


def arguments(source: Path, output: Path, *more: object, model: Path | None = None) -> list[str]:
    """A run of 6 steps of two rows of the text; `more` overrides."""
    own = {"--model": model or source, "--output": output, "--data": source.parent / "text.txt", "--length": LENGTH}
    own |= {"--steps": 6, "--rows": 2, "--warmup": 2, "--log-every": 1}
    return [str(part) for pair in own.items() for part in pair] + [str(part) for part in more]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return RecSAQwen3ForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def log_of(output: Path) -> list[dict]:
    """The rows of the log without what the clock says and whose they are."""
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") >= 0 and row.pop("output") for row in rows)
    return rows


def changed(before: dict, after: dict) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


# ---- what is trained ------------------------------------------------------------------------------------------------


def test_distillation_moves_poolers_alone_and_lowers_their_loss(source, tmp_path):
    out = tmp_path / "out"
    assert distill.main(arguments(source, out, "--steps", 30, "--samples", 1000, "--lr", 0.02)) == 0
    before, after = weights(source), weights(out)
    assert changed(before, after) == {name for name in before if ".pooler." in name}
    losses = [row["loss"] for row in log_of(out)]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert [row["tokens"] for row in log_of(out)] == [2 * LENGTH * step for step in range(1, 31)]
    # training settings do not stay in the configuration
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())


WAYS = {"all": [], "poolers frozen": ["--freeze-poolers"], "lora": ["--lora", "4"]}


@pytest.mark.parametrize("way", WAYS)
def test_finetuning(way, source, tmp_path, capsys):
    """Each way moves what it shall and lowers the loss; the note on the closing distillation is there."""
    if way == "lora":
        pytest.importorskip("peft")
    out = tmp_path / "out"
    assert finetune.main(arguments(source, out, "--steps", 12, "--lr", 3e-3, *WAYS[way])) == 0
    assert f"distill.py --model {out}" in capsys.readouterr().out
    before, after = weights(source), weights(out)
    moved = changed(before, after)
    poolers = {name for name in before if ".pooler." in name}
    if way == "all":
        assert moved == set(before)
    elif way == "poolers frozen":
        assert moved == set(before) - poolers
    else:
        linear = {name for name in before if name.endswith("_proj.weight")}
        assert moved == linear and (out / "adapter" / "adapter_config.json").exists()
    rows = log_of(out)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all((row["distill_loss"] > 0) == (way == "all") for row in rows)


def test_the_closing_distillation_moves_poolers_alone(source, tmp_path, monkeypatch):
    """Its weights but the poolers are those of fine-tuning without it."""
    options = ["--steps", 2, "--freeze-poolers"]
    finetune.main(arguments(source, tmp_path / "open", *options))
    finetune.main(arguments(source, tmp_path / "closed", *options, "--closing-steps", 3))
    moved = changed(weights(tmp_path / "open"), weights(tmp_path / "closed"))
    assert moved == {name for name in weights(source) if ".pooler." in name}
    stages = [(row["stage"], row["step"]) for row in log_of(tmp_path / "closed")]
    assert stages == [("finetune", 1), ("finetune", 2), ("closing", 1), ("closing", 2), ("closing", 3)]
    assert not (tmp_path / "closed" / "before-closing").exists()


def test_long_rows_have_steps_of_their_own(source, tmp_path):
    """Every other step, of about the tokens of the others; fine-tuning itself does without, its closing does not."""
    long = ["--steps", 4, "--rows", 4, "--long-rows", "100:0.5"]
    distill.main(arguments(source, tmp_path / "out", *long))
    tokens = [row["tokens"] for row in log_of(tmp_path / "out")]
    assert tokens == [280, 480, 760, 960]  # 4 rows of 70, 2 of 100
    finetune.main(arguments(source, tmp_path / "tuned", *long, "--steps", 2, "--closing-steps", 2))
    assert [row["tokens"] for row in log_of(tmp_path / "tuned")] == [280, 560, 280, 480]


def test_steps_follow_from_tokens(source, tmp_path):
    options = distill.parse_arguments(arguments(source, tmp_path / "out", "--long-rows", "300:0.25"))
    data = training.StepData(options, tiny_tokenizer(), training.start(options))
    assert data.tokens_a_step == 0.75 * 140 + 0.25 * 300
    assert data.steps_for(180) == 1 and data.steps_for(181) == 2
    # the defaults of the three parts are the paper's 0.62B tokens
    assert distill.TOKENS + finetune.TOKENS + finetune.CLOSING_TOKENS == 620_000_000


def test_needle_recall_is_logged(source, tmp_path, monkeypatch, capsys):
    """Every so many steps and at the end: the share over all layers in a row of that step, of the model after it."""
    original, expected = training.Run.recall, []

    def recall(run):
        ids, positions = training.recall_queries(run.data.last, run.geometry.top_capacity)
        found = sum(needle_recall(run.model.eval(), ids, positions), Recall())
        expected.append({"reach": found.reach, **{f"chosen_{n}": share for n, share in found.by_level.items()}})
        figures = original(run)
        assert run.model.training
        return figures

    monkeypatch.setattr(training.Run, "recall", recall)
    # a model that looks at single tokens
    monkeypatch.setattr(training, "needle_recall", partial(needle_recall, threshold=0.05))
    monkeypatch.setitem(globals(), "needle_recall", training.needle_recall)
    distill.main(arguments(source, tmp_path / "out", "--recall-every", 4, "--log-every", 100))
    rows = log_of(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 4, 6] and "reach" not in rows[0]
    found = [{name: row[name] for name in row if name.startswith(("reach", "chosen"))} for row in rows[1:]]
    assert found == [pytest.approx(one, abs=1e-6) for one in expected] and found[0]["reach"] < 1
    distill.main(arguments(source, tmp_path / "none", "--recall-every", 0))
    assert not any("reach" in row for row in log_of(tmp_path / "none"))
    assert "no needle recall" not in capsys.readouterr().out
    monkeypatch.undo()
    distill.main(arguments(source, tmp_path / "dense", "--length", 16, "--needles", 0, "--steps", 1))
    assert "no needle recall, since no row is longer than M = 16" in capsys.readouterr().out


def test_the_queries_of_needle_recall():
    """The row with the most answers, its longest document; queries before answers that walk, or any, or none."""
    ids = random_ids(2, 60)
    positions = torch.cat((torch.arange(23), torch.arange(37))).expand(2, -1)
    answers = torch.zeros(2, 60, dtype=torch.bool)
    answers[1, [3, 23 + 9, 23 + 20, 59]] = True
    batch = {"input_ids": ids, "position_ids": positions, "answer_mask": answers}
    row, queries = training.recall_queries(batch, 16)
    assert torch.equal(row, ids[1:, 23:]) and queries.tolist() == [[19, 35]]
    assert training.recall_queries(batch, 36)[1].tolist() == [[36]]
    assert training.recall_queries(batch, 37)[1].tolist() == [[-1]]
    padded = {**batch, "position_ids": torch.arange(60).expand(2, -1).clone(), "attention_mask": torch.ones_like(ids)}
    padded["attention_mask"][1, 50:], padded["position_ids"][1, 50:] = 0, 0
    row, queries = training.recall_queries(padded, 16)
    assert torch.equal(row, ids[1:, :50]) and queries.tolist() == [[31, 42]]
    many = {**batch, "answer_mask": torch.ones(2, 60, dtype=torch.bool)}
    monotone = training.recall_queries({name: tensor.repeat(1, 5) for name, tensor in many.items()}, 0)[1][0]
    assert len(monotone) == 36 and (monotone.diff() == 1).all()


def test_bfloat16_computes_beside_float32_poolers(source, tmp_path, monkeypatch):
    """A bfloat16 checkpoint stays one; small steps add up in float32, where bfloat16 poolers would not move."""
    model = RecSAQwen3ForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tiny_tokenizer().save_pretrained(tmp_path / "half")
    seen = set()
    original = training.Run.step

    def step(run, number):
        seen.update((".pooler." in name, p.dtype) for name, p in run.model.named_parameters())
        return original(run, number)

    monkeypatch.setattr(training.Run, "step", step)
    half = {"model": tmp_path / "half"}
    distill.main(arguments(source, tmp_path / "out", "--precision", "bf16", **half))
    assert seen == {(True, torch.float32), (False, torch.bfloat16)}
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    seen.clear()
    finetune.main(arguments(source, tmp_path / "tuned", "--precision", "bf16", "--lr", 1e-3, **half))
    assert seen == {(True, torch.float32), (False, torch.float32)}
    assert changed(weights(tmp_path / "half"), weights(tmp_path / "tuned"))
    assert {tensor.dtype for tensor in weights(tmp_path / "tuned").values()} == {torch.bfloat16}


def test_the_precision_is_the_commands_own(source, tmp_path, monkeypatch):
    """Whatever mixed precision a launcher's configuration names."""
    more = ["--precision", "fp32", "--steps", 2]
    distill.main(arguments(source, tmp_path / "alone", *more))
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    try:
        distill.main(arguments(source, tmp_path / "launched", *more))
    finally:
        AcceleratorState._reset_state()
    assert log_of(tmp_path / "launched") == log_of(tmp_path / "alone")


def test_the_schedule():
    """Warm-up, then flat, then linear to almost nothing over the decaying share."""
    factors = [training.schedule(step, 20, 4, 0.5) for step in range(1, 21)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 8, *[n / 10 for n in range(9, 0, -1)]])
    assert [training.schedule(step, 5, 0, 0.0) for step in range(1, 6)] == [1.0] * 5


# ---- resumption -----------------------------------------------------------------------------------------------------


def stopped_after(monkeypatch, stage: str, steps: int) -> None:
    """The next run of the stage is interrupted within the step that follows."""
    original = training.Run.step

    def step(run, number):
        figures = original(run, number)
        if run.name == stage and number > steps:
            raise KeyboardInterrupt
        return figures

    monkeypatch.setattr(training.Run, "step", step)


@pytest.mark.parametrize("steps, kept", [(1, []), (4, [2, 4]), (7, [4, 6])])
def test_a_distillation_that_was_stopped_goes_on_to_the_bit(steps, kept, source, tmp_path, monkeypatch):
    """Uniform queries and long rows: random numbers and both streams of data go on as well."""
    more = ["--steps", 8, "--long-rows", "150:0.5", "--save-every", 2, "--keep", 2, "--samples", 8]
    distill.main(arguments(source, tmp_path / "whole", *more))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_after(patch, "distill", steps)
        distill.main(arguments(source, tmp_path / "parts", *more))
    checkpoints = sorted(path.name for path in (tmp_path / "parts").glob("checkpoints/distill/*"))
    assert checkpoints == [f"step-{step:07d}" for step in kept]
    torch.manual_seed(1)
    distill.main(arguments(source, tmp_path / "parts", *more, "--resume"))
    assert not changed(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")
    assert not (tmp_path / "parts" / "checkpoints").exists()


@pytest.mark.parametrize("stage", ["finetune", "closing"])
@pytest.mark.parametrize("way", WAYS)
def test_a_finetuning_that_was_stopped_goes_on_to_the_bit(way, stage, source, tmp_path, monkeypatch):
    """In a folder that was moved, with its log; adapters are kept through the closing distillation."""
    if way == "lora":
        pytest.importorskip("peft")
    more = [*WAYS[way], "--steps", 4, "--save-every", 2, "--samples", 8, "--closing-steps", 4, "--lr", 1e-3]
    finetune.main(arguments(source, tmp_path / "whole", *more))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_after(patch, stage, 3)
        finetune.main(arguments(source, tmp_path / "parts", *more))
    (tmp_path / "parts").rename(tmp_path / "moved")
    finetune.main(arguments(source, tmp_path / "moved", *more, "--resume"))
    assert not changed(weights(tmp_path / "whole"), weights(tmp_path / "moved"))
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "moved")
    assert (tmp_path / "moved" / "adapter" / "adapter_config.json").exists() == (way == "lora")


def test_a_killed_process_goes_on_to_the_bit(source, tmp_path):
    """The plain command, ended by SIGKILL once there is a checkpoint."""
    command = [sys.executable, str(ROOT / "scripts" / "distill.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    more = ["--steps", 60, "--save-every", 5, "--samples", 8]
    process = subprocess.Popen([*command, *arguments(source, tmp_path / "parts", *more)], env=environment)
    checkpoints, until = tmp_path / "parts" / "checkpoints" / "distill", time.monotonic() + 120
    while not list(checkpoints.glob("step-*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    distill.main(arguments(source, tmp_path / "parts", *more, "--resume"))
    distill.main(arguments(source, tmp_path / "whole", *more))
    assert not changed(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "parts")


def test_other_settings_are_not_resumed(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_after(patch, "distill", 3)
        distill.main(arguments(source, out, "--save-every", 2))
    with pytest.raises(SystemExit, match="lr was 0.005, is 0.1"):
        distill.main(arguments(source, out, "--resume", "--lr", 0.1))
    with pytest.raises(SystemExit):
        distill.main(arguments(source, out))
    (out / "checkpoints" / "distill" / "step-0000002" / "run.json").unlink()
    with pytest.raises(SystemExit, match="step-0000002 is not whole"):
        distill.main(arguments(source, out, "--resume"))


def test_other_text_is_not_resumed(source, tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    shutil.copy(source.parent / "text.txt", text)
    more = ["--save-every", 1, "--data", text]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_after(patch, "distill", 2)
        distill.main(arguments(source, tmp_path / "out", *more))
    text.write_text(text.read_text() + " w7")
    with pytest.raises(SystemExit, match="--resume: --data .*a.txt"):
        distill.main(arguments(source, tmp_path / "out", *more, "--resume"))


def test_a_result_that_was_half_moved_is_finished(source, tmp_path, monkeypatch, capsys):
    """Killed between the result's files, adapters among them, then before it was cleared up; at last nothing is left
    to do."""
    pytest.importorskip("peft")
    more = ["--steps", 1, "--lora", 2, "--closing-steps", 1]
    rename = Path.rename

    def killed(path, target):
        if path.name == "config.json":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        finetune.main(arguments(source, tmp_path / "out", *more))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(finetune, "clear", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        finetune.main(arguments(source, tmp_path / "out", *more, "--resume"))
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "adapter", "before-closing"} < files
    assert finetune.main(arguments(source, tmp_path / "out", *more, "--resume")) == 0
    assert "holds the finished model already" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == files - {"before-closing", "checkpoints"}


def test_runs_that_share_a_log_keep_their_lines(source, tmp_path, monkeypatch):
    log = tmp_path / "all.jsonl"
    more = ["--steps", 3, "--save-every", 1, "--log", log]
    distill.main(arguments(source, tmp_path / "first", *more))
    lines = log.read_text()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_after(patch, "distill", 2)
        distill.main(arguments(source, tmp_path / "second", *more, "--save-every", 2, "--log-every", 2))
    with log.open("a") as file:
        file.write(lines[:30])  # half a line
    distill.main(arguments(source, tmp_path / "second", *more, "--save-every", 2, "--resume"))
    assert log.read_text().startswith(lines)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows if row["output"] == str(tmp_path / "second")] == [1, 2, 3]


# ---- the result -----------------------------------------------------------------------------------------------------


def test_the_result_is_a_checkpoint_as_any_other(source, tmp_path):
    """In a fresh process, without the package, offline; then converted results of results too."""
    out = tmp_path / "out"
    distill.main(arguments(source, out, "--steps", 2))
    code = """
    model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(args[0], trust_remote_code=True)
    report(tokens=tokens(model), ids=tokenizer("w5 w7").input_ids)
    """
    run = run_fresh(code, out, home=tmp_path / "home", env={"HF_HUB_OFFLINE": "1"})
    assert not run["own_package"] and run["ids"] == [5, 7]
    model = RecSAQwen3ForCausalLM.from_pretrained(out).eval()
    prompt = (torch.arange(150) * 37 % 311 + 5)[None]
    assert run["tokens"] == model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()
    assert sorted(path.name for path in out.glob("*.py")) == SOURCES
    assert (out / "LICENSE").read_text() == "of the source"
    assert not list(out.rglob("unfinished"))


# ---- the README -----------------------------------------------------------------------------------------------------


def readme_commands() -> list[list[str]]:
    """The training commands of the README, each from its script on."""
    section = (ROOT / "README.md").read_text().split("\n## Training\n")[1].split("\n## ")[0]
    blocks = [block.split("```")[0] for block in section.split("```bash\n")[1:]]
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [line[next(i for i, word in enumerate(line) if word.startswith("scripts/")) :] for line in lines]


def test_the_commands_of_the_readme(source, tmp_path):
    """In their order, on a small model and text of the same kinds, with fewer and shorter steps."""
    embedded = tmp_path / "small-recsa"
    convert(str(ROOT / "models" / "small-dense"), embedded, recsa={"recsa_branching": 4, "recsa_top_k": 4})
    (tmp_path / "texts").mkdir()
    shutil.copy(source.parent / "text.txt", tmp_path / "texts")
    places = {"models/small-recsa": embedded, "qwen3-4b-recsa": source, "texts/": tmp_path / "texts"}
    commands = readme_commands()
    assert len(commands) == 4
    for script, *words in commands:
        output = words[words.index("--output") + 1]
        places[output] = tmp_path / output
        words = [str(places.get(word, word)) for word in words]
        words += ["--length", "70", "--rows", "2", "--steps", "2", "--samples", "16", "--cpu"]
        words += ["--long-rows", "140:0.5"] * ("--long-rows" in words)
        words += ["--closing-steps", "2"] * ("--closing-steps" in words)
        assert {"scripts/distill.py": distill, "scripts/finetune.py": finetune}[script].main(words) == 0
        assert RecSAQwen3ForCausalLM.from_pretrained(places[output])


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    """A test in which no weights may be loaded."""

    def refuse(*args, **kwargs):
        pytest.fail("the model was loaded")

    monkeypatch.setattr(RecSAQwen3ForCausalLM, "from_pretrained", refuse)


@pytest.mark.parametrize(
    "command, more",
    [
        (distill, ["--length", "0"]),
        (distill, ["--rows", "-1"]),
        (distill, ["--lr", "0"]),
        (distill, ["--lr", "nan"]),
        (distill, ["--decay", "2"]),
        (distill, ["--warmup", "-1"]),
        (distill, ["--queries", "answers+luck"]),
        (distill, ["--samples", "0"]),
        (finetune, ["--distill-weight", "0"]),
        (finetune, ["--distill-weight", "0.3", "--freeze-poolers"]),
        (finetune, ["--lora", "0"]),
        (finetune, ["--closing-steps", "-1"]),
        (finetune, ["--pooler-lr", "nan"]),
        (finetune, ["--closing-lr", "nan", "--closing-steps", "1"]),
        (finetune, ["--weight-decay", "nan"]),
        (finetune, ["--distill-weight", "inf"]),
        (finetune, ["--long-rows", "140:0.5"]),
        (finetune, ["--closing-lr", "0.1"]),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else " ".join(value),
)
def test_impossible_arguments_are_refused_by_name(command, more, source, tmp_path, capsys, no_model):
    with pytest.raises(SystemExit):
        command.main(arguments(source, tmp_path / "out", *more))
    assert more[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package, option", [("tensorboard", ["--tensorboard", "logs"]), ("peft", ["--lora", "4"])])
def test_an_absent_package_is_named(package, option, source, tmp_path, capsys, monkeypatch, no_model):
    find = training.importlib.util.find_spec
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(SystemExit):
        finetune.main(arguments(source, tmp_path / "out", *option))
    error = capsys.readouterr().err
    assert option[0] in error and f"pip install {package}" in error


@pytest.mark.parametrize("command", [distill, finetune])
def test_models_that_cannot_be_trained_are_refused_by_name(command, source, tmp_path, no_model):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match=r"stock Qwen3 .* convert it first(.|\n)*--source .*small-dense"):
        command.main(arguments(source, out, model=ROOT / "models" / "small-dense"))
    with pytest.raises(SystemExit, match="--model"):
        command.main(arguments(source, out, model=tmp_path / "nothing"))
    dense = tmp_path / "dense"
    shutil.copytree(source, dense)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "recsa_top_k": None, "recsa_recent": 0}))
    with pytest.raises(SystemExit, match="recsa_top_k"):
        command.main(arguments(source, out, model=dense))
    with pytest.raises(SystemExit, match="--length 8: .* from 9 tokens"):
        command.main(arguments(source, out, "--length", 8))
    with pytest.raises(SystemExit, match="--rows 3: must be a multiple of --batch-size 2"):
        command.main(arguments(source, out, "--rows", 3, "--batch-size", 2))


@pytest.mark.parametrize("command", [distill, finetune])
def test_data_that_cannot_be_read_are_refused_by_name(command, source, tmp_path, no_model):
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="nowhere.txt"):
        command.main(arguments(source, out, "--data", tmp_path / "nowhere.txt"))
    with pytest.raises(SystemExit, match="--data: .*--length"):
        command.main(arguments(source, out, "--length", 100_000))
    assert not out.exists()


@pytest.mark.parametrize("command, closing", [(distill, []), (finetune, ["--closing-steps", 2])])
@pytest.mark.parametrize(
    "more, message",
    [
        (["--long-rows", "140"], "--long-rows"),
        (["--long-rows", "100000:0.5"], "--data: .* one row of 100,000"),
        (["--length", 24, "--needles", 1], "--needle-kinds"),
        (["--long-rows", "16:0.5", "--needles", 0], "--long-rows 16: a query sees two nodes from 17"),
        (["--no-packing", "--needles", 0], "--data: .* no document of 17 tokens"),
    ],
)
def test_what_cannot_be_distilled_is_refused_first(command, closing, more, message, source, tmp_path, no_model):
    """Before fine-tuning too, where the distillation comes after it."""
    model = tmp_path / "model"
    shutil.copytree(source, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "recsa_branching": 8, "recsa_top_capacity": 32}))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "w3 w4 w5"}) + "\n")
    data = ["--data", tmp_path / "a.jsonl"] if "--no-packing" in more else []
    with pytest.raises(SystemExit, match=message):
        command.main(arguments(source, tmp_path / "out", *closing, *more, *data, model=model))


@pytest.mark.parametrize("absent", ["model.safetensors", "tokenizer*"])
def test_a_model_that_is_not_whole_is_refused_by_name(absent, source, tmp_path):
    shutil.copytree(source, tmp_path / "model", ignore=shutil.ignore_patterns(absent))
    for command in (distill, finetune):
        with pytest.raises(SystemExit, match=f"--model {tmp_path / 'model'}"):
            command.main(arguments(source, tmp_path / "out", model=tmp_path / "model"))


@pytest.mark.parametrize("content", ['{"loss": 1}\n', "not mine"])
def test_paths_that_hold_something_else_are_refused(content, source, tmp_path, capsys, no_model):
    file = tmp_path / "file"
    file.write_text(content)
    for more in (["--log", file], ["--log", tmp_path], ["--log", file / "log"], ["--output", file / "out"]):
        with pytest.raises(SystemExit):
            distill.main(arguments(source, tmp_path / "out", *more))
        assert f"{more[0]} {more[1]}: " in capsys.readouterr().err
    assert file.read_text() == content


def test_an_output_that_holds_something_is_refused(source, tmp_path, capsys, no_model):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(SystemExit):
        distill.main(arguments(source, tmp_path))
    error = capsys.readouterr().err
    assert "--output" in error and "--resume" in error
    with pytest.raises(SystemExit):
        distill.main(arguments(source, source, "--resume"))
    assert "holds a model already" in capsys.readouterr().err
