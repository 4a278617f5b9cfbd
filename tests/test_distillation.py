"""The distillation loss against one that is written out node by node in float64, and where its gradients go."""

import pytest
import torch

import oracle
from operands import Case, make_case
from recsa_qwen3 import distillation_recsa_qwen3
from recsa_qwen3.distillation_recsa_qwen3 import distillation_loss, queries_at

# (0 tokens before) r = 4, k = 3, s = 1, M = 12: dense up to 12 tokens, depth 1 up to 48, 2 up to 192, 3 beyond
TOKENS = 210


def case_of(tokens: int = TOKENS, **options) -> Case:
    case = make_case((0, 0), (tokens, tokens), **options)
    case.pooler.requires_grad_(True)
    return case


def loss_of(case: Case, positions: torch.Tensor, teacher=None, **options):
    known = positions[: len(case.query)].clamp(max=case.query.shape[2] - 1)
    queries = queries_at(case.query[: len(known)], known)
    rope = teacher or case.rope
    return distillation_loss(queries, case.keys, case.pooler, case.geometry, positions, case.rope, rope, **options)


def written_out(case: Case, positions: torch.Tensor, teacher_rope) -> dict[int, float]:
    """level -> mean KL: per query head and node, from the oracle's tree, walk and dense attention."""
    g, (_, heads, _, head_dim) = case.geometry, case.query.shape
    group, scaling = heads // case.keys.shape[1], head_dim**-0.5
    found: dict[int, list[float]] = {}
    for row, head in ((row, head) for row in range(len(positions)) for head in range(case.keys.shape[1])):
        weights = case.pooler.query[head], case.pooler.slot_bias, case.pooler.proj[head]
        tree = oracle.build_tree(case.keys[row, head], case.values[row, head], *weights, g.branching)
        for t in positions[row].tolist():
            if t < 0:
                continue
            query = case.query[row, head * group : (head + 1) * group, t]
            shared = dict(r=g.branching, s=g.recent, M=g.top_capacity, scaling=scaling)
            teacher = oracle.attend(query, tree, t, k=None, cos=teacher_rope[0], sin=teacher_rope[1], **shared)[2]
            chosen = oracle.attend(
                query, tree, t, k=g.top_k, cos=case.rope[0], sin=case.rope[1], count_bias=g.count_bias, **shared
            )[1]
            for level in (level for level in range(1, 9) if t // g.branching**level >= 2):
                span = g.branching**level
                if level + 1 in chosen:
                    nodes = [c for n in chosen[level + 1] for c in range(n * g.branching, (n + 1) * g.branching)]
                    nodes = [node for node in nodes if node < t // span]
                else:
                    nodes = list(range(t // span))
                mass = torch.stack([teacher[:, node * span : (node + 1) * span].sum(1) for node in nodes], 1)
                share = mass / mass.sum(1, keepdim=True)
                cos, sin = (table[: len(nodes) + 1] for table in case.rope)
                key = oracle.rotate(tree[level][0][nodes], cos[:-1], sin[:-1])
                logits = scaling * oracle.rotate(query.double(), cos[-1], sin[-1]) @ key.T
                kl = (share * (share.log() - torch.log_softmax(logits, 1))).sum(1)
                found.setdefault(level, []).extend(kl.tolist())
    return {level: sum(values) / len(values) for level, values in found.items()}


POSITIONS = [[0, 7, 8, 11, 12, 47, 48, 100, 191, 192, 209], [209, 3, -1, 150, 149, 33, -1, 64, 63, 12, 200]]


@pytest.mark.parametrize("count_bias", [False, True])
@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize("block_elements", [None, 1, 3 * 4 * TOKENS])
def test_the_loss_is_what_it_says(count_bias, stretched, block_elements):
    """Dense queries, three depths and the levels above each; teacher with the same and with other RoPE."""
    case = case_of(count_bias=count_bias)
    teacher = oracle.rope_tables(5e5, 16, [p / 3 for p in range(TOKENS)]) if stretched else case.rope
    positions = torch.tensor(POSITIONS)
    result = loss_of(case, positions, teacher, block_elements=block_elements)
    expected = written_out(case, positions, teacher)
    assert set(result.levels) == set(expected) == {1, 2, 3}
    for level, value in expected.items():
        torch.testing.assert_close(result.levels[level].item(), value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(result.loss.item(), sum(expected.values()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_stays_near(dtype):
    case = case_of(dtype=dtype)
    positions = torch.tensor(POSITIONS)
    result = loss_of(case, positions)
    assert result.loss.dtype == torch.float32
    expected = written_out(case, positions, case.rope)
    for level, value in expected.items():
        assert abs(result.levels[level].item() - value) <= (0.05 if dtype == torch.bfloat16 else 1e-3) * value


@pytest.mark.parametrize("block_elements", [None, 1])
def test_gradients_reach_the_pooler_alone(block_elements):
    """By finite differences, where the selection stays; queries and keys get none."""
    case = case_of(100, heads=2, kv_heads=1, head_dim=8)
    case.query.requires_grad_(True)
    case.keys.requires_grad_(True)
    positions = torch.tensor([[99, 50, 13], [70, 20, 9]])
    loss_of(case, positions, block_elements=block_elements).loss.backward()
    assert case.query.grad is None and case.keys.grad is None
    for parameter in case.pooler.parameters():
        direction = torch.randn_like(parameter)
        slope = (parameter.grad * direction).sum().item()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * 1e-6)
                values.append(loss_of(case, positions).loss.item())
                parameter.add_(direction, alpha=-sign * 1e-6)
        assert slope != 0
        torch.testing.assert_close(slope, (values[0] - values[1]) / 2e-6, rtol=1e-4, atol=1e-7)


def test_poolers_learn_what_dense_attention_reads():
    """Steps of the loss alone bring it down, and bring the chosen nodes towards those with the most mass."""
    torch.manual_seed(3)  # of this optimisation; all else is drawn fresh elsewhere
    case = case_of(180, heads=2, kv_heads=1)
    # keys that share a direction per token make the mean of four a poor guide
    case.keys[:, :, ::4] *= 4
    optimizer = torch.optim.Adam(case.pooler.parameters(), lr=0.03)
    positions = torch.arange(60, 180, 5).repeat(2, 1)
    before = loss_of(case, positions).loss.item()
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(case, positions).loss.backward()
        optimizer.step()
    assert loss_of(case, positions).loss.item() < 0.8 * before


def test_memory_stays_within_a_block(monkeypatch):
    """Neither N x N nor N per sampled query: the teacher's attention is held for as many queries as a block says."""
    case = case_of(400, heads=2, kv_heads=1, head_dim=8)
    widths = []
    masses = distillation_recsa_qwen3.Teacher.masses

    def watched(teacher, query, *arguments):
        widths.append(query.shape[2])
        return masses(teacher, query, *arguments)

    monkeypatch.setattr(distillation_recsa_qwen3.Teacher, "masses", watched)
    with torch.no_grad():
        loss_of(case, torch.arange(200, 400).repeat(2, 1), block_elements=2 * 400 * 7)
    assert max(widths) == 7 and sum(widths) == 400


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[TOKENS], [5]], "positions"),
        ([[-2], [5]], "positions"),
        ([[7, 3], [-1, 5]], "two nodes"),
        ([[-1], [-1]], "two nodes"),
    ],
)
def test_positions_that_teach_nothing_are_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        loss_of(case_of(), torch.tensor(positions))
    case = case_of()
    with pytest.raises(ValueError, match="shape"):
        distillation_loss(
            case.query[:, :, :3], case.keys, case.pooler, case.geometry, torch.tensor([[9]]), case.rope, case.rope
        )
    dense = case_of(k=None)
    with pytest.raises(ValueError, match="recsa_top_k"):
        loss_of(dense, torch.tensor([[50], [60]]))
