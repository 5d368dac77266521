"""Several decode steps without the host, where all KV heads are on the GPU.

Nobody is asked for attention then, and the next token is fed where it was chosen. The host launches
some steps one behind the other and waits once; keys and values go from the kernel into the host
store's pages.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.gpu_sync import capture_graph
from offload.decode.gpu.step import DeviceStep
from offload.decode.sampling import MOST_STEPS


class Bursts:
    """Bursts of the steps of one `DeviceStep`.

    Args:
        stream: where they run; None: there is no GPU.
        captures: each kind of step is a CUDA graph; else it is launched operation by operation.
    """

    def __init__(
        self, step: DeviceStep, stream: torch.cuda.Stream | None, *, captures: bool
    ) -> None:
        self._step, self._stream = step, stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._captures = captures
        num_rows = step.buffers.state.shape[1]
        tokens = torch.empty(MOST_STEPS, num_rows, dtype=torch.int64)
        self._host_tokens = tokens if stream is None else tokens.pin_memory()

    def prepare(self, link: HostLink, *, samples: bool) -> bool:
        """Capture a step for the rows of `link`, with no row in use; whether that was to do."""
        key = self._key(link, samples)
        if not self._captures or key in self._graphs:
            return False
        assert self._stream is not None
        self._step.buffers.state.fill_(-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        run = functools.partial(self._step.run_resident, link, samples=samples)
        graph = capture_graph(self._stream, run)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[key] = graph
        return True

    def run(self, link: HostLink, slots: Sequence[int], num_steps: int, *, samples: bool) -> Tensor:
        """Prepared steps from `buffers.state` on: int64 [len(slots), num_steps], on the host.

        Tokens are -1 from where logits were not finite.
        """
        b, rows = self._step.buffers, self._host_tokens[:, : link.num_rows]
        if self._stream is None:
            for number in range(num_steps):
                self._step.run_resident(link, samples=samples)
                rows[number] = b.tokens[: link.num_rows]
            return rows[:num_steps, slots].T.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number in range(num_steps):
                if self._captures:
                    self._graphs[self._key(link, samples)].replay()
                else:
                    self._step.run_resident(link, samples=samples)
                rows[number].copy_(b.tokens[: link.num_rows], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        self.wait()
        return rows[:num_steps, slots].T.contiguous()

    def _key(self, link: HostLink, samples: bool) -> Hashable:
        return link.num_rows, samples, self._step.after_projection

    def wait(self) -> None:
        """For what was launched."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Drop what was captured."""
        self._graphs.clear()
