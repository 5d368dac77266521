"""What records say: mean scores, and how sure a difference to full attention is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.bench.eval.record_file import Record

FULL = "full"
_RESAMPLES = 2000
Cell = tuple[str, int]  # task, length


def cells_of(records: Sequence[Record]) -> dict[Cell, list[Record]]:
    """Records by task and length."""
    cells: dict[Cell, list[Record]] = {}
    for record in records:
        cells.setdefault((record["task"], record["length"]), []).append(record)
    return cells


def counting_cells(records: Sequence[Record]) -> dict[Cell, list[Record]]:
    """Those in which full attention scored: where it does not, no policy can lose."""
    return {
        cell: of_cell
        for cell, of_cell in cells_of(records).items()
        if any(record["answers"][FULL]["score"] > 0 for record in of_cell)
    }


def summaries(records: Sequence[Record], labels: Sequence[str]) -> list[dict[str, Any]]:
    """One line per policy: the mean over `counting_cells` of each cell's mean score, in [0, 1].

    difference is that to full attention, interval the 95 % of it by a paired bootstrap, which draws
    samples within cells and takes both policies' scores of each; None where no cell counts.
    """
    cells = list(counting_cells(records).values())
    full = [_scores(cell, FULL) for cell in cells]
    counting = [record for cell in cells for record in cell]
    lines = []
    for label in labels:
        scores = [_scores(cell, label) for cell in cells]
        differences = [a - b for a, b in zip(scores, full, strict=True)]
        lines.append(
            {
                "policy": label,
                "score": mean([x.mean() for x in scores]),
                "difference": mean([x.mean() for x in differences]),
                "interval": bootstrap_interval(differences),
                "attended_tokens": _mean_of(counting, label, "attended_tokens"),
                "scored_tokens": _mean_of(counting, label, "scored_tokens"),
                "decode_seconds": sum(r["answers"][label]["decode_seconds"] for r in records),
                "build_seconds": sum(r["answers"][label]["build_seconds"] for r in records),
                "decoded_tokens": sum(r["answers"][label]["new_tokens"] - 1 for r in records),
            }
        )
    return lines


def cell_rows(records: Sequence[Record], labels: Sequence[str]) -> list[dict[str, Any]]:
    """One row per task and length: each policy's mean score, and whether the cell counts."""
    counting = counting_cells(records)
    return [
        {
            "task": task,
            "length": length,
            "samples": len(of_cell),
            "counts": (task, length) in counting,
            "prompt_tokens": mean([r["prompt_tokens"] for r in of_cell]),
            "truncated_samples": sum(r["truncated_tokens"] > 0 for r in of_cell),
            "prefill_seconds": sum(r["prefill_seconds"] for r in of_cell),
            "scores": {label: float(_scores(of_cell, label).mean()) for label in labels},
            "attended_tokens": {
                label: _mean_of(of_cell, label, "attended_tokens") for label in labels
            },
        }
        for (task, length), of_cell in cells_of(records).items()
    ]


def bootstrap_interval(
    groups: Sequence[npt.NDArray[np.float64]], level: float = 0.95
) -> tuple[float, float] | None:
    """Of the mean of the groups' means, each group resampled for itself; the seed is fixed."""
    if not groups or min(map(len, groups)) < 2:
        return None
    rng = np.random.default_rng(0)
    means = np.zeros(_RESAMPLES)
    for group in groups:
        n, middle = len(group), group.mean()
        drawn = group[rng.integers(n, size=(_RESAMPLES, n))].mean(axis=1)
        # Resampling n of n spreads as (n - 1) / n of the variance.
        means += middle + (drawn - middle) * (n / (n - 1)) ** 0.5
    low, high = np.quantile(means / len(groups), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _scores(records: Sequence[Record], label: str) -> npt.NDArray[np.float64]:
    return np.array([record["answers"][label]["score"] for record in records], np.float64)


def _mean_of(records: Sequence[Record], label: str, key: str) -> float | None:
    return mean([record["answers"][label].get(key) for record in records])


def mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
