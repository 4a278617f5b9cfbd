"""Training: which parameters get a gradient, gradient checkpointing, autocast, DDP, the Trainer.

Gradients of the operator alone are judged in test_attention.py, adapters in test_peft.py.
"""

import logging
import os
import time
from datetime import timedelta

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import oracle
from conftest import DENSE, RELATIVE_RMS, random_ids, relative_rms, tiny_model
from recsa_qwen3 import (
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    RecSAQwen3ForQuestionAnswering,
    RecSAQwen3ForSequenceClassification,
    RecSAQwen3ForTokenClassification,
    modeling_recsa_qwen3,
    recsa_attention,
    recsa_trace,
)
from test_attention import make_case, selections_of

torch.set_num_threads(1)

# Below M, at M + 2 (the first length at which a query that reads nodes also has a label), and at 4M and more.
LENGTHS = (DENSE - 3, DENSE + 2, 4 * DENSE + 6)


# ---- helpers --------------------------------------------------------------------------------------------------------


def enable_checkpointing(model, reentrant: bool) -> None:
    """Under the name of the installed transformers (renamed in 5.24)."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


def train(model, batches, **forward) -> list[float]:
    """The losses of one AdamW step per batch of ids."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for ids in batches:
        loss = model(ids, labels=ids, **forward).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients(model, ids, labels=None, **forward) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(ids, labels=ids if labels is None else labels, **forward).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_sparse(model, length: int) -> None:
    """Something was left out exactly where the last forward was longer than M."""
    assert model.last_backend == ("dense+reference" if length > DENSE else "dense")


# ---- TR-01: gradient checkpointing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [None, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_loss(reentrant, use_cache, caplog, recwarn):
    """TR-01: 5 steps below and above M, float64 so that no near-tie is decided by rounding; at most one warning."""
    batches = [random_ids(2, length) for length in (*LENGTHS, LENGTHS[-1], LENGTHS[0])]
    forward = {} if use_cache is None else {"use_cache": use_cache}
    expected = train(tiny_model().double(), batches, **forward)
    model = tiny_model().double()
    recwarn.clear()
    with caplog.at_level(logging.WARNING):
        enable_checkpointing(model, reentrant)
        losses = train(model, batches, **forward)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[0] != losses[-1]
    assert model.config.use_cache is True and model.generation_config.use_cache in (None, True)
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    assert len(said) <= 1, said
    # the model generates with a cache afterwards, in training mode or not
    for mode in (model.train(), model.eval()):
        with torch.no_grad():
            assert mode(batches[-1], use_cache=True)[1].get_seq_length() == LENGTHS[0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_checkpointing_changes_no_gradient(reentrant, length):
    """TR-01: every parameter's, dropout of attention weights included."""
    ids = random_ids(2, length)
    results = []
    for checkpointing in (False, True):
        model = tiny_model(attention_dropout=0.2).double().train()
        if checkpointing:
            enable_checkpointing(model, reentrant)
        torch.manual_seed(3)
        results.append(gradients(model, ids))
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-9, atol=1e-12)
    assert_sparse(model, length)


# ---- TR-04: which parameters get which gradient ---------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_gradient(length, tied):
    """TR-04: none is None; exactly the poolers' are zero at T <= M, where no node is read, and none is beyond."""
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True).train()
    found = gradients(model, random_ids(2, length))
    assert_sparse(model, length)
    assert [name for name, gradient in found.items() if gradient is None] == []
    zero = {name for name, gradient in found.items() if not gradient.any()}
    poolers = {name for name in found if ".pooler." in name}
    assert len(poolers) == 9 and zero == (poolers if length <= DENSE else set())
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_gradients_at_initialisation():
    """TR-04: poolers that are still the plain mean get a gradient too, so that training can leave that point."""
    model = tiny_model().train()
    for module in model.modules():
        if isinstance(module, RecSAPooler):
            module.reset_parameters()
    found = gradients(model, random_ids(2, LENGTHS[-1]))
    assert all(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("kept", ["query", "slot_bias", "proj"])
def test_partly_frozen_poolers(kept):
    """TR-04: with one parameter of the pooler trained alone, it has a gradient at every length, the frozen none."""
    model = tiny_model().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(f"pooler.{kept}"))
    for length in LENGTHS:
        found = gradients(model, random_ids(1, length))
        for name, gradient in found.items():
            assert (gradient is not None) == name.endswith(f"pooler.{kept}")
            assert gradient is None or bool(gradient.any()) == (length > DENSE)


