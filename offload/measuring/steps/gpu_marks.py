"""Times on the GPU, taken by kernels of one instruction that a CUDA graph captures like any other.

CUDA events inside a graph cannot be read one by one. A mark stores the GPU's own nanosecond counter
in a fixed place; the time between two marks of a stream belongs to what was launched between them.
Each costs about as much as an empty kernel, so marks are for traces, not for the times reported.
On the CPU a mark is a reading of the monotonic clock.
"""

from __future__ import annotations

import time

import torch

from offload.measuring.steps.step_timeline import Interval

try:
    import triton
    from triton.language.extra.cuda import globaltimer
except ImportError:  # a build of torch without it
    triton = None

START = "start"

if triton is not None:
    import triton.language as tl

    @triton.jit(do_not_specialize=["slot"])  # type: ignore[untyped-decorator]
    def _mark_kernel(times: tl.tensor, slot: tl.tensor) -> None:
        tl.store(times + slot, globaltimer())


class GpuMarks:
    """The marks of one decode step, in the order in which the step sets them.

    Call `mark` with the kind and layer of what has been launched since the mark before; the first
    one is `START`. A captured step sets the same marks in every replay, so capture it once, then
    after each replay and a synchronisation `read`.

    Args:
        capacity: most marks in a step.
    """

    def __init__(self, device: torch.device, capacity: int = 4096) -> None:
        if device.type == "cuda" and triton is None:
            raise NotImplementedError("times on the GPU need triton, which is not installed")
        self._times = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._names: list[tuple[str, int]] = []

    def mark(self, kind: str, layer: int = -1) -> None:
        """Everything launched since the last mark was of this kind."""
        slot = len(self._names)
        if slot == len(self._times):
            raise ValueError(f"a step sets at most {slot} marks; raise capacity")
        self._names.append((kind, layer))
        if self._times.is_cuda:
            _mark_kernel[(1,)](self._times, slot, num_warps=1)
        else:
            self._times[slot] = time.monotonic_ns()

    def clear(self) -> None:
        """The next mark is the first of a step that is captured, or run, anew."""
        self._names.clear()

    def read(self) -> list[Interval]:
        """What the last step did, by the GPU's clock. Waits for the device."""
        times = self._times[: len(self._names)].tolist()
        return [
            Interval(kind, layer, before, after)
            for (kind, layer), before, after in zip(
                self._names[1:], times[:-1], times[1:], strict=True
            )
            if kind != START
        ]
