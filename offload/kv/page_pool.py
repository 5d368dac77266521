"""Fixed-size pages of host memory, reference-counted, cut from slabs within a hard budget.

The pool knows nothing of sequences or tokens. A page is named by an id; ids index the arrays
`addresses` and `refcounts`, so that sharing or releasing thousands of pages is one NumPy call.
The pages of a slab have ids in a row. Those of a slab that went are given to a later one; only an
owner of a page may keep its id.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from offload.kv.ledger import MemoryLedger
from offload.system.errors import HostBudgetError
from offload.system.huge_pages import map_slab
from offload.system.interrupts import shielded
from offload.system.memory import format_bytes, host_memory_limit_bytes
from offload.system.pinned_memory import HostRegistration

# Touching takes 2 ms per MiB on a slow machine, and all that decode wait for it.
DEFAULT_SLAB_BYTES = 16 * 2**20
# Tokens before a layer's window that stay, so that as many of the newest can be taken back.
WINDOW_SLACK = 64

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
# Of a layer in a page: its first element, and the shape of its part.
Slot = tuple[int, tuple[int, ...]]


class _Coming:
    """A slab that is mapped, touched and registered in a thread of its own.

    Attributes:
        slab: None until it is there, or where the system refuses it.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, num_pages: int, make: Callable[[], torch.Tensor]) -> None:
        self.num_pages, self._make = num_pages, make
        self.slab: torch.Tensor | None = None
        self._thread = threading.Thread(target=self._run, name="offload-slab", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self.slab = self._make()
        finally:
            del self._make  # and with it the pool, which may go once the slab is known

    def wait(self) -> None:
        self._thread.join()


class PagePool:
    """Pages of shape `page_shape` and type `dtype`, at most `budget_bytes` of them in slabs.

    A slab is one anonymous mapping, touched when it is made, so that the budget is memory the
    process has and no page fault happens during decoding. Slabs are kept until `trim` or `close`.
    With a `registration` each is registered once it is touched, and unregistered before it is
    unmapped.

    Attributes:
        num_used: pages with at least one owner.
        ledger: of the budget, whose tenants are others than the pages.
        addresses, refcounts: int64 and int32 [most ids there were], of each page.
    """

    def __init__(
        self,
        *,
        page_shape: tuple[int, ...],
        dtype: torch.dtype,
        budget_bytes: int,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        registration: HostRegistration | None = None,
    ) -> None:
        self.page_shape = page_shape
        self.dtype = dtype
        self.page_bytes = math.prod(page_shape) * dtype.itemsize
        self.ledger = MemoryLedger(budget_bytes)
        self.reserved_bytes = 0
        self.addresses: Int64Array = np.empty(0, np.int64)
        self.refcounts: Int32Array = np.empty(0, np.int32)
        self._slab_bytes = slab_bytes
        self._fitted_pages: int | None = None
        # By the id of their first page, each [num_pages_of_slab, *page_shape].
        self._slabs: dict[int, torch.Tensor] = {}
        self._slab_of_page: Int64Array = np.empty(0, np.int64)  # its key
        # A stack: pages freed last are used first, while they may still be in a cache.
        self._free_ids: Int64Array = np.empty(0, np.int64)
        self._num_free = self.num_used = 0
        self._registration = registration
        self._coming: list[_Coming] = []  # one at most, which is in `reserved_bytes`
        # A pool that is dropped without close() must not leave the driver with addresses that the
        # system will give to others. Not at exit: the driver may be gone by then.
        held = self._slabs, self._coming
        self._release = weakref.finalize(self, _give_back, registration, *held)
        self._release.atexit = False

    @property
    def num_free(self) -> int:
        """Pages of slabs without an owner."""
        return self._num_free

    @property
    def left_bytes(self) -> int:
        """Bytes left of the budget, for slabs and for what shares it."""
        return self.ledger.left_bytes - self.reserved_bytes

    def fit_slabs(self, num_pages: int) -> None:
        """From now on slabs are no larger than before and end together with every `num_pages`
        pages: the last of them has fewer, and none has pages beyond."""
        num_slabs = -(-num_pages // max(1, self._slab_bytes // self.page_bytes))
        self._slab_bytes = -(-num_pages // num_slabs) * self.page_bytes
        self._fitted_pages = num_pages

    def allocate(self, num_pages: int) -> Int64Array:
        """Ids int64 [num_pages], ascending, of pages with one owner each and undefined contents.

        Ascending, because neighbouring pages can then be copied in one call (`runs`) and are read
        in sequence by the attention kernels.

        Raises:
            HostBudgetError: before anything changes, if they do not fit.
        """
        self.make_room(num_pages)
        self._num_free -= num_pages
        self.num_used += num_pages
        page_ids = np.sort(self._free_ids[self._num_free : self._num_free + num_pages])
        self.refcounts[page_ids] = 1
        return page_ids

    def make_room(self, num_pages: int) -> None:
        """Let `allocate(num_pages)`, or less several times, not fail.

        Raises:
            HostBudgetError: before anything changes, if they do not fit.
        """
        if num_pages > self._num_free:
            self._grow(num_pages - self._num_free)

    def prepare(self, num_pages: int) -> None:
        """Begin to make room for so many pages, in a thread: the system takes a second to zero
        4 GiB, and the driver to register 25. Nothing happens where they do not fit, no thread can
        be started, or some are on their way; who needs them waits, and is told."""
        missing = num_pages - self._num_free
        if self._coming or missing <= 0:
            return
        with contextlib.suppress(HostBudgetError, RuntimeError), shielded():
            size = self._pages_of_slab(missing)
            self._coming.append(_Coming(size, partial(self._make_slab, size)))
            self.reserved_bytes += _mapped_bytes(size * self.page_bytes)

    def share(self, page_ids: Int64Array) -> None:
        """One more owner for each of `page_ids` (distinct)."""
        self.refcounts[page_ids] += 1

    def release(self, page_ids: Int64Array) -> None:
        """One owner less for each of `page_ids` (distinct); pages without one become free."""
        self.refcounts[page_ids] -= 1
        freed = page_ids[self.refcounts[page_ids] == 0]
        self._free_ids[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
        self.num_used -= len(freed)

    def page(self, page_id: int) -> torch.Tensor:
        """The page itself, not a copy: [*page_shape]."""
        slab = int(self._slab_of_page[page_id])
        return self._slabs[slab][page_id - slab]

    def runs(self, page_ids: Int64Array) -> Iterator[tuple[int, int, torch.Tensor]]:
        """`page_ids` as (first, last + 1, [last + 1 - first, *page_shape]) of adjoining pages."""
        slabs = self._slab_of_page[page_ids]
        breaks = (np.diff(page_ids) != 1) | (np.diff(slabs) != 0)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(page_ids)]
        for first, stop in itertools.pairwise(bounds):
            if stop > first:
                slab = int(slabs[first])
                row = int(page_ids[first]) - slab
                yield first, stop, self._slabs[slab][row : row + stop - first]

    def trim(self) -> None:
        """Give slabs without a used page back to the system; later slabs get their ids."""
        self._take_coming()
        first_ids = np.array(sorted(self._slabs), np.int64)
        used = np.maximum.reduceat(self.refcounts, first_ids)  # ids without a slab count 0
        empty = first_ids[used == 0]
        if not len(empty):
            return
        free_ids = self._free_ids[: self._num_free]
        kept = free_ids[~np.isin(self._slab_of_page[free_ids], empty)]
        self._num_free = len(kept)
        self._free_ids[: len(kept)] = kept
        for first_id in empty.tolist():
            slab = self._slabs.pop(first_id)
            if self._registration is not None:
                self._registration.unregister(slab.data_ptr())
            self.reserved_bytes += _round_down(-slab.nbytes, mmap.PAGESIZE)

    def close(self) -> None:
        """Give every slab back to the system. No page may be used afterwards."""
        self._take_coming()
        self._release()
        self.reserved_bytes = 0
        self._num_free = self.num_used = 0
        self._free_ids = self.addresses = self._slab_of_page = np.empty(0, np.int64)
        self.refcounts = np.empty(0, np.int32)

    def _grow(self, missing_pages: int) -> None:
        """Map one slab with room for `missing_pages`, in whole slab sizes where the budget allows.

        One large slab for a large request, rather than many: one mapping to touch and register.
        """
        num_before = self._num_free
        self._take_coming()
        missing_pages -= self._num_free - num_before
        if missing_pages <= 0:
            return
        num_pages = self._pages_of_slab(missing_pages)
        try:
            slab = self._make_slab(num_pages)
        except OSError as error:  # RLIMIT_AS, the kernel's overcommit rules, or the driver
            raise self._budget_error(missing_pages, f", but {error}") from error
        self._install(slab)
        self.reserved_bytes += _mapped_bytes(num_pages * self.page_bytes)

    def _pages_of_slab(self, missing_pages: int) -> int:
        """Of a slab with room for `missing_pages`.

        Raises:
            HostBudgetError: they do not fit.
        """
        left_bytes = max(0, _round_down(self.left_bytes, mmap.PAGESIZE))
        if missing_pages * self.page_bytes > left_bytes:
            raise self._budget_error(missing_pages, "")
        # The budget was checked when the store was made; what is left of the machine or of the
        # cgroup may have shrunk since then, and touching more than that ends in a kill.
        available_bytes = _round_down(host_memory_limit_bytes(), mmap.PAGESIZE)
        if missing_pages * self.page_bytes > available_bytes:
            left = format_bytes(available_bytes)
            raise self._budget_error(missing_pages, f", but only {left} of host memory are left")

        num_pages = pages_of_slabs(missing_pages, self.page_bytes, self._slab_bytes)
        if self._fitted_pages is not None:
            held = self.num_used + self._num_free
            end = -(-(held + missing_pages) // self._fitted_pages) * self._fitted_pages
            num_pages = min(num_pages, end - held)
        # Pages that no sequence asked for are taken from those who share the budget.
        spare_bytes = left_bytes // 8 if self.ledger.is_shared else left_bytes
        num_pages = min(num_pages, min(spare_bytes, available_bytes) // self.page_bytes)
        return max(num_pages, missing_pages)

    def _make_slab(self, num_pages: int) -> torch.Tensor:
        """OSError: the system or the driver refuses it."""
        slab_bytes = _mapped_bytes(num_pages * self.page_bytes)
        try:
            memory = map_slab(slab_bytes)
        except OSError as error:
            raise OSError(f"the system refused to map {format_bytes(slab_bytes)}") from error
        # A tensor made under inference_mode could never be written outside of it.
        with torch.inference_mode(False):
            values = memory[: num_pages * self.page_bytes].view(self.dtype)
            slab = values.view(num_pages, *self.page_shape)
        if self._registration is not None:
            self._registration.register(slab.data_ptr(), slab_bytes)
        return slab

    def _take_coming(self) -> None:
        """What was prepared is there, or is not."""
        if not self._coming:
            return
        self._coming[0].wait()  # after ctrl-C it is still on its way
        with shielded():
            coming = self._coming.pop()
            if coming.slab is None:
                self.reserved_bytes -= _mapped_bytes(coming.num_pages * self.page_bytes)
            else:
                self._install(coming.slab)

    def _install(self, slab: torch.Tensor) -> None:
        """Its pages are free; `reserved_bytes` has it."""
        num_pages = len(slab)
        first_id = self._first_gap(num_pages)
        ids = slice(first_id, first_id + num_pages)
        more = (0, max(0, ids.stop - len(self.addresses)))
        self.addresses = np.pad(self.addresses, more)
        self.refcounts = np.pad(self.refcounts, more)
        self._slab_of_page = np.pad(self._slab_of_page, more)
        self.addresses[ids] = slab.data_ptr() + np.arange(num_pages) * self.page_bytes
        self._slab_of_page[ids] = first_id
        # Descending, so that the lowest id is on top of the stack.
        page_ids = np.arange(first_id, ids.stop)[::-1]
        free_ids = self._free_ids[: self._num_free]
        self._free_ids = np.empty(len(self.addresses), np.int64)
        self._free_ids[: self._num_free + num_pages] = np.concatenate([page_ids, free_ids])
        self._slabs[first_id] = slab
        self._num_free += num_pages

    def _first_gap(self, num_pages: int) -> int:
        """The lowest id that `num_pages` ids without a slab begin with."""
        first_id = 0
        for other in sorted(self._slabs):
            if other - first_id >= num_pages:
                break
            first_id = other + len(self._slabs[other])
        return first_id

    def _budget_error(self, missing_pages: int, reason: str) -> HostBudgetError:
        needed, used = missing_pages + self._num_free, self.num_used
        others = [f"{format_bytes(n)} are {who}" for who, n in self.ledger.by_tenant().items() if n]
        if others:
            reason = f" ({', '.join(others)}){reason}"
        return HostBudgetError(
            f"the host KV cache needs {format_bytes(needed * self.page_bytes)} more "
            f"({needed} pages of {self.page_bytes} bytes) and uses "
            f"{format_bytes(used * self.page_bytes)} of its budget of "
            f"{format_bytes(self.ledger.limit_bytes)}{reason}; "
            "raise max_memory={'cpu': ...} or shorten the context"
        )


def _give_back(
    registration: HostRegistration | None, slabs: dict[int, torch.Tensor], coming: list[_Coming]
) -> None:
    if registration is not None:
        made = (x.slab for x in coming if x.slab is not None)  # its thread has kept the pool
        for slab in (*slabs.values(), *made):
            registration.unregister(slab.data_ptr())
    slabs.clear()  # the mapping goes with the last tensor over it
    coming.clear()


def page_shape(
    num_heads: int, page_tokens: int, row_items: int, num_parts: int = 2
) -> tuple[int, int, int, int]:
    """Shape of a page of KV cache: keys and values of `num_heads` heads, or keys alone."""
    return num_parts, num_heads, page_tokens, row_items


def slots_of(
    heads: Iterable[tuple[int, int]], page_tokens: int, num_parts: int = 2, *, apart: bool = False
) -> list[Slot]:
    """Where each layer is in a page of all, or in its own if they are `apart`, by (num_kv_heads,
    elements of a row) of each."""
    slots: list[Slot] = []
    offset = 0
    for num_kv_heads, row_items in heads:
        slots.append((offset, page_shape(num_kv_heads, page_tokens, row_items, num_parts)))
        offset += 0 if apart else math.prod(slots[-1][1])
    return slots


def pages_at(num_tokens: int, page_tokens: int, windows: Iterable[int]) -> int:
    """Pages that a sequence of so many tokens has at most, in rows of a page table.

    Args:
        windows: of each row, tokens that are seen; 0: all.
    """
    pages = -(-num_tokens // page_tokens)
    # In a window's first page and its last one there may be a single token, before one more comes.
    most = (
        -(-(window + WINDOW_SLACK) // page_tokens) + 2 if window else pages for window in windows
    )
    return sum(min(pages, of_row) for of_row in most)


def pages_of_slabs(num_pages: int, page_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """Pages of the whole slabs that hold `num_pages`."""
    of_slab = max(1, slab_bytes // page_bytes)
    return -(-num_pages // of_slab) * of_slab


def pool_bytes(num_pages: int, page_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """What a `PagePool` with room takes for its first `num_pages` pages, if asked for at once."""
    return _mapped_bytes(pages_of_slabs(num_pages, page_bytes, slab_bytes) * page_bytes)


def _mapped_bytes(num_bytes: int) -> int:
    return -_round_down(-num_bytes, mmap.PAGESIZE)


def _round_down(num_bytes: int, multiple: int) -> int:
    return num_bytes // multiple * multiple
