"""The mailbox: host memory through which a GPU and the CPU work on one decode step.

Layout (stated here, nowhere else; `cpp/coprocessor/step_server.h` has the C++ side's view of it).
Rows are slots, one sequence each; all tensors are contiguous.

    query     dtype   [max_rows, num_qo_heads * head_dim]         rotated; of one layer at a time
    kv        dtype   [num_layers, max_rows, 2, num_kv_heads, head_dim]
                                                                  K (rotated), then V, of the step
    output    float32 [max_rows, num_qo_heads * head_dim]         what the CPU attended to
    lse       float32 [max_rows, num_qo_heads]                    natural log
    requests  int32   [num_requests + 1, 16]
    replies   int32   [num_requests + 2, 16]
    selection int32   [max_rows, selection_units, selection_tokens]   what the GPU's heads last
    counts    int32   [max_rows, selection_units]                     published, and how many tokens
    predicted dtype   [2, max_rows, num_qo_heads * head_dim]      rotated; of layer l in [l % 2]
    fetches   int32   [2, max_rows, num_kv_heads, fetch_tokens, 2]  (token, place) of rows to fetch
    hot_counts int32  [2, max_rows, num_kv_heads, 2]              of a head: rows to fetch, hot rows
    rest_counts int32 [2, max_rows, num_kv_heads, clusters + 1]   tokens of each cluster that are
                                                                  neither hot nor in the window;
                                                                  which cluster has grown, or -1
    rest_means float32 [2, max_rows, num_kv_heads, 2, head_dim]   that one's mean key and value
    normed    dtype   [max_rows, hidden_size]                     what a layer's experts read
    summed    dtype   [max_rows, hidden_size]                     their sum
    experts   int64   [max_rows, experts_per_token]               which the GPU's router chose, of
                                                                  those that the GPU runs itself
                                                                  a number that is no expert's
    weights   float32 [max_rows, experts_per_token]               of these

An lse of -inf: the CPU attended to nothing. An lse of +inf: the output is the whole answer, what
others attended to does not count.

A flag is element [i, 0], alone in its cache line. The GPU sets `requests[i]` to 1 when the rows of
request i are in `query` and `kv`; the CPU resets it when it has seen it. The CPU sets `replies[i]`
to 1 when `output` and `lse` are there; the GPU waits for that and resets it. The last of `requests`
says that all layers of the step are in `kv`. Replies [num_requests] and [num_requests + 1] say that
the CPU has taken these, and the GPU may begin with the next step; and that the CPU has begun with
the step, so that nothing reads any more what the GPU left of the step before.

A layer with hot rows is asked for a layer ahead: its request says that its rows are in `predicted`,
and the keys and values of the layers above in `kv`. The reply says that `fetches` and `hot_counts`
are there; nothing of that layer is in `output`. Without such layers the three have no elements.

A selection unit is a KV head, or all of them where they share a selection; there are none where no
head on the GPU publishes. What layer l publishes is there before the next request is raised.
Candidates that the GPU lists by codes of keys are in `selection` and `counts` instead, those of
layer l before its own request is raised. A count of -1: the numbers were not finite.

`rest_counts` and `rest_means` have no elements where nothing is estimated of the tokens that are
not hot; the last four have none where no layer's experts are on the CPU. Else these have a request
of their own, behind those of the layer's attention: its rows are in `normed`, `experts` and
`weights`, and its reply says that `summed` is there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cpu_ops import _native

FLAG_STRIDE = _native.FLAG_STRIDE  # 16: int32 per flag, one cache line


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
    predicted: Tensor
    fetches: Tensor
    hot_counts: Tensor
    rest_counts: Tensor
    rest_means: Tensor
    normed: Tensor
    summed: Tensor
    experts: Tensor
    weights: Tensor

    @staticmethod
    def layout(
        *,
        num_requests: int,
        max_rows: int,
        num_layers: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        selection_units: int = 0,
        selection_tokens: int = 0,
        fetch_tokens: int = 0,
        rest_clusters: int = 0,
        hidden_size: int = 0,
        experts_per_token: int = 0,
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of each tensor.

        Args:
            num_requests: requests of one step; 0 if the GPU attends to everything.
            dtype: of queries, keys and values: the KV store's.
            fetch_tokens: that the GPU fetches of a KV head at most; 0: no layer has hot rows.
            rest_clusters: of a KV head with hot rows; 0: what is not hot is not estimated.
            hidden_size: of what experts on the CPU read; 0: there are none.
            experts_per_token: that the router chooses; likewise.
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
        row = (max_rows, num_qo_heads * head_dim)
        rest_clusters = rest_clusters if fetch_tokens else 0
        estimating = num_kv_heads if rest_clusters else 0
        return {
            "query": (row, dtype),
            "kv": ((num_layers, max_rows, 2, num_kv_heads, head_dim), dtype),
            "output": (row, torch.float32),
            "lse": ((max_rows, num_qo_heads), torch.float32),
            "requests": ((num_requests + 1, FLAG_STRIDE), torch.int32),
            "replies": ((num_requests + 2, FLAG_STRIDE), torch.int32),
            "selection": ((max_rows, selection_units, selection_tokens), torch.int32),
            "counts": ((max_rows, selection_units), torch.int32),
            "predicted": ((2, *row) if fetch_tokens else (2, max_rows, 0), dtype),
            "fetches": ((2, max_rows, num_kv_heads, fetch_tokens, 2), torch.int32),
            "hot_counts": ((2, max_rows, num_kv_heads if fetch_tokens else 0, 2), torch.int32),
            "rest_counts": ((2, max_rows, estimating, rest_clusters + 1), torch.int32),
            "rest_means": ((2, max_rows, estimating, 2, head_dim), torch.float32),
            "normed": ((max_rows, hidden_size), dtype),
            "summed": ((max_rows, hidden_size), dtype),
            "experts": ((max_rows, experts_per_token), torch.int64),
            "weights": ((max_rows, experts_per_token), torch.float32),
        }

    @classmethod
    def allocate(cls, *, pinned: bool, **sizes: Any) -> Mailbox:
        """A mailbox with all flags down, in which the CPU has attended to nothing yet.

        Args:
            pinned: in memory that CUDA kernels can read and write (needs a GPU).
            sizes: of `layout`.
        """
        tensors = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
            for name, (shape, dtype) in cls.layout(**sizes).items()
        }
        tensors["lse"].fill_(float("-inf"))
        return cls(**tensors)

    @property
    def max_rows(self) -> int:
        return int(self.query.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.kv.shape[0])

    @property
    def num_requests(self) -> int:
        return int(self.requests.shape[0]) - 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, in the order of their declaration."""
        return tuple(getattr(self, field.name) for field in fields(self))
