"""RULER's 13 tasks on a Qwen3 or RecSA-Qwen3 checkpoint at any lengths, as JSON; a release gate with --against.

    python scripts/evaluate_ruler.py --model DIR_OR_HUB_ID --method recsa --lengths 4096 8192 --samples 100 \\
        --essays essays.txt --squad rajpurkar/squad_v2 --hotpotqa hotpotqa/hotpot_qa:distractor --output OUT.json

    # the gate: exit status 1 if any task of retrieval or question answering is more than 5 points under dense
    python scripts/evaluate_ruler.py --model DIR_OR_HUB_ID --lengths 8192 32768 131072 --samples 10 \\
        --haystack sentences --against dense --margin 5 --output OUT.json

Tasks that need a text that is not given are named and left out. Lengths count all tokens: chat template, answer prefix
and tokens to generate. Decoding is greedy, thinking is off. The file is written after each cell (method, task,
length), and the same command goes on with the cells that are missing. `HOW` goes into the file.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_inference as bench  # first: it says whether Triton is interpreted  # isort: skip
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from baselines import METHODS, checkpoint_digest, load_baseline
from ruler import HAYSTACKS, TASKS, Sample, Texts, make_sample, missing_text, score, wilson_interval

HOW = {
    "score": "Percent. Share of the references that are part of the answer, case ignored; for qa: whether any is. "
    "Mean over the samples.",
    "interval": "Wilson, 95 %.",
    "tokens": "Fewest and most tokens of a prompt; with the tokens to generate at most the length.",
    "cut_off": "Answers that used all tokens to generate without an end of text.",
    "prompts": "SHA-256 of the ids of all prompts: equal between methods.",
    "words": "Keys and listed words are this repository's, not RULER's; scripts/ruler/tasks.py names the differences.",
}


def check_sample(model: Any, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> None:
    """Refuses the tokenizer of another model, or of another world. A length is no reason: methods are there to be
    taken beyond theirs."""
    unknown = tokenizer.unk_token_id
    for reference in sample.references:
        if unknown is not None and unknown in tokenizer(reference, add_special_tokens=False).input_ids:
            raise SystemExit(
                f"--model: the tokenizer cannot write the answer {reference!r} of task {sample.task} (it becomes "
                f"{tokenizer.unk_token!r}); RULER needs a tokenizer of English text and numbers"
            )
    if int(sample.ids.max()) >= model.config.vocab_size:
        raise SystemExit(
            f"--model: the tokenizer's id {int(sample.ids.max())} is not below the model's vocab_size "
            f"{model.config.vocab_size}; the tokenizer belongs to another model"
        )


def ends(model: Any) -> list[int]:
    """The ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


@torch.no_grad()
def one_cell(
    model: Any, tokenizer: PreTrainedTokenizerBase, task: str, length: int, options: argparse.Namespace, texts: Texts
) -> dict[str, Any]:
    """All samples of a task at a length."""
    scores, tokens, cut_off = [], [], 0
    first: dict[str, Any] = {}
    prompts, began = hashlib.sha256(), time.perf_counter()
    for number in range(options.samples):
        sample = make_sample(task, tokenizer, length, f"{options.seed}/{number}", texts, options.chat)
        check_sample(model, tokenizer, sample)
        prompts.update(sample.ids.numpy().tobytes())
        ids = sample.ids[None].to(model.device)
        try:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sample.new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            )
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise SystemExit(f"--lengths {length}: task {task} does not fit into memory: {error}") from error
        made = out[0, ids.shape[1] :].tolist()
        cut_off += len(made) == sample.new_tokens and made[-1] not in ends(model)
        answer = tokenizer.decode(made, skip_special_tokens=True)
        scores.append(score(answer, sample.references, TASKS[task].any_of))
        tokens.append(len(sample.ids))
        first = first or {"answer": answer, "references": sample.references}
    mean = sum(scores) / len(scores)
    return {
        "samples": len(scores),
        "score": round(100 * mean, 2),
        "interval": [round(100 * bound, 2) for bound in wilson_interval(mean, len(scores))],
        "tokens": [min(tokens), max(tokens)],
        "new_tokens": TASKS[task].new_tokens,
        "cut_off": cut_off,
        "prompts": prompts.hexdigest()[:16],
        "backend": getattr(model, "last_backend", None),
        "seconds": round(time.perf_counter() - began, 2),
        "first": first,
    }


