"""What `distill.py` and `finetune.py` share: options, the processes, the data of a step, the loop.

An optimizer step takes the mean over `--rows` rows, on however many processes, so that a recipe is the same on one and
on many. What is trained is kept in float32 with its optimizer's state, whatever the forward computes in: a step of a
small rate would be lost in bfloat16. Which parameters that are, the commands decide; files are `training_files.py`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from transformers import AutoConfig, PreTrainedTokenizerBase

import document_stream
from training_data import TrainingBatches, add_data_arguments, data_options

try:
    from recsa_qwen3 import Recall, RecSAQwen3Config, TreeGeometry, needle_recall
except ImportError as error:
    raise SystemExit(f"recsa_qwen3 cannot be imported ({error}); run: pip install -e . in the repository") from error

from training_files import Checkpoints, Log, read_log

LENGTH = 32_768  # [paper]
# What may differ between a run and the one that goes on with it.
FREE_OPTIONS = {"resume", "output", "save_every", "keep", "log", "log_every", "recall_every", "tensorboard", "cpu"}
RECALL_QUERIES = 64  # of a row, at most


# ---------------------------------------------------------------------------------------------------------------------
# Options, and what is refused before a model is loaded
# ---------------------------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Names a default where there is one and the text does not; leaves the description as it is."""

    def _get_help_string(self, action):
        named = action.default in (None, False, []) or "default" in (action.help or "")
        return action.help if named else super()._get_help_string(action)


def add_training_arguments(
    parser: argparse.ArgumentParser, tokens: int, rows: int, lr: float, warmup: int, needles: float
) -> None:
    """The options of both commands; the arguments are the command's own defaults."""
    parser.add_argument("--model", required=True, help="folder or Hub id of a RecSA-Qwen3 checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    add_data_arguments(parser, needles)
    group = parser.add_argument_group("how long [length and tokens in all: paper; the rest: our decision]")
    group.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    group.add_argument("--tokens", type=int, default=tokens, help="tokens to train on")
    group.add_argument("--steps", type=int, help="optimizer steps, instead of --tokens")
    group.add_argument("--rows", type=int, default=rows, help="rows of an optimizer step, over all processes")
    group.add_argument("--batch-size", type=int, default=1, help="rows of one forward of one process")
    group = parser.add_argument_group("optimizer [our decision]")
    group.add_argument("--lr", type=float, default=lr, help="learning rate")
    group.add_argument("--warmup", type=int, default=warmup, help="steps in which the rate rises to --lr")
    group.add_argument("--decay", type=float, default=0.5, help="share of the steps, the last ones, in which it falls")
    group.add_argument("--clip", type=float, help="largest norm of the gradient")
    group.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="bf16 on a GPU and fp32 elsewhere if left out; accelerate's own setting is not heeded",
    )
    group.add_argument("--seed", type=int, default=0, help="of the queries, dropout and adapters")
    group = parser.add_argument_group("checkpoints and logs")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --output, if any; nothing is done where the result is there",
    )
    group.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    group.add_argument("--keep", type=int, default=1, help="checkpoints to keep until the result is there")
    group.add_argument("--log", type=Path, help="JSON lines, appended; OUTPUT/log.jsonl if left out")
    group.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="steps between lines")
    group.add_argument(
        "--recall-every",
        type=int,
        default=50,
        metavar="STEPS",
        help="steps between figures of needle recall; 0 = none",
    )
    group.add_argument("--tensorboard", type=Path, metavar="DIR", help="also log there; needs the package tensorboard")
    group.add_argument("--cpu", action="store_true", help="do not use a GPU")


