"""Decode steps as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

Format: the JSON object of the Trace Event Format, complete events ("X") in microseconds, a process
for each side. The CPU's has a thread for the requests, and one for each worker below it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.measuring.steps.step_timeline import Interval, StepTimeline, Task

_STEPS, _GPU, _CPU = range(1, 4)
_LANES = {_STEPS: "steps", _GPU: "GPU", _CPU: "CPU workers"}
_COPIES = 2  # a thread of the GPU's process: copies run beside its kernels
_WORKERS = 2  # the first worker's thread of the CPU's process


def chrome_trace(
    steps: Sequence[StepTimeline], *, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The trace of consecutive steps; the first starts at 0.

    Args:
        metadata: about the run, as plain values; viewers show it.
    """
    if not steps:
        raise ValueError("there are no steps to write a trace of")
    events: list[dict[str, Any]] = []

    def about(what: str, process: int, thread: int, **value: str | int) -> None:
        events.append({"ph": "M", "pid": process, "tid": thread, "name": what, "args": value})

    for process, name in _LANES.items():
        about("process_name", process, 1, name=name)
        about("process_sort_index", process, 1, sort_index=process)
    about("thread_name", _GPU, 1, name="kernels")
    if any(interval.kind == "copy" for step in steps for interval in step.gpu):
        about("thread_name", _GPU, _COPIES, name="copies")
    about("thread_name", _CPU, 1, name="requests")
    for worker in range(max(step.num_workers for step in steps)):
        thread = _WORKERS + worker
        about("thread_name", _CPU, thread, name=f"worker {worker}")
        about("thread_sort_index", _CPU, thread, sort_index=thread)
    for number, step in enumerate(steps):
        whole = Interval(f"step {number}", -1, step.start_ns, step.end_ns)
        sides: dict[int, Sequence[Interval | Task]] = {
            _STEPS: [whole],
            _GPU: step.gpu,
            _CPU: [*step.cpu, *step.tasks],
        }
        for process, intervals in sides.items():
            events += [_event(interval, process, steps[0].start_ns) for interval in intervals]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": metadata or {}}


def write_chrome_trace(
    path: Path, steps: Sequence[StepTimeline], *, metadata: dict[str, Any] | None = None
) -> None:
    """Write `chrome_trace` to a file."""
    path.write_text(json.dumps(chrome_trace(steps, metadata=metadata)) + "\n", encoding="utf-8")


def _event(interval: Interval | Task, process: int, zero: int) -> dict[str, Any]:
    thread = _COPIES if interval.kind == "copy" else 1
    if isinstance(interval, Task):
        thread = _WORKERS + interval.worker
    places = {name: getattr(interval, name, -1) for name in ("layer", "row", "unit")}
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": interval.kind,
        "ts": (interval.start_ns - zero) / 1e3,
        "dur": (interval.end_ns - interval.start_ns) / 1e3,
        "args": {name: place for name, place in places.items() if place >= 0},
    }
