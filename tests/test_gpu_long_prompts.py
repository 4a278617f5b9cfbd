"""Tokens in host memory under a GPU budget, and float8 trees at the product's shapes; part of `make test-gpu`."""

import copy
import gc

import pytest
import torch

from conftest import DENSE, random_ids, tiny_model
from recsa_qwen3 import RecSACache, memory_recsa_qwen3
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TOKENS = 6 * DENSE + 3


def model_on_gpu(**changes):
    return tiny_model(**changes).cuda().to(torch.bfloat16)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the memory behind a CUDA tensor is the host's: PyTorch's allocator does not know it."""
    blocks = [(b["address"], b["total_size"]) for b in torch.cuda.memory_snapshot()]
    return not any(begin <= tensor.data_ptr() < begin + size for begin, size in blocks)


def partly_resident(model, tokens: int, layers: int) -> RecSACache:
    """A cache whose budget allows so many layers to keep their tokens on the GPU."""
    free = RecSACache.estimate(model.config, tokens, 1, torch.bfloat16, gpu_budget=0)
    wanted = free.device_bytes + (layers + 0.5) * free.host_bytes / model.config.num_hidden_layers
    budget = wanted / (1 - memory_recsa_qwen3.GAPS) / memory_recsa_qwen3.GIB
    cache = RecSACache(model.config, reserve=tokens, gpu_budget=budget)
    cache.place.weight_bytes = 0
    return cache


def test_memory_of_the_host_is_read_and_written_as_of_the_device():
    tensor = memory_recsa_qwen3.host_zeros((3, 5, 700, 8), torch.bfloat16, torch.device("cuda", 0))
    assert tensor.is_cuda and on_host(tensor) and not tensor.any()
    states = torch.randn(3, 5, 700, 8, device="cuda").bfloat16()
    tensor.copy_(states)
    assert torch.equal(tensor, states) and torch.equal(tensor[1:, ::2, 7:9] * 2, states[1:, ::2, 7:9] * 2)
    assert torch.equal(tensor.cpu(), states.cpu())
    copied = tensor.clone()
    del tensor
    gc.collect()
    assert torch.equal(copied, states) and not on_host(copied)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_place_changes_no_bit(dtype, backend, layers):
    """Prefill in one and in chunks, decoding as a graph, later turns: with 0, 1 and all layers' tokens on the GPU."""
    model = model_on_gpu(recsa_backend=backend, recsa_cache_dtype=dtype, recsa_prefill_chunk=40)
    ids, more = random_ids(1, TOKENS).cuda(), random_ids(1, 7).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def answers(cache):
        out = model.generate(ids, **options, **{CACHE_FIELD: cache})
        longer = torch.cat([out.sequences, more], 1)
        again = model.generate(longer, attention_mask=torch.ones_like(longer), **options, **{CACHE_FIELD: cache})
        return torch.cat([*out.logits, *again.logits]), again.sequences

    expected = answers(RecSACache(model.config))
    cache = partly_resident(model, TOKENS + 40, layers)
    actual = answers(cache)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    held = [layer.levels[0].tensors for layer in cache.layers]
    assert [on_host(tensors["keys"]) for tensors in held] == [index >= layers for index in range(3)]
    assert not any(on_host(level.tensors["keys"]) for layer in cache.layers for level in layer.levels[1:])


def test_methods_of_a_cache_on_the_host():
    model = model_on_gpu(recsa_prefill_chunk=40)
    ids = random_ids(2, TOKENS).cuda()
    more = random_ids(2, 5).cuda()

    def fill(rows, budget=None):
        cache = RecSACache(model.config, gpu_budget=budget)
        with torch.no_grad():
            model(rows, cache=cache)
        return cache

    def read(cache, rows):
        with torch.no_grad():
            return model(rows, cache=cache).logits

    def same(changed, rows):
        assert on_host(changed.layers[0].levels[0].tensors["keys"])
        assert torch.equal(read(changed, more), read(fill(rows), more))

    changed = fill(ids, 0)
    copied = copy.deepcopy(changed)
    assert (
        copied.layers[0].levels[0].tensors["keys"].data_ptr() != changed.layers[0].levels[0].tensors["keys"].data_ptr()
    )
    same(copied, ids)
    changed.reorder_cache(torch.tensor([1, 0], device="cuda"))
    same(changed, ids.flip(0))
    changed = fill(ids, 0)
    changed.batch_select_indices(torch.tensor([1]))
    changed.batch_repeat_interleave(2)
    same(changed, ids[[1, 1]])
    changed = fill(torch.cat([ids, more], 1), 0)
    changed.crop(-5)
    same(changed, ids)
    kept = model.generate(ids, num_beams=3, max_new_tokens=9, do_sample=False)
    model.config.recsa_gpu_budget = 0
    assert torch.equal(model.generate(ids, num_beams=3, max_new_tokens=9, do_sample=False), kept)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_kept_and_forked_in_every_place(dtype, tmp_path):
    """Filled under a budget, then forked, and opened again on the GPU and under the budget: no bit changes."""
    model = model_on_gpu(recsa_cache_dtype=dtype, recsa_prefill_chunk=40)
    room, ids = TOKENS + 40, random_ids(1, TOKENS).cuda()
    caches = [RecSACache(model.config, reserve=room, gpu_budget=budget) for budget in (None, 0)]
    with torch.no_grad():
        for cache in caches:
            model(ids, cache=cache)
    caches[1].save(tmp_path / "kept")
    caches += [
        caches[1].fork(),
        RecSACache.load(tmp_path / "kept", model, reserve=room),
        RecSACache.load(tmp_path / "kept", model, reserve=room, gpu_budget=0),
    ]
    whole = torch.cat([ids, random_ids(1, 7).cuda()], 1)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    logits = []
    for cache in reversed(caches):  # the fork before its origin, which then has to part from it
        out = model.generate(whole, attention_mask=torch.ones_like(whole), **options, **{CACHE_FIELD: cache})
        logits.append(torch.cat(out.logits))
    assert all(torch.equal(logits[-1], other) for other in logits)
    places = [on_host(cache.layers[1].levels[0].tensors["keys"]) for cache in caches]
    assert places == [False, True, True, False, True]


def test_host_memory_is_given_back():
    """Twenty caches of 64 MiB of page-locked memory one after another, each registered anew."""
    device = torch.device("cuda", 0)
    for _ in range(20):
        tensor = memory_recsa_qwen3.host_zeros((1 << 26,), torch.uint8, device)
        tensor[-1] = 1
        weak = tensor.data_ptr()
        del tensor
        gc.collect()
    attributes = torch.cuda.cudart()
    assert weak and attributes is not None
    # registering the same pages twice would fail, had they not been given back
    again = memory_recsa_qwen3.host_zeros((1 << 26,), torch.uint8, device)
    assert int(again.sum()) == 0


def test_a_prompt_beyond_the_budget_is_refused_before_it_is_read():
    model = model_on_gpu(recsa_prefill_chunk=40)
    total = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((used + (1 << 20)) / total)
    try:
        cache = RecSACache(model.config, reserve=1 << 20)
        with pytest.raises(MemoryError, match=r"1,048,576 tokens.*recsa_cache_dtype.*recsa_gpu_budget"):
            model.generate(random_ids(1, TOKENS).cuda(), max_new_tokens=2, **{CACHE_FIELD: cache})
        assert not cache.is_initialized
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
