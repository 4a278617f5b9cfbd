"""The dense baselines: stock Qwen3, YaRN by length, and Dual Chunk Attention against its definition in float64."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import baselines
from baselines import DualChunkQwen3ForCausalLM, choose_backend, dual_chunk_attention, dual_chunks, load_baseline
from conftest import LOGITS_ATOL, RELATIVE_RMS, TINY, random_ids, relative_rms, tiny_model
from convert_qwen3 import convert
from recsa_qwen3 import RecSAQwen3ForCausalLM
from recsa_qwen3.distillation_recsa_qwen3 import teacher_tables
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

TRAINED = 24  # s = 18, w = 6
STOCK = {name: value for name, value in TINY.items() if not name.startswith("recsa_")}
STOCK |= {"max_position_embeddings": TRAINED, "num_hidden_layers": 2}
# (s, w) for c = 24; w < c - s in two of them
CHUNKS = [(18, 6), (16, 5), (7, 17), (5, 3)]
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def stock_model(**changes) -> Qwen3ForCausalLM:
    """A random stock model with random norms, which never generates the pad id."""
    model = Qwen3ForCausalLM(Qwen3Config(**{**STOCK, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.lm_head.weight.data[STOCK["pad_token_id"]] = 0
    return model


@pytest.fixture
def stock(tmp_path):
    """A stock model, and the folder that it is saved in."""
    model = stock_model()
    model.save_pretrained(tmp_path / "stock")
    return model, tmp_path / "stock"


@pytest.fixture
def make(stock):
    """`load_baseline` on the stock checkpoint, on the CPU."""
    return lambda method, tokens=200, **options: load_baseline(stock[1], method, tokens, device="cpu", **options)


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=LOGITS_ATOL)


def turned(states, positions, theta):
    """RoPE by its definition: pairs (i, i + D/2) turned by position * theta ** (-2 i / D), float64 `[..., D]`."""
    half = states.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    first, second = states.double().split(half, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


def definition(query, key, value, s, c, w, theta, scaling):
    """Dual Chunk Attention as a T x T matrix in float64, from queries `[B, H, T, D]` and keys before RoPE."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (states.double().repeat_interleave(group, 1) for states in (key, value))
    t = torch.arange(tokens)
    key = turned(key, t % s, theta)
    at = torch.tensor([i % s + s if i % s < w else c - 1 for i in range(tokens)])
    products = [turned(query, positions, theta) @ key.mT for positions in (t % s, at, torch.full((tokens,), c - 1))]
    back = t[:, None] // s - t // s  # chunks between query and key
    matrix = torch.where(back == 0, products[0], torch.where(back == 1, products[1], products[2])) * scaling
    return matrix.masked_fill(t > t[:, None], -torch.inf).softmax(-1) @ value


def operands(tokens, s, group, w=None, head_dim=16, dtype=torch.float32):
    """Random query, key, value before RoPE, the rotations of the queries, and the key as it is cached.

    All in float32; values of the first three that `dtype` holds.
    """
    spec = dual_chunks(TRAINED, tokens, s, w)
    config = Qwen3Config(**STOCK | {"head_dim": head_dim}, dual_chunks=spec._asdict())
    query, key, value = (torch.randn(2, heads, tokens, head_dim).to(dtype).float() for heads in (2 * group, 2, 2))
    rotations = baselines.DualChunkRotaryEmbedding(config)(query, torch.arange(tokens)[None])
    cached = turned(key, torch.arange(tokens) % s, config.rope_parameters["rope_theta"]).float()
    return query, key, value, rotations, cached, config


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("s", "w"), CHUNKS)
def test_dual_chunk_attention_equals_its_definition(s, w, group, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK_QUERIES", 4)
    monkeypatch.setattr(baselines, "_BLOCK_ELEMENTS", 200)  # several blocks of keys
    for tokens in (s - 1, s, s + 1, 2 * s, 2 * s + 1, 5 * s + 3):
        query, key, value, rotations, cached, config = operands(tokens, s, group, w=w)
        wanted = definition(query, key, value, s, TRAINED, w, config.rope_parameters["rope_theta"], 0.3)
        found = dual_chunk_attention(query, cached, value, rotations, s, 0.3, "blockwise")
        assert relative_rms(found, wanted) < RELATIVE_RMS[torch.float32]


def cpu_flash(query, key, value, causal, scaling):
    """PyTorch's flash operator of the CPU, whose log-sum-exp is that of the CUDA one."""
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scaling
    )
    assert lse.shape == query.shape[:3]
    return output, lse


