"""Prefill: many new tokens at once, layer by layer, with exact attention.

Layer by layer, because a finished layer's K/V can leave for the host store while the next one
computes (`layer_stream`), and because attention then reads one layer's keys as one array. Inside a
layer the tokens go through in slices, so that only the hidden states and two layers' K/V (one on
the CPU) grow with the prompt; `PrefillMemory` counts what that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from cpu_ops.causal_attention import has_causal_attention
from cpu_ops.linear import has_products
from cpu_ops.worker_pool import WorkerPool
from offload.kv.store import KVStore
from offload.models import DecoderLayer, LeanModel
from offload.models.batch import RaggedBatch
from offload.prefill.attention import KV, attend, attend_in_window, takes_all_keys
from offload.prefill.kv_stream import LayerStream
from offload.prefill.layer import add_mlp, project_qkv, rotate
from offload.prefill.memory import PrefillMemory, available_bytes, check_fits
from offload.system.captures import CAPTURING
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import finish

# Gets (seq, layer_idx, queries [num_qo_heads, n, head_dim] rotated, kv_len of the last of them).
OnQueries = Callable[[int, int, torch.Tensor, int], None]
# Gets (layer_idx, seq, keys, values), each [num_kv_heads, kv_len, head_dim]: all tokens of the
# sequence, cached ones included. They are overwritten soon after it returns, in the order of the
# stream that is current then: not the one that the layers compute on.
OnLayer = Callable[[int, int, torch.Tensor, torch.Tensor], None]
# Gets why more of a device's memory is needed; whether there is more now.
GiveBack = Callable[[DeviceMemoryError], bool]
# Gets the tokens that went through one more layer.
OnTokens = Callable[[int], None]
# Gets (layer_idx, seq, queries [num_qo_heads, n, head_dim] rotated, (keys, values)), these each
# [num_kv_heads, kv_len so far, head_dim], the last of the queries' token the last of them. They are
# read in the order of the current stream.
OnAttended = Callable[[int, int, torch.Tensor, KV], None]


_FEW_THREADS = 8  # with more, what torch copies on one thread would be as much


def prefill(
    model: LeanModel, hidden: torch.Tensor, batch: RaggedBatch, **options: Any
) -> torch.Tensor:
    """Run all layers over the new tokens of `batch`, on the device of `hidden`.

    Args, Raises:
        as `prefill_by_layer`.

    Returns:
        [num_tokens, hidden_size], before the final norm. The K/V are in the store, if it keeps
        them.
    """
    return finish(prefill_by_layer(model, hidden, batch, **options))


def prefill_by_layer(
    model: LeanModel,
    hidden: torch.Tensor,
    batch: RaggedBatch,
    *,
    store: KVStore | None,
    seqs: Sequence[int],
    slice_tokens: int,
    pool: WorkerPool | None = None,
    on_queries: OnQueries | None = None,
    on_layer: OnLayer | None = None,
    on_attended: OnAttended | None = None,
    on_tokens: OnTokens | None = None,
    keeps: bool = True,
    copied_heads: int = 0,
    device_budget_bytes: int | None = None,
    give_back: GiveBack | None = None,
) -> Generator[None, None, torch.Tensor]:
    """`prefill` as a generator that stops before every layer, and before it waits for the last.
    Whoever goes on has the same stream current each time; `close` gives it up.

    Args:
        hidden: [num_tokens, hidden_size], the embeddings; overwritten.
        store: takes the new K/V, for which room is reserved; None computes without a cache.
        seqs: the store's sequence of each sequence of `batch`; its cached tokens are attended to.
        slice_tokens: tokens that go through a layer at one time.
        pool: of our own kernels on a CPU; None leaves all to torch.
        on_queries: sees the queries of every slice of every sequence, in order.
        on_layer: sees the keys and values of every layer of every sequence in the store.
        on_attended: sees the queries of every slice of every sequence in the store, and what they
            attended to; of keys and values that a head lacks (`KVStore.starts`) it makes no use.
        on_tokens: hears of every slice after every layer. A GPU may still be at work on it.
        keeps: whether the store takes the new K/V. False: these are only attended to, no room is
            needed for them, and whether they are finite is not checked.
        copied_heads: KV heads of a layer of which on_layer makes copies.
        device_budget_bytes: what torch may have on a CUDA device, as far as it is free there.
        give_back: asked for more of a CUDA device where there is too little, until it has none.

    Raises:
        ValueError: for keys or values that are not finite.
        DeviceMemoryError: the memory of the device does not suffice. What was allocated here is
            free again, and nothing writes to the store any more; the caller drops what it reserved.
    """
    memory = None
    if hidden.is_cuda:
        memory = PrefillMemory.of(
            model.shape,
            item_bytes=hidden.dtype.itemsize,
            num_tokens=batch.num_tokens,
            past_tokens=0 if store is None else sum(store.kv_len(seq) for seq in seqs),
            slice_tokens=slice_tokens,
            page_tokens=256 if store is None else store.page_tokens,
            builds_index=store is not None and on_layer is not None,
            copied_heads=copied_heads,
        )
        _find_room(memory, hidden.device, device_budget_bytes, give_back)

    def run_layers() -> Generator[None, None, torch.Tensor]:
        positions = batch.position_ids[None].to(hidden.device)
        ropes = [rope(hidden, positions) for rope in model.ropes]
        scale = None if model.query_scale is None else model.query_scale(hidden, positions[0])
        heads = [*zip(model.each("num_kv_heads"), model.each("head_dim"), strict=True)]
        stream = LayerStream(batch, heads, store=store, seqs=seqs, like=hidden, keeps=keeps)
        try:
            stream.fetch_first()
            for layer_idx, layer in enumerate(model.layers):
                yield
                cos, sin = (table[0] for table in ropes[layer.spec.rope_idx])
                stream.begin(layer_idx)
                for start in range(0, batch.num_tokens, slice_tokens):
                    stop = min(start + slice_tokens, batch.num_tokens)
                    x, rope = hidden[start:stop], (cos[start:stop], sin[start:stop])
                    q = _write_kv(layer, x, rope, stream, start, stop, pool)
                    if scale is not None:
                        q *= scale[start:stop, None]
                    if store is not None and on_queries is not None:
                        for sequence, of_slice, kv_len in stream.spans(start, stop):
                            on_queries(seqs[sequence], layer_idx, q[:, of_slice], kv_len)
                    o = _attend(q, layer_idx, stream, layer, start, stop, pool)
                    delta = layer.o_proj(o, pool)
                    del o
                    if store is not None and on_attended is not None:
                        for sequence, of_slice, kv_len in stream.spans(start, stop):
                            seen = stream.rows(sequence, 0, kv_len)
                            on_attended(layer_idx, seqs[sequence], q[:, of_slice], seen)
                        del seen
                    del q
                    add_mlp(layer, x, model.sum_over_ranks(delta), model.sum_over_ranks, pool)
                    del delta
                    if on_tokens is not None:
                        on_tokens(stop - start)
                stream.write_out(layer_idx)
                if store is not None and on_layer is not None:
                    with stream.side_stream():
                        for sequence, seq in enumerate(seqs):
                            on_layer(layer_idx, seq, *stream.rows(sequence))
                stream.end(layer_idx)
            yield
            stream.finish()
        finally:
            stream.close()
        return hidden

    try:
        return (yield from run_layers())
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
    # Not inside the handler: the error's traceback would keep every tensor of `run_layers` alive
    # for as long as somebody looks at ours.
    if hidden.is_cuda:
        with CAPTURING:
            torch.cuda.empty_cache()
    counted = f" (counted beforehand: {memory})" if memory is not None else ""
    raise DeviceMemoryError(
        f"prefilling {batch.num_tokens} tokens in slices of {slice_tokens} ran out of device "
        f"memory{counted}; lower prefill_slice_tokens or shorten the prompt: {reason}"
    )


def is_all_on_pool(
    model: LeanModel, hidden: torch.Tensor, store: KVStore, pool: WorkerPool | None
) -> bool:
    """Whether a few threads of our own do all that takes long in `prefill`. Those of OpenMP would
    spin behind each of torch's small operators, on CPUs that ours need: torch has one alone then.
    """
    if pool is None or not hidden.is_cpu or not has_products(hidden.dtype):
        return False
    if pool.num_threads > _FEW_THREADS or store.format.is_int8:  # torch's copies, and its int8
        return False
    return all(
        layer.routed is None and has_causal_attention(hidden.dtype, layer.spec.head_dim)
        for layer in model.layers
    )


def _find_room(
    memory: PrefillMemory,
    device: torch.device,
    budget_bytes: int | None,
    give_back: GiveBack | None,
) -> None:
    while True:
        available = available_bytes(device, budget_bytes)
        try:
            check_fits(memory, available, already_there=memory.hidden_bytes)  # embeddings
            break
        except DeviceMemoryError as error:
            if give_back is None or not give_back(error):
                raise
    # Slices behind more and more tokens leave free pieces that are too small for the next.
    held = torch.cuda.memory_reserved(device)
    if budget_bytes is not None and held + memory.total_bytes > budget_bytes:
        with CAPTURING:
            torch.cuda.empty_cache()


def _write_kv(
    layer: DecoderLayer,
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    stream: LayerStream,
    start: int,
    stop: int,
    pool: WorkerPool | None,
) -> torch.Tensor:
    """Rotated queries [num_qo_heads, n, head_dim] of x, the tokens start .. stop; K/V are kept."""
    q, k, v = project_qkv(layer, x, pool)
    k, v = rotate(k, *rope, pool), v.transpose(0, 1)
    for sequence, of_slice, kv_len in stream.spans(start, stop):
        keys, values = stream.rows(sequence, kv_len - of_slice.stop + of_slice.start, kv_len)
        keys.copy_(k[:, of_slice])
        values.copy_(v[:, of_slice])
    return rotate(q, *rope, pool)


def _attend(
    q: torch.Tensor,
    layer_idx: int,
    stream: LayerStream,
    layer: DecoderLayer,
    start: int,
    stop: int,
    pool: WorkerPool | None,
) -> torch.Tensor:
    """Attention of the tokens start .. stop, which may be of several sequences.

    Args:
        q: [num_qo_heads, n, head_dim].

    Returns:
        [n, num_qo_heads * head_dim].
    """
    spec, sinks, parts = layer.spec, layer.sinks, []
    for sequence, of_slice, kv_len in stream.spans(start, stop):
        past_len, of_sequence = stream.past_len(sequence), q[:, of_slice]
        if spec.window and kv_len > spec.window:
            first = max(0, kv_len - of_sequence.shape[1] - spec.window + 1)
            kv = stream.rows(sequence, first, kv_len)
            parts.append(attend_in_window(of_sequence, kv, spec.window, spec.sm_scale, pool, sinks))
            continue
        starts = stream.past_starts(sequence, layer_idx)
        if starts is not None:
            kv = stream.rows(sequence, 0, kv_len)
            of_heads = _attend_by_head(of_sequence, past_len, kv, starts, layer, pool)
            parts.append(of_heads)
            continue
        past = None
        if past_len and not takes_all_keys(q, pool):
            past = stream.rows(sequence, 0, past_len)
        new = stream.rows(sequence, 0 if past is None else past_len, kv_len)
        parts.append(attend(of_sequence, past, new, spec.sm_scale, pool, sinks))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _attend_by_head(
    q: torch.Tensor,
    past_len: int,
    kv: KV,
    starts: Sequence[int],
    layer: DecoderLayer,
    pool: WorkerPool | None,
) -> torch.Tensor:
    """Attention over other cached tokens for each KV head: those from `starts` on.

    Args:
        q: [num_qo_heads, n, head_dim].
        kv: [num_kv_heads, kv_len, head_dim], the first `past_len` of them cached before.

    Returns:
        [n, num_qo_heads, head_dim].
    """
    parts, by_head = [], None if layer.sinks is None else layer.sinks.chunk(len(starts))
    for head, queries in enumerate(q.chunk(len(starts))):
        keys, values = (x[head : head + 1] for x in kv)
        past, new_from = None, starts[head]
        if new_from < past_len and not takes_all_keys(q, pool):
            past, new_from = (keys[:, new_from:past_len], values[:, new_from:past_len]), past_len
        new = keys[:, new_from:], values[:, new_from:]
        sinks = None if by_head is None else by_head[head]
        parts.append(attend(queries, past, new, layer.spec.sm_scale, pool, sinks))
    return torch.cat(parts, dim=1)
