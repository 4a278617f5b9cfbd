"""Read a long text with a RecSA-Qwen3 model and answer: the main job.

    python scripts/generate.py                                   # the embedded default, a generated haystack
    python scripts/generate.py --haystack 65536 --task lookalike
    python scripts/generate.py --model DIR_OR_HUB_ID --prompt-file book.txt --question "Who is the narrator?"
    cat notes.txt | python scripts/generate.py --model DIR_OR_HUB_ID --prompt-file -

    python scripts/generate.py ... --save-cache DIR              # then, for another question on the same text:
    python scripts/generate.py ... --load-cache DIR --question "And her brother?"

Says what the text will take, shows progress while it reads, streams the answer, then prints tokens, time, levels, and
how many entries the last query read against how many dense attention would have. Without `--model`, the small dense
checkpoint of this repository is converted once by `scripts/convert_qwen3.py` and used. This file decides nothing about
attention.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer, set_seed
from transformers.utils import logging

import long_text
import needle_text

try:
    from recsa_qwen3 import RecSACache, RecSAPooler, RecSAQwen3ForCausalLM, TreeGeometry
    from recsa_qwen3.cache_files_recsa_qwen3 import check_target, saved_id
    from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD, tokens_to_reserve
except ImportError as error:
    raise SystemExit(f"recsa_qwen3 cannot be imported ({error}); run: pip install -e . in the repository") from error

ROOT = Path(__file__).resolve().parent.parent
DENSE_DEFAULT = ROOT / "models" / "small-dense"
DEFAULT = ROOT / "models" / "small-recsa"
# The library's r and k; exactly dense up to the length that the small model was trained at.
DEFAULT_FIELDS = {"recsa_branching": 16, "recsa_top_k": 128, "recsa_top_capacity": 2048}
DEFAULT_HAYSTACK = 4096
# Beside a saved cache: the ids that it was filled with.
PROMPT_IDS = "prompt_ids.safetensors"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Names a default where there is one."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=HelpFormatter)
    parser.add_argument("--model", help="folder or Hub id of a RecSA-Qwen3 (or stock Qwen3) checkpoint")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt-file", help="text file to read, or - for standard input")
    text.add_argument(
        "--haystack", type=int, metavar="TOKENS", help=f"generate a text; {DEFAULT_HAYSTACK} without --prompt-file"
    )
    parser.add_argument("--task", choices=needle_text.TASKS, default="needle", help="what the haystack hides")
    parser.add_argument("--question", help="appended to the text")
    parser.add_argument("--raw", action="store_true", help="do not use the tokenizer's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens to answer with")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")
    parser.add_argument("--branching", type=int, help="r; another value than the checkpoint's resets its slot_bias")
    parser.add_argument(
        "--top-k", type=int, help="k, nodes selected per level; the checkpoint's if left out, as the next ones"
    )
    parser.add_argument("--recent", type=int, help="s, recent nodes always selected")
    parser.add_argument("--top-capacity", type=int, help="M, tokens up to which attention is exactly dense")
    parser.add_argument("--dense", action="store_true", help="dense attention at every length, for comparison")
    parser.add_argument("--chunk", type=int, help="tokens per prefill chunk; the checkpoint's if left out")
    parser.add_argument(
        "--cache-dtype",
        choices=("auto", "fp8_e4m3"),
        help="how tokens are stored; the checkpoint's if left out",
    )
    parser.add_argument(
        "--gpu-budget", type=float, metavar="GIB", help="of the GPU, in all; tokens beyond it lie in host memory"
    )
    parser.add_argument("--save-cache", metavar="DIR", help="keep what was read, after reading or Ctrl-C")
    parser.add_argument(
        "--load-cache", metavar="DIR", help="read on from what was kept: as far as its text is the prompt's"
    )
    parser.add_argument("--sample", action="store_true", help="sample instead of greedy decoding")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("max_new_tokens", "haystack", "chunk"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.dense and options.top_k is not None:
        parser.error("--dense selects everything; leave --top-k out")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        parser.error(f"--device {options.device}: {error}")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {options.device}: not available here; use cpu")
    if options.gpu_budget is not None and (device.type != "cuda" or options.gpu_budget < 0):
        parser.error(f"--gpu-budget {options.gpu_budget}: at least 0, and for a CUDA device; leave it out on {device}")
    return options


def default_model() -> Path:
    """The embedded default: the small dense checkpoint, converted on first use."""
    if not DEFAULT.exists():
        from convert_qwen3 import convert

        print(f"converting {DENSE_DEFAULT.relative_to(ROOT)} to {DEFAULT.relative_to(ROOT)} (once)")
        convert(str(DENSE_DEFAULT), DEFAULT, recsa=DEFAULT_FIELDS)
    return DEFAULT


def load_model(options: argparse.Namespace) -> RecSAQwen3ForCausalLM:
    """The model on its device, with the options' fields in its configuration."""
    source = options.model or str(default_model())
    fields: dict[str, Any] = {}
    if options.branching is not None:
        fields["recsa_branching"] = options.branching
    if options.top_k is not None:
        fields["recsa_top_k"] = options.top_k
    if options.recent is not None:
        fields["recsa_recent"] = options.recent
    if options.top_capacity is not None:
        fields["recsa_top_capacity"] = options.top_capacity
    if options.dense:
        fields["recsa_top_k"] = None
    if options.chunk is not None:
        fields["recsa_prefill_chunk"] = options.chunk
    try:
        stored = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {source}: {error}") from error
    if stored.model_type not in ("recsa_qwen3", "qwen3"):
        raise SystemExit(
            f"--model {source}: is a {stored.model_type!r} checkpoint; this script runs Qwen3 and RecSA-Qwen3"
        )
    if stored.model_type == "qwen3":
        print("stock Qwen3 checkpoint: its poolers are untrained means; convert and distil it for long prompts")
    if "recsa_top_capacity" not in fields and (fields.get("recsa_top_k") or options.branching):
        # a larger k * r may pass the stored M; then M rises with it
        top_k = fields.get("recsa_top_k", getattr(stored, "recsa_top_k", 128)) or 0
        candidates = top_k * fields.get("recsa_branching", getattr(stored, "recsa_branching", 16))
        fields["recsa_top_capacity"] = max(candidates, getattr(stored, "recsa_top_capacity", 8192) or 0)
    try:
        model = RecSAQwen3ForCausalLM.from_pretrained(
            source,
            dtype="auto" if options.dtype == "auto" else getattr(torch, options.dtype),
            # r slot biases do not fit another r
            ignore_mismatched_sizes="recsa_branching" in fields,
            **fields,
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"{source}: {error}") from error
    if options.device.startswith("cpu") and options.dtype == "auto":
        model = model.float()  # bfloat16 is slower than float32 on most CPUs
    return model.to(options.device).eval()