@pytest.mark.parametrize("last", [1, 2, 11, 40, 93])
def test_whole_chunks_of_queries_as_the_flash_path_takes_them(last, monkeypatch):
    """Any part of a text as the newest tokens: one query, within a chunk, over several, all."""
    monkeypatch.setitem(baselines.PARTS, "flash", cpu_flash)
    query, key, value, rotations, cached, config = operands(93, 18, 2)
    wanted = definition(query, key, value, 18, TRAINED, 6, config.rope_parameters["rope_theta"], 0.25)[:, :, -last:]
    tables = [(cos[:, -last:], sin[:, -last:]) for cos, sin in rotations]
    for backend in ("flash", "blockwise"):
        found = dual_chunk_attention(query[:, :, -last:], cached, value, tables, 18, 0.25, backend)
        assert relative_rms(found, wanted) < RELATIVE_RMS[torch.float32]


def test_a_decoding_step_attends_to_each_key_once_in_three_parts(monkeypatch):
    read = []

    def counted(query, key, value, causal, scaling):
        read.append(key.shape[2])
        return cpu_flash(query, key, value, causal, scaling)

    monkeypatch.setitem(baselines.PARTS, "flash", counted)
    query, _, value, rotations, cached, _ = operands(93, 18, 2)
    tables = [(cos[:, -1:], sin[:, -1:]) for cos, sin in rotations]
    dual_chunk_attention(query[:, :, -1:], cached, value, tables, 18, 1.0, "flash")
    assert sorted(read) == [3, 18, 72]


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_the_dual_chunk_model_equals_stock_while_all_distances_are_true(changes, tmp_path):
    stock_model(**changes).save_pretrained(tmp_path)
    stock, ours = (load_baseline(tmp_path, method, 90, device="cpu") for method in ("dense", "dca"))
    assert isinstance(ours, DualChunkQwen3ForCausalLM) and ours.last_backend is None
    ids = random_ids(2, 90)
    found, dense = logits(ours, ids), logits(stock, ids)
    assert ours.last_backend == "blockwise"
    close(found[:, :TRAINED], dense[:, :TRAINED])  # the first chunk, and the local window of the second
    assert (found[:, TRAINED:] - dense[:, TRAINED:]).abs().amax(-1).min() > 10 * LOGITS_ATOL


def test_a_layer_equals_the_definition(make):
    """From the hidden states of a model's layer to its output, float64 projections included."""
    model = make("dca", chunk=16, local_window=5)
    attention, seen = model.model.layers[1].self_attn, {}
    attention.register_forward_hook(
        lambda _, args, kwargs, output: seen.update(x=kwargs["hidden_states"], y=output[0]), with_kwargs=True
    )
    logits(model, random_ids(1, 70))
    exact = copy.deepcopy(attention).double()
    x = seen["x"].double()
    heads = (*x.shape[:2], -1, exact.head_dim)
    with torch.no_grad():
        query, key = (
            norm(projection(x).view(heads)).transpose(1, 2)
            for norm, projection in ((exact.q_norm, exact.q_proj), (exact.k_norm, exact.k_proj))
        )
        value = exact.v_proj(x).view(heads).transpose(1, 2)
        theta = model.config.rope_parameters["rope_theta"]
        wanted = exact.o_proj(
            definition(query, key, value, 16, TRAINED, 5, theta, exact.scaling).transpose(1, 2).flatten(2)
        )
    assert relative_rms(seen["y"], wanted) < RELATIVE_RMS[torch.float32]


