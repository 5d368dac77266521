"""Steps with marks of the linear layers and the trace of the CPU's workers, on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from cpu_ops.trace import TraceEvent
from offload.measuring.steps.gpu_marks import START, GpuMarks
from offload.measuring.steps.step_timeline import Interval, StepTimeline, clock_offset_ns, shifted
from offload.measuring.steps.worker_tasks import worker_tasks


def traced_steps(step: Callable[[], object], decoder: Any, num_steps: int) -> list[StepTimeline]:
    """Steps with marks, each on its own; one more is decoded before, to capture it.

    Args:
        step: decodes one token with `decoder`. Without a GPU its linear layers stand on the GPU's
            side, and take turns with the attention.
    """
    device = torch.device(getattr(decoder, "device", "cpu"))
    marks = GpuMarks(device)

    def mark(kind: str, layer_idx: int) -> None:
        if kind == START:
            marks.clear()
        marks.mark(kind, layer_idx)

    decoder.on_mark = mark
    timelines = []
    try:
        step()
        attention, num_workers = decoder.attention, decoder.pool.num_threads
        attention.trace(True)
        for _ in range(num_steps):
            start = time.monotonic_ns()
            step()
            end = time.monotonic_ns()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            events, num_lost = attention.trace_events()
            make = timeline_of if device.type == "cuda" else timeline_in_turns
            timeline = make(start, end, marks.read(), events)
            timelines.append(replace(timeline, num_workers=num_workers, num_lost_events=num_lost))
        attention.trace(False)
    finally:
        decoder.on_mark = None
    return timelines


def timeline_of(
    start: int, end: int, marks: Sequence[Interval], events: Sequence[TraceEvent]
) -> StepTimeline:
    """One step on the CPU's clock.

    A request rises after the GPU's mark before it and is seen when the CPU's wait ends; a reply is
    written after the CPU's attention ends and seen before the GPU's wait does. A layer has one of
    each for every micro-batch, in the same order. Where the GPU asks for nothing its first mark is
    taken for the start.
    """
    led = [e for e in events if e.worker < 0]
    seen = _ends((e.layer_idx, e.end_ns) for e in led if e.kind == "wait")
    attended = _ends((e.layer_idx, e.end_ns) for e in led if e.kind == "attend")
    ahead = {m.layer for m in marks if m.kind == "predicted"}  # asked for in the layer above
    asked = _ends(
        (m.layer, m.end_ns)
        for m in marks
        if m.kind == ("predicted" if m.layer in ahead else "linear")
    )
    waited = _ends((m.layer, m.end_ns) for m in marks if m.kind == "wait")
    raised = [pair for layer in attended for pair in zip(asked[layer], seen[layer], strict=False)]
    answered = [
        pair for layer, ends in waited.items() for pair in zip(attended[layer], ends, strict=False)
    ]
    if raised and answered:
        offset, _ = clock_offset_ns(raised, answered)
    else:
        offset = start - min(m.start_ns for m in marks)
    cpu = tuple(Interval(e.kind, e.layer_idx, e.start_ns, e.end_ns) for e in led)
    return StepTimeline(start, end, cpu, shifted(marks, offset), worker_tasks(events))


def _ends(ends: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """End times of each layer, in order."""
    of_layers: dict[int, list[int]] = {}
    for layer, end_ns in ends:
        of_layers.setdefault(layer, []).append(end_ns)
    return of_layers


def timeline_in_turns(
    start: int, end: int, marks: Sequence[Interval], events: Sequence[TraceEvent]
) -> StepTimeline:
    """One step without a GPU, whose linear layers wait while the workers attend."""
    cpu = tuple(mark for mark in marks if mark.kind == "attend")
    gpu = tuple(m._replace(kind="wait") if m.kind == "attend" else m for m in marks)
    return StepTimeline(start, end, cpu, gpu, worker_tasks(events))
