"""How many bytes it takes what a policy remembers of sequences, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.kv.store import KVStore
from offload.selection.layer_state import LayerState, StateShape
from offload.selection.policy import Policy
from offload.selection.remembered import Remembered
from offload.selection.sequence_state import RecentQueries, capacity_for


class StateBytes:
    """Bytes of what `policy` remembers of a sequence of `store`, counted before they are there.

    Args:
        state: the policy's, or one around it.
        layer_heads: (num_qo_heads, num_kv_heads, head_dim) of each layer.
        layers: that may have arrays.

    Attributes:
        layers: that have some.
        most_tokens: that a sequence will ever have in the store, if that is bounded.
    """

    most_tokens: int | None = None

    def __init__(
        self,
        policy: Policy,
        state: LayerState,
        store: KVStore,
        *,
        layer_heads: Sequence[tuple[int, int, int]],
        layers: Iterable[int],
    ) -> None:
        self._policy, self._state, self._store = policy, state, store
        self._layer_heads = layer_heads
        self._has_arrays = policy.selects and state.has_arrays
        self.layers = self._observed = frozenset(layers)
        self._sizes: dict[tuple[int, frozenset[int]], int] = {}  # by capacity and layers

    def capacity(self, kv_len: int) -> int:
        """Tokens that arrays have room for when `kv_len` are there."""
        capacity = capacity_for(kv_len)
        return capacity if self.most_tokens is None else min(capacity, self.most_tokens)

    def at(self, kv_len: int) -> int:
        """At most so many are in the arrays of a sequence that comes to `kv_len` tokens."""
        return self._in_arrays(kv_len, self.layers)

    def most_at(self, kv_len: int) -> int:
        """The same if every layer asks that ever may."""
        return self._in_arrays(kv_len, self._observed)

    def _in_arrays(self, kv_len: int, layers: frozenset[int]) -> int:
        policy, store = self._policy, self._store
        if not self._has_arrays or kv_len <= policy.dense_tokens:
            return 0
        key = (self.capacity(kv_len), layers)
        if key not in self._sizes:
            other = (store.dtype.itemsize, key[0])
            shapes = (
                StateShape(*self._layer_heads[i], *other, layer_idx=i, num_layers=store.num_layers)
                for i in sorted(layers)
            )
            num_bytes = sum(map(self._state.num_bytes, shapes))
            self._sizes = {key: num_bytes}  # most ask for one
        return self._sizes[key]

    @property
    def of_queries(self) -> int:
        """Bytes of a sequence's recent queries, which are kept until its arrays are built."""
        policy, dtype = self._policy, self._store.dtype
        num_queries = policy.state.observed_queries if policy.selects else 0
        if not num_queries:
            return 0
        heads = (self._layer_heads[layer_idx] for layer_idx in self._observed)
        return sum(RecentQueries.bytes_for(n, num_queries, dim, dtype) for n, _, dim in heads)

    def of(self, sequences: Iterable[Remembered]) -> int:
        """Bytes of the arrays and queries that some sequences have."""
        return sum(
            (0 if x.arrays is None else x.arrays.num_bytes)
            + (0 if x.queries is None else self.of_queries)
            for x in sequences
        )

    def of_pass(
        self, known: Remembered, kv_len: int, num_new: int, *, prefill: bool, builds: bool
    ) -> int:
        """That a forward pass may add, which brings `num_new` tokens to the `kv_len` there are."""
        arrays, draft = known.arrays, known.draft
        need = 0
        # New ones, or what a failed pass goes back to.
        if prefill or (known.queries is not None and num_new > 1):
            need += self.of_queries * bool(num_new)
        kv_len += num_new
        if arrays is None or kv_len > arrays.capacity_tokens or (builds and num_new):
            need += self.at(kv_len)
        elif prefill:  # those of before go when it is done
            need += max(0, self.at(kv_len) - arrays.num_bytes)
        elif num_new > 1 and known.spare is None and (draft is None or not draft.copied):
            need += arrays.num_bytes
        return need

    def check_room(self, num_bytes: int) -> None:
        """`KVStore.check_room` for `num_bytes` more."""
        what = f"what policy {self._policy.name!r} keeps of sequences"
        self._store.check_room(num_bytes, what, "shorten the context")


def held_bytes(sequences: Iterable[Remembered]) -> int:
    """All memory of what is remembered: within the store's budget."""
    known = list(sequences)
    arrays = {id(x): x.num_bytes for of in known for x in of.all_arrays if x is not None}
    queries = {
        id(x): x.num_bytes for of in known for q in of.all_queries for x in (q or {}).values()
    }
    marks = sum(len(of.marks.array) for of in known)
    return sum(arrays.values()) + sum(queries.values()) + marks