def read_prompt(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, needle_text.Example | None]:
    """Prompt ids `[1, N]`, and the example where the text was generated."""
    if options.prompt_file is None:
        try:
            example = needle_text.make_example(options.haystack or DEFAULT_HAYSTACK, options.task, options.seed)
        except ValueError as error:
            raise SystemExit(f"--haystack: {error}") from error
        text: Iterable[str] = [example.prompt]
        question = "" if options.question is None else f"\n{options.question}"
        known = tokenizer(example.answer, add_special_tokens=False).input_ids == example.answer_ids.tolist()
        if options.question is None and not known:
            # another model's tokenizer: ask in words, and let it count its own tokens
            question = "\nComplete the last line with the words that were noted above."
    else:
        example, text = None, long_text.read_pieces(options.prompt_file)
        question = f"\n\n{options.question}" if options.question else ""
    pieces: Iterable[str] = long_text.not_blank(chain(text, [question]))
    try:
        if tokenizer.chat_template and not options.raw:
            pieces = long_text.chat_pieces(tokenizer, pieces)
        ids = long_text.tokenize_text(tokenizer, pieces)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--prompt-file: {error}") from error
    if ids.shape[1] < 2:
        raise SystemExit("the prompt has fewer than two tokens")
    return ids, example


def open_cache(options: argparse.Namespace, model: RecSAQwen3ForCausalLM, ids: torch.Tensor) -> RecSACache:
    """A cache with room for `ids` `[1, N]` and the answer, empty or with what `--load-cache` holds of these ids."""
    room = tokens_to_reserve(ids.shape[1], ids.shape[1] + options.max_new_tokens)
    folder = options.load_cache
    if folder is None:
        return RecSACache(model.config, room, options.cache_dtype, options.gpu_budget)
    try:
        saved = saved_id(folder)
        with safe_open(Path(folder) / PROMPT_IDS, framework="pt") as file:
            held = file.get_tensor("ids").to(ids)
            if (file.metadata() or {}).get("save_id") != saved:
                raise ValueError(f"{PROMPT_IDS} belongs to another save than the cache beside it; keep the text anew")
        cache = RecSACache.load(folder, model, reserve=room, gpu_budget=options.gpu_budget)
    except (OSError, ValueError, MemoryError, SafetensorError) as error:
        raise SystemExit(f"--load-cache {folder}: {error} (a cache of --save-cache has {PROMPT_IDS})") from error
    if options.cache_dtype not in (None, cache.cache_dtype):
        raise SystemExit(f"--cache-dtype: {folder} holds {cache.cache_dtype!r}; leave the option out")
    # the last token is always fed: its logits begin the answer
    end = min(len(held), ids.shape[1] - 1)
    same = int((held[:end] == ids[0, :end]).long().cumprod(0).sum())
    if 2 * same < len(held):
        raise SystemExit(
            f"--load-cache {folder}: was filled with another text: of its {len(held):,} tokens only the first "
            f"{same:,} begin this prompt; give the text that it was made from, or leave the option out"
        )
    cache.crop(same - len(held))
    print(f"{same:,} of {len(held):,} tokens reused from {folder}")
    return cache


