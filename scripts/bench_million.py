"""Time and memory of whole `generate()` calls on very long prompts at the shapes of Qwen3-4B, as JSON.

    python scripts/bench_million.py --run 1048576,fp8_e4m3 --output benchmarks/bench_million.json
    python scripts/bench_million.py --run 262144,auto,24 --output OUT.json    # under a budget of 24 GiB of the GPU
    python scripts/bench_million.py --tiny --output OUT.json                  # the whole flow at toy sizes, on a CPU

Random weights, batch 1, bfloat16. `HOW` says how each figure comes about and goes into the file, which is written
after each run; a run that fails leaves its error's text.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_inference as bench  # first: it says whether Triton is interpreted  # isort: skip
import torch
from transformers import LogitsProcessor, LogitsProcessorList, Qwen3ForCausalLM
from transformers.utils import logging

from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

STEPS = 24
HOW = {
    "run": "model.generate(ids, cache_config={dtype, gpu_budget}), greedy, all new tokens taken, after one layer has "
    "done the same, untimed, which compiles all kernels. prefill_seconds: to the first token's logits. "
    "decode_ms: the other tokens, per token. peak_gib: of allocated GPU memory, weights included. estimate: what "
    "RecSACache.estimate says.",
    "budget": "A run with a budget also caps what the process may allocate of the GPU at it, so that a run that "
    "completes stayed within it.",
    "step": "Bare steps (single-token forwards) behind the run's own cache, and behind the same cache cropped to half "
    "its length: wall clock, median over blocks between synchronisations.",
    "dense": "cuDNN attention in the same chunks, on a few layers at sampled positions over random keys and values, "
    "interpolated, summed and scaled to all layers (scripts/bench_inference.py, dense-prefill).",
}


class FirstToken(LogitsProcessor):
    """Notes when the first logits are there."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids, scores):
        if not self.at:
            bench.synchronize()
            self.at = time.perf_counter()
        return scores


