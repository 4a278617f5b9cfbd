"""The configuration: each field does something, impossible values are refused by name, all spellings of RoPE load."""

import importlib.util
import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from conftest import DENSE, LOGITS_ATOL, TINY, random_ids, tiny_config, tiny_model
from recsa_qwen3 import (
    RecSACache,
    RecSAQwen3Config,
    RecSAQwen3ForCausalLM,
    configuration_recsa_qwen3,
    kernels_walk_recsa_qwen3,
    recsa_trace,
)
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables

torch.set_num_threads(1)

FIELDS = {
    name: parameter.default
    for name, parameter in inspect.signature(RecSAQwen3Config.__init__).parameters.items()
    if name.startswith("recsa_")
}
# Another possible value of each field of TINY.
OTHER = dict(
    recsa_branching=2,
    recsa_top_k=3,
    recsa_recent=0,
    recsa_top_capacity=24,
    recsa_count_bias=True,
    recsa_backend="reference",
    recsa_prefill_chunk=20,
    recsa_cuda_graph=False,
    recsa_cache_dtype="fp8_e4m3",
    recsa_gpu_budget=24.0,
    recsa_distill_weight=0.3,
    recsa_distill_queries="uniform+peak",
    recsa_distill_samples=32,
    recsa_trained_length=2048,
)
IMPOSSIBLE = [
    *[("recsa_branching", value) for value in (0, -4, 1, 3, 12, 4.0, True, None, "4")],
    *[("recsa_top_k", value) for value in (0, 1, -4, 2.5, True, "all", 17)],
    *[("recsa_recent", value) for value in (-1, 3, 1.0, True, None)],
    *[("recsa_top_capacity", value) for value in (0, -1, 15, 16.0, True, "16")],
    *[("recsa_count_bias", value) for value in (1, None, "yes")],
    *[("recsa_backend", value) for value in ("cuda", None, "")],
    *[("recsa_prefill_chunk", value) for value in (0, -1, 2.5, True, None)],
    *[("recsa_cuda_graph", value) for value in (1, None)],
    *[("recsa_cache_dtype", value) for value in ("fp8", None, torch.float8_e4m3fn)],
    *[("recsa_gpu_budget", value) for value in (-1, "24", True)],
    *[("recsa_distill_weight", value) for value in (-0.1, float("inf"), float("nan"), "1", True, None)],
    *[("recsa_distill_queries", value) for value in ("", "all", "uniform+", "uniform+uniform", ("uniform",), None)],
    *[("recsa_distill_samples", value) for value in (0, 1, 2.0, True, None)],  # two strategies by default
    *[("recsa_trained_length", value) for value in (0, 2048.0, True, "2048")],
    ("num_key_value_heads", 3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(num_hidden_layers=1).save_pretrained(path)
    return path


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


# ---- SQ-05: each field is read --------------------------------------------------------------------------------------


def test_other_values_cover_every_field():
    assert set(OTHER) == set(FIELDS)
    assert all(OTHER[name] != TINY.get(name, default) for name, default in FIELDS.items())


@pytest.mark.parametrize("field", ["recsa_top_k", "recsa_recent", "recsa_top_capacity", "recsa_count_bias"])
@pytest.mark.parametrize("how", ["at load", "after load"])
def test_a_change_shows_in_the_output(folder, field, how):
    """SQ-05: by keyword at load or by editing the config afterwards; below M nothing changes."""
    base = RecSAQwen3ForCausalLM.from_pretrained(folder)
    if how == "at load":
        changed = RecSAQwen3ForCausalLM.from_pretrained(folder, **{field: OTHER[field]})
    else:
        changed = RecSAQwen3ForCausalLM.from_pretrained(folder)
        setattr(changed.config, field, OTHER[field])
    ids = random_ids(2, 6 * DENSE)
    one, other = logits_of(base, ids), logits_of(changed, ids)
    torch.testing.assert_close(one[:, :DENSE], other[:, :DENSE], rtol=0, atol=LOGITS_ATOL)
    assert (one - other).abs().max() > 100 * LOGITS_ATOL
    with torch.no_grad():  # and in decoding, with a cache made after the change
        cache = RecSACache(changed.config)
        changed(ids[:, :-1], cache=cache)
        step = changed(ids[:, -1:], cache=cache).logits
    torch.testing.assert_close(step, other[:, -1:], rtol=0, atol=10 * LOGITS_ATOL)


@pytest.mark.parametrize("how", ["at load", "after load"])
def test_dense_on_request(folder, how):
    """SQ-05: recsa_top_k=None is dense attention at every length: the same as an M that nothing exceeds."""
    ids = random_ids(1, 6 * DENSE)
    expected = logits_of(RecSAQwen3ForCausalLM.from_pretrained(folder, recsa_top_capacity=1000), ids)
    model = RecSAQwen3ForCausalLM.from_pretrained(folder, **({"recsa_top_k": None} if how == "at load" else {}))
    if how == "after load":
        sparse = logits_of(model, ids)
        assert (sparse - expected).abs().max() > 100 * LOGITS_ATOL
        model.config.recsa_top_k = None
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=LOGITS_ATOL)
    assert model.last_backend == "dense"


def test_branching_shows_in_the_shape():
    """SQ-05: the poolers hold one bias per child."""
    for r in (2, 4):
        pooler = tiny_model(recsa_branching=r).model.layers[0].self_attn.pooler
        assert pooler.slot_bias.shape == (r,)


@pytest.mark.parametrize("length", [3, 6 * DENSE])
def test_another_branching_after_load_is_refused(folder, length):
    """SQ-05: poolers are trained for one r; an edited one is refused at any length, not only where a node is built."""
    model = RecSAQwen3ForCausalLM.from_pretrained(folder)
    model.config.recsa_branching = 2
    with pytest.raises(ValueError, match="recsa_branching"):
        logits_of(model, random_ids(1, length))


def test_backend_and_chunk_are_read(monkeypatch):
    """SQ-05: a backend that is not here is refused, the chunk is the number of columns that run at once."""
    model = tiny_model(num_hidden_layers=1)
    ids = random_ids(1, 70)
    chunks = []
    for size in (FIELDS["recsa_prefill_chunk"], OTHER["recsa_prefill_chunk"]):
        model.config.recsa_prefill_chunk = size
        with torch.no_grad(), recsa_trace(model) as trace:
            model(ids, use_cache=True)
        chunks.append(len(trace.forwards))
    assert chunks == [1, 4]
    model.config.recsa_backend = "reference"
    logits_of(model, ids)
    model.config.recsa_backend = "triton"
    monkeypatch.setattr(kernels_walk_recsa_qwen3, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="recsa_backend='triton': needs a CUDA device"):
        logits_of(model, ids)


def test_top_capacity_none_means_as_many_as_below():
    """SQ-05: M = k * r, also after k is edited."""
    model = tiny_model(recsa_top_capacity=None)
    ids = random_ids(1, 17)
    logits_of(model, ids)
    assert model.last_backend == "dense+reference"
    model.config.recsa_top_k = 5
    logits_of(model, ids)
    assert model.last_backend == "dense"


# ---- SQ-05: impossible values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(field, value):
    """SQ-05: at construction, and where a loaded configuration is edited."""
    # a budget above M / r may be named by either of the two fields
    name = "recsa_(top_k|top_capacity)" if (field, value) == ("recsa_top_k", 17) else field
    with pytest.raises(ValueError, match=name):
        tiny_config(**{field: value})
    config = tiny_config()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=name):
        config.check_recsa()


