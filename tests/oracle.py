"""A brute-force float64 oracle of Recursive Sparse Attention, for tests.

It holds a second, independent implementation of the method: one query at a time, one level at a time, no masks, no
batching, no cache. It never imports the package under test, so the two can only agree by computing the same thing.

Symbols: B rows, T queries, N tokens, H query heads, H_kv KV heads, G = H / H_kv, D head width, V vocabulary,
r children per node, k most chosen per level, s recent candidates, M most candidates at the top level, l a level,
n_l nodes at level l, n candidates, t a logical position, P rows of a RoPE table.

Inputs may have any float dtype and are taken to float64 on the CPU; every tensor returned is float64. Gradients flow
from outputs to inputs (never through a selection), so the oracle also serves tests of the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Levels = list[tuple[Tensor, Tensor]]  # per level: read keys [n_l, D], mean values [n_l, D]
Selection = dict[int, list[int]]  # level > 0 -> ids of the chosen nodes, ascending
Importance = dict[int, dict[int, float]]  # level > 0 -> node id -> importance


def _f64(x: Tensor) -> Tensor:
    return torch.as_tensor(x).to(device="cpu", dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------- the tree


def pool(children: Tensor, query: Tensor, slot_bias: Tensor) -> Tensor:
    """Pool r children's keys m [r, D] into the parent's [D], weighing m_i by softmax_i(m_i . query + slot_bias_i)."""
    children, query, slot_bias = _f64(children), _f64(query), _f64(slot_bias)
    weight = torch.softmax(children @ query + slot_bias, dim=0)  # [r]
    return weight @ children


def build_tree(key: Tensor, value: Tensor, pooler_query: Tensor, slot_bias: Tensor, proj: Tensor, r: int) -> Levels:
    """Build the tree of one row and one KV head, complete nodes only.

    Args:
        key, value: [N, D], keys before RoPE.
        pooler_query: [D]. slot_bias: [r]. proj: [D, D].

    Returns:
        One (read_key [n_l, D], mean_value [n_l, D]) per level with n_l = N // r**l > 0; level 0 is the tokens.
    """
    m, mean, proj = _f64(key), _f64(value), _f64(proj)
    levels = [(m, mean)]
    while len(m) // r > 0:
        parents = range(len(m) // r)
        mean = torch.stack([mean[i * r : (i + 1) * r].mean(dim=0) for i in parents])
        m = torch.stack([pool(m[i * r : (i + 1) * r], pooler_query, slot_bias) for i in parents])
        # The recursion carries m; the projection is only what a query meets.
        levels.append((torch.stack([proj @ m_i for m_i in m]), mean))
    return levels


def depth(t: int, r: int, M: int) -> int:
    """The smallest level at which a query at position t has at most M candidates: ceil((t + 1) / r**l) <= M."""
    level = 0
    while -(-(t + 1) // r**level) > M:
        level += 1
    return level


# ---------------------------------------------------------------------------------------------------- RoPE


def rope_tables(theta: float, D: int, positions: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Default RoPE: cos and sin [P, D] of the given positions, the D / 2 frequencies repeated in the second half."""
    frequency = float(theta) ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)  # [D / 2]
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the last dimension of x, first half paired with second half; cos and sin broadcast against x."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# ---------------------------------------------------------------------------------------------------- attention


def choose(candidates: Sequence[int], importance: Mapping[int, float], k: int, s: int) -> list[int]:
    """Choose min(k, n) of n ordered candidates: the last (the path), the s before it, then the most important.

    `importance` holds every candidate but the path. Ties go to the lower index.
    """
    forced = list(candidates[-(s + 1) :])
    free = sorted(candidates[: -(s + 1)], key=lambda node: (-importance[node], node))
    return sorted(forced + free[: max(k - len(forced), 0)])


