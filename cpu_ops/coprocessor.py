"""The CPU as a GPU's coprocessor: attention to the part of the cache that the GPU does not hold.

The GPU attends to the sinks and the recent window; the `Coprocessor` attends to the rest of what
the policy chose, writes a partial result (o, lse) to merge with the GPU's, and keeps the host KV
store and the policy's state up to date. `offload.mailbox` states what passes between the two.

A step is served in one of two ways. Synchronously, by whoever calls:

    coprocessor.begin_step(step, slots)
    for i in range(len(requests)):
        ...  # the GPU's part up to request i: rows in the mailbox
        coprocessor.serve(i)
        ...  # merge
    coprocessor.end_step()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native

if TYPE_CHECKING:
    from offload.attention import DecodeAttention, DecodeStep
    from offload.mailbox import Mailbox

Request = tuple[int, int, int]


class Coprocessor:
    """Serves the requests of decode steps.

    Args:
        attention: what to attend to; its store receives the keys and values.
        mailbox: shared with the GPU.
        requests: (layer_idx, first_row, num_rows) of each request of a step, in the order in which
            the GPU raises them. Layers of a row must not descend. In a layer that is dense under
            the policy all tokens outside of the window are attended.
        sink_tokens, recent_tokens: the window on the GPU; None takes the policy's. They must be the
            policy's where it selects, and must be given where it does not.

    Raises:
        ValueError: a mailbox that does not fit the attention, requests outside of it, a window that
            is not the policy's.
    """

    def __init__(
        self,
        attention: DecodeAttention,
        mailbox: Mailbox,
        requests: Sequence[Request],
        *,
        sink_tokens: int | None = None,
        recent_tokens: int | None = None,
    ) -> None:
        _check_mailbox(attention, mailbox)
        self.requests = tuple((int(a), int(b), int(c)) for a, b, c in requests)
        _check_requests(self.requests, mailbox)
        self.sink_tokens = _window("sink_tokens", sink_tokens, attention)
        self.recent_tokens = _window("recent_tokens", recent_tokens, attention)
        self.attention = attention
        self.mailbox = mailbox
        self._step: tuple[DecodeStep, Tensor | None] | None = None
        self._next = 0
        self._native = _native.Coprocessor(
            attention.native,
            [x.data_ptr() for x in mailbox.tensors],
            mailbox.max_rows,
            [list(request) for request in self.requests],
            attention.sparse_layers.tolist(),
            self.sink_tokens,
            self.recent_tokens,
            mailbox,
        )

    def begin_step(self, step: DecodeStep, slots: Sequence[int]) -> None:
        """Open a step.

        Args:
            step: of `attention.begin_step`; one row per sequence.
            slots: the mailbox row of each of its rows.
        """
        places = _check_slots(step, slots, self.mailbox.max_rows)
        if self._step is not None:
            raise ValueError("a step is open; end it with end_step() or abort()")
        queries = self._query_log(step)
        self._native.begin_step(
            places,
            *step.of(slice(None)),
            0 if queries is None else queries.data_ptr(),
            (step, queries),
        )
        self._step = (step, queries)
        self._next = 0

    def serve(self, request: int) -> None:
        """Serve one request of the open step on this thread; requests come in order.

        Raises:
            RuntimeError: NaN or inf in the query or the cache; names the layer.
        """
        if self._step is None:
            raise ValueError(f"request {request} comes before begin_step()")
        if request != self._next or request >= len(self.requests):
            raise ValueError(
                f"expected request {self._next} of {len(self.requests)}, got {request}"
            )
        self._native.serve(request)
        self._next += 1

    def end_step(self) -> None:
        """Close the open step: the keys and values of all its layers are in the mailbox."""
        if self._step is None or self._next != len(self.requests):
            raise ValueError(
                f"end_step() comes after {self._next} of {len(self.requests)} requests"
                if self._step is not None
                else "end_step() comes before begin_step()"
            )
        self._native.end_step()
        step, queries = self._step
        self._step = None
        self._record_queries(step, queries)

    def _query_log(self, step: DecodeStep) -> Tensor | None:
        """Room for the step's queries where the policy will build its state from them."""
        if not self.attention.keeps_queries(step):
            return None
        return torch.empty(
            self.mailbox.num_layers,
            len(step.seqs),
            self.mailbox.query.shape[1],
            dtype=self.mailbox.query.dtype,
        )

    def _record_queries(self, step: DecodeStep, queries: Tensor | None) -> None:
        if queries is None:
            return
        for layer_idx in sorted({layer_idx for layer_idx, _, _ in self.requests}):
            if self.attention.sparse_layers[layer_idx]:
                self.attention.record_step_queries(layer_idx, step, queries[layer_idx])


