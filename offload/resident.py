"""What stays on the GPU beside the weights: windows of all layers, whole KV of a few.

A *slot* is a row of a decode step. While a sequence is bound to a slot, the GPU holds of it
    - in every layer whose attention the host computes: its sink tokens and its recent window;
    - in the resident layers (those a policy leaves dense): every token, in pages.
The host store has all of it too, so that binding is only copying, and forks, truncation and beams
need no GPU code: a slot that no longer tells the truth is bound again.

Window layout: [num_slots, 2, num_kv_heads, sink_tokens + recent_tokens, head_dim]; token p is at p
if p < sink_tokens, else at sink_tokens + (p - sink_tokens) % recent_tokens. Pages have the layout
of the store's pages and are found through a table of addresses int64 [num_slots, max_pages].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.interrupts import shielded
from offload.kv_store import KVStore
from offload.memory import DeviceMemoryError, format_bytes
from offload.step_bytes import whole_slabs


@dataclass
class Slot:
    """seq: the bound sequence, or None. kv_len: tokens of it that the GPU knows."""

    seq: int | None = None
    kv_len: int = 0
    last_used: int = 0


class DevicePages:
    """Pages of one shape on a device, handed out by address.

    Args:
        budget_bytes: hard limit of all slabs; None: what the device has.
    """

    def __init__(
        self,
        page_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int | None,
    ) -> None:
        self.page_bytes = math.prod(page_shape) * dtype.itemsize
        self.reserved_bytes = 0
        self._page_shape, self._dtype, self._device = page_shape, dtype, device
        self._budget_bytes = budget_bytes
        self._pages: dict[int, Tensor] = {}  # by address
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def page(self, address: int) -> Tensor:
        """The page itself: [*page_shape]."""
        return self._pages[address]

    def allocate(self, num_pages: int) -> list[int]:
        """Addresses of `num_pages` pages.

        Raises:
            DeviceMemoryError: before anything changes, if they do not fit.
        """
        while len(self._free) < num_pages:
            self._grow(whole_slabs(num_pages - len(self._free)))
        taken = self._free[-num_pages:][::-1] if num_pages else []
        del self._free[len(self._free) - num_pages :]
        return taken

    def release(self, addresses: Sequence[int]) -> None:
        self._free += reversed(addresses)

    def _grow(self, num_pages: int) -> None:
        num_bytes = num_pages * self.page_bytes
        left = None if self._budget_bytes is None else self._budget_bytes - self.reserved_bytes
        if left is not None and num_bytes > left:
            num_pages = left // self.page_bytes
            num_bytes = num_pages * self.page_bytes
        if num_pages < 1:
            raise DeviceMemoryError(
                f"the layers that stay on the GPU need another page of "
                f"{format_bytes(self.page_bytes)} beside {format_bytes(self.reserved_bytes)}, "
                f"but their budget is {format_bytes(self._budget_bytes or 0)}; raise max_memory "
                "of the device, lower the policy's dense_layers or shorten the context"
            )
        try:
            slab = torch.empty(num_pages, *self._page_shape, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no {format_bytes(num_bytes)} left for the layers that stay on it; "
                "lower the policy's dense_layers, the batch size or the context"
            ) from error
        self.reserved_bytes += num_bytes
        for page in slab:
            self._pages[page.data_ptr()] = page
            self._free.append(page.data_ptr())


class ResidentKV:
    """The GPU's share of the KV cache of up to `num_slots` sequences.

    Args:
        host_layers: layers whose attention the host computes: windows only.
        resident_layers: layers whose KV stays on the GPU as a whole.
        max_context: tokens a sequence may have.
        budget_bytes: hard limit of the pages; None: what the device has.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        host_layers: Sequence[int],
        resident_layers: Sequence[int],
        sink_tokens: int,
        recent_tokens: int,
        num_slots: int,
        max_context: int,
        device: torch.device,
        budget_bytes: int | None = None,
    ) -> None:
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.host_layers, self.resident_layers = tuple(host_layers), tuple(resident_layers)
        self.slots = [Slot() for _ in range(num_slots)]
        self._store = store
        self._clock = 0
        shape = (num_slots, 2, store.num_kv_heads, sink_tokens + recent_tokens, store.head_dim)
        self.windows = {
            layer_idx: torch.zeros(shape, dtype=store.dtype, device=device)
            for layer_idx in host_layers
        }
        self._pages = DevicePages(
            (2, store.num_kv_heads, store.page_tokens, store.head_dim),
            store.dtype,
            device,
            budget_bytes,
        )
        max_pages = -(-max_context // store.page_tokens)
        self.page_tables = {
            layer_idx: torch.zeros(num_slots, max_pages, dtype=torch.int64, device=device)
            for layer_idx in resident_layers
        }
        self._addresses: list[list[list[int]]] = [
            [[] for _ in self.resident_layers] for _ in self.slots
        ]

    @property
    def num_bytes(self) -> int:
        """Device bytes of windows, pages and tables."""
        tensors = [*self.windows.values(), *self.page_tables.values()]
        return sum(tensor.nbytes for tensor in tensors) + self._pages.reserved_bytes

    def bind(self, seqs: Sequence[int]) -> list[int]:
        """A slot for each of `seqs` (distinct, at most as many as there are slots).

        The slots know all committed tokens of their sequences.

        Raises:
            DeviceMemoryError: the resident layers do not fit, although nothing else is bound now.
        """
        self._clock += 1
        slot_of = {
            slot.seq: index for index, slot in enumerate(self.slots) if slot.seq in set(seqs)
        }
        spare = sorted(
            (index for index in range(len(self.slots)) if index not in slot_of.values()),
            # Free slots first, low ones first: a step runs as many rows as its highest slot needs.
            key=lambda i: (self.slots[i].last_used if self.slots[i].seq is not None else -1, i),
        )
        for index in slot_of.values():
            self.slots[index].last_used = self._clock
        chosen = []
        for seq in seqs:
            index = slot_of[seq] if seq in slot_of else spare.pop(0)
            slot = self.slots[index]
            kv_len = self._store.kv_len(seq)
            if slot.seq != seq or slot.kv_len != kv_len:
                self._load(index, seq, kv_len)
            slot.last_used = self._clock
            chosen.append(index)
        return chosen

    def reserve(self, slots: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Give the resident layers of `slots` pages for `kv_lens` tokens."""
        for slot, kv_len in zip(slots, kv_lens, strict=True):
            self._reserve(slot, kv_len)

    def advance(self, slots: Sequence[int], kv_lens: Sequence[int]) -> None:
        """A decode step has written the tokens up to `kv_lens` of the sequences in `slots`."""
        for slot, kv_len in zip(slots, kv_lens, strict=True):
            self.slots[slot].kv_len = kv_len

    def forget(self, seq: int) -> None:
        """What the GPU knows of `seq` is no longer true, or no longer needed."""
        for index, slot in enumerate(self.slots):
            if slot.seq == seq:
                self._clear(index)

    def _clear(self, index: int) -> None:
        self.slots[index] = Slot()
        with shielded():
            for addresses in self._addresses[index]:
                self._pages.release(addresses)
                addresses.clear()

    def _reserve(self, index: int, kv_len: int) -> None:
        needed = -(-kv_len // self._store.page_tokens)
        missing = [needed - len(addresses) for addresses in self._addresses[index]]
        if max(missing, default=0) <= 0:
            return
        with shielded():
            new = self._allocate(index, sum(max(0, count) for count in missing))
            for layer_idx, addresses, count in zip(
                self.resident_layers, self._addresses[index], missing, strict=True
            ):
                if count <= 0:
                    continue
                taken, new = new[:count], new[count:]
                table = self.page_tables[layer_idx]
                table[index, len(addresses) : needed] = torch.tensor(taken).to(table.device)
                addresses += taken

    def _allocate(self, index: int, num_pages: int) -> list[int]:
        """Pages for slot `index`; if need be, those of slots that are not in this step."""
        while True:
            try:
                return self._pages.allocate(num_pages)
            except DeviceMemoryError:
                idle = [
                    i
                    for i, slot in enumerate(self.slots)
                    if i != index and slot.last_used != self._clock and any(self._addresses[i])
                ]
                if not idle:
                    raise
                self._clear(min(idle, key=lambda i: self.slots[i].last_used))

    def _load(self, index: int, seq: int, kv_len: int) -> None:
        """Copy what the slot must know of `seq` from the host store."""
        self._clear(index)
        self._reserve(index, kv_len)
        sinks = min(self.sink_tokens, kv_len)
        first = max(self.sink_tokens, kv_len - self.recent_tokens)
        for layer_idx, window in self.windows.items():
            if sinks:
                for side, rows in enumerate(self._store.gather(seq, layer_idx, 0, sinks)):
                    window[index, side, :, :sinks] = rows.to(window.device)
            if first < kv_len:
                positions = torch.arange(first, kv_len) - self.sink_tokens
                places = (self.sink_tokens + positions % self.recent_tokens).to(window.device)
                for side, rows in enumerate(self._store.gather(seq, layer_idx, first, kv_len)):
                    window[index, side][:, places] = rows.to(window.device)
        page_tokens = self._store.page_tokens
        for layer_idx, addresses in zip(self.resident_layers, self._addresses[index], strict=True):
            for first, _, run in self._store.page_views(seq, layer_idx):
                for number, host_page in enumerate(run, first // page_tokens):
                    page = self._pages.page(addresses[number])
                    page[:, :, : host_page.shape[2]].copy_(host_page, non_blocking=True)
        self.slots[index] = Slot(seq, kv_len)
