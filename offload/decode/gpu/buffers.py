"""What a step on the GPU writes into: its buffers, and the link to the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.mailbox import Mailbox
from gpu_ops.launch import _num_multiprocessors
from gpu_ops.layout import Layout, allocate
from gpu_ops.paged_attention import num_kv_splits
from offload.decode.gpu.gpu_sync import GpuSync
from offload.decode.gpu.hot_experts import HotExperts
from offload.decode.sampling import Draws, TokenChooser
from offload.models import LeanModel, ModelShape

# Tokens that scores have room for at least.
_MIN_SCORE_TOKENS = 4096


class StepBuffers:
    """The static tensors of steps with up to `num_rows` rows.

    Args:
        num_recurrent: layers that keep a state of each sequence, at the addresses in `pointers`:
            int64 [num_recurrent, 2, num_rows], as `GpuDeltaRule` takes them.
    """

    def __init__(
        self,
        model: LeanModel,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        num_recurrent: int = 0,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        shape = model.shape
        # What changes from step to step: the host writes it, or the step before.
        host_state = torch.full((3, num_rows), -1, dtype=torch.int64)
        self.host_state = host_state.pin_memory() if device.type == "cuda" else host_state
        self.host_tokens = torch.empty_like(self.host_state[2], pin_memory=device.type == "cuda")
        self._host_pointers = torch.zeros(
            num_recurrent, 2, num_rows, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self.pointers = self._host_pointers.to(device, copy=True)
        self.chooser = TokenChooser(num_rows, shape.vocab_size, device)
        layout = self.layout(shape, num_rows, dtype, _num_multiprocessors(device), page_dtype)
        buffers = allocate(layout, device)
        self.state = buffers["state"].fill_(-1)
        self.positions, self.rope_positions, self.tokens = self.state
        self.hidden = buffers["hidden"]
        self.queries = buffers["queries"]  # rotated, of every layer: to be read after a step, too
        # Of all that the GPU attends to in a layer (`AttentionSource`).
        self.device_out, self.device_lse = buffers["device_out"], buffers["device_lse"]
        self.attended = buffers["attended"]
        self.partial_out, self.partial_lse = buffers["partial_out"], buffers["partial_lse"]

    def write_state(
        self,
        slots: Sequence[int],
        kv_lens: Sequence[int],
        position_ids: Tensor,
        tokens: Tensor | None = None,
        draws: Draws | None = None,
    ) -> None:
        """What a step to `kv_lens` tokens of the rows `slots` begins with; no other is in use."""
        rows = np.zeros((3, len(slots)), np.int64)
        rows[0], rows[1] = kv_lens, position_ids.numpy()
        rows[0] -= 1
        if tokens is not None:
            rows[2] = tokens.numpy()
        state = self.host_state.numpy()
        state.fill(-1)
        state[:, slots] = rows
        self.state.copy_(self.host_state, non_blocking=True)
        if draws is not None:
            self.chooser.use(draws, slots, rows[0].tolist())

    def write_pointers(self, slots: Sequence[int], pointers: npt.NDArray[np.int64]) -> None:
        """Where the states of the rows `slots` are, [num_recurrent, 2, len(slots)]."""
        host = self._host_pointers.numpy()
        host.fill(0)
        host[..., slots] = pointers
        self.pointers.copy_(self._host_pointers, non_blocking=True)

    @staticmethod
    def layout(
        shape: ModelShape,
        num_rows: int,
        dtype: torch.dtype,
        num_multiprocessors: int,
        page_dtype: torch.dtype | None = None,
    ) -> Layout:
        """Layout of what is on the device, beside the `TokenChooser`'s."""
        row = (num_rows, shape.num_qo_heads * shape.head_dim)
        lse = (num_rows, shape.num_qo_heads)
        partial = (*lse, num_kv_splits(shape.num_kv_heads, num_multiprocessors, page_dtype))
        return {
            "state": ((3, num_rows), torch.int64),
            "hidden": ((num_rows, shape.hidden_size), dtype),
            "queries": ((shape.num_layers, *row), dtype),
            "device_out": (row, torch.float32),
            "device_lse": (lse, torch.float32),
            "attended": (row, dtype),
            "partial_out": ((*partial, shape.head_dim), torch.float32),
            "partial_lse": (partial, torch.float32),
        }


