"""The Triton kernels against the float64 oracle and the reference; on a GPU where there is one, else interpreted.

The interpreter takes milliseconds a program, so sizes are small here; tests/test_gpu_kernels.py has large ones.
"""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from conftest import DENSE, RELATIVE_RMS, random_ids, relative_rms, tiny_model
from operands import Case, check_case, importance_gap, make_case, recorded_walks, selections_of, strided
from recsa_qwen3 import Levels, RecSACache, RecSAPooler, attention_recsa_qwen3, recsa_trace
from recsa_qwen3.rows_recsa_qwen3 import Rows
from recsa_qwen3.step_recsa_qwen3 import DecodingStep
from recsa_qwen3.tree_recsa_qwen3 import Nodes, build_nodes

kernels_walk = pytest.importorskip("recsa_qwen3.kernels_walk_recsa_qwen3")
kernels_build = pytest.importorskip("recsa_qwen3.kernels_build_recsa_qwen3")
kernels_linear = pytest.importorskip("recsa_qwen3.kernels_linear_recsa_qwen3")
rms_norm = pytest.importorskip("recsa_qwen3.kernels_norm_recsa_qwen3").rms_norm
torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Widths (see DECODE_QUERIES): the kernels of decoding, and those of prefill.
PATHS = {"decode": 3, "prefill": kernels_walk.DECODE_QUERIES + 2}
# Half-precision queries are rounded after each rotation, so logits, hence importances, are off by so much.
GAP = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check(case: Case, **options) -> None:
    """As `check_case`, and that the kernels ran; the selection is judged by importance gap."""
    case = on_device(case)
    result = check_case(case, backend="triton", **options)
    assert "triton" in result.backend.split("+")
    g = case.geometry
    for row, count in enumerate(case.counts):
        if not count:
            continue
        used = selections_of(result.selection, row, count)
        assert any(query for head in used for query in head) == (case.lengths[row] > g.top_capacity)
        with recorded_walks() as walks:
            case.oracle(row, result.selection)
        assert importance_gap(walks, g.branching, g.top_k, g.recent) < GAP[case.query.dtype]


def on_device(case: Case) -> Case:
    for name in ("query", "keys", "values", "pooler"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    case.rope = tuple(table.to(DEVICE) for table in case.rope)
    return case


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(2, 2, torch.float32), (3, 1, torch.float32), *((4, 2, dtype) for dtype in DTYPES)],
)
def test_operator(path, heads, kv_heads, dtype):
    """Dense and sparse queries, three depths and ragged sequences in one call; count bias on."""
    width = PATHS[path]
    check(make_case((9, 55, 215), (width,) * 3, heads=heads, kv_heads=kv_heads, count_bias=True, dtype=dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("r", "k", "s", "M"), [(4, 2, 0, 8), (8, 4, 2, 32), (16, 3, 1, 64), (64, 2, 0, 128)])
def test_geometries(path, r, k, s, M):
    check(make_case((M * r - 1,), (PATHS[path],), r=r, k=k, s=s, M=M, heads=2, kv_heads=1, dtype=torch.float32))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_head_dims(path, head_dim):
    check(make_case((60,), (PATHS[path],), heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.float32))


@pytest.mark.parametrize("path", PATHS)
def test_tails(path):
    """TK-03: starts on every side of the level borders M, M r and of node borders; counts that differ, one zero."""
    width, M, r = PATHS[path], 8, 4
    starts = (0, M - 1, M, M * r - width, M * r - 1, M * r + 2)
    counts = (width, width, width - 1, width, width, 0)
    check(make_case(starts, counts, r=r, k=2, M=M, heads=2, kv_heads=1, dtype=torch.float32))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["transposed", "columns", "strided", "sliced"])
