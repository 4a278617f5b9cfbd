"""How often a model answers the needle questions of the small model's world, by method, task and length.

    python scripts/evaluate_needles.py --model small-distilled --methods recsa dca --lengths 2048 8192 --prompts 200 \\
        --output needles.json

A prompt counts as answered where greedy `generate()` gives the answer word for word; all methods read the same ones.
The file is written after each cell; the same command goes on where it was stopped. This file trains nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import bench_inference as bench  # first: it says whether Triton is interpreted  # isort: skip
import torch
from transformers.utils import logging

import needle_text
from baselines import METHODS, checkpoint_digest, load_baseline
from ruler.metric import wilson_interval
from train_small import exact_match

EVAL_TOKENS = 1 << 18  # of a batch
AGAIN = 3  # exit status: time is over, the same command goes on


class Cell(NamedTuple):
    """One figure of the report. `model` is a folder; `prompts` is how many are asked."""

    model: str
    method: str
    task: str
    length: int
    prompts: int


def measure(cell: Cell, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The cell's figures: how many answers are `exact`, the share's 95 % Wilson interval, `tokens` that are right."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = load_baseline(cell.model, cell.method, cell.length, dtype=dtype, device=device)
    exact, tokens = exact_match(model, cell.task, cell.length, cell.prompts, EVAL_TOKENS)
    low, high = wilson_interval(exact / cell.prompts, cell.prompts)
    row: dict[str, Any] = {"exact": exact, "low": low, "high": high, "tokens": tokens}
    row["backend"] = getattr(model, "last_backend", None)
    row["seconds"] = round(time.perf_counter() - began, 2)
    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / bench.GIB, 2) if device.type == "cuda" else None
    return row


def fill(
    cells: Iterable[Cell],
    rows: list[dict[str, Any]],
    write: Callable[[], None],
    until: float,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Measures the cells that `rows` lacks and calls `write` after each; False where time was over first.

    A cell is begun where the time up to `until` (of the monotonic clock) is enough for twice what is foreseen.
    """
    done = {tuple(row[name] for name in ("checkpoint", *Cell._fields)) for row in rows}
    digest = lru_cache(checkpoint_digest)
    for cell in cells:
        named = cell._replace(model=Path(cell.model).name)
        if (digest(cell.model), *named) in done:
            continue
        if time.monotonic() + 2 * foreseen(named, rows) > until:
            return False
        row = {**named._asdict(), "checkpoint": digest(cell.model), **measure(cell, dtype, device)}
        rows.append(row)
        print(
            f"{named.model} {cell.method} {cell.task} {cell.length:,}: {row['exact']} of {cell.prompts} "
            f"(95 %: {row['low']:.0%} to {row['high']:.0%}), {row['seconds']} s",
            flush=True,
        )
        write()
    return True


def foreseen(cell: Cell, rows: list[dict[str, Any]]) -> float:
    """Seconds of a cell by those before it: as the tokens, or times the length for methods that read all of them."""

    def work(method: str, length: int, prompts: int) -> float:
        return prompts * length * (1 if method == "recsa" else length)

    known = [row for row in rows if row["method"] == cell.method]
    rates = [row["seconds"] / work(row["method"], row["length"], row["prompts"]) for row in known[-6:]]
    return min(rates, default=0.0) * work(cell.method, cell.length, cell.prompts)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a RecSA or, for dense methods, Qwen3 checkpoint")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["recsa"])
    parser.add_argument("--tasks", nargs="+", choices=needle_text.TASKS, default=list(needle_text.TASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="tokens, the answer included")
    parser.add_argument("--prompts", type=int, default=200, help="questions a cell")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell that would pass this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write or to go on with")
    options = parser.parse_args(arguments)
    for task in options.tasks:
        least = needle_text.minimum_length(task)
        if min(options.lengths) < least:
            parser.error(f"--lengths {min(options.lengths)}: task {task} needs at least {least} tokens")
    if options.prompts < 1:
        parser.error(f"--prompts {options.prompts}: must be at least 1")
    return options


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def open_report(arguments: list[str] | None, script: str, output: Path, device: torch.device) -> dict[str, Any]:
    """The report in `output`, or a new one that says what makes it."""
    if output.exists():
        return json.loads(output.read_text())
    output.parent.mkdir(parents=True, exist_ok=True)
    return bench.provenance(script, arguments, output, SimpleNamespace(dtype=dtype_on(device), shape=None))


def write_report(report: dict[str, Any], output: Path) -> None:
    output.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device(options.device)
    report = open_report(arguments, "scripts/evaluate_needles.py", options.output, device)
    rows = report.setdefault("cells", [])
    cells = [
        Cell(options.model, method, task, length, options.prompts)
        for length in options.lengths
        for method in options.methods
        for task in options.tasks
    ]
    until = time.monotonic() + options.seconds
    write = partial(write_report, report, options.output)
    return 0 if fill(cells, rows, write, until, dtype_on(device), device) else AGAIN


if __name__ == "__main__":
    raise SystemExit(main())
