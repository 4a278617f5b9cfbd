"""Conversion of stock Qwen3 checkpoints: what is copied, what is refused, what an interruption leaves (LD-05, LD-06).

The sources are tiny random stock models. The real converter runs on them, in this process or, where signals or caches
matter, in a fresh one. The public hub is never reached.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3 import modeling_qwen3

import convert_qwen3
import recsa_qwen3
from conftest import DENSE, RELATIVE_RMS, TINY, random_ids, relative_rms
from convert_qwen3 import ConversionError, convert, main
from fresh import ROOT, SOURCES, run_fresh, tiny_tokenizer
from hub_server import HubServer
from recsa_qwen3 import RecSAQwen3Config, RecSAQwen3ForCausalLM
from recsa_qwen3.configuration_recsa_qwen3 import SUPPORTED_TOKENS, TRAINED_TOKENS

STOCK = {name: value for name, value in TINY.items() if not name.startswith("recsa_")}
RECSA = {name: value for name, value in TINY.items() if name.startswith("recsa_")}
OPTIONS = [f"--{n.removeprefix('recsa_').replace('_', '-')}={v}" for n, v in RECSA.items()]
REMOVED = object()
HEADS = [name.removeprefix("RecSA") for name in recsa_qwen3.__all__ if re.match("RecSAQwen3(For|Model)", name)]


def stock_model(model_class=Qwen3ForCausalLM, **changes):
    """A random stock model; the norms, ones at initialisation, are random as well."""
    model = model_class(Qwen3Config(**{**STOCK, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.fixture
def source(tmp_path) -> Path:
    """A stock model of one file in float32."""
    stock_model().save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


@pytest.fixture
def output(tmp_path) -> Path:
    """Where to convert to: the only thing in its parent folder afterwards, if anything is."""
    (tmp_path / "to").mkdir()
    return tmp_path / "to" / "converted"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, none of them twice."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    merged = {name: tensor for file in files for name, tensor in file.items()}
    assert sum(map(len, files)) == len(merged)
    return merged


def edit_json(path: Path, **changes) -> None:
    """Changes entries of a JSON file, or takes them out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not REMOVED}))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_poolers_are_means(added: dict[str, torch.Tensor], layers: int = STOCK["num_hidden_layers"]) -> None:
    """Exactly the documented new tensors, at the values that make the pooler a plain mean (METHOD section 6)."""
    heads, width, r = STOCK["num_key_value_heads"], STOCK["head_dim"], RECSA["recsa_branching"]
    shapes = {"query": (heads, width), "slot_bias": (r,), "proj": (heads, width, width)}
    found = {}
    for name, tensor in added.items():
        layer, kind = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.self_attn\.pooler\.(\w+)", name).groups()
        found[int(layer), kind] = tuple(tensor.shape)
        expected = torch.eye(width).expand(heads, -1, -1) if kind == "proj" else torch.zeros(tensor.shape)
        assert torch.equal(tensor.float(), expected)
    assert found == {(layer, kind): shape for layer in range(layers) for kind, shape in shapes.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What is copied
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["10GB", "150KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": False}, {"tie_word_embeddings": True}, {"attention_bias": True}],
    ids=["untied", "tied", "bias"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_tensor_is_copied_bit_for_bit(tmp_path, output, shard_size, changes, dtype):
    stock = stock_model(**changes, dtype=dtype).to(dtype)
    stock.save_pretrained(tmp_path / "stock", max_shard_size=shard_size)
    before = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}

    report = convert(tmp_path / "stock", output, recsa=RECSA)
    old, new = tensors(tmp_path / "stock"), tensors(output)
    assert all(same_bits(new[name], tensor) for name, tensor in old.items())
    added = {name: tensor for name, tensor in new.items() if name not in old}
    assert_poolers_are_means(added)
    assert {tensor.dtype for tensor in added.values()} == {dtype}
    names = sorted(path.name for path in (tmp_path / "stock").glob("*.safetensors*"))
    assert sorted(path.name for path in output.glob("*.safetensors*")) == names
    assert (len(names) > 2) == (shard_size == "150KB")

    assert report == json.loads((output / "conversion_report.json").read_text())
    sizes = {"tensors": len(old), "parameters": sum(t.numel() for t in old.values())}
    sizes["bytes"] = sizes["parameters"] * dtype.itemsize
    assert report["copied"] == {**sizes, "cast": 0}
    assert sorted(report["initialised"]["names"]) == sorted(added)
    assert {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()} == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_size", ["10GB", "150KB"], ids=["one file", "sharded"])