def check_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses impossible values by the option's name, and fills in `--precision` and `--log`."""
    for name in ("length", "tokens", "steps", "rows", "batch_size", "save_every", "keep", "log_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    check_positive(parser, options, "lr", "clip")
    if min(options.warmup, options.seed, options.recall_every) < 0:
        parser.error("--warmup, --seed and --recall-every must be at least 0")
    if not 0 <= options.decay <= 1:
        parser.error(f"--decay {options.decay}: must be from 0 to 1")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard: the package is not installed; pip install tensorboard, or leave the option out")
    if options.precision is None:
        options.precision = "bf16" if torch.cuda.is_available() and not options.cpu else "fp32"
    options.log = options.log or options.output / "log.jsonl"
    for name in ("output", "log", "tensorboard"):
        path = getattr(options, name)
        folders = [] if path is None else path.parents if name == "log" else [path, *path.parents]
        for folder in folders:
            if folder.exists() and not folder.is_dir():
                parser.error(f"--{name} {path}: {folder} is a file, not a folder")
    try:
        read_log(options.log)
    except (ValueError, OSError) as error:
        parser.error(f"--log {options.log}: is no log of training ({error}); choose another file")
    is_model = options.output.resolve() == Path(options.model).resolve()
    if is_finished(options) and (is_model or not options.resume):
        parser.error(f"--output {options.output}: holds a model already; choose another folder")
    if not options.resume and options.output.exists() and any(options.output.iterdir()):
        parser.error(f"--output {options.output}: is not empty; add --resume to go on, or choose another folder")


def is_finished(options: argparse.Namespace) -> bool:
    """Whether the result is there."""
    return (options.output / "config.json").exists()


def check_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Refuses what is given of the options `names` and not a finite number above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: must be above 0")


def load(kind: Any, source: str, **options: Any) -> Any:
    """`kind.from_pretrained(source)`; exits with `--model` where that cannot be."""
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {source}: {error}") from error


def read_config(source: str) -> RecSAQwen3Config:
    """The configuration of `--model`; exits with the option's name where it is not a RecSA-Qwen3 that can learn."""
    config = load(AutoConfig, source)
    if config.model_type == "qwen3":
        raise SystemExit(
            f"--model {source}: is a stock Qwen3 checkpoint, which has no poolers; convert it first:\n"
            f"    python scripts/convert_qwen3.py --source {source} --output {Path(source).name}-recsa"
        )
    if config.model_type != "recsa_qwen3":
        raise SystemExit(f"--model {source}: is a {config.model_type!r} checkpoint; RecSA-Qwen3 is needed")
    return config


def start(options: argparse.Namespace) -> Accelerator:
    """The processes as `accelerate launch` (or torchrun, or plain Python) started them; one process else."""
    # under FSDP a layer is gathered at a time; accelerate's own default is the whole model
    os.environ.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    # --precision says what is computed in, whatever the launcher's configuration holds
    accelerator = Accelerator(cpu=options.cpu, mixed_precision="no")
    document_stream.logger.disabled = not accelerator.is_main_process
    kinds = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP)
    if accelerator.distributed_type not in kinds:
        raise SystemExit(f"{accelerator.distributed_type}: not supported; launch with DDP or FSDP 2")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise SystemExit("FSDP 1: not supported; launch with --fsdp_version 2")
    if options.rows % (options.batch_size * accelerator.num_processes):
        raise SystemExit(
            f"--rows {options.rows}: must be a multiple of --batch-size {options.batch_size} times "
            f"{accelerator.num_processes} processes"
        )
    return accelerator


# ---------------------------------------------------------------------------------------------------------------------
# What a step reads
# ---------------------------------------------------------------------------------------------------------------------


