"""What float8 storage of keys and values costs in accuracy, on the small trained checkpoint, as JSON.

    python scripts/bench_float8.py --output benchmarks/float8_cache.json

Per length and task: exact answers with tokens stored in the model's dtype and in float8, on the same prompts, and the
relative RMS error of the logits of the last prompt token. For the choice of the scales: relative RMS errors of the
model's own keys and values under each granularity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_inference as bench  # first: it says whether Triton is interpreted  # isort: skip
import torch
from torch.nn import functional as F
from transformers.utils import logging

import generate
import needle_text
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM
from recsa_qwen3.float8_recsa_qwen3 import CODES, LARGEST, pack, unpack
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

DTYPES = ("auto", "fp8_e4m3")


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def rounded(states: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (states / scale).clamp(-LARGEST, LARGEST).to(CODES).float() * scale


# of states [B, H_kv, N, D]
GRANULARITIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no scale": lambda states: rounded(states, 1.0),
    "a scale per layer": lambda states: rounded(states, states.abs().amax() / LARGEST),
    "a scale per head": lambda states: rounded(states, states.abs().amax((0, 2, 3), keepdim=True) / LARGEST),
    "a scale per channel": lambda states: rounded(states, states.abs().amax(2, keepdim=True) / LARGEST),
    "a float32 scale per vector": lambda states: rounded(states, states.abs().amax(-1, keepdim=True) / LARGEST),
    "a power of two per vector": lambda states: unpack(*pack(states), torch.float32),
}


def errors_of_scales(model: Any, ids: torch.Tensor) -> dict[str, dict[str, float]]:
    """Granularity -> error of all layers' keys and values."""
    cache = RecSACache(model.config, dtype="auto")
    model(ids, logits_to_keep=1, **{CACHE_FIELD: cache})
    found: dict[str, dict[str, float]] = {}
    for name, store in GRANULARITIES.items():
        found[name] = {}
        for which in ("keys", "values"):
            states = [getattr(layer, which).float() for layer in cache.layers]
            read = torch.cat([store(one).flatten() for one in states])
            found[name][which] = round(relative_rms(read, torch.cat([one.flatten() for one in states])), 5)
    return found


def answers(model: Any, prompts: torch.Tensor, new: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that follow each prompt, and the logits of its last token."""
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False,
        cache_config={"dtype": dtype}, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    made = out.sequences[:, prompts.shape[1] :]
    return F.pad(made, (0, new - made.shape[1]), value=needle_text.PAD), out.logits[0]


def accuracy(model: Any, length: int, task: str, options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"length": length, "task": task, "prompts": options.prompts}
    exact = dict.fromkeys(DTYPES, 0)
    logits: dict[str, list[torch.Tensor]] = {dtype: [] for dtype in DTYPES}
    same, batch = 0, max(min(options.prompts, options.tokens // length), 1)
    for done in range(0, options.prompts, batch):
        number = min(batch, options.prompts - done)
        prompts, wanted = (t.to(model.device) for t in needle_text.make_batch(number, length, task, 2_000_000 + done))
        made = {}
        for dtype in DTYPES:
            made[dtype], last = answers(model, prompts, wanted.shape[1], dtype)
            logits[dtype].append(last.float().cpu())
            exact[dtype] += int((made[dtype] == wanted).all(1).sum())
        same += int((made[DTYPES[0]] == made[DTYPES[1]]).all(1).sum())
    row |= {f"exact_{dtype}": exact[dtype] for dtype in DTYPES} | {"same_answers": same}
    joined = [torch.cat(logits[dtype]) for dtype in DTYPES]
    return row | {"logits_relative_rms": round(relative_rms(joined[1], joined[0]), 5), "backend": model.last_backend}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 16_384])
    parser.add_argument("--prompts", type=int, default=256, help="of each length and task")
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of one batch")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/float8_cache.json"))
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = torch.bfloat16 if gpu else torch.float32
    model = RecSAQwen3ForCausalLM.from_pretrained(generate.default_model(), dtype=dtype)
    model = model.to("cuda" if gpu else "cpu").eval()
    fields = {name: value for name, value in vars(model.config).items() if name.startswith("recsa_")}
    run = SimpleNamespace(dtype=dtype, shape={"checkpoint": "models/small-recsa", **fields})
    report = bench.provenance("scripts/bench_float8.py", arguments, options.output, run)
    prompts, _ = needle_text.make_batch(4, 2048, "needle", 1)
    report |= {"scales": errors_of_scales(model, prompts.to(model.device)), "accuracy": []}
    print(json.dumps(report["scales"], indent=1), flush=True)
    for length in options.lengths:
        for task in needle_text.TASKS:
            report["accuracy"].append(accuracy(model, length, task, options))
            print(json.dumps(report["accuracy"][-1]), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
