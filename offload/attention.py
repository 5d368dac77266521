"""Decode attention over the host KV store under a policy, on the worker pool.

One `DecodeAttention` serves one model. A decode step is begun once (`begin_step`: which sequences,
how long), then each layer attends with its queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import (
    MAX_GROUP_SIZE,
    MAX_POLICY_ARRAYS,
    NO_ARRAYS,
    WorkerPool,
    check_head_dim,
    dtype_code,
    isa_name,
    page_shift,
)
from offload.kv_store import KVStore
from offload.policies.base import Policy, SparsePolicy

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DecodeStep:
    """Where the query rows of one decode step find their pages. Row i is one new token.

    Attributes:
        seqs: store handle of each row; a sequence may own several rows.
        kv_lens: int64 [n], tokens each row attends to, itself included.
        positions: int64 [n], kv_lens - 1: the slot of the row's own key and value.
        page_tables, table_strides: int64 [n], address of and pages per layer in the page table.
        arrays: int64 [n], address of the policy's pointer table [num_layers, 8], or empty.
    """

    seqs: Sequence[int]
    kv_lens: Int64Array
    positions: Int64Array
    page_tables: Int64Array
    table_strides: Int64Array
    arrays: Int64Array


@dataclass(frozen=True)
class _SequenceState:
    """A policy's arrays of one sequence, and their addresses as the kernels want them."""

    layers: list[list[npt.NDArray[np.generic]]]
    pointers: Int64Array  # [num_layers, MAX_POLICY_ARRAYS]

    @classmethod
    def of(cls, layers: list[list[npt.NDArray[np.generic]]]) -> _SequenceState:
        pointers = np.zeros((len(layers), MAX_POLICY_ARRAYS), np.int64)
        for layer_idx, arrays in enumerate(layers):
            if len(arrays) > MAX_POLICY_ARRAYS:
                raise ValueError(
                    f"a policy keeps at most {MAX_POLICY_ARRAYS} arrays, got {len(arrays)}"
                )
            pointers[layer_idx, : len(arrays)] = [array.ctypes.data for array in arrays]
        return cls(layers, pointers)

    def copy(self) -> _SequenceState:
        return self.of([[array.copy() for array in arrays] for arrays in self.layers])


class DecodeAttention:
    """Attention of decode steps: dense, or sparse under `policy`.

    Args:
        policy: what to attend to.
        store: the host KV store; its layout, dtype and head_dim are used.
        num_qo_heads: query heads; a multiple of the store's KV heads.
        sm_scale: softmax scale; None takes head_dim ** -0.5.
        isa: an ISA other than the process's (tests).

    Raises:
        ValueError: shapes the kernels do not take.
    """

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
        self.policy = policy
        self.store = store
        self.num_qo_heads = num_qo_heads
        self._row_elements = num_qo_heads * store.head_dim
        self._native = _native.DecodeAttention(
            pool.native,
            isa or isa_name(),
            num_qo_heads,
            store.num_kv_heads,
            store.head_dim,
            page_shift(store.page_tokens),
            dtype_code(store.dtype),
            store.head_dim**-0.5 if sm_scale is None else sm_scale,
        )
        self._dense_layers = store.num_layers
        self._budget_tokens = 0
        if isinstance(policy, SparsePolicy):
            self._dense_layers = policy.dense_layers
            self._budget_tokens = policy.budget_tokens
            callbacks = (policy.prepare, policy.select, policy.observe, policy.append)
            prepare, select, observe, append = (
                c.address if c is not None else 0 for c in callbacks
            )
            self._native.set_policy(
                policy.budget_tokens,
                policy.sink_tokens,
                policy.recent_tokens,
                policy.per_query_head,
                policy.scans_keys,
                prepare,
                select,
                observe,
                append,
            )
        self._states: dict[int, _SequenceState] = {}
        # Called after each attend() with (layer_idx, step, query, out), by benchmarks that look on.
        self.on_attended: Callable[[int, DecodeStep, Tensor, Tensor], None] | None = None

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
        arrays = NO_ARRAYS
        if self.policy.has_state() and int(lens.max()) > self._budget_tokens:
            states = [self._state(seq, kv_len) for seq, kv_len in zip(seqs, kv_lens, strict=True)]
            arrays = np.array(
                [0 if s is None else s.pointers.ctypes.data for s in states], np.int64
            )
        return DecodeStep(
            seqs=tuple(seqs),
            kv_lens=lens,
            positions=lens - 1,
            page_tables=np.array([table.ctypes.data for table in tables], np.int64),
            table_strides=np.array([table.shape[1] for table in tables], np.int64),
            arrays=arrays,
        )

    def prepare(self, layer_idx: int, step: DecodeStep) -> None:
        """Run the policy's `prepare` for a layer; may overlap whatever computes its queries."""
        if self.policy.prepare is None or layer_idx < self._dense_layers:
            return
        for rows in self._waves(step):
            self._native.prepare(
                layer_idx,
                step.page_tables[rows],
                step.table_strides[rows],
                step.kv_lens[rows],
                step.arrays[rows],
            )

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
        for rows in self._waves(step):
            first = rows.start or 0
            self._native.attend(
                layer_idx,
                query.data_ptr() + first * query.stride(0) * item,
                query.stride(0) * item,
                out.data_ptr() + first * out.stride(0) * item,
                out.stride(0) * item,
                0 if lse is None else lse.data_ptr() + first * lse.stride(0) * 4,
                step.page_tables[rows],
                step.table_strides[rows],
                step.kv_lens[rows],
                step.arrays[rows] if step.arrays.size else NO_ARRAYS,
                layer_idx >= self._dense_layers,
            )
        if self.on_attended is not None:
            self.on_attended(layer_idx, step, query, out)

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
        """Explicit selection by addresses; `cpu_ops.native.attend_csr` checks the arguments."""
        self._native.attend_csr(query, out, lse, pages, kv_len, indptr, indices, weights)

    def last_selection(self) -> list[list[int]]:
        """Tokens of each (row, unit) of the last `attend` that was sparse; [] where dense."""
        return self._native.last_selection()

    def fork(self, parent: int, child: int) -> None:
        """Give a forked sequence a copy of its parent's policy state."""
        if parent in self._states:
            self._states[child] = self._states[parent].copy()

    def forget(self, seq: int) -> None:
        """Drop a sequence's policy state: it was freed, or truncated and must be built again."""
        self._states.pop(seq, None)

    def _state(self, seq: int, kv_len: int) -> _SequenceState | None:
        if kv_len <= self._budget_tokens:
            return None
        if seq not in self._states:
            layers: list[list[npt.NDArray[np.generic]]] = []
            for layer_idx in range(self.store.num_layers):
                arrays: list[npt.NDArray[np.generic]] = []
                if layer_idx >= self._dense_layers:
                    keys, values = self.store.gather(seq, layer_idx)
                    built = self.policy.build(layer_idx, keys, values)
                    arrays = [np.ascontiguousarray(array) for array in built]
                layers.append(arrays)
            self._states[seq] = _SequenceState.of(layers)
        return self._states[seq]

    def _waves(self, step: DecodeStep) -> list[slice]:
        """Rows that may run together: rows of one sequence share its policy state, if any."""
        if self.policy.has_state() and len(set(step.seqs)) < len(step.seqs):
            return [slice(i, i + 1) for i in range(len(step.seqs))]
        return [slice(None)]
