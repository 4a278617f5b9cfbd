"""Fine-tune a RecSA-Qwen3 model on the lengths it shall read, then distil its poolers once more.

    python scripts/finetune.py --model qwen3-4b-distilled --output qwen3-4b-32k --data DATA --closing-steps 200
    accelerate launch scripts/finetune.py ...                                   # several GPUs: DDP, or FSDP 2

Three ways: all parameters by the language-model loss plus 0.3 times the distillation loss, which moves the poolers
alone; all but the poolers (--freeze-poolers); LoRA on the linear layers with frozen poolers (--lora). The
language-model loss never moves poolers: that destroys their routing. A fine-tuned model is not finished before its
poolers have been distilled again with the rest frozen: --closing-steps does it, or distill.py afterwards. --long-rows,
and needles in every row where --needles is left out, are for the closing distillation alone.

Recipe [our decision]: AdamW, betas 0.9 and 0.95, weight decay on matrices, gradients clipped, gradient checkpointing.
Length and tokens are the paper's: 32,768, and 0.62B in all, of which 460M here. Parameters that are trained and the
optimizer are float32; --precision is that of the computation.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoTokenizer, PreTrainedModel

import distill
import training
from recsa_qwen3 import RecSAPooler, RecSAQwen3ForCausalLM
from training_files import clear, whole_tensors, write_result

TOKENS, CLOSING_TOKENS = 460_000_000, 60_000_000
DISTILL_WEIGHT, CLOSING_LR = 0.3, 5e-3
BEFORE = "before-closing"  # in --output, the model that the closing distillation starts from


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=training.HelpFormatter)
    training.add_training_arguments(parser, tokens=TOKENS, rows=16, lr=1e-5, warmup=50, needles=0.0)
    parser.set_defaults(clip=1.0)
    group = parser.add_argument_group("what is trained [our decision]")
    group.add_argument("--distill-weight", type=float, help=f"of the loss that poolers learn by; {DISTILL_WEIGHT}")
    group.add_argument("--freeze-poolers", action="store_true", help="train all else by the language-model loss")
    group.add_argument("--lora", type=int, metavar="RANK", help="train LoRA adapters alone, merged at the end")
    group.add_argument("--pooler-lr", type=float, default=1e-3, help="learning rate of the poolers")
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument(
        "--no-checkpointing", action="store_true", help="keep activations instead of computing them twice"
    )
    distill.add_distillation_arguments(parser)
    group = parser.add_argument_group("closing distillation of the poolers, the rest frozen [our decision]")
    group.add_argument("--closing-steps", type=int, default=0, help="optimizer steps; 0 = leave it to distill.py")
    group.add_argument("--closing-lr", type=float, help=f"learning rate; {CLOSING_LR:g}")
    options = parser.parse_args(arguments)
    training.check_arguments(parser, options)
    distill.check_distillation_arguments(parser, options)
    training.check_positive(parser, options, "distill_weight", "pooler_lr", "closing_lr")
    if options.distill_weight is not None and (options.freeze_poolers or options.lora):
        parser.error("--distill-weight moves poolers, --freeze-poolers and --lora freeze them: leave one of them out")
    if options.distill_weight is None:
        options.distill_weight = 0.0 if options.freeze_poolers or options.lora else DISTILL_WEIGHT
    if options.lora is not None and options.lora < 1:
        parser.error(f"--lora {options.lora}: must be at least 1")
    if options.lora and importlib.util.find_spec("peft") is None:
        parser.error("--lora: the package peft is not installed; pip install peft")
    for name in ("closing_steps", "weight_decay"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 0")
    if not options.closing_steps and (options.long_rows or options.closing_lr):
        parser.error("--long-rows and --closing-lr are for the closing distillation: add --closing-steps")
    options.closing_lr = options.closing_lr or CLOSING_LR
    return options


def load_model(options: argparse.Namespace) -> torch.nn.Module:
    """The model with gradients for what is trained, which is float32."""
    frozen_in = torch.bfloat16 if options.lora and options.precision == "bf16" else torch.float32
    model = training.load(RecSAQwen3ForCausalLM, options.model, dtype=frozen_in)
    model.config.recsa_distill_weight = options.distill_weight
    model.config.recsa_distill_queries = options.queries
    model.config.recsa_distill_samples = options.samples
    model.config.use_cache = False
    if not options.no_checkpointing:
        # renamed in transformers 5.24
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if options.lora:
        return add_adapters(model, options.lora)
    if options.freeze_poolers:
        for module in model.modules():
            if isinstance(module, RecSAPooler):
                module.requires_grad_(False)
    return model


def add_adapters(model: PreTrainedModel, rank: int) -> Any:
    """LoRA on every linear layer but the head; poolers are no linear layers and stay frozen."""
    import peft

    options = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=rank, lora_alpha=2 * rank)
    return peft.get_peft_model(model, options)


def make_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Three groups: matrices with weight decay, other parameters without, poolers without and at their own rate."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    poolers = [parameter for name, parameter in named if ".pooler." in name]
    matrices = [parameter for name, parameter in named if ".pooler." not in name and parameter.dim() > 1]
    rest = [parameter for name, parameter in named if ".pooler." not in name and parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": rest, "weight_decay": 0.0},
        {"params": poolers, "weight_decay": 0.0, "lr": options.pooler_lr},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=(0.9, 0.95))


def finetune(options: argparse.Namespace, accelerator: Accelerator, target: Path) -> None:
    """Fine-tunes `options.model` and writes the model to `target`."""
    config = training.read_config(options.model)
    if not options.freeze_poolers and not options.lora or options.closing_steps:
        distill.check_model(options, config)
    tokenizer = training.load(AutoTokenizer, options.model)
    # logits of long rows would not fit, and only poolers need them
    data = training.StepData(options, tokenizer, accelerator, long_rows=False)
    set_seed(options.seed)  # of new adapters, alike in all processes
    model = load_model(options)
    optimizer = make_optimizer(model, options)
    bf16 = options.precision == "bf16"
    run = training.Run("finetune", options, accelerator, model, optimizer, data, with_labels=True, autocast=bf16)
    trained = whole_tensors(run.train())
    accelerator.free_memory()
    if accelerator.is_main_process:
        target.mkdir(parents=True, exist_ok=True)
        write_result(
            options.model, trained, target, partial(add_adapters, rank=options.lora) if options.lora else None
        )
        print(f"written to {target}", flush=True)
    accelerator.wait_for_everyone()


def closing_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options of the closing distillation."""
    own = {"steps": options.closing_steps, "lr": options.closing_lr, "warmup": 10, "clip": None}
    own["default_needles"] = distill.NEEDLES
    return argparse.Namespace(**{**vars(options), **own})


def finetune_and_close(options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Fine-tunes `options.model`, distils its poolers, and writes the model to `options.output`."""
    closing, before = closing_options(options), options.output / BEFORE
    # a stage that is done has its config.json
    if not (before / "config.json").exists():
        distill.open_data(closing, accelerator)  # what the last stage cannot do is refused before the first
        finetune(options, accelerator, before)
    if options.lora and accelerator.is_main_process:
        shutil.copytree(before / "adapter", options.output / "adapter", dirs_exist_ok=True)
    distill.distil(closing, accelerator, "closing", before)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    accelerator = training.start(options)
    if training.is_finished(options):
        accelerator.print(f"--resume: {options.output} holds the finished model already")
    elif options.closing_steps:
        finetune_and_close(options, accelerator)
    else:
        finetune(options, accelerator, options.output)
        if accelerator.is_main_process:
            print(
                "Not finished: distil the poolers once more, or the model loses reach beyond its training length:\n"
                f"    python scripts/distill.py --model {options.output} --output {options.output}-closed "
                f"--tokens {CLOSING_TOKENS} ..."
            )
    clear(options.output, accelerator, "checkpoints/finetune", "checkpoints/closing", BEFORE)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
