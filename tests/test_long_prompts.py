"""What a long prompt needs: memory foreseen and allocated once, a bar, an interruption that leaves a usable cache."""

import pytest
import torch
from transformers.utils import logging

from conftest import DENSE, LOGITS_ATOL, random_ids, tiny_config, tiny_model
from recsa_qwen3 import (
    RecSACache,
    cache_layer_recsa_qwen3,
    cache_recsa_qwen3,
    memory_recsa_qwen3,
    progress_recsa_qwen3,
)
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD, LEAST_ANSWER

torch.set_num_threads(1)
DTYPES = ["auto", "fp8_e4m3"]


def read(model, ids, cache, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, cache=cache, **options).logits


# ---- memory that can be foreseen ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, DENSE + 1, 6 * DENSE + 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_estimate_is_what_a_cache_takes(dtype, tokens, batch):
    model = tiny_model(recsa_cache_dtype=dtype)
    cache = RecSACache(model.config, reserve=tokens)
    read(model, random_ids(batch, tokens), cache)
    memory = RecSACache.estimate(model.config, tokens, batch, torch.float32)
    held = sum(level.nbytes for layer in cache.layers for level in layer.levels)
    # a first allocation is no smaller than this
    least = cache_layer_recsa_qwen3._FIRST_TOKENS
    if tokens >= least:
        assert memory.token_bytes + memory.node_bytes == held
    else:
        assert held <= RecSACache.estimate(model.config, least, batch, torch.float32).device_bytes
    assert memory.host_bytes == 0 and memory.device_bytes > memory.token_bytes + memory.node_bytes
    assert f"{tokens:,} tokens" in str(memory)


def test_a_million_tokens_of_qwen3_4b_by_arithmetic():
    config = tiny_config(
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, hidden_size=2560,
        intermediate_size=9728, recsa_branching=16, recsa_top_k=128, recsa_top_capacity=8192,
    )  # fmt: skip
    tokens = 1 << 20
    vector = 36 * 8 * 128 * 2
    nodes = sum(tokens // 16**level for level in range(1, 6))
    plain = RecSACache.estimate(config, tokens, dtype=torch.bfloat16)
    assert plain.token_bytes == 2 * tokens * vector
    assert plain.node_bytes == pytest.approx(3 * nodes * vector, rel=1e-3)
    packed = RecSACache.estimate(config, tokens, dtype=torch.bfloat16, cache_dtype="fp8_e4m3")
    assert packed.token_bytes == tokens * (vector + 2 * 36 * 8) and packed.node_bytes == plain.node_bytes
    small = RecSACache.estimate(config, 1 << 18, dtype=torch.bfloat16, gpu_budget=24, weight_bytes=8 << 30)
    usable = 24 * (1 - memory_recsa_qwen3.GAPS) * 2**30
    assert small.device_bytes + (8 << 30) <= usable and small.host_bytes > 0
    layer = 2 * (1 << 18) * 8 * 128 * 2
    assert small.token_bytes + small.host_bytes == 36 * layer and small.host_bytes == small.host_layers * layer
    assert small.device_bytes + (8 << 30) + layer > usable  # one more layer would not fit


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"batch": 0}, {"cache_dtype": "int4"}, {"tokens": 10.5}, {"gpu_budget": "24"}, {"dtype": "half"}],
)
def test_an_impossible_estimate_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        RecSACache.estimate(tiny_config(), **{"tokens": 5, **wrong})


@pytest.mark.parametrize("chunk", [20, 4096])
def test_generate_allocates_once(monkeypatch, chunk):
    """Prompt and answer lie in the storage of the first allocation, whatever the chunks."""
    model, made = tiny_model(num_hidden_layers=1, recsa_prefill_chunk=chunk), []
    real = cache_layer_recsa_qwen3.LevelStorage._zeros
    monkeypatch.setattr(
        cache_layer_recsa_qwen3.LevelStorage,
        "_zeros",
        lambda level, like, n: made.append((level, n)) or real(level, like, n),
    )
    out = model.generate(random_ids(2, 90), max_new_tokens=50, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, CACHE_FIELD)
    levels = [level for level, _ in made]
    assert len(levels) == len(set(map(id, levels))) == len(cache.layers[0].levels)
    assert cache.layers[0].levels[0].capacity == 140