def gate(cells: list[dict[str, Any]], method: str, against: str, margin: float) -> tuple[list[str], int]:
    """What is more than `margin` points under `against`, in words, and how many cells were judged.

    Tasks of several hops and counts are apart: printed, never judged. A cell in which `against` scores nothing is not
    counted.
    """
    found = {(cell["method"], cell["task"], cell["length"]): cell for cell in cells}
    failures, judged = [], 0
    print(f"{method} against {against}, in points:")
    for (name, task, length), cell in found.items():
        other = found.get((against, task, length))
        if name != method or other is None:
            continue
        if cell["prompts"] != other["prompts"]:
            raise SystemExit(f"--output: {task} at {length:,} has other prompts for {against}; choose another file")
        difference = cell["score"] - other["score"]
        line = f"{task} at {length:,}: {cell['score']:.1f} - {other['score']:.1f} = {difference:+.1f}"
        if TASKS[task].counting:
            print(f"  {line} (several hops or counts: not judged)")
            continue
        judged += other["score"] > 0  # where both know nothing, nothing is shown
        print(f"  {line}")
        if difference < -margin:
            failures.append(line)
    return failures, judged


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of a RecSA-Qwen3 or Qwen3 checkpoint")
    parser.add_argument("--method", choices=METHODS, default="recsa", help="attention to evaluate")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], metavar="TOKENS")
    parser.add_argument("--samples", type=int, default=100, help="of each task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; what it holds already is not repeated")
    parser.add_argument(
        "--haystack", choices=HAYSTACKS, default="essays", help="of the five tasks that RULER hides in essays"
    )
    parser.add_argument("--essays", metavar="SOURCE", help="file, folder, or dataset name[:config][:split]")
    parser.add_argument("--squad", metavar="SOURCE", help="SQuAD's JSON, JSONL, or dataset, for qa_1")
    parser.add_argument("--hotpotqa", metavar="SOURCE", help="HotpotQA's JSON, JSONL, or dataset, for qa_2")
    parser.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, help="use the chat template; if the tokenizer has one"
    )
    parser.add_argument("--against", choices=METHODS, help="a second method on the same prompts, and the gate")
    parser.add_argument("--margin", type=float, default=5.0, help="points that --method may be under --against")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if min(options.samples, *options.lengths) < 1 or options.margin < 0:
        parser.error("--samples and --lengths must be at least 1, --margin at least 0")
    if options.against == options.method:
        parser.error(f"--against {options.against}: is --method itself; choose another")
    if options.against and all(TASKS[task].counting for task in options.tasks):
        parser.error("--against: the gate judges none of these --tasks; add one of niah_* or qa_*")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device(options.device)
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = automatic if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        texts = Texts.read(options.haystack, options.essays, options.squad, options.hotpotqa)
        config, tokenizer = AutoConfig.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error) if str(error).startswith("--") else f"--model {options.model}: {error}") from error
    if options.chat is None:
        options.chat = bool(tokenizer.chat_template)
    if options.chat and not tokenizer.chat_template:
        raise SystemExit("--chat: the tokenizer has no chat template; use --no-chat")
    missing = {task: text for task in options.tasks if (text := missing_text(task, texts))}
    for task, text in missing.items():
        print(f"{task}: skipped, it {text}")
    tasks = [task for task in options.tasks if task not in missing]
    if not tasks:
        raise SystemExit("--tasks: none is left; give the texts that they need")

    settings = {
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        "checkpoint": checkpoint_digest(options.model),
        "recsa": {name: value for name, value in vars(config).items() if name.startswith("recsa_")},
        "seed": options.seed,
        "samples": options.samples,
        "chat": options.chat,
        "haystack": options.haystack,
        "texts": texts.digests,
        "dtype": str(dtype),
    }
    report = open_report(options.output, settings, arguments, dtype)
    report["skipped"] = missing
    cells = report["cells"]
    methods = [options.method, *([options.against] if options.against else [])]
    for length in options.lengths:
        for method in methods:
            done = {cell["task"] for cell in cells if (cell["method"], cell["length"]) == (method, length)}
            if done.issuperset(tasks):
                continue
            model = read_model(options, method, length, dtype, device)
            for task in (task for task in tasks if task not in done):
                cell: dict[str, Any] = {"method": method, "task": task, "length": length}
                try:
                    cell |= one_cell(model, tokenizer, task, length, options, texts)
                except ValueError as error:
                    raise SystemExit(f"--lengths {length}: {error}") from error
                cells.append(cell)
                write(options.output, report)
                print(describe(cell), flush=True)
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    write(options.output, report)
    chosen = [cell for cell in cells if cell["task"] in tasks and cell["length"] in options.lengths]
    print_means(chosen, methods)
    if not options.against:
        return 0
    failures, judged = gate(chosen, options.method, options.against, options.margin)
    for line in failures:
        print(f"FAILED {line}, margin {options.margin}")
    if not judged:
        print(f"FAILED: no task was left to judge; {options.against} answers none, or texts are missing")
    return int(bool(failures) or not judged)


