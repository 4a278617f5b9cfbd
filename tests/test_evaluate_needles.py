"""`scripts/evaluate_needles.py` and `scripts/reproduce_small.py`: what is asked, counted, resumed and foreseen."""

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import evaluate_needles
import needle_text
import reproduce_small
import train_small
from conftest import ROOT
from convert_qwen3 import convert
from evaluate_needles import AGAIN, Cell

DENSE = ROOT / "models" / "small-dense"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """The embedded model with M = 64, so that its untrained poolers answer little at 300 tokens."""
    folder = tmp_path_factory.mktemp("models") / "converted"
    convert(str(DENSE), folder, recsa=dict(recsa_branching=8, recsa_top_k=4, recsa_top_capacity=64))
    return folder


def by_hand(model, task: str, length: int, prompts: int) -> int:
    """Answers given word for word, one question at a time, by taking the most likely token again and again."""
    exact = 0
    for number in range(prompts):
        example = needle_text.make_example(length, task, 1_000_000 + number)
        ids = example.prompt_ids[None]
        for _ in example.answer_ids:
            with torch.no_grad():
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        exact += ids[0, len(example.prompt_ids) :].tolist() == example.answer_ids.tolist()
    return exact


@pytest.mark.parametrize("length", [300, 700])
def test_answers_are_counted(length):
    """Batches of several questions count as single ones."""
    model = AutoModelForCausalLM.from_pretrained(DENSE, dtype=torch.float32)
    exact, tokens = train_small.exact_match(model, "alias", length, 3, 2 * length)
    assert exact == by_hand(model, "alias", length, 3)
    assert exact / 3 <= tokens <= 1


def test_the_command(converted, tmp_path, capsys):
    """Every method over the same prompts; a figure that is there is not made again; the time is kept."""
    output = tmp_path / "out" / "needles.json"
    options = ["--model", str(converted), "--methods", "recsa", "dense", "yarn", "dca", "--tasks", "needle"]
    options += ["--lengths", "300", "--prompts", "4", "--device", "cpu", "--output", str(output)]
    assert evaluate_needles.main([*options, "--seconds", "0"]) == AGAIN and not output.exists()
    assert evaluate_needles.main(options) == 0
    report = json.loads(output.read_text())
    cells = {row["method"]: row for row in report["cells"]}
    assert {name: row["exact"] for name, row in cells.items() if name != "recsa"} == {"dense": 4, "yarn": 4, "dca": 4}
    assert cells["recsa"]["exact"] < 4 and cells["recsa"]["backend"] == "reference"
    assert all(row["low"] <= row["exact"] / row["prompts"] <= row["high"] for row in report["cells"])
    assert str(tmp_path) not in json.dumps(report["cells"]) and report["script"] == "scripts/evaluate_needles.py"
    capsys.readouterr()
    assert evaluate_needles.main([*options, "--tasks", "needle", "lookalike"]) == 0
    again = json.loads(output.read_text())["cells"]
    assert again[:4] == report["cells"] and [row["task"] for row in again[4:]] == ["lookalike"] * 4
    assert "needle" not in capsys.readouterr().out
    # other weights in a folder of the same name
    other = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    other.save_pretrained(tmp_path / "other" / converted.name)
    options[1] = str(tmp_path / "other" / converted.name)
    assert evaluate_needles.main(options) == 0
    report = json.loads(output.read_text())
    assert len(report["cells"]) == 12 and [row["exact"] for row in report["cells"][8:]] == [0] * 4
    for wrong in (["--lengths", "15"], ["--prompts", "0"]):
        with pytest.raises(SystemExit):
            evaluate_needles.main([*options, *wrong])
        assert wrong[0] in capsys.readouterr().err


def test_time_is_foreseen_by_the_cost_of_a_method():
    """RecSA's grows as the tokens, that of dense attention as their square."""
    rows = [dict(method=method, length=1000, prompts=10, seconds=3.0) for method in ("recsa", "dense")]
    for method, expected in (("recsa", 3.0 * 4 / 5), ("dense", 3.0 * 16 / 5), ("dca", 0.0)):
        assert evaluate_needles.foreseen(Cell("m", method, "needle", 4000, 2), rows) == pytest.approx(expected)


def test_the_recipe_goes_on_where_time_was_over(tmp_path, capfd, monkeypatch):
    """From training to figures at toy size; what is made stays as it is."""
    options = ["--output", str(tmp_path), "--tiny", "--cpu", "--seeds", "5"]
    assert reproduce_small.main([*options, "--minutes", "0.001"]) == AGAIN
    assert "run the same command again" in capfd.readouterr().out
    assert reproduce_small.main(options) == 0
    report = json.loads((tmp_path / "reproduce_small.json").read_text())
    rows = report["seeds"]["5"]
    assert len(rows) == len(reproduce_small.cells_of(tmp_path, reproduce_small.SIZES["tiny"]))
    folder = tmp_path / "seed-5"
    assert {row["model"] for row in rows} == {*reproduce_small.MODELS, "dense"}
    weights = {
        name: AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in reproduce_small.MODELS
    }
    moved = [name for name, tensor in weights["distilled"].items() if not torch.equal(tensor, weights["tuned"][name])]
    short = [
        name
        for name, tensor in weights["distilled"].items()
        if not torch.equal(tensor, weights["distilled-short"][name])
    ]
    assert short and all(".pooler." in name for name in short) and any(".pooler." not in name for name in moved)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    capfd.readouterr()
    began = time.monotonic()
    assert reproduce_small.main(options) == 0 and time.monotonic() - began < 5
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == times
    monkeypatch.setattr(reproduce_small, "stages", lambda *a: [(tmp_path / "none", ["distill.py", "--model", "none"])])
    with pytest.raises(SystemExit, match="distill.py failed"):
        reproduce_small.main(options)
