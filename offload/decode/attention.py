"""Decode attention over the host KV store under a policy, on the worker pool.

One `DecodeAttention` serves one model. A decode step is begun once (`begin_step`: which sequences,
how long), then each layer attends with its queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import (
    MAX_GROUP_SIZE,
    NO_ARRAYS,
    check_head_dim,
    dtype_code,
    isa_name,
    page_shift,
)
from cpu_ops.step_rows import DecodeStep
from cpu_ops.trace import TraceEvent
from cpu_ops.worker_pool import WorkerPool
from offload.kv.page_pool import Int64Array
from offload.kv.store import KVStore
from offload.policies.base import DENSE, RETRIEVE, SELECT, Policy, check_roles
from offload.policies.prefill_build import PrefillBuild
from offload.policies.state import PolicyStates
from offload.prefill.forward import OnQueries


class DecodeAttention:
    """Attention of decode steps: dense, or sparse under `policy`.

    Args:
        policy: what to attend to.
        store: the host KV store; its layout, dtype and head_dim are used.
        num_qo_heads: query heads; a multiple of the store's KV heads.
        sm_scale: softmax scale; None takes head_dim ** -0.5.
        isa: an ISA other than the process's (tests).

    Attributes:
        on_attended: called after each `attend` with (layer_idx, step, query, out); for benches.
        beside: what steps leave to a device: sink tokens, recent tokens, and heads
            [num_layers, num_kv_heads]; None: nothing.

    Raises:
        ValueError: shapes the kernels do not take, a policy that does not fit the model.
    """

    on_attended: Callable[[int, DecodeStep, Tensor, Tensor], None] | None = None
    beside: tuple[int, int, npt.NDArray[np.bool_]] | None = None

    def __init__(
        self,
        policy: Policy,
        store: KVStore,
        *,
        num_qo_heads: int,
        pool: WorkerPool,
        sm_scale: float | None = None,
        isa: str | None = None,
    ) -> None:
        if num_qo_heads < 1 or num_qo_heads % store.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads={store.num_kv_heads},"
                f" got {num_qo_heads}"
            )
        if num_qo_heads // store.num_kv_heads > MAX_GROUP_SIZE:
            raise ValueError(
                f"at most {MAX_GROUP_SIZE} query heads may share a KV head,"
                f" got {num_qo_heads // store.num_kv_heads}"
            )
        check_head_dim(store.head_dim)
        policy.check_model(
            num_layers=store.num_layers,
            num_qo_heads=num_qo_heads,
            num_kv_heads=store.num_kv_heads,
            head_dim=store.head_dim,
        )
        self.policy = policy
        self.store = store
        self.num_qo_heads = num_qo_heads
        self._row_elements = num_qo_heads * store.head_dim
        sm_scale = store.head_dim**-0.5 if sm_scale is None else sm_scale
        self._native = _native.DecodeAttention(
            pool.native,
            isa or isa_name(),
            num_qo_heads,
            store.num_kv_heads,
            store.head_dim,
            page_shift(store.page_tokens),
            dtype_code(store.dtype),
            sm_scale,
        )
        self._budget_tokens = 0
        self._roles: npt.NDArray[np.uint8] | None = None
        self._sparse = np.zeros(store.num_layers, bool)
        asking: list[int] = []
        if policy.selects:
            num_units = num_qo_heads if policy.per_query_head else store.num_kv_heads
            roles = check_roles(policy, policy.roles(store.num_layers, num_units))
            self._roles = roles
            if roles is None:
                self._sparse[policy.dense_layers :] = True
                asking = np.flatnonzero(self._sparse).tolist()
            else:
                self._sparse = (roles != DENSE).any(axis=1)
                asking = np.flatnonzero(
                    ((roles == RETRIEVE) | (roles == SELECT)).any(axis=1)
                ).tolist()
            self._budget_tokens = policy.budget_tokens
            callbacks = (
                policy.prepare,
                policy.propose,
                policy.select,
                policy.observe,
                policy.append,
            )
            numbers, state = policy.selecting.number_layout, policy.selecting.state_layout
            self._native.set_policy(
                policy.budget_tokens,
                policy.sink_tokens,
                policy.recent_tokens,
                policy.per_query_head,
                policy.scans_keys,
                [0 if c is None else c.address for c in callbacks],
                [] if numbers is None else numbers.values(policy.selecting),
                0 if state is None else len(state),
                [] if roles is None else roles.reshape(-1).tolist(),
                policy.shares_selection,
            )
        self.states = PolicyStates(
            policy,
            store,
            num_qo_heads=num_qo_heads,
            sm_scale=sm_scale,
            pool=pool,
            layers=asking,
        )
        self._has_state = policy.selects and policy.has_state()
        self._builds_on_device = policy.selecting.builds_on_device
        self._observes_queries = policy.selects and policy.observed_queries > 0

    @property
    def roles(self) -> npt.NDArray[np.uint8] | None:
        """The policy's, of each [layer, unit]; see `Policy.roles`."""
        return self._roles

    @property
    def has_state(self) -> bool:
        """Whether the policy remembers anything of a sequence."""
        return self._has_state

    @property
    def is_dense(self) -> list[bool]:
        """Of each layer: every unit attends to everything, whatever the length."""
        return [not sparse for sparse in self._sparse.tolist()]

    def build_states(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> float:
        """Build what the policy keeps of sequences that will have `kv_lens` tokens.

        `begin_step` does it too, where it was not done before. Returns the seconds it took.
        """
        start = time.perf_counter()
        for seq, kv_len in zip(seqs, kv_lens, strict=True):
            if self._has_state and kv_len > self._budget_tokens:
                self.states.ensure(seq, kv_len)
        return time.perf_counter() - start

    def prefill_build(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> PrefillBuild | None:
        """What builds the policy's state during a prefill on a device; None if there is none.

        Args:
            kv_lens: tokens that each of `seqs` will have after it. Those that will still be within
                the budget with one more are not built for.
        """
        if not self._has_state or not self._builds_on_device:
            return None
        lens = zip(seqs, kv_lens, strict=True)
        built = {seq: n for seq, n in lens if n >= self._budget_tokens}
        return PrefillBuild(self.states, built) if built else None

    def begin_step(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> DecodeStep:
        """Fix the rows of a step, after `store.reserve` and before the first layer writes.

        Args:
            seqs: store handle of each row.
            kv_lens: tokens each row attends to, the row's own token included.
        """
        if len(seqs) != len(kv_lens) or not seqs:
            raise ValueError(f"expected one kv_len per row, got {len(seqs)} and {len(kv_lens)}")
        tables = [self.store.page_table(seq) for seq in seqs]
        lens = np.asarray(kv_lens, np.int64)
        for seq, table, kv_len in zip(seqs, tables, kv_lens, strict=True):
            if not 1 <= kv_len <= table.shape[1] * self.store.page_tokens:
                raise ValueError(
                    f"kv_len of sequence {seq} must be in"
                    f" [1, {table.shape[1] * self.store.page_tokens}] (its pages), got {kv_len}"
                )
        arrays = text_marks = NO_ARRAYS
        kept: list[Any] = list(tables)
        if self._has_state and int(lens.max()) > self._budget_tokens:
            longest: dict[int, int] = {}  # build and grow before any address is taken
            for seq, kv_len in sorted(zip(seqs, kv_lens, strict=True)):
                longest[seq] = kv_len
                if kv_len > self._budget_tokens:
                    self.states.ensure(seq, kv_len)
            states = {
                seq: self.states.ensure(seq, kv_len)
                for seq, kv_len in longest.items()
                if kv_len > self._budget_tokens
            }
            kept += states.values()
            tables_of = {seq: state.pointers.ctypes.data for seq, state in states.items()}
            arrays = np.array([tables_of.get(seq, 0) for seq in seqs], np.int64)
            if self.policy.reads_text:
                kept += [self.states.marks_of(seq) for seq in longest]
                text_marks = np.array(
                    [self.states.marks_address(seq, longest[seq]) for seq in seqs], np.int64
                )
        return DecodeStep(
            seqs=tuple(seqs),
            kv_lens=lens,
            positions=lens - 1,
            page_tables=np.array([table.ctypes.data for table in tables], np.int64),
            table_strides=np.array([table.shape[1] for table in tables], np.int64),
            arrays=arrays,
            text_marks=text_marks,
            kept=tuple(kept),
            in_turns=self._has_state and len(set(seqs)) < len(seqs),
            has_short_rows=int(lens.min()) <= self._budget_tokens,
            prepared=set(),
        )

    def prepare(self, layer_idx: int, step: DecodeStep) -> None:
        """Run the policy's `prepare` for a layer; may overlap whatever computes its queries.

        `attend` does it first where it was not called.
        """
        if self.policy.prepare is None or not self._sparse[layer_idx] or step.in_turns:
            return
        self._native.prepare(layer_idx, *step.of(slice(None)))
        step.prepared.add(layer_idx)

    def attend(
        self,
        layer_idx: int,
        step: DecodeStep,
        query: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attend the rows of `step` to their sequences' keys and values of one layer.

        Args:
            query: [n, >= num_qo_heads * head_dim], rotated, unit stride in the last dimension; the
                query heads come first in each row.
            out: the same shape rules; receives o in its first num_qo_heads * head_dim columns.
            lse: optional float32 [n, num_qo_heads], natural log.

        Raises:
            RuntimeError: NaN or inf in the query or the cache; names the layer.
        """
        n = len(step.seqs)
        for name, x in (("query", query), ("out", out)):
            if x.dtype != self.store.dtype or x.device.type != "cpu":
                raise ValueError(f"{name} must be {self.store.dtype} on the CPU, got {x.dtype}")
            if (
                x.dim() != 2
                or x.shape[0] != n
                or x.shape[1] < self._row_elements
                or x.stride(1) != 1
            ):
                raise ValueError(
                    f"{name} must be [{n}, >= {self._row_elements}] with unit column stride,"
                    f" got {list(x.shape)} with strides {x.stride()}"
                )
        if lse is not None and (
            lse.dtype != torch.float32
            or list(lse.shape) != [n, self.num_qo_heads]
            or not lse.is_contiguous()
        ):
            raise ValueError(f"lse must be float32 [{n}, {self.num_qo_heads}], contiguous")
        item = query.element_size()
        sparse = bool(self._sparse[layer_idx])
        in_turns = sparse and step.in_turns
        for rows in [slice(i, i + 1) for i in range(n)] if in_turns else [slice(0, n)]:
            first: int = rows.start
            self._native.attend(
                layer_idx,
                query.data_ptr() + first * query.stride(0) * item,
                query.stride(0) * item,
                out.data_ptr() + first * out.stride(0) * item,
                out.stride(0) * item,
                0 if lse is None else lse.data_ptr() + first * lse.stride(0) * 4,
                *step.of(rows),
                sparse,
                first,
                layer_idx not in step.prepared,
            )
        if sparse and self.keeps_queries(step):
            self.record_step_queries(layer_idx, step, query)
        if self.on_attended is not None:
            self.on_attended(layer_idx, step, query, out)

    def time_layers(
        self, step: DecodeStep, queries: Sequence[Tensor], out: Tensor
    ) -> list[tuple[float, dict[str, Any]]]:
        """Attend layer after layer as the CPU's decode step does, without its linear layers: for
        benches. Policies prepare, and keep no queries for a later `build`.

        Args:
            queries: of each layer [n, num_qo_heads * head_dim], rotated, contiguous.
            out: of the same shape; holds the last layer's o then.

        Returns:
            (seconds, what `profile` would return) of each layer.

        Raises:
            ValueError: tensors that do not fit, or rows that must attend in turns.
            RuntimeError: as `attend`.
        """
        if step.in_turns:
            raise ValueError("rows of one sequence whose policy has state cannot be timed together")
        shape = (len(step.seqs), self._row_elements)
        for x in (*queries, out):
            fits = x.is_cpu and x.dtype == self.store.dtype and tuple(x.shape) == shape
            if not fits or not x.is_contiguous():
                raise ValueError(
                    f"queries and out must be {self.store.dtype} {list(shape)} on the CPU,"
                    f" contiguous, got {x.dtype} {list(x.shape)} on {x.device}"
                    f" with strides {x.stride()}"
                )
        if len(queries) != self.store.num_layers:
            raise ValueError(f"expected {self.store.num_layers} queries, got {len(queries)}")
        return self._native.time_layers(
            np.array([query.data_ptr() for query in queries], np.int64),
            out.data_ptr(),
            *step.of(slice(None)),
            self._sparse.tolist(),
        )

    @property
    def on_prefill_queries(self) -> OnQueries | None:
        """What `prefill` shows its queries to: None unless the policy observes queries."""
        return self.record_queries if self._observes_queries else None

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Keep the last queries of a layer for the policy's `build`.

        Args:
            queries: [num_qo_heads, n, head_dim], rotated, of the last n of `kv_len` tokens.
        """
        if self._observes_queries:
            self.states.record_queries(seq, layer_idx, queries, kv_len)

    def start_profile(self) -> None:
        """Count times, bytes and tokens from now on."""
        self._native.start_profile()

    def profile(self) -> dict[str, Any]:
        """What was counted since `start_profile`, summed over workers.

        seconds: of each phase (predict, score, select, attend, update), by the workers' clocks.
        bytes: of keys, values and the policy's arrays read and written. scored_tokens,
        attended_tokens: tokens x units whose keys were scored exactly, and which were attended.
        """
        return self._native.profile()

    def trace(self, on: bool) -> None:
        """Record what each worker does, and a `Coprocessor`'s thread, from now on, or no more."""
        self._native.record(on)

    def trace_events(self) -> tuple[list[TraceEvent], int]:
        """What was recorded since the last call, and how many events were lost because nobody
        collected them in time: first those of the leading thread, then each worker's."""
        events, num_lost = self._native.drain()
        return [TraceEvent(*event) for event in events], num_lost

    def native_csr(
        self,
        query: int,
        out: int,
        lse: int,
        pages: int,
        kv_len: int,
        indptr: Int64Array,
        indices: npt.NDArray[np.int32],
        weights: int,
    ) -> None:
        """Explicit selection by addresses; `cpu_ops.attention.attend_csr` checks the arguments."""
        self._native.attend_csr(query, out, lse, pages, kv_len, indptr, indices, weights)

    def last_selection(self) -> list[list[int]]:
        """Tokens of each (row, unit) of the last `attend` that was sparse; [] where dense."""
        return self._native.last_selection()

    @property
    def native(self) -> _native.DecodeAttention:
        """The C++ object, for native code that attends by itself."""
        return self._native

    @property
    def sparse_layers(self) -> npt.NDArray[np.bool_]:
        """[num_layers]: where the policy has a say in rows longer than its budget."""
        return self._sparse

    def builds_state(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether `begin_step` would build or move policy state of these rows.

        It must not be called then while steps of these sequences are in flight.
        """
        return self._has_state and any(
            kv_len > self._budget_tokens and not self.states.serves(seq, kv_len)
            for seq, kv_len in zip(seqs, kv_lens, strict=True)
        )

    def keeps_queries(self, step: DecodeStep) -> bool:
        """Whether `record_step_queries` wants the queries of the step's sparse layers."""
        observes = self._observes_queries and step.has_short_rows
        return observes or self.states.records_rows

    def record_step_queries(self, layer_idx: int, step: DecodeStep, query: Tensor) -> None:
        """Keep the queries of rows that attended densely, for the policy's `build`, and of drafts.

        Args:
            query: [n, >= num_qo_heads * head_dim], rotated.
        """
        query = query[:, : self._row_elements]
        heads = query.view(len(query), self.num_qo_heads, -1)
        for row, (seq, kv_len) in enumerate(zip(step.seqs, step.kv_lens.tolist(), strict=True)):
            if self._observes_queries and kv_len <= self._budget_tokens:
                self.states.record_queries(seq, layer_idx, heads[row][:, None], kv_len)
            if self.states.records_rows:
                self.states.record_row(seq, layer_idx, query[row])
