"""Times of GPU operators, by events about CUDA graphs: what a captured step would wait for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def require_gpu() -> None:
    """SystemExit, which says so, where there is no CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none")


def graph_microseconds(calls: Sequence[Callable[[], object]], *, rounds: int = 9) -> float:
    """Time of a call, of all of them captured one after the other: the median of some replays.

    Args:
        calls: what may be captured; each should read what the others leave in no cache.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets libraries allocate what they keep
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def print_kernels(run: Callable[[], object], *, rows: int = 8) -> None:
    """Mean times of the kernels of a call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(20):
            run()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:rows]:
        microseconds = event.self_device_time_total / max(1, event.count)
        print(f"    {microseconds:9.2f} us x {event.count // 20} {event.key[:90]}")
