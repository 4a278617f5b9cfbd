"""Gradients by the Triton kernels against autograd of the float64 reference; interpreted where there is no GPU.

Both attend to the same selection, the kernels'. Sizes are small; those marked `gpu` have the product's shapes.
"""

import pytest
import torch

from conftest import RELATIVE_RMS, random_ids, relative_rms, tiny_model
from operands import Case, make_case, strided
from recsa_qwen3 import Levels, attention_recsa_qwen3, modeling_recsa_qwen3, recsa_trace

pytest.importorskip("recsa_qwen3.kernels_backward_recsa_qwen3")
torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def leaves_of(case: Case, dtype: torch.dtype | None = None, prepare=lambda tensor: tensor):
    """Queries and levels as leaves, and all of them in one list."""
    levels = case.levels()
    query, *states = (
        prepare(tensor.detach().to(DEVICE, dtype or tensor.dtype)).requires_grad_()
        for tensor in (case.query, *levels.keys, *levels.values)
    )
    half = len(levels.keys)
    return query, Levels(tuple(states[:half]), tuple(states[half:])), [query, *states]


def gradients(case: Case, upstream=None, dtype=None, prepare=lambda tensor: tensor, **options):
    """The result, and the gradient of each leaf."""
    case.rope = tuple(table.to(DEVICE) for table in case.rope)
    query, levels, leaves = leaves_of(case, dtype, prepare)
    result = case.run(query=query, levels=levels, **options)
    upstream = torch.randn_like(result.output) if upstream is None else upstream.to(result.output.dtype)
    return result, upstream, torch.autograd.grad(result.output, leaves, upstream, allow_unused=True)


def check(case: Case, **options) -> None:
    """All gradients, and that some node's were among them."""
    result, upstream, actual = gradients(case, backend="triton", **options)
    assert "triton" in result.backend.split("+")
    _, _, expected = gradients(case, upstream, torch.float64, backend="reference", selection=result.selection)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == case.query.dtype and one.abs().max() > 0
        assert relative_rms(one, other) <= RELATIVE_RMS[case.query.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (4, 1), (8, 1)])
def test_gradients(heads, kv_heads, dtype):
    """TR-04: G of 1, 2, 3, 4 and 8, odd lengths, dense and sparse queries."""
    check(make_case((0, 11), (29, 22), heads=heads, kv_heads=kv_heads, dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [
        dict(starts=(0, 61), counts=(75, 14), count_bias=True),  # three depths, parents that several items share
        dict(starts=(20,), counts=(1,)),
        dict(starts=(3,), counts=(37,), r=8, k=3, s=0, M=24, head_dim=80),
        dict(starts=(60,), counts=(9,), r=16, k=2, s=0, M=32, head_dim=6),
        dict(starts=(90,), counts=(12,), r=4, k=4, s=2, M=64, heads=2, head_dim=96),
    ],
)
def test_gradients_of_other_shapes(shape, monkeypatch):
    monkeypatch.setattr("recsa_qwen3.kernels_backward_recsa_qwen3.PAIRS_OF_PROGRAM", 16)
    check(make_case(dtype=torch.float32, **shape))


@pytest.mark.parametrize("how", ["transposed", "columns", "strided", "sliced"])
def test_strides(how):
    """TK-03: views of larger buffers whose rest is NaN, in and upstream; operands are not written to."""
    case = make_case((0, 11), (23, 19), dtype=torch.float32)
    result, upstream, expected = gradients(case, backend="triton")
    query, levels, leaves = leaves_of(case, prepare=lambda tensor: strided(tensor, how))
    copies = [leaf.detach().clone() for leaf in leaves]
    output = case.run(query=query, levels=levels, backend="triton", selection=result.selection).output
    actual = torch.autograd.grad(output, leaves, strided(upstream, how))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies, strict=True))