def test_decoding_and_chunked_prefill_equal_one_forward(make):
    model, ids = make("dca"), random_ids(2, 75)
    wanted = logits(model, ids)
    for chunk in (1, 7, 18, 31):
        cache, found = None, []
        for part in ids.split(chunk, 1):
            with torch.no_grad():
                output = model(part, use_cache=True, **{CACHE_FIELD: cache})
            cache = getattr(output, CACHE_FIELD)
            found.append(output.logits)
        close(torch.cat(found, 1), wanted)
    cache.crop(-40)  # as cached keys do not depend on what follows
    close(logits(model, ids[:, 35:], **{CACHE_FIELD: cache}), wanted[:, 35:])


@pytest.mark.parametrize("method", ["dense", "yarn", "dca"])
def test_generate_gives_the_same_with_and_without_a_cache_in_chunks_and_from_beams(make, method):
    model, ids = make(method, 80), random_ids(2, 60)
    settings = {"max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(ids, use_cache=False, **settings)
    assert wanted.shape == (2, 72)
    assert torch.equal(model.generate(ids, **settings), wanted)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **settings), wanted)
    assert torch.equal(model.generate(ids, prefill_chunk_size=13, **settings), wanted)
    beams = model.generate(ids, num_beams=3, **settings)
    assert torch.equal(model.generate(ids, num_beams=3, use_cache=False, **settings), beams)


def test_yarn_attention_scales_all_logits_by_the_factor_of_the_length(make):
    ids, factor = random_ids(1, 90), 0.1 * math.log(90 / TRAINED) + 1
    plain, scaled = make("dca", 90), make("dca", 90, scaling="yarn-attention")
    for layer in plain.model.layers:
        layer.self_attn.scaling *= factor
    close(logits(scaled, ids), logits(plain, ids))
    assert (logits(scaled, ids) - logits(make("dca", 90), ids)).abs().max() > 10 * LOGITS_ATOL
    short = make("dca", TRAINED, scaling="yarn-attention")
    assert torch.equal(logits(short, ids), logits(make("dca", 90), ids))


def test_dense_is_stock(stock, make):
    model, ids = make("dense"), random_ids(2, 70)
    assert type(model) is Qwen3ForCausalLM and model.config._attn_implementation == "sdpa" and not model.training
    assert torch.equal(logits(model, ids), logits(stock[0], ids))


@pytest.mark.parametrize("tokens", [TRAINED, TRAINED + 1, 100])
def test_yarn_is_stock_with_qwen3s_settings_and_the_teachers_tables(stock, make, tokens):
    ids, model = random_ids(2, min(tokens, 70)), make("yarn", tokens)
    assert type(model) is Qwen3ForCausalLM
    theta = stock[0].config.rope_parameters["rope_theta"]
    rope = {"rope_type": "default", "rope_theta": theta}
    if tokens > TRAINED:
        rope |= {"rope_type": "yarn", "factor": tokens / TRAINED, "original_max_position_embeddings": TRAINED}
    wanted = Qwen3ForCausalLM(Qwen3Config(**STOCK, rope_parameters=rope)).eval()
    wanted.load_state_dict(stock[0].state_dict())
    assert torch.equal(logits(model, ids), logits(wanted, ids))
    assert torch.equal(logits(model, ids), logits(make("dense"), ids)) == (tokens == TRAINED)
    teacher = teacher_tables(tiny_model(recsa_trained_length=TRAINED).config, torch.device("cpu"), [tokens])
    own = Qwen3RotaryEmbedding(model.config)(torch.empty(0), torch.arange(tokens)[None])
    for table, taught in zip(own, teacher, strict=True):
        assert torch.equal(table[0], taught[:tokens])


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}])
def test_a_converted_checkpoint_gives_what_its_source_gives(tmp_path, rope):
    changes = {} if rope is None else {"rope_parameters": rope | {"rope_theta": 1e4}}
    stock_model(**changes).save_pretrained(tmp_path / "stock")
    recsa = {name: value for name, value in TINY.items() if name.startswith("recsa_")}
    convert(str(tmp_path / "stock"), tmp_path / "recsa", recsa=recsa)
    ids = random_ids(1, 60)
    for method in ("dense", "yarn", "dca"):
        one, other = (load_baseline(tmp_path / name, method, 60, device="cpu") for name in ("stock", "recsa"))
        assert torch.equal(logits(one, ids), logits(other, ids))
        fields = [model.config.to_dict() | {"_name_or_path": None} for model in (one, other)]
        assert fields[0] == fields[1]
    ours = load_baseline(tmp_path / "recsa", "recsa", 60, device="cpu", recsa_top_k=None)
    assert isinstance(ours, RecSAQwen3ForCausalLM)
    close(logits(ours, ids), logits(load_baseline(tmp_path / "stock", "dense", 60, device="cpu"), ids))


