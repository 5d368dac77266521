"""When the GPU and the CPU worked in a decode step, on one clock, and what overlapped.

Both sides report intervals (kind, layer, start_ns, end_ns), each by its own clock. A step's time is
split four ways, which add up to all of it:

    overlapped  both sides work
    waiting     only the GPU works: the CPU waits for queries
    exposed     only the CPU works: the GPU waits for its answer
    handshake   neither works: flags on their way, gaps between kernels

Reading ahead (`warm`) is no work: it fills a wait, and nothing waits for it. What each worker of
the CPU's pool did stands with it; `worker_tasks` sums it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# What counts as work, and what each side does while it waits.
CPU_WORK = ("store", "attend", "update", "prepare", "experts")
CPU_WAITS = ("warm", "wait")
GPU_WORK = (
    *("linear", "candidates", "predicted"),
    *("window", "attention", "gathered", "hot", "merge", "sample", "copy"),
)
GPU_WAITS = ("wait",)
# Of a worker, in the order in which a layer comes to them; and those that a reply waits for.
ATTEND_TASKS = ("ask", "score", "choose", "attend", "merge")
TASKS = ("prepare", "warm", "store", *ATTEND_TASKS, "update", "remember")
SHARES = ("overlapped", "waiting", "exposed", "handshake")
Span = tuple[int, int]


class Interval(NamedTuple):
    """What one side did from `start_ns` to `end_ns`; layer -1 is none in particular."""

    kind: str
    layer: int
    start_ns: int
    end_ns: int


class Task(NamedTuple):
    """What one worker did; row and unit are -1 where it was more than one."""

    kind: str
    layer: int
    start_ns: int
    end_ns: int
    worker: int
    row: int
    unit: int


@dataclass(frozen=True)
class StepTimeline:
    """One decode step; all times are of one clock.

    Attributes:
        cpu: of the thread that leads the workers.
        tasks: of the workers, `num_workers` of them.
        num_lost_events: of the CPU's, for which there was no room.
    """

    start_ns: int
    end_ns: int
    cpu: tuple[Interval, ...]
    gpu: tuple[Interval, ...]
    tasks: tuple[Task, ...] = ()
    num_workers: int = 0
    num_lost_events: int = 0

    def __post_init__(self) -> None:
        if self.end_ns <= self.start_ns:
            raise ValueError(f"a step cannot end at {self.end_ns} ns: it starts at {self.start_ns}")
        sides: tuple[tuple[str, Sequence[Interval | Task], Sequence[str]], ...] = (
            ("cpu", self.cpu, (*CPU_WORK, *CPU_WAITS)),
            ("gpu", self.gpu, (*GPU_WORK, *GPU_WAITS)),
            ("worker", self.tasks, TASKS),
        )
        for side, intervals, kinds in sides:
            for interval in intervals:
                if interval.kind not in kinds:
                    known = ", ".join(kinds)
                    raise ValueError(f"unknown {side} kind {interval.kind!r}; available: {known}")
                if interval.end_ns < interval.start_ns:
                    raise ValueError(
                        f"{side} {interval.kind} of layer {interval.layer} ends at "
                        f"{interval.end_ns} ns, before it starts at {interval.start_ns}"
                    )

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class StepShares(NamedTuple):
    """Nanoseconds of a step, or of several; see the module. They add up to `total_ns`."""

    total_ns: int
    overlapped_ns: int
    waiting_ns: int
    exposed_ns: int
    handshake_ns: int

    def share(self, name: str) -> float:
        """One of `SHARES` as a part of the total."""
        return float(getattr(self, f"{name}_ns")) / self.total_ns


def step_shares(step: StepTimeline) -> StepShares:
    """How one step's time splits."""
    whole = [(step.start_ns, step.end_ns)]
    cpu = intersection(whole, _spans(step.cpu, CPU_WORK))
    gpu = intersection(whole, _spans(step.gpu, GPU_WORK))
    both, total = length(intersection(cpu, gpu)), length(whole)
    waiting, exposed = length(gpu) - both, length(cpu) - both
    return StepShares(total, both, waiting, exposed, total - both - waiting - exposed)


def summed(shares: Iterable[StepShares]) -> StepShares:
    """The shares of several steps together."""
    columns = list(zip(*shares, strict=True))
    if not columns:
        raise ValueError("there are no steps to sum up")
    return StepShares(*map(sum, columns))


def median_microseconds(steps: Sequence[StepTimeline]) -> dict[str, dict[str, float]]:
    """Time of each side and kind: the median over steps, all layers together."""
    kinds = {"gpu": (*GPU_WORK, *GPU_WAITS), "cpu": (*CPU_WORK, *CPU_WAITS)}
    table: dict[str, dict[str, float]] = {side: {} for side in kinds}
    for side, of_side in kinds.items():
        for kind in of_side:
            times = [length(_spans(getattr(step, side), (kind,))) for step in steps]
            if any(times):
                table[side][kind] = float(np.median(times)) / 1e3
    return table


def clock_offset_ns(
    raised: Sequence[tuple[int, int]], answered: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """What to add to GPU times to get CPU times, and how far off it may be.

    Every flag arrives after it was set, whichever side sets it: requests bound the offset from
    above, replies from below. The middle is taken.

    Args:
        raised: (GPU time before a request was raised, CPU time after it was seen).
        answered: (CPU time before a reply was written, GPU time after it was seen).

    Raises:
        ValueError: no pairs, or pairs that contradict each other: the clocks drifted, or the times
            belong to different events.
    """
    if not raised or not answered:
        raise ValueError("clocks are aligned by requests and replies; one of the lists is empty")
    upper = min(cpu - gpu for gpu, cpu in raised)
    lower = max(cpu - gpu for cpu, gpu in answered)
    if lower > upper:
        raise ValueError(
            f"the GPU's and the CPU's times contradict each other by {lower - upper} ns: "
            "replies arrive before they are sent, or requests do"
        )
    return (lower + upper) // 2, (upper - lower + 1) // 2


def shifted(intervals: Iterable[Interval], offset_ns: int) -> tuple[Interval, ...]:
    """The same intervals on another clock."""
    return tuple(
        i._replace(start_ns=i.start_ns + offset_ns, end_ns=i.end_ns + offset_ns) for i in intervals
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same time; empty ones go."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """What two lists of disjoint spans in order have in common."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> int:
    """Total length of disjoint spans."""
    return sum(end - start for start, end in spans)


def _spans(intervals: Iterable[Interval], kinds: Sequence[str]) -> list[Span]:
    return union((i.start_ns, i.end_ns) for i in intervals if i.kind in kinds)
