"""Decode steps as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

Format: the JSON object of the Trace Event Format, complete events ("X") in microseconds, a process
for each side. The CPU's has a thread for the requests, and one for each worker below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from offload.bench.pipeline.step_timeline import Interval, StepTimeline, Task

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
    zero = steps[0].start_ns
    events: list[dict[str, Any]] = []
    for process, name in _LANES.items():
        events.append(_name("process_name", process, 1, name))
        events.append(_order("process_sort_index", process, 1, process))
    events.append(_name("thread_name", _GPU, 1, "kernels"))
    if any(interval.kind == "copy" for step in steps for interval in step.gpu):
        events.append(_name("thread_name", _GPU, _COPIES, "copies"))
    events.append(_name("thread_name", _CPU, 1, "requests"))
    for worker in range(max(step.num_workers for step in steps)):
        events.append(_name("thread_name", _CPU, _WORKERS + worker, f"worker {worker}"))
        events.append(_order("thread_sort_index", _CPU, _WORKERS + worker, _WORKERS + worker))
    for number, step in enumerate(steps):
        whole = Interval(f"step {number}", -1, step.start_ns, step.end_ns)
        events += _events([whole], _STEPS, zero)
        events += _events(step.gpu, _GPU, zero)
        events += _events(step.cpu, _CPU, zero)
        events += _events(step.tasks, _CPU, zero)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": metadata or {}}


def write_chrome_trace(
    path: Path, steps: Sequence[StepTimeline], *, metadata: dict[str, Any] | None = None
) -> None:
    """Write `chrome_trace` to a file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(chrome_trace(steps, metadata=metadata)) + "\n", encoding="utf-8")


def _events(intervals: Iterable[Interval | Task], process: int, zero: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": process,
            "tid": _thread(interval),
            "name": interval.kind,
            "ts": (interval.start_ns - zero) / 1e3,
            "dur": (interval.end_ns - interval.start_ns) / 1e3,
            "args": _places(interval),
        }
        for interval in intervals
    ]


def _thread(interval: Interval | Task) -> int:
    if isinstance(interval, Task):
        return _WORKERS + interval.worker
    return _COPIES if interval.kind == "copy" else 1


def _places(interval: Interval | Task) -> dict[str, int]:
    """Of what: layer, row and unit, where there is one in particular."""
    names = ("layer", "row", "unit") if isinstance(interval, Task) else ("layer",)
    return {name: getattr(interval, name) for name in names if getattr(interval, name) >= 0}


def _order(what: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"sort_index": index}}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