def test_strides(path, how):
    """TK-03: views of larger buffers whose rest is NaN; operands are not written to."""
    case = on_device(make_case((20, 60), (PATHS[path],) * 2, heads=2, kv_heads=1, dtype=torch.float32))
    levels = case.levels()
    expected = case.run(levels=levels, backend="triton")
    moved = [strided(tensor, how) for tensor in (case.query, *levels.keys, *levels.values)]
    copies = [tensor.clone() for tensor in moved]
    number = len(levels.keys)
    views = Levels(tuple(moved[1 : 1 + number]), tuple(moved[1 + number :]))
    actual = case.run(query=moved[0], levels=views, backend="triton")
    assert torch.equal(actual.output, expected.output)
    assert all(torch.equal(actual.selection[level], nodes) for level, nodes in expected.selection.items())
    assert all(torch.equal(tensor, other) for tensor, other in zip(moved, copies, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_and_prefill_choose_alike(dtype):
    """The contract: one by one, in threes and all at once, in the same dtype, give the same nodes."""
    width = PATHS["prefill"]
    case = on_device(make_case((75,), (width,), heads=2, kv_heads=1, dtype=dtype))
    levels, together = case.levels(), case.run(backend="triton")
    outputs = []
    for begin in range(0, width, 3):
        part = copy.copy(case)
        part.starts, part.counts = (75 + begin,), (min(3, width - begin),)
        part.query = case.query[:, :, begin : begin + 3]
        result = part.run(levels=levels, backend="triton")
        outputs.append(result.output)
        for level, nodes in result.selection.items():
            assert torch.equal(nodes, together.selection[level][:, :, begin : begin + 3])
    assert relative_rms(torch.cat(outputs, 2), together.output) < RELATIVE_RMS[dtype] / 2


@pytest.mark.parametrize("path", PATHS)
def test_ties_go_to_the_lower_index(path):
    """Equal keys give equal importance at every candidate."""
    case = on_device(make_case((70,), (PATHS[path],), heads=2, kv_heads=1, dtype=torch.float32))
    case.query = torch.zeros_like(case.query)
    actual, expected = case.run(backend="triton"), case.run(backend="reference")
    for level, nodes in expected.selection.items():
        assert torch.equal(actual.selection[level], nodes)
    torch.testing.assert_close(actual.output, expected.output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_a_selection_is_taken(path):
    """A selection with arbitrary free places is followed; one that does not fit the tree is refused."""
    width = PATHS[path]
    case = on_device(make_case((75,), (width,), heads=2, kv_heads=1, dtype=torch.float32))
    other = copy.copy(case)
    other.query = torch.randn_like(case.query)
    selection = other.run(backend="reference").selection
    assert any(not torch.equal(nodes, case.run().selection[level]) for level, nodes in selection.items())
    result = case.run(selection=selection, backend="triton")
    assert all(torch.equal(nodes, selection[level]) for level, nodes in result.selection.items())
    expected = case.run(selection=selection, backend="reference")
    assert relative_rms(result.output, expected.output) < RELATIVE_RMS[torch.float32]
    for level in selection:
        for slot, change in ((-1, 1), (0, -1000), (0, 1000)):
            wrong = {key: nodes.clone() for key, nodes in selection.items()}
            wrong[level][0, 0, -1, slot] += change
            with pytest.raises(ValueError, match=rf"selection\[{level}\]"):
                case.run(selection=wrong, backend="triton")
    with pytest.raises(ValueError, match="has no level"):
        case.run(selection={}, backend="triton")


@pytest.mark.parametrize("path", PATHS)
def test_keys_and_values_past_a_row_end_are_not_read(path):
    """NaN beyond each sequence's complete nodes, on every level, does not reach a result."""
    # no border of levels within the columns, which would cut them into blocks for the kernels of decoding
    case = on_device(make_case((70, 101), (PATHS[path],) * 2, heads=2, kv_heads=1, dtype=torch.float32))
    levels = case.levels()
    expected = case.run(levels=levels, backend="triton").output
    for tensors in levels[:2]:
        for level, tensor in enumerate(tensors):
            for row, length in enumerate(case.lengths):
                tensor[row, :, length // case.geometry.branching**level :] = float("nan")
    assert torch.equal(case.run(levels=levels, backend="triton").output, expected)


@pytest.mark.parametrize("path", PATHS)
def test_nan_keys_give_nan(path):
    """A key that is not a number shows in every query that reads it, as in the reference."""
    case = on_device(make_case((75,), (PATHS[path],), r=4, k=3, M=24, heads=2, kv_heads=1, dtype=torch.float32))
    levels = case.levels()
    levels.keys[0][0, 0, 74] = float("nan")  # the token before the first query: read by all in its parent
    expected = case.run(levels=levels, backend="reference").output.isnan()
    actual = case.run(levels=levels, backend="triton").output.isnan()
    assert torch.equal(actual, expected) and expected.any()


@pytest.mark.parametrize("path", PATHS)
def test_nan_queries_give_nan(path):
    case = on_device(make_case((70,), (PATHS[path],), heads=2, kv_heads=1, dtype=torch.float32))
    expected = case.run(backend="triton").output
    case.query[0, 0, 1] = float("nan")
    output = case.run(backend="triton").output
    assert bool(output[0, 0, 1].isnan().all())
    others = [column for column in range(output.shape[2]) if column != 1]
    # not to the bit: other choices put other queries beside theirs in a product, and a BLAS may round by place
    torch.testing.assert_close(output[:, :, others], expected[:, :, others], rtol=0, atol=1e-5)


def assert_most_agree(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """Logits `[..., vocabulary]` of one layer: a near-tie between two paths changes its own token alone."""
    apart = ((actual - expected).abs() > atol).any(-1)
    assert not actual.isnan().any() and int(apart.sum()) <= max(1, apart.numel() // 50)


def test_a_model_runs_on_the_kernels():
    """Prefill in chunks, then decoding, with left padding: tokens and nodes of the reference."""
    model = tiny_model(num_hidden_layers=1).to(DEVICE)
    ids = random_ids(2, 4 * DENSE + 6).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    runs = {}
    for backend in ("reference", "triton"):
        model.config.recsa_backend = backend
        cache = RecSACache(model.config)
        with torch.no_grad(), recsa_trace(model) as trace:
            prefill = model(ids[:, :-2], mask[:, :-2], cache=cache, prefill_chunk_size=40).logits
            decode = model(ids[:, -2:], mask, cache=cache).logits
        assert model.last_backend == backend and {layer.backend for f in trace.forwards for layer in f.values()} <= {
            "dense", backend, f"dense+{backend}"
        }  # fmt: skip
        runs[backend] = torch.cat((prefill, decode), 1)
    assert_most_agree(runs["triton"][mask > 0], runs["reference"][mask > 0], 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 32), (1, 7, 80), (1, 1, 2560)])
def test_rms_norm(dtype, shape):
    """Against float64, and rounded as Qwen3's module: all but a few elements alike in half precision."""
    states, weight = (torch.randn(size).to(DEVICE, dtype) * 3 for size in (shape, shape[-1:]))
    module = Qwen3RMSNorm(shape[-1]).to(DEVICE, dtype)
    module.weight.data = weight
    actual = rms_norm(states, weight, module.variance_epsilon)
    wide = states.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt() * weight.double()
    assert relative_rms(actual, expected) < RELATIVE_RMS[dtype] / 2
    assert (actual != module(states)).float().mean() < (1.0 if dtype == torch.float32 else 0.02)
    assert torch.equal(rms_norm(states.transpose(0, 1), weight, 1e-6), rms_norm(states, weight, 1e-6).transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("wide", "narrow"), [(33, 7), (2560, 129)])
def test_linear_layers_of_one_token(dtype, wide, narrow):
    """Against float64; sizes that fill no block, a residual that is a view."""

    def draw(*shape):
        return torch.randn(shape).to(DEVICE, dtype)

    states, query, key, value = draw(1, 1, wide), draw(narrow + 5, wide), draw(narrow, wide), draw(narrow, wide)
    exact = states.double()
    for actual, weight in zip(kernels_linear.project(states, query, key, value), (query, key, value), strict=True):
        assert relative_rms(actual, exact @ weight.double().T) < RELATIVE_RMS[dtype]
    expected = F.silu(exact @ key.double().T) * (exact @ value.double().T)
    assert relative_rms(kernels_linear.gated(states, key, value), expected) < RELATIVE_RMS[dtype]
    residual = draw(1, 2, narrow)[:, 1:]
    expected = exact @ key.double().T + residual.double()
    assert relative_rms(kernels_linear.add_product(states, key, residual), expected) < RELATIVE_RMS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("r", "head_dim"), [(4, 48), (16, 80)])
def test_nodes_are_built_as_by_the_reference_and_alike_however_tokens_come(dtype, r, head_dim):
    """Both kernels against the pooler in float64, and bit-equal to each other, from views with NaN between."""
    kv_heads, tokens = 2, r * r
    pooler = RecSAPooler(kv_heads, r, head_dim).to(DEVICE, dtype).requires_grad_(False)
    for parameter in pooler.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    keys, values = (strided(torch.randn(2, kv_heads, tokens, head_dim).to(DEVICE, dtype), "sliced") for _ in "kv")
    level, lower = [Nodes(keys, keys, values)], (keys, values)
    for _ in range(2):
        level.append(kernels_build.build_nodes_by_kernel(pooler, *lower, r))
        expected = build_nodes(copy.deepcopy(pooler).double(), *(tensor.double() for tensor in lower), r)
        for actual, wanted in zip(level[-1], expected, strict=True):
            assert relative_rms(actual, wanted) < RELATIVE_RMS[dtype]
        lower = (level[-1].pooled, level[-1].values)

    room = [tokens, r, r]
    stores = [[torch.full((2, kv_heads, size, head_dim), float("nan")).to(keys) for size in room] for _ in range(3)]
    stores[2][0] = stores[0][0]
    lengths = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for t in range(tokens):
        token = (keys[:, :, t : t + 1], values[:, :, t : t + 1])
        kernels_build.append_tokens(*token, *(tuple(store) for store in stores), lengths, pooler)
        lengths += 1
    for nodes, read, mean, pooled in zip(level, *stores, strict=True):
        number = nodes.keys.shape[2]
        for actual, wanted in zip((pooled, read, mean), nodes, strict=True):
            assert torch.equal(actual[:, :, :number], wanted)
            assert bool(actual[:, :, number:].isnan().all())


# ---- a decoding step ------------------------------------------------------------------------------------------------


def stepping_model(**changes):
    """One layer on the kernels, in the dtype that equality across paths needs."""
    return tiny_model(num_hidden_layers=1, recsa_backend="triton", **changes).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 1])
def test_steps_equal_the_walk(rows, dtype):
    """One row across M, the other across M r, so of different depth; the cache grows on the way.

    A row alone takes its linear layers through kernels as well.
    """
    model, width = stepping_model().to(dtype), 68
    atol = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    ids = random_ids(2, width).to(DEVICE)
    mask = (torch.arange(width, device=DEVICE) >= torch.tensor([50, 0], device=DEVICE)[:, None]).long()
    ids, mask = ids[-rows:], mask[-rows:]
    caches, first, logits = [RecSACache(model.config) for _ in range(2)], 62, []
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :first], mask[:, :first], cache=cache)
        for end in range(first + 1, width + 1):
            outputs = []
            for cache, step in zip(caches, (True, False), strict=True):
                model.config.recsa_cuda_graph = step
                outputs.append(model(ids[:, end - 1 : end], mask[:, :end], cache=cache).logits)
                assert (cache.step is not None) == step
                assert not step or cache.step.runs_layers == (rows == 1)
                assert (model.last_backend == "triton") or not step
            logits.append(torch.cat(outputs))
    assert_most_agree(*torch.stack(logits, 1).chunk(2), atol)
    for level in range(3):
        torch.testing.assert_close(*(cache.layers[0].node_keys(level) for cache in caches), rtol=0, atol=atol)
        torch.testing.assert_close(*(cache.layers[0].node_values(level) for cache in caches), rtol=0, atol=atol)


