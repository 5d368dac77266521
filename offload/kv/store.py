"""The host KV store: the keys and values of every sequence, in pages of host memory.

Layout (stated here, nowhere else). A page holds `page_tokens` consecutive tokens of all KV heads of
one layer of one sequence:

    page: dtype [K|V][num_kv_heads][page_tokens][head_dim], contiguous

so that a page moves in one copy, and a scan of the keys of all heads reads half a page in one run.
(Runs of 64 KiB with gaps between them read about a fifth slower than one run, measured apart from
attention; `exact_topk` as a whole did not get measurably faster by it.) Token `t` of a
sequence is in page `t // page_tokens` of its page table, and its row of `head_dim` elements is at

    page_table[layer_idx, t // page_tokens]
        + ((is_value * num_kv_heads + kv_head) * page_tokens + t % page_tokens) * row_bytes

The page table of a sequence is int64 [num_layers, capacity_pages], C-contiguous, of addresses, with
0 where there is no page. All offsets are 64-bit.

A decode step: `reserve` room for the new tokens, write every layer (`append`, or a native kernel
that writes the rows through the page table), `commit`. Forked sequences share pages; `reserve`
replaces a shared page by a copy before anything may be written to it. What the store says it uses
is what the process uses: slabs are touched when they are made (see `page_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from offload.kv.page_pool import DEFAULT_SLAB_BYTES, Int64Array, PagePool, page_shape
from offload.kv.sequence_pages import SequencePages
from offload.kv.transfer import Piece, all_finite, copy_from_pages, copy_to_pages, runs_of
from offload.system.errors import HostBudgetError
from offload.system.memory import host_memory_limit_bytes
from offload.system.pinned_memory import CudaRegistration, HostRegistration

__all__ = ["HostBudgetError", "KVStore"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class KVStore:
    """Paged KV of many sequences, each named by a handle (an int that is never reused).

    Args:
        num_layers, num_kv_heads, head_dim: of the model; head_dim a multiple of 8.
        dtype: torch.float32, torch.float16 or torch.bfloat16.
        host_budget_bytes: hard limit on host memory; default `host_memory_limit_bytes()`.
        page_tokens: tokens in a page.
        slab_bytes: host memory is taken from the system in multiples of this, as needed, up to the
            budget (the last slab may be smaller); at least one page.
        pinned: register slabs with the CUDA driver, so that `append_async` does not wait, and
            kernels may read pages; or what to register them with.

    Not thread-safe. Handles that do not exist, or no longer, raise ValueError everywhere.
    """

    heads_apart = False

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        host_budget_bytes: int | None = None,
        page_tokens: int = 256,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        pinned: bool | HostRegistration = False,
    ) -> None:
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in {**sizes, "page_tokens": page_tokens, "slab_bytes": slab_bytes}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if head_dim % 8:
            raise ValueError(f"head_dim must be a multiple of 8, got {head_dim}")
        if dtype not in _DTYPES:
            available = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(f"the KV store has no dtype {dtype}; available: {available}")
        if host_budget_bytes is None:
            host_budget_bytes = host_memory_limit_bytes()
        if host_budget_bytes < 0:
            raise ValueError(f"host_budget_bytes must not be negative, got {host_budget_bytes}")
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.page_tokens = page_tokens
        registration = (
            (CudaRegistration() if pinned else None) if isinstance(pinned, bool) else pinned
        )
        self._pool = PagePool(
            page_shape=page_shape(num_kv_heads, page_tokens, head_dim),
            dtype=dtype,
            budget_bytes=host_budget_bytes,
            slab_bytes=slab_bytes,
            registration=registration,
        )
        self._sequences: dict[int, SequencePages] = {}
        self._next_seq = 0
        self._closed = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: page_tokens tokens of one layer."""
        return self._pool.page_bytes

    @property
    def host_budget_bytes(self) -> int:
        """The hard limit of `host_bytes_reserved` and what shares the budget."""
        return self._pool.budget_bytes

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

    def share_budget(self, count_bytes: Callable[[], int]) -> None:
        """Others have `count_bytes()` of memory within the budget, too."""
        self._pool.count_beside = count_bytes

    def left_bytes(self, num_pages: int = 0) -> int:
        """Of the budget: for `num_pages` pages and whatever else shares it.

        Pages that are in slabs, but not used, are of use to pages only.
        """
        pool = self._pool
        return pool.left_bytes + min(pool.num_free, num_pages) * pool.page_bytes

    def trim(self) -> None:
        """Give memory that holds no token back to the system, for others to have."""
        self._pool.trim()

    def new_sequence(self) -> int:
        """The handle of a new, empty sequence. It takes no memory until `reserve`."""
        if self._closed:
            raise ValueError("the KV store is closed")
        return self._add(
            SequencePages(self._pool, num_layers=self.num_layers, page_tokens=self.page_tokens)
        )

    def kv_len(self, seq: int) -> int:
        """Committed tokens of `seq`."""
        return self._sequence(seq).kv_len

    def num_own_pages(self, seq: int) -> int:
        """Pages per layer that the committed tokens of `seq` are in, but for the one that would be
        copied if a token were added, as a fork has it, too."""
        sequence = self._sequence(seq)
        tail_id = sequence.shared_tail_id()
        is_copied = tail_id is not None and self._pool.refcounts[tail_id] > 1
        return -(-sequence.kv_len // self.page_tokens) - int(is_copied)

    def num_unshared_pages(self, seq: int) -> int:
        """Pages per layer of the committed tokens of `seq` that no fork has."""
        sequence = self._sequence(seq)
        num_pages = -(-sequence.kv_len // self.page_tokens)
        return num_pages - len(sequence.shared_pages(sequence.kv_len))

    def page_table(self, seq: int) -> Int64Array:
        """int64 [num_layers, capacity_pages], C-contiguous: addresses of pages, 0 where none is.

        The store's own array, not a copy: `reserve` and `truncate` update it in place, and only
        `reserve` may replace it by a larger one.
        """
        return self._sequence(seq).page_table

    def renew_page_table(self, seq: int) -> None:
        """Go on with a copy of the page table: who has the old one may read it for ever."""
        sequence = self._sequence(seq)
        sequence.page_table = sequence.page_table.copy()

    def reserve(self, seqs: Sequence[int], num_new_tokens: Sequence[int]) -> None:
        """Make token positions kv_len .. kv_len + num_new_tokens[i] of seqs[i] writable.

        All or nothing: allocates the missing pages of all layers of all `seqs`, and copies pages
        shared with a fork where they would be written to. A sequence keeps what it had reserved.

        Raises:
            HostBudgetError: before anything changes, if the pages do not fit the budget or the
                memory that is left.
            ValueError: for lists of different length, a handle given twice, a negative count.
        """
        batch = self._batch(seqs, num_new_tokens)
        missing = [sequence.num_missing_pages(num_new) for sequence, num_new in batch]
        copied = [False] * len(batch)
        owners: dict[int, int] = {}  # of the shared pages, less those that get a copy here
        for i, (sequence, num_new) in enumerate(batch):
            page_id = sequence.shared_tail_id() if num_new else None
            if page_id is not None:
                num_owners = owners.setdefault(page_id, int(self._pool.refcounts[page_id]))
                # The last owner keeps the page: n sequences of one batch need n - 1 copies.
                copied[i] = num_owners > 1
                owners[page_id] -= copied[i]

        page_ids = self._pool.allocate(self.num_layers * (sum(missing) + sum(copied)))
        for i, (sequence, num_new) in enumerate(batch):
            if copied[i]:
                tail_ids, page_ids = np.split(page_ids, [self.num_layers])
                sequence.replace_tail(tail_ids)
            if missing[i]:
                new_ids, page_ids = np.split(page_ids, [self.num_layers * missing[i]])
                sequence.extend(new_ids.reshape(self.num_layers, missing[i]))
            if num_new:
                sequence.tail_may_be_shared = False
                sequence.reserved_len = max(sequence.reserved_len, sequence.kv_len + num_new)

    def append(
        self,
        seq: int,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
    ) -> None:
        """Write one layer's new tokens at positions `start` .. (default: from kv_len).

        Args:
            keys, values: the store's dtype, [num_new_tokens, num_kv_heads, head_dim], any strides.

        Raises:
            ValueError: before anything is written, for a wrong shape or dtype, a NaN or infinity,
                positions that are not reserved or whose page is shared with a fork.
        """
        pieces = self._writable(seq, layer_idx, keys, values, start)
        keys, values = keys.detach(), values.detach()
        for name, rows in (("keys", keys), ("values", values)):
            if not all_finite(rows):
                raise ValueError(f"non-finite {name} in layer {layer_idx} of sequence {seq}")

        for sides, pages in runs_of((keys, values), pieces):
            for side, rows in enumerate(sides):
                pages[:, side].copy_(rows)

    def append_async(
        self,
        seq: int,
        layer_idx: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int | None = None,
    ) -> None:
        """`append` of rows on a CUDA device, in the order of the current stream.

        The caller keeps the rows until the stream has come here, and waits for it before it
        commits, or drops what it reserved. Whether the rows are finite is the caller's to check:
        to know it here would be to wait.
        """
        pieces = self._writable(seq, layer_idx, keys, values, start)
        copy_to_pages((keys.detach(), values.detach()), pieces)

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

    def gather(
        self,
        seq: int,
        layer_idx: int,
        start: int = 0,
        stop: int | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies (keys, values) of positions start .. stop (default: kv_len) of one layer.

        Each is [num_kv_heads, stop - start, head_dim], contiguous unless given as `out`. `stop` may
        exceed kv_len up to what is reserved; those rows are what `append` wrote, or undefined.
        `out` may be on a CUDA device: it is filled in the order of the current stream.
        """
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        stop = sequence.kv_len if stop is None else stop
        if not 0 <= start <= stop <= sequence.reserved_len:
            raise ValueError(
                f"sequence {seq} has {sequence.reserved_len} positions, cannot gather "
                f"{start}..{stop}"
            )
        expected = (self.num_kv_heads, stop - start, self.head_dim)
        if out is None:
            out = (torch.empty(expected, dtype=self.dtype), torch.empty(expected, dtype=self.dtype))
        for rows in out:
            if tuple(rows.shape) != expected or rows.dtype != self.dtype:
                raise ValueError(
                    f"out must be two tensors {self.dtype} {list(expected)}, "
                    f"got {rows.dtype} {list(rows.shape)}"
                )
        pieces = sequence.pieces(layer_idx, start, stop)
        by_token = out[0].transpose(0, 1), out[1].transpose(0, 1)
        if out[0].device.type != "cpu":
            copy_from_pages(by_token, pieces)
            return out
        for sides, pages in runs_of(by_token, pieces):
            for side, rows in enumerate(sides):
                rows.copy_(pages[:, side])
        return out

    def page_views(self, seq: int, layer_idx: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The committed tokens of one layer where they are, not copied.

        Yields (first, last + 1, [n, K|V, num_kv_heads, tokens, head_dim]): runs of n adjoining
        whole pages, and part of the last page (n = 1).
        """
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        return sequence.pieces(layer_idx, 0, sequence.kv_len)

    def fork(self, seq: int) -> int:
        """The handle of a copy of `seq` that shares its pages until one of the two writes to them.

        The copy has the committed tokens. `seq` must `reserve` again before it appends.
        """
        return self._add(self._sequence(seq).fork())

    def truncate(self, seq: int, kv_len: int) -> None:
        """Keep the first `kv_len` tokens of `seq`; drop the others and whatever was reserved.

        Raises:
            ValueError: unless 0 <= kv_len <= the present kv_len.
        """
        sequence = self._sequence(seq)
        if not 0 <= kv_len <= sequence.kv_len:
            raise ValueError(
                f"cannot truncate sequence {seq} of {sequence.kv_len} tokens to {kv_len}"
            )
        sequence.truncate(kv_len)

    def fit_slabs(self, num_tokens: int) -> None:
        """Take memory from now on in slabs that a sequence of so many tokens fills."""
        self._pool.fit_slabs(self.num_layers * -(-num_tokens // self.page_tokens))

    def unshare(self, seq: int, num_tokens: int) -> None:
        """Give `seq` copies of those pages of its first `num_tokens` that forks have, too, so that
        all of these may be written to.

        HostBudgetError if there is no room for the copies; nothing has changed then.
        """
        sequence = self._sequence(seq)
        shared = sequence.shared_pages(num_tokens)
        new_ids = self._pool.allocate(self.num_layers * len(shared))
        for page, page_ids in zip(shared, new_ids.reshape(-1, self.num_layers), strict=True):
            sequence.replace_page(page, page_ids, self.page_tokens)

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
    ) -> Iterator[Piece]:
        """Where rows that `append` may write go, counted from the first row."""
        sequence = self._sequence(seq)
        self._check_layer(layer_idx)
        expected = (keys.shape[0] if keys.ndim else 0, self.num_kv_heads, self.head_dim)
        for name, rows in (("keys", keys), ("values", values)):
            if tuple(rows.shape) != expected:
                raise ValueError(
                    f"{name} must be [num_new_tokens, num_kv_heads, head_dim] = {list(expected)}, "
                    f"got {list(rows.shape)}"
                )
            if rows.dtype != self.dtype:
                raise ValueError(f"{name} must be {self.dtype}, got {rows.dtype}")
        start = sequence.kv_len if start is None else start
        stop = start + keys.shape[0]
        if not 0 <= start <= stop <= sequence.reserved_len:
            raise ValueError(
                f"positions {start}..{stop} of sequence {seq} are not reserved: it has "
                f"{sequence.reserved_len} positions; call reserve() before append()"
            )
        if start == stop:
            return iter(())
        if sequence.is_shared(layer_idx, start, stop):
            raise ValueError(
                f"positions {start}..{stop} of sequence {seq} are in pages shared with a fork; "
                "truncate() to the first position to rewrite, then reserve()"
            )
        return sequence.pieces(layer_idx, start, stop)

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
