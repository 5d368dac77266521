"""The graph backend without a GPU: the step runs on CPU tensors, on a thread that raises flags."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.mailbox import Mailbox
from cpu_ops.step_rows import DecodeStep
from offload.decode.gpu.gpu_sync import GraphSync, SideWork, Step


class FlagHandshake(GraphSync):
    """`GraphSync` whose graphs are threads. Waiting, errors and recovery are its own."""

    name = "flags"

    def __init__(
        self, coprocessor: Coprocessor, mailbox: Mailbox, *, deadline_seconds: float
    ) -> None:
        self._coprocessor = coprocessor
        self._deadline_seconds = deadline_seconds
        self._requests = [ctypes.c_int32.from_address(row.data_ptr()) for row in mailbox.requests]
        self._replies = [ctypes.c_int32.from_address(row.data_ptr()) for row in mailbox.replies]
        self._graphs: dict[Hashable, Step] = {}
        self._gpu = threading.Thread()
        self._finished: Any = _NoEvent()
        self._stream = None
        self._is_in_flight = False

    def request_attention(self, request: int) -> None:
        self._requests[request].value = 1

    def await_reply(self, request: int) -> None:
        while self._replies[request].value != 1:
            time.sleep(0)
        self._replies[request].value = 0

    def await_begin(self) -> None:
        self.await_reply(-1)

    @contextmanager
    def side_stream(self, lane: int = 0) -> Iterator[SideWork]:
        yield SideWork()

    def join(self, work: SideWork) -> None:
        """It is done."""

    def capture(self, key: Hashable, step: Step) -> bool:
        is_new = key not in self._graphs
        self._graphs[key] = step
        return is_new

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
        how: dict[str, Any] = {"is_launched": is_launched, "ahead": ahead, "beside": beside}
        super().run(key, step, rows, slots, **how)
        if not ahead:
            # A GPU holds no locks of this process after its last flag, which a step that was not
            # served never raises: that must fail a test.
            self._gpu.join(self._deadline_seconds)

    def _replay(self, key: Hashable, *, ahead: bool) -> None:
        step, before = self._graphs[key], self._gpu

        @torch.no_grad()
        def run() -> None:
            if before.ident is not None:
                before.join()
            step()
            self.request_attention(-1)
            self.await_reply(-2)

        self._gpu = threading.Thread(target=run, daemon=True)
        self._gpu.start()

    def _is_idle(self) -> bool:
        return not self._gpu.is_alive()


class _NoEvent:
    def record(self, stream: Any) -> None:
        """Threads need none."""


def make_flag_handshake(
    backend: str,
    coprocessor: Coprocessor,
    mailbox: Mailbox,
    *,
    deadline_seconds: float,
    streams: object = None,
) -> FlagHandshake:
    return FlagHandshake(coprocessor, mailbox, deadline_seconds=deadline_seconds)