def _check_mailbox(attention: DecodeAttention, mailbox: Mailbox) -> None:
    store = attention.store
    rows, columns = mailbox.max_rows, attention.num_qo_heads * store.head_dim
    flags = mailbox.requests.shape[1] if mailbox.requests.dim() == 2 else 0
    expected: dict[str, tuple[torch.dtype, list[int]]] = {
        "query": (store.dtype, [rows, columns]),
        "kv": (store.dtype, [store.num_layers, rows, 2, store.num_kv_heads, store.head_dim]),
        "output": (torch.float32, [rows, columns]),
        "lse": (torch.float32, [rows, attention.num_qo_heads]),
        "requests": (torch.int32, [mailbox.num_requests + 1, flags]),
        "replies": (torch.int32, [mailbox.num_requests, flags]),
    }
    for (name, (dtype, shape)), x in zip(expected.items(), mailbox.tensors, strict=True):
        if x.dtype != dtype or list(x.shape) != shape or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(
                f"mailbox.{name} must be {dtype} {shape}, contiguous, on the CPU,"
                f" got {x.dtype} {list(x.shape)} on {x.device}"
            )
    if flags != _native.FLAG_STRIDE:
        raise ValueError(f"mailbox flags must be {_native.FLAG_STRIDE} int32 apart, got {flags}")


def _check_requests(requests: Sequence[Request], mailbox: Mailbox) -> None:
    if len(requests) != mailbox.num_requests or not requests:
        raise ValueError(
            f"the mailbox has flags for {mailbox.num_requests} requests, got {len(requests)}"
        )
    layer_of = np.full(mailbox.max_rows, -1)
    for i, (layer_idx, first_row, num_rows) in enumerate(requests):
        if not 0 <= layer_idx < mailbox.num_layers:
            raise ValueError(
                f"request {i} names layer {layer_idx}, but there are {mailbox.num_layers} layers"
            )
        if first_row < 0 or num_rows < 1 or first_row + num_rows > mailbox.max_rows:
            raise ValueError(
                f"request {i} names rows {first_row} to {first_row + num_rows}, but the mailbox has"
                f" {mailbox.max_rows}"
            )
        rows = slice(first_row, first_row + num_rows)
        if int(layer_of[rows].max()) >= layer_idx:
            raise ValueError(
                f"request {i} asks for layer {layer_idx} after layer {int(layer_of[rows].max())}"
                " of the same rows"
            )
        layer_of[rows] = layer_idx


def _window(name: str, given: int | None, attention: DecodeAttention) -> int:
    policy = attention.policy
    if not policy.selects:
        if given is None:
            raise ValueError(
                f"policy {policy.name!r} has no {name}: give those of the GPU's window"
            )
        if given < 0:
            raise ValueError(f"{name} must not be negative, got {given}")
        return given
    own: int = getattr(policy, name)
    if given is not None and given != own:
        raise ValueError(f"{name} must be the policy's, {own}, got {given}")
    return own


def _check_slots(step: DecodeStep, slots: Sequence[int], max_rows: int) -> npt.NDArray[np.int64]:
    places = np.asarray(slots, np.int64)
    if len(places) != len(step.seqs):
        raise ValueError(f"expected one slot per row, got {len(places)} for {len(step.seqs)}")
    if len(np.unique(places)) != len(places):
        raise ValueError(f"slots must be distinct, got {places.tolist()}")
    if int(places.min()) < 0 or int(places.max()) >= max_rows:
        raise ValueError(f"slots must lie in [0, {max_rows}), got {places.tolist()}")
    if len(set(step.seqs)) != len(step.seqs):
        raise ValueError(f"a step has one row per sequence, got sequences {list(step.seqs)}")
    return places
