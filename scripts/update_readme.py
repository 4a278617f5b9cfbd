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
    model = report["model"]
    source = (
        f"Random model, {model['num_hidden_layers']} layers, width {model['hidden_size']}, "
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


TABLES: dict[str, Callable[[], str]] = {"train_small": train_small, "bench_reference": bench_reference}


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