def attend(
    q: Tensor,
    levels: Levels,
    t: int,
    *,
    r: int,
    k: int | None,
    s: int,
    M: int,
    scaling: float,
    cos: Tensor,
    sin: Tensor,
    count_bias: bool = False,
    selection: Mapping[int, Sequence[int]] | None = None,
) -> tuple[Tensor, Selection, Tensor, Importance]:
    """One query at logical position t, all G heads that share one KV head.

    Args:
        q: [G, D], before RoPE.
        levels: the tree of `build_tree` over at least t + 1 tokens; what lies past t is not read.
        k: None is dense attention at every length; M and `selection` then play no part.
        cos, sin: [P, D] for positions 0 ... P - 1; P >= M, or P > t when k is None or t < M.
        selection: chosen nodes of every level > 0 of the walk, used in place of choosing.

    Returns:
        output [G, D]; the selection used; the token-level weights A [G, t + 1], a summary's weight spread evenly over
        its tokens; the importance of every candidate but the path, per level > 0 of the walk.

    Raises:
        ValueError: a given selection lacks the path node or names a node that is no candidate.
        AssertionError: some token up to t is not covered exactly once.
    """
    q, cos, sin = _f64(q), _f64(cos), _f64(sin)
    chosen: Selection = {}
    importance: Importance = {}
    all_logits: list[Tensor] = []  # [G, entries] per level
    all_values: list[Tensor] = []  # [entries, D] per level
    spans: list[tuple[int, int]] = []  # per entry: first token, number of tokens

    def read(level: int, entries: list[tuple[int, int]], query_position: int) -> Tensor:
        """Logits [G, entries] of the (position, node) entries of a level."""
        position = [p for p, _ in entries]
        node = [c for _, c in entries]
        key = rotate(_f64(levels[level][0])[node], cos[position], sin[position])
        logits = scaling * rotate(q, cos[query_position], sin[query_position]) @ key.T
        return logits + level * torch.log(torch.tensor(float(r), dtype=torch.float64)) if count_bias else logits

    def contribute(level: int, entries: list[tuple[int, int]], logits: Tensor) -> None:
        all_logits.append(logits)
        all_values.append(_f64(levels[level][1])[[c for _, c in entries]])
        spans.extend((c * r**level, r**level) for _, c in entries)

    level = 0 if k is None else depth(t, r, M)
    candidates = list(range(t // r**level + 1))
    while level > 0:
        assert k is not None
        n, path = len(candidates), t // r**level
        assert candidates[-1] == path
        # The path node may be incomplete: it has no key, no logit and no importance, and is always opened.
        entries = list(enumerate(candidates[:-1]))
        logits = read(level, entries, n - 1)
        summed = torch.softmax(logits, dim=-1).sum(dim=0).tolist()
        importance[level] = dict(zip(candidates[:-1], summed, strict=True))

        if selection is None:
            chosen[level] = choose(candidates, importance[level], k, s)
        else:
            chosen[level] = sorted(int(node) for node in selection[level])
            if path not in chosen[level] or not set(chosen[level]) <= set(candidates):
                raise ValueError(f"selection at level {level} for t={t} is no subset of the candidates with the path")

        opened = set(chosen[level])
        left = [p for p, node in entries if node not in opened]
        contribute(level, [entries[p] for p in left], logits[:, left])

        level -= 1
        path = t // r**level
        candidates = [c for node in chosen[level + 1] for c in range(node * r, (node + 1) * r) if c <= path]

    entries = list(enumerate(candidates))
    contribute(0, entries, read(0, entries, len(candidates) - 1))

    weight = torch.softmax(torch.cat(all_logits, dim=-1), dim=-1)  # [G, contributions]
    output = weight @ torch.cat(all_values)

    owner = [-1] * (t + 1)
    for column, (start, size) in enumerate(spans):
        for token in range(start, start + size):
            assert owner[token] == -1, f"token {token} is covered twice at t={t}"
            owner[token] = column
    assert -1 not in owner, f"token {owner.index(-1)} is not covered at t={t}"
    size_of = torch.tensor([size for _, size in spans], dtype=torch.float64)
    return output, chosen, (weight / size_of)[:, owner], importance


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pooler_query: Tensor,
    slot_bias: Tensor,
    proj: Tensor,
    *,
    r: int,
    k: int | None,
    s: int,
    M: int,
    scaling: float,
    cos: Tensor,
    sin: Tensor,
    count_bias: bool = False,
    positions: Sequence[Sequence[int]] | None = None,
    selections: Sequence[Sequence[Sequence[Mapping[int, Sequence[int]]]]] | None = None,
) -> tuple[Tensor, list[list[list[Selection]]], Tensor]:
    """`attend` over all rows, heads and queries; query head h reads KV head h // G.

    Args:
        query: [B, H, T, D]. key, value: [B, H_kv, N, D]. All before RoPE, rows without padding.
        pooler_query: [H_kv, D]. slot_bias: [r]. proj: [H_kv, D, D].
        positions: [B][T] logical positions of the queries, each below N; None means 0 ... T - 1.
        selections: [B][H_kv][T] selections to use in place of choosing.
        The rest as in `attend`.

    Returns:
        output [B, H, T, D]; selections [B][H_kv][T]; token-level weights A [B, H, T, N].
    """
    query, key, value = _f64(query), _f64(key), _f64(value)
    B, H, T, D = query.shape
    H_kv, N = key.shape[1:3]
    G = H // H_kv
    walk: dict[str, Any] = dict(r=r, k=k, s=s, M=M, scaling=scaling, count_bias=count_bias, cos=cos, sin=sin)
    outputs: list[Tensor] = []  # [T, G, D] per row and KV head
    weights: list[Tensor] = []  # [T, G, N] per row and KV head
    used: list[list[list[Selection]]] = []
    for b in range(B):
        used.append([])
        for h in range(H_kv):
            levels = build_tree(key[b, h], value[b, h], pooler_query[h], slot_bias, proj[h], r)
            used[b].append([])
            output_of, weight_of = [], []
            for i in range(T):
                t = i if positions is None else int(positions[b][i])
                given = None if selections is None else selections[b][h][i]
                q = query[b, h * G : (h + 1) * G, i]  # [G, D]
                output, chosen, A, _ = attend(q, levels, t, selection=given, **walk)
                output_of.append(output)
                weight_of.append(torch.nn.functional.pad(A, (0, N - 1 - t)))
                used[b][h].append(chosen)
            outputs.append(torch.stack(output_of))
            weights.append(torch.stack(weight_of))
    output = torch.stack(outputs).transpose(1, 2).reshape(B, H, T, D)
    return output, used, torch.stack(weights).transpose(1, 2).reshape(B, H, T, N)


# ---------------------------------------------------------------------------------------------------- a whole model


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return _f64(weight) * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def model_logits(
    state_dict: Mapping[str, Tensor],
    config: Any,
    input_ids: Tensor,
    selections: Sequence[Sequence[Sequence[Mapping[int, Sequence[int]]]]] | None = None,
) -> tuple[Tensor, list[list[list[Selection]]]]:
    """The causal LM from its state dict, for one row without padding.

    Args:
        state_dict: Qwen3's names and `model.layers.{i}.self_attn.pooler.{query,slot_bias,proj}`.
        config: any object with Qwen3's fields, `rope_parameters["rope_theta"]` (default RoPE) and `recsa_*` fields.
        input_ids: [T] integers.
        selections: [layers][H_kv][T] selections to use in place of choosing.

    Returns:
        logits [T, V]; selections [layers][H_kv][T].
    """

    def parameter(name: str) -> Tensor:
        return _f64(state_dict[name])

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ parameter(f"{name}.weight").T
        return y + parameter(f"{name}.bias") if f"{name}.bias" in state_dict else y

    assert config.hidden_act == "silu"
    assert config.rope_parameters.get("rope_type", "default") == "default"
    ids = torch.as_tensor(input_ids, device="cpu")
    (T,) = ids.shape
    D, r, k, eps = config.head_dim, config.recsa_branching, config.recsa_top_k, config.rms_norm_eps
    M = config.recsa_top_capacity
    if M is None:
        M = T if k is None else k * r  # dense attention has no use for M
    cos, sin = rope_tables(config.rope_parameters["rope_theta"], D, range(T))  # no walk passes position t

    x = parameter("model.embed_tokens.weight")[ids]  # [T, hidden]
    used: list[list[list[Selection]]] = []
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        block = f"{layer}.self_attn"

        h = rms_norm(x, state_dict[f"{layer}.input_layernorm.weight"], eps)
        q = rms_norm(linear(h, f"{block}.q_proj").view(T, -1, D), state_dict[f"{block}.q_norm.weight"], eps)
        key = rms_norm(linear(h, f"{block}.k_proj").view(T, -1, D), state_dict[f"{block}.k_norm.weight"], eps)
        value = linear(h, f"{block}.v_proj").view(T, -1, D)
        output, chosen, _ = attention(
            q.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            parameter(f"{block}.pooler.query"),
            parameter(f"{block}.pooler.slot_bias"),
            parameter(f"{block}.pooler.proj"),
            r=r,
            k=k,
            s=config.recsa_recent,
            M=M,
            scaling=D**-0.5,
            cos=cos,
            sin=sin,
            count_bias=config.recsa_count_bias,
            selections=None if selections is None else [selections[i]],
        )
        used.append(chosen[0])
        x = x + linear(output[0].transpose(0, 1).reshape(T, -1), f"{block}.o_proj")

        h = rms_norm(x, state_dict[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = linear(h, f"{layer}.mlp.gate_proj"), linear(h, f"{layer}.mlp.up_proj")
        x = x + linear(gate * torch.sigmoid(gate) * up, f"{layer}.mlp.down_proj")

    x = rms_norm(x, state_dict["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ parameter(head).T, used