def test_a_stock_checkpoint_loads_with_only_the_poolers_missing(tmp_path, output, tied, shard_size):
    """LD-05: loaded straight, and converted: the tensors of stock Qwen3, and its logits up to M tokens."""
    stock = stock_model(tie_word_embeddings=tied)
    stock.save_pretrained(tmp_path / "stock", max_shard_size=shard_size)
    convert(tmp_path / "stock", output, recsa=RECSA)
    config = RecSAQwen3Config(**TINY, tie_word_embeddings=tied)
    load = {"output_loading_info": True}
    straight, info = RecSAQwen3ForCausalLM.from_pretrained(tmp_path / "stock", config=config, **load)
    converted, converted_info = RecSAQwen3ForCausalLM.from_pretrained(output, **load)
    assert all(not found for found in converted_info.values())
    assert not info["unexpected_keys"] and not info["mismatched_keys"]

    ids = random_ids(2, DENSE)
    expected = stock.state_dict()
    for model in (straight, converted):
        state = model.state_dict()
        assert all(same_bits(state[name], tensor) for name, tensor in expected.items())
        added = {name: tensor for name, tensor in state.items() if name not in expected}
        assert_poolers_are_means(added)
        assert set(info["missing_keys"]) == set(added)
        with torch.no_grad():
            logits, dense = model.eval()(ids).logits, stock(ids).logits
            assert relative_rms(logits, dense) <= RELATIVE_RMS[torch.float32]
            # beyond M the fields that were asked for are at work: keys are left out
            longer = random_ids(1, 4 * DENSE)
            assert relative_rms(model(longer).logits, stock(longer).logits) > 100 * RELATIVE_RMS[torch.float32]


@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_converts(tmp_path, output, architecture):
    stock = stock_model(getattr(modeling_qwen3, architecture), num_labels=3)
    stock.save_pretrained(tmp_path / "stock")
    convert(tmp_path / "stock", output, recsa=RECSA)
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == [f"RecSA{architecture}"]
    model, info = getattr(recsa_qwen3, f"RecSA{architecture}").from_pretrained(output, output_loading_info=True)
    assert all(not found for found in info.values())
    ids = random_ids(1, DENSE)
    with torch.no_grad():
        ours, theirs = model.eval()(ids), stock(ids)
    assert relative_rms(ours[0], theirs[0]) <= RELATIVE_RMS[torch.float32]


def test_a_checkpoint_of_the_bare_model_whose_config_names_a_head(tmp_path, output):
    """Embedding models are published like this: the names have no prefix, and there is no head."""
    stock_model(Qwen3Model).save_pretrained(tmp_path / "stock")
    edit_json(tmp_path / "stock" / "config.json", architectures=["Qwen3ForCausalLM"])
    report = convert(tmp_path / "stock", output, recsa=RECSA)
    assert report["architecture"] == "RecSAQwen3Model"
    assert_poolers_are_means({n: t for n, t in tensors(output).items() if "pooler" in n})


def test_the_reverse_direction(source, output):
    """LD-05: a converted folder loads into stock Qwen3 with nothing but the poolers left over."""
    convert(source, output, recsa=RECSA)
    config = Qwen3Config.from_pretrained(source)
    model, info = Qwen3ForCausalLM.from_pretrained(output, config=config, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert_poolers_are_means({name: tensors(output)[name] for name in info["unexpected_keys"]})
    ids = random_ids(1, 40)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, Qwen3ForCausalLM.from_pretrained(source).eval()(ids).logits)


@pytest.mark.parametrize("chunk", [64, convert_qwen3.CHUNK_BYTES])
@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_casting(tmp_path, output, monkeypatch, stored, to, chunk):
    monkeypatch.setattr(convert_qwen3, "CHUNK_BYTES", chunk)
    stock_model(num_hidden_layers=1).to(stored).save_pretrained(tmp_path / "stock")
    report = convert(tmp_path / "stock", output, dtype=to, recsa=RECSA)
    old, new = tensors(tmp_path / "stock"), tensors(output)
    assert all(same_bits(new[name], tensor.to(getattr(torch, to))) for name, tensor in old.items())
    assert {tensor.dtype for tensor in new.values()} == {getattr(torch, to)}
    assert report["copied"]["cast"] == (0 if getattr(torch, to) == stored else len(old))
    assert json.loads((output / "config.json").read_text())["dtype"] == report["dtype"] == to


def test_mixed_dtypes_stay_as_they_are(source, output):
    """Norms in float32 beside bfloat16 matrices; the narrow tensors have odd sizes, so alignment matters too."""
    mixed = {n: t if "norm" in n else t.bfloat16() for n, t in tensors(source).items()}
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    report = convert(source, output, recsa=RECSA)
    new = tensors(output)
    assert all(same_bits(new[name], tensor) for name, tensor in mixed.items())
    assert report["dtype"] == "bfloat16" and report["source_dtypes"] == ["bfloat16", "float32"]
    assert all(new[name].dtype == torch.bfloat16 for name in report["initialised"]["names"])


