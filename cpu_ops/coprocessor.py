"""The CPU as a GPU's coprocessor: attention to the part of the cache that the GPU does not hold.

It also runs the experts of layers whose weights the GPU does not hold.

The GPU attends to the sinks and the recent window; the `Coprocessor` attends to the rest of what
was selected, writes a partial result (o, lse) to merge with the GPU's, and keeps the pages on the
host and the selection's arrays up to date. `cpu_ops.mailbox` states what passes between the two.

A step is served in one of two ways. Synchronously, by whoever calls:

    coprocessor.begin_step(step, slots)
    for i in range(len(requests)):
        ...  # the GPU's part up to request i: rows in the mailbox
        coprocessor.serve(i)
        ...  # merge
    coprocessor.end_step()

Or by a thread of its own that the mailbox's flags drive, while the host runs ahead:

    coprocessor.start()
    coprocessor.begin_step(step, slots)
    ...  # launch the GPU's step: it raises requests[i] and waits for replies[i]
    coprocessor.wait()

When either side fails, `wait` raises. Then: `abort()`, which lets the GPU run to its end without
answers; synchronise with the GPU; `reset()`. What the steps since the last `wait` wrote to the
cache and to policies is undefined after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.attention import NativeAttention
from cpu_ops.mailbox import FLAG_STRIDE, Mailbox
from cpu_ops.native import check_tensor
from cpu_ops.routed_linear import RoutedMlp
from cpu_ops.step_rows import DecodeStep


class Request(NamedTuple):
    """Rows [first_row, first_row + num_rows) of the mailbox in one layer: of its attention, or its
    experts."""

    layer_idx: int
    first_row: int
    num_rows: int
    of_experts: bool = False


OnDone = Callable[[DecodeStep, Mapping[int, Tensor]], None]
# What must live until a step is done; its queries are [num_layers, n, num_qo_heads * head_dim].
_KeptStep = tuple[DecodeStep, Tensor | None, NativeAttention]


class CoprocessorError(RuntimeError):
    """The CPU or the GPU failed in the middle of a step, or did not get on in time."""


class Coprocessor:
    """Serves the requests of decode steps. Not thread-safe.

    Args:
        attention: what to attend to; its pages receive the keys and values.
        mailbox: shared with the GPU.
        requests: each request of a step, a `Request` or its first three elements, in the order in
            which the GPU raises them. Layers of a row's attention ascend. In a layer that is not
            sparse all tokens outside of the window are attended.
        sink_tokens, recent_tokens: the window on the GPU: the attention's, if it selects.
        deadline_seconds: how long one side waits for the other before it gives up.
        device_heads: bool [num_layers, num_kv_heads], heads to which the GPU attends by itself; of
            those of `publishing_heads` it puts the selection into the mailbox, before the next
            request. None: no head, as far as there are requests.
        listed_heads: likewise, of others: the GPU puts candidates into the mailbox before the
            request of the layer, in place of those that the policy would propose.
        hot_heads: likewise: the GPU attends to rows that are chosen a layer ahead. The CPU attends
            to no head of such a layer, and each unit of the policy is a KV head.
        hot_rows: what the GPU holds of them, by slots of at least `mailbox.max_rows`.
        experts: at the `layer_idx` of their requests, which may count layers that do not attend;
            None: at others, and at all by default.
        on_done: called when a step that `keeps_queries` is done, by whoever closes it or waits for
            it: with the step and the queries [n, num_qo_heads * head_dim] of each sparse layer that
            had a request.

    Attributes:
        is_stuck: its thread did not come back from a step when it was aborted: the object and what
            it attends to, the worker pool included, are of no more use.

    Raises:
        ValueError: a mailbox that does not fit the attention, requests outside of it, a window that
            is not that of its selections.
    """

    def __init__(
        self,
        attention: NativeAttention,
        mailbox: Mailbox,
        requests: Sequence[Request | tuple[int, int, int]],
        *,
        sink_tokens: int,
        recent_tokens: int,
        deadline_seconds: float = 5.0,
        device_heads: npt.NDArray[np.bool_] | None = None,
        publishing_heads: npt.NDArray[np.bool_] | None = None,
        listed_heads: npt.NDArray[np.bool_] | None = None,
        hot_heads: npt.NDArray[np.bool_] | None = None,
        hot_rows: _native.HotRows | None = None,
        experts: Sequence[RoutedMlp | None] = (),
        on_done: OnDone | None = None,
    ) -> None:
        _check_mailbox(attention, mailbox)
        self.requests = tuple(Request(*request) for request in requests)
        _check_requests([x for x in self.requests if not x.of_experts], mailbox)
        if len(self.requests) != mailbox.num_requests:
            raise ValueError(
                f"the mailbox has flags for {mailbox.num_requests} requests, got {len(requests)}"
            )
        _check_experts(self.requests, experts, mailbox)
        if not 0.0 < deadline_seconds < 1e6:
            raise ValueError(f"deadline_seconds must be above 0 and finite, got {deadline_seconds}")
        _check_window(sink_tokens, recent_tokens, attention.window)
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.attention = attention
        self.mailbox = mailbox
        self.deadline_seconds = deadline_seconds
        self._on_done, self._max_rows = on_done, mailbox.max_rows
        self._asked = [
            layer_idx
            for layer_idx in sorted({x.layer_idx for x in self.requests if not x.of_experts})
            if attention.sparse_layers[layer_idx]
        ]
        self._native = _native.Coprocessor(
            attention.native,
            [x.data_ptr() for x in mailbox.tensors],
            mailbox.max_rows,
            mailbox.selection.shape[1],
            mailbox.selection.shape[2],
            mailbox.fetches.shape[3],
            [[int(x) for x in request] for request in self.requests],
            attention.sparse_layers.tolist(),
            sink_tokens,
            recent_tokens,
            _head_flags("device_heads", device_heads, attention),
            _check_publishing("publishing_heads", publishing_heads, attention, mailbox),
            _check_listed(listed_heads, publishing_heads, attention, mailbox),
            _check_hot(hot_heads, device_heads, hot_rows, attention, mailbox),
            hot_rows,
            [None if mlp is None else mlp.native for mlp in experts],
            (mailbox, experts),
        )
        self._native.set_deadline(round(deadline_seconds * 1e9))
        self._started = False
        self._unusable: str | None = None  # why
        self._aborted = False
        self.is_stuck = False
        self._open: _KeptStep | None = None
        self._next = 0

    def begin_step(self, step: DecodeStep, slots: Sequence[int]) -> None:
        """Open a step, or queue it for the thread; before the GPU starts on it.

        Args:
            step: of `attention.begin_step`; one row per sequence.
            slots: the mailbox row of each of its rows.

        Raises:
            CoprocessorError: it was aborted or closed, or belongs to the parent process.
        """
        places = _check_slots(step, slots, self._max_rows)
        self.check_usable()
        queries = self._query_log(step)
        address = 0 if queries is None else queries.data_ptr()
        kept = (step, queries, self.attention)
        if self._started:
            self._collect()
            self._native.queue(places, step.native, address, kept)
            return
        if self._open is not None:
            raise ValueError("a step is open; end it with end_step() or abort()")
        self._native.begin(places, step.native, address, kept)
        self._open, self._next = kept, 0

    def serve(self, request: int) -> None:
        """Serve one request of the open step on this thread; requests come in order.

        Raises:
            RuntimeError: NaN or inf in the query or the cache; names the layer.
        """
        if self._open is None:
            raise ValueError(f"request {request} comes before begin_step(), or beside start()")
        if request != self._next or request >= len(self.requests):
            raise ValueError(
                f"expected request {self._next} of {len(self.requests)}, got {request}"
            )
        self._native.serve(request)
        self._next += 1

    def end_step(self) -> None:
        """Close the open step: the keys and values of all its layers are in the mailbox."""
        if self._open is None:
            raise ValueError("end_step() comes before begin_step(), or beside start()")
        if self._next != len(self.requests):
            raise ValueError(
                f"end_step() comes after {self._next} of {len(self.requests)} requests"
            )
        self._native.end()
        done, self._open = self._open, None
        self._hand_back(*done)

    @property
    def is_started(self) -> bool:
        """Whether a thread serves the steps."""
        return self._started

    def start(self) -> None:
        """From now on a thread serves the steps, driven by the mailbox's flags."""
        self.check_usable()
        if self._open is not None:
            raise ValueError("a step is open; end it with end_step() or abort()")
        if not self._started:
            self._native.start()
            self._started = True

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when all steps are done.

        Args:
            timeout_seconds: give up after this; None: when the thread has made no progress for
                `deadline_seconds`.

        Raises:
            CoprocessorError: the step failed or did not get on; names the layer. Call `abort`.
            KeyboardInterrupt: ctrl-C; the step goes on.
        """
        self.check_usable()
        limit = -1 if timeout_seconds is None else round(timeout_seconds * 1e9)
        outcome, message = self._native.wait(limit)
        self._collect()
        if outcome == "failed":
            raise CoprocessorError(message)
        if outcome != "done":
            seconds = self.deadline_seconds if outcome == "silent" else timeout_seconds
            what = "made no progress" if outcome == "silent" else "was not done"
            raise CoprocessorError(f"the CPU side {what} within {seconds} s: {message}")

    def abort(self) -> None:
        """Stop serving, and answer whatever the GPU asks for, unserved, until `reset`."""
        if self._started:
            self._check_parent()
        self._open = None
        if not self._native.abort(round(min(1.0, self.deadline_seconds / 2) * 1e9)):
            self._unusable = "its thread is stuck in an earlier step; load the model again"
            self.is_stuck = True
        elif self._unusable is None:
            self._unusable = "it was aborted; reset() it when the GPU is idle"
            self._aborted = True
        self._started = False

    def reset(self) -> None:
        """As new, after `abort` and when the GPU is idle; `start` it again."""
        if not self._aborted:
            self.check_usable()
            raise ValueError("reset() comes after abort()")
        self._native.reset()
        self._aborted, self._unusable = False, None

    def close(self) -> None:
        """End the thread; steps that are not done are dropped."""
        if not self.is_stuck:
            self._unusable = "it was closed"
        self._aborted = self._started = False
        self._open = None
        self._native.close()

    def stall(self, layer_idx: int, seconds: float) -> None:
        """For tests: in its next request of that layer the thread sleeps before it attends."""
        self._native.inject_stall(layer_idx, round(seconds * 1e9))

    def die(self, layer_idx: int) -> None:
        """For tests: in its next request of that layer the thread ends without a word."""
        self._native.inject_death(layer_idx)

    def check_usable(self) -> None:
        """Raise CoprocessorError where a step could not be begun."""
        if self._unusable is not None:
            raise CoprocessorError(f"the coprocessor cannot serve: {self._unusable}")
        if self._started:
            self._check_parent()

    def _check_parent(self) -> None:
        if self._native.forked():
            raise CoprocessorError(
                "the coprocessor belongs to the parent process; load the model again after the fork"
            )

    def _collect(self) -> None:
        for kept in self._native.release_done():
            self._hand_back(*kept)

    def _query_log(self, step: DecodeStep) -> Tensor | None:
        """Room for the step's queries where somebody wants them."""
        if self._on_done is None or not step.keeps_queries:
            return None
        return torch.empty(
            self.mailbox.num_layers,
            len(step.seqs),
            self.mailbox.query.shape[1],
            dtype=self.mailbox.query.dtype,
        )

    def _hand_back(self, step: DecodeStep, queries: Tensor | None, _: NativeAttention) -> None:
        if self._on_done is not None and queries is not None:
            self._on_done(step, {i: queries[i] for i in self._asked})


