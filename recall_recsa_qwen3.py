"""`needle_recall`: does the walk find what dense attention looks at, level by level.

The measure that poolers are accepted by; the KL that they learn from hides it. Hooks read the norms of queries and
keys; nothing that the model computes is touched. [our decision]
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from .attention_recsa_qwen3 import OperatorCall, rotary_tables
from .distillation_recsa_qwen3 import Teacher, blocks, far_tokens, queries_at, teacher_tables
from .tree_recsa_qwen3 import TreeGeometry, build_levels


@dataclass
class Recall:
    """Counts of pairs (KV head, query) that look at one token; `sum(found, Recall())` adds up those of layers.

    Attributes:
        pairs: all of them.
        reached: those whose token is among the candidates of level 0.
        asked: level (>= 1) -> pairs that had to choose there, since the token's ancestor was among the candidates.
        chosen: level -> those of them that chose it.
    """

    pairs: int = 0
    reached: int = 0
    asked: Counter[int] = field(default_factory=Counter)
    chosen: Counter[int] = field(default_factory=Counter)

    @property
    def reach(self) -> float:
        """The share of pairs whose token is among the candidates of level 0; NaN without a pair."""
        return self.reached / self.pairs if self.pairs else float("nan")

    @property
    def by_level(self) -> dict[int, float]:
        """Level -> share of pairs that chose the token's ancestor given that they chose its parent, the top first."""
        return {level: self.chosen[level] / self.asked[level] for level in sorted(self.asked, reverse=True)}

    def __add__(self, other: "Recall") -> "Recall":
        return Recall(
            self.pairs + other.pairs,
            self.reached + other.reached,
            self.asked + other.asked,
            # a Counter's sum drops zeros, which is what they are read as
            self.chosen + other.chosen,
        )


@torch.no_grad()
def needle_recall(
    model: nn.Module,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor | None = None,
    *,
    threshold: float = 0.3,
) -> list[Recall]:
    """Where walks lose the tokens that single queries look at.

    A pair of a KV head and a query counts where dense attention, from the same query and keys with the teacher's RoPE
    (`teacher_tables`), gives one token more than `threshold` in any of the KV head's query heads. Queries before M
    attend densely: they reach every token and are asked at no level.

    Args:
        model: any RecSA-Qwen3 model, wrapped or not; runs as it is, so put it in eval mode.
        input_ids: `[B, T]`, whole rows without padding.
        positions: of the queries, `[B, n]` int64; -1 where a row has fewer.
        targets: `[B, n]` int64, the token that each query is to look at, -1 = none; where `None`, the far token
            (`far_tokens`) with the most attention of any head.
        threshold: least attention on the token.

    Returns:
        One `Recall` a layer.

    Raises:
        ValueError: no RecSA model, shapes that do not fit, or positions or targets outside the rows.
    """
    # by name: remote code defines the class anew
    base: Any = next((m for m in model.modules() if type(m).__name__ == "RecSAQwen3Model"), None)
    if base is None:
        raise ValueError("needle_recall: this model has no RecSA decoder.")
    tokens = input_ids.shape[1]
    for name, places in (("positions", positions), ("targets", targets)):
        if places is None:
            continue
        if places.shape != (len(input_ids), positions.shape[1]):
            raise ValueError(f"{name}: shape {list(places.shape)}, must be [{len(input_ids)}, {positions.shape[1]}].")
        if bool((places < -1).any() | (places >= tokens).any()):
            raise ValueError(f"{name}: must be -1 or in 0 ... {tokens - 1}.")
    # through the outermost module that can do without logits: under FSDP it is the one that gathers parameters
    has_head = any(type(m).__name__ == "RecSAQwen3ForCausalLM" for m in model.modules())
    forward = partial(model, logits_to_keep=1) if has_head else base
    layers = [layer.self_attn for layer in base.layers[: base.config.num_hidden_layers]]
    found: list[Recall] = []
    queries: list[torch.Tensor] = []

    def keep_queries(_module, _inputs, output):
        queries.append(queries_at(output.transpose(1, 2), positions))

    def measure(attention, key):
        found.append(_layer_recall(attention, queries.pop(), key, positions, targets, threshold))

    hooks = [layer.q_norm.register_forward_hook(keep_queries) for layer in layers]
    hooks += [
        layer.k_norm.register_forward_hook(lambda _m, _i, out, layer=layer: measure(layer, out.transpose(1, 2)))
        for layer in layers
    ]
    try:
        forward(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _layer_recall(attention, query, key, positions, targets, threshold) -> Recall:
    """From one layer's queries at `positions`, `[B, H, n, D]`, and keys, both before RoPE."""
    geometry, config = TreeGeometry.from_config(attention.config), attention.config
    batch, tokens = len(key), key.shape[2]
    positions = positions.cpu()
    depths = geometry.depths(positions).masked_fill(positions < 0, -1)
    rope = rotary_tables(config, key.device, geometry.top_capacity)
    teacher_rope = teacher_tables(config, key.device, [tokens] * batch)
    recall = Recall()
    with maybe_autocast(key.device.type, enabled=False):
        levels = build_levels(key, key[..., :0], attention.pooler, geometry.branching, max(int(depths.max()), 0))
        call = OperatorCall(query, levels, (0,) * batch, (tokens,) * batch, geometry, rope, attention.scaling, 0.0)
        teacher = Teacher(key, teacher_rope, attention.scaling, call.dtype)
        for block in blocks(positions, depths, torch.ones(positions.shape), query.shape[1] * tokens):
            own = block.on(key.device)
            queries = call.query[own.rows[:, None], :, own.columns].transpose(1, 2).to(call.dtype)
            mass = teacher.attention(queries, block, own).amax(3)  # [S', H_kv, w, N]
            if targets is None:
                mass = mass.masked_fill(~far_tokens(own.positions, block.last + 1, geometry.branching)[:, None], 0.0)
                most, token = mass.max(-1)
            else:
                wanted = targets.to(key.device)[own.rows[:, None], own.columns]
                seen = (wanted >= 0) & (wanted <= own.positions)
                token = wanted.where(seen, 0)[:, None].expand(mass.shape[:3])
                most = mass.gather(-1, token[..., None])[..., 0].masked_fill(~seen[:, None], 0.0)
            looks = (most > threshold) & (own.weights > 0)[:, None]
            recall.pairs += int(looks.sum())
            if block.walk:
                for at in call.walk(block.members, queries, own.positions[:, None], block.walk):
                    recall.asked[at.level] += int(looks.sum())
                    looks &= (at.chosen == (token // geometry.branching**at.level)[..., None]).any(-1)
                    recall.chosen[at.level] += int(looks.sum())
                    if at.level == 1:
                        break
            recall.reached += int(looks.sum())
    return recall
