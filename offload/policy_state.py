"""What policies remember of sequences: their own arrays, recent queries, and marks of the text.

Arrays are built when a sequence first needs them, grow with it, and are copied by forks. Addresses
change only between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops.native import MAX_POLICY_ARRAYS, WorkerPool
from offload.kv_store import KVStore
from offload.policies.base import BuildContext, Policy

Array = npt.NDArray[Any]
_CAPACITY_STEP = 4096  # tokens; and an eighth of the length, so that growing stays rare


class LayerArrays:
    """A policy's arrays of one sequence, and their addresses as the kernels want them."""

    def __init__(self, layers: list[list[Array]], capacity_tokens: int) -> None:
        self.layers = layers
        self.capacity_tokens = capacity_tokens
        self.pointers = np.zeros((len(layers), MAX_POLICY_ARRAYS), np.int64)
        for layer_idx, arrays in enumerate(layers):
            if len(arrays) > MAX_POLICY_ARRAYS:
                raise ValueError(
                    f"a policy keeps at most {MAX_POLICY_ARRAYS} arrays, got {len(arrays)}"
                )
            self.pointers[layer_idx, : len(arrays)] = [array.ctypes.data for array in arrays]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for arrays in self.layers for array in arrays)

    def copy(self) -> LayerArrays:
        layers = [[array.copy() for array in arrays] for arrays in self.layers]
        return LayerArrays(layers, self.capacity_tokens)


class RecentQueries:
    """The last `size` queries of one layer of one sequence, in a ring."""

    def __init__(self, num_qo_heads: int, size: int, head_dim: int, dtype: torch.dtype) -> None:
        self._ring = torch.empty(num_qo_heads, size, head_dim, dtype=dtype)
        self._count = 0  # valid ones
        self.kv_len = 0  # of the newest

    def append(self, queries: Tensor, kv_len: int) -> None:
        """`queries` [num_qo_heads, n, head_dim] belong to tokens kv_len - n … kv_len - 1."""
        size, n = self._ring.shape[1], queries.shape[1]
        self.to(queries.device)
        if kv_len - n != self.kv_len:
            self._count = 0  # tokens went by unseen
        kept = queries[:, -size:]
        if kept.shape[1] == 1:
            self._ring[:, (kv_len - 1) % size] = kept[:, 0]
        else:
            # Made on the device: moving indices there would wait for it, once for each slice.
            slots = torch.arange(kv_len - kept.shape[1], kv_len, device=kept.device) % size
            self._ring[:, slots] = kept
        self._count = min(size, self._count + n)
        self.kv_len = kv_len

    def truncate(self, kv_len: int) -> None:
        """Forget the queries of tokens from `kv_len` on."""
        if kv_len < self.kv_len:
            self._count = max(0, self._count - (self.kv_len - kv_len))
            self.kv_len = kv_len

    def in_order(self, kv_len: int) -> Tensor:
        """[num_qo_heads, n, head_dim] up to that of token kv_len - 1; none if that is not known."""
        count = self._count if kv_len == self.kv_len else 0
        slots = torch.arange(kv_len - count, kv_len, device=self._ring.device)
        return self._ring[:, slots % self._ring.shape[1]]

    def to(self, device: torch.device) -> None:
        """Keep them on `device` from now on."""
        if self._ring.device != device:
            # An empty ring is made anew: copying it would wait for the device.
            empty = torch.empty_like(self._ring, device=device)
            self._ring = self._ring.to(device) if self._count else empty

    def copy(self) -> RecentQueries:
        copied = RecentQueries.__new__(RecentQueries)
        copied._ring, copied._count, copied.kv_len = self._ring.clone(), self._count, self.kv_len
        return copied


