"""Time and memory of training at the shapes of Qwen3-4B on one GPU, RecSA's kernels against dense attention, as JSON.

    python scripts/bench_training.py --output benchmarks/bench_training.json
    python scripts/bench_training.py --tiny --output OUT.json    # the whole flow at toy sizes, on a CPU too

Random weights, one sequence, bfloat16, one process, one GPU. `HOW` says how each figure comes about and goes into the
file, which is written after each section; a section that fails leaves its error's text there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_inference as bench  # first: it says whether Triton is interpreted  # isort: skip
import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from recsa_qwen3 import RecSAPooler, RecSAQwen3ForCausalLM, TreeGeometry, build_levels, recsa_attention
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables

HOW = {
    "attention": "Forward and backward of one layer's attention alone from random queries, keys and values, the tree "
    "and its pooler included; median of `repeats` runs by CUDA events after one untimed. peak_gib: allocated beyond "
    "the operands. dense: causal SDPA by backend, keys and values of a group shared (enable_gqa). ratio: the time of "
    "dense over ours. kernels: CUDA time by kernel name under torch.profiler.",
    "step": "Forward with labels, backward and a step of torch.optim.AdamW (fused, states in bfloat16), gradient "
    "checkpointing (not reentrant) of every layer, logits of the whole sequence: wall clock between synchronisations, "
    "median of `repeats` after one untimed; peak_gib of allocated memory, weights included. dense: stock Qwen3 with "
    "the SDPA backend named.",
    "distillation": "The backbone frozen, poolers alone trained by the loss of `samples` queries a sequence; forward, "
    "backward and AdamW's step. dense_forward: stock Qwen3's forward without gradients, last logits alone.",
}
SIZES: dict[str, Any] = dict(length=32_768, layers=36, repeats=3, samples=256, geometry=[(16, 128, 8192)])
TINY_SIZES: dict[str, Any] = dict(length=41, layers=1, repeats=1, samples=4, geometry=[(4, 3, 16)])
SECTIONS = ("attention", "step", "distillation")
BACKENDS = ("flash", "cudnn")


def measured(body: Callable[[], Any], repeats: int, clock: str) -> dict[str, Any]:
    """Milliseconds by events, or seconds by the wall clock, and the peak of memory beyond what was there before."""
    body()
    bench.free()
    gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    if clock == "events":
        row = {"ms": round(bench.median_ms(body, repeats), 3)}
    else:
        row = {"seconds": round(statistics.median(bench.wall_seconds(body) for _ in range(repeats)), 4)}
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    return row | {"peak_gib": round((peak - before) / bench.GIB, 3), "peak_in_all_gib": round(peak / bench.GIB, 3)}


def compared(row: dict[str, Any], dense: dict[str, Any], time_of: str, peak_of: str) -> dict[str, Any]:
    """By dense backend: its time over ours, and our memory over its."""
    return {
        "ratio": {name: round(other[time_of] / row[time_of], 3) for name, other in dense.items()},
        "memory_ratio": {name: round(row[peak_of] / (other[peak_of] or 1.0), 3) for name, other in dense.items()},
    }


# ---- attention alone ------------------------------------------------------------------------------------------------


def attention(run: SimpleNamespace, result: dict[str, Any]) -> None:
    shape, length = run.shape, run.options.length
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape["head_dim"]

    def leaf(number: int) -> torch.Tensor:
        states = torch.randn(1, number, length, head_dim, device=run.device, dtype=run.dtype)
        return states.requires_grad_()

    query, key, value = leaf(heads), leaf(kv_heads), leaf(kv_heads)
    upstream = torch.randn_like(query)
    result["dense"] = {}

    def dense() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.grad(output, (query, key, value), upstream)

    for name in BACKENDS if run.device.type == "cuda" else ("flash",):
        with sdpa_kernel(bench.BACKENDS[name]):
            result["dense"][name] = measured(dense, run.options.repeats, "events")
    result["recsa"] = []
    for r, k, m in run.options.geometry:
        geometry = TreeGeometry(r, k, 1, m)
        pooler = RecSAPooler(kv_heads, r, head_dim).to(run.device, run.dtype)
        rope = rotary_tables(RecSAQwen3ForCausalLM.config_class(**shape), run.device, m)

        def sparse(geometry=geometry, pooler=pooler, rope=rope) -> None:
            levels = build_levels(key, value, pooler, geometry.branching, geometry.depth(length - 1))
            output = recsa_attention(query, levels, (0,), (length,), geometry, rope, backend="triton").output
            torch.autograd.grad(output, (query, key, value, *pooler.parameters()), upstream)

        row = {"r": r, "k": k, "M": m} | measured(sparse, run.options.repeats, "events")
        row |= compared(row, result["dense"], "ms", "peak_gib")
        row["kernels"] = bench.kernel_times(sparse)
        result["recsa"].append(row)


# ---- whole steps ----------------------------------------------------------------------------------------------------


def training_step(run: SimpleNamespace, kind: Any, **fields: Any) -> dict[str, Any]:
    model = bench.make_model(kind, run, **fields).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=run.device.type == "cuda")

    def body() -> None:
        ids = bench.random_ids(run, run.options.length)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row = measured(body, run.options.repeats, "wall")
    return row | {"backend": getattr(model, "last_backend", None)}


def step(run: SimpleNamespace, result: dict[str, Any]) -> None:
    result["dense"], result["recsa"] = {}, []
    for name in BACKENDS if run.device.type == "cuda" else ("flash",):
        with sdpa_kernel(bench.BACKENDS[name]):
            result["dense"][name] = training_step(run, Qwen3ForCausalLM)
        bench.free()
    for r, k, m in run.options.geometry:
        fields = dict(recsa_branching=r, recsa_top_k=k, recsa_top_capacity=m, recsa_backend="triton")
        row = {"r": r, "k": k, "M": m} | training_step(run, RecSAQwen3ForCausalLM, **fields)
        result["recsa"].append(row | compared(row, result["dense"], "seconds", "peak_in_all_gib"))
        bench.free()


def distillation(run: SimpleNamespace, result: dict[str, Any]) -> None:
    result["samples"], result["dense_forward"], result["recsa"] = run.options.samples, {}, []
    model = bench.make_model(Qwen3ForCausalLM, run)
    for name in BACKENDS if run.device.type == "cuda" else ("flash",):
        with sdpa_kernel(bench.BACKENDS[name]), torch.no_grad():
            forward = partial(model, bench.random_ids(run, run.options.length), use_cache=False, logits_to_keep=1)
            result["dense_forward"][name] = measured(forward, run.options.repeats, "wall")
    del model, forward
    bench.free()
    for r, k, m in run.options.geometry:
        model = bench.make_model(
            RecSAQwen3ForCausalLM, run, recsa_branching=r, recsa_top_k=k, recsa_top_capacity=m, recsa_backend="triton",
            recsa_distill_weight=1.0, recsa_distill_queries="uniform", recsa_distill_samples=run.options.samples,
        ).train()  # fmt: skip
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("pooler" in name)
        poolers = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(poolers, lr=1e-3)

        def body(model=model, optimizer=optimizer) -> None:
            model(bench.random_ids(run, run.options.length), use_cache=False, logits_to_keep=1).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        row = {"r": r, "k": k, "M": m} | measured(body, run.options.repeats, "wall")
        row["over_dense_forward"] = {
            name: round(row["seconds"] / other["seconds"], 3) for name, other in result["dense_forward"].items()
        }
        result["recsa"].append(row)
        del model, poolers, optimizer, body
        bench.free()


# ---- the script -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def geometry(text: str) -> tuple[int, int, int]:
        r, k, m = map(int, text.split(","))
        return r, k, m

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, help="tokens of the sequence")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--repeats", type=int, help="timed runs")
    parser.add_argument("--samples", type=int, help="queries of a sequence that the distillation loss is taken at")
    parser.add_argument("--geometry", type=geometry, action="append", metavar="r,k,M", help="RecSA's, repeatable")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/bench_training.json"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the flow")
    options = parser.parse_args(arguments)
    for name, value in (TINY_SIZES if options.tiny else SIZES).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments: list[str] | None = None) -> int:
    options, gpu = parse_arguments(arguments), torch.cuda.is_available()
    run = SimpleNamespace(
        options=options,
        device=torch.device("cuda" if gpu else "cpu"),
        dtype=torch.bfloat16 if gpu else torch.float32,  # Triton's interpreter cannot multiply bfloat16
        shape=(bench.TINY_SHAPE if options.tiny else bench.SHAPE) | {"num_hidden_layers": options.layers},
    )
    sizes = {name: getattr(options, name) for name in SIZES}
    report = bench.provenance("scripts/bench_training.py", arguments, options.output, run)
    report |= {"sizes": sizes, "how": HOW}
    logging.set_verbosity_error()
    failed = 0
    for name in options.sections:
        began = time.perf_counter()
        result: dict[str, Any] = {}
        report[name] = result
        try:
            {"attention": attention, "step": step, "distillation": distillation}[name](run, result)
        except Exception as error:
            failed = 1
            result |= bench.refusal(error)
        result["took_seconds"] = round(time.perf_counter() - began, 1)
        bench.free()
        print(name, json.dumps(result), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