class AttentionSource(NamedTuple):
    """Tokens of some heads that the GPU can attend to.

    Attributes:
        kind: its name in traces.
        layers: in which it has heads.
        attend: of a layer, rows and buffers. Where the host attends to none of the layer's heads,
            `attended` of its heads becomes the whole. Else `device_out` and `device_lse` of its
            heads become the softmax over its tokens and all that they were of before, so that a
            head may be split over several sources; a source that has all of a head's tokens, or
            comes first, writes them anew. Other heads stay as they are.
    """

    kind: str
    layers: Container[int]
    attend: Callable[[int, slice, StepBuffers], None]


@dataclass(frozen=True)
class HostLink:
    """What a step of `num_rows` rows in `num_micro_batches` shares with the host.

    Attributes:
        request_of: number of the request of attention of (layer_idx, first row of the part).
        experts_of: likewise, of experts on the host, by the layer's number in the stock model.
    """

    num_rows: int
    num_micro_batches: int
    mailbox: Mailbox
    coprocessor: Coprocessor
    gpu_sync: GpuSync
    request_of: dict[tuple[int, int], int]
    experts_of: dict[tuple[int, int], int]

    @property
    def micro_batches(self) -> list[slice]:
        """Rows of each part."""
        return micro_batch_rows(self.num_rows, self.num_micro_batches)

    def attend(self, layer_idx: int, rows: slice) -> tuple[Tensor, Tensor]:
        """(out, lse) over the tokens that the host attends to, when it has replied."""
        self.gpu_sync.await_reply(self.request_of[layer_idx, rows.start])
        return self.mailbox.output[rows], self.mailbox.lse[rows]

    def run_experts(
        self, number: int, rows: slice, normed: Tensor, hot: HotExperts, positions: Tensor
    ) -> None:
        """The sum of a layer's experts of `normed` [n, hidden_size], overwritten: of those that the
        host runs, and of what the device runs meanwhile; positions [n] of rows in use, or -1."""
        request, mailbox = self.experts_of[number, rows.start], self.mailbox
        of_host = mailbox.experts[rows], mailbox.weights[rows]
        chosen = hot.choose(number, normed, positions, *of_host)
        mailbox.normed[rows].copy_(normed, non_blocking=True)
        self.gpu_sync.request_attention(request)
        of_device = hot.run(number, normed, *chosen)
        self.gpu_sync.await_reply(request)
        normed.copy_(mailbox.summed[rows], non_blocking=True)
        if of_device is not None:
            normed += of_device


def micro_batch_rows(num_rows: int, num_micro_batches: int) -> list[slice]:
    """Rows 0 .. num_rows cut into micro-batches of about the same size."""
    bounds = [num_rows * i // num_micro_batches for i in range(num_micro_batches + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def num_slots(batch_size: int) -> int:
    """Rows that a step for `batch_size` sequences is made for: a power of two."""
    return 1 << (batch_size - 1).bit_length()


def step_tokens(max_context: int, kv_len: int, page_tokens: int, *, grows: bool) -> int:
    """Tokens of a sequence that a step at `kv_len` tokens is made for, in whole pages.

    Args:
        grows: scores are kept; their room grows with the context, rarely. Otherwise a step is made
            for all tokens that the model can have.
    """
    max_tokens = max_context
    if grows:
        max_tokens = min(max_tokens, max(_MIN_SCORE_TOKENS, 1 << (kv_len - 1).bit_length()))
    return -(-max_tokens // page_tokens) * page_tokens
