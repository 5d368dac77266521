"""The host KV store: the keys and values of every sequence, in pages of host memory.

Layout (stated here, nowhere else). A page holds `page_tokens` consecutive tokens of all KV heads of
one layer of one sequence:

    page: dtype [K|V][num_kv_heads][page_tokens][row], contiguous

with rows of head_dim numbers, or of int8 and their scales (`format`), so that a page moves in one
copy, and a scan of the keys of all heads reads half a page in one run. (Runs of 64 KiB with gaps
between them read about a fifth slower than one run, measured apart from attention; `exact_topk` as
a whole did not get measurably faster by it.) Token `t` of a sequence is in page `t // page_tokens`
of its page table, and its row is at

    page_table[layer_idx, t // page_tokens]
        + ((is_value * num_kv_heads + kv_head) * page_tokens + t % page_tokens) * row_bytes

With `keys_only` values are the first elements of keys, as of latent attention. Pages have keys
alone, and a value is read as its whole key:

    page: dtype [K][num_kv_heads][page_tokens][row], contiguous

The page table of a sequence is int64 [num_layers, capacity_pages], C-contiguous, of addresses, with
0 where there is no page. All offsets are 64-bit.

With `per_head_pages` a page is of one KV head, so that heads may have different numbers of tokens:

    page: dtype [K|V][1][page_tokens][row], contiguous
    page table: int64 [num_layers * num_kv_heads, capacity_pages], row layer_idx * num_kv_heads +
        kv_head

Positions are the same 0 .. kv_len for all heads, and new tokens are the last of all. A head lacks
the first `starts[layer_idx, kv_head]` positions, a multiple of page_tokens: it has no pages there.

Layers with windows have no pages of tokens that are well before their windows; `starts` says where
those of each begin.

Where layers differ in num_kv_heads or head_dim, the pages of all layers for the same tokens, one
after the other, are one page of the pool, and a row of the page table is a layer as above. With
windows, too, each layer has the front of pages of its own, which are as large as the largest needs.

A decode step: `reserve` room for the new tokens, write every layer (`append`, or a native kernel
that writes the rows through the page table), `commit`. Forked sequences share pages; `reserve`
replaces a shared page by a copy before anything may be written to it. What the store says it uses
is what the process uses: slabs are touched when they are made (see `page_pool`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cpu_ops.native import of_layers
from offload.kv.arguments import (
    check_dtype,
    check_lens,
    check_new_rows,
    check_out,
    check_sizes,
    check_writable,
)
from offload.kv.format import KVFormat
from offload.kv.ledger import MemoryLedger
from offload.kv.page_pool import (
    DEFAULT_SLAB_BYTES,
    Int64Array,
    PagePool,
    page_shape,
    pages_at,
    slots_of,
)
from offload.kv.rewriting import RowsOfLayer, rewrite
from offload.kv.sequence_pages import SequencePages, make_room, reserve
from offload.kv.transfer import Part, all_finite, read_rows, write_rows
from offload.system.errors import HostBudgetError
from offload.system.memory import format_bytes, host_memory
from offload.system.pinned_memory import CudaRegistration, HostRegistration

__all__ = ["HostBudgetError", "KVStore"]


class KVStore:
    """Paged KV of many sequences, each named by a handle (an int that is never reused).

    Args:
        num_layers: of the model.
        num_kv_heads, head_dim: of all layers, or of each; head_dim a multiple of 8.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        kv_dtype: what keys and values are kept as: "auto", that dtype, or "int8" (see `KVFormat`).
        keys_only: values are the first elements of keys, and are not kept.
        host_budget_bytes: hard limit on host memory; default: what `host_memory()` leaves a model.
        page_tokens: tokens in a page.
        per_head_pages: each KV head has pages of its own, and may have fewer tokens (`rewrite`);
            not where layers differ (NotImplementedError).
        windows: tokens that each layer sees, the last ones, itself included; 0: all. What is before
            is freed (`free_behind`). Not with per_head_pages (NotImplementedError).
        slab_bytes: host memory is taken from the system in multiples of this, as needed, up to the
            budget (the last slab may be smaller); at least one page.
        pinned: register slabs with the CUDA driver, so that `append_async` does not wait, and
            kernels may read pages; or what to register them with.

    Not thread-safe. Handles that do not exist, or no longer, raise ValueError everywhere.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        kv_dtype: str = "auto",
        keys_only: bool = False,
        host_budget_bytes: int | None = None,
        page_tokens: int = 256,
        per_head_pages: bool = False,
        windows: int | Sequence[int] = 0,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        pinned: bool | HostRegistration = False,
    ) -> None:
        check_sizes(num_layers=num_layers, page_tokens=page_tokens, slab_bytes=slab_bytes)
        num_kv_heads = of_layers(num_layers, "num_kv_heads", num_kv_heads)
        self._heads = [*zip(num_kv_heads, of_layers(num_layers, "head_dim", head_dim), strict=True)]
        for heads, dim in self._heads:
            check_sizes(num_kv_heads=heads, head_dim=dim)
        check_dtype(dtype)
        head_dims = [dim for _, dim in self._heads]
        self.format = KVFormat.of(kv_dtype, dtype, head_dims, keys_only=keys_only)
        num_parts = self.format.num_parts
        in_rows = [(heads, self.format.row_items(dim)) for heads, dim in self._heads]
        of_layer = np.asarray(of_layers(num_layers, "windows", windows), np.int64)
        self._windows = of_layer if of_layer.any() else None
        if self._windows is not None and per_head_pages:
            raise NotImplementedError(
                f"layers that see windows of {of_layer.max()} tokens beside pages of each KV head "
                "are not in one KV store yet"
            )
        alike, apart = len(set(self._heads)) == 1, self._windows is not None
        self._slots = [] if alike else slots_of(in_rows, page_tokens, num_parts, apart=apart)
        if host_budget_bytes is None:
            host_budget_bytes = host_memory().model_bytes()
        if host_budget_bytes < 0:
            raise ValueError(f"host_budget_bytes must not be negative, got {host_budget_bytes}")
        self.num_layers = num_layers
        self.dtype = dtype
        self.page_tokens = page_tokens
        self.per_head_pages = per_head_pages
        registration = (
            (CudaRegistration() if pinned else None) if isinstance(pinned, bool) else pinned
        )
        self.is_pinned = registration is not None
        self._pool = PagePool(
            page_shape=(
                (max(offset + math.prod(shape) for offset, shape in self._slots),)
                if self._slots and not per_head_pages
                else page_shape(
                    1 if per_head_pages else self.num_kv_heads,
                    page_tokens,
                    self.format.row_items(self.head_dim),
                    num_parts,
                )
            ),
            dtype=self.format.page_dtype,
            budget_bytes=host_budget_bytes,
            slab_bytes=slab_bytes,
            registration=registration,
        )
        self._sequences: dict[int, SequencePages] = {}
        self._next_seq = 0
        self._closed = False

    @property
    def num_kv_heads(self) -> int:
        """Of every layer; NotImplementedError if they differ."""
        return self._of_all_layers(0)

    @property
    def head_dim(self) -> int:
        """Of every layer; NotImplementedError if they differ."""
        return self._of_all_layers(1)

    def heads_of(self, layer_idx: int) -> tuple[int, int]:
        """(num_kv_heads, head_dim) of a layer."""
        return self._heads[layer_idx]

    def has_window(self, layer_idx: int) -> bool:
        """Whether a layer loses its first tokens."""
        return self._windows is not None and bool(self._windows[layer_idx])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: page_tokens tokens of one row of a page table."""
        return self._pool.page_bytes

    @property
    def num_page_rows(self) -> int:
        """Pages of the same tokens: of layers, or KV heads of all layers where heads are apart, as
        rows of a page table; 1 where layers differ and have no windows."""
        if self._slots and self._windows is None:
            return 1
        return self.num_layers * (self.num_kv_heads if self.per_head_pages else 1)

    @property
    def num_full_rows(self) -> int:
        """`num_page_rows` without layers that have windows."""
        windowed = 0 if self._windows is None else np.count_nonzero(self._windows)
        return self.num_page_rows - int(windowed)

    def pages_at(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens has at most, in all rows together."""
        if self._windows is None:
            return self.num_page_rows * -(-num_tokens // self.page_tokens)
        return pages_at(num_tokens, self.page_tokens, self._windows.tolist())

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that all heads of all layers have."""
        return self.num_page_rows * self.page_bytes // self.page_tokens

    @property
    def host_budget_bytes(self) -> int:
        """The hard limit of `host_bytes_reserved` and what shares the budget."""
        return self.ledger.limit_bytes

    @property
    def host_bytes_reserved(self) -> int:
        """Bytes of all slabs: resident memory that the store has taken from the system."""
        return self._pool.reserved_bytes

    @property
    def host_bytes_used(self) -> int:
        """Bytes of the pages that hold, or are reserved for, tokens; a shared page counts once."""
        return self._pool.num_used * self._pool.page_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences made and not yet freed."""
        return len(self._sequences)

    @property
    def ledger(self) -> MemoryLedger:
        """The budget's ledger: its tenants share the budget with the pages."""
        return self._pool.ledger

    def left_bytes(self, num_pages: int = 0) -> int:
        """Bytes left of the budget, for `num_pages` pages and whatever else shares it.

        Pages that are in slabs, but not used, are of use to pages only.
        """
        pool = self._pool
        return pool.left_bytes + min(pool.num_free, num_pages) * pool.page_bytes

    def check_room(self, num_bytes: int, what: str, remedy: str) -> None:
        """Refuse `num_bytes` more of `what` shares the budget.

        Raises:
            HostBudgetError: names them, what is left of the budget, and what to change: its size,
                or the `remedy`.
        """
        if num_bytes > self.left_bytes():
            self.trim()
        left = self.left_bytes()
        if num_bytes > left:
            raise HostBudgetError(
                f"{what} needs {format_bytes(num_bytes)} more, but {format_bytes(max(0, left))} of "
                f"the host budget of {format_bytes(self.host_budget_bytes)} are left beside the KV "
                f"cache; raise max_memory={{'cpu': ...}} or {remedy}"
            )

    def trim(self) -> None:
        """Give memory that holds no token back to the system, for others to have."""
        self._pool.trim()

    def new_sequence(self) -> int:
        """The handle of a new, empty sequence. It takes no memory until `reserve`."""
        if self._closed:
            raise ValueError("the KV store is closed")
        sequence = SequencePages(
            self._pool,
            page_tokens=self.page_tokens,
            starts=np.zeros((self.num_layers, max(self._heads)[0]), np.int64),
            per_head_pages=self.per_head_pages,
            slots=self._slots,
            windows=self._windows,
        )
        return self._add(sequence)

    def kv_len(self, seq: int) -> int:
        """Committed tokens of `seq`."""
        return self._sequence(seq).kv_len

    def num_own_pages(self, seq: int) -> int:
        """Pages that `seq` does not take again as it grows, in all rows together: those of its
        committed tokens, but for what would be copied if a token were added, as a fork has it, too.
        Those that a head lacks count as had: none comes in their place. Of layers with
        windows only those count that no fork has."""
        return self._sequence(seq).num_own_pages()

    def num_present_pages(self, seq: int) -> int:
        """Pages of the committed tokens of `seq`, in all rows together."""
        return self._sequence(seq).num_present_pages()

    def num_unshared_pages(self, seq: int) -> int:
        """Pages of the committed tokens of `seq` that no fork has, in all rows together."""
        return self._sequence(seq).num_unshared_pages()

    def starts(self, seq: int) -> Int64Array:
        """int64 [num_layers, most num_kv_heads], C-contiguous: the first position that a head has.

        The store's own array, not a copy: `rewrite`, `free_behind`, and `truncate` to 0, update it
        in place. All 0 unless heads are apart or layers have windows.
        """
        return self._sequence(seq).starts

    def page_table(self, seq: int) -> Int64Array:
        """int64 [rows, capacity_pages], C-contiguous: addresses of pages, 0 where none is.

        The store's own array, not a copy: `reserve`, `truncate` and `rewrite` update it in place,
        and only `reserve` and `rewrite` may replace it by a larger one.
        """
        return self._sequence(seq).page_table

    def renew_page_table(self, seq: int) -> None:
        """Go on with a copy of the page table: who has the old one may read it for ever."""
        sequence = self._sequence(seq)
        sequence.page_table = sequence.page_table.copy()

    def reserve(
        self, seqs: Sequence[int], num_new_tokens: Sequence[int], *, at_once: bool = False
    ) -> None:
        """Make token positions kv_len .. kv_len + num_new_tokens[i] of seqs[i] writable.

        All or nothing: allocates the missing pages of all layers of all `seqs`, and copies pages
        shared with a fork where they would be written to. A sequence keeps what it had reserved.

        Args:
            at_once: all of these tokens are written layer by layer and committed, or none: of
                layers with windows there is only room for what stays, and `append` drops the rest.
                Then `free_behind`, or `truncate` to the present kv_len, before more is reserved.

        Raises:
            HostBudgetError: before anything changes, if the pages do not fit the budget or the
                memory that is left.
            ValueError: for lists of different length, a handle given twice, a negative count.
        """
        batch = self._batch(seqs, num_new_tokens)
        for seq, (sequence, _) in zip(seqs, batch, strict=True):
            if sequence.windows is not None and sequence.gap_ends.any():
                raise ValueError(f"sequence {seq} has tokens that are written at once: end these")
        reserve(self._pool, batch, at_once=at_once)

    def prepare(self, num_tokens: int) -> None:
        """Begin to map pages for so many tokens in a thread, if they are for a GPU: beside a CPU
        that reads a prompt nothing would be gained."""
        if self.is_pinned:
            self._pool.prepare(self.pages_at(num_tokens))

    def make_room(self, seqs: Sequence[int], num_new_tokens: Sequence[int]) -> None:
        """Let `reserve` of as many, or of less several times, take no memory from the system.

        Raises:
            HostBudgetError, ValueError: as `reserve`.
        """
        make_room(self._pool, self._batch(seqs, num_new_tokens))

    def append(
        self,
        seq: int,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
        *,
        kept: bool = False,
    ) -> None:
        """Write one layer's new tokens at positions `start` .. (default: from kv_len).

        Args:
            keys, values: the store's dtype, [num_new_tokens, num_kv_heads, head_dim] of the layer,
                any strides.
            kept: they are as `gather` gave them with `kept`, but for the order of dimensions.

        Raises:
            ValueError: before anything is written, for a wrong shape or dtype, a NaN or infinity,
                numbers beyond the format's, positions that are not reserved, that a head lacks, or
                whose page is shared with a fork.
        """
        parts = self._writable(seq, layer_idx, keys, values, start, kept=kept)
        keys, values = keys.detach(), values.detach()
        for name, rows in (("keys", keys), ("values", values))[: self.format.num_parts]:
            where = f"{name} in layer {layer_idx} of sequence {seq}"
            if kept:
                self.format.check_kept(where, rows, self.heads_of(layer_idx)[1])
                continue
            if not all_finite(rows):
                raise ValueError(f"non-finite {where}")
            self.format.check(where, rows)

        write_rows((keys, values), parts, self.format.kept if kept else self.format)

    def append_async(
        self,
        seq: int,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
    ) -> None:
        """`append` of rows on a CUDA device, in the order of the current stream. Where pages are
        int8 the rows are afterwards as pages have them.

        The caller keeps the rows until the stream has come here, and waits for it before it
        commits, or drops what it reserved. Whether the rows are finite is the caller's to check:
        to know it here would be to wait.
        """
        parts = self._writable(seq, layer_idx, keys, values, start)
        write_rows((keys.detach(), values.detach()), parts, self.format, waits=False)

    def commit(self, seqs: Sequence[int], num_new_tokens: Sequence[int]) -> None:
        """Add num_new_tokens[i] reserved tokens, written in every layer, to the kv_len of seqs[i].

        Raises:
            ValueError: before anything changes, for more tokens than are reserved, and for the
                lists that `reserve` refuses.
        """
        batch = self._batch(seqs, num_new_tokens)
        for seq, (sequence, num_new) in zip(seqs, batch, strict=True):
            if sequence.kv_len + num_new > sequence.reserved_len:
                raise ValueError(
                    f"cannot commit {num_new} tokens of sequence {seq}: "
                    f"{sequence.reserved_len - sequence.kv_len} are reserved"
                )
        for sequence, num_new in batch:
            sequence.kv_len += num_new

    def free_behind(self, seqs: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """Free the pages that layers with windows will not read any more, but for a few tokens that
        `truncate` may want: nothing rolls back to before the last `commit` now.

        Args:
            starts: of each layer, positions before which it has nothing that may be read.
        """
        if self._windows is not None:
            for seq in seqs:
                self._sequence(seq).free_behind(starts)

    def check_starts(self, starts: Sequence[int], kv_len: int) -> None:
        """ValueError unless a sequence of `kv_len` tokens can go on when its layers lack the first
        `starts` of them."""
        windows = [0] * self.num_layers if self._windows is None else self._windows.tolist()
        for layer_idx, (start, window) in enumerate(zip(starts, windows, strict=True)):
            most = max(0, kv_len - window + 1) if window else 0
            most -= most % self.page_tokens
            if not (isinstance(start, int) and 0 <= start <= most):
                raise ValueError(
                    f"layer {layer_idx} must lack at most the first {most} of {kv_len} tokens, "
                    f"got {start!r}"
                )

    def gather(
        self,
        seq: int,
        layer_idx: int,
        start: int = 0,
        stop: int | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        kept: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies (keys, values) of positions start .. stop (default: kv_len) of one layer.

        Each is [num_kv_heads, stop - start, head_dim], contiguous unless given as `out`. `stop` may
        exceed kv_len up to what is reserved; those rows are what `append` wrote, or undefined. Rows
        that a head lacks are 0. `out` may be on a CUDA device: it is filled in the order of the
        current stream. With `keys_only` values are their whole keys, the same tensor unless `out`
        is given. Of int8 they are rounded to the dtype, but with `kept` they are as in pages:
        int8 [num_kv_heads, stop - start, row].
        """
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        stop = sequence.kv_len if stop is None else stop
        if not 0 <= start <= stop <= sequence.reserved_len:
            raise ValueError(
                f"sequence {seq} has {sequence.reserved_len} positions, cannot gather "
                f"{start}..{stop}"
            )
        num_kv_heads, head_dim = self.heads_of(layer_idx)
        of_rows = self.format.kept if kept else self.format
        row = self.format.row_items(head_dim) if kept else head_dim
        expected, dtype = (num_kv_heads, stop - start, row), of_rows.dtype
        if out is None:
            keys = torch.empty(expected, dtype=dtype)
            out = keys, keys if self.format.keys_only else torch.empty_like(keys)
        check_out(out, expected, dtype)
        read_rows(out, sequence.parts(layer_idx, start, stop), of_rows)
        return out

    def page_views(self, seq: int, layer_idx: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The committed tokens of one layer where they are, not copied.

        Yields (first, last + 1, [n, K|V, num_kv_heads, tokens, row]): runs of n adjoining
        whole pages, and part of the last page (n = 1). ValueError if heads are apart, or the layer
        lacks some.
        """
        if self.per_head_pages:
            raise ValueError("page_views is of pages of all heads, but here heads are apart")
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        if first := int(sequence.starts[layer_idx, 0]):
            raise ValueError(f"layer {layer_idx} of sequence {seq} lacks the first {first} tokens")
        return sequence.pieces(layer_idx, 0, sequence.kv_len)

    def fork(self, seq: int) -> int:
        """The handle of a copy of `seq` that shares its pages until one of the two writes to them.

        The copy has the committed tokens. `seq` must `reserve` again before it appends.
        """
        return self._add(self._sequence(seq).fork())

    def truncate(self, seq: int, kv_len: int) -> None:
        """Keep the first `kv_len` tokens of `seq`; drop the others and whatever was reserved.

        Raises:
            ValueError: unless 0 <= kv_len <= the present kv_len, or where a head lacks some.
        """
        self.check_truncate(seq, kv_len)
        self._sequence(seq).truncate(kv_len)

    def least_kv_len(self, seq: int) -> int:
        """The fewest tokens, but for none, that `truncate` can leave of `seq`."""
        sequence = self._sequence(seq)
        return sequence.least_kv_len(sequence.kv_len)

    def check_truncate(self, seq: int, kv_len: int) -> None:
        """Raise what `truncate` would."""
        sequence = self._sequence(seq)
        if not 0 <= kv_len <= sequence.kv_len:
            raise ValueError(
                f"cannot truncate sequence {seq} of {sequence.kv_len} tokens to {kv_len}"
            )
        if self._windows is not None and 0 < kv_len < sequence.least_kv_len(kv_len):
            raise ValueError(
                f"cannot cut sequence {seq} of {sequence.kv_len} tokens to {kv_len}: layers that "
                f"see a window of {self._windows.max()} tokens have freed what is before it, and "
                f"can go back to {self.least_kv_len(seq)}; read the first {kv_len} tokens again"
            )
        first = int(sequence.starts.max()) if self.per_head_pages else 0
        if 0 < kv_len < first:
            raise ValueError(
                f"cannot truncate sequence {seq} to {kv_len} tokens: a head lacks the first {first}"
            )

    def exchange(self, seq: int, copy: int, first: int, last: int) -> None:
        """Give `seq` the tokens first .. last that were written anew to `copy`, a fork of it that
        kept the first `first`, committed or not; `copy` has the old ones.

        Raises:
            ValueError: before anything changes, unless `seq` has these tokens and `copy` room for
                them, or where heads are apart.
        """
        ours, theirs = self._sequence(seq), self._sequence(copy)
        if self.per_head_pages:
            raise ValueError("exchange is of pages of all heads, but here heads are apart")
        if self._windows is not None:
            raise ValueError("exchange is not for layers with windows")
        if not 0 <= first < last <= min(ours.kv_len, theirs.reserved_len):
            raise ValueError(
                f"cannot exchange {first}..{last} of sequence {seq} of {ours.kv_len} tokens with "
                f"{copy}, which has {theirs.kv_len} and room for {theirs.reserved_len}"
            )
        ours.exchange(theirs, first, last)

    def rewrite(self, seq: int, lens: npt.NDArray[np.integer], rows: RowsOfLayer) -> None:
        """Replace what every KV head has, where heads are apart: kv_len is then lens.max(), and
        starts are kv_len - lens. Reservations end; forks keep their pages.

        Args:
            lens: [num_layers, num_kv_heads], tokens of each head, multiples of page_tokens, not 0.
            rows: (layer_idx) -> of every head keys and values, each [lens[layer_idx, kv_head],
                row], as `gather` gives them with `kept`, in memory of their own. It is called once
                for each layer, in an order such that no more pages are needed on the way than at
                the end, and may `gather` that layer.

        Raises:
            HostBudgetError: before anything changes, if there is no room beside what forks keep.
            ValueError: if heads are not apart, or for wrong `lens`, before anything changes; for
                rows of a wrong shape or dtype, a NaN or infinity, before that layer changes.

        An error before the first layer was replaced (one that `rows` raises is passed on) leaves
        the sequence as it was, but for its reservation, and a later one leaves it empty, kv_len 0.
        """
        if not self.per_head_pages:
            raise ValueError("rewrite needs a KV store with per_head_pages=True")
        sequence = self._sequence(seq)
        lens = check_lens(lens, self.num_layers, self.num_kv_heads, self.page_tokens)
        rewrite(self._pool, sequence, lens, rows)

    def fit_slabs(self, num_tokens: int) -> None:
        """Take memory from now on in slabs that a sequence of so many tokens fills."""
        self._pool.fit_slabs(self.num_page_rows * -(-num_tokens // self.page_tokens))

    def unshare(self, seq: int, num_tokens: int) -> None:
        """Give `seq` copies of those pages of its first `num_tokens` that forks have, too, so that
        all of these may be written to.

        HostBudgetError if there is no room for the copies; nothing has changed then.
        """
        self._sequence(seq).unshare(num_tokens)

    def free(self, seq: int) -> None:
        """Drop `seq`; its pages become free unless a fork shares them. The handle is gone."""
        self._sequence(seq).truncate(0)
        del self._sequences[seq]

    def close(self) -> None:
        """Drop all sequences and give the memory back; page tables held elsewhere dangle."""
        self._closed = True
        self._sequences.clear()
        self._pool.close()

    def _add(self, sequence: SequencePages) -> int:
        seq = self._next_seq
        self._next_seq += 1
        self._sequences[seq] = sequence
        return seq

    def _sequence(self, seq: int) -> SequencePages:
        try:
            return self._sequences[seq]
        except KeyError:
            reason = "the KV store is closed" if self._closed else "never made, or freed"
            raise ValueError(f"unknown sequence handle {seq!r}: {reason}") from None

    def _writable(
        self,
        seq: int,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int | None,
        *,
        kept: bool = False,
    ) -> Iterator[Part]:
        """Where rows that `append` may write go, counted from the first row."""
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        num_kv_heads, row = self.heads_of(layer_idx)
        dtype, row = (
            (self.format.page_dtype, self.format.row_items(row)) if kept else (self.dtype, row)
        )
        check_new_rows(keys, values, num_kv_heads, row, dtype)
        start = sequence.kv_len if start is None else start
        stop = start + len(keys)
        check_writable(sequence, seq, layer_idx, start, stop)
        return sequence.parts(layer_idx, start, stop)

    def _of_all_layers(self, i: int) -> int:
        for layer_idx, heads in enumerate(self._heads):
            if heads != self._heads[0]:
                raise NotImplementedError(
                    f"layer {layer_idx} has (num_kv_heads, head_dim) = {heads}, layer 0 has "
                    f"{self._heads[0]}: pages of each KV head and GPUs need layers "
                    "whose heads are alike yet"
                )
        return self._heads[0][i]

    def _check_layer(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx must be in 0..{self.num_layers - 1}, got {layer_idx}")

    def _batch(
        self, seqs: Sequence[int], num_new_tokens: Sequence[int]
    ) -> list[tuple[SequencePages, int]]:
        if len(seqs) != len(num_new_tokens):
            raise ValueError(
                f"seqs and num_new_tokens must have the same length, "
                f"got {len(seqs)} and {len(num_new_tokens)}"
            )
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs must be distinct, got {list(seqs)}")
        if len(num_new_tokens) and min(num_new_tokens) < 0:
            raise ValueError(f"num_new_tokens must not be negative, got {list(num_new_tokens)}")
        return [(self._sequence(seq), int(n)) for seq, n in zip(seqs, num_new_tokens, strict=True)]
