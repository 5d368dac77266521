"""The pages of one sequence, in every layer: which there are, and which are shared with a fork.

Nothing is checked here: `KVStore` checks what it is given, then calls these.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from offload.kv.page_pool import Int64Array, PagePool


class SequencePages:
    """Pages of shape [K|V, num_kv_heads, page_tokens, head_dim] that hold one sequence.

    Invariants: kv_len <= reserved_len <= num_pages * page_tokens. The layers are extended, forked
    and truncated together, so the pages of a column of `page_ids` have one and the same number of
    owners. Of the pages from position kv_len onward, only the one that holds kv_len itself can
    have other owners, and only while `tail_may_be_shared`.
    """

    def __init__(self, pool: PagePool, *, num_layers: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.num_layers = num_layers
        self.num_pages = 0  # per layer
        self.kv_len = 0
        self.reserved_len = 0
        self.tail_may_be_shared = False
        self.page_ids: Int64Array = np.zeros((num_layers, 0), np.int64)  # [.., capacity_pages]
        self.page_table: Int64Array = np.zeros((num_layers, 0), np.int64)  # their addresses, or 0
        self._pool = pool

    def num_missing_pages(self, num_new_tokens: int) -> int:
        """Pages per layer to add before num_new_tokens can follow kv_len."""
        return max(0, self._pages_of(self.kv_len + num_new_tokens) - self.num_pages)

    def shared_tail_id(self) -> int | None:
        """The page of layer 0 that a write at kv_len would hit, if it may have other owners."""
        tail, filled = divmod(self.kv_len, self.page_tokens)
        return int(self.page_ids[0, tail]) if filled and self.tail_may_be_shared else None

    def is_shared(self, layer_idx: int, start: int, stop: int) -> bool:
        """Whether a page of positions start .. stop (start < stop) has another owner."""
        pages = slice(start // self.page_tokens, self._pages_of(stop))
        return bool((self._pool.refcounts[self.page_ids[layer_idx, pages]] > 1).any())

    def shared_pages(self, num_tokens: int) -> list[int]:
        """Which pages of the first `num_tokens` positions have another owner."""
        page_ids = self.page_ids[0, : self._pages_of(num_tokens)]
        pages: list[int] = np.flatnonzero(self._pool.refcounts[page_ids] > 1).tolist()
        return pages

    def extend(self, new_ids: Int64Array) -> None:
        """Add `new_ids` [num_layers, num_new_pages] at the end."""
        first, stop = self.num_pages, self.num_pages + new_ids.shape[1]
        capacity = self.page_table.shape[1]
        if stop > capacity:
            wider = ((0, 0), (0, max(stop, 2 * capacity) - capacity))
            self.page_ids = np.pad(self.page_ids, wider)
            self.page_table = np.pad(self.page_table, wider)
        self.page_ids[:, first:stop] = new_ids
        self.page_table[:, first:stop] = self._pool.addresses[new_ids]
        self.num_pages = stop

    def replace_tail(self, new_ids: Int64Array) -> None:
        """Put copies, `new_ids` [num_layers], in the place of the shared pages that hold kv_len."""
        tail, filled = divmod(self.kv_len, self.page_tokens)
        self.replace_page(tail, new_ids, filled)

    def replace_page(self, page: int, new_ids: Int64Array, filled: int) -> None:
        """Put copies, `new_ids` [num_layers], in the place of the `page`-th pages, of which the
        first `filled` tokens matter."""
        old_ids = self.page_ids[:, page].copy()
        # NumPy, because torch would start all its threads for each of these small copies.
        for old_id, new_id in zip(old_ids.tolist(), new_ids.tolist(), strict=True):
            old_page = self._pool.page(old_id).view(torch.uint8).numpy()
            new_page = self._pool.page(new_id).view(torch.uint8).numpy()
            new_page[:, :, :filled] = old_page[:, :, :filled]
        self._pool.release(old_ids)
        self.page_ids[:, page] = new_ids
        self.page_table[:, page] = self._pool.addresses[new_ids]

    def truncate(self, kv_len: int) -> None:
        """Keep the pages of the first `kv_len` positions and no reservation."""
        num_pages = self._pages_of(kv_len)
        self._pool.release(self.page_ids[:, num_pages : self.num_pages].ravel())
        self.page_table[:, num_pages:] = 0
        self.num_pages = num_pages
        self.kv_len = self.reserved_len = kv_len
        self.tail_may_be_shared = True  # the tail is another page now

    def fork(self) -> SequencePages:
        """A second owner of the pages of the committed positions; ends the reservation of both."""
        num_pages = self._pages_of(self.kv_len)
        child = SequencePages(self._pool, num_layers=self.num_layers, page_tokens=self.page_tokens)
        child.extend(self.page_ids[:, :num_pages])
        self._pool.share(child.page_ids.ravel())
        child.kv_len = child.reserved_len = self.reserved_len = self.kv_len
        child.tail_may_be_shared = self.tail_may_be_shared = True
        return child

    def pieces(
        self, layer_idx: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Positions start .. stop as (first, last + 1, [n, K|V, num_kv_heads, tokens, head_dim]),
        counted from `start`.

        The views cover a part of a page (n = 1), or a run of adjoining whole pages, however long:
        a copy per run instead of per page keeps a long prompt at memory speed.
        """
        page_ids = self.page_ids[layer_idx]
        head = min(self._pages_of(start) * self.page_tokens, stop)
        tail = max(stop // self.page_tokens * self.page_tokens, head)
        before = head - start
        first_page, stop_page = head // self.page_tokens, tail // self.page_tokens
        if start < head:
            yield 0, before, self._part_of_page(page_ids, start, head)
        if head < tail:
            for first, last, pages in self._pool.runs(page_ids[first_page:stop_page]):
                yield before + first * self.page_tokens, before + last * self.page_tokens, pages
        if tail < stop:
            yield tail - start, stop - start, self._part_of_page(page_ids, tail, stop)

    def _part_of_page(self, page_ids: Int64Array, start: int, stop: int) -> torch.Tensor:
        page, row = divmod(start, self.page_tokens)
        pages = self._pool.page(int(page_ids[page]))[None]
        return pages[:, :, :, row : row + stop - start]

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)
