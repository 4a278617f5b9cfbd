"""At which queries poolers are distilled: named strategies, joined with "+" into equal shares.

Positions are drawn once a forward and on the host, so that a recomputed layer sees the same ones; a strategy that
looks at attention draws a pool here, of which each layer keeps its best. This file never touches keys or the loss.
[paper: silent; our decision]
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from .configuration_recsa_qwen3 import SCORED_QUERIES
from .rows_recsa_qwen3 import Rows

# Queries in the pool of a strategy that looks at attention, for each one that a layer keeps.
POOL = 4

# strategy, positions [S, p] -> scores [S, p]; the greatest are kept
Score = Callable[[str, torch.Tensor], torch.Tensor]


class Share(NamedTuple):
    """The queries of one strategy.

    Attributes:
        strategy: its name.
        positions: `[S, p]` int64 on the host, -1 where a sequence has fewer; a pool where a layer keeps the best.
    """

    strategy: str
    positions: torch.Tensor


class SampledQueries:
    """The queries of one forward.

    Attributes:
        shares: each weighs the same in the loss; one without a query is left out.
        frozen: nothing but poolers learns, so that no layer is computed a second time.
    """

    def __init__(self, shares: Sequence[Share], frozen: bool = False):
        self.shares = tuple(share for share in shares if bool((share.positions >= 0).any()))
        self.frozen = frozen

    def choose(self, score: Score) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions `[S, n]` int64, -1 where there are fewer, and their weights `[S, n]` float64, both on the host.

        The weights of a share's queries sum to 1 over the batch.
        """
        chosen, weights = [], []
        for strategy, positions in self.shares:
            if strategy in SCORED_QUERIES:
                positions = _best(positions, score(strategy, positions).cpu())
            drawn = positions >= 0
            chosen.append(positions)
            weights.append(drawn.double() / drawn.sum())
        return torch.cat(chosen, 1), torch.cat(weights, 1)


def draw_queries(
    rows: Rows, strategies: str, samples: int, branching: int, answer_mask: torch.Tensor | None = None
) -> list[Share]:
    """Draws the queries of a forward over whole sequences from torch's default generator.

    A query can teach where two nodes lie before its path: from position 2 r on. A row's queries are drawn from all
    such positions of its sequences alike, without replacement.

    Args:
        rows: the sequences of the batch; none has older tokens.
        strategies: "uniform", "answers" (those that predict a token marked in `answer_mask`, the positions before it),
            "far_mass" and "peak" (those of a larger uniform pool with the most attention on far tokens, or the most on
            one of them; see `far_scores`), joined with "+".
        samples: queries a row, in equal parts; what a row's answers leave over goes to the other strategies, or to
            "uniform" where it has no answer and there is no other.
        branching: r.
        answer_mask: `[B, T]` bool.

    Returns:
        One share a strategy; a fallback to "uniform" joins the share of that name.
    """
    names = strategies.split("+")
    width = torch.arange(rows.width)
    able = (width >= 2 * branching) & (width < torch.tensor(rows.counts)[:, None])  # [S, W]
    answers = torch.zeros_like(able)
    if answer_mask is not None and "answers" in names:
        marked = rows.gather(answer_mask.bool().cpu()[:, None, :, None])[:, 0, :, 0]
        answers[:, :-1] = marked[:, 1:] & (width[1:] < torch.tensor(rows.counts)[:, None])
        answers &= able
    found: dict[str, list[torch.Tensor]] = {}
    for row in rows.members():
        left, others = samples, [name for name in names if name != "answers"]
        if "answers" in names:
            taken = _draw(answers, row, -(-samples // len(names)))
            found.setdefault("answers", []).append(taken)
            left -= len(taken)
            if not len(taken) and not others:
                others = ["uniform"]
        for index, name in enumerate(others):
            number = left // (len(others) - index)
            left -= number
            found.setdefault(name, []).append(_draw(able, row, number * (POOL if name in SCORED_QUERIES else 1)))
    return [Share(name, _by_sequence(torch.cat(pairs), len(rows.counts))) for name, pairs in found.items()]


def _draw(mask: torch.Tensor, sequences: Sequence[int], number: int) -> torch.Tensor:
    """At most `number` of the places `[*, 2]` (sequence, position) that `mask` `[S, W]` marks in these sequences."""
    places = mask[list(sequences)].nonzero()
    places = places[torch.randperm(len(places))[:number]]
    return torch.stack((torch.tensor(sequences, dtype=torch.long)[places[:, 0]], places[:, 1]), 1)


def _by_sequence(places: torch.Tensor, sequences: int) -> torch.Tensor:
    """Places `[*, 2]` as positions per sequence, `[S, p]`, padded with -1."""
    places = places[places[:, 0].argsort(stable=True)]
    counts = torch.bincount(places[:, 0], minlength=sequences)
    return pad_sequence(places[:, 1].split(counts.tolist()), batch_first=True, padding_value=-1)


def _best(positions: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Of each sequence's pool the POOL-th part, rounded up, with the greatest scores: `[S, p']`, -1 where fewer."""
    drawn = positions >= 0
    kept = -(-drawn.sum(1) // POOL)
    order = scores.masked_fill(~drawn, float("-inf")).argsort(dim=1, descending=True, stable=True)
    best = positions.gather(1, order)[:, : int(kept.max())]
    return best.masked_fill(torch.arange(best.shape[1]) >= kept[:, None], -1)