class TextMarks:
    """uint8 marks of a sequence's tokens, growing."""

    def __init__(self) -> None:
        self._marks = np.zeros(_CAPACITY_STEP, np.uint8)
        self.length = 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Of all marks, with room for more."""
        return self._marks

    def append(self, marks: npt.NDArray[np.uint8]) -> None:
        end = self.length + len(marks)
        if end > len(self._marks):
            grown = np.zeros(capacity_for(end), np.uint8)
            grown[: self.length] = self._marks[: self.length]
            self._marks = grown
        self._marks[self.length : end] = marks
        self.length = end

    def address(self, kv_len: int) -> int:
        """Of the first mark; 0 if not all of `kv_len` tokens have one."""
        return int(self._marks.ctypes.data) if self.length >= kv_len else 0

    def first(self, kv_len: int) -> npt.NDArray[np.uint8] | None:
        """[kv_len], or None if not all have one."""
        return self._marks[:kv_len] if self.length >= kv_len else None

    def copy(self) -> TextMarks:
        copied = TextMarks()
        copied._marks, copied.length = self._marks.copy(), self.length
        return copied


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
        self._store = store
        self._num_qo_heads = num_qo_heads
        self._sm_scale = sm_scale
        self._pool = pool
        self._layers = frozenset(layers)
        self._arrays: dict[int, LayerArrays] = {}
        self._queries: dict[int, dict[int, RecentQueries]] = {}
        self._marks: dict[int, TextMarks] = {}

    @property
    def layers(self) -> frozenset[int]:
        """Which layers ask the policy."""
        return self._layers

    @property
    def num_bytes(self) -> int:
        """Of all sequences' arrays."""
        return sum(arrays.num_bytes for arrays in self._arrays.values())

    def arrays_of(self, seq: int) -> LayerArrays | None:
        """What has been built for a sequence."""
        return self._arrays.get(seq)

    def ensure(self, seq: int, kv_len: int) -> LayerArrays:
        """The arrays of `seq`, built or grown so that they serve `kv_len` tokens."""
        if seq not in self._arrays:
            self._build(seq, kv_len)
        arrays = self._arrays[seq]
        if kv_len > arrays.capacity_tokens:
            capacity = capacity_for(kv_len)
            layers = [
                _contiguous(self.policy.grow(i, old, capacity)) if old else []
                for i, old in enumerate(arrays.layers)
            ]
            arrays = self._arrays[seq] = LayerArrays(layers, capacity)
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
        """Give `child` copies of what is known of `parent`."""
        if parent in self._arrays:
            self._arrays[child] = self._arrays[parent].copy()
        if parent in self._queries:
            of_parent = self._queries[parent]
            self._queries[child] = {layer: q.copy() for layer, q in of_parent.items()}
        if parent in self._marks:
            self._marks[child] = self._marks[parent].copy()

    def truncate(self, seq: int, kv_len: int) -> None:
        """The sequence keeps its first `kv_len` tokens."""
        for queries in self._queries.get(seq, {}).values():
            queries.truncate(kv_len)
        if seq in self._marks:
            self._marks[seq].length = min(self._marks[seq].length, kv_len)
        arrays = self._arrays.get(seq)
        if arrays is not None and not all(
            self.policy.truncate(layer_idx, of_layer, kv_len)
            for layer_idx, of_layer in enumerate(arrays.layers)
            if of_layer
        ):
            self._arrays.pop(seq)

    def rebuild(self, seq: int) -> None:
        """Many tokens came at once, unseen by the callbacks: build again when it is needed."""
        self._arrays.pop(seq, None)

    def forget(self, seq: int) -> None:
        """The sequence is gone."""
        for known in (self._arrays, self._queries, self._marks):
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

    def install(self, seq: int, layers: Mapping[int, Sequence[Array]], kv_len: int) -> None:
        """Take the arrays of all layers that ask the policy, built to serve `kv_len` tokens."""
        arrays = [
            _contiguous(layers[layer_idx]) if layer_idx in self._layers else []
            for layer_idx in range(self._store.num_layers)
        ]
        self._arrays[seq] = LayerArrays(arrays, capacity_for(kv_len))
        self._queries.pop(seq, None)

    def end_prefill(self, seq: int) -> None:
        """Queries that are still wanted come to the host, where decoding records the next ones."""
        for recorded in self._queries.get(seq, {}).values():
            recorded.to(torch.device("cpu"))

    def _build(self, seq: int, kv_len: int) -> None:
        layers = {}
        for layer_idx in sorted(self._layers):
            keys, values = self._store.gather(seq, layer_idx)
            context = self.build_context(seq, layer_idx, keys, values, kv_len)
            layers[layer_idx] = self.policy.build(context)
        self.install(seq, layers, kv_len)


def capacity_for(kv_len: int) -> int:
    """Tokens to make room for when `kv_len` are there."""
    return kv_len + max(_CAPACITY_STEP, kv_len // 8)


def _contiguous(arrays: Sequence[Array]) -> list[Array]:
    return [np.ascontiguousarray(array) for array in arrays]
