"""Train a small stock Qwen3 to answer needle questions in text, save it with its tokenizer, and score what was saved.

    python scripts/train_small.py --output models/small-dense

One H200 needs a few minutes. The model is an ordinary ``Qwen3ForCausalLM`` of 11.4M parameters that has seen no text
longer than 2,048 tokens; the tokenizer is word-level. The saved bfloat16 checkpoint is loaded again with stock
transformers and must generate the answers exactly; the figures go to a JSON report. ``--preset tiny`` is a rehearsal
for a CPU.

Recipe [ours]: lengths 256, 512, 2,048 one after another, the same number of tokens in every step; Muon for the
matrices of the layers, AdamW for the rest; in the loss answers weigh 1, other text 0.05, facts and questions nothing.
This file never touches the RecSA modules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import needle_text

PARAMETER_LIMIT = 12_000_000
FILE_LIMIT = 30_000_000
EVALUATION_SEED = 1_000_000  # far from those of training


@dataclass(frozen=True)
class Preset:
    """A model's shape and its training plan."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    tokens_a_step: int
    steps: int
    curriculum: tuple[tuple[float, int], ...]  # (share of the training at which the stage ends, length)
    lengths: tuple[int, ...]  # evaluated


PRESETS = {
    "small": Preset(6, 384, 8, 4, 64, 1024, 65_536, 2_300, ((0.25, 256), (0.45, 512), (1, 2048)), (512, 1024, 2048)),
    "tiny": Preset(2, 128, 4, 2, 32, 256, 4_096, 700, ((0.5, 64), (1, 128)), (64, 128)),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; everything that can be refused early is refused here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    parser.add_argument("--report", type=Path, default=Path("benchmarks/train_small.json"), help="JSON file")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-scale", type=float, default=1.0, help="multiplies the preset's number of steps")
    parser.add_argument("--seconds", type=float, default=240.0, help="training time that the schedule shrinks to fit")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="compile the model for training")
    parser.add_argument("--prompts", type=int, default=256, help="questions for each task and length")
    parser.add_argument("--eval-tokens", type=int, default=131_072, help="tokens of an evaluation batch")
    args = parser.parse_args(argv)
    if args.steps_scale <= 0 or args.seconds <= 0 or args.prompts < 1 or args.eval_tokens < 1:
        parser.error("--steps-scale, --seconds, --prompts and --eval-tokens must be positive")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"device {args.device!r} cannot be used: {error}")
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"torch {torch.__version__} has no torch.optim.Muon: torch 2.9 or newer is needed")
    if args.output.exists() and not args.overwrite:
        parser.error(f"{args.output} exists: choose another --output or pass --overwrite")
    for folder in (args.output.parent, args.report.parent):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            parser.error(f"cannot write to {folder}")
    return args


def build_model(preset: Preset) -> Qwen3ForCausalLM:
    """A freshly initialised stock model in float32; raises ``ValueError`` beyond ``PARAMETER_LIMIT``.

    Stock initialisation (0.02 everywhere) suits neither the width nor the rates used here, so matrices begin at
    ``1 / sqrt(fan in)``, those that write to the residual stream at 0.3 of it, embeddings at 0.5 [ours].
    """
    config = Qwen3Config(
        vocab_size=len(needle_text.WORDS),
        hidden_size=preset.hidden,
        intermediate_size=preset.feed_forward,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.curriculum[-1][1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
        pad_token_id=needle_text.PAD,
        bos_token_id=needle_text.BOS,
        eos_token_id=needle_text.STOP,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() == 2:
            scale = 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]))
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > PARAMETER_LIMIT:
        raise ValueError(f"the model has {count:,} parameters, more than {PARAMETER_LIMIT:,}")
    # An answer ends at ";", and the default way to ask is greedy.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=16,
        pad_token_id=needle_text.PAD,
        bos_token_id=needle_text.BOS,
        eos_token_id=needle_text.STOP,
    )
    return model


