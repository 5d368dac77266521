"""How many tokens of a fixed budget lose as little as a policy whose heads differ in theirs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise


def tokens_of_equal_error(
    error: float, fixed_budgets: Iterable[tuple[float, float]]
) -> float | None:
    """Tokens for the same error, between two budgets that were measured.

    Args:
        error: output error, KL, or another positive measure that falls as tokens grow.
        fixed_budgets: (tokens attended, error) of each; one without tokens does not count.

    Returns:
        On a straight line between logarithms; None for an error outside of the measured ones.
    """
    known = sorted((of_budget, tokens) for tokens, of_budget in fixed_budgets if tokens > 0)
    for (low, many), (high, few) in pairwise(known):
        if 0 < low <= error <= high and high > low:
            share = math.log(error / low) / math.log(high / low)
            return math.exp(math.log(many) + share * (math.log(few) - math.log(many)))
    return None
