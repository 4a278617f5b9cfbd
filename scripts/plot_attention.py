"""A picture of what one query reads: levels against positions, nodes chosen and nodes summarised, as PNG.

    python scripts/plot_attention.py --output attention.png                       # the embedded default, a haystack
    python scripts/plot_attention.py --model DIR --prompt-file book.txt --layer 20 --kv-head 3 --output attention.png

The query is the last token of the prompt. A row is a level, the lowest at the bottom: a node that was chosen is dark,
one that was read as a summary is light, and blank is what a node above summarises. In a generated haystack a line
marks the fact that answers. Needs matplotlib. This file decides nothing about attention: it draws what `recsa_trace`
recorded.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import long_text
import needle_text
from generate import default_model
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM, TreeGeometry, recsa_trace

CHOSEN, SUMMARISED = "chosen", "summarised"
COLOURS = {CHOSEN: "#1f4e79", SUMMARISED: "#c9d8e8"}


def spans(
    geometry: TreeGeometry, position: int, chosen: dict[int, list[int]]
) -> dict[int, list[tuple[int, int, str]]]:
    """What the query at `position` reads of each level: (first token, tokens, CHOSEN or SUMMARISED), by position.

    Tokens of level 0 count as chosen, since each is read for itself; the others of a level are what it leaves to its
    summaries. All SUMMARISED spans and level 0 together cover the tokens 0 ... position once.

    Args:
        chosen: level (>= 1) -> nodes that the query chose.
    """
    depth = geometry.depth(position)
    found: dict[int, list[tuple[int, int, str]]] = {}
    candidates = list(range(position // geometry.branching**depth + 1))
    for level in range(depth, -1, -1):
        size = geometry.branching**level
        taken = set(chosen[level]) if level else set(candidates)
        found[level] = [
            (node * size, min(size, position + 1 - node * size), CHOSEN if node in taken else SUMMARISED)
            for node in candidates
        ]
        children = (geometry.branching * node + slot for node in sorted(taken) for slot in range(geometry.branching))
        if level:
            candidates = [child for child in children if child <= position // geometry.branching ** (level - 1)]
    return found


@torch.no_grad()
def read(model: RecSAQwen3ForCausalLM, ids: torch.Tensor, layer: int, kv_head: int) -> dict[int, list[int]]:
    """What the last of `ids` `[1, N]` chose in a layer for a KV head: level -> nodes."""
    cache = RecSACache(model.config, reserve=ids.shape[1])
    if ids.shape[1] > 1:
        model(ids[:, :-1], cache=cache, logits_to_keep=1)
    with recsa_trace(model) as trace:
        model(ids[:, -1:], cache=cache, logits_to_keep=1)
    selection = trace.forwards[-1][layer].selection
    return {level: [n for n in nodes[0, kv_head, -1].tolist() if n >= 0] for level, nodes in selection.items()}


def draw(found: dict[int, list[tuple[int, int, str]]], title: str, path: Path, marked: int | None) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.2 + 0.7 * len(found)), layout="tight")
    panel = FigureCanvasAgg(figure).figure.subplots()
    for level, parts in found.items():
        for kind, colour in COLOURS.items():
            bars = [(start, length) for start, length, what in parts if what == kind]
            panel.broken_barh(bars, (level - 0.4, 0.8), facecolors=colour, edgecolors="none")
    if marked is not None:
        panel.axvline(marked, color="#c0392b", linewidth=1)
    panel.set(title=title, xlabel="position", ylabel="level", yticks=list(found))
    panel.set_xlim(0, found[0][-1][0] + 1)
    patches = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    panel.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="folder or Hub id of a RecSA-Qwen3 checkpoint; the embedded default")
    parser.add_argument("--prompt-file", type=Path, help="text to read; a generated haystack if left out")
    parser.add_argument("--haystack", type=int, default=16_384, help="tokens of the generated text")
    parser.add_argument("--task", choices=needle_text.TASKS, default="needle")
    parser.add_argument("--seed", type=int, default=0, help="of the generated text")
    parser.add_argument("--layer", type=int, default=-1, help="from 0 on, or from the last one back")
    parser.add_argument("--kv-head", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed; pip install matplotlib")
    if options.prompt_file is not None and not options.prompt_file.is_file():
        parser.error(f"--prompt-file {options.prompt_file}: is not a file")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    source = options.model or str(default_model())
    model = RecSAQwen3ForCausalLM.from_pretrained(source, dtype="auto").to(options.device).eval()
    config, marked = model.config, None
    for name, value, count in (
        ("--layer", options.layer, config.num_hidden_layers),
        ("--kv-head", options.kv_head, config.num_key_value_heads),
    ):
        if not -count <= value < count:
            raise SystemExit(f"{name} {value}: the model has {count}")
    layer, kv_head = options.layer % config.num_hidden_layers, options.kv_head % config.num_key_value_heads
    if options.prompt_file is None:
        example = needle_text.make_example(options.haystack, options.task, options.seed)
        ids, marked = example.prompt_ids[None], example.needle_at
    else:
        tokenizer = AutoTokenizer.from_pretrained(source)
        text = options.prompt_file.read_text(encoding="utf-8")
        ids = torch.tensor([long_text.encode(tokenizer, text, special=True).input_ids])
    geometry, position = TreeGeometry.from_config(config), ids.shape[1] - 1
    if geometry.is_dense(position):
        raise SystemExit(
            f"{position + 1:,} tokens: up to {geometry.top_capacity:,} attention is dense, nothing is chosen; "
            "read a longer text"
        )
    found = spans(geometry, position, read(model, ids.to(options.device), layer, kv_head))
    read_entries = sum(what == SUMMARISED or not level for level, parts in found.items() for _, _, what in parts)
    title = f"layer {layer}, KV head {kv_head}: {read_entries:,} entries read of {position + 1:,} tokens"
    draw(found, title, options.output, marked)
    print(f"{title}\nwrote {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