def save_cache(options: argparse.Namespace, cache: RecSACache, ids: torch.Tensor) -> bool:
    """Writes the cache to `--save-cache`, and which of `ids` `[1, N]` it holds; says so, too, where it cannot."""
    target = Path(options.save_cache) / PROMPT_IDS
    part = target.with_suffix(".part")
    held = ids[0, : cache.get_seq_length()].int().cpu()
    try:
        cache.save(options.save_cache, overwrite=True)
        save_file({"ids": held}, part, {"save_id": saved_id(options.save_cache)})
        os.replace(part, target)
    except (OSError, ValueError) as error:  # what was read is worth an answer all the same
        print(f"--save-cache: nothing was kept: {error}")
        return False
    print(f"kept {cache.get_seq_length():,} tokens in {options.save_cache}")
    return True


def prefill(options: argparse.Namespace, model: RecSAQwen3ForCausalLM, ids: torch.Tensor, cache: RecSACache) -> bool:
    """Reads all but the last token of `ids` `[1, N]` into the cache; False where it could not be kept."""
    begin = cache.get_seq_length()
    try:
        if begin < ids.shape[1] - 1:
            with torch.inference_mode():
                model(ids[:, begin:-1], cache=cache, logits_to_keep=1)
    except MemoryError as error:
        raise SystemExit(f"the prompt does not fit: {error}") from error
    except KeyboardInterrupt:
        if options.save_cache and cache.get_seq_length() > begin and save_cache(options, cache, ids):
            print(f"interrupted; the same command with --load-cache {options.save_cache} goes on from there")
        raise
    return save_cache(options, cache, ids) if options.save_cache else True


def describe_read(geometry: TreeGeometry, tokens: int) -> str:
    """The levels that the last query walked, and its entries against dense attention's."""
    entries = geometry.candidates(tokens - 1)
    if len(entries) == 1:
        return f"levels: tokens only (dense); the last query read {tokens:,} entries, as dense attention"
    levels = range(len(entries) - 1, -1, -1)
    walk = ", ".join(f"level {level}: {number:,}" for level, number in zip(levels, entries, strict=True))
    total = sum(entries)
    saved = (
        f"the last query read {total:,} entries, dense attention reads {tokens:,} ({tokens / total:.1f}x in entries)"
    )
    return f"levels: {walk}\n{saved}"


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    if options.save_cache:
        try:
            again = options.load_cache and Path(options.load_cache).resolve() == Path(options.save_cache).resolve()
            check_target(options.save_cache, overwrite=bool(again))
        except (OSError, ValueError) as error:
            hint = " (To overwrite it, give it in --load-cache as well.)" if isinstance(error, FileExistsError) else ""
            raise SystemExit(f"--save-cache: {error}{hint}") from error
    set_seed(options.seed)
    logging.disable_progress_bar()  # of loading weights
    model = load_model(options)
    logging.enable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.model or DEFAULT)
    ids, example = read_prompt(options, tokenizer)
    tokens = ids.shape[1]
    ids = ids.to(model.device)
    fields = model.config
    print(
        f"{tokens:,} tokens; r = {fields.recsa_branching}, k = {fields.recsa_top_k}, M = {fields.recsa_top_capacity}, "
        f"{model.dtype} on {model.device}".replace("torch.", "")
    )

    cache = open_cache(options, model, ids)
    memory = cache.foresee(tokens + options.max_new_tokens, 1, model.dtype, model.device)
    print(memory)
    needed = memory.token_bytes + memory.node_bytes + memory.host_bytes
    if options.save_cache and shutil.disk_usage(options.save_cache).free < needed:
        raise SystemExit(f"--save-cache {options.save_cache}: {needed / 2**30:.1f} GiB are needed, the disk has less")
    known = cache.get_seq_length()
    began = time.perf_counter()
    kept = prefill(options, model, ids, cache)
    read = time.perf_counter() - began
    tail = ids[0, -12:]
    print(f"the text ends: ... {tokenizer.decode(tail, skip_special_tokens=True)}\nanswer:")

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    began = time.perf_counter()
    output = model.generate(
        ids,
        **{CACHE_FIELD: cache},
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.max_new_tokens,
        do_sample=options.sample,
        streamer=streamer,
    )
    wrote = time.perf_counter() - began
    new = output[0, tokens:]

    rate = f" ({(tokens - known) / read:,.0f} tokens/s)" if tokens - known > 1 else ""
    print(f"\nread {tokens - known:,} tokens in {read:.1f} s{rate}, ", end="")
    print(f"wrote {len(new)} in {wrote:.2f} s ({wrote / len(new) * 1000:.0f} ms each); ", end="")
    print(f"path of the last step: {model.last_backend}")
    print(describe_read(TreeGeometry.from_config(fields), tokens))
    poolers = [module for module in model.modules() if isinstance(module, RecSAPooler)]
    limit = TreeGeometry.from_config(fields).top_capacity
    if fields.recsa_top_k and tokens > limit and not any(pooler.query.any() for pooler in poolers):
        print(f"note: the poolers are untrained means; beyond M = {limit:,} tokens answers are often wrong")
    if example is not None and options.question is None:
        found = tokenizer.decode(new, skip_special_tokens=True)
        right = needle_text.encode(found)[: len(example.answer_ids)] == example.answer_ids.tolist()
        print(f"expected: {example.answer} -> {'right' if right else 'wrong'}")
    return 0 if kept else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
