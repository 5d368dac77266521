"""Other tokens for every KV head of a sequence, as many as each needs, where heads are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from offload.kv.format import KVFormat
from offload.kv.page_pool import Int64Array, PagePool
from offload.kv.sequence_pages import SequencePages
from offload.kv.transfer import Rows, all_finite, fill_pages

# Gets layer_idx, gives of every KV head (keys, values), each [num_tokens, head_dim].
RowsOfLayer = Callable[[int], Iterable[Rows]]


def rewrite(pool: PagePool, sequence: SequencePages, lens: Int64Array, rows: RowsOfLayer) -> None:
    """`KVStore.rewrite` of `lens` that are checked."""
    num_new = lens // sequence.page_tokens
    added = num_new.sum(axis=1) - _freed_pages(pool, sequence)
    # Layers that give most pages come first: no more are needed on the way than at the end.
    order = np.argsort(added, kind="stable")
    reserved = sequence.num_rows * (sequence.num_pages - sequence.pages_of(sequence.kv_len))
    pool.make_room(int(added[order].cumsum().max()) - reserved)
    sequence.truncate(sequence.kv_len)
    kv_len = int(lens.max())
    sequence.widen(kv_len // sequence.page_tokens)
    is_begun = False
    try:
        for layer_idx in order.tolist():
            of_layer = list(rows(layer_idx))
            _check_rows(pool, of_layer, lens[layer_idx], layer_idx)
            is_begun = True
            _replace_layer(pool, sequence, layer_idx, of_layer, kv_len)
            del of_layer
    except BaseException:
        if is_begun:
            sequence.truncate(0)
        raise
    sequence.kv_len = sequence.reserved_len = kv_len
    sequence.num_pages = kv_len // sequence.page_tokens


def _freed_pages(pool: PagePool, sequence: SequencePages) -> Int64Array:
    """[num_layers]: pages of the committed tokens that no fork has."""
    page_ids = sequence.page_ids[:, : sequence.pages_of(sequence.kv_len)]
    is_freed = (page_ids >= 0) & (pool.refcounts[page_ids] == 1)
    of_layer: Int64Array = is_freed.reshape(len(sequence.starts), -1).sum(axis=1)
    return of_layer


def _replace_layer(
    pool: PagePool, sequence: SequencePages, layer_idx: int, of_layer: Sequence[Rows], kv_len: int
) -> None:
    table_rows, page_tokens = sequence.rows_of(layer_idx), sequence.page_tokens
    sequence.drop(table_rows, slice(None))
    counts = [len(keys) // page_tokens for keys, _ in of_layer]
    parts = np.split(pool.allocate(sum(counts)), np.cumsum(counts)[:-1])
    # All have an owner before anything is copied, which takes long enough for ctrl-C.
    for head, page_ids in enumerate(parts):
        start = kv_len - len(page_ids) * page_tokens
        sequence.put(table_rows.start + head, start // page_tokens, page_ids)
        sequence.starts[layer_idx, head] = start
    for head, (keys, values) in enumerate(of_layer):
        start, row = kv_len - len(keys), table_rows.start + head
        by_token = keys.detach()[:, None], values.detach()[:, None]
        fill_pages(by_token, sequence.pieces(row, start, kv_len), KVFormat(pool.dtype))


def _check_rows(pool: PagePool, of_layer: Sequence[Rows], lens: Int64Array, layer_idx: int) -> None:
    if len(of_layer) != len(lens):
        raise ValueError(
            f"rows of layer {layer_idx} must be of {len(lens)} KV heads, got {len(of_layer)}"
        )
    for head, (num_tokens, sides) in enumerate(zip(lens.tolist(), of_layer, strict=True)):
        for name, rows in zip(("keys", "values"), sides, strict=True):
            where = f"{name} of head {head} in layer {layer_idx}"
            expected = [num_tokens, pool.page_shape[-1]]
            if list(rows.shape) != expected or rows.dtype != pool.dtype:
                raise ValueError(
                    f"{where} must be {pool.dtype} {expected}, got {rows.dtype} {list(rows.shape)}"
                )
            if not all_finite(rows):
                raise ValueError(f"non-finite {where}")
