"""What stays on the GPU beside the weights: windows of all layers, whole KV of some heads.

A *slot* is a row of a decode step. While a sequence is bound to a slot, the GPU holds of it
    - in every layer that has heads which are not resident: its sink tokens and its recent window;
    - of the resident heads (those of layers that a policy leaves dense, and others that placement
      puts there): every token, in pages of the layer's resident heads; of layers with a window the
      last tokens alone, token p in the place of p % window;
    - of layers whose rows the GPU fetches, and of all if it holds all: the addresses of the host's
      pages;
    - of layers in which it lists candidates: codes of the keys (`resident_codes`);
    - of heads with hot rows: these (`hot_rows`), from the first step on.
Where heads are placed elsewhere, or rows are added, what is still true goes over (`take_over`).
The host store has all of it too, so that binding is only copying, and forks, truncation and beams
need no GPU code: a slot that no longer tells the truth is bound again.

Window layout: [num_slots, K|V, num_kv_heads, sink_tokens + recent_tokens, row]; token p is at p
if p < sink_tokens, else at sink_tokens + (p - sink_tokens) % recent_tokens. Pages are laid out
[K|V][resident heads][page_tokens][row] and are found through a table of addresses int64
[num_slots, max_pages]. Rows are as the host's pages have them (`KVFormat`), int8 or not; where
these have keys alone, so have windows and pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpu_ops.layout import Layout
from offload.decode.gpu.hot_rows import HotRows
from offload.decode.gpu.layer_heads import LayerHeads
from offload.decode.gpu.pages import DevicePages, PageBudget, whole_slabs
from offload.decode.gpu.resident_codes import ResidentCodes
from offload.kv.page_pool import page_shape
from offload.kv.store import KVStore
from offload.policies import Policy
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded
from offload.system.memory import format_bytes

# Of policies that name none (full attention): enough for the GPU to have something to do.
_SINK_TOKENS, _RECENT_TOKENS = 4, 64


@dataclass
class Slot:
    """seq: the bound sequence, or None. kv_len: tokens of it that the GPU knows. is_whole: False:
    what was taken over lacks some layers, which are loaded when it is bound. is_rebased: there is
    more of it by now, and of the first kv_len tokens whole heads and sinks are there.
    """

    seq: int | None = None
    kv_len: int = 0
    last_used: int = 0
    is_whole: bool = True
    is_rebased: bool = False


class HostPages:
    """Addresses of the host's pages, for kernels that fetch rows of them.

    Args:
        tables: int64 [len(layers), num_slots, max_pages].

    Attributes:
        tables: int64 [num_slots, max_pages] of each layer.
    """

    def __init__(self, layers: Sequence[int], tables: Tensor) -> None:
        self._layers, self._tables = list(layers), tables
        self.tables = dict(zip(self._layers, tables, strict=True))
        self._known: dict[int, tuple[int, int]] = {}  # of a slot: its pages, and the last's address

    def update(self, slot: int, addresses: torch.Tensor) -> None:
        """The pages of the sequence in `slot`: int64 [num_layers, num_pages] of all layers.

        Of one that is known only the last is exchanged for another; else `forget` it first.
        """
        if not self._layers or not addresses.shape[1]:
            return
        known = (addresses.shape[1], int(addresses[self._layers[0], -1]))
        if self._known.get(slot) != known:
            self._tables[:, slot, : known[0]] = addresses[self._layers].to(self._tables.device)
            self._known[slot] = known  # last: ctrl-C may come between the two

    def forget(self, slot: int) -> None:
        self._known.pop(slot, None)


class ResidentKV:
    """The GPU's share of the KV cache of up to `num_slots` sequences.

    Args:
        layers: who attends to which heads.
        max_context: tokens a sequence may have.
        budget: of all pages; None: what the device has.
        codes: which the layers need, within the same budget; None: no layer has some.
        hot: rows that layers keep; None: no layer does.

    Attributes:
        budget: of all pages.
        row_dtype: of rows in pages and windows.
        took_over: pages lie as others needed them, and no step has had room beside them yet.

    Raises:
        DeviceMemoryError: a budget that cannot hold one page of each resident head.
    """

    def __init__(
        self,
        store: KVStore,
        layers: Sequence[LayerHeads],
        *,
        sink_tokens: int,
        recent_tokens: int,
        num_slots: int,
        max_context: int,
        device: torch.device,
        budget: PageBudget | None = None,
        codes: ResidentCodes | None = None,
        hot: HotRows | None = None,
    ) -> None:
        self.codes, self.hot = codes, hot
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.resident_heads = {
            layer_idx: layer.resident for layer_idx, layer in enumerate(layers) if layer.resident
        }
        self.slots = [Slot() for _ in range(num_slots)]
        self.budget = budget or PageBudget()
        self.took_over = False
        self._layers = tuple(layers)
        self._store = store
        self._clock = 0
        self.row_dtype = page_dtype = store.format.page_dtype
        row_items = store.format.row_items(store.head_dim)
        self._pages = {
            count: DevicePages(
                page_shape(count, store.page_tokens, row_items, store.format.num_parts),
                page_dtype,
                device,
                self.budget,
            )
            for count in sorted({len(heads) for heads in self.resident_heads.values()})
        }
        self._check_budget()
        layout = self.layout(
            layers,
            num_slots=num_slots,
            num_kv_heads=store.num_kv_heads,
            row_items=row_items,
            window_tokens=sink_tokens + recent_tokens,
            max_pages=-(-max_context // store.page_tokens),
            dtype=page_dtype,
            num_parts=store.format.num_parts,
        )

        def of_layers(name: str) -> list[Tensor]:
            (num_layers, *shape), dtype = layout[name]
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        self._most_pages = [layer.num_pages(max_context, store.page_tokens) for layer in layers]
        self._holds_all = all(layer.is_resident and not layer.window for layer in layers)
        windows = [layer_idx for layer_idx, layer in enumerate(layers) if layer.has_window]
        self.windows = dict(zip(windows, of_layers("windows"), strict=True))
        tables = of_layers("page_tables")
        self.page_tables = dict(zip(self.resident_heads, tables, strict=True))
        shape, dtype = layout["host_tables"]
        self.host_pages = HostPages(
            addressed_layers(layers), torch.zeros(shape, dtype=dtype, device=device)
        )
        self._addresses: list[dict[int, list[int]]] = [
            {layer_idx: [] for layer_idx in self.resident_heads} for _ in self.slots
        ]
        # Layers that slots which are not whole lack.
        self._missing_windows: frozenset[int] = frozenset()
        self._missing_pages: frozenset[int] = frozenset()

    @staticmethod
    def layout(
        layers: Sequence[LayerHeads],
        *,
        num_slots: int,
        num_kv_heads: int,
        row_items: int,
        window_tokens: int,
        max_pages: int,
        dtype: torch.dtype,
        num_parts: int = 2,
    ) -> Layout:
        """Layout of all layers' windows, and tables of GPU pages and of the host's. What pages
        take is in `resident_pages`.

        Args:
            row_items, dtype, num_parts: of rows and pages (`KVFormat`).
        """
        window = (num_slots, num_parts, num_kv_heads, window_tokens, row_items)
        table = (num_slots, max_pages)
        return {
            "windows": ((sum(layer.has_window for layer in layers), *window), dtype),
            "page_tables": ((sum(bool(x.resident) for x in layers), *table), torch.int64),
            "host_tables": ((len(addressed_layers(layers)), *table), torch.int64),
        }

    @property
    def num_bytes(self) -> int:
        """Device bytes of windows, pages, tables and codes."""
        by_layer = (self.windows, self.page_tables, self.host_pages.tables)
        held = sum(tensor.nbytes for tensors in by_layer for tensor in tensors.values())
        held += 0 if self.codes is None else self.codes.table_bytes
        held += 0 if self.hot is None else self.hot.num_bytes
        return held + self.budget.reserved_bytes

    def page(self, layer_idx: int, address: int) -> Tensor:
        """A page of a layer: [K|V, resident heads, page_tokens, row]."""
        return self._pages[len(self.resident_heads[layer_idx])].page(address)

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
            if slot.seq != seq or slot.kv_len != kv_len or slot.is_rebased:
                self._load(index, seq, kv_len)
                slot = self.slots[index]
            elif not slot.is_whole:
                self._load_missing(index, seq, kv_len)
            elif self.codes is not None and not self.codes.holds(index):  # it has grown
                self._load_codes(self.codes, index, seq, kv_len)
            self._update_host_pages(index, seq, kv_len)
            if self.hot is not None:
                self.hot.bind(index, seq, kv_len)
            slot.last_used = self._clock
            chosen.append(index)
        return chosen

    def reserve(self, slots: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Give the resident layers of `slots` pages for `kv_lens` tokens."""
        for slot, kv_len in zip(slots, kv_lens, strict=True):
            self._reserve(slot, kv_len)
            if self.codes is not None:
                self._find_room(slot, partial(self.codes.reserve, slot, kv_len))

    def address_pages(
        self, slots: Sequence[int], seqs: Sequence[int], kv_lens: Sequence[int]
    ) -> None:
        """Tell the GPU where the host's pages of the sequences in `slots` are, up to `kv_lens`
        tokens, which are reserved."""
        for slot, seq, kv_len in zip(slots, seqs, kv_lens, strict=True):
            self._update_host_pages(slot, seq, kv_len)

    def advance(self, slots: Sequence[int], kv_lens: Sequence[int]) -> None:
        """A decode step has written the tokens up to `kv_lens` of the sequences in `slots`."""
        for slot, kv_len in zip(slots, kv_lens, strict=True):
            self.slots[slot].kv_len = kv_len

    def forget(self, seq: int) -> None:
        """What the GPU knows of `seq` is no longer true, or no longer needed."""
        for index, slot in enumerate(self.slots):
            if slot.seq == seq:
                self._clear(index)

    def rebase(self, seq: int, kv_len: int, to: int) -> None:
        """`to` goes on from the first `kv_len` tokens of `seq`, which may be itself, outside of
        decode steps: of what is here, these tokens of whole heads are still true."""
        for index, slot in enumerate(self.slots):
            if slot.seq != seq:
                continue
            if not slot.is_whole or not kv_len:
                self._clear(index)
                continue
            self.host_pages.forget(index)
            if self.hot is not None:
                self.hot.forget(index)
            if self.codes is not None:
                self.codes.clear(index)
            num_kept = min(kv_len, slot.kv_len)
            self.slots[index] = replace(slot, seq=to, kv_len=num_kept, is_rebased=True)

    def crop(self, seq: int, kv_len: int) -> None:
        """`seq` keeps its first `kv_len` tokens; a window has lost some that come into it again."""
        for index, slot in enumerate(self.slots):
            if slot.seq == seq and not self._holds_all:
                self._clear(index)
            elif slot.seq == seq:
                slot.kv_len = min(slot.kv_len, kv_len)
                self.host_pages.forget(index)

    def trim(self) -> None:
        """Give back the memory of pages that no sequence uses."""
        with shielded():
            for pages in self._pages.values():
                pages.trim()
            if self.codes is not None:
                self.codes.trim()

    @property
    def is_bound(self) -> bool:
        """Whether there is anything of a sequence."""
        return any(slot.seq is not None for slot in self.slots)

    def clear(self) -> None:
        """Give back all that there is of sequences: what is bound is loaded again."""
        for index in range(len(self.slots)):
            self._clear(index)
        self.trim()

    def keep(self, layers: Sequence[LayerHeads]) -> None:
        """Give back what steps of `layers` cannot take over; only `take_over` comes after this,
        beside what ends sequences."""
        with shielded():
            for layer_idx, heads in [*self.resident_heads.items()]:
                if layers[layer_idx].resident != heads:
                    for addresses in self._addresses:
                        self._pages[len(heads)].release(addresses.pop(layer_idx))
                    del self.resident_heads[layer_idx], self.page_tables[layer_idx]
            for layer_idx in [*self.windows]:
                if not layers[layer_idx].has_window:
                    del self.windows[layer_idx]
            if self.codes is not None:
                for index in range(len(self.slots)):
                    self.codes.clear(index)
            self.trim()
            self.codes = self.hot = None
            self.host_pages = HostPages((), torch.empty(0))

    def take_over(self, old: ResidentKV) -> None:
        """Have what is still true of `old`, whose budget this one shares and which is of no more
        use; nothing is bound yet. Layers with the same resident heads keep their pages, and windows
        are copied. The rest is loaded when a sequence is bound.
        """
        old.keep(self._layers)
        max_pages = min((table.shape[1] for table in self.page_tables.values()), default=0)
        fits = [
            index
            for index, slot in enumerate(old.slots)
            if slot.seq is not None
            and slot.is_whole
            and not slot.is_rebased
            and all(len(pages) <= max_pages for pages in old._addresses[index].values())
        ]
        fits.sort(key=lambda index: old.slots[index].last_used, reverse=True)
        chosen = sorted(fits[: len(self.slots)])
        for index in range(len(old.slots)):
            if index not in chosen:
                old._clear(index)
        n = len(chosen)
        tables = [(self.windows[i], window) for i, window in old.windows.items()]
        tables += [(self.page_tables[i], table) for i, table in old.page_tables.items()]
        if n and tables:
            at = torch.tensor(chosen, device=tables[0][0].device)
            for to, table in tables:
                columns = slice(min(to.shape[1], table.shape[1]))
                to[:n, columns] = table[at][:, columns]
        with shielded():
            self._missing_windows = frozenset(self.windows) - frozenset(old.windows)
            self._missing_pages = frozenset(self.resident_heads) - frozenset(old.resident_heads)
            is_whole = not (self._missing_windows or self._missing_pages)
            for index, of_old in enumerate(chosen):
                self.slots[index] = replace(old.slots[of_old], is_whole=is_whole)
                self._addresses[index] |= old._addresses[of_old]
            self._pages |= {n: pages for n, pages in old._pages.items() if n in self._pages}
            self._clock, self.took_over = old._clock, True

    def _check_budget(self) -> None:
        """A page of each resident head, before anything is allocated."""
        limit = self.budget.limit_bytes
        if limit is None:
            return
        needed = sum(self._pages[len(heads)].page_bytes for heads in self.resident_heads.values())
        if needed > limit:
            num_heads = sum(len(heads) for heads in self.resident_heads.values())
            raise DeviceMemoryError(
                f"a page of {self._store.page_tokens} tokens of each of the {num_heads} KV heads "
                f"that stay on the GPU needs {format_bytes(needed)}, but their budget is "
                f"{format_bytes(limit)}; raise max_memory of the device, lower the policy's "
                "dense_layers or place fewer heads there"
            )

    def _update_host_pages(self, index: int, seq: int, kv_len: int) -> None:
        if self.host_pages.tables:
            num_pages = -(-kv_len // self._store.page_tokens)
            table = self._store.page_table(seq)[:, :num_pages]
            self.host_pages.update(index, torch.from_numpy(table))

    def _clear(self, index: int) -> None:
        self.slots[index] = Slot()
        self.host_pages.forget(index)
        if self.hot is not None:
            self.hot.forget(index)
        with shielded():
            for layer_idx, addresses in self._addresses[index].items():
                self._pages[len(self.resident_heads[layer_idx])].release(addresses)
                addresses.clear()
            if self.codes is not None:
                self.codes.clear(index)

    def _reserve(self, index: int, kv_len: int) -> None:
        pages, most = -(-kv_len // self._store.page_tokens), self._most_pages
        missing = {
            layer_idx: needed - len(addresses)
            for layer_idx, addresses in self._addresses[index].items()
            if len(addresses) < (needed := min(pages, most[layer_idx]))
        }
        if not missing:
            return
        with shielded():
            new = self._allocate(index, missing)
            for layer_idx, taken in new.items():
                addresses, table = self._addresses[index][layer_idx], self.page_tables[layer_idx]
                stop = len(addresses) + len(taken)
                table[index, len(addresses) : stop] = torch.tensor(taken).to(table.device)
                addresses += taken

    def _allocate(self, index: int, missing: Mapping[int, int]) -> dict[int, list[int]]:
        """Pages of layers for slot `index`; if need be, those of slots not in this step."""
        new: dict[int, list[int]] = {}
        for layer_idx, count in missing.items():
            pages = self._pages[len(self.resident_heads[layer_idx])]
            while layer_idx not in new:
                try:
                    new[layer_idx] = pages.allocate(count)
                except DeviceMemoryError:
                    if not self._clear_idle(index):
                        for of_layer, taken in new.items():
                            self._pages[len(self.resident_heads[of_layer])].release(taken)
                        raise
        return new

    def _find_room(self, index: int, take: Callable[[], None]) -> None:
        """`take` pages for slot `index`; if need be, those of slots not in this step."""
        while True:
            try:
                return take()
            except DeviceMemoryError:
                if not self._clear_idle(index):
                    raise

    def _clear_idle(self, index: int) -> bool:
        """Give back the pages of the slot used longest ago that is not in this step."""
        idle = [
            i
            for i, slot in enumerate(self.slots)
            if i != index and slot.last_used != self._clock and self._holds_pages(i)
        ]
        if idle:
            self._clear(min(idle, key=lambda i: self.slots[i].last_used))
            self.trim()  # what is missing may be pages of another shape
        return bool(idle)

    def _holds_pages(self, index: int) -> bool:
        if any(self._addresses[index].values()):
            return True
        return self.codes is not None and self.codes.holds(index)

    def _load_codes(self, codes: ResidentCodes, index: int, seq: int, kv_len: int) -> None:
        try:
            self._find_room(index, partial(codes.load, index, seq, kv_len))
        except BaseException:  # what is there of the sequence is not all
            self._clear(index)
            raise

    def _load(self, index: int, seq: int, kv_len: int) -> None:
        """Copy what the slot must know of `seq` from the host store."""
        slot, num_known = self.slots[index], 0
        if slot.seq == seq and slot.is_rebased:
            num_known = slot.kv_len
        else:
            self._clear(index)
        self._load_layers(index, seq, kv_len, self.windows, self.resident_heads, num_known)
        self.slots[index] = Slot(seq, kv_len)

    def _load_missing(self, index: int, seq: int, kv_len: int) -> None:
        """Copy what was not taken over."""
        try:
            self._load_layers(index, seq, kv_len, self._missing_windows, self._missing_pages)
        except BaseException:
            self._clear(index)
            raise
        self.slots[index].is_whole = True

    def _load_layers(
        self,
        index: int,
        seq: int,
        kv_len: int,
        windows: Iterable[int],
        resident: Iterable[int],
        num_known: int = 0,
    ) -> None:
        """Windows and whole heads of these layers, the latter from token `num_known` on; codes."""
        self._reserve(index, kv_len)
        sinks = min(self.sink_tokens, kv_len)
        first = max(self.sink_tokens, kv_len - self.recent_tokens)
        for layer_idx in windows:
            window = self.windows[layer_idx]
            if num_known < sinks:
                of_sinks = self._store.gather(seq, layer_idx, 0, sinks, kept=True)
                for part, rows in zip(window[index], of_sinks, strict=False):
                    part[:, :sinks] = rows.to(window.device)
            if first < kv_len:
                positions = torch.arange(first, kv_len) - self.sink_tokens
                places = (self.sink_tokens + positions % self.recent_tokens).to(window.device)
                recent = self._store.gather(seq, layer_idx, first, kv_len, kept=True)
                for part, rows in zip(window[index], recent, strict=False):
                    part[:, places] = rows.to(window.device)
        for layer_idx in resident:
            addresses = self._addresses[index][layer_idx]
            if self._layers[layer_idx].window:
                self._load_window(layer_idx, seq, addresses, kv_len)
            else:
                self._load_pages(layer_idx, seq, addresses, num_known)
        if self.codes is not None:
            self._load_codes(self.codes, index, seq, kv_len)

    def _load_window(self, layer_idx: int, seq: int, addresses: Sequence[int], kv_len: int) -> None:
        """The last tokens of a layer with a window, in the order of their places."""
        window, page_tokens = self._layers[layer_idx].window, self._store.page_tokens
        first = max(0, kv_len - window)
        parts = self._store.gather(seq, layer_idx, first, kv_len, kept=True)
        rows = torch.stack(parts[: self._store.format.num_parts])
        rows = rows.roll(first % window, 2)  # first = 0 until there are as many as places
        for address, part in zip(addresses, torch.split(rows, page_tokens, 2), strict=False):
            self.page(layer_idx, address)[:, :, : part.shape[2]].copy_(part)

    def _load_pages(
        self, layer_idx: int, seq: int, addresses: Sequence[int], num_known: int
    ) -> None:
        heads = self.resident_heads[layer_idx]
        pages, page_tokens = self._pages[len(heads)], self._store.page_tokens
        for first_token, _, whole_run in self._store.page_views(seq, layer_idx):
            number = max(first_token, num_known) // page_tokens
            host_run = whole_run[number - first_token // page_tokens :]
            for first, stop, run in pages.runs(addresses[number : number + len(host_run)]):
                on_host = host_run[first:stop]
                run = run[..., : on_host.shape[3], :]
                if len(heads) == self._store.num_kv_heads:
                    run.copy_(on_host, non_blocking=True)
                    continue
                for page, host_page in zip(run, on_host, strict=True):
                    for place, head in enumerate(heads):  # of each side, as a whole is one piece
                        for side, of_side in enumerate(page):
                            of_side[place].copy_(host_page[side, head], non_blocking=True)


def addressed_layers(layers: Sequence[LayerHeads]) -> list[int]:
    """Layers whose host pages kernels read, or write where the GPU has all heads of all layers."""
    if all(layer.is_resident for layer in layers):
        return list(range(len(layers)))
    return [layer_idx for layer_idx, layer in enumerate(layers) if layer.gathered or layer.hot]


def window_of(policy: Policy) -> tuple[int, int]:
    """Sink tokens and recent tokens that the GPU keeps of a head."""
    if policy.selects:
        return policy.sink_tokens, policy.recent_tokens
    return _SINK_TOKENS, _RECENT_TOKENS


def resident_pages(
    layers: Sequence[LayerHeads],
    *,
    num_sequences: int,
    kv_len: int,
    page_tokens: int,
    row_items: int,
    dtype: torch.dtype,
    num_parts: int = 2,
) -> Layout:
    """Slabs of what `ResidentKV` holds of so many sequences of `kv_len` tokens, of rows as
    `KVFormat` has them; layers of equally many heads share slabs.
    """
    counts: Counter[int] = Counter()
    for layer in layers:
        if layer.resident:
            counts[len(layer.resident)] += num_sequences * layer.num_pages(kv_len, page_tokens)
    return {
        f"pages of {num_heads} heads": (
            (whole_slabs(num_pages), *page_shape(num_heads, page_tokens, row_items, num_parts)),
            dtype,
        )
        for num_heads, num_pages in counts.items()
    }


def check_resident_room(
    store: KVStore,
    layers: Sequence[LayerHeads],
    num_sequences: int,
    kv_len: int,
    budget_bytes: int | None,
    code_page_bytes: int = 0,
) -> None:
    """Refuse sequences of `kv_len` tokens whose resident heads do not fit a GPU that has
    `budget_bytes` for them; None: what will fit is not known beforehand.

    Args:
        code_page_bytes: of codes for each page of tokens, all layers together.

    Raises:
        DeviceMemoryError: names both, and the options.
    """
    num_heads = sum(len(layer.resident) for layer in layers)
    pages = sum(len(x.resident) * x.num_pages(kv_len, store.page_tokens) for x in layers)
    needed = pages * store.page_bytes // store.num_kv_heads
    needed = num_sequences * (needed + -(-kv_len // store.page_tokens) * code_page_bytes)
    codes = " and the codes of others' keys" if code_page_bytes else ""
    if budget_bytes is not None and needed > budget_bytes:
        raise DeviceMemoryError(
            f"the {num_heads} KV heads that stay on the GPU{codes} need {format_bytes(needed)} for "
            f"{num_sequences} sequences of up to {kv_len} tokens, but their budget is "
            f"{format_bytes(budget_bytes)}; raise max_memory of the device, lower the policy's "
            "dense_layers, place fewer heads there or lower max_new_tokens"
        )