def test_trained_pooler_tensors_are_dropped_without_a_word(tmp_path, capfd):
    tiny_model(recsa_trained_length=TRAINED).save_pretrained(tmp_path)
    model = load_baseline(tmp_path, "dca", 100, device="cpu", dtype="bfloat16")
    assert "pooler" not in "".join(capfd.readouterr())
    assert not any("pooler" in name for name in model.state_dict())
    assert model.config.dual_chunks["trained"] == TRAINED and model.dtype == torch.bfloat16
    assert not any(name.startswith("recsa_") for name in model.config.to_dict())
    exact = logits(copy.deepcopy(model).float(), ids := random_ids(1, 60))
    assert relative_rms(logits(model, ids), exact) < 10 * RELATIVE_RMS[torch.bfloat16]


def test_a_given_trained_length_is_used(make):
    ids = random_ids(1, 60)
    assert make("dca", trained=40).config.dual_chunks["chunk"] == 30
    assert torch.equal(logits(make("yarn", 60, trained=60), ids), logits(make("dense"), ids))
    assert make("yarn", 60, trained=40).config.rope_parameters["factor"] == 1.5


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("method", ["dense", "dca"])
def test_no_tensor_is_quadratic_in_the_length(make, method, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK_ELEMENTS", 1 << 16)
    model, tokens = make(method, 2000), 2000
    with Largest() as largest:
        model.generate(random_ids(1, tokens), max_new_tokens=1)
    # the MLP's activations are the largest; a mask would be tokens ** 2, one of a chunk 18 * tokens for each head
    assert largest.elements <= max(tokens * STOCK["intermediate_size"], 1 << 16)
    if method == "dca":
        with Largest() as largest:
            model.generate(random_ids(1, tokens), max_new_tokens=1, prefill_chunk_size=500)
        assert largest.elements < 500 * tokens


def test_gradients_flow_through_the_blockwise_path(make):
    model, ids = make("dca"), random_ids(1, 50)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad.norm() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("ntk", {}, "method='ntk': must be one of recsa, dense, yarn, dca"),
        ("recsa", {}, "method 'recsa' needs a RecSA-Qwen3 checkpoint"),
        ("dense", {"tokens": 0}, "tokens=0"),
        ("yarn", {"trained": 2.5}, "trained=2.5"),
        ("dense", {"dtype": "int8"}, "dtype='int8'"),
        ("dense", {"dtype": "float99"}, "dtype='float99'"),
        ("yarn", {"chunk": 8}, "chunk: no option of method 'yarn', which has no options"),
        ("recsa", {"chunk": 8}, "chunk: no option of method 'recsa', which has recsa_branching"),
        ("dca", {"window": 8}, "window: no option of method 'dca', which has chunk, local_window, scaling, backend"),
        ("dca", {"chunk": TRAINED}, f"chunk={TRAINED}: must be below the trained length"),
        ("dca", {"chunk": 0}, "chunk=0"),
        ("dca", {"trained": 1}, "trained=1"),
        ("dca", {"chunk": 20, "local_window": 5}, "local_window=5: must be at most trained - chunk = 4"),
        ("dca", {"scaling": "ntk"}, "scaling='ntk'"),
        ("dca", {"backend": "triton"}, "backend='triton'"),
    ],
)
def test_impossible_arguments_are_refused_by_name(make, method, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(method, **{"tokens": 100, **arguments})


def test_other_checkpoints_are_refused(tmp_path):
    LlamaConfig().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="model_type 'llama'"):
        load_baseline(tmp_path / "other", "dense", 10)
    stock_model().model.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match="lm_head.weight"):
        load_baseline(tmp_path / "headless", "dense", 10)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    stock_model(rope_parameters=rope).save_pretrained(tmp_path / "linear")
    with pytest.raises(ValueError, match="YaRN on top of rope_type 'linear'"):
        load_baseline(tmp_path / "linear", "yarn", 100)
    assert load_baseline(tmp_path / "linear", "yarn", TRAINED, device="cpu").config.rope_parameters["factor"] == 2


