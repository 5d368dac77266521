"""What policies remember of sequences: their own arrays, recent queries, and marks of the text.

Arrays are built when a sequence first needs them, grow with it, and are copied by forks. Addresses
change only between steps.

A forward pass is between `begin` and `commit` or `roll_back`, after which all is as it was. What
`begin` keeps for that costs nothing in a step of one token: policies take back their last step by
themselves (`LayerState.rewind`). Where a pass decodes several tokens of a sequence, as when a draft
is verified, the arrays are copied, and kept until the next pass: if tokens are cropped, `truncate`
goes back to them, and the rows that stay have to be attended again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.kv.store import KVStore
from offload.selection.device_support import DeviceBuild
from offload.selection.estimate import EstimateState
from offload.selection.layer_state import BuildContext, State
from offload.selection.policy import Policy
from offload.selection.remembered import Before, DraftRows, Remembered, SavedState, copies_of, reach
from offload.selection.revised import Revised
from offload.selection.sequence_state import LayerArrays, RecentQueries, capacity_for
from offload.selection.state_bytes import StateBytes, held_bytes
from offload.system.map_in_threads import map_in_threads
from offload.system.torch_threads import torch_threads

# Arrays are built anew once more than one in so many of a sequence's tokens came after them.
_LEAST_OLDER = 8

logger = logging.getLogger(__name__)

__all__ = ["DraftRows", "PolicyStates", "capacity_for"]


class PolicyStates:
    """What `policy` remembers of every sequence of one store.

    Args:
        layer_heads: (num_qo_heads, num_kv_heads, head_dim) of each layer.
        sm_scales: softmax scale of each layer.
        layers: in which the policy keeps arrays of its own.
        estimate_clusters, estimating: of each KV head, in which layers; see `estimate`.

    Attributes:
        bytes: how many of them it takes.
        device: which builds instead of the host, where it can and has room; None: there is none.
        unasked: sequences that attend to all of their tokens meanwhile: nothing is built of them.
    """

    def __init__(
        self,
        policy: Policy,
        store: KVStore,
        *,
        layer_heads: Sequence[tuple[int, int, int]],
        sm_scales: Sequence[float],
        pool: WorkerPool,
        layers: frozenset[int],
        estimate_clusters: int = 0,
        estimating: frozenset[int] = frozenset(),
    ) -> None:
        self.policy = policy
        self._estimate = EstimateState(policy, estimate_clusters) if estimate_clusters else None
        self._state = self._estimate or policy.state
        self._store = store
        self._layer_heads = layer_heads
        self._sm_scales = sm_scales
        self._pool = pool
        self._observed = layers  # whose queries are kept, for when they ask
        self.records_rows = False  # some sequence decodes several tokens in the pass that runs
        self._known: defaultdict[int, Remembered] = defaultdict(Remembered)
        self.has_arrays = policy.selects and self._state.has_arrays
        if self.has_arrays:
            store.ledger.add("what the policy keeps", lambda: self.held_bytes)
        self.unasked: Set[int] = frozenset()
        self.device: torch.device | None = None
        self._served = layers, estimating
        self._serving = self._with_arrays(layers, estimating)
        self.bytes = StateBytes(
            policy,
            self._state,
            store,
            layer_heads=layer_heads,
            layers=self._serving,
        )

    @property
    def layers(self) -> frozenset[int]:
        """Which layers have arrays."""
        return self._serving

    @property
    def built_layers(self) -> frozenset[int]:
        """Which layers of a prompt have arrays: those of a placement to come, too."""
        return self.bytes.layers

    def serve(self, asking: frozenset[int], estimating: frozenset[int]) -> None:
        """Which layers ask the policy and which estimate the rest from now on: some of those that
        ever may, between passes. What that takes is built when it is next needed."""
        self._served = asking, estimating
        self._serving = self.bytes.layers = self._with_arrays(asking, estimating)

    def expect(self, asking: frozenset[int], estimating: frozenset[int]) -> None:
        """Which layers will, besides, as soon as steps of another placement are there. Prompts are
        built for both: later their keys would have to come back from the host."""
        now_asking, now_estimating = self._served
        self.bytes.layers = self._with_arrays(asking | now_asking, estimating | now_estimating)

    def _with_arrays(self, asking: frozenset[int], estimating: frozenset[int]) -> frozenset[int]:
        if self._estimate is None:
            return asking
        self._estimate.asking, self._estimate.estimating = asking, estimating
        return estimating | (asking if self.policy.state.has_arrays else frozenset())

    @property
    def builds_on_device(self) -> bool:
        """Whether a device that prefills can build the arrays."""
        policy = self.policy
        return self.has_arrays and (policy.device.builds or not policy.state.has_arrays)

    def build_on_device(self, context: BuildContext) -> DeviceBuild:
        """As `DeviceSupport.build`."""
        if self._estimate is None:
            return self.policy.device.build(context)
        return self._estimate.build_on_device(context)

    @property
    def copied_heads(self) -> int:
        """KV heads of a layer at most that the policy copies to build on a device."""
        return self.policy.device.copied_heads(self._store.num_layers, self._store.num_kv_heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of all sequences' arrays."""
        return sum(x.arrays.num_bytes for x in self._known.values() if x.arrays is not None)

    @property
    def held_bytes(self) -> int:
        """All memory of what is remembered: within the store's budget."""
        return held_bytes(self._known.values())

    def bytes_of(self, seqs: Sequence[int]) -> int:
        """Bytes of the arrays and queries of some sequences."""
        return self.bytes.of(self._known[seq] for seq in seqs)

    def arrays_of(self, seq: int) -> LayerArrays | None:
        """What has been built for a sequence."""
        return self._known[seq].arrays

    def _has_room(self, seq: int) -> bool:
        """Whether a step of one token makes nothing that was not there."""
        if not self.has_arrays:
            return True
        arrays = self._known[seq].arrays
        return arrays is not None and self._store.kv_len(seq) < arrays.capacity_tokens

    def begin(
        self,
        seqs: Sequence[int],
        num_new_tokens: Sequence[int],
        *,
        prefill: bool,
        builds: bool = False,
    ) -> None:
        """A forward pass begins. What is built before a prefill is not true after it, unless it
        brings few tokens, which the policy's next step can take in.

        Args:
            builds: arrays are built in this prefill already, while those of before are kept.

        Raises:
            HostBudgetError: what the policy will keep does not fit; nothing has begun then.
        """
        news = list(zip(seqs, num_new_tokens, strict=True))
        staying = {seq for seq, n in news if prefill and self._catches_up(seq, n)}
        of_pass = partial(self.bytes.of_pass, prefill=prefill)
        need = sum(
            of_pass(
                self._known[seq], self._store.kv_len(seq), n, builds=builds and seq not in staying
            )
            for seq, n in news
            if seq not in self.unasked and (prefill or n != 1 or not self._has_room(seq))
        )
        if need:
            self.bytes.check_room(need)
        for seq, num_new in news:
            known, kv_len, copied = self._known[seq], self._store.kv_len(seq), None
            arrays, queries, draft, spare = known.arrays, known.queries, known.draft, known.spare
            several = num_new > 1 and not prefill and self.has_arrays and bool(self.layers)
            # Arrays that are grown first stay as they are.
            if several and arrays is not None and kv_len < arrays.capacity_tokens:
                copied = arrays.copy(draft.copied if draft is not None else spare)
                if draft is not None and copied is draft.copied:
                    draft = None  # overwritten
                spare = None
            known.before = Before(
                kv_len=kv_len,
                arrays=arrays,
                copied=copied,
                queries=queries,
                num_marks=known.marks.length,
                rewinds=not several and (not prefill or seq in staying),
                rows={} if several else None,
                draft=draft,
                spare=spare,
                built=known.built,
            )
            known.draft = known.spare = known.built = None
            self.records_rows |= several
            if prefill and num_new and seq not in staying:
                known.arrays = None
            if num_new and (prefill or several):
                known.queries = copies_of(queries)

    def _catches_up(self, seq: int, num_new: int) -> bool:
        """Whether its arrays stay, and take in `num_new` tokens of a prompt: few, as against those
        that they were built from."""
        known = self._known[seq]
        if not self._state.catches_up or known.arrays is None:
            return False
        num_tokens = self._store.kv_len(seq)
        more = num_tokens + num_new - known.arrays.num_built
        return self.built_layers <= known.arrays.built and more * _LEAST_OLDER <= num_tokens

    def begin_draft(self, seqs: Sequence[int]) -> None:
        """A pass that has prefilled a prompt goes on with a draft, which may be taken back alone.

        Raises:
            HostBudgetError: a copy of what was built in this pass does not fit.
        """
        if not self.has_arrays:
            return
        for seq in seqs:
            known = self._known[seq]
            if known.arrays is not None:
                self.bytes.check_room(known.arrays.num_bytes)
            known.running_draft = Before(
                kv_len=self._store.kv_len(seq),
                arrays=known.arrays,
                copied=None if known.arrays is None else known.arrays.copy(),
                queries=known.queries,
                num_marks=known.marks.length,
                rows={},
            )
            known.queries = copies_of(known.queries)
        self.records_rows = True

    def commit(self, seqs: Sequence[int]) -> None:
        """The pass is done."""
        self.records_rows = False
        for seq in seqs:
            known = self._known[seq]
            before, known.before = known.before, None
            if before is not None:
                before.draft = before.spare = before.built = None
            draft, known.running_draft = known.running_draft or before, None
            if draft is not None and draft.rows is not None:
                known.draft = draft
            arrays = known.arrays
            # Layers that no step asks yet have not seen what was decoded.
            if known.built is None and arrays is not None and not arrays.built <= self.layers:
                known.arrays = arrays.only(self.layers)

    def roll_back(self, seq: int) -> None:
        """The pass has failed: all is as it was before `begin`."""
        self.records_rows = False
        known = self._known[seq]
        before, known.before, known.running_draft = known.before, None, None
        if before is None:
            return
        known.marks.truncate(before.num_marks)
        known.restore(before)
        for recent in (known.queries or {}).values():
            recent.truncate(before.kv_len)
        if known.arrays is not None and before.rewinds:
            self._change(known, self._state.rewind, before.kv_len)
        known.draft, known.spare, known.built = before.draft, before.spare, before.built

    def ensure(self, seq: int, kv_len: int, num_tokens: int | None = None) -> LayerArrays:
        """The arrays of `seq`, built or grown so that they serve `kv_len` tokens.

        Args:
            num_tokens: that they are built from; default: those that there are before the last.
        """
        known = self._known[seq]
        arrays = known.arrays
        if arrays is not None and kv_len > arrays.capacity_tokens:
            capacity = self.bytes.capacity(kv_len)
            layers = [
                self._state.grow(i, old, capacity, self._pool) if old else {}
                for i, old in enumerate(arrays.layers)
            ]
            arrays = known.arrays = self._layer_arrays(layers, capacity, arrays.num_built)
        if arrays is None or not self._is_built(arrays):
            if num_tokens is None:
                num_tokens = max(self._store.kv_len(seq), kv_len - 1)
            arrays = self._build(seq, kv_len, num_tokens)
        return arrays

    def serves(self, seq: int, kv_len: int) -> bool:
        """Whether a step of `kv_len` tokens would leave everything where it is."""
        if not self.has_arrays or kv_len <= self.policy.dense_tokens:
            return True
        arrays = self._known[seq].arrays
        if arrays is None or not self._is_built(arrays):
            return False
        return kv_len <= arrays.capacity_tokens

    def _is_built(self, arrays: LayerArrays) -> bool:
        return self.layers <= arrays.built <= self.built_layers

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Keep `queries` [num_qo_heads, n, head_dim] of the last n of `kv_len` tokens."""
        if layer_idx not in self._observed:
            return
        known = self._known[seq]
        if known.queries is None:
            known.queries = {}
        if layer_idx not in known.queries:
            known.queries[layer_idx] = self._no_queries(layer_idx)
        known.queries[layer_idx].append(queries, kv_len)

    def record_row(self, seq: int, layer_idx: int, query: Tensor) -> None:
        """Keep the query [num_qo_heads * head_dim] of the next row of a pass of several."""
        known = self._known[seq]
        draft = known.running_draft or known.before
        if draft is not None and draft.rows is not None and layer_idx in self.layers:
            draft.rows.setdefault(layer_idx, []).append(query.clone())

    def append_delimiter_classes(self, seq: int, marks: npt.NDArray[np.uint8]) -> None:
        """Text marks of the next tokens of `seq`."""
        self._known[seq].marks.append(marks)

    def marks_address(self, seq: int, kv_len: int) -> int:
        """Address of the text marks; 0 if they are not known."""
        return self._known[seq].marks.address(kv_len)

    def marks_of(self, seq: int) -> npt.NDArray[np.uint8]:
        """The array that `marks_address` points into."""
        return self._known[seq].marks.array

    @torch.inference_mode(False)  # or decoding could not write to the copies outside of it
    def fork(self, parent: int, child: int) -> None:
        """Give `child` copies of what is known of `parent`.

        Raises:
            HostBudgetError: they do not fit; `child` has nothing then.
        """
        known = self._known[parent]
        if known.arrays is not None:
            draft = known.draft
            copies = [known.arrays, *([draft.copied or draft.arrays] if draft else [])]
            self.bytes.check_room(sum(arrays.num_bytes for arrays in copies if arrays is not None))
        self._known[child] = known.copy()

    def fork_text(self, parent: int, child: int) -> None:
        """Give `child` the marks of `parent`'s text, and nothing else."""
        self._known[child] = copied = Remembered()
        copied.marks = self._known[parent].marks.copy()

    def save(self, seq: int) -> SavedState:
        """What `restore` takes: the arrays themselves, until the next forward pass."""
        return self._known[seq].saved()

    def restore(self, seq: int, saved: SavedState) -> None:
        """Remember of a new sequence what `save` has given, and keep its arrays.

        Raises:
            ValueError: other arrays or layers than the policy has.
        """
        known = self._known[seq] = Remembered()
        known.marks.append(saved.marks)
        if not {*saved.layers, *saved.queries} <= self._observed:
            raise ValueError(f"layers {sorted({*saved.layers, *saved.queries})}")
        if saved.layers:
            if not self.has_arrays:
                raise ValueError(f"policy {self.policy.name!r} keeps no arrays")
            layers = [saved.layers.get(i, {}) for i in range(self._store.num_layers)]
            known.arrays = self._layer_arrays(layers, saved.capacity_tokens, saved.num_built)
        if saved.queries:
            known.queries = {layer_idx: self._no_queries(layer_idx) for layer_idx in saved.queries}
        for layer_idx, (queries, kv_len) in saved.queries.items():
            known.queries[layer_idx].put_back(queries, kv_len)  # type: ignore[index]

    def revise(self, seq: int, first: int) -> None:
        """Some tokens of `seq` from `first` on were written anew in the store."""
        known, store, kv_len = self._known[seq], self._store, self._store.kv_len(seq)
        layers = [] if known.arrays is None else known.arrays.layers
        done: list[bool] = []

        def revise_layer(layer_idx: int) -> None:
            def load_keys(start: int) -> Tensor:
                return store.gather(seq, layer_idx, start, kv_len)[0]

            shape = (store.num_layers, store.num_kv_heads)
            revised = Revised(first, kv_len, load_keys, *shape)
            with torch_threads(1):
                done.append(self._state.revise(layer_idx, layers[layer_idx], revised))

        built = [layer_idx for layer_idx, arrays in enumerate(layers) if arrays]
        map_in_threads(revise_layer, built, min(self._pool.num_threads, max(1, len(built))))
        self._build_again_unless(known, done)

    def truncate(self, seq: int, kv_len: int) -> DraftRows | None:
        """The sequence keeps its first `kv_len` tokens.

        Returns:
            what has to be attended again, if some rows of a draft stay.
        """
        known = self._known[seq]
        known.marks.truncate(kv_len)
        num_built, built_from = known.built or (0, None)
        draft, known.draft, known.built = known.draft, None, None
        if draft is not None:
            learnt = known.arrays
            known.restore(draft)
            if draft.copied is not None and learnt is not None:
                known.spare = learnt
            if kv_len > draft.kv_len:
                return draft.first_rows(kv_len - draft.kv_len)
        elif kv_len <= num_built and reach(built_from, kv_len):  # built again, from what stays
            known.arrays = None
            if built_from is not None:
                known.queries = built_from
        for queries in (known.queries or {}).values():
            queries.truncate(kv_len)
        if known.arrays is not None and (draft is None or kv_len < draft.kv_len):
            known.arrays.num_built = min(known.arrays.num_built, kv_len)
            self._change(known, self._state.truncate, kv_len)
        return None

    def renumber(
        self, seq: int, kv_len: int, first: int, last: int, query: Tensor, query_len: int
    ) -> None:
        """Says that only the `first` and `last` of `kv_len` tokens are where they were, counted
        from either end: what was built is built again, when it is needed.

        Args:
            query: [num_layers, num_qo_heads, 0 or 1, head_dim], of the last of `query_len` of the
                tokens that there are now.
        """
        known = self._known[seq]
        known.marks.renumber(kv_len, self._store.kv_len(seq), first, last)
        known.arrays = known.draft = known.spare = known.built = None
        known.queries = None
        if self.policy.selects and self.policy.state.observed_queries:
            for layer_idx in self._observed:
                self.record_queries(seq, layer_idx, query[layer_idx], query_len)

    def rebuild(self, seq: int) -> None:
        """What is known is not true: build again when it is needed."""
        self._known[seq].arrays = None

    def forget(self, seq: int) -> None:
        """The sequence is gone."""
        self._known.pop(seq, None)

    def build_context(
        self,
        seq: int,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        kv_len: int,
        capacity_tokens: int | None = None,
    ) -> BuildContext:
        """What the policy builds from, to serve `kv_len` tokens.

        Args:
            keys, values: [num_kv_heads, n, head_dim], all tokens that there are.
            capacity_tokens: that arrays have room for; None: by `kv_len`.
        """
        known = self._known[seq]
        return BuildContext(
            layer_idx=layer_idx,
            keys=keys,
            values=values,
            queries=known.queries_of(layer_idx, keys, self._layer_heads[layer_idx][0]),
            sm_scale=self._sm_scales[layer_idx],
            capacity_tokens=capacity_tokens or self.bytes.capacity(kv_len),
            text_marks=known.marks.first(keys.shape[1]),
            pool=self._pool,
            num_layers=self._store.num_layers,
        )

    def install(
        self, seq: int, layers: Mapping[int, State], kv_len: int, capacity: int | None = None
    ) -> LayerArrays:
        """Take the arrays of all layers that have some, as `build_context` has it."""
        known = self._known[seq]
        arrays = [layers.get(layer_idx, {}) for layer_idx in range(self._store.num_layers)]
        # Of some layers they may have been there.
        num_built = kv_len - 1 if known.arrays is None else known.arrays.num_built
        capacity = capacity or self.bytes.capacity(kv_len)
        known.arrays = installed = self._layer_arrays(arrays, capacity, num_built)
        queries, known.queries = known.queries, None
        if known.before is not None:
            known.built = (kv_len - 1, queries)
        return installed

    def end_prefill(self, seq: int) -> None:
        """Queries that are still wanted come to the host, where decoding records the next ones."""
        for recorded in (self._known[seq].queries or {}).values():
            recorded.to(torch.device("cpu"))

    def _build(self, seq: int, kv_len: int, num_tokens: int) -> LayerArrays:
        """The arrays of the layers that ask: those that there are, and the others built."""
        known = self._known[seq]
        there: list[State] = [{}] * self._store.num_layers
        capacity = None
        if known.arrays is not None:
            there, capacity = known.arrays.layers, known.arrays.capacity_tokens
            if known.queries is None and self._state.observed_queries:  # gone since it was made
                known.queries = {
                    layer_idx: self._no_queries(layer_idx) for layer_idx in self.layers
                }
        layers, device = {}, self.device if self.builds_on_device else None
        for layer_idx in sorted(self.layers):
            layers[layer_idx] = there[layer_idx]
            if there[layer_idx]:
                continue
            keys, values = self._store.gather(seq, layer_idx, 0, num_tokens)
            if device is not None:
                try:
                    rows = keys.to(device), values.to(device)
                    context = self.build_context(seq, layer_idx, *rows, kv_len, capacity)
                    made = self.build_on_device(context)
                    torch.cuda.current_stream(device).synchronize()
                    layers[layer_idx] = made()
                    continue
                except torch.OutOfMemoryError as error:
                    logger.debug(
                        "layer %d of a sequence is built on the host: %s", layer_idx, error
                    )
                    device = None
            context = self.build_context(seq, layer_idx, keys, values, kv_len, capacity)
            layers[layer_idx] = self._state.build(context)
        return self.install(seq, layers, kv_len, capacity)

    def _change(self, known: Remembered, change: Callable[[int, State, int], bool], n: int) -> None:
        """Have the policy change its arrays in place; where it cannot, they are built again."""
        layers = [] if known.arrays is None else known.arrays.layers
        done = [change(i, arrays, n) for i, arrays in enumerate(layers) if arrays]
        self._build_again_unless(known, done)

    def _build_again_unless(self, known: Remembered, done: Sequence[bool]) -> None:
        if not all(done):
            known.arrays = None
            if known.queries is None and self.policy.state.observed_queries:
                # Gone when the arrays were built: those of the rows to come, or the newest key's.
                known.queries = {
                    layer_idx: self._no_queries(layer_idx) for layer_idx in self._observed
                }

    def _no_queries(self, layer_idx: int) -> RecentQueries:
        num_qo_heads, _, head_dim = self._layer_heads[layer_idx]
        num_queries = self.policy.state.observed_queries
        return RecentQueries(num_qo_heads, num_queries, head_dim, self._store.dtype)

    def _layer_arrays(
        self, layers: Sequence[State], capacity_tokens: int, num_built: int
    ) -> LayerArrays:
        layout = self._state.layout
        assert layout is not None
        contiguous = [{name: np.ascontiguousarray(x) for name, x in of.items()} for of in layers]
        return LayerArrays(layout, contiguous, capacity_tokens, num_built)