@pytest.mark.parametrize("limit", [{"max_new_tokens": 10**6}, {"max_length": 10**6}])
def test_a_distant_limit_reserves_little(limit):
    model = tiny_model(num_hidden_layers=1)
    model.generation_config.eos_token_id = list(range(2, 320))  # whatever comes ends it
    out = model.generate(random_ids(1, 90), do_sample=False, return_dict_in_generate=True, **limit)
    assert out.sequences.shape[1] == 91
    assert getattr(out, CACHE_FIELD).layers[0].levels[0].capacity <= 90 + LEAST_ANSWER + 4


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_what_does_not_fit_is_refused_before_it_is_read(monkeypatch, how):
    model = tiny_model(recsa_prefill_chunk=20)
    monkeypatch.setattr(cache_recsa_qwen3, "free_bytes", lambda device: 100_000)
    ids, cache = random_ids(2, 400), RecSACache(model.config)
    message = r"40[02] tokens.*0.00 GiB free.*recsa_cache_dtype='fp8_e4m3'.*shorter prompt"
    with pytest.raises(MemoryError, match=message):
        if how == "forward":
            read(model, ids, cache)
        else:
            model.generate(ids, max_new_tokens=2, **{CACHE_FIELD: cache})
    assert not cache.is_initialized and cache.get_seq_length() == 0
    monkeypatch.undo()
    assert read(model, ids, cache).shape[1] == 400  # and can be used when there is room


def test_a_shorter_prompt_fits_after_a_refusal(monkeypatch):
    """What was refused is not reserved either: neither for a prompt in chunks nor for one in a single chunk."""
    model = tiny_model(recsa_prefill_chunk=20)
    cache = RecSACache(model.config)
    free = RecSACache.estimate(model.config, 150, dtype=torch.float32).device_bytes
    monkeypatch.setattr(cache_recsa_qwen3, "free_bytes", lambda device: free)
    with pytest.raises(MemoryError):
        read(model, random_ids(1, 3000), cache)
    read(model, random_ids(1, 15), cache)
    assert cache.layers[0].levels[0].capacity < 100
    read(model, random_ids(1, 100), cache)


def test_room_counts_the_copy_that_a_fork_must_make(monkeypatch):
    model = tiny_model(recsa_prefill_chunk=20)
    prefix = RecSACache(model.config, reserve=600)
    read(model, random_ids(1, 400), prefix)
    fork = prefix.fork()
    read(model, random_ids(1, 30), fork)
    monkeypatch.setattr(cache_recsa_qwen3, "free_bytes", lambda device: 0)
    with pytest.raises(MemoryError):
        read(model, random_ids(1, 30), prefix)  # the fork reads behind it
    read(model, random_ids(1, 30), fork)  # in place
    del fork
    read(model, random_ids(1, 30), prefix)


def test_a_budget_that_cannot_be_kept_is_said(monkeypatch):
    model, said = tiny_model(), []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 << 30)
    monkeypatch.setattr(cache_recsa_qwen3.logger, "warning", said.append)
    need = RecSACache.estimate(model.config, 400, dtype=torch.float32, gpu_budget=2.0)
    for budget, number in ((4.0, 0), (0, 0), (None, 0), (2.0, 1)):
        RecSACache(model.config, gpu_budget=budget)._warn_of_budget(need, torch.device("cuda", 0))
        assert len(said) == number
    assert "recsa_gpu_budget=2.0" in said[0] and "about 3.0 GiB" in said[0]


def test_a_loaded_cache_has_room_for_questions(tmp_path):
    model = tiny_model()
    cache = RecSACache(model.config)
    read(model, random_ids(1, 90), cache)
    cache.save(tmp_path / "kept")
    loaded = RecSACache.load(tmp_path / "kept", model)
    keys = loaded.layers[0].levels[0].tensors["keys"]
    fork = loaded.fork()
    read(model, random_ids(1, 50), fork)
    assert fork.layers[0].levels[0].tensors["keys"] is keys


@pytest.mark.parametrize(
    "wrong", [{"gpu_budget": -1}, {"gpu_budget": float("nan")}, {"reserve": 1e3}, {"reserve": -1}]
)
def test_impossible_arguments_of_a_cache_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RecSACache(tiny_config(), **wrong)


