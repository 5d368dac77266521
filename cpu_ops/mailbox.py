"""The mailbox: host memory through which a GPU and the CPU work on one decode step.

Layout (stated here, nowhere else; `cpp/coprocessor/step_server.h` has the C++ side's view of it).
Rows are slots, one sequence each; all tensors are contiguous.

    query     dtype   [max_rows, num_qo_heads * head_dim]         rotated; of one layer at a time
    kv        dtype   [num_layers, max_rows, 2, num_kv_heads, head_dim]
                                                                  K (rotated), then V, of the step
    output    float32 [max_rows, num_qo_heads * head_dim]         what the CPU attended to
    lse       float32 [max_rows, num_qo_heads]                    natural log
    requests  int32   [num_requests + 1, 16]
    replies   int32   [num_requests, 16]
    selection int32   [max_rows, selection_units, selection_tokens]   what the GPU's heads last
    counts    int32   [max_rows, selection_units]                     published, and how many tokens

An lse of -inf: the CPU attended to nothing. An lse of +inf: the output is the whole answer, what
others attended to does not count.

A flag is element [i, 0], alone in its cache line. The GPU sets `requests[i]` to 1 when the rows of
request i are in `query` and `kv`; the CPU resets it when it has seen it. The CPU sets `replies[i]`
to 1 when `output` and `lse` are there; the GPU waits for that and resets it. The last of `requests`
says that all layers of the step are in `kv`.

A selection unit is a KV head, or all of them where they share a selection; there are none where no
head on the GPU publishes. What layer l publishes is there before the next request is raised. A
count of -1: the numbers were not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

FLAG_STRIDE = 16  # int32 per flag: one cache line


@dataclass(frozen=True)
class Mailbox:
    """Tensors of the layout above, on the CPU; pinned where a GPU takes part."""

    query: Tensor
    kv: Tensor
    output: Tensor
    lse: Tensor
    requests: Tensor
    replies: Tensor
    selection: Tensor
    counts: Tensor

    @classmethod
    def allocate(
        cls,
        *,
        num_requests: int,
        max_rows: int,
        num_layers: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pinned: bool,
        selection_units: int = 0,
        selection_tokens: int = 0,
    ) -> Mailbox:
        """A mailbox with all flags down, in which the CPU has attended to nothing yet.

        Args:
            num_requests: requests of one step; 0 if the GPU attends to everything.
            dtype: of queries, keys and values: the KV store's.
            pinned: in memory that CUDA kernels can read and write (needs a GPU).
        """
        if num_requests < 0:
            raise ValueError(f"num_requests must not be negative, got {num_requests}")
        sizes = {
            "max_rows": max_rows,
            "num_layers": num_layers,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

        def zeros(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=of, pin_memory=pinned)

        mailbox = cls(
            query=zeros(max_rows, num_qo_heads * head_dim, of=dtype),
            kv=zeros(num_layers, max_rows, 2, num_kv_heads, head_dim, of=dtype),
            output=zeros(max_rows, num_qo_heads * head_dim),
            lse=zeros(max_rows, num_qo_heads),
            requests=zeros(num_requests + 1, FLAG_STRIDE, of=torch.int32),
            replies=zeros(num_requests, FLAG_STRIDE, of=torch.int32),
            selection=zeros(max_rows, selection_units, selection_tokens, of=torch.int32),
            counts=zeros(max_rows, selection_units, of=torch.int32),
        )
        mailbox.lse.fill_(float("-inf"))
        return mailbox

    @property
    def max_rows(self) -> int:
        return int(self.query.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.kv.shape[0])

    @property
    def num_requests(self) -> int:
        return int(self.replies.shape[0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, in the order of their declaration."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def host_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors)
