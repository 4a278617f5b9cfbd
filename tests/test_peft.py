"""Adapters: LoRA on the projections, poolers by `modules_to_save`, merging, publishing, gradient checkpointing.

Float64 models, so that a merge (which rounds) decides no near-tie of a selection.
"""

import json
import logging
import shutil

import pytest
import torch

from conftest import DENSE, TINY, random_ids, tiny_model
from fresh import SOURCES, run_fresh, tiny_tokenizer
from recsa_qwen3 import RecSAQwen3ForCausalLM, recsa_trace

peft = pytest.importorskip("peft")

torch.set_num_threads(1)

# Below M, at M + 2 (the first length at which a query that reads nodes also has a label), and at 4M and more.
LENGTHS = (DENSE - 3, DENSE + 2, 4 * DENSE + 6)
PROJECTIONS = {
    f"model.layers.{layer}.{name}_proj"
    for layer in range(TINY["num_hidden_layers"])
    for name in (*(f"self_attn.{x}" for x in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
}


# ---- helpers --------------------------------------------------------------------------------------------------------


def adapted(target_modules="all-linear", base=None, **options):
    """A TINY model in float64 with LoRA adapters."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=target_modules, r=4, lora_alpha=16, **options)
    return peft.get_peft_model(tiny_model().double() if base is None else base, config)


def train(model, batches, **forward) -> list[float]:
    """The losses of one AdamW step per batch of ids; large steps, so that adapters matter."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, **forward).loss
        loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def batches() -> list[torch.Tensor]:
    return [random_ids(2, length) for length in (LENGTHS[2], *LENGTHS[1:])]


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def pooler_state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if ".pooler." in name}


# ---- TR-06: train, merge, publish -----------------------------------------------------------------------------------


PUBLISHED = """
from peft import AutoPeftModelForCausalLM, PeftModel
merged, base, adapter, out, *deleted = args
assert not any(os.path.exists(path) for path in deleted)
load = {"trust_remote_code": True, "dtype": "auto"}
ids = torch.load(out + "/ids.pt")
ways = {
    "merged": lambda: AutoModelForCausalLM.from_pretrained(merged, **load),
    "adapter": lambda: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **load), adapter),
    "auto peft": lambda: AutoPeftModelForCausalLM.from_pretrained(adapter, **load),
    "auto": lambda: AutoModelForCausalLM.from_pretrained(adapter, **load),
}
found = {}
for way, load_model in ways.items():
    if way == "merged" or os.path.exists(adapter):
        model = load_model().eval()
        with torch.no_grad():
            torch.save(model(input_ids=ids, use_cache=False).logits, f"{out}/{way}.pt")
        found[way] = {
            "backend": model.last_backend,
            "vocabulary": model.get_input_embeddings().weight.shape[0],
            "lora": any("lora" in name for name, _ in model.named_parameters()),
            "remote": any(type(m).__module__.startswith("transformers_modules") for m in model.modules()),
        }
report(found=found)
"""


def test_lora_trained_merged_published(tmp_path):
    """TR-06: all-linear, 3 steps; merged and as an adapter, each in a new process; tokenizer 20 rows shorter."""
    vocabulary = len(tiny_tokenizer()) + 20
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    tiny_model(vocab_size=vocabulary).double().save_pretrained(base)
    model = adapted(base=RecSAQwen3ForCausalLM.from_pretrained(base, dtype="auto"))
    ids = random_ids(2, LENGTHS[2])
    untrained, poolers = logits_of(model, ids), pooler_state(model)
    train(model, batches())
    expected = logits_of(model, ids)
    assert (expected - untrained).abs().max() > 0.1
    assert all(torch.equal(tensor, pooler_state(model)[name]) for name, tensor in poolers.items())
    model.save_pretrained(adapter)
    tiny_tokenizer().save_pretrained(adapter)

    torch.save(ids, tmp_path / "ids.pt")
    run = run_fresh(PUBLISHED, base, base, adapter, tmp_path, home=tmp_path / "home", env={"HF_HUB_OFFLINE": "1"})
    assert not run["own_package"]
    for way in ("adapter", "auto peft", "auto"):
        found = run["found"][way]
        assert found == {"backend": "dense+reference", "vocabulary": vocabulary, "lora": True, "remote": True}
        torch.testing.assert_close(torch.load(tmp_path / f"{way}.pt"), expected, atol=1e-5, rtol=0)

    result = model.merge_and_unload()
    assert type(result) is RecSAQwen3ForCausalLM
    result.save_pretrained(merged)
    tiny_tokenizer().save_pretrained(merged)
    shutil.rmtree(adapter)
    shutil.rmtree(base)
    assert sorted(path.name for path in merged.glob("*.py")) == SOURCES
    config = json.loads((merged / "config.json").read_text())
    assert config["vocab_size"] == vocabulary and config["auto_map"]["AutoModelForCausalLM"]
    assert str(tmp_path) not in (merged / "config.json").read_text() and "peft" not in json.dumps(config).lower()
    run = run_fresh(PUBLISHED, merged, base, adapter, tmp_path, adapter, base, home=tmp_path / "other home")
    assert run["found"] == {
        "merged": {"backend": "dense+reference", "vocabulary": vocabulary, "lora": False, "remote": True}
    }
    assert not run["own_package"] and run["calls"] == []
    torch.testing.assert_close(torch.load(tmp_path / "merged.pt"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_model_equals_the_adapted_one(tied, tmp_path):
    """TR-06: at every length, with state-dict names of an ordinary model, tied embeddings still tied."""
    model = adapted(base=tiny_model(tie_word_embeddings=tied).double())
    train(model, batches())
    ids = [random_ids(2, length) for length in LENGTHS]
    expected = [logits_of(model, row) for row in ids]
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded, info = RecSAQwen3ForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    for row, logits in zip(ids, expected, strict=True):
        torch.testing.assert_close(logits_of(merged, row), logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits_of(loaded, row), logits, atol=1e-5, rtol=0)


# ---- TR-06: what target lists mean for the poolers ------------------------------------------------------------------


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "v_proj"]], ids=["all-linear", "list"])
def test_target_lists_leave_the_poolers_alone(target_modules):
    """TR-06: no adapter in a pooler, and its parameters frozen; the head is left out by `all-linear`."""
    model = adapted(target_modules)
    names = {name.split(".lora_A")[0].removeprefix("base_model.model.") for name, _ in model.named_parameters()}
    touched = names & {name for name, _ in tiny_model().named_modules()}
    wanted = PROJECTIONS if target_modules == "all-linear" else {n for n in PROJECTIONS if n[-6:] in target_modules}
    assert touched == wanted
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    before = pooler_state(model)
    assert len(before) == 9
    train(model, batches())
    assert all(torch.equal(tensor, pooler_state(model)[name]) for name, tensor in before.items())


