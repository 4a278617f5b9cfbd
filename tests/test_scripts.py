"""The main job's command on the embedded default, and the README's generated tables."""

import io
import json
from types import SimpleNamespace

import pytest

import bench_reference
import generate
import needle_text
import update_readme
from conftest import ROOT
from recsa_qwen3 import RecSACache, cache_files_recsa_qwen3, modeling_recsa_qwen3, progress_recsa_qwen3

FEW = ["--max-new-tokens", "6", "--device", "cpu"]
SPARSE = ["--top-k", "4", "--top-capacity", "64"]  # r = 16: sparse from 65 tokens on


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """The embedded default, converted into a temporary folder."""
    folder = tmp_path_factory.mktemp("models") / "small-recsa"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "DEFAULT", folder)
        patch.setattr(generate, "ROOT", folder.parent)
        patch.setattr(generate, "DENSE_DEFAULT", folder.parent / "small-dense")
        (folder.parent / "small-dense").symlink_to(ROOT / "models" / "small-dense")
        yield folder


def test_a_haystack_within_the_dense_range_is_answered(default, capsys, monkeypatch):
    monkeypatch.setattr(progress_recsa_qwen3, "DELAY", 0)
    assert generate.main(["--haystack", "500", "--chunk", "100", *FEW]) == 0
    out, err = capsys.readouterr()
    example = needle_text.make_example(500, "needle", 0)
    assert f"expected: {example.answer} -> right" in out
    assert "path of the last step: dense" in out and "dense attention" in out
    assert "reading: 100%" in err
    assert "GiB of keys and values" in out


def test_beyond_the_dense_range_it_says_what_one_query_read(default, capsys):
    assert generate.main(["--haystack", "700", "--task", "lookalike", *SPARSE, *FEW]) == 0
    out = capsys.readouterr().out
    tokens = len(needle_text.make_example(700, "lookalike", 0).prompt_ids)
    assert "path of the last step: reference" in out and "level 1: 44" in out  # ceil(695 / 16)
    read = int(out.split("the last query read ")[1].split(" ")[0].replace(",", ""))
    assert read < tokens and f"dense attention reads {tokens}" in out


def test_dense_reads_everything(default, capsys):
    assert generate.main(["--haystack", "700", "--dense", *FEW]) == 0
    assert "path of the last step: dense" in capsys.readouterr().out


def test_another_branching_resets_the_slot_bias_and_runs(default, capsys):
    assert generate.main(["--haystack", "400", "--branching", "4", *SPARSE, *FEW]) == 0
    assert "r = 4" in capsys.readouterr().out