def test_a_step_is_made_anew_where_its_ground_moves():
    """Grown or rearranged storage, cropping, another adapter or weight: never what was captured before."""
    model = stepping_model()
    ids, cache = random_ids(2, 40).to(DEVICE), RecSACache(model.config)

    def step() -> object:
        model(random_ids(cache.batch_size, 1).to(DEVICE), cache=cache)
        return cache.step

    with torch.no_grad():
        model(ids, cache=cache)
        first = step()
        assert step() is first is not None
        cache.crop(-1)
        assert step() is first
        cache.reorder_cache(torch.tensor([1, 0]))
        second = step()
        assert second is not first and step() is second
        cache.batch_select_indices(torch.tensor([0]))
        third = step()
        assert third is not second
        assert copy.deepcopy(cache).step is None
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
        fourth = step()
        assert fourth is not third
        model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
        fifth = step()
        assert fifth is not fourth
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        assert step() is None
        handle.remove()
        assert step() is not None
        model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
        assert step() is None


def edit_slice(layer):
    """The same addresses, other shapes."""
    mlp, half = layer.mlp, layer.mlp.gate_proj.weight.shape[0] // 2
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:half]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :half]


def edit_transpose(layer):
    weight = layer.self_attn.o_proj.weight
    weight.data = weight.data.view(weight.shape[1], weight.shape[0]).t()


