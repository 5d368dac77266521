"""What the traced steps of `offload bench decode --trace` did, as tables."""

from __future__ import annotations

from typing import Any

from offload.cli.console import make_table, stderr, stdout

_SHARES = {
    "overlapped": "both sides work",
    "waiting": "only the GPU works, the CPU waits for queries",
    "exposed": "only the CPU works, the GPU waits for its answer",
    "handshake": "neither works: flags on their way, gaps between kernels",
}
_MEMORY = {
    "weights": "weights",
    "kv_host": "KV on the host",
    "kv_device": "KV on the GPU",
    "device": "on the GPU in addition to the weights",
    "policy_host": "kept by the policy",
}
TASK_MEANINGS = {
    "prepare": "the policy predicts, before the request",
    "warm": "reads ahead, until the request comes",
    "store": "keys and values into the pages, with 8 sequences or more",
    "ask": "the policy is asked",
    "score": "its candidates are scored",
    "choose": "the best of them are chosen",
    "attend": "to what was chosen",
    "merge": "pieces into the reply",
    "update": "the policy learns, after the reply",
    "remember": "notes what to read ahead in the next step",
}


def print_traced(row: dict[str, Any]) -> None:
    """Shares of a step, its work by side and kind, and the CPU's workers."""
    from offload.system.memory import format_bytes

    spread = (row["milliseconds_p90"] - row["milliseconds_p10"]) / 2
    traced_ms, workers = row["traced_milliseconds"], row["workers"]
    memory = (f"{_MEMORY.get(name, name)} {format_bytes(n)}" for name, n in row["memory"].items())
    stdout().print(
        f"{row['milliseconds']:.2f} ± {spread:.2f} ms per step, "
        f"{row['tokens_per_second']:,.1f} tokens/s, {row['steps']} steps; "
        f"{traced_ms:.2f} ms with marks\n{', '.join(memory)}\n"
    )
    shares = [
        [name, f"{share:.1%}", f"{share * traced_ms:.2f}", _SHARES[name]]
        for name, share in row["shares"].items()
    ]
    _print_table(["share", "of a step", "ms", "what it is"], shares)
    work = [
        [side, kind, f"{us:,.0f}", f"{us / (1e3 * traced_ms):.1%}"]
        for side, kinds in row["microseconds"].items()
        for kind, us in kinds.items()
    ]
    _print_table(["side", "work", "µs per step", "of a step"], work)
    if workers:
        tasks = workers["task_microseconds"].items()
        columns = ["worker task", "µs per layer, all workers", "what it is"]
        _print_table(columns, [[kind, f"{us:,.1f}", TASK_MEANINGS[kind]] for kind, us in tasks])
        columns = ["layer", "µs to the reply", "before tasks", "after tasks"]
        _print_table([*columns, "busy workers", "idle"], reply_lines(workers))
        if num_lost := workers["num_lost_events"]:
            stderr().print(f"{num_lost:,} events of the workers are missing: too many in a step")


def reply_lines(workers: dict[str, Any]) -> list[list[str]]:
    """Cells of a `workers_row`: the median layer and the slowest."""
    from statistics import median

    replies = workers["replies"]
    if not replies:
        return []
    slowest = max(replies, key=lambda reply: float(reply["microseconds"]))
    middle = {name: median(reply[name] for reply in replies) for name in slowest}
    return [
        [
            name,
            *(
                f"{reply[f'{what}microseconds']:,.1f}"
                for what in ("", "before_tasks_", "after_tasks_")
            ),
            f"{reply['busy_workers']:.1f} of {workers['num_workers']}",
            f"{reply['idle_share']:.0%}",
        ]
        for name, reply in (("median", middle), (f"slowest: {slowest['layer']}", slowest))
    ]


def _print_table(columns: list[str], lines: list[list[str]]) -> None:
    """Numbers stand to the right, words to the left."""
    cells = lines[0] if lines else columns
    words = [i for i, cell in enumerate(cells) if not cell[0].isdigit()]
    table = make_table(columns, lines, words=words, box=None, padding=(0, 2, 0, 0))
    stdout().print(table)
    stdout().print()
