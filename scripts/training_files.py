"""The files of a training run: checkpoints to resume from, the finished model folder, the log.

A checkpoint holds what is trained and the optimizer's state through torch.distributed.checkpoint (under FSDP each
process writes its shards), and of each process the state of its data and random numbers. The finished folder is the
source with what was trained put in. Nothing here knows how a step is made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoTokenizer, PreTrainedModel

from recsa_qwen3 import RecSAQwen3ForCausalLM

# one process is as good as many
warnings.filterwarnings("ignore", message="torch.distributed is disabled")
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
ROW = '{"output": '  # what each line of a log begins with


class Checkpoints:
    """The checkpoints FOLDER/step-STEP of one stage, each complete or absent.

    Args:
        settings: what a run must share with the checkpoint that it goes on with.
        keep: how many are kept, the last ones.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, settings: dict[str, Any], keep: int):
        self.folder, self.accelerator, self.keep = folder, accelerator, keep
        self.settings = json.loads(json.dumps({**settings, "processes": accelerator.num_processes}, default=str))

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
        """Called by every process after optimizer step number `step`."""
        part = self.folder / "unfinished"
        if self.accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        dcp.save(tensors(model, optimizer), checkpoint_id=part)
        own = {"data": data.state_dict(), "random": random.getstate(), "torch": torch.get_rng_state()}
        if self.accelerator.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state()
        torch.save(own, part / f"process-{self.accelerator.process_index}.pt")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (part / "run.json").write_text(json.dumps({"step": step, "settings": self.settings}, indent=2) + "\n")
            part.rename(self.folder / f"step-{step:07d}")
            for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> int:
        """Brings everything to where the last checkpoint was; returns its step, 0 where there is none.

        Raises:
            SystemExit: the checkpoint is of other settings, which are named, or not whole.
        """
        found = sorted(self.folder.glob("step-*"))
        if not found:
            return 0
        try:
            run = json.loads((found[-1] / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"--resume: {found[-1]} is not whole ({error}); remove it to go on without") from error
        was, now = run["settings"], self.settings
        other = [name for name in sorted(was.keys() | now) if was.get(name) != now.get(name)]
        if other:
            told = "; ".join(f"{name} was {was.get(name)!r}, is {now.get(name)!r}" for name in other)
            raise SystemExit(f"--resume: {found[-1]} is of a run with other settings: {told}")
        state = tensors(model, optimizer)
        dcp.load(state, checkpoint_id=found[-1])
        set_model_state_dict(model, state["model"], options=TRAINED)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=TRAINED)
        own = torch.load(found[-1] / f"process-{self.accelerator.process_index}.pt")
        data.load_state_dict(own["data"])
        random.setstate(own["random"])
        torch.set_rng_state(own["torch"])
        if "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"])
        return run["step"]


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is trained and the optimizer's state, by name, each tensor as this process holds it."""
    return {
        "model": get_model_state_dict(model, options=TRAINED),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=TRAINED),
    }


def whole_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """What is trained, whole, in the memory of the first process; nothing on the others. Called by all."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
    return get_model_state_dict(model, options=options)


def write_result(
    source: str,
    trained: dict[str, Any],
    target: Path,
    adapt: Callable[[PreTrainedModel], Any] | None = None,
) -> None:
    """Writes the checkpoint `source` with `trained` put in to `target`: weights, code, tokenizer; config.json last.

    Args:
        source: folder or Hub id; its dtype and configuration are kept.
        trained: from `whole_tensors`.
        target: a folder, which may hold the log and checkpoints of the run.
        adapt: puts PEFT's adapters around the source; they are merged in, and kept apart in `target`/adapter.

    Raises:
        RuntimeError: a trained tensor that the source does not have.
    """
    model = RecSAQwen3ForCausalLM.from_pretrained(source, dtype="auto")
    stored = model.dtype
    # a merge in float32 rounds once
    result = model if adapt is None else adapt(model.float())
    unknown = result.load_state_dict(trained, strict=False).unexpected_keys
    if unknown:
        raise RuntimeError(f"trained tensors that {source} does not have: {', '.join(unknown)}")
    part = target / "unfinished"
    shutil.rmtree(part, ignore_errors=True)
    if adapt is not None:
        result.save_pretrained(part / "adapter")
        model = result.merge_and_unload().to(stored)
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(source).save_pretrained(part)
    for path in part.rglob("*.safetensors"):  # safetensors writes for the owner alone
        path.chmod((part / "config.json").stat().st_mode)
    for pattern in ("LICENSE*", "NOTICE*"):
        for path in Path(source).glob(pattern):
            shutil.copyfile(path, part / path.name)
    # where there is a config.json, everything is there
    for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):
        if path.is_dir():  # a run that was killed here may have left its own
            shutil.rmtree(target / path.name, ignore_errors=True)
        path.rename(target / path.name)
    part.rmdir()


def clear(output: Path, accelerator: Accelerator, *names: str) -> None:
    """Removes the folders `names` of a run whose result is in `output`. Called by every process."""
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for name in names:
            shutil.rmtree(output / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not there, or not empty
            (output / "checkpoints").rmdir()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, none where there is no file; half a line at the end, of a run that was killed, is left out.

    Raises:
        ValueError: the file holds something else.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    if lines and lines[-1].startswith(ROW) and not lines[-1].endswith("\n"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= {"output", "stage", "step"}:
            raise ValueError(f"line {number} is {line[:40]!r}")
        rows.append(row)
    return rows


class Log:
    """A stage's figures on the console, as JSON lines and for TensorBoard.

    Args:
        done: steps that the stage has behind it; where it is resumed, the file's rows of later ones are dropped.
            Those of other outputs stay: runs may share a file. All rows of OUTPUT/log.jsonl are of one.
        active: whether this process is the one that logs.
    """

    def __init__(self, options: argparse.Namespace, stage: str, done: int, active: bool):
        self.active, self.path, self.board = active, options.log, None
        self.owner = {"output": str(options.output), "stage": stage}
        if not active:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_log(self.path)
        if options.resume:
            shared = self.path.parent != options.output
            rows = [
                row
                for row in rows
                if row["stage"] != stage or row["step"] <= done or shared and row["output"] != self.owner["output"]
            ]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(options.tensorboard / stage, purge_step=done + 1)

    def say(self, text: str) -> None:
        if self.active:
            print(text, flush=True)

    def write(self, row: dict[str, float]) -> None:
        """Takes one step's figures; one of them is `step`."""
        if not self.active:
            return
        self.say(f"{self.owner['stage']}: " + ", ".join(f"{name} {value:.6g}" for name, value in row.items()))
        with self.path.open("a") as file:
            file.write(json.dumps({**self.owner, **row}) + "\n")
        if self.board is not None:
            for name in row.keys() - {"step"}:
                self.board.add_scalar(name, row[name], int(row["step"]))

    def close(self) -> None:
        if self.active and self.board is not None:
            self.board.close()
