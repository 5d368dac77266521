"""How fast a model decodes with its KV in host memory, and what of a step overlaps.

Times come from steps that are queued as fast as the decoder takes them, without marks; shares come
from a few traced steps afterwards, whose marks cost some microseconds per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.measuring.steps.session import DecodeSession
from offload.measuring.steps.step_timeline import (
    SHARES,
    StepTimeline,
    median_microseconds,
    step_shares,
    summed,
)
from offload.measuring.steps.worker_tasks import workers_row

WARM_UP_STEPS = 4


@dataclass(frozen=True)
class StepMeasurement:
    """What one session gave.

    Attributes:
        milliseconds: of a step; median and percentiles over `steps` of them, first steps left out.
        traced_milliseconds: the same with marks; None, as `shares`, if no step was traced.
        shares: each of `SHARES`, of the traced steps.
        microseconds: of each side and kind of work, all layers of a step together (median).
        workers: `workers_row` of the traced steps.
    """

    batch_size: int
    steps: int
    milliseconds: float
    milliseconds_p10: float
    milliseconds_p90: float
    tokens_per_second: float
    traced_milliseconds: float | None
    shares: dict[str, float] | None
    microseconds: dict[str, dict[str, float]]
    workers: dict[str, Any] | None
    memory: dict[str, int]


def measure_steps(
    session: DecodeSession,
    *,
    repeats: int = 2,
    traced_steps: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[StepMeasurement, list[StepTimeline]]:
    """Decode all of the session's steps `repeats` times, then trace some; returns these, too.

    Every repeat starts at the prompts: the same queries find the same selections.

    Args:
        traced_steps: 0: none, and no shares.
        on_progress: counts the traced repeat, too.

    Raises:
        ValueError: numbers out of range.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if session.num_steps <= WARM_UP_STEPS:
        raise ValueError(
            f"steps must be more than the {WARM_UP_STEPS} to warm up, got {session.num_steps}"
        )
    most = session.num_steps - WARM_UP_STEPS - 1
    if not 0 <= traced_steps <= most:
        raise ValueError(
            f"traced_steps must be in [0, {most}], the steps there are without {WARM_UP_STEPS} to "
            f"warm up and one to capture, got {traced_steps}"
        )
    total = repeats + bool(traced_steps)
    seconds: list[float] = []
    for repeat in range(repeats):
        session.rewind()
        session.decode(WARM_UP_STEPS)
        seconds += session.decode(session.num_steps - WARM_UP_STEPS)
        on_progress(repeat + 1, total)
    traced: list[StepTimeline] = []
    if traced_steps:
        session.rewind()
        session.decode(WARM_UP_STEPS)
        traced = session.trace(traced_steps)
        on_progress(total, total)
    p10, median, p90 = (float(t) * 1e3 for t in np.percentile(seconds, [10, 50, 90]))
    shares = summed(map(step_shares, traced)) if traced else None
    measurement = StepMeasurement(
        batch_size=session.batch_size,
        steps=len(seconds),
        milliseconds=median,
        milliseconds_p10=p10,
        milliseconds_p90=p90,
        tokens_per_second=1e3 * session.batch_size / median,
        traced_milliseconds=(
            float(np.median([step.seconds for step in traced])) * 1e3 if traced else None
        ),
        shares=shares and {name: shares.share(name) for name in SHARES},
        microseconds=median_microseconds(traced),
        workers=workers_row(traced),
        memory=session.memory(),
    )
    return measurement, traced