@pytest.mark.parametrize(("field", "value"), [("recsa_recent", 3), ("recsa_top_capacity", 8), ("recsa_backend", "x")])
def test_impossible_edits_are_refused_by_the_model(folder, field, value):
    model = RecSAQwen3ForCausalLM.from_pretrained(folder)
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=field):
        model(random_ids(1, 3))
    with pytest.raises(ValueError, match=field):
        RecSAQwen3ForCausalLM.from_pretrained(folder, **{field: value})


@pytest.mark.parametrize("field", ["recsa_recent", "rope_parameters"])
def test_an_edit_between_two_forwards_is_refused_and_can_be_taken_back(folder, field):
    """Also one within a field that keeps its identity."""
    model, ids = RecSAQwen3ForCausalLM.from_pretrained(folder), random_ids(1, 40)
    before, rope = logits_of(model, ids), model.config.rope_parameters
    kind, recent = rope["rope_type"], model.config.recsa_recent
    for _ in range(2):
        if field == "rope_parameters":
            rope["rope_type"] = "dynamic"
        else:
            model.config.recsa_recent = 99
        for _ in range(2):
            with pytest.raises(ValueError, match=field):
                model(ids)
        rope["rope_type"], model.config.recsa_recent = kind, recent
        assert torch.equal(logits_of(model, ids), before)