def test_what_the_dual_chunk_model_cannot_do_is_refused(make):
    model, ids = make("dca"), random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    refused = [
        (ValueError, "attention_mask: padding", {"attention_mask": mask}),
        (ValueError, "attention_mask: padding", {"attention_mask": torch.ones(2, 1, 30, 30)}),
        (ValueError, "position_ids", {"position_ids": torch.arange(1, 31)[None]}),
        (ValueError, "output_attentions", {"output_attentions": True}),
    ]
    for kind, message, inputs in refused:
        with pytest.raises(kind, match=message):
            model(ids, **inputs)
    with pytest.raises(ValueError, match="attention_mask: padding"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache: StaticCache"):
        model.generate(ids, cache_implementation="static", max_new_tokens=2, disable_compile=True)
    with pytest.raises(ValueError, match="backend='flash': needs a CUDA GPU"):
        logits(make("dca", backend="flash"), ids)
    with pytest.raises(ValueError, match="sliding_window"):
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        DualChunkQwen3ForCausalLM(Qwen3Config(**STOCK, **window))
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        model.train()(ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 4])
class TestFlash:
    pytestmark = GPU

    @pytest.mark.parametrize("last", [1, 2, 40, 93])
    def test_flash_equals_the_definition(self, dtype, group, last):
        query, key, value, rotations, cached, config = operands(93, 18, group, head_dim=64, dtype=dtype)
        wanted = definition(query, key, value, 18, TRAINED, 6, config.rope_parameters["rope_theta"], 0.125)
        tables = [tuple(table[:, -last:].to("cuda", dtype) for table in pair) for pair in rotations]
        query, cached, value = (states.to("cuda", dtype) for states in (query, cached, value))
        assert choose_backend("auto", query) == "flash" and choose_backend("auto", query.float()) == "blockwise"
        found = dual_chunk_attention(query[:, :, -last:], cached, value, tables, 18, 0.125, "flash")
        assert relative_rms(found, wanted[:, :, -last:]) < RELATIVE_RMS[dtype]

    def test_the_model_runs_flash_and_generates_as_in_float32(self, dtype, group, tmp_path):
        stock_model(num_key_value_heads=4 // group).save_pretrained(tmp_path)
        model = load_baseline(tmp_path, "dca", 200, dtype=dtype, device="cuda")
        ids = random_ids(2, 150).cuda()
        found = logits(model, ids)
        assert model.last_backend == "flash"
        exact = load_baseline(tmp_path, "dca", 200, dtype=torch.float32, device="cuda")
        assert relative_rms(found, logits(exact, ids)) < 10 * RELATIVE_RMS[dtype]
        assert exact.last_backend == "blockwise"
        new = model.generate(ids, max_new_tokens=30, do_sample=False)
        again = logits(model, new[:, :-1])[:, 149:]
        chosen = again.gather(2, new[:, 150:, None])[..., 0]
        assert (again.amax(-1) - chosen).max() < 0.1 * again.abs().max()  # greedy, up to rounding
