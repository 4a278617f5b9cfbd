"""The operator and the model against the float64 oracle; the policy's fixed parts; precision of the rotary tables.

Selections are judged by importance gap and outputs given the same selection (METHOD section 4), so no near-tie can
make a test flaky.
"""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import oracle
from conftest import DENSE, LOGITS_ATOL, RELATIVE_RMS, random_ids, relative_rms, tiny_config, tiny_model
from operands import (
    GEOMETRIES,
    IMPORTANCE_GAP,
    Case,
    check_case,
    importance_gap,
    make_case,
    recorded_walks,
    selections_of,
    strided,
)
from recsa_qwen3 import (
    Levels,
    RecSACache,
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    TreeGeometry,
    attention_recsa_qwen3,
    build_levels,
    modeling_recsa_qwen3,
    recsa_attention,
    recsa_trace,
)

torch.set_num_threads(1)

# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("r", "k", "s", "M"), GEOMETRIES)
def test_model_equals_the_oracle_at_every_length(r, k, s, M):
    """SQ-01: lengths 1 ... 3M one by one and random ones to 300; logits, and selections by importance gap."""
    model = tiny_model(num_hidden_layers=2, recsa_branching=r, recsa_top_k=k, recsa_recent=s, recsa_top_capacity=M)
    state, config, ids = model.state_dict(), model.config, random_ids(1, 300)

    def run(length: int) -> tuple[torch.Tensor, list[dict[int, torch.Tensor]]]:
        with torch.no_grad(), recsa_trace(model) as trace:
            logits = model(ids[:, :length], use_cache=False).logits[0]
        return logits, [trace.forwards[0][layer].selection for layer in range(2)]

    def judge(selections, length: int) -> torch.Tensor:
        with recorded_walks() as walks:
            given = [selections_of(selection, 0, length) or [[{}] * length] * 2 for selection in selections]
            expected, _ = oracle.model_logits(state, config, ids[0, :length], given)
        assert importance_gap(walks, r, k, s) < IMPORTANCE_GAP
        return expected

    # causal: what the oracle says at the longest length holds for every shorter one
    _, longest = run(300)
    reference = judge(longest, 300)
    lengths = [*range(1, 3 * M + 1), *torch.randint(3 * M + 1, 300, (6,)).tolist(), 300]
    for length in lengths:
        logits, selections = run(length)
        same = all(
            torch.equal(nodes[:, :, :length], selection.get(level, torch.full_like(nodes, -1)[:, :, :length]))
            for selection, other in zip(selections, longest, strict=True)
            for level, nodes in other.items()
        )
        expected = reference[:length] if same else judge(selections, length)
        assert relative_rms(logits, expected) <= RELATIVE_RMS[torch.float32], length
        sparse = length > M
        assert model.last_backend == ("dense+reference" if sparse else "dense")
        left_out = any(bool((nodes >= 0).any()) for selection in selections for nodes in selection.values())
        assert left_out == sparse


# ---- the operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("count_bias", [False, True])
def test_operator_given_the_selection(dtype, heads, kv_heads, count_bias):
    """METHOD 4: relative RMS error against float64 given the same selection, for each dtype and group size."""
    check_case(make_case(heads=heads, kv_heads=kv_heads, count_bias=count_bias, dtype=dtype))


@pytest.mark.parametrize(("r", "k", "s", "M"), GEOMETRIES)
def test_operator_chooses_as_the_oracle(r, k, s, M):
    """In float64 the selections are the oracle's own, for sequences that start anywhere."""
    starts = (0, M - 1, M * r - 3)
    case = make_case(starts, (M + 5, 9, 9), r=r, k=k, s=s, M=M)
    result = case.run()
    for row, count in enumerate(case.counts):
        with recorded_walks() as walks:
            expected, _ = case.oracle(row, None)
        used = selections_of(result.selection, row, count)
        assert [chosen for head in used for chosen in head] == [selection for _, selection, _ in walks]
        assert relative_rms(result.output[row, :, :count], expected) <= RELATIVE_RMS[torch.float64]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_operator_head_dims(head_dim):
    check_case(make_case((0, 60), (15, 5), head_dim=head_dim, dtype=torch.float32))


