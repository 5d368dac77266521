"""Pages of KV cache on a device, and the tables by which kernels find pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes


class PageBudget:
    """Bytes that pages of all shapes together may have; None: what the device has."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0

    @property
    def left_bytes(self) -> int | None:
        return None if self.limit_bytes is None else self.limit_bytes - self.reserved_bytes


class DevicePages:
    """Pages of one shape on a device, handed out by address.

    Args:
        budget: shared with pages of other shapes.
        what: they hold, for messages.
    """

    def __init__(
        self,
        page_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        budget: PageBudget,
        what: str = "the KV heads that stay on the GPU",
    ) -> None:
        self.page_bytes = math.prod(page_shape) * dtype.itemsize
        self._page_shape, self._dtype, self._device = page_shape, dtype, device
        self._budget, self._what = budget, what
        self._places: dict[int, tuple[Tensor, int]] = {}  # by address: a slab and the row in it
        self._slabs: list[list[int]] = []  # addresses of what was allocated at once
        self._free: list[int] = []

    def page(self, address: int) -> Tensor:
        """The page itself: [*page_shape]."""
        slab, row = self._places[address]
        return slab[row]

    def runs(self, addresses: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """`addresses` as (first, last + 1, [n, *page_shape]): runs of adjoining pages."""
        first = 0
        while first < len(addresses):
            slab, row = self._places[addresses[first]]
            stop = first + 1
            while stop < len(addresses):
                other, other_row = self._places[addresses[stop]]
                if other is not slab or other_row != row + stop - first:
                    break
                stop += 1
            yield first, stop, slab[row : row + stop - first]
            first = stop

    def allocate(self, num_pages: int) -> list[int]:
        """Addresses of `num_pages` pages.

        Raises:
            DeviceMemoryError: before anything changes, if they do not fit.
        """
        while len(self._free) < num_pages:
            self._grow(num_pages - len(self._free))
        taken = self._free[-num_pages:][::-1] if num_pages else []
        del self._free[len(self._free) - num_pages :]
        return taken

    def release(self, addresses: Sequence[int]) -> None:
        self._free += reversed(addresses)

    def trim(self) -> None:
        """Give back the memory of slabs of which no page is in use."""
        free = set(self._free)
        unused = [slab for slab in self._slabs if free.issuperset(slab)]
        gone = {address for slab in unused for address in slab}
        self._slabs = [slab for slab in self._slabs if gone.isdisjoint(slab)]
        self._free = [address for address in self._free if address not in gone]
        for address in gone:
            del self._places[address]
        self._budget.reserved_bytes -= len(gone) * self.page_bytes

    def _grow(self, missing: int) -> None:
        """Whole slabs; near the budget's end what is missing, because pages of other shapes need
        some of it.
        """
        budget = self._budget
        num_pages = whole_slabs(missing)
        if budget.left_bytes is not None and num_pages * self.page_bytes > budget.left_bytes // 2:
            num_pages = missing
        if budget.left_bytes is not None and num_pages * self.page_bytes > budget.left_bytes:
            raise DeviceMemoryError(
                f"{self._what} need {missing} more pages of {format_bytes(self.page_bytes)} beside "
                f"{format_bytes(budget.reserved_bytes)}, "
                f"but their budget is {format_bytes(budget.limit_bytes or 0)}; raise max_memory "
                "of the device, lower the policy's dense_layers, place fewer heads there or "
                "shorten the context"
            )
        num_bytes = num_pages * self.page_bytes
        try:
            slab = torch.empty(num_pages, *self._page_shape, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no {format_bytes(num_bytes)} left for {self._what}; "
                "lower the policy's dense_layers, place fewer heads there, lower the batch size or "
                "the context"
            ) from error
        budget.reserved_bytes += num_bytes
        addresses = [slab.data_ptr() + row * self.page_bytes for row in range(num_pages)]
        self._places |= {address: (slab, row) for row, address in enumerate(addresses)}
        self._slabs.append(addresses)
        self._free += reversed(addresses)  # taken from the end, so that they adjoin in their order


DEVICE_SLAB_PAGES = 32


def whole_slabs(num_pages: int) -> int:
    """Pages that device memory is taken for when `num_pages` are missing (`DevicePages`)."""
    return -(-num_pages // DEVICE_SLAB_PAGES) * DEVICE_SLAB_PAGES
