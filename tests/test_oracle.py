"""Self-checks of the oracle against textbook formulas, hand-worked cases and stock Qwen3.

It uses nothing from the package under test.
"""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import oracle

torch.set_num_threads(1)


def close(value: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the rounding of float64."""
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(N: int, B: int = 1, H: int = 4, H_kv: int = 2, D: int = 8, r: int = 2, seed: int = 0) -> dict[str, Any]:
    """Random inputs of `oracle.attention`, with a pooler that is not the mean."""
    cos, sin = oracle.rope_tables(10_000.0, D, range(N))
    return dict(
        query=2 * normal(B, H, N, D, seed=seed),
        key=normal(B, H_kv, N, D, seed=seed + 1),
        value=normal(B, H_kv, N, D, seed=seed + 2),
        pooler_query=normal(H_kv, D, seed=seed + 3),
        slot_bias=normal(r, seed=seed + 4),
        proj=normal(H_kv, D, D, seed=seed + 5),
        r=r,
        scaling=D**-0.5,
        cos=cos,
        sin=sin,
    )


def tree(inputs: dict[str, Any], b: int = 0, h: int = 0) -> oracle.Levels:
    pooler = inputs["pooler_query"][h], inputs["slot_bias"], inputs["proj"][h]
    return oracle.build_tree(inputs["key"][b, h], inputs["value"][b, h], *pooler, inputs["r"])


def textbook(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense causal attention with ordinary RoPE as complex rotations: output and weights."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    D, N = query.shape[-1], query.shape[-2]
    frequency = 10_000.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
    turn = torch.polar(torch.ones(N, D // 2, dtype=torch.float64), torch.arange(N)[:, None] * frequency)
    group = query.shape[1] // key.shape[1]
    rotated_query = torch.complex(query[..., : D // 2], query[..., D // 2 :]) * turn
    rotated_key = (torch.complex(key[..., : D // 2], key[..., D // 2 :]) * turn).repeat_interleave(group, dim=1)
    logits = (rotated_query @ rotated_key.mH).real * inputs["scaling"]
    A = logits.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    return A @ value.repeat_interleave(group, dim=1), A


@pytest.mark.parametrize("r", [2, 3, 4, 16])
def test_depth_bounds_the_candidates_and_is_smallest(r: int) -> None:
    M = 3 * r
    for t in range(M * r * r + 2):
        level = oracle.depth(t, r, M)
        assert t // r**level + 1 <= M
        assert level == 0 or t // r ** (level - 1) + 1 > M
    assert [oracle.depth(t, r, M) for t in (0, M - 1, M, M * r - 1, M * r)] == [0, 0, 1, 1, 2]


def test_untrained_pooler_is_the_mean_and_nodes_are_complete() -> None:
    key, value = normal(29, 8, seed=1), normal(29, 8, seed=2)
    zero = torch.zeros(8)
    levels = oracle.build_tree(key, value, zero, zero[:3], torch.eye(8), 3)
    assert [len(m) for m, _ in levels] == [29, 9, 3, 1]
    for level, (m, mean) in enumerate(levels):
        width = 3**level
        for i in range(len(m)):
            close(m[i], key[i * width : (i + 1) * width].mean(0))
            close(mean[i], value[i * width : (i + 1) * width].mean(0))


def test_pooler_weights_children_and_projection_stays_out_of_the_recursion() -> None:
    children = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    pooled = oracle.pool(children, torch.tensor([3.0, 1.0]).double().log(), torch.tensor([1.0, 2.0]).double().log())
    close(pooled, torch.tensor([3.0, 2.0]).double() / 5)

    inputs = case(16)
    levels = tree(inputs)
    plain = tree({**inputs, "proj": torch.eye(8).expand(2, 8, 8)})
    torch.testing.assert_close(levels[0][0], plain[0][0], rtol=0, atol=0)
    for (read, _), (m, _) in zip(levels[1:], plain[1:], strict=True):
        close(read, m @ inputs["proj"][0].T)


@pytest.mark.parametrize(("k", "M"), [(3, 40), (None, 6)])
def test_dense_is_textbook_attention(k: int | None, M: int) -> None:
    inputs = case(40, B=2)
    output, selections, A = oracle.attention(**inputs, k=k, s=1, M=M)
    expected, expected_A = textbook(inputs)
    close(output, expected)
    close(A, expected_A)
    assert all(chosen == {} for row in selections for head in row for chosen in head)


@pytest.mark.parametrize(("r", "k", "s", "M"), [(2, 3, 1, 6), (2, 5, 2, 13), (4, 3, 0, 12), (3, 4, 1, 15)])
@pytest.mark.parametrize("count_bias", [False, True])
def test_sparse_invariants(r: int, k: int, s: int, M: int, count_bias: bool) -> None:
    inputs = case(90, r=r)
    short = {**inputs, "cos": inputs["cos"][:M], "sin": inputs["sin"][:M]}  # no position reaches M
    walk: dict[str, Any] = dict(k=k, s=s, M=M, count_bias=count_bias)
    output, selections, A = oracle.attention(**short, **walk)
    close(A.sum(-1), torch.ones_like(A[..., 0]))
    close(output, A @ inputs["value"].repeat_interleave(2, dim=1))
    assert (A.tril() > 0).equal(torch.ones(90, 90, dtype=torch.bool).tril().expand_as(A))
    assert oracle.attention(**short, **{**walk, "count_bias": not count_bias})[1] == selections

    for h, per_query in enumerate(selections[0]):
        levels = tree(inputs, h=h)
        for t, chosen in enumerate(per_query):
            top = oracle.depth(t, r, M)
            assert sorted(chosen) == list(range(1, top + 1))
            importance = oracle.attend(
                inputs["query"][0, 2 * h : 2 * h + 2, t],
                levels,
                t,
                r=r,
                scaling=inputs["scaling"],
                cos=short["cos"],
                sin=short["sin"],
                **walk,
            )[3]
            covered = [0] * (t + 1)
            candidates = list(range(t // r**top + 1))
            for level in range(top, 0, -1):
                path = t // r**level
                assert candidates[-1] == path and len(candidates) <= M
                assert list(importance[level]) == candidates[:-1]
                assert len(chosen[level]) == min(k, len(candidates)) and set(chosen[level]) <= set(candidates)
                assert set(candidates[-1 - s :]) <= set(chosen[level])
                unchosen = [c for c in candidates if c not in chosen[level]]
                free = [c for c in chosen[level] if c not in candidates[-1 - s :]]
                if unchosen and free:
                    floor = min(importance[level][c] for c in free)
                    assert floor >= max(importance[level][c] for c in unchosen)
                for c in unchosen:
                    tokens = slice(c * r**level, (c + 1) * r**level)
                    covered[tokens] = [count + 1 for count in covered[tokens]]
                    weights = A[0, 2 * h : 2 * h + 2, t, tokens]
                    assert weights.shape[-1] == r**level and weights.eq(weights[:, :1]).all()
                candidates = [c for c in range(t // r ** (level - 1) + 1) if c // r in chosen[level]]
            for c in candidates:
                covered[c] += 1
            assert covered == [1] * (t + 1)


def test_only_the_first_tokens_matter_and_any_query_subset_agrees() -> None:
    inputs = case(70)
    walk: dict[str, Any] = dict(k=3, s=1, M=6)
    output, selections, A = oracle.attention(**inputs, **walk)
    cut = {name: inputs[name][:, :, :51] for name in ("query", "key", "value")}
    cut_output, cut_selections, cut_A = oracle.attention(**{**inputs, **cut}, **walk)
    close(cut_output, output[:, :, :51])
    close(cut_A, A[:, :, :51, :51])
    assert cut_selections == [[head[:51] for head in selections[0]]]

    some = {**inputs, "query": inputs["query"][:, :, [5, 69, 33]]}
    some_output, some_selections, some_A = oracle.attention(**some, **walk, positions=[[5, 69, 33]])
    close(some_output, output[:, :, [5, 69, 33]])
    close(some_A, A[:, :, [5, 69, 33]])
    assert some_selections == [[[head[t] for t in (5, 69, 33)] for head in selections[0]]]


def test_ties_go_to_the_lower_index_and_counts_make_zero_logits_uniform() -> None:
    inputs, t = case(60), 59
    walk: dict[str, Any] = dict(r=2, k=4, s=1, M=8, scaling=1.0, cos=inputs["cos"], sin=inputs["sin"], count_bias=True)
    _, selection, A, _ = oracle.attend(torch.zeros(2, 8), tree(inputs), t, **walk)
    assert selection == {3: [0, 1, 6, 7], 2: [0, 1, 13, 14], 1: [0, 1, 28, 29]}
    close(A, torch.full_like(A, 1 / 60))


def test_hand_worked_walk_and_given_selection() -> None:
    """r=2, k=3, s=1, M=6, t=6: four nodes at level 1, the fourth incomplete; one of nodes 0 and 1 is opened."""
    inputs = case(7, H=2, H_kv=1)
    cos, sin, scaling, q = inputs["cos"], inputs["sin"], inputs["scaling"], inputs["query"][0, :, 6]
    levels = tree(inputs)
    walk: dict[str, Any] = dict(r=2, k=3, s=1, M=6, scaling=scaling, cos=cos, sin=sin)

    def logit(level: int, node: int, position: int, n: int) -> torch.Tensor:
        key = oracle.rotate(levels[level][0][node], cos[position], sin[position])
        return scaling * (oracle.rotate(q, cos[n - 1], sin[n - 1]) * key).sum(-1)

    score = torch.stack([logit(1, node, node, 4) for node in range(3)], dim=-1).softmax(-1).sum(0)
    _, free_choice, _, importance = oracle.attend(q, levels, 6, **walk)
    close(torch.tensor(list(importance[1].values()), dtype=torch.float64), score)
    assert free_choice == {1: [int(score[1] > score[0]), 2, 3]}

    for opened, closed in ((0, 1), (1, 0)):
        output, selection, A, _ = oracle.attend(q, levels, 6, selection={1: [3, opened, 2]}, **walk)
        assert selection == {1: [opened, 2, 3]}
        tokens = [2 * opened, 2 * opened + 1, 4, 5, 6]
        logits = [logit(0, token, p, 5) for p, token in enumerate(tokens)] + [logit(1, closed, closed, 4)]
        values = torch.cat([levels[0][1][tokens], levels[1][1][[closed]]])
        weight = torch.stack(logits, dim=-1).softmax(-1)
        close(output, weight @ values)
        close(A[:, tokens], weight[:, :5])
        close(A[:, 2 * closed], weight[:, 5] / 2)

    for wrong in ([0, 1, 2], [0, 3, 4]):
        with pytest.raises(ValueError, match="level 1"):
            oracle.attend(q, levels, 6, selection={1: wrong}, **walk)


def test_gradients_reach_every_input_but_not_the_selection() -> None:
    inputs = case(20, H=2, H_kv=1, D=4)
    inputs["query"] = inputs["query"][:, :, 19:]
    walk: dict[str, Any] = dict(k=3, s=1, M=6, positions=[[19]])
    _, selections, _ = oracle.attention(**inputs, **walk)
    names = ("query", "key", "value", "pooler_query", "slot_bias", "proj")

    def output(*tensors: torch.Tensor) -> torch.Tensor:
        moved = {**inputs, **dict(zip(names, tensors, strict=True))}
        return oracle.attention(**moved, **walk, selections=selections)[0]

    assert torch.autograd.gradcheck(output, [inputs[name].requires_grad_() for name in names])


def tiny(attention_bias: bool, tie: bool) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """A tiny stock Qwen3 with no weight left at its initial value; its state dict with untrained poolers; a config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=attention_bias,
        tie_word_embeddings=tie,
        rms_norm_eps=1e-2,
        rope_parameters={"rope_type": "default", "rope_theta": 3_000.0},
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(config).double().eval()
    with torch.no_grad():
        for seed, (name, weight) in enumerate(model.named_parameters()):
            weight.copy_(0.3 * normal(*weight.shape, seed=seed) + ("norm" in name))
    state = dict(model.state_dict())
    for i in range(2):
        pooler = f"model.layers.{i}.self_attn.pooler"
        state[f"{pooler}.query"] = torch.zeros(2, 16)
        state[f"{pooler}.slot_bias"] = torch.zeros(4)
        state[f"{pooler}.proj"] = torch.eye(16).expand(2, 16, 16)
    recsa: dict[str, Any] = dict(
        recsa_branching=4, recsa_top_k=4, recsa_recent=1, recsa_top_capacity=32, recsa_count_bias=False
    )
    return model, state, SimpleNamespace(**config.to_dict(), **recsa)


def relative_rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).square().mean().sqrt() / reference.square().mean().sqrt())