def one_run(run: SimpleNamespace, model: Any, tokens: int, dtype: str, budget: float | None) -> dict[str, Any]:
    """A prompt of random ids through `generate`, then bare steps."""
    gpu, new = run.device.type == "cuda", run.options.new_tokens
    weights = sum(p.nbytes for p in model.parameters())
    total = torch.cuda.get_device_properties(run.device).total_memory if gpu else 0
    memory = RecSACache.estimate(model.config, tokens + new, 1, run.dtype, dtype, budget, weights, total)
    result: dict[str, Any] = {"tokens": tokens, "new_tokens": new, "cache_dtype": dtype, "gpu_budget_gib": budget}
    result["estimate"] = {name: round(value / bench.GIB, 3) for name, value in vars(memory).items() if "bytes" in name}
    print(memory, flush=True)
    ids, options = bench.random_ids(run, tokens), {"dtype": dtype, "gpu_budget": budget}
    generate = partial(model.generate, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    with bench.using_layers(model, 1):
        began = time.perf_counter()
        generate(ids, max_new_tokens=4, cache_config={"dtype": dtype})
        result["warm_up_seconds"] = round(time.perf_counter() - began, 2)
    bench.free()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min((budget or 1e9) * bench.GIB / total, 1.0))
    first = FirstToken()
    bench.synchronize()
    began = time.perf_counter()
    out = generate(ids, max_new_tokens=new, logits_processor=LogitsProcessorList([first]), cache_config=options)
    bench.synchronize()
    ended = time.perf_counter()
    cache = getattr(out, CACHE_FIELD)
    assert out.sequences.shape[1] == tokens + new and cache.get_seq_length() == tokens + new - 1
    prefill = first.at - began
    levels = [level for layer in cache.layers for level in layer.levels]
    result |= {
        "backend": model.last_backend,
        "seconds": round(ended - began, 3),
        "prefill_seconds": round(prefill, 3),
        "prefill_tokens_per_second": round(tokens / prefill),
        "decode_ms": round((ended - first.at) / (new - 1) * 1e3, 3),
        "decode_tokens_per_second": round((new - 1) / (ended - first.at), 1),
        "weights_gib": round(weights / bench.GIB, 3),
        "cache_gib": round(sum(level.nbytes for level in levels) / bench.GIB, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / bench.GIB, 3) if gpu else None,
        "step_ms": {},
    }
    del out
    for length in (tokens + new - 1, tokens // 2):
        bench.crop(cache, length)
        step = partial(model, bench.random_ids(run, 1), logits_to_keep=1, **{CACHE_FIELD: cache})
        result["step_ms"][str(length)] = bench.time_steps(step, STEPS)["wall_ms"]
    return result


def dense(run: SimpleNamespace, longest: int) -> dict[str, Any]:
    """Seconds of a dense prefill of half the longest prompt and of all of it, scaled from a few layers."""
    options = run.options
    lengths = [length // options.chunk * options.chunk for length in (longest // 2, longest)]
    few = SimpleNamespace(chunk=options.chunk, lengths=lengths, dense_layers=options.dense_layers, dense_whole=0)
    stock = bench.make_model(Qwen3ForCausalLM, run)
    result: dict[str, Any] = {}
    named = {"cudnn": bench.BACKENDS["cudnn"]} if run.device.type == "cuda" else {"flash": bench.BACKENDS["flash"]}
    before, bench.BACKENDS = bench.BACKENDS, named
    try:
        bench.dense_prefill(SimpleNamespace(**{**vars(run), "options": few, "model": stock}), result)
    finally:
        bench.BACKENDS = before
    return result


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def described(text: str) -> tuple[int, str, float | None]:
        tokens, dtype, *budget = text.split(",")
        return int(tokens), dtype, float(budget[0]) if budget else None

    def geometry(text: str) -> tuple[int, int, int]:
        r, k, m = map(int, text.split(","))
        return r, k, m

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=described, action="append", metavar="TOKENS,CACHE_DTYPE[,GIB]", default=None)
    parser.add_argument("--geometry", type=geometry, action="append", default=None, metavar="r,k,M")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens per prefill chunk")
    parser.add_argument("--dense-layers", type=int, default=2, help="layers that dense is scaled from; 0: no dense")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/bench_million.json"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the flow")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.geometry, options.new_tokens, options.chunk, options.dense_layers = [(4, 3, 16)], 3, 17, 1
    options.geometry = options.geometry or [(16, 128, 8192)]
    options.run = options.run or ([(68, "fp8_e4m3", None)] if options.tiny else [(1 << 20, "fp8_e4m3", None)])
    return options


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    gpu = torch.cuda.is_available()
    run = SimpleNamespace(
        options=options,
        device=torch.device("cuda" if gpu else "cpu"),
        dtype=torch.bfloat16 if gpu else torch.float32,
        shape=bench.TINY_SHAPE if options.tiny else bench.SHAPE,
    )
    report = bench.provenance("scripts/bench_million.py", arguments, options.output, run)
    report |= {"chunk": options.chunk, "how": HOW, "runs": [], "dense": {}}
    logging.set_verbosity_error()

    def write() -> None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")

    for r, k, m in options.geometry:
        model = bench.make_model(
            RecSAQwen3ForCausalLM, run, recsa_branching=r, recsa_top_k=k, recsa_top_capacity=m,
            recsa_prefill_chunk=options.chunk, recsa_backend="triton",
        )  # fmt: skip
        for tokens, dtype, budget in options.run:
            result = {"geometry": {"r": r, "k": k, "M": m}, "tokens": tokens, "cache_dtype": dtype}
            try:
                result |= one_run(run, model, tokens, dtype, budget)
            except Exception as error:
                result |= {"gpu_budget_gib": budget, **bench.refusal(error)}
            report["runs"].append(result)
            bench.free()
            if gpu:
                torch.cuda.set_per_process_memory_fraction(1.0)
            print(json.dumps(result), flush=True)
            write()
        del model
        bench.free()
    if options.dense_layers:
        report["dense"] = dense(run, max(tokens for tokens, _, _ in options.run))
        print(json.dumps(report["dense"]), flush=True)
        write()
    return int(any("refused" in result for result in report["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
