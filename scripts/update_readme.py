"""Write the README's tables from the JSON files in `benchmarks/`.

    python scripts/update_readme.py            # rewrite the tables
    python scripts/update_readme.py --check    # exit 1 if a table differs from its file

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function below. No figure in the README is
written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def train_small() -> str:
    """Exact-match accuracy of the small dense checkpoint."""
    report = load("train_small")
    scores = report["scores"]
    lengths = sorted({row["length"] for row in scores})
    tasks = list(dict.fromkeys(row["task"] for row in scores))
    cell = {(row["length"], row["task"]): f"{100 * row['exact']:.1f} % of {row['prompts']}" for row in scores}
    rows = [[f"{length:,}", *(cell[length, task] for task in tasks)] for length in lengths]
    source = (
        f"Exact match, stock Qwen3 from the saved checkpoint; {report['device']}, torch {report['torch']}, "
        f"transformers {report['transformers']}, `{report['script']}`, one seed.\n"
    )
    return table(["tokens", *tasks], rows) + "\n" + source


def bench_reference() -> str:
    """Time and memory of the reference path against length."""
    report = load("bench_reference")
    prefill = [
        [f"{row['length']:,}", f"{row['ms_per_token']:.2f} ms", f"{row['peak_above_start_mib']:,.0f} MiB"]
        for row in report["prefill"]
    ]
    decode = [[f"{row['length']:,}", f"{row['median_ms']:.1f} ms"] for row in report["decode"]]
    job = report["haystack"][0]
    model = report["model"]
    source = (
        f"`scripts/generate.py --haystack {job['length']} --top-k {job['top_k']} --device cpu`, the embedded model on "
        f"the same CPU: {job['seconds'] / 60:.1f} minutes in all, {job['peak_mib'] / 1024:.1f} GiB.\n\n"
        f"Tables: random model, {model['num_hidden_layers']} layers, width {model['hidden_size']}, "
        f"r = {model['recsa_branching']}, k = {model['recsa_top_k']}, M = {model['recsa_top_capacity']}; "
        f"{report['threads']} threads of {report['processor']}, torch {report['torch']}, "
        f"transformers {report['transformers']}, `{report['script']}`.\n"
    )
    return (
        table(["prefill of", "per token", "memory above the model's"], prefill)
        + "\n"
        + table(["decode step at", "median"], decode)
        + "\n"
        + source
    )


def bench_inference() -> str:
    """Prefill and decode against the fastest dense attention, by geometry and length."""
    report = load("bench_inference")
    rows = []
    for line in report["ratios"]:
        row = [_geometry(line), f"{line['length']:,}"]
        for what, unit, digits in (("prefill", "s", 1), ("decode", "ms", 2)):
            ours, dense, ratio = (line[f"{what}_{name}"] for name in (f"recsa_{unit}", f"dense_{unit}", "ratio"))
            scaled = "" if line[f"{what}_dense_how"] == "measured" else "~ "
            row += (
                [f"{ours:.{digits}f} {unit}", f"{scaled}{dense:.{digits}f} {unit}", f"{ratio:.2f} ×"]
                if ratio
                else ["–"] * 3
            )
        rows.append(row)
    header = ["r, k, M", "tokens", "prefill", "dense", "", "decode step", "dense", ""]
    extra = []
    for entry in report["recsa"]:
        steps, prefill, name = entry["decode"]["at"], entry["prefill"], _geometry(entry)
        ratios = [f"{row['generate_over_step']:.2f} × at {row['length']:,}" for row in sorted(steps, key=_length)]
        last = max(steps, key=_length)
        extra.append(
            f"* {name}: the longest prefill's peak memory above weights ({prefill['weights_gib']:.1f} GiB) "
            f"and cache ({prefill['cache_gib']:.1f} GiB) was {prefill['peak_above_gib']:.1f} GiB. `generate()` took "
            f"{last['generate_ms_per_token']:.2f} ms per token at {last['length']:,}; a token takes, in bare steps, "
            f"{', '.join(ratios)}.\n"
        )
    return table(header, rows) + "\n" + "".join(extra) + "\n" + _source_of_inference(report)


def bench_inference_m2048() -> str:
    """Prefill with a narrower top level, RecSA alone; what the run had no time for is left out."""
    report = load("bench_inference_m2048")
    rows = [
        [
            _geometry(line),
            f"{line['length']:,}",
            f"{line['prefill_recsa_s']:.1f} s",
        ]
        for line in report["ratios"]
        if line["prefill_recsa_s"]
    ]
    return table(["r, k, M", "tokens", "prefill"], rows) + "\n" + _source_of_inference(report)


def bench_kernels() -> str:
    """Where the time of one layer's chunk goes."""
    report = load("bench_inference")
    groups = {
        "gathered levels: score, accumulate": ("children_kernel",),
        "merge of partial outputs": ("merge_kernel",),
        "selection": ("select_kernel", "mark_chosen"),
        "top level": ("top_", "rotate_keys"),
        "pairs sorted by parent": ("count_pairs", "sort_pairs", "tensor_kernel_scan", "searchsorted"),
        "matrix products": ("nvjet", "gemm", "cublas"),
    }
    columns: list[str] = []
    sums: dict[str, list[str]] = {name: [] for name in [*groups, "the rest", "sum"]}
    for entry in report["recsa"]:
        for at in entry["kernels"]["at"]:
            columns.append(f"{entry['geometry']['r']}, {entry['geometry']['k']} at {at['length']:,}")
            prefill, chunks = at["prefill"], entry["kernels"]["chunks"]
            spent = dict.fromkeys(sums, 0.0)
            for kernel in prefill["kernels"]:
                for group, parts in groups.items():
                    if any(part in kernel["name"] for part in parts):
                        spent[group] += kernel["ms"] / chunks
            spent["sum"] = prefill["cuda_ms"] / chunks
            spent["the rest"] = spent["sum"] - sum(spent[name] for name in groups)
            for name, ms in spent.items():
                sums[name].append(f"{ms:.2f}")
    return table(["ms", *columns], [[name, *cells] for name, cells in sums.items()])


