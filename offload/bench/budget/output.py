"""Measured budgets as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offload.bench.budget.drift import last_to_second
from offload.bench.budget.head_counts import HeadCounts
from offload.bench.budget.measure import BudgetMeasurement
from offload.bench.eval.output import UNKNOWN, Table

Rows = Sequence[BudgetMeasurement]
TIMES = "\N{MULTIPLICATION SIGN}"

LEGEND = (
    "Steps that are compared with exact attention: attended: mean per head, step and layer, "
    "without the dense first layers. used: of the budget, a share's cap (HARD-KV's utilisation, "
    "Figure 9). error: relative L2 error of a layer's attention output. mass: attention kept, "
    "sinks excluded. "
    f"{TIMES}: tokens attended, of those that the fixed budget takes for the same error; {UNKNOWN} "
    "where its errors do not enclose it. KL (nats), perplexity: of the next token, against full "
    "attention. memory: KV cache and what the policy keeps, after the last step; MB·s: times "
    "ms/token, the median of timed steps.\n"
    "Heads, at the steps that are compared: attended, true: medians of heads' medians over steps; "
    "true: the fewest tokens that hold top-p of the attention, sinks and recent window included, "
    "or of any tokens. reached: steps whose selection holds it. needed: at these alone, the share "
    f"of what is attended to that it needs ({UNKNOWN}: none). off: |attended / true - 1|, medians "
    "over steps, of the median head and of the 90th percentile. By layer, medians and percentiles "
    "of attended are of all steps, and off has the 90th percentile of steps; compared: the median "
    "where true is known."
)

TEMPERATURE_LEGEND = (
    "\nTemperatures: after so many generated tokens, from all that was written and the last "
    "window of queries, of those that the policy keeps; geometric means of a layer's KV heads; "
    "solved: KV heads that have both."
)
EVICTION_LEGEND = (
    "\nWithin a share of the bytes: all decode the text's own tokens. error: relative L2 error of "
    "a layer's attention output against a run with all keys and values, with what the layers below "
    "have lost; KL, perplexity: against the same run."
)


def main_table(rows: Rows) -> Table:
    """A row per policy and budget: tokens, what they lose, time and memory."""
    curves = list(dict.fromkeys(label for row in rows for label in row.tokens_share))
    header = ["policy", "budget", "attended, mean", "used", "error", "mass"]
    header += [f"{TIMES} {label}" for label in curves]
    header += ["KL", "perplexity", "ms/token", "p10-p90", "memory MB", "MB·s"]
    return header, [
        [
            row.label,
            budget_of(row),
            _number(row.attended_tokens, ",.0f"),
            _number(row.utilisation, ".0%"),
            _number(row.output_error, ".4f"),
            _number(row.mass_kept, ".1%"),
            *(_number(row.tokens_share.get(label), ".2f") for label in curves),
            f"{row.kl:.4f}",
            f"{row.perplexity_change:+.2%}",
            f"{1e3 * row.seconds:.1f}",
            f"{1e3 * row.seconds_p10:.1f}-{1e3 * row.seconds_p90:.1f}",
            f"{(row.kv_bytes + row.policy_bytes) / 1e6:,.1f}",
            f"{row.byte_seconds / 1e6:.2f}",
        ]
        for row in rows
    ]


def needed_table(rows: Rows) -> Table:
    """A row per policy that selects: what its heads attend to, and what they needed."""
    header = ["policy", "budget", "top-p", "attended, median", "true", "of any"]
    header += ["reached", "needed", "off, median", "off, 90th"]
    return header, [
        [
            row.label,
            budget_of(row),
            f"{row.needed_top_p}",
            f"{heads['attended_sampled']:,.0f}",
            f"{heads['true_median']:,.0f}",
            f"{heads['true_without_window']:,.0f}",
            f"{heads['reached_share']:.0%}",
            _number(heads["needed_share"], ".0%"),
            f"{heads['deviation_median']:.0%}",
            f"{heads['deviation_p90_of_heads']:.0%}",
        ]
        for row in rows
        if (heads := row.over_heads)
    ]


def layer_table(row: BudgetMeasurement) -> Table:
    """A row per layer of one policy; in each column the layer's heads, one after the other."""
    header = ["layer", "attended, median", "5th-95th percentile", "compared / true"]
    header += ["needed", "off, median / 90th"]
    layers: dict[int, list[HeadCounts]] = {}
    for head in row.heads:
        layers.setdefault(head.layer, []).append(head)
    return header, [
        [
            str(layer),
            "  ".join(f"{head.attended_median:,.0f}" for head in heads),
            "  ".join(f"{head.attended_p5:,.0f}-{head.attended_p95:,.0f}" for head in heads),
            "  ".join(f"{head.attended_sampled:,.0f} / {head.true_median:,.0f}" for head in heads),
            "  ".join(_number(head.needed_share, ".0%") for head in heads),
            "  ".join(f"{head.deviation_median:.0%} / {head.deviation_p90:.0%}" for head in heads),
        ]
        for layer, heads in layers.items()
    ]


def drift_table(rows: Rows) -> Table:
    """A row per policy: errors and tokens of each quarter of what it generated."""
    header = ["policy", "budget", "1st quarter", "2nd", "3rd", "4th", "4th / 2nd"]
    header.append("attended, mean with dense layers")
    return header, [
        [
            row.label,
            budget_of(row),
            *(_number(error, ".4f") for error in row.drift.output_error),
            _number(last_to_second(row.drift.output_error), ".2f"),
            "  ".join(_number(count, ",.0f") for count in row.drift.attended_tokens),
        ]
        for row in rows
        if row.drift.output_error
    ]


def temperature_table(rows: Rows) -> Table:
    """A row per policy and number of tokens at which temperatures were solved for again."""
    header = ["policy", "budget", "generated", "temperature, median layer", "lowest", "highest"]
    header.append("solved")
    lines = []
    for row in rows:
        for later in row.drift.temperatures:
            known = [x for x in later.of_layers if x is not None]
            spread = np.percentile(known, (50, 0, 100)).tolist() if known else [None] * 3
            numbers = [_number(x, ".2f") for x in spread]
            tokens = f"{later.tokens:,}"
            lines.append([row.label, budget_of(row), tokens, *numbers, f"{later.solved:.0%}"])
    return header, lines


def eviction_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row per eviction: KL and output error of each quarter, as `measure_evictions` has them."""
    header = ["eviction", "slots", "condensed", "KL", "perplexity", "KL by quarter"]
    header += ["error by quarter", "4th / 2nd"]
    return header, [
        [
            row["eviction"],
            f"{row['slots']:,}",
            f"{row['condensed']:,}",
            f"{row['kl']:.4f}",
            f"{np.expm1(row['loss_change']):+.2%}",
            "  ".join(f"{x:.4f}" for x in row["kl_of_quarters"]),
            "  ".join(f"{x:.4f}" for x in row["error_of_quarters"]),
            _number(last_to_second(row["error_of_quarters"]), ".2f"),
        ]
        for row in rows
    ]


def adaptive_of(rows: Rows) -> list[BudgetMeasurement]:
    """Those whose heads differ in their budgets."""
    return [row for row in rows if row.top_p is not None]


def budget_of(row: BudgetMeasurement) -> str:
    """A number of tokens, or a share and its cap."""
    if row.budget_tokens is None:
        return UNKNOWN
    share = "" if row.top_p is None else f"{row.top_p} to "
    return f"{share}{row.budget_tokens:,}"


def _number(value: float | None, spec: str) -> str:
    return UNKNOWN if value is None else format(value, spec)
