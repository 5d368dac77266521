"""LycheeCluster's figures beside ours: perf/results/paper-lychee-cluster.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from offload.bench.eval.output import cell_table, markdown, summary_table
from offload.bench.eval.summary import cell_rows, mean, summaries
from perf.tables.markdown import Row, markdown_table
from perf.tables.tables import machine_line

RULES = ("published", "ours")
BUDGETS = (256, 512, 1024, 2048)
# Chunks in a fine cluster: recall in the text of the paper's Appendix E, which has no others.
PAPER_RECALL = {1: "~50%", 2: "~47%", 4: "", 8: "< 40%"}


def pooling_table(result: dict[str, Any]) -> str:
    """Table 3: recall of clusters of mean-pooled and of max-pooled chunks."""
    lines = [["LongBench v2 (paper)", "", "40.4%", "33.6%", "", "", "", ""]]
    for (length, kind), rows in _by_text(result).items():
        both = rows["published 1024"], rows["published max"]
        better = sum(a["recall"] > b["recall"] for a, b in zip(*both, strict=True))
        lines.append(
            [
                f"{kind}, {length:,} tokens",
                str(len(both[0])),
                *(f"{_mean(of, 'recall'):.1%}" for of in both),
                str(better),
                *(f"{_mean(of, 'mass_kept'):.3f}" for of in both),
                " / ".join(f"{_mean(of, 'kl'):.3f}" for of in both),
            ]
        )
    header = ["text", "windows", "recall, mean", "recall, max", "windows in which mean has more"]
    header += ["mass, mean", "mass, max", "KL, mean / max"]
    return _document(result, "The published rule, 1,024 tokens.", header, lines)


def chunks_table(result: dict[str, Any]) -> str:
    """Figure 6: structure-aware chunks against fixed ones."""
    lines = []
    for (length, kind), rows in _by_text(result).items():
        line = [f"{kind}, {length:,} tokens", str(len(rows["full"]))]
        for rule in RULES:
            both = rows[f"{rule} 1024"], rows[f"{rule} fixed chunks"]
            line.append(" / ".join(f"{_mean(of, 'recall'):.1%}" for of in both))
            line.append(" / ".join(f"{_mean(of, 'mass_kept'):.3f}" for of in both))
            line.append(" / ".join(f"{_mean(of, 'kl'):.3f}" for of in both))
        lines.append(line)
    header = ["text", "windows"]
    header += [f"{rule}: {what}" for rule in RULES for what in ("recall", "mass", "KL")]
    lengths = "published: 8 to 16 tokens, ours: 3 to 5"
    title = f"Structure-aware chunks ({lengths}) / fixed ones of 16; 1,024 tokens."
    return _document(result, title, header, lines)


def budget_table(result: dict[str, Any]) -> str:
    """Figure 7: what a larger budget gives."""
    lengths = _by_length(result)
    lines = [
        [rule, f"{budget:,}", *_cells(lengths, f"{rule} {budget}", _recall_and_kl)]
        for rule in RULES
        for budget in BUDGETS
    ]
    header = ["rule", "budget", *(f"{length:,} tokens" for length in lengths)]
    return _document(result, "Recall and KL by budget, mean over texts.", header, lines)


def granularity_table(result: dict[str, Any]) -> str:
    """Figure 10: chunks in a fine cluster."""
    lengths = _by_length(result)
    longest = max(lengths)
    lines = []
    for rule in RULES:
        for chunks, paper in PAPER_RECALL.items():
            label = f"{rule} 1024" if chunks == 2 else f"{rule} {chunks} per cluster"
            if label not in lengths[longest]:
                continue  # ours has no clusters; results from before that have it with them
            seconds = _mean(lengths[longest][label], "build_seconds")
            recall = _cells(lengths, label, lambda rows: f"{_mean(rows, 'recall'):.1%}")
            theirs = paper if rule == "published" else ""
            lines.append([rule, str(chunks), theirs, *recall, f"{seconds:.2f}"])
    header = ["rule", "chunks per cluster", "recall (paper)"]
    header += [f"recall, {length:,} tokens" for length in lengths]
    header.append(f"s to build the index at {longest:,}")
    settings = result["settings"]
    title = (
        "Recall with 1,024 tokens, mean over texts, and what building all layers' indices takes on "
        f"{settings['threads']} threads while {settings['workers']} processes measure."
    )
    return _document(result, title, header, lines)


def stability_table(result: dict[str, Any]) -> str:
    """Figure 9: selections from step to step while thousands of tokens are decoded."""
    segments: dict[int, dict[str, Row]] = {}
    for row in result["rows"]:
        if row["part"] == "stability":
            segments.setdefault(row["first_step"], {})[row["kind"]] = row
    labels = [f"{rule} 1024" for rule in RULES]
    keys = ("jaccard", "window_hit", "recall", "mass_kept")
    lines = [
        [
            f"{first:,}",
            *(f"{of[x][key]:.3f}" if x in of else "" for x in labels for key in keys),
        ]
        for first, of in segments.items()
    ]
    names = ("Jaccard", "hit 32", "recall", "mass")
    header = ["from step", *(f"{rule}: {name}" for rule in RULES for name in names)]
    title = "Every 1,024 steps of prose after a prompt of 2,048 tokens, every fourth layer."
    return _document(result, title, header, lines)


def answers_table(result: dict[str, Any]) -> str:
    """Right answers, of which Figures 6 and 7 and Table 3 speak."""
    records = [row for row in result["rows"] if row["part"] == "answers"]
    if not records:
        return "*No questions were asked.*"
    labels = list(records[0]["answers"])
    cells = sorted(cell_rows(records, labels), key=lambda cell: str(cell["task"]))
    parts = [markdown(*cell_table(cells)), markdown(*summary_table(summaries(records, labels)))]
    return "\n\n".join([*parts, machine_line(result["machine"], spreads=False)])


def _by_text(result: dict[str, Any]) -> dict[tuple[int, str], dict[str, list[Row]]]:
    """Windows of each length and text, by variant, in one order."""
    return _grouped(result, lambda row: (row["length"], row["kind"]))


def _by_length(result: dict[str, Any]) -> dict[int, dict[str, list[Row]]]:
    return _grouped(result, lambda row: row["length"])


def _grouped(result: dict[str, Any], key: Callable[[Row], Any]) -> dict[Any, dict[str, list[Row]]]:
    found: dict[Any, dict[str, list[Row]]] = {}
    rows = [row for row in result["rows"] if row["part"] == "recall"]
    for row in sorted(rows, key=lambda row: (row["length"], row["kind"], row["index"])):
        found.setdefault(key(row), {}).setdefault(row["variant"], []).append(row)
    return found


def _mean(rows: Iterable[Row], key: str) -> float:
    found: float | None = mean([row[key] for row in rows])
    return float("nan") if found is None else found


def _cells(
    lengths: dict[int, dict[str, list[Row]]], label: str, cell: Callable[[list[Row]], str]
) -> list[str]:
    return [cell(rows[label]) for rows in lengths.values()]


def _recall_and_kl(rows: list[Row]) -> str:
    return f"{_mean(rows, 'recall'):.1%}, {_mean(rows, 'kl'):.3f}"


def _document(result: dict[str, Any], title: str, header: list[str], lines: list[list[str]]) -> str:
    return "\n\n".join(
        [title, markdown_table(header, lines), machine_line(result["machine"], spreads=False)]
    )
