"""What `generate` and forward refuse to take for a cache: each kind that cannot hold the tree, by its name (CA-12)."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, Qwen3Config, StaticCache

from conftest import TINY, random_ids, tiny_model
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

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