def bench_million() -> str:
    """Whole `generate()` calls on very long prompts, from every file of such runs."""
    rows, sources = [], []
    reports = [load(path.stem) for path in sorted((ROOT / "benchmarks").glob("bench_million*.json"))]
    dense = {length: s for report in reports for length, s in _dense_of_million(report).items()}
    for report in reports:
        sources.append(f"`{report['command']}`")
        for run in report["runs"]:
            slower = {**dense, **_dense_of_million(report)}.get(str(run["tokens"]))
            steps = sorted(((int(length), ms) for length, ms in run["step_ms"].items()), reverse=True)
            budget = run["gpu_budget_gib"]
            rows.append([
                _geometry(run),
                f"{run['tokens']:,}",
                f"{report['chunk']:,}",
                run["cache_dtype"] + (f", {budget:g} GiB of the GPU" if budget else ""),
                f"{run['prefill_seconds']:.0f} s",
                f"~ {slower:.0f} s, {slower / run['prefill_seconds']:.1f} ×" if slower else "–",
                f"{run['decode_ms']:.1f} ms",
                " / ".join(f"{ms:.2f}" for _, ms in steps) + " ms",
                f"{run['peak_gib']:.0f} GiB",
            ])  # fmt: skip
    header = [
        "r, k, M",
        "tokens",
        "chunk",
        "cache",
        "prefill",
        "dense",
        "per new token",
        "step here / at half",
        "peak",
    ]
    first = reports[0]
    source = (
        f"{first['device']}, {first['dtype'].removeprefix('torch.')}, Qwen3-4B's shape with random weights, batch 1, "
        f"128 new tokens; torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}; "
        f"{', '.join(sources)}.\n"
    )
    return table(header, rows) + "\n" + source


def _dense_of_million(report: dict[str, Any]) -> dict[str, float]:
    return report["dense"]["by_backend"]["cudnn"]["scaled_seconds"] if report["dense"] else {}


