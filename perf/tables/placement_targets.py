"""Issue 5's targets beside what was measured: heads where they belong."""

from __future__ import annotations

from typing import Any

from offload.bench.decode.engines import GRAPH, STOCK
from perf.tables.gpu_tables import Results, milliseconds_cell
from perf.tables.markdown import TIMES, Row, against, target, targets_table
from perf.tables.placement_tables import bytes_errors

LONGEST = 131072
STEPS = (  # policy, its name in text, budget_tokens, ms per token
    ("lychee_decode", "LycheeDecode", 2048, 7.0),
    ("tidal_decode", "TidalDecode", 1024, 6.5),
)
OVER_STOCK = 2.7
PREDICTION_ERROR, BYTES_ERROR, NUM_SETTINGS = 0.15, 0.02, 12
RETRIEVAL_SHARE, RETRIEVAL_VARIANT = 0.8, "attention, top-k"
TWO_GPUS_RATIO, TP_BATCH, TP_TOKENS = 1.6, 4, 65536
_NOTHING: dict[str, Any] = {"rows": [], "settings": {}}  # in place of a file that is not there


def gpu_placement_targets_table(results: Results) -> str:
    """Issue 5's targets beside what was measured.

    Args:
        results: by name of the file, those that there are.
    """
    lines: list[list[str]] = []
    for name, check in _CHECKS.items():
        lines += check(results.get(name, _NOTHING))
    return targets_table(lines)


def _heads_checks(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    budgets = result["settings"].get("budgets", {})
    best: dict[str, Row | None] = {}
    for policy, name, budget, limit in STEPS:
        rows = _at_longest(result, policy=policy) if budgets.get(policy) == budget else []
        row = best[name] = min(rows, key=lambda row: row["milliseconds"], default=None)
        label = f"time per token at {LONGEST:,}, {name}, budget {budget:,}, best placement"
        found = None
        if row is not None:
            found = f"{milliseconds_cell(row)} ms ({_where(row['gathered_heads'])})"
        met = row is not None and row["milliseconds"] <= limit
        lines.append(target(label, found, f"≤ {limit:g} ms", met))
    name = STEPS[0][1]
    for engine, ratio in ((STOCK, OVER_STOCK), (GRAPH, 1.0)):
        peer = next(iter(_at_longest(result, engine=engine)), None)
        label = f"{name} at {LONGEST:,} against {engine}"
        lines.append(against(label, best[name], peer, ratio))
    return lines


def _where(gathered_heads: int | None) -> str:
    if gathered_heads is None:
        return "as planned"
    return "all on the CPU" if gathered_heads < 0 else f"{gathered_heads} gathered"


def _at_longest(result: dict[str, Any], key: str = "kv_len", **wanted: Any) -> list[Row]:
    """Rows at the longest context with these values."""
    wanted[key] = LONGEST
    return [
        row
        for row in result["rows"]
        if all(row.get(name) == value for name, value in wanted.items())
    ]


def _plan_checks(result: dict[str, Any]) -> list[list[str]]:
    label = f"predicted against measured time per token, {NUM_SETTINGS} settings, worst"
    of_bytes = "planned against taken bytes, worst"
    within, within_bytes = f"within {PREDICTION_ERROR:.0%}", f"within {BYTES_ERROR:.0%}"
    rows = result["rows"]
    if not rows:
        return [target(label, None, within), target(of_bytes, None, within_bytes)]
    worst = max(rows, key=lambda row: abs(row["error"]))
    names = ("policy", "kv_len", "budget_tokens", "threads")
    count = len({tuple(row[name] for name in names) for row in rows})
    found = f"{worst['error']:+.1%} ({worst['policy']}, {worst['kv_len']:,}, {worst['placement']})"
    met = abs(worst["error"]) <= PREDICTION_ERROR
    lines = [target(label, found, within, met)]
    if met and count < NUM_SETTINGS:  # nothing is said of the others
        lines = [[label, f"{found}, of {count}", within, "not measured yet"]]
    errors = [error for row in rows for error in bytes_errors(row).values()]
    if not any(row["device_bytes"] for row in rows):
        return [*lines, target(of_bytes, None, within_bytes)]
    off = max(errors, key=abs)
    return [*lines, target(of_bytes, f"{off:+.1%}", within_bytes, abs(off) <= BYTES_ERROR)]


def _retrieval_checks(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for heads, limit in ((8, RETRIEVAL_SHARE), (1, None)):
        named = f"{heads} KV head" + ("s" if heads > 1 else "")
        label = f"retrieval heads with top-k at {LONGEST:,}, {named}, of memory bandwidth"
        wanted = "" if limit is None else f"≥ {limit:.0%}"
        rows = _at_longest(result, "tokens", heads=heads, variant=RETRIEVAL_VARIANT)
        if rows and limit is None:
            lines.append([label, f"{rows[0]['bandwidth_share']:.0%}", "", ""])
        else:
            share = rows[0]["bandwidth_share"] if rows else None
            found = None if share is None else f"{share:.0%}"
            lines.append(target(label, found, wanted, (share or 0) >= (limit or 0)))
    return lines


def _tp_checks(result: dict[str, Any]) -> list[list[str]]:
    label = f"two GPUs against one, batch {TP_BATCH} {TIMES} {TP_TOKENS:,}, tokens/s"
    wanted = f"≥ {TWO_GPUS_RATIO:g}{TIMES}"
    of_tokens = "the same tokens on two GPUs as on one, float32"
    settings, lines = result["settings"], []
    if settings.get("device") != "cuda":
        return [target(label, None, wanted), target(of_tokens, None, "all")]
    if (settings["batch_size"], settings["kv_len"]) == (TP_BATCH, TP_TOKENS):
        for name, ratio in two_gpu_ratios(result).items():
            met = ratio >= TWO_GPUS_RATIO
            lines.append(target(f"{label}, `{name}`", f"{ratio:.2f}{TIMES}", wanted, met))
    same = same_tokens(result)
    return [
        *(lines or [target(label, None, wanted)]),
        target(of_tokens, f"{same_text(result)} policies", "all", bool(same) and all(same)),
    ]


def two_gpu_ratios(result: dict[str, Any]) -> dict[str, float]:
    """By policy: tokens/s of two GPUs over those of one."""
    found: dict[tuple[str, int], float] = {}
    for row in result["rows"]:
        if row["part"] == "decode":
            key = (row["policy"], row["world_size"])
            found[key] = max(found.get(key, 0.0), row["tokens_per_second"])
    return {
        name: found[name, 2] / one
        for (name, size), one in found.items()
        if size == 1 and (name, 2) in found
    }


def same_tokens(result: dict[str, Any]) -> list[bool]:
    return [row["equal"] for row in result["rows"] if row["part"] == "tokens"]


def same_text(result: dict[str, Any]) -> str:
    same = same_tokens(result)
    return f"{sum(same)} of {len(same)}"


_CHECKS = {
    "gpu-heads": _heads_checks,
    "gpu-plan": _plan_checks,
    "gpu-retrieval": _retrieval_checks,
    "gpu-tp": _tp_checks,
}