def test_tensors_start_at_multiples_of_their_item_size(tmp_path):
    """An odd number of bfloat16 values before float32 ones: readers map the bytes in place."""
    save_file({"a": torch.rand(3).bfloat16(), "b": torch.rand(5), "c": torch.rand(1).half()}, tmp_path / "old")
    stored = sorted(convert_qwen3.read_header(tmp_path / "old"), key=lambda tensor: tensor.name)
    convert_qwen3.write_weights(tmp_path / "new", [(tensor, tensor.dtype) for tensor in stored])
    old, new = load_file(tmp_path / "old"), load_file(tmp_path / "new")
    assert old.keys() == new.keys() and all(same_bits(new[name], old[name]) for name in old)
    assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in convert_qwen3.read_header(tmp_path / "new"))


@pytest.mark.parametrize("size", [STOCK["vocab_size"] * STOCK["hidden_size"] * 4, 100_000])
def test_max_shard_size(source, output, size):
    """The first size is that of the largest tensor, which then has a file of its own."""
    convert(source, output, recsa=RECSA, max_shard_size=size)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    sizes = {}
    for file in set(index["weight_map"].values()):
        found = load_file(output / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(found)
        sizes[file] = sum(tensor.nbytes for tensor in found.values())
    assert len(sizes) > 5 and max(sizes.values()) <= size
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(f"-of-{len(sizes):05d}" in file for file in sizes)
    _, info = RecSAQwen3ForCausalLM.from_pretrained(output, output_loading_info=True)
    assert all(not found for found in info.values())


def test_what_is_in_memory_is_a_chunk_and_not_a_tensor(tmp_path, output, monkeypatch):
    """Every buffer that tensors pass through is a Python object, so that tracemalloc sees all of them."""
    chunk = 2**16
    monkeypatch.setattr(convert_qwen3, "CHUNK_BYTES", chunk)
    stock_model(num_hidden_layers=1, vocab_size=40_000).save_pretrained(tmp_path / "stock")
    stored = convert_qwen3.read_checkpoint(tmp_path / "stock")
    tracemalloc.start()
    try:
        convert_qwen3.write_weights(output, [(tensor, tensor.dtype) for tensor in stored])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    old, new = tensors(tmp_path / "stock"), load_file(output)
    assert max(tensor.nbytes for tensor in old.values()) > 100 * chunk and peak < 3 * chunk
    assert all(same_bits(new[name], tensor) for name, tensor in old.items())


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "differs"])
def test_a_tied_checkpoint_that_stores_its_head(tmp_path, output, equal):
    """Some published tied checkpoints do; dropping the copy is right only while it is a copy."""
    stock_model(tie_word_embeddings=True).save_pretrained(tmp_path / "stock")
    old = tensors(tmp_path / "stock")
    old["lm_head.weight"] = old["model.embed_tokens.weight"].clone()
    old["lm_head.weight"][-1, -1] += 0.0 if equal else 1.0
    save_file(old, tmp_path / "stock" / "model.safetensors", metadata={"format": "pt"})
    if not equal:
        with pytest.raises(ConversionError, match="lm_head.weight differs from model.embed_tokens.weight"):
            convert(tmp_path / "stock", output, recsa=RECSA)
        return
    report = convert(tmp_path / "stock", output, recsa=RECSA)
    assert report["left_out"] == {"tied": ["lm_head.weight"]} and "lm_head.weight" not in tensors(output)
    model, info = RecSAQwen3ForCausalLM.from_pretrained(output, output_loading_info=True)
    assert all(not found for found in info.values())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Config, tokenizer, code, card
# ---------------------------------------------------------------------------------------------------------------------