class OtherMLP(Qwen3MLP):
    def forward(self, x):
        return 2 * super().forward(x)


def patched_linear(self, x):
    return 2 * F.linear(x, self.weight)


EDITS = {
    "a class": lambda layer, patch: patch.setattr(torch.nn.Linear, "forward", patched_linear),
    "an instance": lambda layer, patch: patch.setattr(layer.mlp, "forward", lambda x: 2 * x),
    "its class": lambda layer, patch: patch.setattr(layer.mlp, "__class__", OtherMLP),
    "a global hook": lambda layer, patch: patch.setitem(
        torch.nn.modules.module._global_forward_hooks, 1, lambda module, args, output: None
    ),
    "shapes": lambda layer, patch: edit_slice(layer),
    "strides": lambda layer, patch: edit_transpose(layer),
    "scaling": lambda layer, patch: setattr(layer.self_attn, "scaling", 0.5),
    "epsilon": lambda layer, patch: setattr(layer.input_layernorm, "variance_epsilon", 1.0),
    "a bias": lambda layer, patch: setattr(
        layer.mlp.down_proj, "bias", torch.nn.Parameter(torch.ones(layer.hidden_size, device=DEVICE), False)
    ),
    "a parameter's class": lambda layer, patch: patch.setattr(layer.mlp.up_proj.weight, "__class__", OtherParameter),
}