def _check_mailbox(attention: NativeAttention, mailbox: Mailbox) -> None:
    flags = mailbox.requests.shape[1] if mailbox.requests.dim() == 2 else 0
    if flags != FLAG_STRIDE:
        raise ValueError(f"mailbox flags must be {FLAG_STRIDE} int32 apart, got {flags}")
    units, tokens = mailbox.selection.shape[1:] if mailbox.selection.dim() == 3 else (0, 0)
    estimates = mailbox.rest_counts.numel() > 0
    layout = Mailbox.layout(
        num_requests=mailbox.num_requests,
        max_rows=mailbox.max_rows,
        num_layers=attention.num_layers,
        num_qo_heads=attention.num_qo_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        dtype=attention.dtype,
        selection_units=units,
        selection_tokens=tokens,
        fetch_tokens=mailbox.fetches.shape[3] if mailbox.fetches.dim() == 5 else 0,
        rest_clusters=attention.estimate_clusters if estimates else 0,
        hidden_size=mailbox.normed.shape[-1],
        experts_per_token=mailbox.experts.shape[-1],
    )
    for (name, (shape, dtype)), x in zip(layout.items(), mailbox.tensors, strict=True):
        check_tensor(f"mailbox.{name}", x, shape, dtype)


def _check_requests(requests: Sequence[Request], mailbox: Mailbox) -> None:
    layer_of = np.full(mailbox.max_rows, -1)
    for i, (layer_idx, first_row, num_rows, _) in enumerate(requests):
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


