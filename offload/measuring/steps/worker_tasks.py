"""What the workers of the CPU's pool did in traced steps, layer by layer.

The GPU waits from its request to the reply. `layer_replies` says how much of that time the workers
share: what one of them does while the others idle is what another division of the work could
shorten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpu_ops.trace import TraceEvent
from offload.measuring.steps.step_timeline import ATTEND_TASKS, TASKS, Interval, StepTimeline, Task


@dataclass(frozen=True)
class LayerReply:
    """How a layer's replies came about; medians over steps, and over its requests.

    Attributes:
        microseconds: from the request seen to the reply.
        before_tasks_microseconds: of these until the first task of a worker begins,
        after_tasks_microseconds: and after the last one ends.
        busy_workers: mean over that time.
        idle_share: of the workers' time within `attend`.
    """

    layer: int
    microseconds: float
    before_tasks_microseconds: float
    after_tasks_microseconds: float
    busy_workers: float
    idle_share: float


def worker_tasks(events: Iterable[TraceEvent]) -> tuple[Task, ...]:
    """Those of the workers."""
    return tuple(
        Task(e.kind, e.layer_idx, e.start_ns, e.end_ns, e.worker, e.row, e.unit)
        for e in events
        if e.worker >= 0
    )


def task_microseconds(steps: Iterable[StepTimeline]) -> dict[str, float]:
    """Time of each kind of task in a layer of a step, all workers together; the median over
    those that have it."""
    sums: dict[str, list[int]] = {kind: [] for kind in TASKS}
    for step in steps:
        of_step: dict[tuple[str, int], int] = defaultdict(int)
        for task in step.tasks:
            of_step[task.kind, task.layer] += task.end_ns - task.start_ns
        for (kind, _), nanoseconds in of_step.items():
            sums[kind].append(nanoseconds)
    return {kind: float(np.median(times)) / 1e3 for kind, times in sums.items() if times}


def layer_replies(steps: Iterable[StepTimeline]) -> list[LayerReply]:
    """The reply of each layer that workers attended in."""
    found: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for step in steps:
        of_layer: dict[int, list[Task]] = defaultdict(list)
        for task in step.tasks:
            of_layer[task.layer].append(task)
        before: Interval | None = None  # the last wait
        for interval in sorted(step.cpu, key=lambda i: i.start_ns):
            if interval.kind == "wait":
                before = interval
            if interval.kind == "attend" and interval.end_ns > interval.start_ns:
                waited = before is not None and before.layer == interval.layer
                seen = before.end_ns if before and waited else interval.start_ns
                numbers = _reply(seen, interval, of_layer[interval.layer], step.num_workers)
                if numbers is not None:
                    found[interval.layer].append(numbers)
    return [
        LayerReply(layer, *(float(x) for x in np.median(numbers, axis=0)))
        for layer, numbers in sorted(found.items())
    ]


def _reply(
    seen_ns: int, attend: Interval, tasks: Sequence[Task], num_workers: int
) -> tuple[float, ...] | None:
    """The numbers of a `LayerReply`; None where no worker attended."""
    own = [
        task
        for task in tasks
        if task.kind in ATTEND_TASKS and attend.start_ns <= task.start_ns < attend.end_ns
    ]
    if not own:
        return None
    whole = attend.end_ns - seen_ns
    busy_attending = _overlap(tasks, attend.start_ns, attend.end_ns)
    return (
        whole / 1e3,
        (min(task.start_ns for task in own) - seen_ns) / 1e3,
        (attend.end_ns - max(task.end_ns for task in own)) / 1e3,
        _overlap(tasks, seen_ns, attend.end_ns) / whole,
        1 - busy_attending / (num_workers * (attend.end_ns - attend.start_ns)),
    )


def _overlap(tasks: Iterable[Task], start_ns: int, end_ns: int) -> int:
    """Nanoseconds of `tasks` in a span."""
    return sum(max(0, min(task.end_ns, end_ns) - max(task.start_ns, start_ns)) for task in tasks)


def workers_row(steps: Sequence[StepTimeline]) -> dict[str, Any] | None:
    """Plain values; None where no worker was traced."""
    tasks = task_microseconds(steps)
    if not tasks:
        return None
    return {
        "num_workers": max(step.num_workers for step in steps),
        "num_lost_events": sum(step.num_lost_events for step in steps),
        "task_microseconds": tasks,
        "replies": [asdict(reply) for reply in layer_replies(steps)],
    }