class OtherParameter(torch.nn.Parameter):
    """As quantised weights come: it may compute its own products."""


@pytest.mark.parametrize("edit", EDITS)
def test_a_step_never_answers_for_an_edited_model(edit, monkeypatch):
    """Whatever the forward of a module has become between two tokens: what the model's own walk gives."""
    model = stepping_model(head_dim=16, num_attention_heads=4, hidden_size=64)
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(random_ids(1, 40).to(DEVICE), cache=cache)
        for _ in range(3):
            model(random_ids(1, 1).to(DEVICE), cache=cache)
        assert cache.step is not None and (cache.step.graph is not None) == (DEVICE == "cuda")
        EDITS[edit](model.model.layers[0], monkeypatch)
        other = copy.deepcopy(cache)
        for _ in range(3):
            token = random_ids(1, 1).to(DEVICE)
            model.config.recsa_cuda_graph = True
            stepped = model(token, cache=cache).logits
            model.config.recsa_cuda_graph = False
            torch.testing.assert_close(stepped, model(token, cache=other).logits, rtol=0, atol=1e-4)


@pytest.fixture
def replays(monkeypatch) -> list[DecodingStep]:
    """The steps replayed so far; without a GPU a replay runs what it would have captured."""
    replayed, on_gpu = [], DecodingStep.replay

    def replay(step, states):
        replayed.append(step)
        if DEVICE == "cuda":
            return on_gpu(step, states)
        rows = Rows.whole(len(states), 1, step._known)
        result = step._model._run(states, rows, None, False, False, step)[0]
        step.lengths += 1
        step._known = [length + 1 for length in step._known]
        return result

    monkeypatch.setattr(DecodingStep, "replay", replay)
    return replayed


@pytest.mark.parametrize("rows", [2, 1])
def test_a_step_that_was_not_meant_counts_for_nothing(rows, replays):
    """It is launched before the mask is read: padding and what is refused leave the cache as it was."""
    model = stepping_model()
    ids, width = random_ids(rows, 60).to(DEVICE), 40
    caches = [RecSACache(model.config) for _ in range(2)]

    def both(token: int, mask: torch.Tensor, **options) -> list[torch.Tensor]:
        logits = []
        for cache, step in zip(caches, (True, False), strict=True):
            model.config.recsa_cuda_graph = step
            logits.append(model(ids[:, token : token + 1], mask, cache=cache, **options).logits)
        return [part[mask[:, -1].bool()] for part in logits]

    with torch.no_grad():
        mask = torch.ones(rows, width, dtype=torch.long, device=DEVICE)
        for cache in caches:
            model(ids[:, :width], mask, cache=cache)
        logits = []
        for token in range(width, width + 16):
            if token == width + 3:
                step = caches[0].step
                step.graph = step.graph or True
                replays.clear()
                for wrong in (1 - F.pad(mask, (0, 1)), mask):
                    with pytest.raises(ValueError, match="attention_mask"):
                        both(token, wrong)
                with pytest.raises(ValueError, match="position_ids"):
                    both(token, F.pad(mask, (0, 1), value=1), position_ids=torch.full((rows, 1), 7, device=DEVICE))
                assert len(replays) == 2  # a mask of another shape launches nothing
            padding = token in (width + 4, width + 9)
            mask = F.pad(mask, (0, 1), value=1)
            if padding:
                mask[0, -1] = 0  # with one row, a column of nothing
            logits.append(both(token, mask))
            assert caches[0].lengths == caches[1].lengths == mask.sum(1).tolist()
        assert caches[0].step is step and len(replays) == 2 + 13
    assert_most_agree(*(torch.cat(part) for part in zip(*logits, strict=True)), 1e-4)
    for level in range(3):
        torch.testing.assert_close(*(cache.layers[0].node_keys(level) for cache in caches), rtol=0, atol=1e-4)