def test_modules_to_save_trains_the_poolers(tmp_path):
    """TR-06: `modules_to_save=["pooler"]` trains whole poolers beside LoRA: saved, loaded, switched off, merged."""
    model = adapted(["q_proj", "v_proj"], modules_to_save=["pooler"])
    originals = pooler_state(tiny_model().double())
    ids = random_ids(2, LENGTHS[2])
    untrained = logits_of(model, ids)
    train(model, [random_ids(2, LENGTHS[0]), *batches()])  # also a step at which no node is read
    expected = logits_of(model, ids)
    with model.disable_adapter():
        assert torch.equal(logits_of(model, ids), untrained)
    with torch.no_grad():
        generated = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model().double(), tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, ids), expected, atol=1e-5, rtol=0)
    merged = model.merge_and_unload()
    poolers = pooler_state(merged)
    assert poolers.keys() == originals.keys()
    assert all(not torch.equal(poolers[name], tensor) for name, tensor in originals.items())
    torch.testing.assert_close(logits_of(merged, ids), expected, atol=1e-5, rtol=0)
    assert torch.equal(merged.generate(ids, max_new_tokens=5, do_sample=False), generated)


# ---- TR-01: adapters under gradient checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [None, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_a_frozen_base(reentrant, use_cache, caplog, recwarn):
    """TR-01: same losses over 5 steps, at most one warning, `use_cache` of the configuration as before."""
    steps = [random_ids(2, length) for length in (LENGTHS[2], *LENGTHS, LENGTHS[2])]
    forward = {} if use_cache is None else {"use_cache": use_cache}
    torch.manual_seed(5)
    expected = train(adapted(), steps, **forward)
    torch.manual_seed(5)
    model = adapted()
    recwarn.clear()
    with caplog.at_level(logging.WARNING):
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        losses = train(model, steps, **forward)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[0] != losses[-1]
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    assert len(said) <= 1, said
    assert model.config.use_cache is True
    with torch.no_grad():
        assert model.generate(input_ids=steps[0], max_new_tokens=2).shape == (2, LENGTHS[2] + 2)


# ---- looking inside a wrapped model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_trace_and_last_backend_of_a_wrapped_model(length):
    """SQ-01: `recsa_trace` finds the layers below the wrapper; untrained adapters change no selection."""
    base, model = tiny_model().double(), adapted().eval()
    ids = random_ids(2, length)
    with recsa_trace(base) as expected:
        logits_of(base, ids)
    with recsa_trace(model) as trace:
        logits_of(model, ids)
    assert model.last_backend == base.last_backend == ("dense+reference" if length > DENSE else "dense")
    assert len(trace.forwards) == 1 and trace.forwards[0].keys() == {0, 1, 2}
    for layer, entry in trace.forwards[0].items():
        other = expected.forwards[0][layer].selection
        assert entry.selection.keys() == other.keys() and bool(other) == (length > DENSE)
        assert all(torch.equal(nodes, other[level]) for level, nodes in entry.selection.items())