@pytest.mark.parametrize("r", [2, 4, 8])
@pytest.mark.parametrize("queries", ["1", "r-1", "r", "r+1", "2r-1", "5r+3"])
def test_operator_tails(r, queries):
    """TK-03: lengths around the branching factor, counts that differ (one of them zero), starts on every side of M."""
    number = {"1": 1, "r-1": r - 1, "r": r, "r+1": r + 1, "2r-1": 2 * r - 1, "5r+3": 5 * r + 3}[queries]
    M = 3 * r
    starts, counts = (0, M - 1, M, 5 * M + 1, 4 * M), (number, number, max(number - 1, 1), number, 0)
    check_case(make_case(starts, counts, r=r, k=3, M=M, dtype=torch.float32))


@pytest.mark.parametrize("how", ["transposed", "columns", "strided", "sliced"])
def test_operator_strides(how):
    """TK-03: views of larger buffers, in and (the upstream gradient) out; operands are not written to."""
    case = make_case()
    levels, query = case.levels(), case.query.requires_grad_()
    levels = Levels(*(tuple(t.detach().requires_grad_() for t in tensors) for tensors in levels[:2]))
    expected = case.run(levels=levels)
    upstream = torch.randn_like(expected.output)
    leaves = [query, *levels.keys, *levels.values]
    grads = torch.autograd.grad(expected.output, leaves, upstream, allow_unused=True)

    moved = [strided(t.detach(), how) for t in leaves]
    copies = [t.clone() for t in moved]
    for tensor in moved:
        tensor.requires_grad_()
    number = len(levels.keys)
    views = Levels(tuple(moved[1 : 1 + number]), tuple(moved[1 + number :]))
    actual = case.run(query=moved[0], levels=views)
    torch.testing.assert_close(actual.output, expected.output, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(actual.selection[level], nodes) for level, nodes in expected.selection.items())
    again = torch.autograd.grad(actual.output, moved, strided(upstream, how), allow_unused=True)
    for one, other in zip(again, grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(moved, copies, strict=True))


