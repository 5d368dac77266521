"""Markdown of perf/results/train-heads.json: trainings of gates, and what their roles keep."""

from __future__ import annotations

from typing import Any

from perf.tables.markdown import Columns, Row, table
from perf.tables.tables import machine_line


def trained_heads_table(result: dict[str, Any]) -> str:
    """A line of each training: the constraint, the roles, and other texts under them."""
    settings = result["settings"]
    title = (
        f"Trainings of {settings['steps']:,} steps, {settings['batch_size']} prompts each, budget "
        "a tenth of the context. On other texts of the same kind "
        f"({settings['held_out_prompts']} prompts): KL divergence from full attention, tokens "
        "that stay the most probable, and answers of full attention that stay right. Loss: with "
        "these heads, and with the gates as they were trained (mean squared difference of logits). "
        f"Seconds: {settings['concurrent']} trainings shared the GPU; in brackets one that has it "
        "alone (`direct` on an H200)."
    )
    rows = [row for row in result["rows"] if row["part"] == "training"]
    columns: Columns = {
        "model": "`{model}`",
        "method": "`{method}`",
        "context": "{context:,}",
        "target": "{target_heads}",
        "E‖z‖₀": "{open_heads:.1f}",
        "heads": "{retrieval_heads}",
        "KL": lambda row: f"{row['held_out']['kl']:.3f}",
        "same token": lambda row: f"{row['held_out']['agrees']:.1%}",
        "right": _right,
        "loss": lambda row: f"{row['held_out']['loss']:.2f}",
        "as trained": lambda row: f"{row['held_out']['gated_loss']:.2f}",
        "s a step": _seconds,
    }
    return "\n\n".join(
        [title, table(columns, rows), machine_line(result["machine"], spreads=False)]
    )


def compared_roles_table(result: dict[str, Any]) -> str:
    """Learnt roles compared with those of the calibration, on the same texts."""
    rows = [row for row in result["rows"] if row["part"] == "roles"]
    columns: Columns = {
        "model": "`{model}`",
        "roles": "{roles}",
        "heads after layer 0": "{retrieval_heads}",
        "prompts": "{prompts}",
        "KL": "{kl:.3f}",
        "less KL than calibrated": _difference,
        "same token": "{agrees:.1%}",
    }
    title = (
        "Roles on the same texts, which no training has read: prompts of "
        f"{result['settings']['roles_context']:,} tokens, budget a tenth, on a CPU. In brackets "
        "95 % of the paired difference by prompt; 16 learnt heads are compared with the package's."
    )
    machine = result["settings"]["roles_machine"]
    return "\n\n".join([title, table(columns, rows), machine_line(machine, spreads=False)])


def _seconds(row: Row) -> str:
    alone = f"({row['alone_seconds_per_step']:.2f})"
    shared = row.get("seconds_per_step")
    return alone if shared is None else f"{shared:.2f} {alone}"


def _right(row: Row) -> str:
    held_out = row["held_out"]
    if held_out["right"] is None:
        return ""
    return f"{round(held_out['right'] * held_out['num_right'])} of {held_out['num_right']}"


def _difference(row: Row) -> str:
    of_same = row.get("less_kl")
    if of_same is None:
        return ""
    low, high = of_same["interval"]
    return f"{of_same['mean']:+.3f} [{low:+.3f}, {high:+.3f}]"
