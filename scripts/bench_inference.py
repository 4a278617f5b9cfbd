"""Time of prefill and decode at the shapes of Qwen3-4B on one GPU, RecSA's kernels against dense attention, as JSON.

    python scripts/bench_inference.py --output benchmarks/bench_inference.json
    python scripts/bench_inference.py --tiny --output OUT.json    # the whole flow at toy sizes, on a CPU too

Random weights, batch 1, bfloat16, one process, one GPU. `HOW` says how each figure comes about and goes into the file;
a figure that was not measured whole is marked as scaled. A section that fails leaves its error's text in the file,
which is written after each section.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import shlex
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():  # must be known before Triton is imported, which transformers does, too
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
import triton
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recsa_qwen3 import (
    RecSACache,
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    TreeGeometry,
    build_levels,
    recsa_attention,
)
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
from recsa_qwen3.rows_recsa_qwen3 import Rows

SHAPE: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    lengths=[65_536, 131_072, 262_144, 524_288], short=2048, chunk=4096, dense_layers=4, dense_whole=131_072,
    kernel_lengths=[98_304, 400_000], steps=24, new_tokens=64, repeats=3, geometry=[(16, 128, 8192)],
)  # fmt: skip
TINY_SHAPE = SHAPE | dict(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32,
)  # fmt: skip
TINY_SIZES = dict(
    lengths=[34, 51], short=4, chunk=17, dense_layers=1, dense_whole=34, kernel_lengths=[40], steps=1, new_tokens=2,
    repeats=1, geometry=[(4, 3, 16)],
)  # fmt: skip
MEANING = dict(
    lengths="multiples of the chunk", short="a length below M, decode only", chunk="tokens per prefill chunk",
    dense_layers="layers on which dense prefill is sampled", kernel_lengths="where kernels are profiled",
    dense_whole="up to this length the fastest dense prefill runs whole", steps="decode steps timed",
    new_tokens="of generate()", repeats="timed runs of the operator and of generate()", geometry="RecSA's, repeatable",
)  # fmt: skip
SECTIONS = ("prefill", "decode", "kernels", "selections", "dense-prefill", "dense-decode")
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SPARE = 256  # room behind a length for the steps that are timed there
BLOCK = 8  # decode steps between two synchronisations, for the wall clock
NEIGHBOURS = 16  # queries whose choices are compared
WALK = 0.98  # correlation of a slow query, and of a slow key, with the next
LARGEST_ERROR = 0.02  # of a dense backend, relative RMS against float32
GIB = 1 << 30
HOW = {
    "prefill": "One prefill of the longest length through the model's forward, a chunk a call (logits_to_keep=1, "
    "cache reserved), a CUDA event after each chunk, no synchronisation between; a shorter length is the sum of its "
    "chunks. Before it one layer reads the whole length, untimed, which compiles all kernels. peak_above_gib: peak of "
    "allocated memory less what was allocated before and less the cache.",
    "decode": "That prefill's cache cropped to each length (source: random where it was filled with random keys and "
    "values instead), so its capacity is the longest length's; single-token forwards after those in which the model "
    f"captured its CUDA graph. wall_ms, which ratios use: median over blocks of {BLOCK} steps between "
    "synchronisations; event_ms: median between CUDA events. generate: greedy, median of `repeats` calls after one "
    "not counted, less what a call of one token takes.",
    "kernels": "One layer on a cache of random keys and values: CUDA time by kernel name under torch.profiler.",
    "selections": "recsa_attention alone, one layer, one chunk of queries at the end of each length, median. slow: "
    f"neighbouring queries, and keys, with a correlation of {WALK}. union_over_k: mean size of the union of what "
    f"{NEIGHBOURS} neighbours chose over k, by level.",
    "dense-prefill": "Stock Qwen3ForCausalLM in the same chunks, keys and values preallocated, no mask. flash: one "
    "call, causal from the lower right; others: past and own chunk apart, merged by log-sum-exp. scaled_seconds: "
    "chunks on dense_layers layers at sampled positions over random keys and values, interpolated, summed, scaled to "
    "all layers. seconds: the fastest backends whole, on all layers, after one layer has run the same chunks untimed.",
    "dense-decode": "A CUDA graph of one stock step over random keys and values of exactly that length, no mask, by "
    "SDPA backend: with enable_gqa, and folded (the heads of a group as rows of one matrix). Stock's norms run as "
    "they are. All layers where memory allows, else scaled from fewer and from none.",
}


# ---- clocks ---------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Clock:
    """Milliseconds between marks: CUDA events, which do not synchronise, or the wall clock on a CPU."""

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if torch.cuda.is_available():
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if torch.cuda.is_available():
            return [round(first.elapsed_time(second), 4) for first, second in pairs]
        return [round((second - first) * 1e3, 4) for first, second in pairs]


def median_ms(body: Callable[[], Any], repeats: int) -> float:
    """Median over `repeats` runs; the caller has run it before."""
    clock = Clock()
    for _ in range(repeats):
        body()
        clock.mark()
    return statistics.median(clock.gaps())


def wall_seconds(body: Callable[[], Any]) -> float:
    synchronize()
    began = time.perf_counter()
    body()
    synchronize()
    return time.perf_counter() - began


def repeat(body: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        body()


def time_steps(step: Callable[[], Any], steps: int, limit: float = 10.0) -> dict[str, Any]:
    """Milliseconds of a decode step by events and by the wall clock; fewer steps where they would pass `limit` s."""
    repeat(step, 3)  # a model captures its graph in the second
    steps = min(steps, max(int(limit / 2 / wall_seconds(step)), 3))
    clock, block = Clock(), min(BLOCK, steps)
    for _ in range(steps):
        step()
        clock.mark()
    gaps = clock.gaps()
    walls = [wall_seconds(partial(repeat, step, block)) / block * 1e3 for _ in range(steps // block)]
    row = {"wall_ms": round(statistics.median(walls), 4), "event_ms": round(statistics.median(gaps), 4)}
    return row | {"event_min_ms": min(gaps), "event_max_ms": max(gaps), "steps": steps}


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the body after so many seconds."""

    def expire(*_):
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- models and caches ----------------------------------------------------------------------------------------------