def test_frozen_model_passes_gradients_to_its_inputs():
    """TR-04: soft prompts; nothing of the frozen model gets a gradient."""
    model = tiny_model().train().requires_grad_(False)
    for length in LENGTHS:
        embeds = model.get_input_embeddings()(random_ids(1, length)).requires_grad_()
        model(inputs_embeds=embeds, labels=random_ids(1, length)).loss.backward()
        assert embeds.grad.isfinite().all() and embeds.grad[0].any(-1)[: length - 1].all()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("own", "labels"),
    [
        (RecSAQwen3ForSequenceClassification, {"labels": torch.tensor([1])}),
        (RecSAQwen3ForTokenClassification, {"labels": torch.ones(1, LENGTHS[-1], dtype=torch.long)}),
        (RecSAQwen3ForQuestionAnswering, {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([40])}),
    ],
)
def test_other_heads_train(own, labels):
    """TR-04: every parameter of every head."""
    model = tiny_model(own).train()
    model(random_ids(1, LENGTHS[-1]), **labels).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("count_bias", [False, True])
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_gradients_of_the_model_equal_the_oracles(length, count_bias):
    """TR-04: every parameter's against autograd of the float64 oracle, given the selection."""
    model = tiny_model(num_hidden_layers=2, recsa_count_bias=count_bias, attention_bias=True).double().train()
    ids = random_ids(1, length)
    with recsa_trace(model) as trace:
        found = gradients(model, ids)
    selections = [selections_of(trace.forwards[0][layer].selection, 0, length) for layer in range(2)]
    assert any(selections[0][0])
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()}
    logits, _ = oracle.model_logits(state, model.config, ids[0], selections)
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    expected = dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))
    for name, gradient in expected.items():
        # the model's RMSNorm computes in float32, whatever the dtype of the model
        assert relative_rms(found[name], gradient) <= RELATIVE_RMS[torch.float32], name


