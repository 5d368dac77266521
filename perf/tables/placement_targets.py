"""Issue 5's targets beside what was measured: heads where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from offload.bench.decode.engines import GRAPH, OURS, STOCK
from perf.tables.gpu_tables import TIMES, Results, Row, milliseconds_cell, target_line
from perf.tables.markdown import markdown_table
from perf.tables.placement_tables import (
    RETRIEVAL_VARIANT,
    bytes_errors,
    same_text,
    same_tokens,
    torch_ratio,
    two_gpu_ratios,
)

LONGEST = 131072
STEPS = (  # policy, its name in text, budget_tokens, ms per token
    ("lychee_decode", "LycheeDecode", 2048, 7.0),
    ("tidal_decode", "TidalDecode", 1024, 6.5),
)
OVER_STOCK = 2.7
PREDICTION_ERROR, BYTES_ERROR, NUM_SETTINGS = 0.15, 0.02, 12
HYBRID_CASE, HYBRID_RATIO = "1/8 dense, 4,096 tokens", 5.0
RETRIEVAL_SHARE = 0.8
TWO_GPUS_RATIO, TP_BATCH, TP_TOKENS = 1.6, 4, 65536


def gpu_placement_targets_table(results: Results) -> str:
    """Issue 5's targets beside what was measured.

    Args:
        results: by name of the file, those that there are.
    """
    lines: list[list[str]] = []
    for name, check in _CHECKS:
        lines += check(results.get(name))
    return markdown_table(["measure", "measured", "target", ""], lines)


def _missing(label: str, wanted: str) -> list[str]:
    return [label, "", wanted, "not measured yet"]


def _heads_checks(result: dict[str, Any] | None) -> list[list[str]]:
    lines = []
    best: dict[str, Row | None] = {}
    for policy, name, budget, limit in STEPS:
        label = f"time per token at {LONGEST:,}, {name}, budget {budget:,}, best placement"
        wanted = f"≤ {limit:g} ms"
        best[policy] = row = _best_step(result, policy, budget)
        if row is None:
            lines.append(_missing(label, wanted))
        else:
            gathered = row["gathered_heads"]
            where = "as planned" if gathered is None else f"{gathered} gathered"
            where = where if gathered is None or gathered >= 0 else "all on the CPU"
            found = f"{milliseconds_cell(row)} ms ({where})"
            lines.append(target_line(label, found, wanted, row["milliseconds"] <= limit))
    policy, name, *_ = STEPS[0]
    ours = best[policy]
    for engine, ratio in ((STOCK, OVER_STOCK), (GRAPH, 1.0)):
        label = f"{name} at {LONGEST:,} against {engine}"
        wanted = "faster" if ratio == 1 else f"≥ {ratio:g}{TIMES}"
        peer = _first(_at_longest(result), engine=engine)
        if ours is None or peer is None:
            lines.append(_missing(label, wanted))
            continue
        over = peer["milliseconds"] / ours["milliseconds"]
        met = over > 1 if ratio == 1 else over >= ratio
        lines.append(target_line(label, f"{over:.2f}{TIMES}", wanted, met))
    return lines


def _best_step(result: dict[str, Any] | None, policy: str, budget_tokens: int) -> Row | None:
    """The fastest placement of a policy at the longest context; None: not with this budget."""
    if result is None or result["settings"]["budgets"].get(policy) != budget_tokens:
        return None
    rows = [row for row in _at_longest(result) if row["policy"] == policy]
    return min(rows, key=lambda row: row["milliseconds"], default=None)


def _at_longest(result: dict[str, Any] | None) -> list[Row]:
    return [] if result is None else [row for row in result["rows"] if row["kv_len"] == LONGEST]


def _first(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first row with these values."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row
    return None


def _plan_checks(result: dict[str, Any] | None) -> list[list[str]]:
    label = f"predicted against measured time per token, {NUM_SETTINGS} settings, worst"
    of_bytes = "planned against taken bytes, worst"
    within, within_bytes = f"within {PREDICTION_ERROR:.0%}", f"within {BYTES_ERROR:.0%}"
    if result is None or not result["rows"]:
        return [_missing(label, within), _missing(of_bytes, within_bytes)]
    rows = result["rows"]
    worst = max(rows, key=lambda row: abs(row["error"]))
    names = ("policy", "kv_len", "budget_tokens", "threads")
    count = len({tuple(row[name] for name in names) for row in rows})
    found = f"{worst['error']:+.1%} ({worst['policy']}, {worst['kv_len']:,}, {worst['placement']})"
    met = abs(worst["error"]) <= PREDICTION_ERROR
    lines = [target_line(label, found, within, met)]
    if met and count < NUM_SETTINGS:  # nothing is said of the others
        lines = [[label, f"{found}, of {count}", within, "not measured yet"]]
    errors = [error for row in rows for error in bytes_errors(row)]
    if not any(row["device_bytes"] for row in rows):
        return [*lines, _missing(of_bytes, within_bytes)]
    off = max(errors, key=abs)
    return [*lines, target_line(of_bytes, f"{off:+.1%}", within_bytes, abs(off) <= BYTES_ERROR)]


def _hybrid_checks(result: dict[str, Any] | None) -> list[list[str]]:
    label = f"hybrid-head kernel at {LONGEST:,}, {HYBRID_CASE}, against torch's SDPA"
    wanted = f"≥ {HYBRID_RATIO:g}{TIMES}"
    row = _first(_at_longest(result), case=HYBRID_CASE, engine=OURS, fastest=True)
    ratio = None if result is None or row is None else torch_ratio(result, row)
    if ratio is None:
        return [_missing(label, wanted)]
    return [target_line(label, f"{ratio:.2f}{TIMES}", wanted, ratio >= HYBRID_RATIO)]


def _retrieval_checks(result: dict[str, Any] | None) -> list[list[str]]:
    rows = [] if result is None else result["rows"]
    lines = []
    for heads, limit in ((8, RETRIEVAL_SHARE), (1, None)):
        named = f"{heads} KV head" + ("s" if heads > 1 else "")
        label = f"retrieval heads with top-k at {LONGEST:,}, {named}, of memory bandwidth"
        wanted = "" if limit is None else f"≥ {limit:.0%}"
        row = _first(rows, tokens=LONGEST, heads=heads, variant=RETRIEVAL_VARIANT)
        if row is None:
            lines.append(_missing(label, wanted))
        elif limit is None:
            lines.append([label, f"{row['bandwidth_share']:.0%}", "", ""])
        else:
            share = row["bandwidth_share"]
            lines.append(target_line(label, f"{share:.0%}", wanted, share >= limit))
    return lines


def _tp_checks(result: dict[str, Any] | None) -> list[list[str]]:
    label = f"two GPUs against one, batch {TP_BATCH} {TIMES} {TP_TOKENS:,}, tokens/s"
    wanted = f"≥ {TWO_GPUS_RATIO:g}{TIMES}"
    of_tokens = "the same tokens on two GPUs as on one"
    if result is None or result["settings"]["device"] != "cuda":
        return [_missing(label, wanted), _missing(of_tokens, "all")]
    settings, lines = result["settings"], []
    if (settings["batch_size"], settings["kv_len"]) == (TP_BATCH, TP_TOKENS):
        lines = [
            target_line(
                f"{label}, `{name}`", f"{ratio:.2f}{TIMES}", wanted, ratio >= TWO_GPUS_RATIO
            )
            for name, ratio in two_gpu_ratios(result).items()
        ]
    met = bool(same_tokens(result)) and all(same_tokens(result))
    return [
        *(lines or [_missing(label, wanted)]),
        target_line(of_tokens, f"{same_text(result)} policies", "all", met),
    ]


_CHECKS: tuple[tuple[str, Callable[[dict[str, Any] | None], list[list[str]]]], ...] = (
    ("gpu-heads", _heads_checks),
    ("gpu-plan", _plan_checks),
    ("gpu-hybrid", _hybrid_checks),
    ("gpu-retrieval", _retrieval_checks),
    ("gpu-tp", _tp_checks),
)
