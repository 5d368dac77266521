"""What is remembered of one sequence: a policy's arrays, recent queries, marks of the text."""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.selection.layer_state import State

if TYPE_CHECKING:
    from offload.selection.layouts import StateLayout

_CAPACITY_STEP = 4096  # tokens; and an eighth of the length, so that growing stays rare
# Tokens that a draft may take back, of queries beyond those that a policy observes.
_SPARE_QUERIES = 32


class LayerArrays:
    """A policy's arrays of one sequence, and their addresses as the kernels want them.

    Args:
        layers: of each layer; {} where the policy is not asked.
        num_built: of the sequence's tokens, how many they were built from.

    Attributes:
        built: the layers that have some.
    """

    def __init__(
        self, layout: StateLayout, layers: list[State], capacity_tokens: int, num_built: int
    ) -> None:
        self._layout = layout
        self.layers = layers
        self.capacity_tokens, self.num_built = capacity_tokens, num_built
        self.pointers = np.zeros((len(layers), len(layout)), np.int64)
        for layer_idx, arrays in enumerate(layers):
            if arrays:
                self.pointers[layer_idx] = layout.addresses(arrays)
        self.num_bytes = sum(array.nbytes for arrays in layers for array in arrays.values())
        self.built = frozenset(i for i, arrays in enumerate(layers) if arrays)

    def only(self, layers: Set[int]) -> LayerArrays:
        """The same arrays, of some of the layers."""
        kept = [arrays if i in layers else {} for i, arrays in enumerate(self.layers)]
        return LayerArrays(self._layout, kept, self.capacity_tokens, self.num_built)

    def copy(self, into: LayerArrays | None = None) -> LayerArrays:
        """A copy; in the memory of `into`, if it is as large."""
        if into is not None and _shapes(into) == _shapes(self):
            for arrays, sources in zip(into.layers, self.layers, strict=True):
                for name, source in sources.items():
                    np.copyto(arrays[name], source)
            into.capacity_tokens, into.num_built = self.capacity_tokens, self.num_built
            return into
        layers = [{name: x.copy() for name, x in arrays.items()} for arrays in self.layers]
        return LayerArrays(self._layout, layers, self.capacity_tokens, self.num_built)


class RecentQueries:
    """The last `size` queries of one layer of one sequence, in a ring.

    The ring has some more, so that they are still `size` after a few tokens were taken back.
    """

    def __init__(self, num_qo_heads: int, size: int, head_dim: int, dtype: torch.dtype) -> None:
        self._size = size
        self._ring = torch.empty(num_qo_heads, size + _SPARE_QUERIES, head_dim, dtype=dtype)
        self._count = 0  # valid ones
        self.kv_len = 0  # of the newest

    @staticmethod
    def bytes_for(num_qo_heads: int, size: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_qo_heads * (size + _SPARE_QUERIES) * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self._ring.nbytes

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

    def reaches(self, kv_len: int) -> bool:
        """Whether some would be left by `truncate(kv_len)`."""
        return self._count > self.kv_len - kv_len

    def in_order(self, kv_len: int) -> Tensor:
        """[num_qo_heads, n, head_dim] up to that of token kv_len - 1; none if that is not known."""
        count = min(self._count, self._size) if kv_len == self.kv_len else 0
        slots = torch.arange(kv_len - count, kv_len, device=self._ring.device)
        return self._ring[:, slots % self._ring.shape[1]]

    def kept(self) -> Tensor:
        """[num_qo_heads, n, head_dim]: all valid ones, oldest first, up to that of kv_len - 1."""
        slots = torch.arange(self.kv_len - self._count, self.kv_len, device=self._ring.device)
        return self._ring[:, slots % self._ring.shape[1]]

    def put_back(self, queries: Tensor, kv_len: int) -> None:
        """Keep what `kept` has given, and nothing else."""
        self.kv_len = kv_len - queries.shape[1]
        self._count = 0
        self.append(queries, kv_len)

    def to(self, device: torch.device) -> None:
        """Keep them on `device` from now on."""
        if self._ring.device != device:
            # An empty ring is made anew: copying it would wait for the device.
            empty = torch.empty_like(self._ring, device=device)
            self._ring = self._ring.to(device) if self._count else empty

    def copy(self) -> RecentQueries:
        copied = copy.copy(self)
        copied._ring = self._ring.clone()
        return copied


class TextMarks:
    """uint8 marks of a sequence's tokens, growing: the first `length` of `array`."""

    def __init__(self) -> None:
        self.array: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.length = 0

    def append(self, marks: npt.NDArray[np.uint8]) -> None:
        end = self.length + len(marks)
        if end > len(self.array):
            grown = np.zeros(capacity_for(end), np.uint8)
            grown[: self.length] = self.array[: self.length]
            self.array = grown
        self.array[self.length : end] = marks
        self.length = end

    def truncate(self, kv_len: int) -> None:
        """Forget the marks of tokens from `kv_len` on."""
        self.length = min(self.length, kv_len)

    def renumber(self, kv_len: int, new_len: int, first: int, last: int) -> None:
        """Keeps the marks of the first and last of `kv_len` tokens and drops the others."""
        if self.length < kv_len:
            self.length = 0
            return
        tail = self.array[kv_len - last : kv_len].copy()
        self.array[first:new_len] = 0
        self.array[new_len - last : new_len] = tail
        self.length = new_len

    def address(self, kv_len: int) -> int:
        """Address of the first mark; 0 if not all of `kv_len` tokens have one."""
        return int(self.array.ctypes.data) if self.length >= kv_len else 0

    def first(self, kv_len: int) -> npt.NDArray[np.uint8] | None:
        """[kv_len], or None if not all have one."""
        return self.array[:kv_len] if self.length >= kv_len else None

    def copy(self) -> TextMarks:
        copied = copy.copy(self)
        copied.array = self.array.copy()
        return copied


def capacity_for(kv_len: int) -> int:
    """Tokens to make room for when `kv_len` are there."""
    return kv_len + max(_CAPACITY_STEP, kv_len // 8)


def _shapes(arrays: LayerArrays) -> list[list[tuple[tuple[int, ...], Any]]]:
    return [[(x.shape, x.dtype) for x in of_layer.values()] for of_layer in arrays.layers]
