"""Times of GPU operators, by events about CUDA graphs: what a captured step would wait for; and
what the GPU's memory can do."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_ops.launch import jit, tl

LAUNCHES = 20
ROUNDS = 15
READ_BLOCK = 4096
_READ_BYTES = 4 * 2**30


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
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(20):
            run()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:rows]:
        microseconds = event.self_device_time_total / max(1, event.count)
        print(f"    {microseconds:9.2f} us x {event.count // 20} {event.key[:90]}")


def microseconds(run: Callable[[int], None], *, launches: int = LAUNCHES) -> float:
    """`graph_microseconds` of calls on copy 0, 1, ..."""
    calls = [functools.partial(run, copy) for copy in range(launches)]
    return graph_microseconds(calls, rounds=ROUNDS)


@jit
def read_kernel(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One program per SIZE numbers: their sum."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        total += tl.load(x + program * SIZE + start + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total, 0))


def read_all(x: Tensor, out: Tensor) -> None:
    """Sums of equal pieces of x, one per element of out, in whole blocks."""
    read_kernel[(len(out),)](x, out, len(x) // len(out), READ_BLOCK, num_warps=8)


def memory_bandwidths() -> dict[str, float]:
    """GB/s of a plain read, and of a copy, which counts twice."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    programs = 16 * multiprocessors
    size = _READ_BYTES // 4 // (programs * READ_BLOCK) * programs * READ_BLOCK
    x = torch.ones(size, device="cuda")
    out, target = torch.empty(programs, device="cuda"), torch.empty_like(x)
    read = graph_microseconds([lambda: read_all(x, out)] * 2)
    if not (out == size // programs).all():
        raise ArithmeticError("the plain read has not read everything")
    copy = graph_microseconds([lambda: target.copy_(x)] * 2)
    num_bytes = size * x.itemsize
    return {"read": num_bytes / read / 1e3, "copy": 2 * num_bytes / copy / 1e3}