def test_parameters_need_not_be_contiguous():
    """Norms and poolers whose tensors are views: the kernels' walk and steps against the reference."""
    model = stepping_model()
    for layer in model.model.layers:
        pooler, norm = layer.self_attn.pooler, layer.input_layernorm
        pooler.proj.data = pooler.proj.data.transpose(-1, -2)
        pooler.query.data = torch.stack((pooler.query.data, pooler.query.data), -1)[..., 0]
        norm.weight.data = torch.full((1,), 0.7, device=DEVICE).expand(len(norm.weight))
    ids, logits = random_ids(1, 60).to(DEVICE), []
    with torch.no_grad():
        for backend in ("triton", "reference"):
            model.config.recsa_backend, cache = backend, RecSACache(model.config)
            parts = [
                model(ids[:, begin:end], cache=cache).logits for begin, end in ((0, 57), (57, 58), (58, 59), (59, 60))
            ]
            logits.append(torch.cat(parts, 1))
    assert_most_agree(*logits, 1e-4)


def test_a_step_belongs_to_one_model_and_configuration():
    """Another model or an edited field behind the same cache: a new step; a mode of autograd may end between two."""
    model, other = stepping_model(), stepping_model(seed=1)
    ids, cache = random_ids(1, 40).to(DEVICE), RecSACache(model.config)
    with torch.inference_mode():
        model(ids, cache=cache)
        for _ in range(2):
            model(ids[:, :1], cache=cache)
    steps, logits = [cache.step], []
    with torch.no_grad():
        for which, edit in ((model, {}), (other, {}), (model, {}), (model, dict(recsa_recent=0)),
                            (model, dict(rope_parameters={"rope_type": "default", "rope_theta": 5.0}))):  # fmt: skip
            for name, value in edit.items():
                setattr(which.config, name, value)
            plain = copy.deepcopy(cache)
            actual = which(ids[:, :1], cache=cache).logits
            assert all(cache.step is not step for step in steps)
            steps.append(cache.step)
            which.config.recsa_cuda_graph = False
            logits.append((actual, which(ids[:, :1], cache=plain).logits))
            which.config.recsa_cuda_graph = True
    assert_most_agree(*(torch.cat(part) for part in zip(*logits, strict=True)), 1e-4)
    with torch.inference_mode():
        model(ids[:, :1], cache=cache)
    assert cache.step is not None
    cache.reset()
    assert cache.step is None


def test_a_step_behind_an_interrupted_forward_is_refused():
    """Layers at different lengths: the error of appending, not a token in the wrong place."""
    model = tiny_model(num_hidden_layers=2, recsa_backend="triton").to(DEVICE)
    ids, cache = random_ids(1, 40).to(DEVICE), RecSACache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
        model(ids[:, :1], cache=cache)
        cache.layers[1].crop(-1)
        with pytest.raises(RuntimeError, match="interrupted forward"):
            model(ids[:, :1], cache=cache)


def test_what_takes_no_step():
    model = stepping_model()
    ids, cache = random_ids(1, 40).to(DEVICE), RecSACache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
        model(ids[:, :2], cache=cache)
        model(ids[:, :1], cache=cache, output_hidden_states=True)
        with recsa_trace(model) as trace:
            model(ids[:, :1], cache=cache)
        assert trace.forwards[0][0].selection and cache.step is None
        model.config.recsa_backend = "reference"
        model(ids[:, :1], cache=cache)
        assert cache.step is None
    model.config.recsa_backend = "triton"
    assert model(ids[:, :1], cache=cache).logits.requires_grad and cache.step is None


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dtype=torch.float64), "float64"),
        (dict(r=2, k=3), "recsa_branching from 4"),
        (dict(M=20_000), "recsa_top_capacity"),
        (dict(head_dim=258), "head_dim"),
    ],
)
def test_unsupported_operands_are_refused_by_name(changes, message):
    case = on_device(make_case((2,), (3,), **{"dtype": torch.float32, **changes}))
    with pytest.raises(ValueError, match=rf"recsa_backend='triton': .*{message}"):
        case.run(backend="triton")