def build_optimizers(model: Qwen3ForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, head and norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("model.layers.")]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    fused = torch.device(args.device).type == "cuda"
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def train(model: Qwen3ForCausalLM, preset: Preset, args: argparse.Namespace) -> dict[str, Any]:
    """Train ``model`` in place; returns the number of steps and tokens, the seconds and the course of the loss.

    Stage and rate follow one progress in [0, 1]: the larger of the share of steps and the share of ``--seconds``.
    Raises ``FloatingPointError`` when the loss is no longer finite.
    """
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)
    optimizers = build_optimizers(model, args)
    forward = torch.compile(model) if args.compile else model
    total = max(1, round(preset.steps * args.steps_scale))
    every = max(1, total // 40)
    course: list[dict[str, float]] = []
    model.train()
    begin, step, progress = time.perf_counter(), 0, 0.0
    while progress < 1:
        length = next(length for end, length in preset.curriculum if progress < end)
        ids, labels, weights = needle_text.train_batch(preset.tokens_a_step // length, length, device, generator)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = forward(input_ids=ids, use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(weights)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        factor = min(1.0, (step + 1) / 40) * min(1.0, (1 - progress) / 0.4)  # warm up 40 steps, cool down 40%
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        seconds = time.perf_counter() - begin
        progress = max(step / total, seconds / args.seconds)
        if step % every == 0 or step == 1 or progress >= 1:
            is_answer = weights == 1
            right = (logits.detach().argmax(-1) == labels)[is_answer].float().mean().item()
            row = {"step": step, "length": length, "loss": loss.item(), "answer_loss": losses[is_answer].mean().item()}
            row |= {"answer_accuracy": right, "seconds": round(time.perf_counter() - begin, 2)}
            if not math.isfinite(row["loss"]):
                raise FloatingPointError(f"the loss is {row['loss']} at step {step}: lower --muon-lr and --adam-lr")
            course.append(row)
            print(
                f"step {step}/{total} length {length} loss {row['loss']:.3f} answer loss {row['answer_loss']:.3f} "
                f"answer accuracy {right:.3f} {row['seconds']:.0f}s",
                flush=True,
            )
    tokens = step * preset.tokens_a_step
    return {"steps": step, "tokens": tokens, "seconds": round(time.perf_counter() - begin, 1), "course": course}


def save(model: Qwen3ForCausalLM, output: Path, overwrite: bool) -> int:
    """Write model and tokenizer in bfloat16 next to ``output``, then rename. Returns the bytes of the weights."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        model.bfloat16().save_pretrained(temporary)
        needle_text.build_tokenizer().save_pretrained(temporary)
        size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
        if size >= FILE_LIMIT:
            raise ValueError(f"the weights take {size:,} bytes, {FILE_LIMIT:,} is the limit")
        temporary.chmod(0o755)
        if overwrite and output.exists():
            shutil.rmtree(output)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


@torch.inference_mode()
def exact_match(
    model: PreTrainedModel, task: str, length: int, prompts: int, tokens_a_batch: int
) -> tuple[int, float]:
    """Asks `prompts` questions of exactly `length` tokens, the answer included; always the same ones.

    Returns:
        How many were answered word for word by greedy `generate()`, and the share of right answer tokens.
    """
    exact, right_tokens = 0, 0.0
    most = max(1, tokens_a_batch // length)
    for done in range(0, prompts, most):
        ids, answers = needle_text.make_batch(min(most, prompts - done), length, task, seed=EVALUATION_SEED + done)
        ids, answers = ids.to(model.device), answers.to(model.device)
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=answers.shape[1]
        )[:, ids.shape[1] :]
        right = F.pad(made, (0, answers.shape[1] - made.shape[1]), value=needle_text.PAD) == answers
        exact += int(right.all(1).sum())
        right_tokens += float(right.float().mean(1).sum())
    return exact, right_tokens / prompts


def evaluate(folder: Path, lengths: tuple[int, ...], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Exact match of greedily generated answers, from the checkpoint in ``folder`` as stock transformers loads it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device).eval()
    sample = needle_text.make_example(max(lengths), "needle", 0)
    if tokenizer(sample.prompt).input_ids != sample.prompt_ids.tolist():
        raise ValueError("the saved tokenizer does not read the text as it was written")
    scores = []
    for length in lengths:
        for task in needle_text.TASKS:
            if length < needle_text.minimum_length(task):
                continue
            exact, tokens = exact_match(model, task, length, args.prompts, args.eval_tokens)
            share = exact / args.prompts
            scores.append({"length": length, "task": task, "prompts": args.prompts, "exact": share, "tokens": tokens})
            print(f"{length} {task}: exact {share:.3f}, tokens {tokens:.3f} of {args.prompts}", flush=True)
    return scores


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, save, evaluate and write the report, which is also returned."""
    args = parse_args(argv)
    preset = PRESETS[args.preset]
    torch.manual_seed(args.seed)
    begin = time.perf_counter()
    model = build_model(preset).to(args.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    on_gpu = torch.device(args.device).type == "cuda"
    report: dict[str, Any] = {
        "script": "scripts/train_small.py",
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "cpu",
        "parameters": parameters,
    }
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{parameters:,} parameters, {report['device']}, {versions}", flush=True)
    report["training"] = train(model, preset, args)
    report["weights_bytes"] = save(model, args.output, args.overwrite)
    args.report.write_text(json.dumps(report, indent=2) + "\n")  # the figures so far, should the evaluation fail
    print(f"saved {args.output}, {report['weights_bytes']:,} bytes of weights", flush=True)
    report["scores"] = evaluate(args.output, preset.lengths, args)
    report["seconds"] = round(time.perf_counter() - begin, 1)
    args.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {args.report} after {report['seconds']} seconds", flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
