"""What `generate` and forward refuse by name: caches that cannot hold the tree (CA-12), and requests that would give a
wrong answer without a word otherwise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, EncoderDecoderCache, Qwen3Config, StaticCache, StoppingCriteriaList

from conftest import DENSE, LOGITS_ATOL, TINY, random_ids, tiny_model
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD, LEAST_ANSWER

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def double() -> RecSAQwen3ForCausalLM:
    """TINY in float64."""
    return tiny_model().double()


def filled_dynamic_cache() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(TINY["num_hidden_layers"]):
        cache.update(*torch.randn(2, 1, TINY["num_key_value_heads"], 5, TINY["head_dim"]), layer)
    return cache


FOREIGN = {
    "DynamicCache": lambda config: DynamicCache(),
    "DynamicCache with layers": lambda config: DynamicCache(config=Qwen3Config(num_hidden_layers=3)),
    "DynamicCache filled": lambda config: filled_dynamic_cache(),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=64),
    "EncoderDecoderCache": lambda config: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "tuple": lambda config: tuple((layer[0], layer[1]) for layer in filled_dynamic_cache()),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_foreign_cache_is_refused_by_name_in_forward(double, kind, name):
    """CA-12: never a silent fall to dense attention."""
    with pytest.raises(TypeError, match=kind.split()[0]):
        double(random_ids(1, 5), **{name: FOREIGN[kind](double.config)})


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_cache_is_refused_by_name_in_generate(double, kind):
    """CA-12: the legacy tuple may be refused by transformers itself."""
    expected = "tuple|Cache" if kind == "tuple" else kind.split()[0]
    with pytest.raises((TypeError, ValueError), match=expected):
        double.generate(random_ids(1, 9), max_new_tokens=2, **{CACHE_FIELD: FOREIGN[kind](double.config)})


@pytest.mark.parametrize("implementation", ["static", "offloaded", "offloaded_static", "quantized"])
@pytest.mark.parametrize("by", ["argument", "config"])
def test_a_cache_implementation_is_refused_by_name(implementation, by):
    """CA-12."""
    model = tiny_model(num_hidden_layers=1)
    options = dict(cache_implementation=implementation) if by == "argument" else {}
    if by == "config":
        model.generation_config.cache_implementation = implementation
    with pytest.raises(ValueError, match=f"cache_implementation='{implementation}'.*RecSA"):
        model.generate(random_ids(1, 9), max_new_tokens=2, **options)


@pytest.mark.parametrize("implementation", [None, "dynamic"])
def test_the_growing_cache_may_be_asked_for(double, implementation):
    """CA-12: the right kind, and no cache at all."""
    out = double.generate(
        random_ids(1, 9), max_new_tokens=2, cache_implementation=implementation, return_dict_in_generate=True
    )
    assert type(getattr(out, CACHE_FIELD)) is RecSACache
    with torch.no_grad():
        assert getattr(double(random_ids(1, 9), use_cache=False), CACHE_FIELD) is None
        assert type(getattr(double(random_ids(1, 9)), CACHE_FIELD)) is RecSACache


def test_a_cache_of_another_geometry_or_batch_is_refused(double):
    """CA-12: a RecSACache that does not fit this model or these rows."""
    other = RecSACache(tiny_model(recsa_branching=2, num_hidden_layers=1).config)
    with pytest.raises(ValueError, match="recsa_branching"):
        double(random_ids(1, 5), cache=other)
    cache = RecSACache(double.config)
    with torch.no_grad():
        double(random_ids(2, 5), cache=cache)
    with pytest.raises(ValueError, match="batch of 3.*2 rows"):
        double(random_ids(3, 5), cache=cache)
    with pytest.raises(ValueError, match="two names of one argument"):
        double(random_ids(2, 5), cache=cache, past_key_values=cache)


# ---- wrong answers without a word -----------------------------------------------------------------------------------


def test_right_padding_is_refused_by_generate(double):
    """The first new token would be read off a pad column and then follow it."""
    ids, mask = random_ids(2, 3 * DENSE), torch.ones(2, 3 * DENSE, dtype=torch.long)
    mask[0, -5:] = 0
    with pytest.raises(ValueError, match="attention_mask: a row ends in padding"):
        double.generate(ids, attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize("assistance", ["lookup", "assistant"])
def test_assistance_behind_a_filled_cache_is_refused(double, assistance):
    """It feeds the whole prompt again behind the cache (stock Qwen3 answers wrongly there)."""
    ids, cache = random_ids(1, 25).repeat(1, 4), RecSACache(double.config)
    with torch.no_grad():
        double(ids[:, :60], cache=cache)
    options = dict(prompt_lookup_num_tokens=3) if assistance == "lookup" else dict(assistant_model=double)
    with pytest.raises(ValueError, match="cache: assisted and prompt-lookup"):
        double.generate(ids, max_new_tokens=5, do_sample=False, **{CACHE_FIELD: cache}, **options)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_generate_takes_a_cache_under_both_names(double, name):
    ids = random_ids(1, 4 * DENSE)
    expected = double.generate(ids, max_new_tokens=5, do_sample=False)
    cache = RecSACache(double.config)
    with torch.no_grad():
        double(ids[:, :-3], cache=cache)
    assert torch.equal(double.generate(ids, max_new_tokens=5, do_sample=False, **{name: cache}), expected)


@pytest.mark.parametrize("size", [0, -5, 2.5, True])
def test_impossible_chunks_are_refused(double, size):
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        double(random_ids(1, 9), prefill_chunk_size=size)


def test_a_filled_cache_under_gradient_checkpointing_is_refused():
    model = tiny_model()
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(random_ids(1, 20), cache=cache)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="cache: a filled cache cannot be read under gradient checkpointing"):
        model(random_ids(1, 20), cache=cache)


def test_a_generous_limit_reserves_nothing(double):
    """Storage follows the tokens read, not `max_new_tokens`."""
    stop = StoppingCriteriaList([lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= 24)])
    out = double.generate(
        random_ids(1, 20), max_new_tokens=100_000, stopping_criteria=stop, return_dict_in_generate=True
    )
    assert getattr(out, CACHE_FIELD).layers[0].levels[0].capacity <= 20 + LEAST_ANSWER + 4


def test_a_fake_run_leaves_no_fake_tensors_behind():
    """Shared RoPE tables made while tracing would reach every other model."""
    model = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    ids = random_ids(1, 20)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(torch.ones(1, DENSE - 1, dtype=torch.long))
    with torch.no_grad():
        assert type(model(ids).logits) is torch.Tensor and bool(model(ids).logits.isfinite().all())


# ---- caches that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 1}, {"head_dim": 16}, {"num_hidden_layers": 4}])
def test_a_cache_of_another_model_is_refused_by_name(changes):
    other, model = tiny_model(**changes), tiny_model()
    cache = RecSACache(other.config)
    with torch.no_grad():
        other(random_ids(1, 20), cache=cache)
        with pytest.raises(ValueError, match="cache: "):
            model(random_ids(1, 4), cache=cache)


def test_a_cache_of_another_dtype_is_refused_and_can_be_moved():
    model = tiny_model()
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(random_ids(1, 4 * DENSE), cache=cache)
        cache.move_to(dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="cache: .*move_to"):
            model(random_ids(1, 4), cache=cache)
        model(random_ids(1, 4), cache=cache.move_to(dtype=torch.float32))


def test_a_cache_cropped_to_nothing_takes_another_batch():
    model = tiny_model()
    cache, ids = RecSACache(model.config), random_ids(3, 4 * DENSE)
    with torch.no_grad():
        model(random_ids(1, 40), cache=cache)
        cache.crop(-40)
        refilled = model(ids, cache=cache).logits
        torch.testing.assert_close(refilled, model(ids, use_cache=False).logits, atol=LOGITS_ATOL, rtol=0)


def test_an_edited_impossible_configuration_is_not_saved(tmp_path):
    model = tiny_model()
    model.config.recsa_top_k = 100
    with pytest.raises(ValueError, match="recsa_top_capacity"):
        model.save_pretrained(tmp_path)
