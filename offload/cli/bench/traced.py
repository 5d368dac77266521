"""What the traced steps of `offload bench decode --trace` did, as tables."""

from __future__ import annotations

from typing import Any

from offload.cli.console import make_table, stderr, stdout


def print_traced(row: dict[str, Any]) -> None:
    """Shares of a step, its work by side and kind, and the CPU's workers."""
    from offload.measuring.steps.measure import memory_line, share_lines, step_line, work_lines
    from offload.measuring.steps.worker_tasks import reply_lines, task_lines

    stdout().print(step_line(row))
    stdout().print(memory_line(row) + "\n")
    _print_table(["share", "of a step", "ms", "what it is"], share_lines(row))
    _print_table(["side", "work", "µs per step", "of a step"], work_lines(row))
    if workers := row["workers"]:
        columns = ["worker task", "µs per layer, all workers", "what it is"]
        _print_table(columns, task_lines(workers))
        columns = ["layer", "µs to the reply", "before tasks", "after tasks"]
        _print_table([*columns, "busy workers", "idle"], reply_lines(workers))
        if num_lost := workers["num_lost_events"]:
            stderr().print(f"{num_lost:,} events of the workers are missing: too many in a step")


def _print_table(columns: list[str], lines: list[list[str]]) -> None:
    """Numbers stand to the right, words to the left."""
    cells = lines[0] if lines else columns
    words = [i for i, cell in enumerate(cells) if not cell[0].isdigit()]
    table = make_table(columns, lines, words=words, box=None, padding=(0, 2, 0, 0))
    stdout().print(table)
    stdout().print()
