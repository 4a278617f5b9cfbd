"""Loading and saving weights: bit by bit, tied or not, from and to stock Qwen3, in other dtypes, offloaded, in int8.

Remote code and folders are the subject of test_remote_code.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from conftest import DENSE, LENGTHS, LOGITS_ATOL, TINY, random_ids, tiny_config, tiny_model
from recsa_qwen3 import (
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    RecSAQwen3ForQuestionAnswering,
    RecSAQwen3ForSequenceClassification,
    RecSAQwen3ForTokenClassification,
    RecSAQwen3Model,
    attention_recsa_qwen3,
    recsa_trace,
)

torch.set_num_threads(1)

POOLER_NAMES = {
    f"model.layers.{i}.self_attn.pooler.{name}"
    for i in range(TINY["num_hidden_layers"])
    for name in ("query", "slot_bias", "proj")
}


# ---- helpers --------------------------------------------------------------------------------------------------------


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits without a cache; asserts that something was left out exactly where T > M."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    if hasattr(model, "last_backend"):
        assert model.last_backend == ("dense+reference" if ids.shape[1] > DENSE else "dense")
    return logits


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, every buffer, and every plain tensor that a module holds as an attribute."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return found


def poison_allocator() -> None:
    """Frees blocks of many sizes full of NaN and of 1e30, which later allocations get back."""
    sizes = [1 << power for power in range(4, 17)] * 3
    blocks = [torch.full((size,), value) for size in sizes for value in (float("nan"), 1e30)]
    del blocks


def stock_model(**changes) -> Qwen3ForCausalLM:
    """A random stock Qwen3 of TINY's size."""
    fields = {name: value for name, value in TINY.items() if not name.startswith("recsa_")}
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **changes})).eval()


RECSA_FIELDS = {name: value for name, value in TINY.items() if name.startswith("recsa_")}


# ---- LD-01: nothing is left uninitialised ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}], ids=str)
def test_every_load_gives_the_same_bits(dtype, options, tmp_path):
    """LD-01: 20 loads from a poisoned allocator, each against the eagerly built model."""
    built = tiny_model().to(dtype)
    built.save_pretrained(tmp_path)
    expected = tensors_of(built)
    ids = random_ids(1, LENGTHS[-1])
    logits = logits_of(built, ids)
    for _ in range(20):
        attention_recsa_qwen3._rotary_tables.clear()
        poison_allocator()
        model = RecSAQwen3ForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options)
        loaded = tensors_of(model)
        assert loaded.keys() == expected.keys()
        assert all(same_bits(loaded[name], tensor) for name, tensor in expected.items())
        assert torch.equal(logits_of(model, ids), logits)


@pytest.mark.parametrize(
    "own", [RecSAQwen3Model, RecSAQwen3ForSequenceClassification, RecSAQwen3ForTokenClassification]
)
def test_other_heads_load_with_the_same_bits(own, tmp_path):
    """LD-01: each head's own parameters too."""
    built = tiny_model(own)
    built.save_pretrained(tmp_path)
    poison_allocator()
    loaded = tensors_of(own.from_pretrained(tmp_path))
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors_of(built).items())


def test_built_on_the_meta_device():
    """LD-01: no value lives outside the state dict."""
    built = tiny_model()
    with torch.device("meta"):
        model = RecSAQwen3ForCausalLM(tiny_config()).eval()
    attention_recsa_qwen3._rotary_tables.clear()
    model.load_state_dict(built.state_dict(), assign=True)
    for length in LENGTHS:
        ids = random_ids(1, length)
        assert torch.equal(logits_of(model, ids), logits_of(built, ids))


def test_new_parameters_are_initialised(tmp_path):
    """LD-01: a model from a configuration alone is finite and its poolers are the plain mean."""
    poison_allocator()
    for own in (RecSAQwen3ForCausalLM, RecSAQwen3ForTokenClassification, RecSAQwen3ForQuestionAnswering):
        model = own(tiny_config())
        assert all(tensor.isfinite().all() for tensor in tensors_of(model).values())
        assert_poolers_are_means(model)


def assert_poolers_are_means(model) -> None:
    poolers = [module for module in model.modules() if isinstance(module, RecSAPooler)]
    assert len(poolers) == TINY["num_hidden_layers"]
    for pooler in poolers:
        assert not pooler.query.any() and not pooler.slot_bias.any()
        assert torch.equal(pooler.proj, torch.eye(TINY["head_dim"], dtype=pooler.proj.dtype).expand_as(pooler.proj))
        children = torch.randn(2, 2, 3, 4, TINY["head_dim"], dtype=pooler.proj.dtype)
        pooled, keys = pooler(children)
        torch.testing.assert_close(pooled, children.mean(-2))
        torch.testing.assert_close(keys, children.mean(-2))