@pytest.mark.parametrize(("attention_bias", "tie"), [(False, False), (True, True)])
def test_model_equals_stock_qwen3_up_to_the_top_capacity(attention_bias: bool, tie: bool) -> None:
    model, state, config = tiny(attention_bias, tie)
    ids = torch.randint(61, (48,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = model(ids[None]).logits[0]
    # Stock Qwen3 keeps norms, softmax and RoPE tables in float32 whatever the model's dtype.
    logits, selections = oracle.model_logits(state, config, ids[:32])
    assert relative_rms(logits, stock[:32]) < 1e-5
    assert selections == [[[{}] * 32] * 2] * 2

    logits, _ = oracle.model_logits(state, config, ids)
    assert relative_rms(logits[:32], stock[:32]) < 1e-5
    assert relative_rms(logits[32:], stock[32:]) > 1e-3
    config.recsa_top_k = config.recsa_top_capacity = None
    assert relative_rms(oracle.model_logits(state, config, ids)[0], stock) < 1e-5


def test_model_takes_its_own_selection_and_is_quick() -> None:
    _, state, config = tiny(False, False)
    ids = torch.randint(61, (300,), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    logits, selections = oracle.model_logits(state, config, ids)
    assert time.perf_counter() - start < 30  # about one second when the machine is idle
    assert max(max(chosen, default=0) for layer in selections for head in layer for chosen in head) == 2
    again, used = oracle.model_logits(state, config, ids, selections)
    assert torch.equal(again, logits) and used == selections