def _check_experts(
    requests: Sequence[Request], experts: Sequence[RoutedMlp | None], mailbox: Mailbox
) -> None:
    for layer_idx, first_row, num_rows, of_experts in requests:
        if not of_experts:
            continue
        mlp = experts[layer_idx] if 0 <= layer_idx < len(experts) else None
        if mlp is None or first_row < 0 or num_rows < 1:
            raise ValueError(f"a request names experts of layer {layer_idx}, but none are given")
        check_tensor(
            "mailbox.normed", mailbox.normed, (mailbox.max_rows, mlp.down.columns), mlp.down.dtype
        )
        chosen = (mailbox.max_rows, mlp.choice.per_token)
        check_tensor("mailbox.experts", mailbox.experts, chosen, torch.int64)
        if first_row + num_rows > mailbox.max_rows:
            raise ValueError(
                f"a request names rows {first_row} to {first_row + num_rows}, but the mailbox has "
                f"{mailbox.max_rows}"
            )


def _head_flags(
    name: str, heads: npt.NDArray[np.bool_] | None, attention: NativeAttention
) -> list[bool]:
    if heads is None:
        return []
    shape = (attention.num_layers, attention.num_kv_heads)
    if heads.shape != shape:
        raise ValueError(f"{name} must be [num_layers, num_kv_heads] = {shape}, got {heads.shape}")
    return [bool(flag) for flag in heads.reshape(-1)]