V4 = {"rope_parameters": REMOVED}
THETA = 50_000.0
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
# name -> entries of config.json, the type that they mean, the theta that they mean
SPELLINGS = {
    "v4 without scaling": ({**V4, "rope_theta": THETA}, "default", THETA),
    "v4, scaling null": ({**V4, "rope_theta": THETA, "rope_scaling": None}, "default", THETA),
    "v4, yarn by type": ({**V4, "rope_theta": THETA, "rope_scaling": {"type": "yarn", **YARN}}, "yarn", THETA),
    "v4, yarn by rope_type": (
        {**V4, "rope_theta": THETA, "rope_scaling": {"rope_type": "yarn", **YARN}},
        "yarn",
        THETA,
    ),
    "v5, theta inside": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": THETA, **YARN}}, "yarn", THETA),
    "no theta": ({**V4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear", Qwen3Config.default_theta),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_in_every_spelling(source, output, spelling):
    """LD-06: the frequencies of the installed stock Qwen3, after the config was read, saved, and read again."""
    entries, kind, theta = SPELLINGS[spelling]
    edit_json(source / "config.json", **entries, transformers_version="4.57.1")
    convert(source, output, recsa=RECSA)
    stock, ours = Qwen3Config.from_pretrained(source), RecSAQwen3Config.from_pretrained(output)
    assert ours.rope_parameters == stock.rope_parameters and ours.max_position_embeddings == SUPPORTED_TOKENS
    assert (ours.rope_parameters["rope_type"], ours.rope_parameters["rope_theta"]) == (kind, theta)
    theirs = modeling_qwen3.Qwen3RotaryEmbedding(stock)
    for config in (ours, RecSAQwen3Config.from_dict(ours.to_dict())):
        rotary = modeling_qwen3.Qwen3RotaryEmbedding(config)
        assert torch.equal(rotary.inv_freq, theirs.inv_freq)
        assert rotary.attention_scaling == theirs.attention_scaling
    assert ours.recsa_trained_length == min(stock.max_position_embeddings, TRAINED_TOKENS)
    ids = random_ids(2, DENSE)
    with torch.no_grad():
        logits = RecSAQwen3ForCausalLM.from_pretrained(output).eval()(ids).logits
        expected = Qwen3ForCausalLM.from_pretrained(source).eval()(ids).logits
    assert relative_rms(logits, expected) <= RELATIVE_RMS[torch.float32]


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# settings that leave to max_position_embeddings what they do not say
LENGTH_BOUND = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn, the factor null": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn, both lengths": {"rope_type": "yarn", **YARN},
    "llama3": LLAMA3,
    "llama3, both lengths": {**LLAMA3, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", LENGTH_BOUND)
def test_a_longer_limit_changes_no_frequency(source, output, kind, place):
    """Those of the installed stock Qwen3 with the source's own limit, bit for bit, also after another save."""
    edit_json(source / "config.json", **{**V4, "rope_theta": THETA, place: LENGTH_BOUND[kind]})
    convert(source, output, recsa=RECSA)
    config = RecSAQwen3Config.from_pretrained(output)
    config.save_pretrained(output.with_name("again"))
    theirs = modeling_qwen3.Qwen3RotaryEmbedding(Qwen3Config.from_pretrained(source))
    for folder in (output, output.with_name("again")):
        config = RecSAQwen3Config.from_pretrained(folder)
        assert config.max_position_embeddings == SUPPORTED_TOKENS > STOCK["max_position_embeddings"]
        written = json.loads((folder / "config.json").read_text())["rope_parameters"]
        assert ("original_max_position_embeddings" in written) == (written["rope_type"] in ("yarn", "llama3"))
        rotary = modeling_qwen3.Qwen3RotaryEmbedding(config)
        assert same_bits(rotary.inv_freq, theirs.inv_freq) and rotary.attention_scaling == theirs.attention_scaling


def test_the_models_limit_is_never_lowered(source, output):
    longer = {"max_position_embeddings": 2 * SUPPORTED_TOKENS, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    edit_json(source / "config.json", **longer)
    convert(source, output, recsa=RECSA)
    config = RecSAQwen3Config.from_pretrained(output)
    assert config.max_position_embeddings == 2 * SUPPORTED_TOKENS
    assert config.rope_parameters["original_max_position_embeddings"] == 2 * SUPPORTED_TOKENS


@pytest.mark.parametrize("length", [512, SUPPORTED_TOKENS, 10**30, 1e30, None, REMOVED])
def test_the_tokenizers_limit(source, output, length):
    """Raised where it is too low, with nothing else changed; otherwise the file stays as it is, byte for byte."""
    tiny_tokenizer().save_pretrained(source)
    edit_json(source / "tokenizer_config.json", model_max_length=length, note="é")
    report = convert(source, output, recsa=RECSA)
    assert "tokenizer_config.json" in report["carried_over"]
    old, new = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, output))
    if length == 512:
        assert new == {**old, "model_max_length": SUPPORTED_TOKENS} and list(new) == list(old)
    else:
        assert (output / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    assert AutoTokenizer.from_pretrained(output).model_max_length >= SUPPORTED_TOKENS


WARNINGS = """
tokenizer = AutoTokenizer.from_pretrained(args[0], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True).eval()
text = "w5 w7 w9 " * 200
inputs = tokenizer(text, return_tensors="pt")
cut = tokenizer(text, truncation=True).input_ids
output = model.generate(**inputs, do_sample=False, pad_token_id=0)
report(lengths=[inputs.input_ids.shape[1], len(cut), output.shape[1]])
"""


def test_beyond_the_sources_limits_nothing_warns_or_stops(source, output, tmp_path):
    """A prompt beyond both limits of the source, through the public calls with their defaults."""
    tiny_tokenizer().save_pretrained(source)
    edit_json(source / "tokenizer_config.json", model_max_length=512)
    convert(source, output, recsa=RECSA)
    run = run_fresh(WARNINGS, output, home=tmp_path / "a", env={"HF_HUB_OFFLINE": "1"})
    assert run["lengths"] == [600, 600, 620]
    assert not re.search("predefined maximum length|longer than the specified maximum", run["stderr"])


def test_config_is_the_sources_with_the_recsa_fields(source, output):
    edit_json(source / "config.json", _name_or_path="/somewhere/else", max_position_embeddings=1234, extra_note="kept")
    convert(source, output, recsa={"recsa_top_k": None, "recsa_top_capacity": 40})
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    defaults = RecSAQwen3Config()
    set_here = {"recsa_top_k": None, "recsa_top_capacity": 40, "recsa_trained_length": 1234}
    for name in convert_qwen3.RECSA_DEFAULTS:
        old[name] = set_here.get(name, getattr(defaults, name))
    for name in ("_name_or_path", "auto_map"):
        old.pop(name, None)
    auto_map = new.pop("auto_map")
    old |= {"architectures": ["RecSAQwen3ForCausalLM"], "model_type": "recsa_qwen3"}
    old["max_position_embeddings"] = SUPPORTED_TOKENS
    assert new == old
    assert auto_map == RecSAQwen3Config().auto_map and len(auto_map) == 6


def test_every_recsa_field_is_an_option(source, output, capsys):
    fields = {name for name in RecSAQwen3Config().to_dict() if name.startswith("recsa_")}
    assert fields == set(convert_qwen3.RECSA_DEFAULTS)
    options = ["--branching=8", "--top-k=None", "--recent=0", "--top-capacity=none", "--count-bias=true"]
    options += ["--backend=reference", "--prefill-chunk=77", "--dtype=bfloat16", "--max-shard-size=0.1MB"]
    options += ["--distill-weight=0.25", "--distill-queries=peak+uniform", "--trained-length=99"]
    assert main(["--source", str(source), "--output", str(output), *options]) == 0
    config = RecSAQwen3Config.from_pretrained(output)
    distilled = (config.recsa_distill_weight, config.recsa_distill_queries, config.recsa_trained_length)
    assert distilled == (0.25, "peak+uniform", 99)
    values = [getattr(config, f"recsa_{name}") for name in ("branching", "top_k", "recent", "top_capacity")]
    assert values == [8, None, 0, None]
    assert (config.recsa_count_bias, config.recsa_backend, config.recsa_prefill_chunk) == (True, "reference", 77)
    printed = capsys.readouterr().out
    assert "copied       36 tensors" in printed and "36 of them cast to bfloat16" in printed
    assert "initialised  9 tensors" in printed and "untrained" in printed and "recsa_top_k=None" in printed


def test_files_are_carried_over_byte_for_byte(source, output):
    tiny_tokenizer().save_pretrained(source)
    (source / "additional_chat_templates").mkdir()
    extra = {
        "chat_template.jinja": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\n",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "generation_config.json": '{"temperature": 0.6, "top_k": 20, "do_sample": true,  "eos_token_id": [1, 2]}',
        "LICENSE": "a licence\r\n",
    }
    for name, text in extra.items():
        (source / name).write_bytes(text.encode())
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: house\nbase_model: x/y\n---\n# Old\n")
    (source / "optimizer.pt").write_bytes(b"large")
    report = convert(source, output, recsa=RECSA)
    names = {*extra, "tokenizer.json", "tokenizer_config.json"}
    assert set(report["carried_over"]) == names
    assert all((output / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert not (output / "optimizer.pt").exists()
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w5"}], tokenize=False) == "<user>w5"
    model = RecSAQwen3ForCausalLM.from_pretrained(output)
    assert model.generation_config.eos_token_id == [1, 2] and model.generation_config.top_k == 20
    card = (output / "README.md").read_text()
    assert "license: other" in card and "license_name: house" in card and "base_model" not in card
    assert "library_name: transformers" in card and "- recsa\n" in card and "untrained" in card
    assert f"({RECSA['recsa_top_capacity']}) tokens" in card and "AutoModelForCausalLM.from_pretrained" in card


def test_nothing_written_names_a_place_on_this_machine(source, output, tmp_path):
    tiny_tokenizer().save_pretrained(source)
    convert(source, output, recsa=RECSA)
    places = (str(tmp_path).encode(), str(ROOT).encode(), str(Path.home()).encode())
    for path in output.rglob("*"):
        content = path.read_bytes()
        assert not any(place in content for place in places), path.name


LOAD = """
model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(args[0], trust_remote_code=True)
model.save_pretrained(args[1])
report(tokens=tokens(model), logits=logits(model), ids=tokenizer("w5 w7").input_ids, kind=type(model).__name__)
"""


def test_a_converted_folder_is_complete(source, output, tmp_path):
    """RC-01: loads in a fresh process without the package or the source, and so does what that process saves."""
    tiny_tokenizer().save_pretrained(source)
    report = convert(source, output, recsa=RECSA)
    assert report["code"] == SOURCES
    assert all((output / name).read_bytes() == (ROOT / name).read_bytes() for name in SOURCES)
    source.rename(tmp_path / "moved")
    first = run_fresh(LOAD, output, tmp_path / "again", home=tmp_path / "a", env={"HF_HUB_OFFLINE": "1"})
    for name in SOURCES:
        assert (tmp_path / "again" / name).read_bytes() == (output / name).read_bytes()
    output.rename(tmp_path / "gone")
    tiny_tokenizer().save_pretrained(tmp_path / "again")
    second = run_fresh(LOAD, tmp_path / "again", tmp_path / "third", home=tmp_path / "b", env={"HF_HUB_OFFLINE": "1"})
    for run in (first, second):
        assert not run["own_package"] and run["calls"] == []
        assert run["kind"] == "RecSAQwen3ForCausalLM" and run["ids"] == [5, 7]
    assert first["logits"] == second["logits"] and first["tokens"] == second["tokens"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def change_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def change_tensors(change):
    def apply(folder):
        found = tensors(folder)
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def cut_off(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(text)


def only_pickles(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def lost_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def index_of(weight_map):
    def apply(folder):
        lost_index(folder)
        content = {"weight_map": {name: "model-00001-of-00002.safetensors" for name in tensors(folder)} | weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return apply


def twice(folder):
    index_of({NORM: "model-00002-of-00002.safetensors"})(folder)
    save_file({NORM: torch.ones(32)}, folder / "model-00002-of-00002.safetensors")


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


NORM = "model.layers.1.self_attn.k_norm.weight"
REFUSALS = {
    "mixture of experts": (change_config(model_type="qwen3_moe"), "model_type 'qwen3_moe'; only dense Qwen3"),
    "another model": (change_config(model_type="llama"), "model_type 'llama'"),
    "no model type": (change_config(model_type=REMOVED), "model_type None"),
    "converted": (change_config(model_type="recsa_qwen3"), "RecSA-Qwen3 model already"),
    "quantised": (change_config(quantization_config={"quant_method": "fp8"}), "quantised .*'fp8'"),
    "custom code": (change_config(auto_map={"AutoModel": "modeling_x.X"}), "auto_map"),
    "unknown head": (change_config(architectures=["Qwen3ForReward"]), "'Qwen3ForReward'"),
    "sliding window": (change_config(use_sliding_window=True, sliding_window=8), "use_sliding_window"),
    "dynamic rope": (change_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    "wrong type": (change_config(num_hidden_layers="three"), "num_hidden_layers"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
    "list for config": (lambda folder: (folder / "config.json").write_text("[]"), "not hold a JSON object"),
    "adapter": (adapter, "no config.json.*merge"),
    "missing tensor": (change_tensors(lambda found: found.pop(NORM)), f"missing: {NORM}"),
    "missing head": (change_tensors(lambda found: found.pop("lm_head.weight")), "missing: lm_head.weight"),
    "unexpected tensor": (change_tensors(lambda found: found.update(extra=torch.ones(2))), "unexpected: extra"),
    "bias without field": (
        change_tensors(lambda found: found.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
        "unexpected: model.layers.0.self_attn.q_proj.bias",
    ),
    "has a pooler": (
        change_tensors(lambda found: found.update({"model.layers.0.self_attn.pooler.slot_bias": torch.ones(4)})),
        "unexpected: model.layers.0.self_attn.pooler.slot_bias",
    ),
    "wrong shape": (
        change_tensors(lambda found: found.update({NORM: torch.ones(31)})),
        rf"wrong shape: {NORM} \(31,\) instead of \(32,\)",
    ),
    "wrong vocabulary": (change_config(vocab_size=321), r"\(320, 64\) instead of \(321, 64\)"),
    "packed weights": (
        change_tensors(lambda found: found.update({NORM: torch.ones(32, dtype=torch.uint8)})),
        f"{NORM} is stored as U8",
    ),
    "no tensors": (change_tensors(lambda found: found.clear()), "hold no tensors"),
    "cut off": (cut_off, "not a complete safetensors file"),
    "git-lfs pointer": (pointer, "git lfs pull"),
    "pickles only": (only_pickles, "only pickled weights"),
    "no index": (lost_index, "no model.safetensors.index.json"),
    "missing shard": (index_of({NORM: "model-00002-of-00002.safetensors"}), "'model-00002-of-00002.safetensors'"),
    "shard elsewhere": (index_of({NORM: "../stock/model-00001-of-00002.safetensors"}), "names the shard"),
    "tensor in two shards": (twice, "do not list the same"),
    "index too short": (
        lambda folder: (index_of({})(folder), edit_index(folder, lambda names: names.pop(NORM))),
        "do not list the same",
    ),
    "index too long": (
        lambda folder: (index_of({})(folder), edit_index(folder, lambda names: names.update(x=names[NORM]))),
        "do not list the same",
    ),
}


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_clear_and_leave_nothing(source, output, capsys, case):
    change, message = REFUSALS[case]
    change(source)
    assert main(["--source", str(source), "--output", str(output / "deep"), *OPTIONS]) == 1
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.err.startswith("error: ") and captured.out == ""
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--branching=12"], "recsa_branching=12: must be a power of two"),
        (["--branching=8.0"], "recsa_branching=8.0"),
        (["--top-capacity=8"], "recsa_top_capacity=8: must be at least"),
        (["--recent=3"], "recsa_recent=3"),
        (["--backend=cuda"], "recsa_backend='cuda'"),
        (["--revision=main"], "local folder"),
    ],
)
def test_impossible_options_are_refused(source, output, capsys, options, message):
    assert main(["--source", str(source), "--output", str(output), *OPTIONS, *options]) == 1
    assert message in capsys.readouterr().err
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    "options", [["--private"], ["--push-to-hub", "a/b/c"], ["--max-shard-size=0"], ["--dtype=int8"]]
)
def test_options_without_meaning_are_refused_by_the_parser(source, output, options):
    with pytest.raises(SystemExit) as stopped:
        main(["--source", str(source), "--output", str(output), *options])
    assert stopped.value.code == 2


def test_a_source_that_is_not_there(tmp_path, output):
    with pytest.raises(ConversionError, match="neither an existing folder nor a Hub id"):
        convert(str(tmp_path / "nothing"), output)
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ConversionError, match="is a file"):
        convert(str(tmp_path / "model.gguf"), output)


def test_what_is_at_the_output_already(source, output):
    output.mkdir()
    convert(source, output, recsa=RECSA)  # an empty folder is as good as none
    before = sorted(path.name for path in output.iterdir())
    for there in (output, output / "config.json"):
        with pytest.raises(ConversionError, match="not an empty folder"):
            convert(source, there, recsa=RECSA)
    with pytest.raises(ConversionError, match="not an empty folder"):
        convert(source, source, recsa=RECSA)
    assert sorted(path.name for path in output.iterdir()) == before


def test_values_beyond_the_range_of_the_new_dtype(source, output):
    found = tensors(source)
    found[NORM][3] = 70_000.0
    found["model.norm.weight"][0] = float("inf")  # is infinite in the source already
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=f"{NORM} holds values beyond the range of float16"):
        convert(source, output, dtype="float16", recsa=RECSA)
    assert list(output.parent.iterdir()) == []
    convert(source, output, dtype="bfloat16", recsa=RECSA)


def test_a_full_disk_is_noticed_first(source, output, monkeypatch):
    usage = convert_qwen3.shutil.disk_usage(source)
    monkeypatch.setattr(convert_qwen3.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConversionError, match="are free on the disk"):
        convert(source, output / "deep", recsa=RECSA)
    assert list(output.parent.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write_code", "write_weights", "write_index", "verify"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError("bug")])
def test_whatever_stops_it_nothing_is_left(source, output, monkeypatch, capsys, step, error):
    original = getattr(convert_qwen3, step)

    def stop(*args):
        original(*args)
        assert [path.name.startswith("converted.partial-") for path in output.parent.iterdir()] == [True]
        raise error

    monkeypatch.setattr(convert_qwen3, step, stop)
    arguments = ["--source", str(source), "--output", str(output), *OPTIONS]
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="bug"):
            main(arguments)
    else:
        assert main(arguments) == (130 if error is KeyboardInterrupt else 1)
    assert list(output.parent.iterdir()) == []
    monkeypatch.undo()
    assert main(arguments) == 0


def test_an_interruption_in_the_middle_of_a_tensor(source, output, monkeypatch):
    chunks = convert_qwen3.StoredTensor.chunks

    def some_chunks(self, dtype):
        for number, chunk in enumerate(chunks(self, dtype)):
            if number == 3:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(convert_qwen3, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(convert_qwen3.StoredTensor, "chunks", some_chunks)
    with pytest.raises(KeyboardInterrupt):
        convert(source, output / "a" / "b", recsa=RECSA)
    assert list(output.parent.iterdir()) == []


SLOW = """
import shutil, sys, time
import convert_qwen3

def write(*args):
    print("writing", flush=True)
    time.sleep(60)

def remove(*args, **kwargs):
    print("removing", flush=True)
    time.sleep(1)
    rmtree(*args, **kwargs)

rmtree, shutil.rmtree, convert_qwen3.write_weights = shutil.rmtree, remove, write
sys.exit(convert_qwen3.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(source, output, number):
    """A real signal while weights are written, and an impatient second one during the clean-up."""
    command = [sys.executable, "-c", SLOW, "--source", source, "--output", output, *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=output.parent.parent, **pipes) as process:
        for expected in ("writing", "removing"):
            assert process.stdout.readline().strip() == expected, process.stderr.read()
            process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors
    assert list(output.parent.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# The Hub
# ---------------------------------------------------------------------------------------------------------------------

CONVERT = """
sys.path.insert(0, args[0])
import convert_qwen3
codes = [convert_qwen3.main(options) for options in json.loads(args[1])]
report(codes=codes)
"""


def test_from_the_hub_and_to_the_hub(source, output, tmp_path):
    """Pulls a branch at its commit, converts, pushes; the pushed model loads by its id in a fresh process."""
    tiny_tokenizer().save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    with HubServer(tmp_path / "hub") as hub:
        upload = "from huggingface_hub import HfApi\napi = HfApi()\napi.create_repo('tester/stock')\n"
        upload += "api.upload_folder(repo_id='tester/stock', folder_path=args[0])\nreport()"
        run_fresh(upload, source, home=tmp_path / "a", env=hub.env())
        (first,) = hub.commits("tester/stock")[1:]
        edit_json(source / "generation_config.json", max_length=77)
        run_fresh(upload.replace("')", "', exist_ok=True)"), source, home=tmp_path / "a", env=hub.env())
        newest = hub.commits("tester/stock")[-1]
        base = ["--source", "tester/stock", *OPTIONS]
        calls = [
            [*base, "--output", str(output), "--push-to-hub", "tester/recsa"],
            [*base, "--output", str(output.with_name("b")), "--revision", first],
            [*base, "--output", str(output.with_name("c")), "--revision", "0" * 40],
            ["--source", "tester/absent", "--output", str(output.with_name("c"))],
        ]
        scripts = ROOT / "scripts"
        run = run_fresh(CONVERT, scripts, json.dumps(calls), home=tmp_path / "b", env=hub.env())
        assert run["codes"] == [0, 0, 1, 1] and run["calls"] == []
        assert not output.with_name("c").exists()
        assert hub.files("tester/recsa") == sorted(path.name for path in output.iterdir())
        loaded = run_fresh(LOAD, "tester/recsa", tmp_path / "saved", home=tmp_path / "c", env=hub.env())
        assert hub.unknown == []
    assert loaded["kind"] == "RecSAQwen3ForCausalLM" and loaded["ids"] == [5, 7] and not loaded["own_package"]
    for folder, commit in ((output, newest), (output.with_name("b"), first)):
        found = json.loads((folder / "conversion_report.json").read_text())["source"]
        assert found == {"name": "tester/stock", "revision": commit}
        settings = json.loads((folder / "generation_config.json").read_text())
        assert (settings.get("max_length") == 77) == (commit == newest)
    card = (output / "README.md").read_text()
    assert "license: apache-2.0" in card and "base_model: tester/stock" in card and newest in card
    assert all(same_bits(tensors(output)[name], tensor) for name, tensor in tensors(source).items())


@pytest.mark.parametrize("error", [OSError("no route"), KeyboardInterrupt()])
def test_a_failed_push_keeps_the_folder(source, output, monkeypatch, capsys, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(convert_qwen3, "push", fail)
    arguments = ["--source", str(source), "--output", str(output), *OPTIONS, "--push-to-hub", "tester/recsa"]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert "push failed" in errors and f"complete in {output}" in errors and "hf upload tester/recsa" in errors
    with safe_open(output / "model.safetensors", framework="pt") as weights:
        assert len(list(weights.keys())) == 36 + 9
