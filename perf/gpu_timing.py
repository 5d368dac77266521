"""One layer of Llama-3.1-8B on a GPU, batch 1, bf16: how its operators are timed and checked.

Times are by events about CUDA graphs: what a captured step would wait for. Beside them, what the
GPU's memory can do.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu_ops.launch import jit, tl
from offload.bench.machine.kernels import microseconds

KV_HEADS, GROUP_SIZE, HEAD_DIM, PAGE_TOKENS = 8, 4, 128, 256
QO_HEADS = KV_HEADS * GROUP_SIZE
SM_SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
ROW_BYTES = 2 * HEAD_DIM * DTYPE.itemsize  # key and value of a token and head
COLD_BYTES = 512 * 2**20  # read in turns; the L2 of an H200 holds 60 MB
READ_BLOCK = 4096
_READ_BYTES = 4 * 2**30
_Launch = TypeVar("_Launch")


class Pages:
    """Random keys and values of a layer, in pages in shuffled order, as after many sequences.

    Attributes:
        table: int64 [1, num_pages], their addresses.
    """

    def __init__(self, num_heads: int, tokens: int, generator: torch.Generator) -> None:
        self.tokens = tokens
        shape = (-(-tokens // PAGE_TOKENS), 2, num_heads, PAGE_TOKENS, HEAD_DIM)
        device = generator.device
        self.pages = torch.randn(shape, generator=generator, dtype=DTYPE, device=device)
        self._order = torch.randperm(len(self.pages)).to(device)
        addresses = self.pages.data_ptr() + self._order * self.pages[0].nbytes
        self.table = addresses[None]

    def keys_and_values(self) -> Tensor:
        """[2, num_heads, tokens, head_dim], a copy."""
        kv = self.pages[self._order].permute(1, 2, 0, 3, 4)
        return kv.reshape(*kv.shape[:2], -1, HEAD_DIM)[:, :, : self.tokens]


def require_gpu() -> None:
    """SystemExit, which says so, where there is no CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none")


def launch_option(parser: argparse.ArgumentParser, name: str, launch: type) -> None:
    """An option that tries other launches: `--launch num_warps=4,8 stages=3`; see `launches`."""
    fields = ", ".join(field.name for field in dataclasses.fields(launch))
    text = f"what to try, of {fields}, such as {fields.split(', ')[0]}=16,32"
    parser.add_argument(name, nargs="+", default=[], metavar="FIELD=VALUES", help=text)


def launches(default: _Launch, choices: Sequence[str]) -> Iterator[_Launch]:
    """`default`, a dataclass, with each combination of the values that "field=value,value" gives.

    Raises:
        SystemExit: a field that it does not have.
    """
    values: dict[str, Any] = {}
    for choice in choices:
        field, _, listed = choice.partition("=")
        if not hasattr(default, field):
            raise SystemExit(f"no field {field!r} in {default}")
        values[field] = ast.literal_eval(f"[{listed}]")
    for combination in itertools.product(*values.values()):
        yield dataclasses.replace(default, **dict(zip(values, combination, strict=True)))  # type: ignore[type-var]


def checked_error(name: str, actual: Tensor, expected: Tensor, tolerance: float = 2e-2) -> float:
    """The relative L2 error against float64; ArithmeticError if it is more than rounding."""
    error = float((actual.double() - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise ArithmeticError(f"{name} is off by {error:.2g} (relative L2)")
    return error


def graph_microseconds(calls: Sequence[Callable[[], object]], *, rounds: int = 15) -> float:
    """`microseconds` on the GPU."""
    return microseconds(calls, torch.device("cuda"), rounds=rounds)


def print_kernels(calls: Sequence[Callable[[], object]], *, rows: int = 8) -> None:
    """The kernels that take the most time of some calls."""
    from torch.profiler import ProfilerActivity, profile

    calls[0]()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"    {total / 1e3:9.3f} ms in {sum(event.count for event in events)} kernels and copies")
    for event in events[:rows]:
        of_kernel = event.self_device_time_total
        mean = of_kernel / max(1, event.count)
        print(f"    {of_kernel / 1e3:9.3f} ms {event.count:6} x {mean:9.2f} us {event.key[:90]}")


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
