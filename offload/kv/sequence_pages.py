"""The pages of one sequence, in every layer: which there are, and which are shared with a fork.

A row of its page table is a layer, or a KV head of a layer where heads are apart (`store`). Where
layers differ one page is of all layers: a row of `page_ids`, of which each layer has a slot. With
windows, too, a layer has the front of pages of its own.

A row of a layer with a window lacks what is well before the window (`free_behind`), and of tokens
that are reserved `at_once` it gets only what will be kept. Until then there is a gap in it, from
`gap` to `gap_ends`: what is before the gap is read while these tokens are written.

Nothing is checked here: `KVStore` checks what it is given, then calls these.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from offload.kv.page_pool import WINDOW_SLACK, Int64Array, PagePool, Slot
from offload.kv.transfer import Part, Piece


class SequencePages:
    """Pages of shape [K|V, heads of a page, page_tokens, head_dim] that hold one sequence.

    Invariants: kv_len <= reserved_len <= num_pages * page_tokens. The rows are extended, forked
    and truncated together, so the pages of a column of `page_ids` have one and the same number of
    owners, but where windows left them: the row with the widest window has the most. Of the pages
    from position kv_len onward, only the one that holds kv_len itself can have other owners, and
    only while `tail_may_be_shared`. Where heads are apart a row lacks its pages before `starts`,
    which is at most kv_len, and 0 in one row at least; a row with a window likewise.

    Args:
        starts: int64 [num_layers, num_kv_heads], multiples of page_tokens; kept, and written to.
            All 0 unless heads are apart or layers have windows.
        slots: of each layer in a page of all, or with windows in one of its own; [] where all rows
            have whole pages of their own.
        windows: int64 [num_layers], tokens that a layer sees, 0: all; None: of all of them.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        page_tokens: int,
        starts: Int64Array,
        per_head_pages: bool,
        slots: Sequence[Slot] = (),
        windows: Int64Array | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.starts = starts
        self.per_head_pages = per_head_pages
        self.slots = slots
        self.windows = windows
        self.gap = 0
        self.gap_ends: Int64Array = np.zeros(len(starts), np.int64)  # 0: none
        # Of windows, the row that has the most.
        self._widest_row = (
            0 if windows is None else int(np.where(windows, windows, sys.maxsize).argmax())
        )
        self._frees_at = 0  # the kv_len at which a page may have come to be behind a window
        self._is_one_row = bool(slots) and windows is None
        self.num_rows = 1 if self._is_one_row else starts.size if per_head_pages else len(starts)
        self.num_pages = 0  # per row
        self.kv_len = 0
        self.reserved_len = 0
        self.tail_may_be_shared = False
        # [.., capacity_pages]: ids or -1, their addresses, or those of the slots in them, or 0
        self.page_ids: Int64Array = np.empty((self.num_rows, 0), np.int64)
        self.page_table: Int64Array = np.empty((len(slots) or self.num_rows, 0), np.int64)
        self._pool = pool
        item_bytes = pool.dtype.itemsize
        self._offsets = np.array([[offset * item_bytes] for offset, _ in slots or [(0, ())]])

    def rows_of(self, layer_idx: int) -> slice:
        """The layer's rows of `page_ids`, or the one of all layers."""
        if self._is_one_row:
            return slice(0, 1)
        heads = self.num_rows // len(self.starts)
        return slice(layer_idx * heads, (layer_idx + 1) * heads)

    def num_missing_pages(self, num_new_tokens: int) -> int:
        """Pages per row to add before num_new_tokens can follow kv_len."""
        return max(0, self.pages_of(self.kv_len + num_new_tokens) - self.num_pages)

    def num_present_pages(self) -> int:
        """Pages of the committed positions, of all rows."""
        return int((self.page_ids[:, : self.pages_of(self.kv_len)] >= 0).sum())

    def num_unshared_pages(self) -> int:
        """Those of them without another owner."""
        page_ids = self.page_ids[:, : self.pages_of(self.kv_len)]
        return int((self._pool.refcounts[page_ids[page_ids >= 0]] == 1).sum())

    def num_own_pages(self) -> int:
        """`KVStore.num_own_pages`."""
        tail_id = self.shared_tail_id()
        is_copied = tail_id is not None and self._pool.refcounts[tail_id] > 1
        own = self.pages_of(self.kv_len) - int(is_copied)
        if self.windows is None:
            return self.num_rows * own
        # Others keep what a window leaves.
        page_ids = self.page_ids[self.windows > 0, : self.pages_of(self.kv_len)]
        unshared = (self._pool.refcounts[page_ids[page_ids >= 0]] == 1).sum()
        return int((self.windows == 0).sum()) * own + int(unshared)

    def shared_tail_id(self) -> int | None:
        """The page of the whole row that a write at kv_len would hit, if it may have other
        owners."""
        tail, filled = divmod(self.kv_len, self.page_tokens)
        may_be = filled and self.tail_may_be_shared
        return int(self.page_ids[self._widest_row, tail]) if may_be else None

    def is_shared(self, layer_idx: int, start: int, stop: int) -> bool:
        """Whether a page of positions start .. stop (start < stop) has another owner."""
        pages = slice(start // self.page_tokens, self.pages_of(stop))
        page_ids = self.page_ids[self.rows_of(layer_idx), pages]
        return bool((self._pool.refcounts[page_ids] > 1).any(where=page_ids >= 0))

    def shared_pages(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """Which pages of the first `num_tokens` positions have another owner, and how many rows
        have each of them."""
        page_ids = self.page_ids[:, : self.pages_of(num_tokens)]
        # A row without a front that is missing stands for all.
        whole = int(self.starts.argmin()) if self.per_head_pages else self._widest_row
        has_others = (page_ids[whole] >= 0) & (self._pool.refcounts[page_ids[whole]] > 1)
        pages = np.flatnonzero(has_others)
        return pages.tolist(), (page_ids[:, pages] >= 0).sum(axis=0).tolist()

    def extend(self, new_ids: Int64Array) -> None:
        """Add `new_ids` [num_rows, num_new_pages] at the end; -1 where there is no page."""
        first, stop = self.num_pages, self.num_pages + new_ids.shape[1]
        self.widen(stop)
        self.page_ids[:, first:stop] = new_ids
        self.page_table[:, first:stop] = self._addresses(new_ids)
        self.num_pages = stop

    def extend_by(self, made: npt.NDArray[np.bool_], new_ids: Int64Array) -> None:
        """Add pages where `made` [num_rows, num_new_pages] says so; others are in a gap."""
        of_rows = np.full(made.shape, -1, np.int64)
        of_rows[made] = new_ids
        if not made.all():
            self.gap, self._frees_at = self.num_pages * self.page_tokens, 0
            self.gap_ends = np.where(
                made[:, 0], 0, self.gap + self.page_tokens * (~made).sum(axis=1)
            )
        self.extend(of_rows)

    def widen(self, num_pages: int) -> None:
        """Let the page table have room for `num_pages` in each row."""
        capacity = self.page_table.shape[1]
        if num_pages > capacity:
            wider = ((0, 0), (0, max(num_pages, 2 * capacity) - capacity))
            self.page_ids = np.pad(self.page_ids, wider, constant_values=-1)
            self.page_table = np.pad(self.page_table, wider)

    def replace_page(self, page: int, new_ids: Int64Array, filled: int) -> None:
        """Put copies, `new_ids` [rows that have it], in the place of the `page`-th pages, of which
        the first `filled` tokens matter."""
        rows = np.flatnonzero(self.page_ids[:, page] >= 0)
        old_ids = self.page_ids[rows, page]
        for row, old, new in zip(rows.tolist(), old_ids.tolist(), new_ids.tolist(), strict=True):
            self._copy_tokens(row, old, new, slice(filled))
        self._pool.release(old_ids)
        self.page_ids[rows, page] = new_ids
        column = slice(page, page + 1)
        self.page_table[:, column] = self._addresses(self.page_ids[:, column])

    def _addresses(self, page_ids: Int64Array) -> Int64Array:
        """Of columns [num_rows, n] of `page_ids`, as the page table has them."""
        addresses = self._pool.addresses[page_ids] + self._offsets
        return np.where(page_ids < 0, 0, addresses)

    def _copy_tokens(self, row: int, from_id: int, to_id: int, tokens: slice) -> None:
        """Tokens of a page of a row, counted in it, of all heads."""
        from_page, to_page = self._pool.page(from_id)[None], self._pool.page(to_id)[None]
        for of_row in range(len(self.slots)) if self._is_one_row else [row]:
            # NumPy, because torch would start all its threads for each of these small copies.
            theirs, ours = (
                self._of_row(page, of_row).view(torch.uint8).numpy()
                for page in (from_page, to_page)
            )
            ours[:, :, :, tokens] = theirs[:, :, :, tokens]

    def exchange(self, other: SequencePages, first: int, last: int) -> None:
        """Swap the pages of positions first .. last with `other`, which owns its own alone and has
        the same tokens before. What we have behind `last` is copied."""
        tokens = self.page_tokens
        pages = slice(first // tokens, self.pages_of(last))
        filled = min(self.kv_len, pages.stop * tokens)
        if last < filled:
            behind = slice(last - (pages.stop - 1) * tokens, filled - (pages.stop - 1) * tokens)
            for row, (our_id, their_id) in enumerate(
                zip(*(x.page_ids[:, pages.stop - 1].tolist() for x in (self, other)), strict=True)
            ):
                self._copy_tokens(row, our_id, their_id, behind)
        for mine, theirs in (
            (self.page_ids, other.page_ids),
            (self.page_table, other.page_table),
        ):
            mine[:, pages], theirs[:, pages] = theirs[:, pages].copy(), mine[:, pages].copy()

    def unshare(self, num_tokens: int) -> None:
        """`KVStore.unshare`."""
        pages, counts = self.shared_pages(num_tokens)
        new_ids = self._pool.allocate(sum(counts))
        for page, count in zip(pages, counts, strict=True):
            page_ids, new_ids = np.split(new_ids, [count])
            self.replace_page(page, page_ids, self.page_tokens)

    def truncate(self, kv_len: int) -> None:
        """Keep the pages of the first `kv_len` positions and no reservation; 0 drops all."""
        num_pages = self.pages_of(kv_len)
        # A rewrite that failed has left pages anywhere.
        self.drop(slice(None), slice(num_pages, self.num_pages if kv_len else None))
        self.num_pages = num_pages
        self.kv_len = self.reserved_len = kv_len
        self.tail_may_be_shared = True  # the tail is another page now
        if kv_len == 0:
            self.starts[:] = 0
        if kv_len <= self.gap:
            self.gap_ends[:] = 0
        self._frees_at = 0

    def drop(self, rows: slice, pages: slice) -> None:
        """Give up the pages of a part of the page table."""
        page_ids = self.page_ids[rows, pages]
        owned = page_ids[page_ids >= 0]
        page_ids[:] = -1
        self.page_table[rows, pages] = 0
        self._pool.release(owned)

    def put(self, row: int, first: int, new_ids: Int64Array) -> None:
        """Have `new_ids` as the pages from `first` on of a row that has none."""
        self.page_ids[row, first : first + len(new_ids)] = new_ids
        self.page_table[row, first : first + len(new_ids)] = self._pool.addresses[new_ids]

    def fork(self) -> SequencePages:
        """A second owner of the pages of the committed positions; ends the reservation of both."""
        num_pages = self.pages_of(self.kv_len)
        child = SequencePages(
            self._pool,
            page_tokens=self.page_tokens,
            starts=self.starts.copy(),
            per_head_pages=self.per_head_pages,
            slots=self.slots,
            windows=self.windows,
        )
        child.gap, child.gap_ends = self.gap, self.gap_ends.copy()
        child.extend(self.page_ids[:, :num_pages])
        self._pool.share(child.page_ids[child.page_ids >= 0])
        child.kv_len = child.reserved_len = self.reserved_len = self.kv_len
        child.tail_may_be_shared = self.tail_may_be_shared = True
        child.free_behind()
        return child

    def first_kept(self, kv_len: int) -> Int64Array:
        """int64 [num_layers]: the first position of what windows leave of so many tokens."""
        assert self.windows is not None
        first = np.maximum(0, kv_len - self.windows - WINDOW_SLACK)
        return np.where(self.windows > 0, first // self.page_tokens * self.page_tokens, 0)

    def least_kv_len(self, kv_len: int) -> int:
        """What the first `kv_len` tokens may be cut to, where windows have left some; 0: to any
        number."""
        if self.windows is None:
            return 0
        has_gap = (self.gap_ends > 0) & (kv_len > self.gap)
        first = np.where(has_gap, self.gap_ends, self.starts[:, 0])
        return int((first + self.windows - 1).max(where=first > 0, initial=0))

    def free_behind(self, starts: Sequence[int] | None = None) -> None:
        """`KVStore.free_behind`."""
        if self.windows is None or (self.kv_len < self._frees_at and starts is None):
            return
        firsts = np.maximum(self.first_kept(self.kv_len), self.starts[:, 0])
        if self.kv_len > self.gap:
            firsts = np.maximum(firsts, self.gap_ends)
        if starts is not None:
            firsts = np.maximum(firsts, [self.pages_of(n) * self.page_tokens for n in starts])
        pages = (self.starts[:, 0] // self.page_tokens, firsts // self.page_tokens)
        for row, (first, stop) in enumerate(zip(*(x.tolist() for x in pages), strict=True)):
            if first < stop:
                self.drop(slice(row, row + 1), slice(first, stop))
        self.starts[:] = firsts[:, None]
        self.gap_ends[:] = 0
        next_page = firsts + self.windows + self.page_tokens + WINDOW_SLACK
        self._frees_at = int(next_page.min(where=self.windows > 0, initial=sys.maxsize))

    def made_pages(self, num_new_tokens: int, *, at_once: bool) -> npt.NDArray[np.bool_]:
        """[num_rows, missing pages]: which rows get a page before num_new_tokens can follow."""
        missing = self.num_missing_pages(num_new_tokens)
        if self.windows is None or not at_once:
            return np.ones((self.num_rows, missing), bool)
        first_pages = self.first_kept(self.kv_len + num_new_tokens) // self.page_tokens
        return np.arange(self.num_pages, self.num_pages + missing) >= first_pages[:, None]

    def parts(self, layer_idx: int, start: int, stop: int) -> Iterator[Part]:
        """Positions start .. stop of a layer: (heads, how many of the first positions they lack,
        `pieces` of the others)."""
        if not self.per_head_pages:
            begin = max(start, min(int(self.starts[layer_idx, 0]), stop))
            if stop > self.gap:
                begin = max(begin, min(int(self.gap_ends[layer_idx]), stop))
            yield slice(None), begin - start, self.pieces(layer_idx, begin, stop)
            return
        first_row = layer_idx * self.starts.shape[1]
        for head, begin in enumerate(self.starts[layer_idx].clip(start, stop).tolist()):
            pieces = self.pieces(first_row + head, begin, stop)
            yield slice(head, head + 1), begin - start, pieces

    def pieces(self, row: int, start: int, stop: int) -> Iterator[Piece]:
        """Positions start .. stop, which a row has, as (first, last + 1, [n, K|V, heads, tokens,
        head_dim]), counted from `start`.

        The views cover a part of a page (n = 1), or a run of adjoining whole pages, however long:
        a copy per run instead of per page keeps a long prompt at memory speed.
        """
        page_ids = self.page_ids[0 if self._is_one_row else row]
        head = min(self.pages_of(start) * self.page_tokens, stop)
        tail = max(stop // self.page_tokens * self.page_tokens, head)
        before = head - start
        first_page, stop_page = head // self.page_tokens, tail // self.page_tokens
        if start < head:
            yield 0, before, self._part_of_page(page_ids, row, start, head)
        if head < tail:
            for first, last, pages in self._pool.runs(page_ids[first_page:stop_page]):
                begin, end = before + first * self.page_tokens, before + last * self.page_tokens
                yield begin, end, self._of_row(pages, row)
        if tail < stop:
            yield tail - start, stop - start, self._part_of_page(page_ids, row, tail, stop)

    def _part_of_page(self, page_ids: Int64Array, row: int, start: int, stop: int) -> torch.Tensor:
        page, first = divmod(start, self.page_tokens)
        pages = self._of_row(self._pool.page(int(page_ids[page]))[None], row)
        return pages[:, :, :, first : first + stop - start]

    def _of_row(self, pages: torch.Tensor, row: int) -> torch.Tensor:
        """What a row of the page table has of pages [n, *page_shape]: [n, K|V, heads, page_tokens,
        head_dim]."""
        if not self.slots:
            return pages
        offset, shape = self.slots[row]
        return pages[:, offset : offset + math.prod(shape)].view(len(pages), *shape)

    def pages_of(self, num_tokens: int) -> int:
        """That so many positions are in."""
        return -(-num_tokens // self.page_tokens)


def make_room(pool: PagePool, batch: Sequence[tuple[SequencePages, int]]) -> None:
    """`KVStore.make_room` of distinct sequences and the numbers of their new tokens."""
    num_pages = 0
    for sequence, num_new in batch:
        may_be_copied = num_new > 0 and sequence.shared_tail_id() is not None
        num_pages += sequence.num_rows * (sequence.num_missing_pages(num_new) + may_be_copied)
    if num_pages:
        pool.make_room(num_pages)


def reserve(
    pool: PagePool, batch: Sequence[tuple[SequencePages, int]], *, at_once: bool = False
) -> None:
    """`KVStore.reserve` of distinct sequences and the numbers of their new tokens."""
    num_rows = batch[0][0].num_rows if batch else 0
    made = [sequence.made_pages(num_new, at_once=at_once) for sequence, num_new in batch]
    copied = [False] * len(batch)
    owners: dict[int, int] = {}  # of the shared pages, less those that get a copy here
    for i, (sequence, num_new) in enumerate(batch):
        page_id = sequence.shared_tail_id() if num_new else None
        if page_id is not None:
            num_owners = owners.setdefault(page_id, int(pool.refcounts[page_id]))
            # The last owner keeps the page: n sequences of one batch need n - 1 copies.
            copied[i] = num_owners > 1
            owners[page_id] -= copied[i]

    num_pages = sum(int(of_sequence.sum()) for of_sequence in made) + num_rows * sum(copied)
    page_ids = pool.allocate(num_pages) if num_pages else np.empty(0, np.int64)
    for i, (sequence, num_new) in enumerate(batch):
        if copied[i]:
            tail_ids, page_ids = np.split(page_ids, [num_rows])
            tail, filled = divmod(sequence.kv_len, sequence.page_tokens)
            sequence.replace_page(tail, tail_ids, filled)
        if made[i].size:
            new_ids, page_ids = np.split(page_ids, [int(made[i].sum())])
            sequence.extend_by(made[i], new_ids)
        if num_new:
            sequence.tail_may_be_shared = False
            sequence.reserved_len = max(sequence.reserved_len, sequence.kv_len + num_new)