# ---- LD-03: life of a model, tied heads -----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["TINY", "TINY-T"])
def test_load_generate_save_reload(tied, tmp_path):
    """LD-03: the same tokens and logits along the chain; tied weights share storage all along."""
    built = tiny_model(tie_word_embeddings=tied)
    built.save_pretrained(tmp_path / "0")
    assert ("lm_head.weight" in load_file(tmp_path / "0" / "model.safetensors")) != tied
    prompts = [random_ids(2, length) for length in LENGTHS]
    expected = [(logits_of(built, ids), built.generate(ids, max_new_tokens=6, do_sample=False)) for ids in prompts]
    for link in range(2):
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / str(link), output_loading_info=True)
        assert type(model) is RecSAQwen3ForCausalLM
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_tied(model, tied)
        for ids, (logits, tokens) in zip(prompts, expected, strict=True):
            assert torch.equal(logits_of(model, ids), logits)
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), tokens)
        model.save_pretrained(tmp_path / str(link + 1))
    assert_tied(model.to(torch.bfloat16), tied)
    assert_tied(model.to("cpu").float(), tied)
    model.resize_token_embeddings(TINY["vocab_size"] + 5)
    assert_tied(model, tied)
    model.save_pretrained(tmp_path / "resized")
    assert_tied(AutoModelForCausalLM.from_pretrained(tmp_path / "resized"), tied)


def assert_tied(model, tied: bool) -> None:
    head, embeddings = model.lm_head.weight, model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings == tied
    assert (head is embeddings) == (head.data_ptr() == embeddings.data_ptr()) == tied
    if tied:  # a step of one is a step of the other
        with torch.no_grad():
            before = head[7].clone()
            head[7] = 1
            assert torch.all(embeddings[7] == 1)
            embeddings[7] = before


def test_untied_head_with_other_values_survives(tmp_path):
    """LD-03: also where the head once equalled the embeddings."""
    for equal_at_first in (False, True):
        model = tiny_model(tie_word_embeddings=False)
        with torch.no_grad():
            if equal_at_first:
                model.lm_head.weight.copy_(model.get_input_embeddings().weight)
            model.lm_head.weight[3].add_(1)
        model.save_pretrained(tmp_path)
        loaded = RecSAQwen3ForCausalLM.from_pretrained(tmp_path)
        assert_tied(loaded, False)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_post_init_is_called_by_every_class(monkeypatch):
    """LD-03: without it tied weights, parallel plans and dtype rules of the installed version are missing."""
    called = []
    post_init = PreTrainedModel.post_init

    def recorded(self):
        called.append(type(self))
        post_init(self)

    monkeypatch.setattr(PreTrainedModel, "post_init", recorded)
    for own in (
        RecSAQwen3Model,
        RecSAQwen3ForCausalLM,
        RecSAQwen3ForSequenceClassification,
        RecSAQwen3ForTokenClassification,
        RecSAQwen3ForQuestionAnswering,
    ):
        called.clear()
        model = own(tiny_config(tie_word_embeddings=own is RecSAQwen3ForCausalLM))
        assert set(called) == {RecSAQwen3Model, own}
    assert RecSAQwen3ForCausalLM(tiny_config(tie_word_embeddings=True)).all_tied_weights_keys == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    assert not model.all_tied_weights_keys


# ---- LD-05: stock Qwen3 in and out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_checkpoint_loads(sharded, tied, dtype, tmp_path):
    """LD-05: only the poolers are missing and become the mean; the rest is bit equal; logits are stock's up to M."""
    stock = stock_model(tie_word_embeddings=tied, attention_bias=True)
    stock = type(stock)._from_config(stock.config, dtype=dtype).eval()
    stock.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    poison_allocator()
    model, info = RecSAQwen3ForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True, **RECSA_FIELDS
    )
    assert set(info["missing_keys"]) == POOLER_NAMES
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    state = model.state_dict()
    assert all(same_bits(state[name], tensor) for name, tensor in stock.state_dict().items())
    assert model.dtype == dtype and {tensor.dtype for tensor in state.values()} == {dtype}
    assert_poolers_are_means(model)
    assert_tied(model, tied)
    for length in (1, DENSE - 3, DENSE):
        ids = random_ids(2, length)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(logits_of(model, ids), logits_of(stock, ids), atol=tolerance, rtol=tolerance)
    for length in LENGTHS[1:]:
        ids = random_ids(2, length)
        logits = logits_of(model, ids)
        assert logits.isfinite().all()
        assert not torch.allclose(logits[:, -1], logits_of(stock, ids)[:, -1], atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_own_checkpoint_loads_into_stock_qwen3(sharded, tmp_path):
    """LD-05: the reverse; stock Qwen3 reports the poolers as unexpected and reads the rest."""
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "1GB")
    stock, info = Qwen3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["unexpected_keys"]) == POOLER_NAMES and not info["missing_keys"]
    state = model.state_dict()
    assert all(same_bits(state[name], tensor) for name, tensor in stock.state_dict().items())
    ids = random_ids(2, DENSE)
    torch.testing.assert_close(logits_of(stock, ids), logits_of(model, ids), atol=1e-5, rtol=1e-5)