def test_a_cache_config_beside_a_cache_must_agree():
    model = tiny_model()
    options = {"max_new_tokens": 2, "cache_config": {"dtype": "fp8_e4m3"}}
    with pytest.raises(ValueError, match="cache_config"):
        model.generate(random_ids(1, 9), **options, **{CACHE_FIELD: RecSACache(model.config)})
    model.generate(random_ids(1, 9), **options, **{CACHE_FIELD: RecSACache(model.config, dtype="fp8_e4m3")})


def test_room_counts_what_the_cache_already_holds(monkeypatch):
    model = tiny_model(recsa_prefill_chunk=20)
    need = RecSACache.estimate(model.config, 400, dtype=torch.float32)
    monkeypatch.setattr(cache_recsa_qwen3, "free_bytes", lambda device: need.working_bytes)
    cache = RecSACache(model.config, reserve=400)
    read(model, random_ids(1, 10), cache)  # a short prompt is not asked about
    read(model, random_ids(1, 390), cache)
    with pytest.raises(MemoryError):
        read(model, random_ids(1, 100), cache)


def test_a_host_budget_is_for_gpus():
    if torch.cuda.is_available():
        pytest.skip("tests/test_gpu_long_prompts.py has it")
    model = tiny_model()
    with pytest.raises(ValueError, match="recsa_gpu_budget: is for CUDA devices"):
        read(model, random_ids(1, 5), RecSACache(model.config, gpu_budget=1))


def test_free_memory_is_known_here():
    assert memory_recsa_qwen3.free_bytes(None) > 1 << 20


# ---- interrupted ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["first layer", "last layer", "growing"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_interruption_leaves_whole_chunks(monkeypatch, at, padded):
    """Ctrl-C within the third chunk: two are kept on every layer, and reading goes on from there."""
    model, calls = tiny_model(recsa_prefill_chunk=30), []
    ids, mask = random_ids(2, 150), torch.ones(2, 150, dtype=torch.long)
    if padded:
        mask[0, :41] = 0
    cache, begin = RecSACache(model.config), 0
    target, name, number = model.model.layers[0 if at == "first layer" else -1].self_attn.o_proj, "forward", 3
    if at == "growing":  # a later turn, whose room is made in its first chunk: here within the second layer
        begin, target, name, number = 60, cache_layer_recsa_qwen3.LevelStorage, "_zeros", 6
        read(model, ids[:, :60], cache, attention_mask=mask[:, :60])
    real = getattr(target, name)

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, broken)
        with pytest.raises(KeyboardInterrupt):
            read(model, ids[:, begin:], cache, attention_mask=mask)
    assert cache.get_seq_length() == 60 and {layer.history.columns for layer in cache.layers} == {60}
    rest = read(model, ids[:, 60:], cache, attention_mask=mask)
    whole = read(model, ids, RecSACache(model.config), attention_mask=mask)
    torch.testing.assert_close(rest[:, -1], whole[:, -1], rtol=0, atol=LOGITS_ATOL)


# ---- the bar --------------------------------------------------------------------------------------------------------


@pytest.fixture
def bars(monkeypatch):
    """Bars that appear at once."""
    monkeypatch.setattr(progress_recsa_qwen3, "DELAY", 0)
    enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()


def test_a_bar_is_shown_and_can_be_silenced(monkeypatch, bars, capfd):
    model = tiny_model(num_hidden_layers=1, recsa_prefill_chunk=40)

    def shown(batch, tokens) -> str:
        read(model, random_ids(batch, tokens), RecSACache(model.config))
        return capfd.readouterr().err

    assert all(part in shown(2, 110) for part in ("reading: 100%", "220/220", "tok/s"))
    assert shown(3, 40) == ""  # one chunk
    monkeypatch.setattr(progress_recsa_qwen3, "DELAY", 60)
    assert shown(2, 110) == ""
    monkeypatch.setattr(progress_recsa_qwen3, "DELAY", 0)
    logging.disable_progress_bar()
    assert shown(2, 110) == ""


def test_an_error_ends_the_bar(bars, capfd):
    parts = [(slice(begin, begin + 10), None) for begin in range(0, 40, 10)]
    with pytest.raises(RuntimeError, match="stop"):
        for number, _ in enumerate(progress_recsa_qwen3.reading(parts, 1, torch.device("cpu"))):
            if number == 2:
                raise RuntimeError("stop")
    assert "20.0/40.0" in capfd.readouterr().err