def make_model(kind: Any, run: SimpleNamespace, **fields: Any) -> Any:
    """A model with random weights, made on its device."""
    torch.manual_seed(0)
    with torch.device(run.device):
        return kind._from_config(kind.config_class(**run.shape, **fields), dtype=run.dtype).eval()


@contextmanager
def using_layers(model: Any, number: int) -> Iterator[None]:
    """The model runs its first layers only: both models stop at what the configuration says."""
    before, model.config.num_hidden_layers = model.config.num_hidden_layers, number
    try:
        yield
    finally:
        model.config.num_hidden_layers = before


def random_ids(run: SimpleNamespace, length: int) -> torch.Tensor:
    return torch.randint(run.shape["vocab_size"], (1, length), device=run.device)


def filled_cache(run: SimpleNamespace, length: int, spare: int = SPARE) -> RecSACache:
    """A cache with random keys and values of `length` tokens and the nodes above them, without a prefill."""
    config, step = run.model.config, 8 * run.options.chunk
    cache = RecSACache(config, reserve=length + spare)
    for begin in range(0, length, step):
        shape = (2, 1, config.num_key_value_heads, min(step, length - begin), config.head_dim)
        for layer, cached in zip(run.model.model.layers, cache.layers, strict=False):
            keys, values = torch.randn(shape, device=run.device, dtype=run.dtype).unbind(0)
            cached.append(keys, values, Rows.whole(1, shape[3], (begin,)), shape[3], layer.self_attn.pooler)
    return cache


def crop(cache: RecSACache, length: int) -> None:
    cache.crop(length - cache.get_seq_length())


def read_chunks(run: SimpleNamespace, forward: Callable[..., Any], length: int, until: float) -> list[float]:
    """Milliseconds of each chunk of a prefill, which stops once the script has run for `until` seconds."""
    ids, clock = random_ids(run, length), Clock()
    for chunk in ids.split(run.options.chunk, 1):
        forward(chunk)
        clock.mark()
        if time.perf_counter() - run.began > until:
            break
    return clock.gaps()


