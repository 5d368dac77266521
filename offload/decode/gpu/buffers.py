"""What a step on the GPU writes into: its buffers, and the link to the host."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.mailbox import Mailbox
from gpu_ops.launch import _num_multiprocessors
from gpu_ops.paged_attention import num_kv_splits
from offload.decode.gpu.handshake import Handshake
from offload.decode.sampling import TokenChooser
from offload.models import LeanModel


class StepBuffers:
    """The static tensors of steps with up to `num_rows` rows."""

    def __init__(self, model: LeanModel, num_rows: int, dtype: torch.dtype, device: torch.device):
        shape = model.shape
        heads = shape.num_qo_heads * shape.head_dim

        def rows(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        # What changes from step to step: the host writes it, the step's first operation copies it.
        host_state = torch.full((3, num_rows), -1, dtype=torch.int64)
        self.host_state = host_state.pin_memory() if device.type == "cuda" else host_state
        self.state = self.host_state.to(device)
        self.positions, self.rope_positions, self.tokens = self.state
        self.host_tokens = torch.empty_like(self.host_state[2], pin_memory=device.type == "cuda")
        self.chooser = TokenChooser(num_rows, model.lm_head.out_features, device)
        self.hidden = rows(model.shape.hidden_size)
        self.query = rows(heads)
        self.window_out = rows(heads, torch.float32)
        self.window_lse = rows(shape.num_qo_heads, torch.float32)
        self.attended = rows(heads)
        # What the host attended to in layers in which it does nothing.
        self.no_out = rows(heads, torch.float32)
        self.no_lse = rows(shape.num_qo_heads, torch.float32).fill_(float("-inf"))
        num_splits = num_kv_splits(shape.num_kv_heads, _num_multiprocessors(device))
        partial = (num_rows, shape.num_qo_heads, num_splits)
        self.partial_lse = torch.zeros(partial, dtype=torch.float32, device=device)
        self.partial_out = self.partial_lse.new_zeros(*partial, shape.head_dim)


@dataclass(frozen=True)
class HostLink:
    """What a step of `num_rows` rows in `num_parts` parts shares with the host.

    Attributes:
        request_of: number of the request of (layer_idx, first row of the part).
    """

    num_rows: int
    num_parts: int
    mailbox: Mailbox
    coprocessor: Coprocessor
    handshake: Handshake
    request_of: dict[tuple[int, int], int]

    @property
    def parts(self) -> list[slice]:
        """Rows of each part."""
        return part_rows(self.num_rows, self.num_parts)


def part_rows(num_rows: int, num_parts: int) -> list[slice]:
    """Rows 0 .. num_rows cut into parts of about the same size."""
    bounds = [num_rows * i // num_parts for i in range(num_parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]
