"""Distil the poolers of a RecSA-Qwen3 model from its own dense attention, the rest frozen.

    python scripts/distill.py --model qwen3-4b-recsa --output qwen3-4b-distilled --data DATA
    accelerate launch scripts/distill.py ...                                    # several GPUs: DDP, or FSDP 2

Where the loss is taken decides how far retrieval extrapolates: half of it at answers in retrieval-dense text, which
--needles makes of any text, and in long rows under a YaRN teacher, which --long-rows adds. Recipe [our decision, found
with a small model]: facts and questions in every row, Adam, betas 0.9 and 0.98, 10 steps of warm-up, linear decay over
the second half. The paper's 0.62B tokens in all are split into 100M here, 460M in finetune.py and 60M in the closing
distillation [our decision].

The backbone is read in --precision and runs without gradients; poolers and optimizer are float32, since steps of a
pooler in bfloat16 would be lost to rounding.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

import training
from recsa_qwen3 import RecSAPooler, RecSAQwen3Config, RecSAQwen3ForCausalLM
from training_files import clear, whole_tensors, write_result

TOKENS = 100_000_000
NEEDLES = 1.0
FIRST_STEPS = 10  # in which there must be something to learn


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=training.HelpFormatter)
    training.add_training_arguments(parser, tokens=TOKENS, rows=8, lr=5e-3, warmup=10, needles=NEEDLES)
    add_distillation_arguments(parser)
    options = parser.parse_args(arguments)
    training.check_arguments(parser, options)
    check_distillation_arguments(parser, options)
    return options


def add_distillation_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = RecSAQwen3Config()
    group = parser.add_argument_group("distillation [our decision]")
    group.add_argument(
        "--queries",
        default=defaults.recsa_distill_queries,
        help="where the loss is taken, shares joined by +; see recsa_distill_queries",
    )
    group.add_argument("--samples", type=int, default=defaults.recsa_distill_samples, help="queries of a row")


def check_distillation_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        RecSAQwen3Config(recsa_distill_queries=options.queries, recsa_distill_samples=options.samples)
    except ValueError as error:
        parser.error(f"--queries / --samples: {error}")


def distil(
    options: argparse.Namespace, accelerator: Accelerator, stage: str = "distill", source: Path | None = None
) -> None:
    """Trains the poolers of a model and writes it to `options.output`.

    Args:
        options: as `parse_arguments` returns them.
        stage: what log and checkpoints call it.
        source: what the stage before wrote; `options.model` where there is none.
    """
    data = open_data(options, accelerator)
    model_name = str(source or options.model)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    model = training.load(RecSAQwen3ForCausalLM, model_name, dtype=dtype).requires_grad_(False)
    model.config.recsa_distill_weight = 1.0
    model.config.recsa_distill_queries = options.queries
    model.config.recsa_distill_samples = options.samples
    poolers = [module.float().requires_grad_() for module in model.modules() if isinstance(module, RecSAPooler)]
    optimizer = torch.optim.Adam([p for m in poolers for p in m.parameters()], lr=options.lr, betas=(0.9, 0.98))
    run = training.Run(stage, options, accelerator, model, optimizer, data, with_labels=False)
    trained = whole_tensors(run.train())
    if accelerator.is_main_process:
        write_result(model_name, trained, options.output)
        print(f"written to {options.output}", flush=True)
    accelerator.wait_for_everyone()


def open_data(options: argparse.Namespace, accelerator: Accelerator) -> training.StepData:
    """What the steps of a distillation read; refuses what cannot be distilled, text of short documents included."""
    config = training.read_config(options.model)
    check_model(options, config)
    data = training.StepData(options, training.load(AutoTokenizer, options.model), accelerator)
    for length, _ in data.long_rows:
        check_length("--long-rows", length, config)
    least, begin = 2 * config.recsa_branching + 1, data.state_dict()
    for _ in range(FIRST_STEPS):
        longest = max(int(part["position_ids"].max()) + 1 for part in data.next_step())
        able = torch.tensor(float(longest >= least), device=accelerator.device)
        if accelerator.reduce(able, "sum") > 0:
            data.load_state_dict(begin)
            return data
    raise SystemExit(
        f"--data: the first {FIRST_STEPS} steps hold no document of {least} tokens; no query sees two nodes in "
        "shorter ones, so that nothing would be learnt: use longer documents, or --needles"
    )


def check_model(options: argparse.Namespace, config: RecSAQwen3Config) -> None:
    """Refuses a model that has nothing to distil at this length."""
    if config.recsa_top_k is None:
        raise SystemExit(f"--model {options.model}: recsa_top_k is None, dense attention has no selection to distil")
    check_length("--length", options.length, config)


def check_length(option: str, length: int, config: RecSAQwen3Config) -> None:
    least = 2 * config.recsa_branching + 1
    if length < least:
        raise SystemExit(f"{option} {length}: a query sees two nodes from {least} tokens on")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    accelerator = training.start(options)
    if training.is_finished(options):
        accelerator.print(f"--resume: {options.output} holds the finished model already")
    else:
        distil(options, accelerator)
    clear(options.output, accelerator, "checkpoints/distill")
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