def seconds_at(chunk_ms: list[float], options: argparse.Namespace) -> dict[str, float]:
    """Length -> seconds, for the lengths that the chunks reach."""
    reached = [n for n in options.lengths if n <= options.chunk * len(chunk_ms)]
    return {str(n): round(sum(chunk_ms[: n // options.chunk]) / 1e3, 4) for n in reached}


# ---- RecSA ----------------------------------------------------------------------------------------------------------


def recsa_prefill(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """One prefill of the longest length; leaves its cache in `run.cache`."""
    longest, gpu = run.options.lengths[-1], torch.cuda.is_available()

    def read() -> tuple[RecSACache, list[float]]:
        cache = RecSACache(run.model.config, reserve=longest + SPARE)
        forward = partial(run.model, logits_to_keep=1, **{CACHE_FIELD: cache})
        return cache, read_chunks(run, forward, longest, 0.6 * run.options.limit)

    with using_layers(run.model, 1):
        result["warm_up_seconds"] = round(wall_seconds(read), 2)
    before = torch.cuda.memory_allocated() if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    run.cache, chunk_ms = read()
    levels = [level for layer in run.cache.layers for level in layer.levels]
    held = sum(tensor.nbytes for level in levels for tensor in level.tensors.values())
    result |= {
        "backend": run.model.last_backend,
        "seconds": seconds_at(chunk_ms, run.options),
        "chunk_ms": chunk_ms,
        "weights_gib": round(sum(p.nbytes for p in run.model.parameters()) / GIB, 3),
        "cache_gib": round(held / GIB, 3),
        "peak_above_gib": round((torch.cuda.max_memory_allocated() - before - held) / GIB, 3) if gpu else None,
    }


def recsa_decode(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """Steps and `generate` at each length, the longest first."""
    options, model = run.options, run.model
    result["at"] = []
    cache, run.cache = run.cache, None
    if cache is not None and cache.get_seq_length() < options.lengths[-1]:
        cache = None  # a prefill that was stopped early
    source = "random" if cache is None else "prefill"
    for length in [*reversed(options.lengths), options.short]:
        if length == options.short:
            cache, source = None, "random"  # a cache of its own, as a short prompt would have
        if cache is None:
            cache = filled_cache(run, length)
        crop(cache, length)
        inputs = {CACHE_FIELD: cache, "logits_to_keep": 1}
        row = {"length": length, "source": source, "capacity": cache.layers[0].levels[0].capacity}
        row |= time_steps(partial(model, random_ids(run, 1), **inputs), options.steps)
        row |= {"backend": model.last_backend, "graph": getattr(cache.step, "graph", None) is not None}
        history = random_ids(run, length + 1)
        inputs = {CACHE_FIELD: cache, "attention_mask": torch.ones_like(history), "pad_token_id": 0}
        took: dict[int, list[float]] = {1: [], options.new_tokens: []}
        for new in (*took, *took) + (*took,) * (options.repeats - 1):  # the first of each does not count
            crop(cache, length)
            generate = partial(model.generate, history, max_new_tokens=new, do_sample=False, **inputs)
            took[new].append(wall_seconds(generate))
        seconds = {new: statistics.median(times[1:]) for new, times in took.items()}
        per_token = (seconds[options.new_tokens] - seconds[1]) / (options.new_tokens - 1) * 1e3
        row["generate_seconds"] = {str(new): round(one, 4) for new, one in seconds.items()}
        row["generate_ms_per_token"] = round(per_token, 4)
        row["generate_over_step"] = round(per_token / row["wall_ms"], 3)
        result["at"].append(row)


def kernel_times(body: Callable[[], Any], top: int = 25) -> dict[str, Any]:
    """CUDA milliseconds and launches by kernel name."""
    if not torch.cuda.is_available():
        return {"wall_ms": round(wall_seconds(body) * 1e3, 3), "skipped": "no CUDA device to profile"}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        wall = wall_seconds(body)
    rows = [event for event in profiler.key_averages() if "CUDA" in str(event.device_type)]
    rows.sort(key=lambda event: -event.self_device_time_total)
    named = [(event.key[:100], round(event.self_device_time_total / 1e3, 4), event.count) for event in rows]
    return {
        "wall_ms": round(wall * 1e3, 3),
        "cuda_ms": round(sum(ms for _, ms, _ in named), 3),
        "kernels": [{"name": name, "ms": ms, "launches": count} for name, ms, count in named[:top]],
    }


def recsa_kernels(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """Where the time of two chunks and of eight decode steps goes, in one layer."""
    chunks, steps = min(2, run.options.repeats), min(8, run.options.steps)
    result |= {"layers": 1, "chunks": chunks, "steps": steps, "at": []}
    run.cache = None
    for length in run.options.kernel_lengths:
        result["at"].append(row := {"length": length})
        with using_layers(run.model, 1):
            cache = filled_cache(run, length, spare=2 * run.options.chunk + SPARE)
            for name, width, before, times in (("prefill", run.options.chunk, 1, chunks), ("decode", 1, 2, steps)):
                forward = partial(run.model, random_ids(run, width), logits_to_keep=1, **{CACHE_FIELD: cache})
                repeat(forward, before)  # compiles, and captures the step
                crop(cache, length)
                row[name] = kernel_times(partial(repeat, forward, times))
                crop(cache, length)


def slow_walk(*shape: int, device: Any = None) -> torch.Tensor:
    """Unit normal vectors `[..., n, D]`, neighbours along n with a correlation of WALK, float32."""
    states, span = torch.randn(shape, device=device), 1
    while span < shape[-2] and WALK**span > 1e-3:  # sums of 2, 4, 8, ... terms of the geometric series
        states[..., span:, :] = states[..., span:, :] + WALK**span * states[..., :-span, :]
        span *= 2
    return states * (1 - WALK**2) ** 0.5


def union_over_k(chosen: torch.Tensor, neighbours: int = NEIGHBOURS) -> float:
    """Mean number of different nodes that `neighbours` queries in a row chose `[1, H_kv, W, k]`, over k."""
    whole = chosen.shape[2] // neighbours * neighbours
    blocks = chosen[:, :, :whole].unflatten(2, (-1, neighbours)).flatten(3).sort(-1).values
    return round(float(((blocks.diff(dim=-1) != 0).sum(-1) + 1).float().mean()) / chosen.shape[-1], 3)


def recsa_selections(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """The operator on random queries and on those that choose like their neighbours."""
    config, width = run.model.config, run.options.chunk
    geometry, heads = TreeGeometry.from_config(config), config.num_key_value_heads
    pooler = RecSAPooler(heads, geometry.branching, config.head_dim).to(run.device, run.dtype)
    rope = rotary_tables(config, run.device, geometry.top_capacity)
    kinds: dict[str, Callable[..., torch.Tensor]] = {"random": torch.randn}
    if run.options.selections == "realistic":
        kinds["slow"] = slow_walk
    result |= {"width": width, "at": []}
    run.cache = None
    for length in run.options.lengths:
        for kind, draw in kinds.items():
            keys = draw(1, heads, length, config.head_dim, device=run.device).to(run.dtype)
            query = draw(1, config.num_attention_heads, width, config.head_dim, device=run.device).to(run.dtype)
            depth = geometry.depth(length - 1)
            levels = build_levels(keys, torch.randn_like(keys), pooler, geometry.branching, depth)
            where = ([length - width], [width], geometry, rope)
            attend = partial(recsa_attention, query, levels, *where, backend="triton")
            selection = attend(return_selection=True).selection or {}
            row = {"length": length, "queries": kind, "ms": median_ms(attend, run.options.repeats)}
            row["union_over_k"] = {str(level): union_over_k(chosen) for level, chosen in sorted(selection.items())}
            result["at"].append(row)


# ---- dense ----------------------------------------------------------------------------------------------------------


class FixedCache:
    """Random keys and values `[1, H_kv, length, D]` a layer, as stock Qwen3 calls a cache on every version.

    Attributes:
        start: where the next tokens are written; set by the caller.
    """

    def __init__(self, run: SimpleNamespace, layers: int, length: int):
        shape = (2, 1, run.shape["num_key_value_heads"], length, run.shape["head_dim"])
        self.start = 0
        self._buffers = [torch.randn(shape, device=run.device, dtype=run.dtype).unbind(0) for _ in range(layers)]

    def update(self, key, value, layer_idx, *args, **kwargs):
        end = self.start + key.shape[2]
        keys, values = self._buffers[layer_idx]
        keys[:, :, self.start : end] = key
        values[:, :, self.start : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start


def partial_attention(backend: str, query, key, value, causal: bool, scale: float):
    """Output and natural log-sum-exp `[B, H, W]` of the operator that `sdpa_kernel(backend)` would call."""
    ops, states = torch.ops.aten, (query, key, value)
    if query.device.type == "cpu":
        done = ops._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, causal, scale=scale)
    elif backend == "flash":
        done = ops._scaled_dot_product_flash_attention(*states, 0.0, causal, False, scale=scale)
    elif backend == "cudnn":
        done = ops._scaled_dot_product_cudnn_attention(*states, None, True, 0.0, causal, False, scale=scale)
    else:
        done = ops._scaled_dot_product_efficient_attention(*states, None, True, 0.0, causal, scale=scale)
    # efficient pads the queries of the log-sum-exp, cuDNN gives it a last dimension of 1
    return done[0], done[1][:, :, : query.shape[2]].reshape(done[0].shape[:3])


def attend_chunk(backend: str, module, query, key, value, attention_mask, scaling: float, **kwargs):
    """Causal attention of the last W tokens over all N, in the form of `ALL_ATTENTION_FUNCTIONS`.

    Query `[B, H, W, D]`, key and value `[B, H_kv, N, D]`; returns `[B, W, H, D]` and `None`.
    """
    batch, heads, width, head_dim = query.shape
    kv_heads, past = key.shape[1], key.shape[2] - width
    if backend == "flash" and query.device.type == "cuda":  # its causal is from the lower right, and it groups heads
        return partial_attention(backend, query, key, value, True, scaling)[0].transpose(1, 2), None
    own_key, own_value = (states[:, :, past:].repeat_interleave(heads // kv_heads, 1) for states in (key, value))
    output, own_lse = partial_attention(backend, query, own_key, own_value, True, scaling)
    if past:  # all of it is read, so the heads of a group can be rows of one matrix
        rows = query.reshape(batch, kv_heads, -1, head_dim)
        before, lse = partial_attention(backend, rows, key[:, :, :past], value[:, :, :past], False, scaling)
        share = torch.sigmoid(lse.reshape(batch, heads, width) - own_lse)[..., None].to(output.dtype)
        output = torch.lerp(output, before.reshape(batch, heads, width, head_dim), share)
    return output.transpose(1, 2), None


def attend_one(kind: SDPBackend | None, folded: bool, module, query, key, value, attention_mask, scaling, **kwargs):
    """One query that reads everything, `[B, H, 1, D]` to `[B, 1, H, D]`; folded: the heads of a group as rows."""
    batch, heads, _, head_dim = query.shape
    rows = query.reshape(batch, key.shape[1], -1, head_dim) if folded else query
    with sdpa_kernel(kind) if kind is not None else nullcontext():
        output = F.scaled_dot_product_attention(rows, key, value, scale=scaling, enable_gqa=not folded)
    return output.reshape(batch, 1, heads, head_dim), None


def use_attention(model: Any, attend: Callable[..., Any]) -> None:
    """Makes the stock model call `attend`; transformers makes no mask for a name that it does not know."""
    ALL_ATTENTION_FUNCTIONS.register("bench_inference", attend)
    model.set_attn_implementation("bench_inference")


def attention_error(attend: Callable[..., Any], run: SimpleNamespace, width: int, past: int) -> float:
    """Relative RMS error against masked attention in float32; refuses a backend that computes something else."""
    shapes = ((1, 8, width, 64), (1, 2, past + width, 64), (1, 2, past + width, 64))
    states = [torch.randn(shape, device=run.device).to(run.dtype) for shape in shapes]
    mask = torch.ones(width, past + width, dtype=torch.bool, device=run.device).tril(past)
    query, key, value = (state.float() for state in states)
    key, value = key.repeat_interleave(4, 1), value.repeat_interleave(4, 1)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3).transpose(1, 2)
    error = float((attend(None, *states, None, scaling=0.3)[0].float() - expected).norm() / expected.norm())
    if not error < LARGEST_ERROR:
        raise ArithmeticError(f"relative error {error:.3g} against float32")
    return round(error, 6)


def integrate(at: list[int], ms: list[float], length: int, chunk: int) -> float:
    """Seconds of all chunks up to `length`, interpolated between the times of those that begin at `at`."""
    total = 0.0
    for begin in range(0, length, chunk):
        i = min(max(sum(position < begin for position in at), 1), len(at) - 1)
        total += ms[i - 1] + (ms[i] - ms[i - 1]) * (begin - at[i - 1]) / (at[i] - at[i - 1])
    return total / 1e3


def scaled(ms: float, none_ms: float, layers: int, all_layers: int) -> float:
    """Time of all layers from that of a few; `none_ms` is what a run without layers takes."""
    return none_ms + (ms - none_ms) * all_layers / layers


def refusal(error: Exception) -> dict[str, str]:
    return {"refused": f"{type(error).__name__}: {error}"[:400]}


def dense_prefill(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """Every backend sampled on a few layers; the fastest whole on all of them."""
    options, stock, chunk, few = run.options, run.model, run.options.chunk, run.options.dense_layers
    longest, all_layers = options.lengths[-1], stock.config.num_hidden_layers
    at = sorted({0, longest * 3 // 4 // chunk * chunk, *(n - chunk for n in options.lengths)})

    def forward(cache: FixedCache, start: int, ids: torch.Tensor) -> None:
        cache.start = start
        position = torch.arange(start, start + ids.shape[1], device=run.device)[None]
        stock(ids, position_ids=position, logits_to_keep=1, use_cache=True, **{CACHE_FIELD: cache})

    def sample(start: int) -> float:
        forward(cache, start, ids)
        return median_ms(partial(forward, cache, start, ids), 2)

    rows = result["by_backend"] = {}
    result |= {"layers_sampled": few, "sampled_at": at}
    cache, ids = FixedCache(run, few, longest), random_ids(run, chunk)
    for backend in BACKENDS:
        attend = partial(attend_chunk, backend)
        try:
            error = max(attention_error(attend, run, 128, past) for past in (0, 200))
            use_attention(stock, attend)
            with using_layers(stock, 0):
                none_ms = sample(0)
            with using_layers(stock, few):
                ms = [sample(start) for start in at]
        except Exception as refused:
            rows[backend] = refusal(refused)
            continue
        every = [scaled(one, none_ms, few, all_layers) for one in ms]
        rows[backend] = {"error_to_float32": error, "sampled_ms": ms, "no_layers_ms": none_ms}
        rows[backend]["scaled_seconds"] = {str(n): round(integrate(at, every, n, chunk), 4) for n in options.lengths}
    del cache
    free()
    ran = {name: row["scaled_seconds"] for name, row in rows.items() if "scaled_seconds" in row}
    whole = max((n for n in options.lengths if n <= options.dense_whole), default=0)
    if not whole or not ran:
        return
    cache = FixedCache(run, all_layers, whole)
    for backend, seconds in ran.items():
        if seconds[str(whole)] > 1.1 * min(other[str(whole)] for other in ran.values()):
            continue
        use_attention(stock, partial(attend_chunk, backend))
        for layers in (1, all_layers):  # cuDNN plans each new shape at its first call, in the first layer
            cache.start = -chunk
            with using_layers(stock, layers):
                chunk_ms = read_chunks(run, lambda ids: forward(cache, cache.start + chunk, ids), whole, options.limit)
        measured = seconds_at(chunk_ms, options)
        rows[backend] |= {"seconds": measured, "chunk_ms": chunk_ms}
        rows[backend]["scaled_over_whole"] = {n: round(seconds[n] / measured[n], 3) for n in measured}


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph; itself where there is no GPU."""
    if not torch.cuda.is_available():
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        repeat(step, 2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def layers_that_fit(run: SimpleNamespace, length: int) -> int:
    """Layers whose keys and values of this length fit beside 8 GiB for everything else."""
    if not torch.cuda.is_available():
        return run.shape["num_hidden_layers"]
    a_layer = 2 * run.shape["num_key_value_heads"] * length * run.shape["head_dim"] * run.dtype.itemsize
    return max(min(run.shape["num_hidden_layers"], (torch.cuda.mem_get_info()[0] - 8 * GIB) // a_layer), 1)


def dense_decode(run: SimpleNamespace, result: dict[str, Any]) -> None:
    """A graph of one stock step per length and backend."""
    options, stock, token, every = run.options, run.model, random_ids(run, 1), run.shape["num_hidden_layers"]
    attends = {name: partial(attend_one, kind, False) for name, kind in BACKENDS.items()}
    attends |= {f"{name}+folded": partial(attend_one, kind, True) for name, kind in BACKENDS.items()}
    result["at"] = []
    for length in [options.short, *options.lengths]:
        free()
        layers = layers_that_fit(run, length)
        cache = FixedCache(run, layers, length)
        cache.start = length - 1
        inputs = {CACHE_FIELD: cache, "position_ids": torch.full((1, 1), length - 1, device=run.device)}
        variants: dict[str, Any] = {}
        result["at"].append({"length": length, "layers": layers, "variants": variants})
        for name, attend in attends.items():
            try:
                error = attention_error(attend, run, 1, 300)
                use_attention(stock, attend)
                step = partial(stock, token, use_cache=True, **inputs)
                with using_layers(stock, layers):
                    row = time_steps(captured(step), options.steps, limit=4.0)
                row |= {"ms": row["wall_ms"], "how": "measured", "error_to_float32": error}
                if layers < every:
                    with using_layers(stock, 0):
                        none_ms = time_steps(captured(step), options.steps)["wall_ms"]
                    row |= {"no_layers_ms": none_ms, "how": f"scaled from {layers} layers"}
                    row["ms"] = round(scaled(row["wall_ms"], none_ms, layers, every), 4)
                variants[name] = row
            except Exception as refused:
                variants[name] = refusal(refused)
        if options.compile_dense == length and layers == every:
            use_attention(stock, partial(attend_one, None, True))
            try:
                with time_limit(options.compile_seconds):
                    compiled = captured(partial(torch.compile(stock, dynamic=False), token, use_cache=True, **inputs))
                    compiled()
                row = time_steps(compiled, options.steps)
                del compiled
                variants["compiled"] = row | {"ms": row["wall_ms"], "how": "measured"}
            except Exception as refused:
                variants["compiled"] = refusal(refused)
        del cache, inputs, step  # before the next is allocated


# ---- report ---------------------------------------------------------------------------------------------------------


def ratios(report: dict[str, Any]) -> list[dict[str, Any]]:
    """For every geometry and length: ours, the fastest dense and how it was obtained, and dense / ours."""
    dense: dict[tuple[str, str], list[tuple[bool, float, str, str]]] = {}
    for name, row in report["dense"].get("dense-prefill", {}).get("by_backend", {}).items():
        for field, how in (("seconds", "measured"), ("scaled_seconds", "scaled")):
            for length, seconds in row.get(field, {}).items():
                dense.setdefault(("prefill", length), []).append((how != "measured", seconds, name, how))
    for at in report["dense"].get("dense-decode", {}).get("at", []):
        for name, row in at["variants"].items():
            if "ms" in row:
                one = (row["how"] != "measured", row["ms"], name, row["how"])
                dense.setdefault(("decode", str(at["length"])), []).append(one)
    lines = []
    for entry in report["recsa"]:
        ours = {("prefill", n): seconds for n, seconds in entry.get("prefill", {}).get("seconds", {}).items()}
        ours |= {("decode", str(row["length"])): row["wall_ms"] for row in entry.get("decode", {}).get("at", [])}
        for length in [report["sizes"]["short"], *report["sizes"]["lengths"]]:
            line: dict[str, Any] = {"geometry": entry["geometry"], "length": length}
            for what, unit in (("prefill", "s"), ("decode", "ms")):
                mine = line[f"{what}_recsa_{unit}"] = ours.get((what, str(length)))
                # measured ones come before scaled ones, then the fastest
                best = min(dense.get((what, str(length)), []), default=(True, None, None, None))
                line[f"{what}_dense_{unit}"], line[f"{what}_dense_by"], line[f"{what}_dense_how"] = best[1:]
                line[f"{what}_ratio"] = round(best[1] / mine, 3) if best[1] and mine else None
            lines.append(line)
    return lines


def print_table(lines: list[dict[str, Any]]) -> None:
    """Seconds of prefill and milliseconds of a step; ~ marks what is scaled."""
    columns = [f"{what}_{who}" for what, unit in (("prefill", "s"), ("decode", "ms")) for who in (f"recsa_{unit}",
               f"dense_{unit}", "ratio")]  # fmt: skip
    print(f"{'r,k,M':>12} {'tokens':>8}", *(f"{name.replace('_', ' '):>16}" for name in columns))
    for line in lines:
        cells = ["-" if line[name] is None else f"{line[name]:.2f}" for name in columns]
        for column, what in ((1, "prefill"), (4, "decode")):
            if line[f"{what}_dense_how"] not in (None, "measured"):
                cells[column] = "~" + cells[column]
        geometry = ",".join(str(number) for number in line["geometry"].values())
        print(f"{geometry:>12} {line['length']:>8}", *(f"{cell:>16}" for cell in cells))


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time against length, prefill and decode side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(10, 4), layout="tight")
    panels = FigureCanvasAgg(figure).figure.subplots(1, 2)
    for panel, what, unit in zip(panels, ("prefill", "decode"), ("s", "ms"), strict=True):
        curves: dict[str, dict[int, float]] = {}
        for line in lines:
            ours = "RecSA " + ",".join(str(number) for number in line["geometry"].values())
            for name, field in ((ours, f"{what}_recsa_{unit}"), ("dense", f"{what}_dense_{unit}")):
                if line[field] is not None:
                    curves.setdefault(name, {})[line["length"]] = line[field]
        for name, points in curves.items():
            panel.plot(list(points), list(points.values()), marker="o", label=name)
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=what)
        if curves:
            panel.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def geometry(text: str) -> tuple[int, int, int]:
        r, k, m = (int(part) for part in text.split(","))
        return r, k, m

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/bench_inference.json"))
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated; a prefix names several")
    for name, value in SIZES.items():
        kind: dict[str, Any] = dict(type=int, nargs="+" if isinstance(value, list) else None)
        if name == "geometry":
            kind = dict(type=geometry, action="append", metavar="r,k,M")
        parser.add_argument("--" + name.replace("_", "-"), help=f"{MEANING[name]}; default {value}", **kind)
    parser.add_argument("--selections", choices=["random", "realistic"], default="realistic",
                        help="realistic: slowly moving queries, too")  # fmt: skip
    parser.add_argument("--compile-dense", type=int, metavar="LENGTH", help="also a compiled dense step, at LENGTH")
    parser.add_argument("--compile-seconds", type=int, default=150, help="at most, for compiling")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which no section begins")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the flow")
    options = parser.parse_args(arguments)
    for name, value in (TINY_SIZES if options.tiny else SIZES).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.lengths = sorted(set(options.lengths))
    options.sections = options.sections.split(",")
    for name in options.sections:
        if not name or not any(section.startswith(name) for section in SECTIONS):
            parser.error(f"--sections: {name!r} is none of {', '.join(SECTIONS)}")
    if any(n < 2 * options.chunk or n % options.chunk for n in options.lengths):
        parser.error(f"--lengths: multiples of --chunk = {options.chunk}, and at least two chunks")
    if options.short < 2 or options.new_tokens < 2:
        parser.error("--short, --new-tokens: at least 2")
    return options


def provenance(script: str, arguments: list[str] | None, output: Path, run: SimpleNamespace) -> dict[str, Any]:
    """What made the figures: command, versions, device, dtype and shapes."""
    given = sys.argv[1:] if arguments is None else arguments
    given = [Path(text).name if text == str(output) else text for text in given]  # no folder of this machine
    return {
        "script": script,
        "command": shlex.join(["python", script, *given]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": str(run.dtype),
        "model": run.shape,
    }


def main(arguments: list[str] | None = None) -> int:
    options, gpu = parse_arguments(arguments), torch.cuda.is_available()
    run = SimpleNamespace(
        options=options,
        began=time.perf_counter(),
        device=torch.device("cuda" if gpu else "cpu"),
        dtype=torch.bfloat16 if gpu else torch.float32,  # Triton's interpreter cannot multiply bfloat16
        shape=TINY_SHAPE if options.tiny else SHAPE,
    )
    report = provenance("scripts/bench_inference.py", arguments, options.output, run) | {
        "sizes": {name: getattr(options, name) for name in SIZES},
        "how": HOW,
        "recsa": [],
        "dense": {},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)

    def section(where: dict[str, Any], name: str, body: Callable[[SimpleNamespace, dict[str, Any]], None]) -> None:
        began, result = time.perf_counter(), where.setdefault(name, {})
        try:
            if began - run.began > options.limit:
                raise TimeoutError(f"not begun: the script had run for {options.limit:.0f} s")
            body(run, result)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:600]
            traceback.print_exc()
        free()
        result["section_seconds"] = round(time.perf_counter() - began, 2)
        report["ratios"] = ratios(report)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{name}: {result.get('error', 'done')}, {result['section_seconds']:.1f} s", flush=True)

    def sections(where: dict[str, Any], bodies: dict[str, Any], kind: Any, **fields: Any) -> None:
        def make(run: SimpleNamespace, result: dict[str, Any]) -> None:
            run.model = make_model(kind, run, **fields)

        run.model = run.cache = None
        free()
        chosen = [name for name in bodies if any(name.startswith(wanted) for wanted in options.sections)]
        for name in ["model", *chosen] if chosen else []:
            section(where, name, make if name == "model" else bodies[name])

    ours = (recsa_prefill, recsa_decode, recsa_kernels, recsa_selections)
    with torch.no_grad():
        for r, k, m in options.geometry:
            report["recsa"].append({"geometry": {"r": r, "k": k, "M": m}})
            fields = dict(recsa_branching=r, recsa_top_k=k, recsa_top_capacity=m, recsa_prefill_chunk=options.chunk)
            bodies = dict(zip(SECTIONS, ours, strict=False))
            sections(report["recsa"][-1], bodies, RecSAQwen3ForCausalLM, recsa_backend="triton", **fields)
        bodies = {"dense-prefill": dense_prefill, "dense-decode": dense_decode}
        sections(report["dense"], bodies, Qwen3ForCausalLM)
    print_table(report["ratios"])
    plot(report["ratios"], options.output.with_suffix(".png"))
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
