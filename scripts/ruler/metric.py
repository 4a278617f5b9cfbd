"""RULER's metric, and the interval of a percentage."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def score(answer: str, references: Sequence[str], any_of: bool) -> float:
    """The score of one answer, in [0, 1]; case does not count [RULER].

    Args:
        any_of: 1 if any of the references is a part of the answer (``string_match_part``, question answering), else
            the share of the references that are (``string_match_all``).
    """
    answer = re.sub(r"[\x00-\x1f]", "\n", answer).lower()
    found = [reference.lower() in answer for reference in references]
    return float(any(found)) if any_of else sum(found) / len(found)


def wilson_interval(share: float, number: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval, 95 % by default, of a share in [0, 1] that ``number`` samples gave.

    Where a sample's score is itself a share of references its variance is at most a binomial one's, so the interval
    is then rather too wide than too narrow.
    """
    square = z * z / number
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / number + square / (4 * number))
    return max(centre - half, 0.0), min(centre + half, 1.0)
