"""Markdown of what plans were measured to be: predicted steps, planned bytes."""

from __future__ import annotations

from typing import Any

from offload.decode.gpu.placement import LETTERS, Place
from perf.tables.gpu_tables import gpu_section, milliseconds_cell
from perf.tables.markdown import Columns, Row

_COUNTED = ("kv_device", "device", "host")  # bytes of a plan that were counted, too


def gpu_plan_table(result: dict[str, Any]) -> str:
    """Predicted and measured steps, planned and taken bytes."""

    def heads_cell(row: Row) -> str:
        places = (Place.GPU, Place.GATHER, Place.CODES, Place.CPU)
        counts = {place: row["heads"].get(place.name) for place in places}
        return " ".join(f"{LETTERS[place]} {n}" for place, n in counts.items() if n is not None)

    def bytes_cell(row: Row) -> str:
        errors = bytes_errors(row).values()
        return f"{max(errors, key=abs):+.1%}" if errors else ""

    settings = result["settings"]
    title = (
        f"Steps of {settings['shape']}, {settings['dtype']}, batch 1, predicted from the machine's "
        "profile, and measured; with the placement that `offload plan` chooses, and with dense "
        "layers only. KV heads: G on the GPU, g gathered, . on the CPU. Bytes: of KV on the GPU, "
        "of all beside the weights there, and of KV on the host, the count that is off most. "
        "Options but the budget are the defaults; [results](results.md) judge them with 1,024 "
        "tokens and a model of 135M parameters."
    )
    columns: Columns = {
        "policy": "`{policy}`",
        "tokens": "{kv_len:,}",
        "budget": "{budget_tokens:,}",
        "threads": "{threads}",
        "KV heads": heads_cell,
        "predicted ms": "{predicted_milliseconds:.2f}",
        "measured ms": milliseconds_cell,
        "off by": "{error:+.1%}",
        "bytes off by": bytes_cell,
    }
    return gpu_section(result, title, columns, result["rows"])


def bytes_errors(row: Row) -> dict[str, float]:
    """Errors of planned bytes against taken ones, where both were counted."""
    found = {}
    for name in _COUNTED:
        planned, taken = row[f"planned_{name}_bytes"], row[f"{name}_bytes"]
        if planned and taken:
            found[name] = planned / taken - 1
    return found
