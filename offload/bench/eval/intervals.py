"""How sure a mean of few samples is: intervals of 95 %."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Z = 1.959964  # 97.5 % of a normal distribution are below
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447)  # of Student's t with 1 to 6 degrees of freedom

Values = npt.NDArray[np.float64]


def score_interval(groups: Sequence[Values]) -> tuple[float, float] | None:
    """Interval of the mean of the groups' means, where samples are differences between two scores
    in [0, 1].

    Source: Bonett and Price's adjusted Wald interval for paired proportions (Journal of Educational
    and Behavioral Statistics 37, 2012), here over groups and for shares, too: as if two more
    samples had been seen, one won and one lost. Samples that all came out equal do not prove that
    the next one will; a bootstrap and Student's t take them for a proof, and cover as little as 5 %
    of the time with four samples of a policy that loses 2 % of them.

    Args:
        groups: differences of one group's samples each; groups are kept as large as they are.

    Returns:
        None without groups, or where one has a single sample.
    """
    if not groups or min(map(len, groups)) < 2:
        return None
    count = sum(map(len, groups))
    mean = np.mean([x.mean() for x in groups])
    variance = sum(x.var(ddof=1) / len(x) for x in groups) / len(groups) ** 2
    squares = count**2 * variance + 2 + 2 * count * mean**2 / (count + 2)
    middle, reach = mean * count / (count + 2), _Z * math.sqrt(squares) / (count + 2)
    return float(max(-1.0, middle - reach)), float(min(1.0, middle + reach))


def student_interval(values: Values) -> tuple[float, float] | None:
    """Interval of the mean of unbounded numbers, by Student's t; None for fewer than two."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    z, n = _Z, freedom
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    reach = (t if n > len(_T) else _T[n - 1]) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - reach, float(values.mean()) + reach