def read_model(options: argparse.Namespace, method: str, length: int, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        return load_baseline(options.model, method, length, dtype=dtype, device=device)
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"--model {options.model}, method {method}: {error}") from error


def open_report(
    output: Path, settings: dict[str, Any], arguments: list[str] | None, dtype: torch.dtype
) -> dict[str, Any]:
    """The report in the file, if it holds one of the same settings, or a new one."""
    if output.exists():
        try:
            report = json.loads(output.read_text())
            known = report["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--output {output}: is no result of this script; choose another file") from error
        changed = [
            f"{name}: {known.get(name)} there, {value} now"
            for name, value in settings.items()
            if known.get(name) != value
        ]
        if changed:
            raise SystemExit(f"--output {output}: holds results of other settings ({'; '.join(changed)})")
        return report
    given = sys.argv[1:] if arguments is None else arguments
    given = [Path(text).name if os.path.exists(text) else text for text in given]  # no folder of this machine
    given = [Path(text).name if text == str(output) else text for text in given]
    run = SimpleNamespace(dtype=dtype, shape=settings["model"])
    report = bench.provenance("scripts/evaluate_ruler.py", given, output, run)
    return report | {"how": HOW, "settings": settings, "cells": []}


def write(output: Path, report: dict[str, Any]) -> None:
    """Whole or not at all, also where the process is stopped."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, output)


def describe(cell: dict[str, Any]) -> str:
    low, high = cell["interval"]
    fewest, most = cell["tokens"]
    return (
        f"{cell['method']} {cell['task']} at {cell['length']:,}: {cell['score']:.1f} % [{low:.1f}, {high:.1f}] of "
        f"{cell['samples']}; prompts of {fewest:,} to {most:,} tokens; {cell['cut_off']} answers cut off; "
        f"{cell['seconds']:.1f} s"
    )


def print_means(cells: list[dict[str, Any]], methods: list[str]) -> None:
    """The mean over tasks of each method and length, with their number."""
    for method in methods:
        for length in sorted({cell["length"] for cell in cells}):
            scores = [cell["score"] for cell in cells if (cell["method"], cell["length"]) == (method, length)]
            print(f"{method} at {length:,}: mean {sum(scores) / len(scores):.1f} % over {len(scores)} tasks")


if __name__ == "__main__":
    raise SystemExit(main())