class StepData:
    """The forwards of each optimizer step for one process.

    Args:
        long_rows: whether the steps that --long-rows asks for are read as well; each has about the tokens of the
            others, one row a process at least, and one row a forward at most.

    Raises:
        SystemExit: the data cannot be read or do not suffice; the message names the option.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        long_rows: bool = True,
    ):
        rank, self.world = accelerator.process_index, accelerator.num_processes
        self.batch_size, self.tokens = options.batch_size, 0
        self.last: dict[str, torch.Tensor] = {}  # what the last step read
        rows = options.rows // self.world
        try:
            chosen = data_options(options, options.length)
            if not long_rows:
                chosen = replace(chosen, long_rows=())
            self.batches = TrainingBatches(chosen, tokenizer, rows, rank, self.world)
        except (ValueError, OSError, ImportError) as error:
            raise SystemExit(str(error)) from error
        self.length, self.long_rows = chosen.length, chosen.long_rows
        long = sum(share * max(rows * chosen.length // n, 1) * n for n, share in chosen.long_rows)
        ordinary = (1 - sum(share for _, share in chosen.long_rows)) * rows * chosen.length
        self.tokens_a_step = self.world * (ordinary + long)

    def steps_for(self, tokens: int) -> int:
        """Steps that read about `tokens` tokens over all processes, rounded up."""
        return math.ceil(tokens / self.tokens_a_step)

    def next_step(self) -> list[dict[str, torch.Tensor]]:
        """What this process's forwards of the next step read, each `[rows, length]` by forward's argument names."""
        batch = next(self.batches)
        rows, length = batch["input_ids"].shape
        self.tokens += self.world * rows * length
        self.last = batch
        parts = {name: tensor.split(self.batch_size if length == self.length else 1) for name, tensor in batch.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        try:
            self.batches.load_state_dict(state["batches"])
        except ValueError as error:
            raise SystemExit(f"--resume: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------


class Run:
    """One stage of training: from its last checkpoint, if any, to its last step.

    Args:
        name: of the stage; its checkpoints lie in OUTPUT/checkpoints/NAME.
        model: a RecSAQwen3ForCausalLM, or PEFT's around one; what needs gradients is trained.
        optimizer: over exactly those parameters.
        data: what steps read.
        with_labels: whether the language-model loss is wanted; without it no logits of whole rows are made.
        autocast: whether forwards compute in bfloat16 with parameters in float32.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: StepData,
        with_labels: bool,
        autocast: bool = False,
    ):
        self.name, self.options, self.accelerator, self.data = name, options, accelerator, data
        self.with_labels, self.autocast = with_labels, autocast
        self.steps = options.steps or data.steps_for(options.tokens)
        settings = {key: value for key, value in vars(options).items() if key not in FREE_OPTIONS}
        self.geometry = TreeGeometry.from_config(model.config)
        self.checkpoints = Checkpoints(options.output / "checkpoints" / name, accelerator, settings, options.keep)
        # set anew in every step, so that the schedule has no state
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.model, prepared = accelerator.prepare(model.train(), optimizer)
        self.optimizer = prepared.optimizer

    def train(self) -> torch.nn.Module:
        """Runs the steps that are left; returns the model as accelerate prepared it.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        options, state = self.options, (self.model, self.optimizer, self.data)
        set_seed(options.seed, device_specific=True)
        done = self.checkpoints.load(*state) if options.resume else 0
        log = Log(options, self.name, done, self.accelerator.is_main_process)
        log.say(f"{self.name}: {self.steps} steps, {done} of them done; {self.accelerator.num_processes} process(es)")
        longest = max(self.options.length, *(length for length, _ in self.data.long_rows), 1)
        if options.recall_every and not self.geometry.depth(longest - 1):
            log.say(
                f"{self.name}: no needle recall, since no row is longer than M = {self.geometry.top_capacity} tokens, "
                "up to which attention is dense"
            )
        began = time.perf_counter()
        for step in range(done + 1, self.steps + 1):
            figures = self.step(step)
            if not math.isfinite(figures["loss"]):
                raise FloatingPointError(f"the loss is {figures['loss']} at step {step}: lower --lr")
            measured = options.recall_every and (step % options.recall_every == 0 or step == self.steps)
            if measured:
                figures |= self.recall()
            if measured or step % options.log_every == 0 or step in (done + 1, self.steps):
                log.write({"step": step, "tokens": self.data.tokens, **figures, **self.cost(began)})
            if step % options.save_every == 0 and step < self.steps:
                self.checkpoints.save(step, *state)
        log.close()
        return self.model

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step; the figures are means over all rows and processes."""
        batches = [self.to_device(batch) for batch in self.data.next_step()]
        forward: dict[str, Any] = {"logits_to_keep": 1}
        if self.with_labels:
            # a label weighs the same in whichever row it lies: forwards divide by the mean number of labels
            labels = torch.stack([batch["labels"][:, 1:].ne(-100).sum() for batch in batches])
            mean = self.accelerator.reduce(labels.float().mean(), "mean")
            forward = {"num_items_in_batch": mean.clamp(min=1)}
        sums = torch.zeros(2, device=self.accelerator.device)
        for number, batch in enumerate(batches, 1):
            with self.waiting(number < len(batches)):
                with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.autocast):
                    output = self.model(**batch, **forward)
                (output.loss / len(batches)).backward()
            distill = output.loss.new_zeros(()) if output.distill_loss is None else output.distill_loss
            sums += torch.stack((output.loss.detach().float(), distill.detach().float())) / len(batches)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.options.clip or math.inf)
        factor = schedule(step, self.steps, self.options.warmup, self.options.decay)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, distill_loss = self.accelerator.reduce(sums, "mean").tolist()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        figures = {"loss": loss, "distill_loss": distill_loss, "grad_norm": float(norm)}
        return {**figures, "lr": self.optimizer.param_groups[0]["lr"]}

    def recall(self) -> dict[str, float]:
        """`needle_recall` of the model as it is now in a row of the last step, over all layers and processes: `reach`,
        and `chosen_L` for each level L that walks choose at. Empty where no query walks or none looks at one token."""
        levels = self.geometry.depth(self.data.last["input_ids"].shape[1] - 1)
        if not levels:
            return {}
        ids, positions = recall_queries(self.data.last, self.geometry.top_capacity)
        device = self.accelerator.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            found = sum(needle_recall(self.model.eval(), ids.to(device), positions), Recall())
        self.model.train()
        counts = [[found.pairs, found.reached], *([found.asked[n], found.chosen[n]] for n in range(1, levels + 1))]
        sums = self.accelerator.reduce(torch.tensor(counts, device=device), "sum").tolist()
        names = ["reach", *(f"chosen_{level}" for level in range(1, levels + 1))]
        return {name: right / asked for name, (asked, right) in zip(names, sums, strict=True) if asked}

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.to(self.accelerator.device)
            for name, tensor in batch.items()
            if self.with_labels or name != "labels"
        }

    def waiting(self, more: bool) -> contextlib.AbstractContextManager:
        """DDP adds gradients up over processes once a step; under FSDP whole gradients would take too much memory."""
        if more and self.accelerator.distributed_type != DistributedType.FSDP:
            return self.accelerator.no_sync(self.model)
        return contextlib.nullcontext()

    def cost(self, began: float) -> dict[str, float]:
        """Seconds of this process since `began`, and the most GPU memory that it took, in GiB."""
        cost = {"seconds": round(time.perf_counter() - began, 2)}
        if self.accelerator.device.type == "cuda":
            cost["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return cost


def recall_queries(batch: dict[str, torch.Tensor], least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest document of the row with the most answers, `[1, n]`, and queries in it from position `least` on.

    Queries are those that predict an answer, or any where none does: at most `RECALL_QUERIES`, evenly spread,
    `[1, m]`; a single -1 where there is none.
    """
    row = int(batch["answer_mask"].sum(1).argmax())
    one = {name: tensor[row] for name, tensor in batch.items()}
    end = int(one["attention_mask"].sum()) if "attention_mask" in one else len(one["input_ids"])
    borders = [*one["position_ids"][:end].eq(0).nonzero()[:, 0].tolist(), end]
    begin, end = max(itertools.pairwise(borders), key=lambda pair: pair[1] - pair[0])
    answers = one["answer_mask"][begin + 1 : end].nonzero()[:, 0]
    walking = answers[answers >= least]
    if not len(walking):
        walking = torch.arange(least, end - begin)
    if not len(walking):
        walking = torch.tensor([-1])
    spread = torch.linspace(0, len(walking) - 1, min(RECALL_QUERIES, len(walking))).long()
    return one["input_ids"][None, begin:end], walking[None, spread]


def schedule(step: int, steps: int, warmup: int, decay: float) -> float:
    """The factor on the learning rate in step number `step`, from 1 on: linear up, flat, linear down to almost 0."""
    rise = min(step / warmup, 1.0) if warmup else 1.0
    fall = min((steps - step + 1) / (decay * steps), 1.0) if decay else 1.0
    return rise * fall
