"""Measured times of one operator by size, and what lies between them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CostTable:
    """Microseconds by size, linear between measured sizes and beyond the last two.

    Attributes:
        points: (size, microseconds), sizes ascending. Microseconds never fall from one to the next.

    Raises:
        ValueError: no points, sizes that do not ascend, costs that fall, numbers not finite.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = self.points
        if not points or not all(math.isfinite(x) and x >= 0 for point in points for x in point):
            raise ValueError(f"a cost table needs finite points of at least 0, got {points}")
        for (a, cost_a), (b, cost_b) in itertools.pairwise(points):
            if a >= b or cost_a > cost_b:
                raise ValueError(f"sizes of a cost table must ascend, and its costs: {points}")

    @classmethod
    def measured(cls, points: Sequence[tuple[float, float]]) -> CostTable:
        """From noisy measurements: no size costs less than a smaller one."""
        ordered = sorted((float(size), float(us)) for size, us in points)
        costs = itertools.accumulate((us for _, us in ordered), max)
        return cls(tuple(zip((size for size, _ in ordered), costs, strict=True)))

    def us(self, size: float) -> float:
        """Microseconds of `size`; nothing costs nothing."""
        if size <= 0:
            return 0.0
        points = self.points
        if len(points) == 1:
            return points[0][1] * max(1.0, size / points[0][0]) if points[0][0] else points[0][1]
        last = min(bisect_left(points, (size,)), len(points) - 1)
        (a, cost_a), (b, cost_b) = points[max(0, last - 1)], points[max(1, last)]
        # Before the first point too, but a kernel takes its time however little it does.
        return max(cost_a + (cost_b - cost_a) / (b - a) * (size - a), 0.0)

    def times(self, factor: float) -> CostTable:
        """Everything costs so many times as much."""
        return CostTable(tuple((size, factor * us) for size, us in self.points))

    @property
    def fixed_us(self) -> float:
        """What the least work costs, by the first two points."""
        (a, cost_a), (b, cost_b) = (*self.points, self.points[-1])[:2]
        return max(0.0, cost_a - (cost_b - cost_a) / (b - a) * a) if b > a else cost_a