def test_a_file_and_standard_input_give_the_same(default, tmp_path, capsys, monkeypatch):
    text = needle_text.make_example(300, "needle", 3).prompt
    (tmp_path / "text.txt").write_text(text)
    assert generate.main(["--prompt-file", str(tmp_path / "text.txt"), *SPARSE, *FEW]) == 0
    from_file = capsys.readouterr().out.split("\nread ")[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert generate.main(["--prompt-file", "-", *SPARSE, *FEW]) == 0
    assert capsys.readouterr().out.split("\nread ")[0] == from_file


def test_a_stock_checkpoint_is_read_with_a_notice(default, capsys):
    assert generate.main(["--model", str(ROOT / "models" / "small-dense"), "--haystack", "300", *FEW]) == 0
    assert "poolers are untrained" in capsys.readouterr().out


def answer(out: str) -> str:
    return out.split("answer:")[1].split("\nread ")[0]


def test_a_kept_text_is_asked_again_and_answers_as_if_read_anew(default, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(needle_text.make_example(600, "needle", 3).prompt)
    text = ["--prompt-file", str(tmp_path / "text.txt"), *SPARSE, *FEW]
    folder = str(tmp_path / "kept")
    for question in ("ask : blue garden =", "ask : red heron ="):
        asked = [*text, "--question", question]
        assert generate.main(asked) == 0
        cold = answer(capsys.readouterr().out)
        if not (tmp_path / "kept").exists():
            assert generate.main([*asked, "--save-cache", folder]) == 0
            assert answer(capsys.readouterr().out) == cold
        assert generate.main([*asked, "--load-cache", folder]) == 0
        out = capsys.readouterr().out
        reused = int(out.split(" of ")[0].split()[-1])
        assert answer(out) == cold and reused >= 580 and "tokens reused" in out
    # kept anew, in the same place, with the second question at its end
    assert generate.main([*asked, "--load-cache", folder, "--save-cache", folder, "--max-new-tokens", "2"]) == 0
    assert generate.main([*asked, "--load-cache", folder]) == 0
    assert answer(capsys.readouterr().out.split("tokens reused")[-1]) == cold


def test_what_was_read_when_interrupted_is_kept(default, tmp_path, capsys, monkeypatch):
    arguments = ["--haystack", "600", "--chunk", "100", *SPARSE, *FEW]
    assert generate.main(arguments) == 0
    cold = answer(capsys.readouterr().out)
    folder = tmp_path / "kept"

    def interrupted(parts, batch, device):
        yield from parts[:3]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(modeling_recsa_qwen3, "reading", interrupted)
        generate.main([*arguments, "--save-cache", str(folder)])
    assert "kept 300 tokens" in capsys.readouterr().out
    assert RecSACache.load(folder).lengths == [300]
    assert generate.main([*arguments, "--load-cache", str(folder)]) == 0
    out = capsys.readouterr().out
    assert answer(out) == cold and "300 of 300 tokens reused" in out


def test_a_kept_text_that_does_not_fit_is_refused(default, tmp_path):
    folder = tmp_path / "kept"
    arguments = ["--haystack", "300", *SPARSE, *FEW]
    generate.main([*arguments, "--save-cache", str(folder)])
    load = ["--load-cache", str(folder)]
    for more, message in (
        (["--task", "alias"], "another text"),
        (["--top-k", "5"], "recsa_top_k"),
        (["--cache-dtype", "fp8_e4m3"], "--cache-dtype"),
        (["--dtype", "float16"], "float32"),
    ):
        with pytest.raises(SystemExit, match=message):
            generate.main([*arguments, *load, *more])
    with pytest.raises(SystemExit, match="holds a cache already"):
        generate.main([*arguments, "--save-cache", str(folder)])
    (folder / generate.PROMPT_IDS).unlink()
    with pytest.raises(SystemExit, match=generate.PROMPT_IDS):
        generate.main([*arguments, *load])


def test_the_embedded_models_folder_answers_as_the_default_does(default, capsys):
    generate.main(["--haystack", "500", *FEW])
    by_default = answer(capsys.readouterr().out)
    assert generate.main(["--model", str(default), "--haystack", "500", *FEW]) == 0
    out = capsys.readouterr().out
    assert answer(out) == by_default and "-> right" in out and "untrained" not in out
    generate.main(["--haystack", "500", "--question", "ask : blue garden =", *FEW])
    assert "expected" not in capsys.readouterr().out  # it is not what was asked


def test_a_text_that_cannot_be_kept_is_answered_and_ends_with_an_error(default, tmp_path, capsys, monkeypatch):
    arguments = ["--haystack", "300", "--save-cache", str(tmp_path / "kept"), *SPARSE, *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(cache_files_recsa_qwen3, "_write_shard", lambda *_: open(tmp_path / "no" / "place"))
        assert generate.main(arguments) == 1
    out = capsys.readouterr().out
    assert "nothing was kept" in out and answer(out)
    monkeypatch.setattr(generate.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SystemExit, match="the disk has less"):
        generate.main(arguments)


def test_bad_requests_are_refused_by_name(default, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(SystemExit, match="text is empty"):
        generate.main(["--prompt-file", str(tmp_path / "empty.txt"), *FEW])
    with pytest.raises(SystemExit, match="--prompt-file"):
        generate.main(["--prompt-file", str(tmp_path / "absent.txt"), *FEW])
    with pytest.raises(SystemExit, match="recsa_top_k"):
        generate.main(["--haystack", "300", "--top-k", "0", *FEW])
    with pytest.raises(SystemExit, match="--model"):
        generate.main(["--model", str(tmp_path), *FEW])
    with pytest.raises(SystemExit, match="--haystack"):
        generate.main(["--haystack", "5", *FEW])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "abacus"],
        ["--chunk", "-3"],
        ["--haystack", "0"],
        ["--max-new-tokens", "0"],
        ["--dense", "--top-k", "4"],
        ["--seed", "-1"],
        ["--gpu-budget", "20"],
    ],
)
def test_impossible_arguments_are_refused_before_any_work(arguments, capsys):
    with pytest.raises(SystemExit):
        generate.parse_arguments([*arguments, "--device", "cpu"] if "--device" not in arguments else arguments)
    assert arguments[0] in capsys.readouterr().err


def test_the_reference_benchmark_measures_and_reports(tmp_path):
    prefill = bench_reference.measure_prefill(1200)
    decode = bench_reference.measure_decode(2000, repeats=2)
    assert prefill["ms_per_token"] > 0 and decode["median_ms"] > 0
    assert bench_reference.measure_blocks(18)["median_ms"] > 0
    report = json.loads((ROOT / "benchmarks" / "bench_reference.json").read_text())
    assert report["model"] == bench_reference.SHAPE


def test_the_tables_of_the_readme_are_those_of_the_files(monkeypatch):
    monkeypatch.setattr("sys.argv", ["update_readme.py", "--check"])
    assert update_readme.main() == 0
