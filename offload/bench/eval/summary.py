"""What records say: mean scores, and how sure a difference to full attention is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offload.bench.eval.intervals import Values, score_interval
from offload.bench.eval.record_file import Record

FULL = "full"
Cell = tuple[str, int]  # task, length


def cells_of(records: Sequence[Record]) -> dict[Cell, list[Record]]:
    """Records by task and length."""
    cells: dict[Cell, list[Record]] = {}
    for record in records:
        cells.setdefault((record["task"], record["length"]), []).append(record)
    return cells


def counting_cells(
    records: Sequence[Record], of_full: tuple[float, float] | None = None
) -> dict[Cell, list[Record]]:
    """Those in which full attention scored: where it does not, no policy can lose.

    Args:
        of_full: its least and most mean score in them; None: anything above 0.
    """
    least, most = of_full or (1e-9, 1.0)
    return {
        cell: of_cell
        for cell, of_cell in cells_of(records).items()
        if least <= _scores(of_cell, FULL).mean() <= most
    }


def summaries(
    records: Sequence[Record],
    labels: Sequence[str],
    *,
    of_full: tuple[float, float] | None = None,
) -> list[dict[str, Any]]:
    """One line per policy: the mean over `counting_cells` of each cell's mean score, in [0, 1].

    difference is that to full attention on the same samples, interval its `score_interval`; None
    where no cell counts.

    Args:
        of_full: as `counting_cells` has it.
    """
    cells = counting_cells(records, of_full)
    counting = [record for cell in cells.values() for record in cell]
    lines = []
    for label in labels:
        groups = [_scores(cell, label) - _scores(cell, FULL) for cell in cells.values()]
        sure = (0.0, 0.0) if label == FULL and groups else score_interval(groups)
        lines.append(
            {
                "policy": label,
                "score": mean([_scores(cell, label).mean() for cell in cells.values()]),
                "difference": mean([group.mean() for group in groups]),
                "interval": sure,
                "attended_tokens": _mean_of(counting, label, "attended_tokens"),
                "scored_tokens": _mean_of(counting, label, "scored_tokens"),
                "kl": _mean_of(records, label, "kl"),
                "decode_seconds": sum(r["answers"][label]["decode_seconds"] for r in records),
                "build_seconds": sum(r["answers"][label]["build_seconds"] for r in records),
                "decoded_tokens": sum(r["answers"][label]["new_tokens"] - 1 for r in records),
                **bound_means([r["answers"][label] for r in records]),
            }
        )
    return lines


def cell_rows(
    records: Sequence[Record],
    labels: Sequence[str],
    *,
    of_full: tuple[float, float] | None = None,
) -> list[dict[str, Any]]:
    """One row per task and length: each policy's mean score, and whether the cell counts."""
    counting = counting_cells(records, of_full)
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


def _scores(records: Sequence[Record], label: str) -> Values:
    """In the order of the samples, so that those of one text stand at one place."""
    ordered = sorted(records, key=lambda record: record["index"])
    return np.array([record["answers"][label]["score"] for record in ordered], np.float64)


def _mean_of(records: Sequence[Record], label: str, key: str) -> float | None:
    return mean([record["answers"][label].get(key) for record in records])


def bound_means(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the answers that were given within a bound: of the bound in bytes and in slots,
    and of the number of tokens that were condensed. Other answers are left out."""
    names = ("host_bytes", "slots", "condensed_tokens")
    bounded = [answer for answer in answers if "host_bytes" in answer]
    return {n: float(np.mean([x[n] for x in bounded])) for n in names if bounded}


def mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