# ---- losses, dropout, autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_ignored_labels(length):
    """Labels of -100 count neither in the loss nor in its gradients; a row of nothing else adds nothing."""
    model = tiny_model().double().train()
    ids = random_ids(2, length)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    labels[1] = -100
    found = gradients(model, ids, labels)
    alone = gradients(model, ids[:1], labels[:1])
    for name, gradient in alone.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_dropout(attention, length):
    """In training only, in dense and sparse queries, right in the mean."""
    model = tiny_model(attention_dropout=0.3, attn_implementation=attention, num_hidden_layers=1)
    ids = random_ids(1, length)
    attend = model.model.layers[0].self_attn
    states = model.model.layers[0].input_layernorm(model.get_input_embeddings()(ids)).detach()
    with torch.no_grad():
        still = attend(states)[0]
        assert torch.equal(attend(states)[0], still)
        model.train()
        one, other = attend(states)[0], attend(states)[0]
        for column in (0, DENSE - 4, length - 1):
            assert not torch.equal(one[:, column], other[:, column])
        many = attend(states.expand(600, -1, -1).contiguous())[0]
    deviation = (many.mean(0) - still[0]).abs() / (many.std(0) / 600**0.5 + 1e-6)
    assert deviation.mean() < 1.2  # 0.8 for a mean without bias


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_in_each_precision(dtype, autocast):
    """Float32, pure bfloat16 and both under autocast: finite loss, gradients and weights, near the float32 loss."""
    for length in LENGTHS:
        ids = random_ids(2, length)
        reference = tiny_model()(ids, labels=ids).loss.item()
        model = tiny_model().to(dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert_sparse(model, length)
        assert loss.item() == pytest.approx(reference, rel=0.05)
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_autocast_gives_queries_keys_and_values_one_dtype(monkeypatch):
    """On float32 parameters: kernels take operands of one dtype, and half the memory counts at 32K tokens."""
    seen = []

    def spy(query, levels, *args, **kwargs):
        seen.append({query.dtype, *(tensor.dtype for tensor in (*levels.keys, *levels.values))})
        return recsa_attention(query, levels, *args, **kwargs)

    monkeypatch.setattr(modeling_recsa_qwen3, "recsa_attention", spy)
    model = tiny_model().train()
    ids = random_ids(1, LENGTHS[2])
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert seen == [{torch.bfloat16}] * model.config.num_hidden_layers


def test_autocast_does_not_round_the_selection():
    """METHOD 4: logits, importance and pooling stay in float32: training under autocast selects as inference does."""
    case = make_case(starts=(70,), counts=(40,), dtype=torch.float32)
    expected = case.run()
    with torch.autocast("cpu", torch.bfloat16):
        found = case.run()
        levels = case.levels()
    for one, other in zip(levels.keys, case.levels().keys, strict=True):
        assert torch.equal(one, other)
    assert expected.selection and found.selection.keys() == expected.selection.keys()
    assert all(torch.equal(found.selection[level], nodes) for level, nodes in expected.selection.items())
    assert torch.equal(found.output, expected.output)


# ---- DDP and the Trainer --------------------------------------------------------------------------------------------


# The last pair: one process reads nodes, the other does not.
LENGTHS_BY_RANK = ((DENSE, DENSE), (LENGTHS[2], LENGTHS[2]), (DENSE, LENGTHS[2]))


def distributed_process(rank: int, store: str, ids: torch.Tensor, folder: str) -> None:
    """Two steps per pair of lengths of one of two processes, over gloo; saves the weights after them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    model = tiny_model().double().train()
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for lengths in LENGTHS_BY_RANK:
        for _ in range(2):
            rows = ids[rank : rank + 1, : lengths[rank]]
            wrapped(rows, labels=rows).loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    while not os.path.exists(f"{folder}/{1 - rank}.pt"):
        time.sleep(0.01)
    # gloo's destructor waits for its thread, which can wait for the interpreter's lock for ever
    os._exit(0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_ddp_without_unused_parameters(tmp_path):
    """TR-04: two processes, find_unused_parameters=False, T <= M, T > M and both at once: one process's weights."""
    ids = random_ids(2, LENGTHS[2])
    arguments = (str(tmp_path / "store"), ids, str(tmp_path))
    processes = torch.multiprocessing.spawn(distributed_process, arguments, nprocs=2, join=False)
    until = time.monotonic() + 240
    while not processes.join(timeout=5):
        if time.monotonic() > until:
            for process in processes.processes:
                process.kill()
            pytest.fail("the processes wait for each other")
    first, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = tiny_model().double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for lengths in LENGTHS_BY_RANK:
        for _ in range(2):
            for rank, length in enumerate(lengths):
                rows = ids[rank : rank + 1, :length]
                (model(rows, labels=rows).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in model.state_dict().items():
        assert torch.equal(first[name], other[name])
        torch.testing.assert_close(first[name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_trainer(options, tmp_path):
    """Three steps of `transformers.Trainer` on rows of all lengths, saved, loaded, evaluated, generating."""
    data = [{"input_ids": ids, "labels": ids} for length in LENGTHS for ids in random_ids(2, length)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **options,
    )
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(0 < loss < 20 for loss in losses)
    after = model.state_dict()
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    trainer.save_model(str(tmp_path / "saved"))
    loaded = RecSAQwen3ForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in after.items())
    assert trainer.evaluate(data[:2])["eval_loss"] > 0
    assert model.generate(data[-1]["input_ids"][None], max_new_tokens=3).shape[1] == LENGTHS[2] + 3
