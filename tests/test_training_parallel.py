"""Training by two processes over gloo, DDP and FSDP 2 by accelerate, and by `transformers.Trainer`.

The file is also the script that torchrun starts in each process.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import training
from recsa_qwen3 import RecSAPooler, RecSAQwen3ForCausalLM, RecSAQwen3Model
from training_files import whole_tensors

if __name__ != "__main__":
    from transformers import Trainer, TrainingArguments

    import finetune
    from conftest import ROOT, random_ids, tiny_model
    from fresh import tiny_tokenizer

PROCESSES, ROWS, STEPS = 2, 4, 3
WAYS = ("distill", "mixed", "finetune")  # mixed: float32 poolers in a bfloat16 model
KINDS = {"ddp": "MULTI_CPU", "fsdp": "FSDP"}
LENGTH = 70  # beyond 4 M

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


class FixedRows:
    """The data of a step: this process's part of the same rows in every step, one a forward."""

    def __init__(self, rows: dict[str, torch.Tensor], rank: int, world: int):
        self.parts = [{k: v[i : i + 1] for k, v in rows.items()} for i in range(rank, ROWS, world)]
        self.tokens, self.long_rows = 0, ()

    def next_step(self):
        self.tokens += ROWS * LENGTH
        self.last = self.parts[0]
        return self.parts

    def state_dict(self):
        return {"tokens": self.tokens}

    def load_state_dict(self, state):
        self.tokens = state["tokens"]


def prepare(folder: Path, way: str) -> RecSAQwen3ForCausalLM:
    """The model with gradients for what is trained."""
    dtype = torch.bfloat16 if way == "mixed" else torch.float64
    model = RecSAQwen3ForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    if way != "finetune":
        model.requires_grad_(False)
        for module in model.modules():
            if isinstance(module, RecSAPooler):
                module.requires_grad_().to(torch.float32 if way == "mixed" else dtype)
    # every query that can teach: nothing is drawn at random
    model.config.recsa_distill_weight, model.config.recsa_distill_queries = 0.3, "uniform"
    model.config.recsa_distill_samples = 10_000
    return model


def train(folder: Path, way: str, accelerator, resume: bool = False) -> tuple[dict, training.Run]:
    """Three steps of SGD, or those after the checkpoint: what was trained, and the run."""
    model = prepare(folder, way)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    world = accelerator.num_processes
    options = SimpleNamespace(
        output=folder / f"{way}-{accelerator.distributed_type.value}", steps=STEPS, clip=None, warmup=0,
        decay=0.0, seed=0, keep=1, resume=resume, save_every=2, log_every=1, tensorboard=None, log=folder / "log",
        recall_every=2, length=LENGTH,
    )  # fmt: skip
    data = FixedRows(torch.load(folder / "rows.pt"), accelerator.process_index, world)
    run = training.Run(way, options, accelerator, model, optimizer, data, with_labels=way == "finetune")
    return whole_tensors(run.train()), run


def run_in_one_process_of_many(folder: Path, kind: str) -> None:
    """What torchrun starts: trains both ways, each also from its checkpoint on, and stores what comes out."""
    torch.set_num_threads(1)
    accelerator = training.start(SimpleNamespace(cpu=True, rows=ROWS, batch_size=1))
    assert accelerator.num_processes == PROCESSES
    if kind == "fsdp":
        # accelerate switches it on for GPUs alone
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        assert accelerator.is_fsdp2
    for way in WAYS:
        for resume in (False, True):
            trained, run = train(folder, way, accelerator, resume)
            kinds = {type(p).__name__ for p in run.model.parameters() if p.requires_grad}
            assert kinds == ({"DTensor"} if kind == "fsdp" else {"Parameter"})
            if accelerator.is_main_process:
                torch.save(trained, folder / f"{kind}-{way}-{resume}.pt")
            accelerator.free_memory()
            accelerator.wait_for_everyone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model and rows of two documents each, whose labels differ in number."""
    folder = tmp_path_factory.mktemp("parallel")
    tiny_model().double().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    ids = random_ids(ROWS, LENGTH)
    labels = ids.masked_fill(torch.arange(LENGTH) < 7 * torch.arange(ROWS)[:, None], -100)
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 20))).expand(ROWS, -1)
    answers = torch.rand(ids.shape) < 0.3
    rows = {"input_ids": ids, "labels": labels, "position_ids": positions, "answer_mask": answers}
    torch.save(rows, folder / "rows.pt")
    return folder


def launch(*command: object) -> str:
    """Runs a Python file with its arguments in two processes; returns what they print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={PROCESSES}"]
    start += ["--master_addr=127.0.0.1", f"--master_port={port}", *map(str, command)]
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, dict]:
    """What one process trains in each way."""
    return {way: train(folder, way, Accelerator(cpu=True))[0] for way in WAYS}