def test_possible_values_are_accepted():
    for fields in (
        dict(recsa_top_k=2, recsa_recent=0, recsa_top_capacity=8),
        dict(recsa_top_k=None, recsa_top_capacity=1, recsa_recent=9),
        dict(recsa_branching=64, recsa_top_k=4, recsa_top_capacity=None),
        dict(recsa_top_k=4, recsa_recent=2, recsa_top_capacity=16),
        dict(recsa_top_k=16, recsa_top_capacity=100),
    ):
        config = tiny_config(**fields)
        assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    "fields",
    [
        dict(use_sliding_window=True, sliding_window=16),
        dict(use_sliding_window=True, sliding_window=16, max_window_layers=0),
        dict(layer_types=["sliding_attention"] * 3, sliding_window=16),
        dict(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_sliding_windows_are_refused(fields):
    with pytest.raises(ValueError, match="use_sliding_window / layer_types"):
        tiny_config(**fields)


def test_a_sliding_window_after_load_is_refused():
    model = tiny_model(num_hidden_layers=1)
    model.config.use_sliding_window = True
    with pytest.raises(ValueError, match="use_sliding_window"):
        model(random_ids(1, 3))
    config = tiny_config(use_sliding_window=False, sliding_window=16, layer_types=["full_attention"] * 3)
    assert set(config.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="dynamic", factor=2.0),
        dict(rope_type="longrope", short_factor=[1.0] * 16, long_factor=[2.0] * 16, factor=2.0),
    ],
)
def test_rope_that_depends_on_the_prompt_is_refused(rope):
    fields = dict(rope_theta=1e4, original_max_position_embeddings=256, **rope)
    with pytest.raises(ValueError, match=f"rope_parameters.*{rope['rope_type']}"):
        tiny_config(rope_parameters=fields)
    model = tiny_model(num_hidden_layers=1)
    model.config.rope_parameters = fields
    with pytest.raises(ValueError, match="rope_parameters"):
        model(random_ids(1, 3))


# ---- SQ-05: saved and restored --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, OTHER, dict(recsa_top_k=None, recsa_top_capacity=None)])
def test_values_survive_saving(tmp_path, fields):
    """SQ-05, LD-06: to_dict -> from_dict and save -> load are stable, and write each field."""
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in FIELDS} == {name: getattr(config, name) for name in FIELDS}
    loaded = RecSAQwen3Config.from_pretrained(tmp_path)
    for other in (loaded, RecSAQwen3Config.from_dict(config.to_dict())):
        restored, original = other.to_dict(), config.to_dict()
        for name in ("_name_or_path", "transformers_version"):  # transformers fills these in while loading
            restored.pop(name, None), original.pop(name, None)
        assert restored == original
        for name in FIELDS:
            assert getattr(other, name) == getattr(config, name)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == written


def test_a_configuration_without_the_fields_loads(tmp_path):
    """SQ-05: an older or a stock Qwen3 configuration gets the defaults."""
    stock = Qwen3Config(**{name: value for name, value in TINY.items() if not name.startswith("recsa_")})
    stock.save_pretrained(tmp_path)
    assert not any(name.startswith("recsa_") for name in json.loads((tmp_path / "config.json").read_text()))
    config = RecSAQwen3Config.from_pretrained(tmp_path)
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert config.hidden_size == TINY["hidden_size"] and config.rope_parameters == stock.rope_parameters
    fields = {**stock.to_dict(), "model_type": "recsa_qwen3"}
    assert RecSAQwen3Config.from_dict(fields).recsa_branching == FIELDS["recsa_branching"]


def test_positional_meaning_of_qwen3_fields_is_unchanged():
    """METHOD 7: every field of Qwen3 with its meaning and default."""
    stock, own = Qwen3Config().to_dict(), RecSAQwen3Config().to_dict()
    for name in ("model_type", "auto_map", *FIELDS):
        stock.pop(name, None), own.pop(name, None)
    assert own == stock


# ---- LD-06: spellings of RoPE ---------------------------------------------------------------------------------------