def bench_training() -> str:
    """Attention, whole steps and steps of distillation in training, against dense attention by backend."""
    parts = {
        "attention": ("one layer's attention, forward and backward", "ms", "dense", "peak_gib"),
        "step": ("a training step, checkpointed", "seconds", "dense", "peak_in_all_gib"),
        "distillation": ("a step of distillation; dense: a forward", "seconds", "dense_forward", "peak_in_all_gib"),
    }
    rows = []
    reports = [load(path.stem) for path in sorted((ROOT / "benchmarks").glob("bench_training*.json"))]
    for report in reports:
        for name, (what, unit, dense, peak) in parts.items():
            if name not in report:
                continue
            others = sorted(report[name][dense].items(), key=lambda item: item[1][unit])
            for run in report[name]["recsa"]:
                rows.append([
                    f"{report['sizes']['length']:,}",
                    what,
                    f"{run['r']}, {run['k']}, {run['M']}",
                    _duration(run[unit], unit),
                    " / ".join(f"{_duration(other[unit], unit)} ({backend})" for backend, other in others),
                    " / ".join(f"{other[unit] / run[unit]:.2f} ×" for _, other in others),
                    f"{run[peak]:.1f} GiB / {others[0][1][peak]:.1f} GiB",
                ])  # fmt: skip
    first, commands = reports[0], ", ".join(f"`{report['command']}`" for report in reports)
    source = (
        f"{first['device']}, {first['dtype'].removeprefix('torch.')}, Qwen3-4B's shape with random weights, one "
        f"sequence; torch {first['torch']}, triton {first['triton']}, transformers {first['transformers']}; "
        f"{commands}.\n"
    )
    header = ["tokens", "what", "r, k, M", "time", "dense", "dense / RecSA", "memory: RecSA / dense"]
    return table(header, rows) + "\n" + source


def _duration(value: float, unit: str) -> str:
    return f"{value:.1f} ms" if unit == "ms" else f"{value:.2f} s"


def float8_cache() -> str:
    """Exact answers with tokens in the model's dtype and in float8."""
    report = load("float8_cache")
    rows = [
        [
            f"{row['length']:,}",
            row["task"],
            *(f"{100 * row[f'exact_{dtype}'] / row['prompts']:.1f} %" for dtype in ("auto", "fp8_e4m3")),
            f"{100 * row['same_answers'] / row['prompts']:.1f} %",
            f"{row['logits_relative_rms']:.3f}",
        ]
        for row in report["accuracy"]
    ]
    prompts = report["accuracy"][0]["prompts"]
    totals = [sum(row[f"exact_{dtype}"] for row in report["accuracy"]) for dtype in ("auto", "fp8_e4m3")]
    number = prompts * len(rows)
    source = (
        f"{prompts} prompts a line; over all {number:,}: {100 * totals[0] / number:.2f} % and "
        f"{100 * totals[1] / number:.2f} %. Relative RMS of keys under {_errors(report, 'keys')}. {report['device']}, "
        f"{report['dtype'].removeprefix('torch.')}, torch {report['torch']}, transformers {report['transformers']}; "
        f"`{report['command']}`.\n"
    )
    return table(["tokens", "task", "auto", "fp8_e4m3", "same answer", "logits' relative RMS"], rows) + "\n" + source


def _errors(report: dict[str, Any], which: str) -> str:
    return ", ".join(f"{name}: {100 * error[which]:.2f} %" for name, error in report["scales"].items())


def _geometry(entry: dict[str, Any]) -> str:
    return ", ".join(str(number) for number in entry["geometry"].values())


def _length(row: dict[str, Any]) -> int:
    return row["length"]


def _source_of_inference(report: dict[str, Any]) -> str:
    return (
        f"{report['device']}, {report['dtype'].removeprefix('torch.')}, Qwen3-4B's shape with random weights, batch 1,"
        f" chunks of {report['sizes']['chunk']:,}; torch {report['torch']}, triton {report['triton']}, transformers "
        f"{report['transformers']}; `{report['command']}`.\n"
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        train_small,
        bench_reference,
        bench_inference,
        bench_inference_m2048,
        bench_kernels,
        bench_million,
        bench_training,
        float8_cache,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    text = README.read_text("utf-8")
    new = _BLOCK.sub(lambda block: block[1] + "\n" + TABLES[block[2]]() + "\n" + block[3], text)
    if options.check:
        if new != text:
            raise SystemExit("README.md: a table differs from its file in benchmarks/; run scripts/update_readme.py")
        return 0
    README.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
