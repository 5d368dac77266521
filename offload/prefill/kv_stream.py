"""The K/V of one layer at a time: with what is cached already, and out to the host store.

On a CUDA device there are two buffers. While a layer computes into one, the layer before it leaves
from the other on a stream of its own, a policy builds from it there, and the cached tokens of the
next one come in behind both:

    compute stream  layer 0 -> A  layer 1 -> B                    layer 2 -> A (after past 2 came)
    side stream                   A to pages, index, past 2 -> A  B to pages, index, past 3 -> B

The side stream goes first: what it does is little, and in many small pieces, each of which would
otherwise wait for a place between the large ones. The host waits for none of it, except at the end.
Elsewhere one buffer will do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.kv.store import KVStore
from offload.models.batch import RaggedBatch
from offload.prefill.attention import KV

_FIRST = -1  # a stream's priority; others have 0


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch keeps a workspace of products, and free memory, for each."""
    return torch.cuda.Stream(device, priority=_FIRST)  # type: ignore[no-untyped-call]


def copies_alongside(like: Tensor) -> bool:
    """Whether K/V can leave the device of `like` while it computes."""
    return like.is_cuda


class LayerStream:
    """Buffers of the keys and values of all sequences of `batch`, one layer after the other.

    First `fetch_first`. For each layer: `begin`, new `rows` written, `write_out`, last reads
    `beside` the next layer, `end`. At last `finish`; whether that is reached or not, `close`. What
    is read and written in between, but for those last reads, goes to the stream that is current
    throughout.

    Args:
        heads: (num_kv_heads, head_dim) of each layer.
        store: where the K/V go; None keeps each layer only until the next begins.
        seqs: the store's sequence of each sequence of `batch`.
        like: a tensor of the device and dtype.
        keeps: whether new K/V go to the store.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        heads: Sequence[tuple[int, int]],
        *,
        store: KVStore | None,
        seqs: Sequence[int],
        like: Tensor,
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self._batch = batch
        self._store = store
        self._seqs = seqs
        self._past = [0] * batch.num_sequences
        if store is not None:
            self._past = [store.kv_len(seq) for seq in seqs]
        lengths = map(sum, zip(self._past, batch.num_new_tokens, strict=True))
        self._starts = [0, *itertools.accumulate(lengths)]  # of each sequence in the buffers
        self._device = like.device
        self._side: torch.cuda.Stream | None = None
        self._loaded: list[torch.cuda.Event] = []
        if store is not None and copies_alongside(like):
            self._side = _side_stream(like.device)
            self._loaded = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        # Each of the widest layer.
        width = max(num_heads * head_dim for num_heads, head_dim in heads)
        self._buffers = [
            like.new_empty(2 * self._starts[-1] * width)
            for _ in range(1 if self._side is None else 2)
        ]
        self._heads = heads
        self._current = self._buffers[0]
        flags = (0 if store is None else store.num_layers, batch.num_sequences, 2)
        self._is_finite = torch.ones(flags, dtype=torch.bool, device=like.device)

    def fetch_first(self) -> None:
        """Let the cached tokens of the first layers come in."""
        if self._side is not None:
            for layer_idx in range(min(2, len(self._is_finite))):
                self._load(layer_idx)

    def begin(self, layer_idx: int) -> None:
        """Make the buffer of a layer ready: its cached tokens are there, the new may be written."""
        self._current = self._buffer_of(layer_idx)
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_event(self._loaded[layer_idx % 2])
        elif self._store is not None:
            self._gather(layer_idx)

    def _buffer_of(self, layer_idx: int) -> Tensor:
        """[K|V, num_kv_heads, tokens, head_dim]. On a device tokens come first in memory, so that
        strides are the same for prompts of any length (`prefill_attention`)."""
        buffer, tokens = self._buffers[layer_idx % len(self._buffers)], self._starts[-1]
        num_heads, head_dim = self._heads[layer_idx]
        of_layer = buffer[: 2 * tokens * num_heads * head_dim]
        if copies_alongside(buffer):
            return of_layer.view(2, tokens, num_heads, head_dim).transpose(1, 2)
        return of_layer.view(2, num_heads, tokens, head_dim)

    def past_len(self, sequence: int) -> int:
        """Tokens of a sequence of the batch that were cached before."""
        return self._past[sequence]

    def past_starts(self, sequence: int, layer_idx: int) -> list[int] | None:
        """The first cached token that each KV head has, if they do not have all."""
        if self._store is None or not self._store.per_head_pages or not self._past[sequence]:
            return None
        starts: list[int] = self._store.starts(self._seqs[sequence])[layer_idx].tolist()
        return starts if any(starts) else None

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, slice, int]]:
        """The packed tokens start .. stop by sequence: (it, which of these, kv_len of the last)."""
        for sequence, first, last in self._batch.spans(start, stop):
            kv_len = self._past[sequence] + last - self._batch.indptr[sequence]
            yield sequence, slice(first - start, last - start), kv_len

    def rows(self, sequence: int, start: int = 0, stop: int | None = None) -> KV:
        """Keys and values of tokens start .. stop of a sequence, cached ones included; those that a
        head lacks are not to be attended to."""
        first = self._starts[sequence]
        last = self._starts[sequence + 1] if stop is None else first + stop
        keys, values = self._current[:, :, first + start : last]
        return keys, values

    def write_out(self, layer_idx: int) -> None:
        """Append what is new to the store, if it keeps it.

        Raises:
            ValueError: for keys or values that are not finite; on a device `finish` raises it.
        """
        if self._store is None:
            return
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        if not self._keeps:
            return
        if self._side is None:
            for sequence, seq in enumerate(self._seqs):
                keys, values = self.rows(sequence, self._past[sequence])
                self._store.append(seq, layer_idx, keys.transpose(0, 1), values.transpose(0, 1))
                if self._store.format.is_int8:  # who reads the layer now sees what is stored
                    first = self._past[sequence]
                    stop = first + keys.shape[1]
                    self._store.gather(seq, layer_idx, first, stop, out=(keys, values))
            return
        with torch.cuda.stream(self._side):
            for sequence, seq in enumerate(self._seqs):
                keys, values = self.rows(sequence, self._past[sequence])
                self._store.append_async(
                    seq, layer_idx, keys.transpose(0, 1), values.transpose(0, 1)
                )
                for side, rows in enumerate((keys, values)):
                    if rows.numel():
                        # A NaN or infinity is an extreme, and finding those takes no memory.
                        extremes = torch.stack(torch.aminmax(rows))
                        self._is_finite[layer_idx, sequence, side] = extremes.isfinite().all()

    def side_stream(self) -> contextlib.AbstractContextManager[object]:
        """Where to read a layer that is written out, while the next one computes.

        On a device another stream is current there; what is queued to it comes before the buffer
        is used again, at `end`.
        """
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def end(self, layer_idx: int) -> None:
        """The buffer may be used again, for the layer after the next."""
        if self._side is not None and layer_idx + 2 < len(self._is_finite):
            self._load(layer_idx + 2)

    def finish(self) -> None:
        """Wait until everything is in the store.

        Raises:
            ValueError: for keys or values that are not finite.
        """
        if self._side is None:
            return
        self._side.synchronize()
        failed = torch.nonzero(~self._is_finite).tolist()
        if failed:
            layer_idx, sequence, side = failed[0]
            raise ValueError(
                f"non-finite {('keys', 'values')[side]} in layer {layer_idx} "
                f"of sequence {self._seqs[sequence]}"
            )

    def close(self) -> None:
        """Nothing touches the buffers, or pages of the store, any more."""
        # torch's allocator knows the buffers as the compute stream's: freed while they are being
        # copied, they would be given to the next one who asks.
        if self._side is not None:
            self._side.synchronize()
        self._buffers.clear()
        self._current = torch.empty(0)

    def _load(self, layer_idx: int) -> None:
        """Bring the cached tokens of a layer into its buffer, after all that uses it now."""
        assert self._side is not None
        self._current = self._buffer_of(layer_idx)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._gather(layer_idx)
            self._loaded[layer_idx % 2].record(self._side)

    def _gather(self, layer_idx: int) -> None:
        assert self._store is not None
        for sequence, seq in enumerate(self._seqs):
            if self._past[sequence]:
                self._store.gather(seq, layer_idx, out=self.rows(sequence, 0, self._past[sequence]))
