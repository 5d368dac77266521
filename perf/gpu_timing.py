"""Times of single launches on a GPU, and what its memory can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_ops.launch import jit, tl

LAUNCHES = 20
ROUNDS = 15
READ_BLOCK = 4096
_READ_BYTES = 4 * 2**30


def microseconds(run: Callable[[int], None], *, launches: int = LAUNCHES) -> float:
    """Median time of a call, of calls captured one after the other, on copy 0, 1, ..."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(launches):
            run(copy)
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[len(times) // 2]


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
    read = microseconds(lambda _: read_all(x, out), launches=2)
    if not (out == size // programs).all():
        raise ArithmeticError("the plain read has not read everything")
    copy = microseconds(lambda _: target.copy_(x), launches=2)
    num_bytes = size * x.itemsize
    return {"read": num_bytes / read / 1e3, "copy": 2 * num_bytes / copy / 1e3}
