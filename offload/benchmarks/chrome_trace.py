"""Decode steps as a Chrome trace: open the file in https://ui.perfetto.dev or chrome://tracing.

Format: the JSON object of the Trace Event Format, complete events ("X") in microseconds, a process
for each side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from offload.benchmarks.step_timeline import Interval, StepTimeline

_STEPS, _GPU, _CPU = range(1, 4)
_LANES = {_STEPS: "steps", _GPU: "GPU", _CPU: "CPU workers"}
_COPIES = 2  # a thread of the GPU's process: copies run beside its kernels


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
        events.append(
            {
                "ph": "M",
                "pid": process,
                "name": "process_sort_index",
                "args": {"sort_index": process},
            }
        )
    events.append(_name("thread_name", _GPU, 1, "kernels"))
    if any(interval.kind == "copy" for step in steps for interval in step.gpu):
        events.append(_name("thread_name", _GPU, _COPIES, "copies"))
    for number, step in enumerate(steps):
        whole = Interval(f"step {number}", -1, step.start_ns, step.end_ns)
        events += _events([whole], _STEPS, zero)
        events += _events(step.gpu, _GPU, zero)
        events += _events(step.cpu, _CPU, zero)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": metadata or {}}


def write_chrome_trace(
    path: Path, steps: Sequence[StepTimeline], *, metadata: dict[str, Any] | None = None
) -> None:
    """Write `chrome_trace` to a file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(chrome_trace(steps, metadata=metadata)) + "\n", encoding="utf-8")


def _events(intervals: Iterable[Interval], process: int, zero: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "pid": process,
            "tid": _COPIES if interval.kind == "copy" else 1,
            "name": interval.kind,
            "ts": (interval.start_ns - zero) / 1e3,
            "dur": (interval.end_ns - interval.start_ns) / 1e3,
            "args": {} if interval.layer < 0 else {"layer": interval.layer},
        }
        for interval in intervals
    ]


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