def test_stock_classifier_loads(tmp_path):
    """LD-05: heads too."""
    stock = Qwen3ForSequenceClassification(
        Qwen3Config(**{name: value for name, value in TINY.items() if name not in RECSA_FIELDS}, num_labels=3)
    ).eval()
    stock.save_pretrained(tmp_path)
    model, info = RecSAQwen3ForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True, **RECSA_FIELDS
    )
    assert set(info["missing_keys"]) == POOLER_NAMES and not info["unexpected_keys"]
    ids = random_ids(2, DENSE)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is RecSAQwen3ForSequenceClassification


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("spelling", ["bfloat16", torch.bfloat16, "auto"], ids=str)
def test_dtype_spellings(name, spelling, tmp_path):
    """Extra: as a word, as a dtype, from the file, and under the older name; saved and found again."""
    saved = tiny_model().to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    for load in (RecSAQwen3ForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(tmp_path, **{name: spelling})
        assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.bfloat16}
        assert model.dtype == model.config.dtype == torch.bfloat16
        ids = random_ids(1, LENGTHS[-1])
        assert torch.equal(logits_of(model, ids), logits_of(saved, ids))
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


def test_from_config_with_a_dtype():
    """Extra: the dtype of a model made from a configuration, by word and by dtype."""
    for spelling in ("bfloat16", torch.bfloat16):
        model = AutoModelForCausalLM.from_config(tiny_config(), dtype=spelling)
        assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.bfloat16}
        assert_poolers_are_means(model)
        assert logits_of(model.eval(), random_ids(1, LENGTHS[-1])).isfinite().all()


# ---- LD-08, LD-09 on a CPU ------------------------------------------------------------------------------------------


def test_quantisers_find_nothing_in_a_pooler():
    """LD-08: schemes choose `nn.Linear` modules (or embeddings); a pooler holds plain parameters and no module."""
    model = tiny_model()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    projections = [f"self_attn.{name}_proj" for name in "qkvo"]
    projections += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert linear == {"lm_head"} | {f"model.layers.{i}.{name}" for i in range(3) for name in projections}
    for pooler in (module for module in model.modules() if isinstance(module, RecSAPooler)):
        assert not list(pooler.children())
    # no list that would keep modules in float32 and so change results where nothing is quantised
    assert not model._keep_in_fp32_modules and not model._keep_in_fp32_modules_strict


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_int8_weights_on_a_cpu():
    """LD-08: every projection in int8, poolers untouched, 32 tokens at 4M finite and near the unquantised result."""
    model = tiny_model()
    ids = random_ids(2, 4 * DENSE)
    expected = logits_of(model, ids)
    poolers = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in POOLER_NAMES}
    assert len(poolers) == len(POOLER_NAMES)
    int8 = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in int8.modules())
    state = dict(int8.named_parameters())
    assert all(same_bits(state[name], tensor) for name, tensor in poolers.items())
    with torch.no_grad(), recsa_trace(int8) as trace:
        outputs = int8(ids, output_attentions=True)
        assert torch.corrcoef(torch.stack([outputs.logits.flatten(), expected.flatten()]))[0, 1] > 0.8
        torch.testing.assert_close(outputs.attentions[0].sum(-1), torch.ones(2, 4, 4 * DENSE))
        generated = int8.generate(
            ids, max_new_tokens=32, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    assert int8.last_backend == "reference" and all((f[0].selection[1] >= 0).any() for f in trace.forwards)
    assert len(generated.logits) == 32 and all(logits.isfinite().all() for logits in generated.logits)


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_layer_offloaded(place, tmp_path):
    """LD-09: a layer on disk is brought in by hooks around each module's forward; greedy and beams as without."""
    built = tiny_model()
    built.save_pretrained(tmp_path / "model")
    rest = ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "lm_head")
    device_map = {**dict.fromkeys(rest, "cpu"), "model.layers.1": place}
    model = RecSAQwen3ForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    offloaded = {name for name, tensor in model.named_parameters() if tensor.device.type == "meta"}
    assert any("layers.1.self_attn.pooler" in name for name in offloaded) == (place == "disk")
    for length in LENGTHS:
        ids = random_ids(2, length)
        torch.testing.assert_close(logits_of(model, ids), logits_of(built, ids), atol=LOGITS_ATOL, rtol=0)
    for beams in (1, 3):
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
        assert torch.equal(model.generate(ids, **options), built.generate(ids, **options))
