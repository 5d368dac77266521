"""What policies remember of sequences: their own arrays, recent queries, and marks of the text.

Arrays are built when a sequence first needs them, grow with it, and are copied by forks. Addresses
change only between steps.

A forward pass is between `begin` and `commit` or `roll_back`, after which all is as it was. What
`begin` keeps for that costs nothing in a step of one token: policies take back their last step by
themselves (`Policy.rewind`). Where a pass decodes several tokens of a sequence, as when a draft is
verified, the arrays are copied, and kept until the next pass: if tokens are cropped, `truncate`
goes back to them, and the rows that stay have to be attended again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.kv.store import HostBudgetError, KVStore
from offload.policies.base import BuildContext, Policy, State, StateShape
from offload.policies.sequence_state import (
    LayerArrays,
    RecentQueries,
    TextMarks,
    capacity_for,
)
from offload.policies.state_before import Before, DraftRows, Queries, copies_of, rows_of
from offload.system.memory import format_bytes

__all__ = ["DraftRows", "PolicyStates", "capacity_for"]


class PolicyStates:
    """What `policy` remembers of every sequence of one store.

    Args:
        layers: which layers ask the policy; only they have arrays and queries.
    """

    def __init__(
        self,
        policy: Policy,
        store: KVStore,
        *,
        num_qo_heads: int,
        sm_scale: float,
        pool: WorkerPool,
        layers: Sequence[int],
    ) -> None:
        self.policy = policy
        self._selecting = policy.selecting
        self._store = store
        self._num_qo_heads = num_qo_heads
        self._sm_scale = sm_scale
        self._pool = pool
        self._layers = frozenset(layers)
        self._arrays: dict[int, LayerArrays] = {}
        self._queries: dict[int, Queries] = {}
        self._marks: dict[int, TextMarks] = {}
        self._before: dict[int, Before] = {}  # while a forward pass runs
        self._running_drafts: dict[int, Before] = {}  # while one runs, behind its prompt
        self._drafts: dict[int, Before] = {}  # after one of several rows, until the next
        self._spares: dict[int, LayerArrays] = {}  # memory of the copies of drafts
        # Since the last `begin`: tokens and queries that arrays were built from.
        self._built: dict[int, tuple[int, Queries | None]] = {}
        self.records_rows = False  # some sequence decodes several tokens in the pass that runs
        self._sizes: dict[int, int] = {}  # `bytes_at`
        self._has_state = policy.selects and policy.has_state()
        if self._has_state:
            store.share_budget(lambda: self.held_bytes)

    @property
    def layers(self) -> frozenset[int]:
        """Which layers ask the policy."""
        return self._layers

    @property
    def num_bytes(self) -> int:
        """Of all sequences' arrays."""
        return sum(arrays.num_bytes for arrays in self._arrays.values())

    @property
    def held_bytes(self) -> int:
        """All memory of what is remembered: within the store's budget."""
        before = self._before.values()
        kept = [*before, *self._running_drafts.values(), *self._drafts.values()]
        kept += [x.draft for x in before if x.draft is not None]
        built = [*self._built.values(), *(x.built for x in before if x.built is not None)]
        # Those of a running pass may be in two places.
        arrays = {
            id(x): x.num_bytes
            for x in (
                *self._arrays.values(),
                *self._spares.values(),
                *(x.spare for x in before),
                *(x for before in kept for x in (before.arrays, before.copied)),
            )
            if x is not None
        }
        queries = {
            id(x): x.num_bytes
            for of_seq in (
                *self._queries.values(),
                *(before.queries for before in kept),
                *(queries for _, queries in built),
            )
            for x in (of_seq or {}).values()
        }
        marks = sum(len(marks.array) for marks in self._marks.values())
        return sum(arrays.values()) + sum(queries.values()) + marks

    def bytes_at(self, kv_len: int) -> int:
        """At most so many are in the arrays of a sequence that comes to `kv_len` tokens."""
        if not self._has_state:
            return 0
        if kv_len <= self.policy.budget_tokens:
            return 0
        capacity = capacity_for(kv_len)
        if capacity not in self._sizes:
            self._sizes = {capacity: self._bytes_for(capacity)}  # most ask for one
        return self._sizes[capacity]

    @property
    def query_bytes(self) -> int:
        """Of a sequence's recent queries, which are kept until its arrays are built."""
        if not (self.policy.selects and self.policy.observed_queries):
            return 0
        return len(self._layers) * RecentQueries.bytes_for(
            self._num_qo_heads,
            self.policy.observed_queries,
            self._store.head_dim,
            self._store.dtype,
        )

    def bytes_of(self, seqs: Sequence[int]) -> int:
        """Of the arrays and queries of some sequences."""
        arrays = sum(self._arrays[seq].num_bytes for seq in seqs if seq in self._arrays)
        return arrays + sum(self.query_bytes for seq in seqs if seq in self._queries)

    def check_room(self, num_bytes: int) -> None:
        """Refuse `num_bytes` more.

        Raises:
            HostBudgetError: names them and what is left of the budget.
        """
        if num_bytes > self._store.left_bytes():
            self._store.trim()
        left = self._store.left_bytes()
        if num_bytes > left:
            raise HostBudgetError(
                f"what policy {self.policy.name!r} keeps of sequences needs "
                f"{format_bytes(num_bytes)} more, but {format_bytes(max(0, left))} of the host "
                f"budget of {format_bytes(self._store.host_budget_bytes)} are left beside the KV "
                "cache; raise max_memory={'cpu': ...} or shorten the context"
            )

    def arrays_of(self, seq: int) -> LayerArrays | None:
        """What has been built for a sequence."""
        return self._arrays.get(seq)

    def begin(self, seqs: Sequence[int], num_new_tokens: Sequence[int], *, prefill: bool) -> None:
        """A forward pass begins. What is built before a prefill is not true after it.

        Raises:
            HostBudgetError: what the policy will keep does not fit; nothing has begun then.
        """
        self._check_pass(seqs, num_new_tokens, prefill=prefill)
        for seq, num_new in zip(seqs, num_new_tokens, strict=True):
            draft, spare = self._drafts.pop(seq, None), self._spares.pop(seq, None)
            built = self._built.pop(seq, None)
            arrays, queries = self._arrays.get(seq), self._queries.get(seq)
            kv_len, copied = self._store.kv_len(seq), None
            several = num_new > 1 and not prefill and self._has_state
            # Arrays that are grown first stay as they are.
            if several and arrays is not None and kv_len < arrays.capacity_tokens:
                copied = arrays.copy(draft.copied if draft is not None else spare)
                if draft is not None and copied is draft.copied:
                    draft = None  # overwritten
                spare = None
            self._before[seq] = Before(
                kv_len=kv_len,
                arrays=arrays,
                copied=copied,
                queries=queries,
                num_marks=self._marks[seq].length if seq in self._marks else 0,
                rewinds=not prefill and not several,
                rows={} if several else None,
                draft=draft,
                spare=spare,
                built=built,
            )
            self.records_rows |= several
            if prefill and num_new:
                self._arrays.pop(seq, None)
            if queries is not None and num_new and (prefill or several):
                self._queries[seq] = {layer: recent.copy() for layer, recent in queries.items()}

    def begin_draft(self, seqs: Sequence[int]) -> None:
        """A pass that has prefilled a prompt goes on with a draft, which may be taken back alone.

        Raises:
            HostBudgetError: a copy of what was built in this pass does not fit.
        """
        if not self._has_state:
            return
        for seq in seqs:
            arrays, queries = self._arrays.get(seq), self._queries.get(seq)
            if arrays is not None:
                self.check_room(arrays.num_bytes)
            self._running_drafts[seq] = Before(
                kv_len=self._store.kv_len(seq),
                arrays=arrays,
                copied=None if arrays is None else arrays.copy(),
                queries=queries,
                num_marks=self._marks[seq].length if seq in self._marks else 0,
                rows={},
            )
            if queries is not None:
                self._queries[seq] = copies_of(queries) or {}
        self.records_rows = True

    def commit(self, seqs: Sequence[int]) -> None:
        """The pass is done."""
        self.records_rows = False
        for seq in seqs:
            before = self._before.pop(seq, None)
            if before is not None:
                before.draft = before.spare = before.built = None
            draft = self._running_drafts.pop(seq, before)
            if draft is not None and draft.rows is not None:
                self._drafts[seq] = draft

    def roll_back(self, seq: int) -> None:
        """The pass has failed: all is as it was before `begin`."""
        self.records_rows = False
        self._running_drafts.pop(seq, None)
        before = self._before.pop(seq, None)
        if before is None:
            return
        self._built.pop(seq, None)
        if seq in self._marks:
            self._marks[seq].truncate(before.num_marks)
        self._restore(seq, before)
        for recent in self._queries.get(seq, {}).values():
            recent.truncate(before.kv_len)
        arrays = self._arrays.get(seq)
        if arrays is not None and before.rewinds:
            self._change(seq, self._selecting.rewind, before.kv_len)
        if before.draft is not None:
            self._drafts[seq] = before.draft
        if before.spare is not None:
            self._spares[seq] = before.spare
        if before.built is not None:
            self._built[seq] = before.built

    def ensure(self, seq: int, kv_len: int, num_tokens: int | None = None) -> LayerArrays:
        """The arrays of `seq`, built or grown so that they serve `kv_len` tokens.

        Args:
            num_tokens: that they are built from; default: those that there are before the last.
        """
        if seq not in self._arrays:
            if num_tokens is None:
                num_tokens = max(self._store.kv_len(seq), kv_len - 1)
            self._build(seq, kv_len, num_tokens)
        arrays = self._arrays[seq]
        if kv_len > arrays.capacity_tokens:
            capacity = capacity_for(kv_len)
            layers = [
                self._selecting.grow(i, old, capacity) if old else {}
                for i, old in enumerate(arrays.layers)
            ]
            arrays = self._arrays[seq] = self._layer_arrays(layers, capacity)
        return arrays

    def serves(self, seq: int, kv_len: int) -> bool:
        """Whether `ensure` would leave everything where it is."""
        arrays = self._arrays.get(seq)
        return arrays is not None and kv_len <= arrays.capacity_tokens

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Keep `queries` [num_qo_heads, n, head_dim] of the last n of `kv_len` tokens."""
        if layer_idx not in self._layers:
            return
        of_seq = self._queries.setdefault(seq, {})
        if layer_idx not in of_seq:
            of_seq[layer_idx] = RecentQueries(
                self._num_qo_heads,
                self.policy.observed_queries,
                self._store.head_dim,
                self._store.dtype,
            )
        of_seq[layer_idx].append(queries, kv_len)

    def record_row(self, seq: int, layer_idx: int, query: Tensor) -> None:
        """Keep the query [num_qo_heads * head_dim] of the next row of a pass of several."""
        draft = self._running_drafts.get(seq) or self._before.get(seq)
        if draft is not None and draft.rows is not None and layer_idx in self._layers:
            draft.rows.setdefault(layer_idx, []).append(query.clone())

    def append_marks(self, seq: int, marks: npt.NDArray[np.uint8]) -> None:
        """Text marks of the next tokens of `seq`."""
        self._marks.setdefault(seq, TextMarks()).append(marks)

    def marks_address(self, seq: int, kv_len: int) -> int:
        """Of the text marks; 0 if they are not known."""
        return self._marks[seq].address(kv_len) if seq in self._marks else 0

    def marks_of(self, seq: int) -> npt.NDArray[np.uint8] | None:
        """The array that `marks_address` points into."""
        return self._marks[seq].array if seq in self._marks else None

    @torch.inference_mode(False)  # or decoding could not write to the copies outside of it
    def fork(self, parent: int, child: int) -> None:
        """Give `child` copies of what is known of `parent`.

        Raises:
            HostBudgetError: they do not fit; `child` has nothing then.
        """
        if parent in self._arrays:
            draft = self._drafts.get(parent)
            copies = [self._arrays[parent], *([draft.copied or draft.arrays] if draft else [])]
            self.check_room(sum(arrays.num_bytes for arrays in copies if arrays is not None))
            self._arrays[child] = self._arrays[parent].copy()
        queries = copies_of(self._queries.get(parent))
        if queries is not None:
            self._queries[child] = queries
        if parent in self._marks:
            self._marks[child] = self._marks[parent].copy()
        if parent in self._drafts:
            self._drafts[child] = self._drafts[parent].copy()
        if parent in self._built:
            num_tokens, built_from = self._built[parent]
            self._built[child] = (num_tokens, copies_of(built_from))

    def truncate(self, seq: int, kv_len: int) -> DraftRows | None:
        """The sequence keeps its first `kv_len` tokens.

        Returns:
            what has to be attended again, if some rows of a draft stay.
        """
        if seq in self._marks:
            self._marks[seq].truncate(kv_len)
        num_built, built_from = self._built.pop(seq, (0, None))
        draft = self._drafts.pop(seq, None)
        if draft is not None:
            learnt = self._arrays.get(seq)
            self._restore(seq, draft)
            if draft.copied is not None and learnt is not None:
                self._spares[seq] = learnt
            if kv_len > draft.kv_len:
                return rows_of(draft, kv_len - draft.kv_len)
        elif kv_len <= num_built and _reach(built_from, kv_len):  # built again, from what stays
            self._arrays.pop(seq, None)
            if built_from is not None:
                self._queries[seq] = built_from
        for queries in self._queries.get(seq, {}).values():
            queries.truncate(kv_len)
        if seq in self._arrays and (draft is None or kv_len < draft.kv_len):
            self._change(seq, self._selecting.truncate, kv_len)
        return None

    def rebuild(self, seq: int) -> None:
        """What is known is not true: build again when it is needed."""
        self._arrays.pop(seq, None)

    def forget(self, seq: int) -> None:
        """The sequence is gone."""
        for known in (
            self._arrays,
            self._queries,
            self._marks,
            self._before,
            self._running_drafts,
            self._drafts,
            self._spares,
            self._built,
        ):
            known.pop(seq, None)

    def build_context(
        self, seq: int, layer_idx: int, keys: Tensor, values: Tensor, kv_len: int
    ) -> BuildContext:
        """What the policy builds from, to serve `kv_len` tokens.

        Args:
            keys, values: [num_kv_heads, n, head_dim], all tokens that there are.
        """
        num_tokens = keys.shape[1]
        recorded = self._queries.get(seq, {}).get(layer_idx)
        queries = keys.new_empty(self._num_qo_heads, 0, self._store.head_dim)
        if recorded is not None:
            queries = recorded.in_order(num_tokens).to(keys.device)
        if recorded is not None and not queries.shape[1]:
            # Their tokens were cropped: the newest key asks for what is like it.
            queries = keys[:, -1:].repeat_interleave(self._num_qo_heads // len(keys), dim=0)
        marks = self._marks[seq].first(num_tokens) if seq in self._marks else None
        return BuildContext(
            layer_idx=layer_idx,
            keys=keys,
            values=values,
            queries=queries,
            sm_scale=self._sm_scale,
            capacity_tokens=capacity_for(kv_len),
            text_marks=marks,
            pool=self._pool,
        )

    def install(self, seq: int, layers: Mapping[int, State], kv_len: int) -> None:
        """Take the arrays of all layers that ask the policy, built to serve `kv_len` tokens."""
        arrays = [
            layers[layer_idx] if layer_idx in self._layers else {}
            for layer_idx in range(self._store.num_layers)
        ]
        self._arrays[seq] = self._layer_arrays(arrays, capacity_for(kv_len))
        queries = self._queries.pop(seq, None)
        if seq in self._before:
            self._built[seq] = (kv_len - 1, queries)

    def end_prefill(self, seq: int) -> None:
        """Queries that are still wanted come to the host, where decoding records the next ones."""
        for recorded in self._queries.get(seq, {}).values():
            recorded.to(torch.device("cpu"))

    def _build(self, seq: int, kv_len: int, num_tokens: int) -> None:
        layers = {}
        for layer_idx in sorted(self._layers):
            keys, values = self._store.gather(seq, layer_idx, 0, num_tokens)
            context = self.build_context(seq, layer_idx, keys, values, kv_len)
            layers[layer_idx] = self._selecting.build(context)
        self.install(seq, layers, kv_len)

    def _check_pass(
        self, seqs: Sequence[int], num_new_tokens: Sequence[int], *, prefill: bool
    ) -> None:
        need = 0
        for seq, num_new in zip(seqs, num_new_tokens, strict=True):
            arrays, draft = self._arrays.get(seq), self._drafts.get(seq)
            kv_len = self._store.kv_len(seq) + num_new
            has_queries = seq in self._queries
            # New ones, or what a failed pass goes back to.
            if prefill if not has_queries else (prefill or num_new > 1):
                need += self.query_bytes * bool(num_new)
            if arrays is None or kv_len > arrays.capacity_tokens:
                need += self.bytes_at(kv_len)
            elif prefill:  # those of before go when it is done
                need += max(0, self.bytes_at(kv_len) - arrays.num_bytes)
            elif num_new > 1 and seq not in self._spares and (draft is None or not draft.copied):
                need += arrays.num_bytes
        if need:
            self.check_room(need)

    def _bytes_for(self, capacity_tokens: int) -> int:
        shape = StateShape(
            num_qo_heads=self._num_qo_heads,
            num_kv_heads=self._store.num_kv_heads,
            head_dim=self._store.head_dim,
            item_bytes=self._store.dtype.itemsize,
            capacity_tokens=capacity_tokens,
        )
        return len(self._layers) * self._selecting.state_bytes(shape)

    def _restore(self, seq: int, before: Before) -> None:
        """The arrays and queries that were there before."""
        arrays = before.copied or before.arrays
        if arrays is None:
            self._arrays.pop(seq, None)
        else:
            self._arrays[seq] = arrays
        if before.queries is None:
            self._queries.pop(seq, None)
        else:
            self._queries[seq] = before.queries

    def _change(self, seq: int, change: Callable[[int, State, int], bool], n: int) -> None:
        """Have the policy change its arrays in place; where it cannot, they are built again."""
        layers = self._arrays[seq].layers
        done = [change(i, arrays, n) for i, arrays in enumerate(layers) if arrays]
        if not all(done):
            self._arrays.pop(seq)

    def _layer_arrays(self, layers: Sequence[State], capacity_tokens: int) -> LayerArrays:
        layout = self._selecting.state_layout
        assert layout is not None
        contiguous = [{name: np.ascontiguousarray(x) for name, x in of.items()} for of in layers]
        return LayerArrays(layout, contiguous, capacity_tokens)


def _reach(queries: Queries | None, kv_len: int) -> bool:
    """Whether some are left of the first `kv_len` tokens, where any were kept."""
    return all(recent.reaches(kv_len) for recent in (queries or {}).values())
