"""The whole recipe at small scale: train a dense model, distil, fine-tune, and compare with dense baselines.

    python scripts/reproduce_small.py --output reproduced            # again until it says that all is done
    python scripts/reproduce_small.py --output tried --tiny --cpu    # the flow at toy size

Each seed has a dense model of its own (2,048 tokens), from which come: `distilled-short`, poolers alone at nothing but
the training length [paper]; `distilled`, the same with rows of 16 times that under a YaRN teacher [our decision];
`tuned`, all parameters at the training length and poolers once more. They answer the questions of `needle_text.py`
beside the dense model plainly, with YaRN and with Dual Chunk Attention. A run ends before --minutes are over; the same
command goes on. Figures go to OUTPUT/reproduce_small.json after each cell.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import evaluate_needles  # first: it says whether Triton is interpreted  # isort: skip
import torch
from transformers.utils import logging

import needle_text
from evaluate_needles import AGAIN, Cell

SCRIPTS = Path(__file__).resolve().parent
# Seconds that training the dense model takes, which cannot be resumed.
TRAINING_SECONDS = 300


class Size(NamedTuple):
    """What a size trains and asks. `prompts` by length; dense methods stop where it would take long: `longest`."""

    preset: str
    train_options: list[str]
    geometry: list[str]
    length: int
    long_rows: str
    steps: dict[str, int]
    batch: int
    prompts: dict[int, int]
    longest: dict[str, int]


SIZES = {
    "small": Size(
        "small",
        ["--seconds", "200"],
        ["--branching", "8", "--top-k", "16", "--top-capacity", "128"],
        2048,
        "32768:0.5",
        {"distill": 400, "finetune": 200, "closing": 200},
        8,
        {
            2048: 200, 4096: 200, 8192: 200, 16_384: 200, 32_768: 200, 65_536: 200, 131_072: 48, 524_288: 12,
            1_048_576: 6,
        },
        {"dense": 16_384, "dca": 131_072, "yarn": 1_048_576},
    ),
    "tiny": Size(
        "tiny",
        ["--steps-scale", "0.02"],
        ["--branching", "4", "--top-k", "4", "--top-capacity", "16"],
        128,
        "256:0.5",
        {"distill": 3, "finetune": 2, "closing": 2},
        2,
        {224: 2, 512: 2},
        {"dense": 224, "dca": 512, "yarn": 512},
    ),
}  # fmt: skip
MODELS = ("distilled-short", "distilled", "tuned")  # that RecSA is asked with


def stages(folder: Path, size: Size, seed: int, cpu: bool) -> list[tuple[Path, list[str]]]:
    """What makes each folder of a seed, as a command's arguments, in order; a folder is whole with its config.json."""
    on_cpu = ["--cpu"] if cpu else []
    data = ["--data", "needle_text", "--length", str(size.length), "--samples", "192", "--seed", str(seed)]
    data += ["--data-seed", str(seed), "--save-every", "20", "--resume", *on_cpu]
    rows = ["--rows", str(size.batch), "--batch-size", str(size.batch)]
    distil = ["distill.py", "--model", str(folder / "recsa"), *data, *rows, "--steps", str(size.steps["distill"])]
    long = ["--long-rows", size.long_rows]
    return [
        (
            folder / "dense",
            ["train_small.py", "--preset", size.preset, "--seed", str(seed), *size.train_options]
            + ["--report", str(folder / "train_small.json"), *(["--device", "cpu"] if cpu else [])],
        ),
        (folder / "recsa", ["convert_qwen3.py", "--source", str(folder / "dense"), *size.geometry]),
        (folder / "distilled-short", distil),
        (folder / "distilled", [*distil, *long]),
        (
            folder / "tuned",
            ["finetune.py", "--model", str(folder / "distilled"), *data, *long]
            + ["--rows", str(2 * size.batch), "--batch-size", str(size.batch), "--lr", "3e-4", "--no-checkpointing"]
            + ["--labels", "answers", "--steps", str(size.steps["finetune"])]
            + ["--closing-steps", str(size.steps["closing"])],
        ),
    ]


def cells_of(folder: Path, size: Size) -> list[Cell]:
    """All that is asked of a seed's models, the shorter lengths first."""
    cells = []
    for length, prompts in size.prompts.items():
        methods = [(model, "recsa") for model in MODELS]
        methods += [("dense", method) for method, longest in size.longest.items() if length <= longest]
        for model, method in methods:
            cells += [
                Cell(str(folder / model), method, task, length, prompts)
                for task in needle_text.TASKS
                if length >= needle_text.minimum_length(task)
            ]
    return cells


def run_stage(target: Path, command: list[str], seconds: float) -> bool:
    """Runs a stage for at most `seconds`; False where they did not suffice. The next run goes on from its checkpoint.

    Raises:
        SystemExit: the stage failed; its own message has been printed.
    """
    print(" ".join([command[0], "->", target.name]), flush=True)
    full = [sys.executable, str(SCRIPTS / command[0]), *command[1:], "--output", str(target)]
    try:
        done = subprocess.run(full, timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return False
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with status {done.returncode}")
    return True


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for models and figures")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=8.0, help="of one run, at most")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the flow")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes}: must be above 0")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    until = time.monotonic() + 60 * options.minutes
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    size = SIZES["tiny" if options.tiny else "small"]
    output = options.output / "reproduce_small.json"
    report = evaluate_needles.open_report(arguments, "scripts/reproduce_small.py", output, device)
    report["size"] = size._asdict()
    for seed in options.seeds:
        folder = options.output / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for target, command in stages(folder, size, seed, options.cpu):
            if (target / "config.json").exists():
                continue
            left = until - time.monotonic()
            too_late = target.name == "dense" and left < min(TRAINING_SECONDS, 60 * options.minutes - 60)
            if too_late or not run_stage(target, command, left):
                return again(target.name)
        rows: list[dict[str, Any]] = report.setdefault("seeds", {}).setdefault(str(seed), [])
        write = partial(evaluate_needles.write_report, report, output)
        dtype = evaluate_needles.dtype_on(device)
        if not evaluate_needles.fill(cells_of(folder, size), rows, write, until, dtype, device):
            return again("figures")
    print(f"all is done: {output}")
    return 0


def again(where: str) -> int:
    print(f"time is over in {where}: run the same command again", flush=True)
    return AGAIN


if __name__ == "__main__":
    raise SystemExit(main())
