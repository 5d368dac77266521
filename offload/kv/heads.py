"""The KV heads of each layer, and where its keys and values lie in a page of the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offload.kv.page_pool import page_shape

# Of a layer in a page of all layers: its first element, and the shape of its part.
Slot = tuple[int, tuple[int, ...]]


class HeadsOfLayers:
    """The heads of all layers, each number for all of them or of each.

    Attributes:
        of_layers: (num_kv_heads, head_dim) of each layer.

    Raises:
        ValueError: numbers of other layers, heads less than 1, or a head_dim that is no multiple
            of 8.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int | Sequence[int], head_dim: int | Sequence[int]
    ) -> None:
        columns = []
        for name, size in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            sizes = (size,) * num_layers if isinstance(size, int) else tuple(size)
            if len(sizes) != num_layers:
                raise ValueError(f"expected {num_layers} {name}, got {len(sizes)}")
            if min(sizes) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(sizes)}")
            columns.append(sizes)
        for dim in columns[1]:
            if dim % 8:
                raise ValueError(f"head_dim must be a multiple of 8, got {dim}")
        self.of_layers: list[tuple[int, int]] = [*zip(*columns, strict=True)]

    @property
    def are_alike(self) -> bool:
        return len(set(self.of_layers)) == 1

    @property
    def most_kv_heads(self) -> int:
        """Of any layer."""
        return max(num_kv_heads for num_kv_heads, _ in self.of_layers)

    def check_alike(self, what: str) -> None:
        """Refuse `what` where layers differ.

        Raises:
            NotImplementedError: names the first layer that differs, and its heads.
        """
        for layer_idx, heads in enumerate(self.of_layers):
            if heads != self.of_layers[0]:
                raise NotImplementedError(
                    f"layer {layer_idx} has (num_kv_heads, head_dim) = {heads}, layer 0 has "
                    f"{self.of_layers[0]}: {what} needs layers whose heads are alike"
                )

    def page_shape(self, page_tokens: int) -> tuple[int, ...]:
        """Of a page of the pool: of one layer, or [elements] of all where they differ."""
        if self.are_alike:
            return page_shape(self.of_layers[0][0], page_tokens, self.of_layers[0][1])
        offset, shape = self.slots(page_tokens)[-1]
        return (offset + math.prod(shape),)

    def slots(self, page_tokens: int) -> list[Slot]:
        """Where each layer is in a page of all; [] where layers are alike, and have pages."""
        slots: list[Slot] = []
        offset = 0
        for num_kv_heads, head_dim in () if self.are_alike else self.of_layers:
            slots.append((offset, page_shape(num_kv_heads, page_tokens, head_dim)))
            offset += math.prod(slots[-1][1])
        return slots
