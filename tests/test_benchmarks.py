"""The benchmarks at toy sizes on a CPU: their flow, what they compute, and the dense attentions they time."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bench_float8
import bench_inference as bench
import bench_million
import bench_training
import update_readme

CPU = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)


def test_the_whole_flow_leaves_no_error_and_every_figure(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("the toy sizes are for a CPU's wall clock")
    output = tmp_path / "folder" / "result.json"
    assert bench.main(["--tiny", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["command"] == "python scripts/bench_inference.py --tiny --output result.json"
    (entry,) = report["recsa"]
    sections = {**entry, **report["dense"]}
    assert {name for name in sections if name != "geometry"} == {"model", *bench.SECTIONS}
    assert not [name for name in sections if "error" in sections[name]]
    lengths = bench.TINY_SIZES["lengths"]
    assert list(entry["prefill"]["seconds"]) == [str(n) for n in lengths]
    assert entry["prefill"]["backend"] == "triton"  # the last chunk has no dense query
    assert [row["source"] for row in entry["decode"]["at"]] == ["prefill", "prefill", "random"]
    assert all(row["backend"] == "triton" and row["generate_ms_per_token"] > 0 for row in entry["decode"]["at"])
    assert {row["queries"] for row in entry["selections"]["at"]} == {"random", "slow"}
    assert all(1 <= union <= 16 for row in entry["selections"]["at"] for union in row["union_over_k"].values())
    short, whole, longest = report["ratios"]
    assert short["prefill_ratio"] is None and short["decode_ratio"] is not None
    assert whole["prefill_dense_how"] == "measured" and longest["prefill_dense_how"] == "scaled"
    assert whole["prefill_ratio"] == round(whole["prefill_dense_s"] / whole["prefill_recsa_s"], 3)
    refused = report["dense"]["dense-decode"]["at"][0]["variants"]["cudnn"]["refused"]
    assert "RuntimeError" in refused  # what does not run says so, and does not count
    table = capsys.readouterr().out
    assert f"~{longest['prefill_dense_s']:.2f}" in table
    assert output.with_suffix(".png").exists() or "no plot" in table


def test_a_failing_section_leaves_its_error_and_the_others_go_on(tmp_path, monkeypatch):
    def fail(run, result):
        result["before"] = 1
        raise ValueError("broken")

    monkeypatch.setattr(bench, "dense_prefill", fail)
    output = tmp_path / "result.json"
    bench.main(["--tiny", "--sections", "dense", "--output", str(output)])
    report = json.loads(output.read_text())
    dense = report["dense"]["dense-prefill"]
    assert dense["error"] == "ValueError: broken" and dense["before"] == 1
    assert report["dense"]["dense-decode"]["at"] and "prefill" not in report["recsa"][0]


@pytest.mark.parametrize("past", [0, 1, 50])
def test_chunked_dense_attention_equals_masked_attention(past):
    """On a CPU all backends run the two parts that are merged by log-sum-exp."""
    for backend in bench.BACKENDS:
        assert bench.attention_error(partial(bench.attend_chunk, backend), CPU, 7, past) < 1e-5


@pytest.mark.parametrize("folded", [False, True])
def test_one_dense_query_equals_masked_attention(folded):
    assert bench.attention_error(partial(bench.attend_one, None, folded), CPU, 1, 50) < 1e-5


def test_another_attention_is_refused():
    def blind(module, query, key, value, mask, scaling):
        return bench.attend_one(None, False, module, query, key[:, :, ::3], value[:, :, ::3], mask, scaling)

    with pytest.raises(ArithmeticError, match="relative error"):
        bench.attention_error(blind, CPU, 1, 8)


def test_interpolated_times_sum_to_those_of_all_chunks():
    chunk, times = 10, [3.0 + 2 * begin for begin in range(0, 100, 10)]  # rises evenly, as attention over a past does
    at = [0, 30, 90]
    for length in (20, 50, 100):
        expected = sum(times[: length // chunk]) / 1e3
        assert bench.integrate(at, [times[begin // chunk] for begin in at], length, chunk) == pytest.approx(expected)
    assert bench.scaled(12.0, 2.0, 4, 36) == 92.0


def test_slow_queries_are_correlated_and_neighbours_are_compared():
    walk = bench.slow_walk(4, 4096, 8)
    tail = walk[:, 1000:].double()
    assert float((tail[:, 1:] * tail[:, :-1]).mean()) == pytest.approx(bench.WALK, abs=0.15)
    assert float((tail[:, 1:] - tail[:, :-1]).square().mean()) == pytest.approx(2 * (1 - bench.WALK), rel=0.1)
    same = torch.tensor([[0, 1], [0, 1], [2, 3], [2, 4]])[None, None]
    assert bench.union_over_k(same, 2) == pytest.approx((1.0 + 1.5) / 2)
    assert bench.union_over_k(same, 4) == 2.5


def test_measured_dense_times_count_before_scaled_ones():
    variants = {
        "cudnn": {"refused": "no"},
        "flash": {"ms": 5.0, "how": "measured"},
        "efficient": {"ms": 4.0, "how": "scaled from 2 layers"},
    }
    report = {
        "sizes": {"short": 4, "lengths": [8]},
        "recsa": [{"geometry": {"r": 4}, "decode": {"at": [{"length": 8, "wall_ms": 2.0}]}}],
        "dense": {"dense-decode": {"at": [{"length": 8, "variants": variants}]}},
    }
    short, line = bench.ratios(report)
    assert line["decode_ratio"] == 2.5 and line["decode_dense_by"] == "flash" and line["prefill_ratio"] is None
    assert short["decode_ratio"] is None


@pytest.mark.parametrize(
    "arguments",
    [["--sections", "dance"], ["--lengths", "4096"], ["--lengths", "10000"], ["--geometry", "1,2"], ["--short", "1"]],
)
def test_impossible_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.parse_arguments(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_sizes_are_the_issue_s_unless_given():
    options = bench.parse_arguments(["--geometry", "32,64,8192", "--geometry", "16,128,8192", "--sections", "dense"])
    assert options.geometry == [(32, 64, 8192), (16, 128, 8192)] and options.lengths == bench.SIZES["lengths"]
    assert options.chunk == 4096 and options.sections == ["dense"]


def test_the_benchmark_of_very_long_prompts(tmp_path, capsys):
    """Toy sizes, whole flow; the estimate is printed, and every figure of the README's table is there."""
    assert bench_million.main(["--tiny", "--output", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (run,) = report["runs"]
    assert run["backend"] == "triton" and run["tokens"] == 68 and run["cache_dtype"] == "fp8_e4m3"
    assert run["prefill_seconds"] > 0 and run["decode_ms"] > 0 and set(run["step_ms"]) == {"70", "34"}
    assert report["dense"]["by_backend"]["flash"]["scaled_seconds"]["68"] > 0
    assert str(tmp_path) not in json.dumps(report) and "1 x 71 tokens" in capsys.readouterr().out


def test_a_run_that_fails_leaves_its_reason(tmp_path, monkeypatch):
    def broken(*_):
        raise MemoryError("too long")

    monkeypatch.setattr(bench_million, "one_run", broken)
    assert bench_million.main(["--tiny", "--dense-layers", "0", "--output", str(tmp_path / "out.json")]) == 1
    assert "MemoryError: too long" in json.loads((tmp_path / "out.json").read_text())["runs"][0]["refused"]


def test_the_benchmark_of_training(tmp_path, monkeypatch):
    """Toy sizes, whole flow, and the README's table of what it wrote."""
    (tmp_path / "benchmarks").mkdir()
    output = tmp_path / "benchmarks" / "bench_training.json"
    assert bench_training.main(["--tiny", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    for name in bench_training.SECTIONS:
        (run,) = report[name]["recsa"]
        assert (run["r"], run["k"], run["M"]) == (4, 3, 16)
    assert report["step"]["recsa"][0]["backend"] == "dense+triton" and str(tmp_path) not in json.dumps(report)
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    assert update_readme.bench_training().count("4, 3, 16") == 3


def test_the_benchmark_of_float8(tmp_path):
    arguments = ["--lengths", "512", "--prompts", "2", "--output", str(tmp_path / "out.json")]
    assert bench_float8.main(arguments) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert all(0 < error < 0.05 for errors in report["scales"].values() for error in errors.values())
    assert sum(row["exact_auto"] for row in report["accuracy"]) >= 4  # of 6, within the length it was trained at
    assert all(0 < row["logits_relative_rms"] < 0.2 for row in report["accuracy"])
