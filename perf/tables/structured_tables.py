"""What pages and chunks find in structured text: the table of perf/results/structured.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offload.bench.eval.intervals import Values, score_interval
from perf.tables.markdown import markdown_table
from perf.tables.tables import machine_line

_PAGES, _CHUNKS = "quest {}", "quest {} chunks=True"
_OTHERS = ("exact_topk {}", "lychee_cluster {}")


def structured_table(result: dict[str, Any]) -> str:
    """Quest over pages and chunks by length and budget, mean over kinds of text.

    Samples of which full attention answers none count nowhere, as in `offload eval`.
    """
    settings, rows = result["settings"], result["rows"]
    cells: dict[tuple[int, str], dict[str, Values]] = {}
    for row in rows:
        scores = np.array(row["scores"], np.float64)
        cells.setdefault((row["length"], row["task"]), {})[row["policy"]] = scores
    cells = {cell: of_cell for cell, of_cell in cells.items() if of_cell["full"].any()}
    budgets = sorted({int(row["policy"].split()[1]) for row in rows if row["policy"] != "full"})
    if not cells:
        return "*Full attention answered nothing, so no policy could lose anything.*"
    lengths, kinds = (sorted(set(names)) for names in zip(*cells, strict=True))
    groups = {f"{n:,} tokens": [cells[cell] for cell in cells if cell[0] == n] for n in lengths}
    if len(lengths) > 1:
        for kind in kinds:
            groups[f"all, {kind}"] = [cells[cell] for cell in cells if cell[1] == kind]
        groups["all"] = list(cells.values())
    header = ["", "budget", "full", "exact_topk", "lychee_cluster", "Quest, pages"]
    header += ["Quest, chunks", "chunks - pages", "95 % interval"]
    lines = [
        _line(name, of_group, budget) for name, of_group in groups.items() for budget in budgets
    ]
    counts = sorted({len(of_cell["full"]) for of_cell in cells.values()})
    title = (
        f"Right answers of {settings['model']}, per cent, mean over {', '.join(kinds)}; "
        f"{' to '.join(dict.fromkeys((f'{counts[0]}', f'{counts[-1]}')))} samples of each kind and "
        f"length, {settings['fields']} field{'s' * (settings['fields'] > 1)}; every policy on the "
        "same samples."
    )
    machine = machine_line(result["machine"], spreads=False)
    return "\n\n".join([title, markdown_table(header, lines), machine])


def _line(name: str, cells: Sequence[dict[str, Values]], budget: int) -> list[str]:
    def score(label: str) -> float:
        return 100 * float(np.mean([cell[label].mean() for cell in cells]))

    pages, chunks = _PAGES.format(budget), _CHUNKS.format(budget)
    labels = ["full", *(other.format(budget) for other in _OTHERS), pages, chunks]
    interval = score_interval([cell[chunks] - cell[pages] for cell in cells])
    return [
        name,
        f"{budget}",
        *(f"{score(label):.1f}" for label in labels),
        f"{score(chunks) - score(pages):+.1f}",
        "" if interval is None else " … ".join(f"{100 * end:+.1f}" for end in interval),
    ]