def test_expanded_views():
    case = make_case((20,), (15,), dtype=torch.float32)
    case.query = case.query[:, :1].to(DEVICE).expand(-1, 4, -1, -1)
    result, _, _ = gradients(case, backend="triton")
    query, levels, leaves = leaves_of(case)
    output = case.run(query=query, levels=levels, backend="triton", selection=result.selection).output
    expected = torch.autograd.grad(output, leaves, torch.ones_like(output))
    query = case.query.detach().requires_grad_()
    output = case.run(query=query, levels=levels, backend="triton", selection=result.selection).output
    actual = torch.autograd.grad(output, [query, *leaves[1:]], torch.ones((), device=DEVICE).expand_as(output))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_was_left_in_memory_does_not_count():
    """NaN in every new buffer and behind each sequence's complete nodes; no gradient goes to what no query reads."""
    case = make_case((0, 31), (41, 22), dtype=torch.float32)
    result, upstream, expected = gradients(case, backend="triton")
    query, levels, leaves = leaves_of(case)
    with torch.no_grad():
        for row, length in enumerate(case.lengths):
            query[row, :, case.counts[row] :] = float("nan")
            for tensors in levels[:2]:
                for level, tensor in enumerate(tensors):
                    tensor[row, :, length // case.geometry.branching**level :] = float("nan")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns with NaN
    try:
        output = case.run(query=query, levels=levels, backend="triton", selection=result.selection).output
        actual = torch.autograd.grad(output, leaves, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for row, length in enumerate(case.lengths):
        assert torch.all(actual[0][row, :, case.counts[row] :] == 0)
        assert torch.all(actual[1][row, :, length:] == 0)


def test_the_same_bits_each_time(monkeypatch):
    """Several programs add to one node, in a fixed order."""
    monkeypatch.setattr("recsa_qwen3.kernels_backward_recsa_qwen3.PAIRS_OF_PROGRAM", 16)
    case = make_case((0,), (60,), dtype=torch.float32)
    _, upstream, first = gradients(case, backend="triton")
    for _ in range(20 if DEVICE == "cuda" else 2):
        assert all(map(torch.equal, gradients(case, upstream, backend="triton")[2], first))


def test_only_what_is_asked_for():
    """Keys alone, values alone, queries alone."""
    case = make_case((20,), (18,), dtype=torch.float32)
    result, upstream, expected = gradients(case, backend="triton")
    for index in range(len(expected)):
        query, levels, leaves = leaves_of(case)
        for place, leaf in enumerate(leaves):
            leaf.requires_grad_(place == index)
        output = case.run(query=query, levels=levels, backend="triton", selection=result.selection).output
        output.backward(upstream)
        torch.testing.assert_close(leaves[index].grad, expected[index])


def test_what_lives_until_backward():
    """The operands, the output, its log-sum-exp and the chosen nodes: nothing of the size of what was gathered."""
    case = make_case((0,), (80,), dtype=torch.float32)
    case.rope = tuple(table.to(DEVICE) for table in case.rope)
    query, levels, leaves = leaves_of(case)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        result = case.run(query=query, levels=levels, backend="triton", return_selection=True)
    own = {leaf.data_ptr() for leaf in leaves}
    size = sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in own)
    chosen = sum(nodes.numel() * 4 for nodes in result.selection.values())
    # the queries, the dense part's copies of theirs, outputs and log-sum-exps
    assert size <= chosen + 12 * query.nbytes


# ---- in a model -----------------------------------------------------------------------------------------------------


def training_model(**changes):
    return tiny_model(recsa_backend="triton", num_hidden_layers=2, **changes).to(DEVICE).train()


def parameter_gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_training_step():
    """Loss and the gradients of all parameters, poolers included, against the reference."""
    model = training_model()
    for _ in range(4):  # in float32 a near-tie may fall otherwise
        ids = random_ids(2, 45).to(DEVICE)
        traces, results = [], []
        for backend in ("reference", "triton"):
            model.config.recsa_backend = backend
            with recsa_trace(model) as trace:
                results.append(parameter_gradients(model, ids))
            traces.append(trace.forwards[0])
            assert backend in model.last_backend
        if all(
            torch.equal(nodes, traces[1][layer].selection[level])
            for layer in traces[0]
            for level, nodes in traces[0][layer].selection.items()
        ):
            break
    else:
        pytest.fail("the selections differ each time")
    (expected_loss, expected), (loss, actual) = results
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        assert actual[name] is not None and actual[name].abs().max() > 0, name
        assert relative_rms(actual[name], gradient.double()) < 1e-4, name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_chooses_alike(use_reentrant, monkeypatch):
    """Also the first forward of reentrant checkpointing, which runs without gradients."""
    chosen: list[dict] = []
    attend = modeling_recsa_qwen3.recsa_attention

    def recording(*arguments, **options):
        result = attend(*arguments, **{**options, "return_selection": True})
        chosen.append(result.selection)
        return result

    monkeypatch.setattr(modeling_recsa_qwen3, "recsa_attention", recording)
    model, ids = training_model(), random_ids(1, 45).to(DEVICE)
    expected_loss, expected = parameter_gradients(model, ids)
    chosen.clear()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    loss, actual = parameter_gradients(model, ids)
    assert torch.equal(loss, expected_loss) and len(chosen) == 4
    for forward, again in ((chosen[0], chosen[3]), (chosen[1], chosen[2])):
        assert forward and all(torch.equal(nodes, again[level]) for level, nodes in forward.items())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


def test_training_takes_the_kernels_by_itself(monkeypatch):
    """Under "auto" on a device that has them; norms and the building of nodes stay what autograd knows."""
    for module in (attention_recsa_qwen3, modeling_recsa_qwen3):
        monkeypatch.setattr(module, "prefers_kernels", lambda backend, device: backend != "reference")
    model = training_model()
    model.config.recsa_backend = "auto"
    model(random_ids(1, 45).to(DEVICE)).logits.sum().backward()
    assert model.last_backend == "dense+triton"


# ---- the product's shapes -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("geometry", "starts", "counts"),
    [
        (dict(r=16, k=128, M=8192), (0, 16_000), (9001, 773)),
        (dict(r=16, k=128, M=8192), (131_000,), (401,)),  # crosses to depth 2
        (dict(r=64, k=32, M=2048), (130_900,), (533,)),
        (dict(r=4, k=16, M=64), (0,), (1500,)),
    ],
)
def test_gradients_at_scale(geometry, starts, counts, dtype):
    torch.cuda.empty_cache()
    check(make_case(starts, counts, heads=4, kv_heads=2, head_dim=128, dtype=dtype, **geometry))
