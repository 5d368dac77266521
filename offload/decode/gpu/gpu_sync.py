"""How the GPU requests attention of the CPU side in the middle of a decode step, and waits for it.

The only file that knows streams, graphs and flags. A decode step is a function that launches work
and calls `request_attention(i)` when request i (see `Mailbox`) is written, and `await_reply(i)`
before it launches what reads the reply. Backends with the same results:

    graph   the step is captured once as one CUDA graph. request_attention and await_reply become
            kernels in which one thread raises, or waits for, a flag in mapped host memory; worker
            threads see the flag, attend and raise the reply. No Python, no host callback, no
            synchronisation in a step.
    stream  the step is launched operation by operation; the calling thread waits for an event per
            request and attends. For debugging, and for steps that cannot be captured.
    inline  no GPU: the calling thread attends where the step awaits the reply.
"""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from cpu_ops.coprocessor import Coprocessor, CoprocessorError
from cpu_ops.mailbox import Mailbox
from cpu_ops.step_rows import DecodeStep
from gpu_ops.flags import await_flag, raise_flag
from offload.system.captures import CAPTURING
from offload.system.interrupts import shielded

Step = Callable[[], None]
NUM_LANES = 2  # of work beside a step's own


def _nothing() -> None:
    """What there is to do beside most steps."""


class SideWork:
    """Work beside the step's own: what `GpuSync.side_stream` gives and `join` takes."""

    def __init__(self) -> None:
        self.done: torch.cuda.Event | None = None


class GpuSyncError(RuntimeError):
    """The GPU did not do its part of a decode step in time."""


class GpuSync(Protocol):
    """Runs decode steps whose requests a coprocessor serves."""

    name: str

    def request_attention(self, request: int) -> None:
        """What the step has launched so far writes request `request`."""

    def await_reply(self, request: int) -> None:
        """What the step launches next reads the reply."""

    def await_begin(self) -> None:
        """What the step launches next writes what the host read of the step before. Once a step."""

    def side_stream(self, lane: int = 0) -> AbstractContextManager[SideWork]:
        """What the step launches inside runs beside what it launches afterwards, and after what it
        launched inside before in the same lane, which is below `NUM_LANES`.
        """

    def join(self, work: SideWork) -> None:
        """What the step launches next comes after `work`; each must be joined before its end."""

    def capture(self, key: Hashable, step: Step) -> bool:
        """Do what running `step` for the first time needs, while no row of it is in use. The CPU
        side is left alone: another thread may run steps of another link.

        Returns whether there was something to do.
        """

    def prepare(self, key: Hashable, step: Step) -> bool:
        """`capture`, and have the CPU side ready."""

    def run(
        self,
        key: Hashable,
        step: Step,
        rows: DecodeStep,
        slots: Sequence[int],
        *,
        is_launched: bool = False,
        ahead: bool = False,
        beside: Step | None = None,
    ) -> None:
        """Run a prepared step to its end.

        Args:
            key: equal keys promise that `step` launches the same work.
            rows: of `DecodeAttention.begin_step`; one row per sequence.
            slots: the row of the static buffers that each of them has.
            is_launched: the run before did so `ahead`.
            ahead: the next run is of the same `step` and `slots`, and finds on the GPU what it
                reads: the GPU may begin with it now. Until then, or until `discard`, nothing may
                wait for the GPU.
            beside: called once the GPU has the step, or before the step where it never has all.

        Raises:
            CoprocessorError: the CPU side missed its deadline, or saw the GPU miss it, or found
                something wrong with the numbers; names the layer. The next step may be run.
            GpuSyncError: the GPU does not come back.
        """

    def discard(self) -> None:
        """Steps that were launched and not waited for, if any, are not wanted: their GPU work ends
        unserved before this returns."""

    def close(self) -> None:
        """End threads, drop graphs."""