def _check_listed(
    heads: npt.NDArray[np.bool_] | None,
    publishing_heads: npt.NDArray[np.bool_] | None,
    attention: NativeAttention,
    mailbox: Mailbox,
) -> list[bool]:
    flags = _check_publishing("listed_heads", heads, attention, mailbox)
    if any(flags) and publishing_heads is not None and publishing_heads.any():
        raise ValueError("a step has listed_heads or publishing_heads: the mailbox has one list")
    if any(flags) and mailbox.selection.shape[1] != attention.num_kv_heads:
        raise ValueError(
            f"mailbox.selection must have {attention.num_kv_heads} lists for listed_heads, got "
            f"{mailbox.selection.shape[1]}"
        )
    return flags


def _check_hot(
    heads: npt.NDArray[np.bool_] | None,
    device_heads: npt.NDArray[np.bool_] | None,
    hot_rows: _native.HotRows | None,
    attention: NativeAttention,
    mailbox: Mailbox,
) -> list[bool]:
    flags = _head_flags("hot_heads", heads, attention)
    if heads is None or not any(flags):
        return []
    if hot_rows is None or mailbox.fetches.shape[3] < 1:
        raise ValueError("hot_heads need hot_rows, and a mailbox with fetch_tokens")
    if flags[: attention.num_kv_heads].count(True):
        raise ValueError("layer 0 has no layer above that could ask for its hot rows")
    others = np.zeros_like(heads) if device_heads is None else device_heads
    mixed = heads.any(axis=1) & ~(heads | others).all(axis=1)
    if mixed.any():
        raise ValueError(
            f"all heads of layer {int(mixed.argmax())} must be of hot_heads or of device_heads: "
            "some of them are of hot_heads, and the CPU attends to no head beside these"
        )
    return flags


def _check_publishing(
    name: str, heads: npt.NDArray[np.bool_] | None, attention: NativeAttention, mailbox: Mailbox
) -> list[bool]:
    flags = _head_flags(name, heads, attention)
    units, tokens = mailbox.selection.shape[1:]
    if any(flags) and (
        units not in (1, attention.num_kv_heads) or tokens < attention.budget_tokens
    ):
        raise ValueError(
            f"mailbox.selection must have 1 or {attention.num_kv_heads} lists of at least "
            f"budget_tokens={attention.budget_tokens} tokens, got {units} of {tokens}"
        )
    return flags


def _check_window(sink_tokens: int, recent_tokens: int, selected: tuple[int, int] | None) -> None:
    given = {"sink_tokens": sink_tokens, "recent_tokens": recent_tokens}
    for (name, tokens), own in zip(given.items(), selected or (None, None), strict=True):
        if tokens < 0:
            raise ValueError(f"{name} must not be negative, got {tokens}")
        if own is not None and tokens != own:
            raise ValueError(f"{name} must be the policy's, {own}, got {tokens}")


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
