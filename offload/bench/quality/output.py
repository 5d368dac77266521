"""Quality measurements as rows of a table."""

from __future__ import annotations

from typing import Any

from offload.bench.eval.output import UNKNOWN

Row = dict[str, Any]  # a QualityMeasurement as JSON has it

LEGEND = (
    "attended: tokens per unit, on average. candidates: keys scored exactly. overlap: with the "
    "equally many most important tokens. mass: attention mass kept, sinks excluded; of top-k: "
    "relative to exact top-k at the same budget. error: relative L2 error of the attention "
    "output. KL (nats) and perplexity: of the next token, against full attention. Jaccard, "
    "hit 32: selected tokens against the last step's, and against the last 32 steps'."
)
BOUND_LEGEND = (
    " host=SHARE: full attention within this share of the bytes of all keys and values. budget: "
    "tokens that it has then room for; error: against a run with all of them."
)

# Header, key of the row, and how it is formatted.
COLUMNS = (
    ("budget", "budget_tokens", ","),
    ("attended", "attended_tokens", ",.0f"),
    ("candidates", "candidate_share", ".1%"),
    ("overlap", "overlap", ".3f"),
    ("mass", "mass_kept", ".4f"),
    ("of top-k", "mass_of_topk", ".4f"),
    ("error", "output_error", ".4f"),
    ("KL", "kl", ".4f"),
    ("perplexity", "perplexity", ".3f"),
    ("change", "perplexity_change", "+.2%"),
    ("Jaccard", "jaccard", ".3f"),
    ("hit 32", "window_hit", ".3f"),
    ("tokens/s", "tokens_per_second", ".1f"),
)


def cells(row: Row) -> list[str]:
    """The row's cells after the label, in the order of COLUMNS."""
    return [UNKNOWN if row[key] is None else format(row[key], spec) for _, key, spec in COLUMNS]