def test_operator_expanded_views():
    """TK-03: operands and the upstream gradient expanded over sequences, heads and queries."""
    case = make_case((70, 70), (9, 9))
    shapes = [case.query[:1, :1].expand_as(case.query), case.keys[:1, :1].expand_as(case.keys)]
    values = case.values[:, :, :1].expand_as(case.values)
    results = []
    for prepare in (lambda t: t, lambda t: t.contiguous()):
        query = prepare(shapes[0]).detach().requires_grad_()
        levels = build_levels(prepare(shapes[1]), prepare(values), case.pooler, 4, 2)
        levels = Levels((prepare(shapes[1]), *levels.keys[1:]), (prepare(values), *levels.values[1:]))
        keys = torch.nn.functional.pad(levels.keys[0], (0, 0, 0, -levels.keys[0].shape[2] % 4))
        output = case.run(query=query, levels=Levels((keys, *levels.keys[1:]), (keys, *levels.values[1:]))).output
        output.backward(prepare(torch.ones(()).double().expand_as(output)))
        results.append((output, query.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# ---- gradients ------------------------------------------------------------------------------------------------------


def parameters(case: Case) -> list[torch.Tensor]:
    leaves = [case.query, case.keys, case.values, case.pooler.query, case.pooler.slot_bias, case.pooler.proj]
    return [leaf.requires_grad_() for leaf in leaves]


def test_gradcheck():
    """TR-04: float64 gradcheck in queries, keys, values and the pooler at N = M + 3, the selection fixed."""
    case = make_case((0,), (7,), r=2, k=2, s=0, M=4, heads=2, kv_heads=1, head_dim=4)
    selection = case.run().selection
    assert set(selection) == {1}

    def output(query, keys, values, *pooler):
        for name, value in zip(("query", "slot_bias", "proj"), pooler, strict=True):
            del case.pooler._parameters[name]
            setattr(case.pooler, name, value)
            case.pooler._parameters[name] = value
        moved = dataclasses.replace(case, query=query, keys=keys, values=values)
        return moved.run(selection=selection).output

    assert torch.autograd.gradcheck(output, parameters(case))


@pytest.mark.parametrize("count_bias", [False, True])
def test_gradients_equal_the_oracles(count_bias):
    """TR-04: gradients of the operator, in one block and in many recomputed ones, against autograd of the oracle."""
    case = make_case((0, 40), (20, 11), count_bias=count_bias)
    leaves, upstream = parameters(case), torch.randn_like(case.query)
    result = case.run()
    grads = torch.autograd.grad(result.output, leaves, upstream)
    for block_elements in (1, 5000):
        blocks = case.run(selection=result.selection, block_elements=block_elements)
        for one, other in zip(torch.autograd.grad(blocks.output, leaves, upstream), grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    loss = sum(
        (case.oracle(row, result.selection)[0] * upstream[row, :, :count]).sum()
        for row, count in enumerate(case.counts)
    )
    for one, other in zip(grads, torch.autograd.grad(loss, leaves), strict=True):
        assert other.norm() > 0
        assert relative_rms(one, other) <= RELATIVE_RMS[torch.float64]


# ---- the matrix A, selections, blocks, ties -------------------------------------------------------------------------


@pytest.mark.parametrize("count_bias", [False, True])
def test_output_equals_weights_times_values(count_bias):
    """METHOD 3: the output is A . V, rows of A sum to 1, and A is the oracle's (whose walk asserts the covering)."""
    case = make_case(count_bias=count_bias)
    plain = case.run()
    result = case.run(return_weights=True, selection=plain.selection)
    values = case.values.repeat_interleave(2, 1)
    for row, (count, tokens) in enumerate(zip(case.counts, case.lengths, strict=True)):
        weights = result.weights[row, :, :count]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        product = weights[..., :tokens] @ values[row, :, :tokens]
        assert relative_rms(product, plain.output[row, :, :count]) <= RELATIVE_RMS[torch.float64]
        assert relative_rms(weights[..., :tokens], case.oracle(row, plain.selection)[1]) <= RELATIVE_RMS[torch.float64]
        assert not weights[..., tokens:].any()


def test_each_token_is_covered_exactly_once():
    """METHOD 3: for a query of zeros each contribution weighs the same, so A shows how often a token is read."""
    case = make_case()
    result = case.run(query=torch.zeros_like(case.query), return_weights=True)
    r, k = case.geometry.branching, case.geometry.top_k
    for row, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for i in range(count):
            t = start + i
            levels = [level for level, nodes in result.selection.items() if nodes[row, 0, i, -1] >= 0]
            assert len(levels) == case.geometry.depth(t)
            for head in range(2):
                size = torch.ones(t + 1, dtype=torch.float64)  # tokens of the entry that covers each token
                # from the tokens up: what was not opened at a level is read there as a whole node
                for level in sorted(levels):
                    opened = set(result.selection[level][row, head, i].tolist())
                    assert len(opened) == k and t // r**level in opened
                    outside = [token for token in range(t + 1) if token // r**level not in opened]
                    size[outside] = float(r**level)
                # a token inside a closed node of a higher level keeps that level's size: closed above wins
                entries = (1 / size).sum()
                expected = 1 / size / entries
                torch.testing.assert_close(result.weights[row, 2 * head, i, : t + 1], expected)
                assert not result.weights[row, 2 * head, i, t + 1 :].any()


def test_returned_selection_gives_the_same_result():
    case = make_case()
    first = case.run()
    again = case.run(selection=first.selection)
    assert torch.equal(first.output, again.output)
    assert all(torch.equal(again.selection[level], nodes) for level, nodes in first.selection.items())
    assert case.run(return_selection=False).selection is None


@pytest.mark.parametrize("fault", ["no path node", "no candidate", "twice", "descending", "none", "beyond the query"])
def test_bad_selection_is_refused(fault):
    case = make_case((70,), (1,))
    selection = {level: nodes.clone() for level, nodes in case.run().selection.items()}
    nodes = selection[1][0, 0, 0]
    if fault == "no path node":
        nodes[-1] = nodes[-2]
    elif fault == "no candidate":  # a child of a node that the level above did not open
        opened = set(selection[2][0, 0, 0].tolist())
        nodes[0] = 4 * min(set(range(5)) - opened)
    elif fault == "twice":
        nodes[0] = nodes[1]
    elif fault == "descending":
        nodes.copy_(nodes.flip(0).clone())
    elif fault == "none":
        nodes.fill_(-1)
    else:
        nodes[-1] += 1
    with pytest.raises(ValueError, match=r"selection\[1\]"):
        case.run(selection=selection)


def test_backends_that_do_not_exist_are_refused():
    case = make_case((70,), (1,))
    for backend in ("triton", "cuda"):
        with pytest.raises(ValueError, match=backend):
            case.run(backend=backend)
    assert case.run(backend="reference").backend == case.run(backend="auto").backend == "reference"


def test_block_size_never_changes_the_result():
    case = make_case((0, 3, 150), (90, 40, 60))
    whole = case.run(block_elements=1 << 30)
    for block_elements in (1, 3000, 20_000):
        blocks = case.run(block_elements=block_elements)
        torch.testing.assert_close(blocks.output, whole.output, rtol=1e-11, atol=1e-12)
        assert all(torch.equal(blocks.selection[level], nodes) for level, nodes in whole.selection.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_whole_levels_ahead_never_changes_the_result(dtype, monkeypatch):
    """Where queries gather more than a level holds; not where one query reads a long cache, nor under a gradient."""
    case = make_case((0, 3, 150), (90, 40, 60), dtype=dtype)
    turned: list[int] = []
    rotate_ahead = attention_recsa_qwen3.OperatorCall._rotate_ahead

    def watched(call):
        rotate_ahead(call)
        turned.append(len(call.rotated))

    monkeypatch.setattr(attention_recsa_qwen3.OperatorCall, "_rotate_ahead", watched)
    ahead = case.run()
    monkeypatch.setattr(attention_recsa_qwen3, "_ROTATED_ELEMENTS", 0)
    gathered = case.run()
    assert turned[0] > 0 and turned[1] == 0 and torch.equal(ahead.output, gathered.output)
    monkeypatch.undo()
    monkeypatch.setattr(attention_recsa_qwen3.OperatorCall, "_rotate_ahead", watched)
    make_case((3000,), (1,), dtype=dtype).run()
    case.run(query=case.query.clone().requires_grad_())
    assert turned[2:] == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_index(dtype):
    """Exact ties at every level: no rotation, small integers and a scaling of 1/4, so that equal keys tie exactly."""
    r, k, s, M, N = 4, 4, 1, 16, 250
    case = make_case((0,), (N,), r=r, k=k, s=s, M=M, heads=2, dtype=dtype)  # one head each: a sum rounds
    with torch.no_grad():
        case.pooler.reset_parameters()
        # constant over 16 tokens, one of two vectors: many level-0 to level-2 nodes are equal
        kinds = torch.randint(-2, 3, (2, 2, 16)).to(dtype)
        kind = torch.randint(0, 2, (2, N // 16 + 1)).repeat_interleave(16, 1)[:, :N]
        case.keys = torch.stack([kinds[h][kind[h]] for h in range(2)])[None]
        case.query = torch.randint(-2, 3, case.query.shape).to(dtype)
    case.rope = torch.ones(M, 16), torch.zeros(M, 16)
    selection = case.run().selection
    with recorded_walks() as walks:
        case.oracle(0, None)
    assert [c for head in selections_of(selection, 0, N) for c in head] == [chosen for _, chosen, _ in walks]
    undecided = 0
    for t, chosen, importance in walks:
        for level, nodes in chosen.items():
            free = [node for node in importance[level] if node not in {t // r**level, *list(importance[level])[-s:]}]
            taken = {importance[level][node] for node in free if node in nodes}
            undecided += bool(taken & {importance[level][node] for node in free if node not in nodes})
    assert undecided > 100


# ---- SQ-01 ----------------------------------------------------------------------------------------------------------


def stock_twin(model: RecSAQwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Stock Qwen3 with the same weights."""
    fields = {name: value for name, value in model.config.to_dict().items() if not name.startswith("recsa_")}
    for name in ("model_type", "auto_map", "architectures"):
        fields.pop(name, None)
    stock = Qwen3ForCausalLM(Qwen3Config(**fields)).to(model.dtype).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".pooler." not in name}
    stock.load_state_dict(state)
    return stock


@pytest.mark.parametrize(
    ("k", "s", "M"),
    [
        pytest.param(2, 0, 8, id="budget of two"),
        pytest.param(4, 1, 16, id="exact budget"),
        pytest.param(64, 1, 256, id="budget larger than the tree"),
        pytest.param(None, 1, 16, id="no limit"),
    ],
)
def test_budgets(k, s, M):
    """SQ-01: equal to stock Qwen3 whenever all is covered; otherwise finite, causal and not the dense result."""
    model = tiny_model(recsa_top_k=k, recsa_recent=s, recsa_top_capacity=M)
    stock = stock_twin(model)
    lengths = [*range(1, 3 * model.config.recsa_branching + 1), M, M + 1, 4 * M]
    ids = random_ids(1, 2 * max(lengths))
    with torch.no_grad():
        for length in {min(length, 150) for length in lengths}:
            logits = model(ids[:, :length]).logits
            dense = k is None or length <= M
            assert model.last_backend == ("dense" if dense else "dense+reference")
            expected = stock(ids[:, :length]).logits
            number = length if dense else M
            torch.testing.assert_close(logits[:, :number], expected[:, :number], rtol=0, atol=LOGITS_ATOL)
            if not dense:
                assert torch.isfinite(logits).all()
                assert (logits[:, M:] - expected[:, M:]).abs().max() > 100 * LOGITS_ATOL
            other = ids[:, :length].clone()
            other[:, -1] = (other[:, -1] - 1).clamp(min=2) + (other[:, -1] <= 2).long() * 5
            assert torch.equal(model(other).logits[:, :-1], logits[:, :-1])


def test_budget_of_one_is_refused_by_name():
    """SQ-01"""
    with pytest.raises(ValueError, match="recsa_top_k=1"):
        tiny_config(recsa_top_k=1, recsa_recent=0)


def test_tree_of_a_single_level():
    """SQ-01: just past M only level 1 exists, and nothing above it is built or asked for."""
    case = make_case((0,), (15,), r=4, k=3, s=1, M=12)
    assert len(case.levels().keys) == 2
    check_case(case)
    model = tiny_model()
    with torch.no_grad(), recsa_trace(model) as trace:
        model(random_ids(1, DENSE + 1), use_cache=False)
    assert set(trace.forwards[0][0].selection) == {1}


# ---- SQ-02 ----------------------------------------------------------------------------------------------------------


def adverse_model(s: int) -> RecSAQwen3ForCausalLM:
    """Every query likes token 2 and dislikes token 3, in each layer and head, wherever they stand."""
    model = tiny_model(recsa_recent=s, rope_parameters={"rope_type": "default", "rope_theta": 1e9})
    slow = model.config.head_dim // 2 - 1  # the slowest pair: RoPE hardly turns it within M positions
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.zero_()
        embedding[:, 0] = 1
        embedding[2, 1], embedding[3, 1] = 1, -1
        for layer in model.model.layers:
            attention = layer.self_attn
            for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.o_proj.weight):
                weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            attention.q_proj.weight.view(4, 32, 64)[:, slow, 0] = 1
            attention.k_proj.weight.view(2, 32, 64)[:, slow, 1] = 1
            attention.pooler.reset_parameters()
    return model


@pytest.mark.parametrize("s", [0, 1, 2])
def test_path_and_recent_nodes_are_always_chosen(s):
    """SQ-02: though they score lowest; in prefill, decode, after a crop, left-padded; each head, level and layer."""
    model = adverse_model(s)
    r, k = model.config.recsa_branching, model.config.recsa_top_k
    depth = TreeGeometry.from_config(model.config).depth
    liked, length = 112, 256

    def check(trace, first: int, pads: int = 0) -> int:
        """All selections of queries far behind the liked tokens; column i of forward f is token `first` + ..."""
        seen, column = 0, first
        for forward in trace.forwards:
            width = 0
            for layer in forward.values():
                for level, nodes in layer.selection.items():
                    width = nodes.shape[2]
                    for i in range(width):
                        t = column + i - pads
                        path = t // r**level
                        if t < 0 or (path - s) * r**level < liked:
                            continue
                        chosen = nodes[-1, :, i]
                        if bool((chosen < 0).any()):
                            continue
                        forced = torch.arange(path - s, path + 1).expand(2, -1)
                        assert torch.equal(chosen[:, k - 1 - s :], forced), (level, t)
                        if level == depth(t):
                            # the free places went to liked nodes: the recent ones were not among the best
                            assert (chosen[:, : k - 1 - s] < liked // r**level).all()
                        seen += 1
            column += width
        return seen

    ids = torch.full((1, length), 3)
    ids[:, :liked] = 2
    with torch.no_grad():
        with recsa_trace(model) as trace:
            cache = RecSACache(model.config)
            model(ids[:, :200], cache=cache)
        assert check(trace, 0) > 100
        with recsa_trace(model) as trace:
            for i in range(200, 220):
                model(ids[:, i : i + 1], cache=cache)
        assert check(trace, 200) == 20 * 2 * 3  # columns, levels, layers
        cache.crop(-33)
        with recsa_trace(model) as trace:
            model(ids[:, 187:190], cache=cache)
            model(ids[:, 190:191], cache=cache)
        assert check(trace, 187) == 4 * 2 * 3
        padded = torch.cat((torch.zeros(1, 7, dtype=torch.long), ids), 1).repeat(2, 1)
        padded[0, :7] = 2
        mask = torch.ones_like(padded)
        mask[1, :7] = 0
        with recsa_trace(model) as trace:
            model(padded, attention_mask=mask, use_cache=False)
        assert check(trace, 0, pads=7) > 200


# ---- LP-04 ----------------------------------------------------------------------------------------------------------

# Worst error of plain float32 phases at head_dim 128 and theta 1e6; near 257 measured on Qwen3's own rotary module.
PHASE_ERRORS = {255: 1.3e-5, 256: 1.3e-5, 257: 1.3e-5, 258: 1.3e-5, 65_537: 2e-3, 262_144: 7e-3, 1_000_003: 3e-2}


@pytest.fixture
def no_stored_tables():
    """Tables are made anew inside the test, and those of a million positions are not kept."""
    attention_recsa_qwen3._rotary_tables.clear()
    yield
    attention_recsa_qwen3._rotary_tables.clear()


def check_tables(cos: torch.Tensor, sin: torch.Tensor) -> None:
    assert cos.dtype == sin.dtype == torch.float32
    for position, bound in PHASE_ERRORS.items():
        if position >= len(cos):
            continue
        for table, exact in zip((cos, sin), oracle.rope_tables(1e6, cos.shape[1], [position]), strict=True):
            assert (table[position].double() - exact[0]).abs().max() <= 2 * bound, position
        assert (cos[position] - cos[position - 1]).abs().max() > 0.1  # neighbours stay apart


def test_rotary_tables_of_a_million_positions(no_stored_tables):
    """LP-04: dense attention (`recsa_top_k=None`) reaches these positions; the tables are float32 from integers."""
    config = tiny_config(head_dim=128, recsa_top_k=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    check_tables(*attention_recsa_qwen3.rotary_tables(config, torch.device("cpu"), 1_000_004))


@pytest.mark.parametrize("how", ["float32", "bfloat16", "float16", "autocast"])
def test_rotary_tables_of_a_cast_model(how, monkeypatch, no_stored_tables):
    """LP-04: after .to(bf16), .half() and under autocast the operator still gets float32 tables of positions <= M."""
    model = tiny_model(
        num_hidden_layers=1,
        head_dim=128,
        recsa_top_capacity=300,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    seen: list[Any] = []

    def watching(query, levels, starts, counts, geometry, rope, **options):
        seen.append(rope)
        return recsa_attention(query, levels, starts, counts, geometry, rope, **options)

    monkeypatch.setattr(modeling_recsa_qwen3, "recsa_attention", watching)
    if how in ("bfloat16", "float16"):
        model = model.to(getattr(torch, how))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        logits = model(random_ids(1, 310), use_cache=False).logits
    assert torch.isfinite(logits).all() and model.last_backend == "dense+reference"
    ((cos, sin),) = seen
    assert 300 <= len(cos) <= 512
    check_tables(cos, sin)


def test_nan_inputs_give_nan_and_no_error():
    """A diverged training step must show as NaN, as in stock Qwen3, not as an error about shapes."""
    model = tiny_model()
    embeddings = model.get_input_embeddings()(random_ids(1, 4 * DENSE)).detach()
    embeddings[0, -1] = float("nan")
    with torch.no_grad():
        logits = model(inputs_embeds=embeddings).logits
    assert bool(logits[0, -1].isnan().all())


def test_a_selection_without_a_level_is_refused_by_name():
    geometry = TreeGeometry(4, 4, 1, DENSE)
    query, keys = torch.randn(1, 2, 2 * DENSE, 32), torch.randn(1, 2, 2 * DENSE, 32)
    levels = build_levels(keys, keys, RecSAPooler(2, 4, 32), 4, geometry.depth(2 * DENSE - 1))
    rope = attention_recsa_qwen3.rotary_tables(tiny_config(), query.device, DENSE)
    with pytest.raises(ValueError, match="selection: has no level 1"):
        recsa_attention(query, levels, [0], [2 * DENSE], geometry, rope, selection={})