@pytest.mark.parametrize("way", ["distill", "finetune"])
def test_a_step_is_the_mean_over_its_rows(way, folder, alone):
    """By hand: distillation over the joined batch, fine-tuning with each row by its number of labels."""
    rows = torch.load(folder / "rows.pt")
    labels = rows.pop("labels")
    model = prepare(folder, way).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if way == "distill":
            model(**rows).loss.backward()
        else:
            counts = (labels[:, 1:] != -100).sum(1)
            for i, share in enumerate(counts / counts.sum()):
                row = {name: tensor[i : i + 1] for name, tensor in rows.items()}
                (share * model(**row, labels=labels[i : i + 1]).loss).backward()
        optimizer.step()
    found = model.state_dict()
    for name, tensor in alone[way].items():
        # the shares of a row's labels are float32
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(kind, folder, alone):
    """TR-04: the weights of one process that has all rows, no unused parameters; sharded checkpoints reload equal."""
    launch(__file__, folder, kind)
    for way in WAYS:
        expected = alone[way]
        before = RecSAQwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).state_dict()
        poolers = {name for name in before if ".pooler." in name}
        assert expected.keys() == (before.keys() if way == "finetune" else poolers)
        whole, resumed = (torch.load(folder / f"{kind}-{way}-{resume}.pt") for resume in (False, True))
        assert whole.keys() == resumed.keys() == expected.keys()
        for name, tensor in expected.items():
            assert not torch.equal(tensor, before[name])
            assert whole[name].dtype == tensor.dtype == (torch.float32 if way == "mixed" else torch.float64)
            torch.testing.assert_close(whole[name], tensor, rtol=1e-5, atol=1e-7)
            assert torch.equal(whole[name], resumed[name])
        (checkpoint,) = (folder / f"{way}-{KINDS[kind]}").rglob("step-*")
        assert len(list(checkpoint.glob("*.distcp"))) == PROCESSES


def test_the_command_on_two_processes(folder, tmp_path):
    """The losses of one process, step for step: a step reads the same rows; the result loads and generates."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in random_ids(3000).clamp(min=3).tolist()))
    command = [ROOT / "scripts" / "finetune.py", "--model", folder / "model", "--data", text, "--cpu"]
    command += ["--length", LENGTH, "--rows", 4, "--steps", 3, "--closing-steps", 2, "--log-every", 1]
    command += ["--queries", "uniform", "--samples", 10_000, "--output"]
    assert f"written to {tmp_path / 'two'}" in launch(*command, tmp_path / "two")
    finetune.main([*map(str, command[1:]), str(tmp_path / "one")])
    logs = [[json.loads(line) for line in (tmp_path / n / "log.jsonl").open()] for n in ("one", "two")]
    for one, two in zip(*logs, strict=True):
        assert (one["stage"], one["step"], one["tokens"]) == (two["stage"], two["step"], two["tokens"])
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    model = RecSAQwen3ForCausalLM.from_pretrained(tmp_path / "two", dtype="auto")
    assert model.dtype == torch.float64  # as the source
    assert model.generate(random_ids(1, LENGTH), max_new_tokens=2).shape == (1, LENGTH + 2)


# ---- trainers of others ---------------------------------------------------------------------------------------------


def teaching_model() -> RecSAQwen3ForCausalLM:
    """A model that adds the distillation loss in training, at every query that can teach."""
    return tiny_model(recsa_distill_weight=0.3, recsa_distill_queries="uniform", recsa_distill_samples=10_000)


def moved(model, before: dict[str, torch.Tensor]) -> bool:
    return all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_takes_the_loss_and_the_answer_mask(accumulation, tmp_path, monkeypatch):
    """Without special code: the column reaches forward, the loss is that of a forward by hand, all weights move."""
    data = []
    for row in random_ids(4, LENGTH):
        data.append({"input_ids": row, "labels": row, "answer_mask": torch.arange(LENGTH) > 60, "unknown": 1})
    model = teaching_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = torch.stack([row["input_ids"] for row in data])
    expected = model.train()(rows, labels=rows).loss.item()
    masks, sample = [], RecSAQwen3Model._sample_queries

    def spy(module, rows, answer_mask, *rest):
        masks.append(answer_mask)
        return sample(module, rows, answer_mask, *rest)

    monkeypatch.setattr(RecSAQwen3Model, "_sample_queries", spy)
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=data)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert len(masks) == accumulation and all(mask.sum() == 4 // accumulation * 9 for mask in masks)
    assert moved(model, before)
    assert model.eval()(rows, labels=rows).distill_loss is None


@pytest.mark.parametrize("packing", [False, True])
def test_sft_trainer(packing, tmp_path):
    """TRL, without special code, packed or padded."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [" ".join(f"w{i}" for i in random_ids(n).clamp(min=3).tolist()) for n in (20, 45, LENGTH, 30, 12, 64)]
    settings = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=LENGTH,
        packing=packing,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    model = teaching_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tiny_tokenizer())
    trainer.train()
    assert all(0 < row["loss"] < 20 for row in trainer.state.log_history if "loss" in row)
    assert moved(model, before)


if __name__ == "__main__":
    run_in_one_process_of_many(Path(sys.argv[1]), sys.argv[2])