class InlineSync:
    """Everything on the calling thread."""

    name = "inline"

    def __init__(self, coprocessor: Coprocessor) -> None:
        self._coprocessor = coprocessor
        self._num_served = 0  # requests of the step

    def request_attention(self, request: int) -> None:
        """Nothing is asynchronous: the request is there."""

    def await_reply(self, request: int) -> None:
        """Those before it are there, too: the attention of other rows may be awaited later."""
        while self._num_served <= request:
            self._coprocessor.serve(self._num_served)
            self._num_served += 1

    def await_begin(self) -> None:
        """It has begun before the step."""

    def side_stream(self, lane: int = 0) -> AbstractContextManager[SideWork]:
        return nullcontext(SideWork())

    def join(self, work: SideWork) -> None:
        """It is done."""

    def capture(self, key: Hashable, step: Step) -> bool:
        """Nothing to prepare."""
        return False

    def prepare(self, key: Hashable, step: Step) -> bool:
        return self.capture(key, step)

    def run(
        self,
        key: Hashable,
        step: Step,
        rows: DecodeStep,
        slots: Sequence[int],
        *,
        is_launched: bool = False,
        ahead: bool = False,
        beside: Step | None = None,
    ) -> None:
        try:
            self._coprocessor.begin_step(rows, slots)
            self._num_served = 0
            self._run_step(key, step, is_launched, ahead, beside or _nothing)
        except BaseException as error:
            self._recover(error)
            raise

    def discard(self) -> None:
        """Nothing is launched before it is asked for."""

    def close(self) -> None:
        self._coprocessor.close()

    def _run_step(
        self, key: Hashable, step: Step, is_launched: bool, ahead: bool, beside: Step
    ) -> None:
        beside()
        step()
        self._synchronize()
        self._coprocessor.end_step()

    def _recover(self, error: BaseException) -> None:
        """Make the next step possible, or raise what says that it is not."""
        with shielded():
            self._synchronize(after_error=True)
            self._coprocessor.abort()
            self._coprocessor.reset()

    def _synchronize(self, *, after_error: bool = False) -> None:
        """Wait for what was launched: here there is nothing."""


class StepStreams:
    """Streams in which steps are captured and run, and no other code launches anything: it would
    become part of what another thread captures there. torch's own come round again after 32.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.main = self._own(device, 0)
        # Before the step's own kernels, where both are ready: it has little to do, and others wait.
        self.lanes = [SideStream(self._own(device, -1)) for _ in range(NUM_LANES)]

    def _own(self, device: torch.device, priority: int) -> torch.cuda.Stream:
        spare = _spare_streams.setdefault((device.index, priority), [])
        try:
            handle = spare.pop()
        except IndexError:
            handle = _new_stream(device, priority)
        weakref.finalize(self, spare.append, handle)
        return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


# Handles by device and priority. They are never destroyed: torch may keep memory by its stream.
_spare_streams: dict[tuple[int, int], list[int]] = {}


def _new_stream(device: torch.device, priority: int) -> int:
    driver, handle, non_blocking = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the device's context is this thread's
        error = driver.cuStreamCreateWithPriority(ctypes.byref(handle), non_blocking, priority)
    if error or handle.value is None:
        raise RuntimeError(f"CUDA gave no stream for {device}: error {error}")
    return handle.value


def capture_graph(stream: torch.cuda.Stream, step: Step) -> torch.cuda.CUDAGraph:
    """Run `step` once in `stream`, to load its kernels, and capture it.

    Unlike `torch.cuda.graph` it does not wait for the rest of the GPU.
    """
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with CAPTURING, _no_collection():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
    return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs of models that are gone are not destroyed by a thread that captures: CUDA would give
    the capture up. Unless somebody else collects, or lets the interpreter do it, meanwhile."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


class SideStream:
    """A stream that forks from the current one, and is joined by it."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[SideWork]:
        work = SideWork()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield work
            work.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            work.done.record(self._stream)

    @staticmethod
    def join(work: SideWork) -> None:
        if work.done is not None:
            torch.cuda.current_stream().wait_event(work.done)

    def synchronize(self) -> None:
        self._stream.synchronize()


class StreamSync(InlineSync):
    """One event per request; the calling thread attends while the GPU does what it can."""

    name = "stream"

    def __init__(self, coprocessor: Coprocessor, lanes: Sequence[SideStream] | None = None) -> None:
        super().__init__(coprocessor)
        self._requested = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._side = lanes or [SideStream() for _ in range(NUM_LANES)]

    def request_attention(self, request: int) -> None:
        self._requested.record()

    def await_reply(self, request: int) -> None:
        self._requested.synchronize()
        super().await_reply(request)

    def side_stream(self, lane: int = 0) -> AbstractContextManager[SideWork]:
        return self._side[lane].fork()

    def join(self, work: SideWork) -> None:
        SideStream.join(work)

    def _synchronize(self, *, after_error: bool = False) -> None:
        torch.cuda.current_stream().synchronize()
        for side in self._side if after_error else ():  # nothing may have joined them yet
            side.synchronize()


