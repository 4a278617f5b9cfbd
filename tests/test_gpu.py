"""What only a CUDA device can show; `make test-gpu` runs all of it. Skipped where there is none."""

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

import oracle
from conftest import DENSE, LOGITS_ATOL, RELATIVE_RMS, ROOT, random_ids, relative_rms, tiny_model
from recsa_qwen3 import (
    RecSACache,
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    TreeGeometry,
    build_levels,
    recsa_attention,
    recsa_trace,
)
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SMALL = ROOT / "models" / "small-dense"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [DENSE, DENSE + 1, 4 * DENSE + 3, 301])
def test_the_operator_equals_float64_given_the_same_selection(dtype, length):
    heads, kv_heads, head_dim = 4, 2, 32
    geometry = TreeGeometry(branching=4, top_k=4, recent=1, top_capacity=DENSE)
    query, key, value = (
        torch.randn(1, number, length, head_dim, device="cuda").to(dtype) for number in (heads, kv_heads, kv_heads)
    )
    pooler = RecSAPooler(kv_heads, geometry.branching, head_dim).to("cuda", dtype)
    for parameter in pooler.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    cos, sin = oracle.rope_tables(1e4, head_dim, range(length))
    levels = build_levels(key, value, pooler, geometry.branching, geometry.depth(length - 1))
    result = recsa_attention(
        query,
        levels,
        [0],
        [length],
        geometry,
        (
            cos.cuda().to(torch.promote_types(dtype, torch.float32)),
            sin.cuda().to(torch.promote_types(dtype, torch.float32)),
        ),
        return_selection=True,
        backend="reference",
    )
    selections = [
        [
            [
                {
                    level: nodes[0, head, t].tolist()
                    for level, nodes in result.selection.items()
                    if int(nodes[0, head, t, 0]) >= 0
                }
                for t in range(length)
            ]
            for head in range(kv_heads)
        ]
    ]
    expected, _, _ = oracle.attention(
        *(tensor.double().cpu() for tensor in (query, key, value, *pooler.parameters())),
        r=geometry.branching,
        k=geometry.top_k,
        s=geometry.recent,
        M=geometry.top_capacity,
        scaling=head_dim**-0.5,
        cos=cos,
        sin=sin,
        selections=selections,
    )
    assert bool(result.selection) == (length > DENSE)
    assert relative_rms(result.output.cpu(), expected) < RELATIVE_RMS[dtype]


def test_greedy_tokens_equal_the_cpu_and_survive_moves():
    """RC-06 (d), (e): a model on the CPU stays there beside a GPU; cpu -> cuda -> cpu gives the same tokens."""
    model, ids = tiny_model(recsa_backend="reference"), random_ids(1, 5 * DENSE)

    def tokens():
        output = model.generate(ids.to(model.device), max_new_tokens=2 * DENSE, do_sample=False, pad_token_id=0)
        assert "reference" in model.last_backend
        return output.cpu()

    expected = tokens()
    for device in ("cuda", "cpu", "cuda"):
        model.to(device)
        assert torch.equal(tokens(), expected)


def test_chunks_decode_and_padding_equal_one_shot():
    """CA-07, CA-09, CA-10 on the device, float32: selections and logits."""
    model = tiny_model(recsa_backend="reference").cuda()
    length = 4 * DENSE + 5
    ids = random_ids(1, length).cuda()
    with torch.no_grad(), recsa_trace(model) as trace:
        expected = model(ids, use_cache=False).logits[0]
        cache, parts = RecSACache(model.config), []
        for begin, end in (
            (0, 7),
            (7, DENSE + 1),
            (DENSE + 1, length - 2),
            (length - 2, length - 1),
            (length - 1, length),
        ):
            parts.append(model(ids[:, begin:end], cache=cache).logits[0])
        padded = torch.cat((torch.zeros(1, 9, dtype=torch.long, device="cuda"), ids), 1)
        batch = torch.cat((padded, random_ids(1, length + 9).cuda()))
        mask = torch.ones_like(batch)
        mask[0, :9] = 0
        alone = model(batch, attention_mask=mask, use_cache=False).logits[0, 9:]
    torch.testing.assert_close(torch.cat(parts), expected, atol=LOGITS_ATOL, rtol=0)
    torch.testing.assert_close(alone, expected, atol=LOGITS_ATOL, rtol=0)
    one_shot, in_batch = trace.forwards[0], trace.forwards[-1]
    for layer, record in one_shot.items():
        for level, nodes in record.selection.items():
            assert torch.equal(nodes[0], in_batch[layer].selection[level][0, :, 9:])


BACKENDS = pytest.mark.parametrize("backend", ["reference", "auto"])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_decodes_over_level_borders(dtype, backend):
    """CA-09: no NaN and no constant tail where nodes of every level complete."""
    model = tiny_model(recsa_backend=backend).to("cuda", dtype)
    border = DENSE * model.config.recsa_branching
    output = model.generate(
        random_ids(1, border - 3).cuda(),
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(output.logits)
    assert bool(logits.isfinite().all())
    assert len(set(output.sequences[0, -20:].tolist())) > 1


@BACKENDS
def test_peak_memory_of_prefill_grows_no_faster_than_the_prompt(backend):
    """LP-02 on the device: nothing of size N x N."""
    model = tiny_model(recsa_top_k=8, recsa_top_capacity=64, recsa_backend=backend).cuda()

    def peak(length):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            model(random_ids(1, length).cuda(), cache=RecSACache(model.config, reserve=length), logits_to_keep=1)
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    assert peak(32768) < 2.4 * peak(16384)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_small_checkpoint_equals_stock_qwen3_in_the_dense_range(implementation):
    kwargs = dict(dtype=torch.bfloat16, attn_implementation=implementation)
    stock = Qwen3ForCausalLM.from_pretrained(SMALL, **kwargs).cuda().eval()
    ours = (
        RecSAQwen3ForCausalLM.from_pretrained(SMALL, recsa_top_k=128, recsa_top_capacity=2048, **kwargs).cuda().eval()
    )
    ids = torch.randint(20, 1000, (2, 700), device="cuda")
    with torch.no_grad():
        assert relative_rms(ours(ids).logits, stock(ids).logits) < RELATIVE_RMS[torch.bfloat16]
    assert ours.last_backend == "dense"


@BACKENDS
def test_a_cache_can_leave_the_device_and_come_back(backend):
    model = tiny_model(recsa_backend=backend).cuda()
    ids = random_ids(1, 5 * DENSE).cuda()
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True, cache=RecSACache(model.config)).to_tuple()[1]
        expected = model(ids[:, -1:], cache=copy.deepcopy(cache)).logits
        moved = copy.deepcopy(cache).move_to("cpu").move_to("cuda")
        assert torch.equal(model(ids[:, -1:], cache=moved).logits, expected)


def test_what_runs_by_default():
    """Kernels and a captured step without being asked, with a gradient too; the reference where they cannot."""
    model, ids = tiny_model().cuda(), random_ids(1, 5 * DENSE).cuda()
    cache = RecSACache(model.config)
    model.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0, **{CACHE_FIELD: cache})
    assert "triton" in model.last_backend and cache.step.graph is not None
    model(ids).logits.sum().backward()
    assert "triton" in model.last_backend and model.model.layers[0].self_attn.pooler.proj.grad.norm() > 0
    model.double()
    with torch.no_grad():
        model(ids)
    assert "reference" in model.last_backend
