"""The main job's command on the embedded default, and the README's generated tables."""

import io
import json

import pytest

import bench_reference
import generate
import needle_text
import update_readme
from conftest import ROOT

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


def test_a_haystack_within_the_dense_range_is_answered(default, capsys):
    assert generate.main(["--haystack", "500", *FEW]) == 0
    out, err = capsys.readouterr()
    example = needle_text.make_example(500, "needle", 0)
    assert f"expected: {example.answer} -> right" in out
    assert "path of the last step: dense" in out and "dense attention" in out
    assert "reading: 100%" in err


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
    ],
)
def test_impossible_arguments_are_refused_before_any_work(arguments, capsys):
    with pytest.raises(SystemExit):
        generate.parse_arguments(arguments)
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