class GraphSync(StreamSync):
    """One CUDA graph per key.

    Args:
        deadline_seconds: for a whole step, on both sides.
        streams: where steps are captured and run.
    """

    name = "graph"

    def __init__(
        self,
        coprocessor: Coprocessor,
        mailbox: Mailbox,
        *,
        deadline_seconds: float,
        streams: StepStreams,
    ) -> None:
        super().__init__(coprocessor, streams.lanes)
        self._deadline_seconds = deadline_seconds
        self._requests, self._replies = mailbox.requests[:, :1], mailbox.replies[:, :1]
        # For the run before a capture, in which the GPU replies to itself.
        self._practice = torch.zeros_like(mailbox.replies, pin_memory=True)[:, :1]
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._stream = streams.main
        self._is_warming_up = False
        self._is_in_flight = False  # a step is launched, or about to be, and was not waited for
        self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def request_attention(self, request: int) -> None:
        flags = self._practice if self._is_warming_up else self._requests
        raise_flag(flags[request], self._stream.device)

    def await_reply(self, request: int) -> None:
        flags = self._practice if self._is_warming_up else self._replies
        await_flag(flags[request], self._stream.device)

    def await_begin(self) -> None:
        if not self._is_warming_up:
            self.await_reply(-1)

    def capture(self, key: Hashable, step: Step) -> bool:
        """It is run once before, without the CPU side."""
        is_new = key not in self._graphs
        if is_new:
            self._graphs[key] = self._capture(step)
        return is_new

    def prepare(self, key: Hashable, step: Step) -> bool:
        is_new = super().prepare(key, step)
        if not self._coprocessor.is_started:
            with shielded():  # or a second thread might serve beside one without an owner
                self._coprocessor.start()
        return is_new

    def close(self) -> None:
        super().close()
        self._graphs.clear()

    def discard(self) -> None:
        if self._is_in_flight:
            self._drain()

    def _run_step(
        self, key: Hashable, step: Step, is_launched: bool, ahead: bool, beside: Step
    ) -> None:
        self._is_in_flight = True
        if not is_launched:
            self._replay(key, ahead=ahead)
        if ahead:  # no attention is requested until the CPU has what this step leaves
            self._replay(key, ahead=True)
        beside()
        self._coprocessor.wait()
        self._is_in_flight = ahead

    def _capture(self, step: Step) -> torch.cuda.CUDAGraph:
        def run() -> None:
            self._is_warming_up = not torch.cuda.is_current_stream_capturing()
            try:
                step()
                if not self._is_warming_up:
                    self.request_attention(-1)
                    self.await_reply(-2)
            finally:
                self._is_warming_up = False

        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            graph = capture_graph(self._stream, run)
        except torch.OutOfMemoryError:  # a capture cannot give back what is only kept
            with CAPTURING:
                torch.cuda.empty_cache()
            graph = capture_graph(self._stream, run)
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _replay(self, key: Hashable, *, ahead: bool) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._graphs[key].replay()
            self._finished.record()
        if not ahead:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _is_idle(self) -> bool:
        return bool(self._finished.query())  # type: ignore[no-untyped-call]

    def _recover(self, error: BaseException) -> None:
        with shielded():
            self._drain()
        if self._coprocessor.is_stuck and isinstance(error, CoprocessorError):
            raise CoprocessorError(
                f"{error}; its thread is stuck there, and this model cannot be used any more: "
                "load it again"
            ) from error

    def _drain(self) -> None:
        """Let the GPU run what was launched, with replies that were not computed; start afresh."""
        self._is_in_flight = False
        self._coprocessor.abort()
        # Anew: the error may have come between a launch and its record.
        self._finished.record(self._stream)
        deadline = time.monotonic() + self._deadline_seconds
        while not self._is_idle():
            if time.monotonic() > deadline:
                raise GpuSyncError(
                    f"the GPU did not finish a step within {self._deadline_seconds:g} s after the "
                    "CPU side gave up; this process cannot use it any more"
                )
            time.sleep(0.001)
        if not self._coprocessor.is_stuck:
            self._coprocessor.reset()


def make_gpu_sync(
    backend: str,
    coprocessor: Coprocessor,
    mailbox: Mailbox,
    *,
    deadline_seconds: float,
    streams: StepStreams | None = None,
) -> GpuSync:
    """The `GpuSync` of a backend that `choose_backend` returned.

    Args:
        streams: of the device, for graphs.
    """
    if backend == "inline":
        return InlineSync(coprocessor)
    if backend == "stream":
        return StreamSync(coprocessor)
    assert streams is not None
    return GraphSync(coprocessor, mailbox, deadline_seconds=deadline_seconds, streams=streams)
