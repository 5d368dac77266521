"""What the C++ side records while tracing is on (`cpp/pool/trace.h`)."""

from __future__ import annotations

from typing import NamedTuple


class TraceEvent(NamedTuple):
    """What the coprocessor or a worker did and when; by the clock of `time.monotonic_ns`.

    Attributes:
        kind: wait (for the GPU), store (keys and values), attend, update, prepare or warm (read
            ahead for the next request). A worker's tasks are of these kinds, and ask (the policy),
            score (candidates), choose (among them), merge or remember (what to read ahead).
        layer_idx, request: -1 at the end of a step. Tasks have no request: -1.
        worker: of the pool; -1 for what the leading thread did, which spans the workers' tasks.
        row: of those of a task's request; -1: several.
        unit: of the row, the first of a task's; -1: all.
    """

    kind: str
    layer_idx: int
    request: int
    start_ns: int
    end_ns: int
    worker: int = -1
    row: int = -1
    unit: int = -1
