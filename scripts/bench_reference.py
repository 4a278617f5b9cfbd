"""Time and memory of the PyTorch reference path against length, on this machine's CPU, as JSON.

    python scripts/bench_reference.py --output benchmarks/bench_reference.json

A random 4-layer, 256-wide model (r = 16, k = 16, M = 256): prefill time per token and peak memory at several lengths,
each in a process of its own, and the time of one decode step on a cache filled with random keys and values (how the
cache was filled does not change what a step costs). Then the main job's command over a long text with the embedded
model, as a whole. The claim under test: cost per query grows with the logarithm of the length. This file never touches
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import generate
from recsa_qwen3 import (
    RecSACache,
    RecSAPooler,
    RecSAQwen3Config,
    RecSAQwen3ForCausalLM,
    TreeGeometry,
    build_levels,
    recsa_attention,
)
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables
from recsa_qwen3.rows_recsa_qwen3 import Rows

SHAPE: dict[str, Any] = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    recsa_branching=16,
    recsa_top_k=16,
    recsa_top_capacity=256,
)
FILL = 4096  # tokens appended at once while a cache is filled
HAYSTACK_TOP_K = 32  # a quarter of the library's k: what a CPU reads in minutes
WARM_UP = 10  # decode steps before the timed ones


def make_model() -> RecSAQwen3ForCausalLM:
    torch.manual_seed(0)
    return RecSAQwen3ForCausalLM(RecSAQwen3Config(**SHAPE)).eval()


def measure_prefill(length: int) -> dict[str, float]:
    """Seconds and peak memory of reading `length` tokens into a cache; memory above that of the loaded model."""
    model = make_model()
    ids = torch.randint(SHAPE["vocab_size"], (1, length))
    with torch.inference_mode():
        model(ids[:, :1024], cache=RecSACache(model.config), logits_to_keep=1)  # warm-up
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        model(ids, cache=RecSACache(model.config), logits_to_keep=1)
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "length": length,
        "seconds": round(seconds, 3),
        "ms_per_token": round(seconds / length * 1e3, 4),
        "peak_mib": round(peak / 1024, 1),
        "peak_above_start_mib": round((peak - before) / 1024, 1),
    }


def measure_haystack(length: int) -> dict[str, float]:
    """Seconds of `scripts/generate.py` on a haystack of `length` tokens with the embedded model: the whole command."""
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        generate.main(["--haystack", str(length), "--top-k", str(HAYSTACK_TOP_K), "--device", "cpu"])
    seconds = time.perf_counter() - began
    tokens = int(out.getvalue().split(" tokens;")[0].split()[-1].replace(",", ""))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "length": length,
        "tokens": tokens,
        "top_k": HAYSTACK_TOP_K,
        "seconds": round(seconds, 1),
        "peak_mib": round(peak / 1024, 1),
    }


def measure_blocks(exponent: int) -> dict[str, float]:
    """Milliseconds per query of the operator with temporaries of 2^exponent elements, at C = 512 and D = 64."""
    geometry = TreeGeometry(branching=16, top_k=32, recent=1, top_capacity=2048)
    kv_heads, head_dim, queries, tokens = 4, 64, 256, 4096
    keys, values = torch.randn(2, 1, kv_heads, tokens, head_dim).unbind(0)
    query = torch.randn(1, 2 * kv_heads, queries, head_dim)
    config = RecSAQwen3Config(head_dim=head_dim)
    rope = rotary_tables(config, query.device, geometry.top_capacity)
    with torch.inference_mode():
        levels = build_levels(keys, values, RecSAPooler(kv_heads, geometry.branching, head_dim), 16, 1)
        times = []
        for _ in range(WARM_UP):
            began = time.perf_counter()
            recsa_attention(query, levels, [tokens - queries], [queries], geometry, rope, block_elements=1 << exponent)
            times.append((time.perf_counter() - began) / queries * 1e3)
    return {"log2_elements": exponent, "median_ms": round(statistics.median(times[1:]), 4)}


def fill_cache(model: RecSAQwen3ForCausalLM, length: int, reserve: int) -> RecSACache:
    """A cache with random keys and values of `length` tokens and the nodes above them."""
    cache = RecSACache(model.config, reserve=reserve)
    kv_heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    for begin in range(0, length, FILL):
        number = min(FILL, length - begin)
        rows = Rows.whole(1, number, (begin,))
        layers: list[Any] = list(model.model.layers)
        for layer, cached in zip(layers, cache.layers, strict=True):
            keys, values = torch.randn(2, 1, kv_heads, number, head_dim).unbind(0)
            cached.append(keys, values, rows, number, layer.self_attn.pooler)
    return cache


def measure_decode(length: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one decode step on a cache of `length` tokens: median, smallest and largest."""
    model = make_model()
    times = []
    with torch.inference_mode():
        cache = fill_cache(model, length, reserve=length + repeats + WARM_UP)
        for step in range(repeats + WARM_UP):
            token = torch.randint(SHAPE["vocab_size"], (1, 1))
            began = time.perf_counter()
            model(token, cache=cache)
            if step >= WARM_UP:
                times.append((time.perf_counter() - began) * 1e3)
    return {
        "length": length,
        "steps": repeats,
        "median_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3),
        "max_ms": round(max(times), 3),
    }


def in_own_process(kind: str, length: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, str(length), "--threads", str(options.threads)]
    command += ["--repeats", str(options.repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} at {length} tokens failed:\n{done.stderr}")
    result = json.loads(done.stdout)
    print(kind, json.dumps(result), flush=True)
    return result


def processor() -> str:
    """The CPU's model name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/bench_reference.json"))
    parser.add_argument("--prefill", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--decode", type=int, nargs="+", default=[8192, 65536, 262144])
    parser.add_argument("--haystack", type=int, nargs="+", default=[131072])
    parser.add_argument("--repeats", type=int, default=100, help="decode steps timed")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 2))
    parser.add_argument("--one", nargs=2, metavar=("KIND", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        kind, number = options.one[0], int(options.one[1])
        measure = {"prefill": measure_prefill, "blocks": measure_blocks, "haystack": measure_haystack}.get(kind)
        print(json.dumps(measure(number) if measure else measure_decode(number, options.repeats)))
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "script": "scripts/bench_reference.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
        "threads": options.threads,
        "model": SHAPE,
        "prefill": [in_own_process("prefill", length, options) for length in options.prefill],
        "decode": [in_own_process("decode", length, options) for length in options.decode],
        "blocks": [in_own_process("blocks", exponent, options) for exponent in range(16, 23, 2)],
        "haystack": [in_own_process("haystack", length, options) for length in options.haystack],
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