def test_operands_of_several_dtypes_are_refused_by_name():
    case = on_device(make_case((70,), (3,), dtype=torch.float32))
    levels = case.levels()
    mixed = Levels(levels.keys, tuple(value.half() for value in levels.values))
    with pytest.raises(ValueError, match="one dtype, not torch.float16, torch.float32"):
        case.run(levels=mixed, backend="triton")


@pytest.mark.parametrize("what", ["capability", "compiler", "rocm"])
def test_devices_that_cannot_run_the_kernels_are_named(what, monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if what == "capability" else (9, 0))
    monkeypatch.setattr(kernels_walk, "rms_norm", fail)
    monkeypatch.setattr(torch.version, "hip", "7.0" if what == "rocm" else None)
    lack = kernels_walk._lack_of_device.__wrapped__(torch.device(DEVICE))
    assert {"capability": "8.0", "compiler": "C compiler", "rocm": "NVIDIA"}[what] in lack


@pytest.mark.parametrize(("what", "message"), [("dropout", "dropout"), ("weights", "matrices")])
def test_what_the_kernels_lack_is_refused_by_name(what, message):
    case = on_device(make_case((70,), (3,), dtype=torch.float32))
    options = dict(dropout=0.1 if what == "dropout" else 0.0, return_weights=what == "weights")
    with pytest.raises(ValueError, match=f"recsa_backend='triton': .*{message}"):
        case.run(backend="triton", **options)


def test_auto_runs_the_kernels_on_a_gpu_alone():
    case = on_device(make_case((70,), (3,), dtype=torch.float32))
    with torch.no_grad():
        assert case.run(backend="auto").backend == ("triton" if DEVICE == "cuda" else "reference")
        assert case.run(backend="reference").backend == "reference"


@pytest.mark.parametrize("what", ["dropout", "weights", "dtype", "nothing", "broken triton"])
def test_auto_gives_notice_where_the_kernels_cannot(what, monkeypatch):
    """On a device with kernels: the reference, and one sentence that names the reason; none for dense queries."""
    notices: list[str] = []
    monkeypatch.setattr(attention_recsa_qwen3, "prefers_kernels", lambda backend, device: backend != "reference")
    monkeypatch.setattr(attention_recsa_qwen3.logger, "warning_once", notices.append)
    if what == "broken triton":
        monkeypatch.setattr(attention_recsa_qwen3, "_kernels_error", ImportError("no ptxas"))
    dtype = torch.float64 if what == "dtype" else torch.float32
    case, short = (on_device(make_case((start,), (3,), dtype=dtype)) for start in (70, 2))
    options = dict(dropout=0.1 if what == "dropout" else 0.0, return_weights=what == "weights", backend="auto")
    expected = case.run(**{**options, "backend": "reference", "dropout": 0.0}).output
    assert short.run(**options).backend == "dense" and not notices
    result = case.run(**options)
    assert result.backend == ("triton" if what == "nothing" else "reference")
    names = {"weights": "matrices", "dtype": "float64", "broken triton": "no ptxas"}
    assert len(notices) == (what != "nothing")
    assert not notices or ("recsa_backend='auto'" in notices[0] and names.get(what, what) in notices[0])
    if what != "dropout":
        assert relative_rms(result.output, expected) < RELATIVE_RMS[dtype]


def test_no_gpu_is_refused_by_name(monkeypatch):
    """RC-06: asked for by name on a CPU without the interpreter; never a silent fall to another path."""
    monkeypatch.setattr(kernels_walk, "interpreted", lambda: False)
    case = make_case((2, 70), (3, 3), dtype=torch.float32)
    with pytest.raises(ValueError, match="recsa_backend='triton': needs a CUDA device"):
        case.run(backend="triton")


def test_a_broken_triton_is_named(monkeypatch):
    monkeypatch.setattr(attention_recsa_qwen3, "_kernels_error", OSError("libcuda.so.1 is missing"))
    with pytest.raises(ValueError, match="recsa_backend='triton': .*OSError: libcuda.so.1"):
        make_case((70,), (3,), dtype=torch.float32).run(backend="triton")