YARN = dict(factor=4.0, original_max_position_embeddings=64)
SPELLINGS = {
    "v4 without scaling": dict(rope_theta=5e5),
    "v4, scaling null": dict(rope_theta=5e5, rope_scaling=None),
    "v4 yarn with type": dict(rope_theta=5e5, rope_scaling=dict(type="yarn", **YARN)),
    "v4 yarn with rope_type": dict(rope_theta=5e5, rope_scaling=dict(rope_type="yarn", **YARN)),
    "v5 with theta inside": dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "scaling without theta": dict(rope_scaling=dict(rope_type="yarn", **YARN)),
    # beyond the six
    "v5 yarn": dict(rope_parameters=dict(rope_type="yarn", rope_theta=5e5, **YARN)),
    "linear": dict(rope_theta=5e5, rope_scaling=dict(rope_type="linear", factor=3.0)),
    "llama3": dict(
        rope_parameters=dict(rope_type="llama3", rope_theta=5e5, low_freq_factor=1.0, high_freq_factor=4.0, **YARN)
    ),
    "nothing": {},
}


def spelled(model_type: str, fields: dict) -> dict:
    recsa = model_type == "recsa_qwen3"
    base = {name: value for name, value in TINY.items() if recsa or not name.startswith("recsa_")}
    return {**base, "model_type": model_type, **fields}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("saved", [False, True])
def test_rope_spellings_equal_stock_qwen3(tmp_path, spelling, saved):
    """LD-06: the frequencies and the attention factor of the installed stock Qwen3, also after saving and loading."""
    stock = Qwen3Config.from_dict(json.loads(json.dumps(spelled("qwen3", SPELLINGS[spelling]))))
    (tmp_path / "config.json").write_text(json.dumps(spelled("recsa_qwen3", SPELLINGS[spelling])))
    config = RecSAQwen3Config.from_pretrained(tmp_path)
    if saved:
        config.save_pretrained(tmp_path)
        config = RecSAQwen3Config.from_pretrained(tmp_path)
    cos, sin = rotary_tables(config, torch.device("cpu"), 300)
    expected = Qwen3RotaryEmbedding(stock)(torch.zeros(1), torch.arange(300)[None])
    for table, other in zip((cos, sin), expected, strict=True):
        assert torch.equal(table[:300], other[0])
    if "yarn" in spelling:
        assert cos[0, 0] > 1.1  # the attention factor
    assert RecSAQwen3Config.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_another_rope_after_load_is_honoured():
    """SQ-05: tables follow the configuration, whatever was computed before."""
    model, ids = tiny_model(num_hidden_layers=1), random_ids(1, 3 * DENSE)
    first = logits_of(model, ids)
    rope = dict(model.config.rope_parameters)
    model.config.rope_parameters = {**rope, "rope_theta": 3.0}
    assert (logits_of(model, ids) - first).abs().max() > 100 * LOGITS_ATOL
    model.config.rope_parameters = rope
    assert torch.equal(logits_of(model, ids), first)


# ---- LD-03: the gate for transformers' version ----------------------------------------------------------------------


def load_under(version: str, monkeypatch):
    """Runs the configuration file as a fresh module while transformers claims this version."""
    monkeypatch.setattr(transformers, "__version__", version)
    spec = importlib.util.spec_from_file_location("configuration_under_test", configuration_recsa_qwen3.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.16.9", "5.17.0.dev0", "5.25.0.dev0", "5.25.0", "6.0.0"])
def test_versions_outside_the_range_are_refused(version, monkeypatch):
    """LD-03: at import, in a sentence that says which versions work and which was found."""
    monkeypatch.delenv("RECSA_UNTESTED_TRANSFORMERS", raising=False)
    with pytest.raises(ImportError) as refusal:
        load_under(version, monkeypatch)
    for words in ("5.17", "5.25", f"found {version}", "RECSA_UNTESTED_TRANSFORMERS"):
        assert words in str(refusal.value)
    monkeypatch.setenv("RECSA_UNTESTED_TRANSFORMERS", "1")
    assert load_under(version, monkeypatch).RecSAQwen3Config


@pytest.mark.parametrize("version", ["5.17.0", "5.17.3", "5.20.1", "5.24.0", "5.24.9"])
def test_versions_inside_the_range_load(version, monkeypatch):
    monkeypatch.delenv("RECSA_UNTESTED_TRANSFORMERS", raising=False)
    assert load_under(version, monkeypatch).RecSAQwen3Config(**TINY).recsa_top_k == 4
