"""A store whose layers differ in their heads: each layer's rows, and pages that forks share."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from offload.kv.store import KVStore

HEADS = [(2, 32), (4, 16), (1, 64), (3, 8)]
PAGE_TOKENS = 16
LEN = 40  # two pages and a half


def make_store(**options: object) -> KVStore:
    heads, dims = zip(*HEADS, strict=True)
    sizes = {"num_layers": len(HEADS), "num_kv_heads": heads, "head_dim": dims}
    settings = {"dtype": torch.bfloat16, "host_budget_bytes": 2**20, "page_tokens": PAGE_TOKENS}
    return KVStore(**{**sizes, **settings, **options})  # type: ignore[arg-type]


def random_rows(layer_idx: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(2, num_tokens, *HEADS[layer_idx]).bfloat16()


def fill(store: KVStore, seq: int, num_tokens: int) -> list[torch.Tensor]:
    """New random rows [K|V, num_tokens, num_kv_heads, head_dim] of each layer, written to `seq`."""
    rows = [random_rows(layer_idx, num_tokens) for layer_idx in range(len(HEADS))]
    store.reserve([seq], [num_tokens])
    for layer_idx, (keys, values) in enumerate(rows):
        store.append(seq, layer_idx, keys, values)
    store.commit([seq], [num_tokens])
    return rows


def check(store: KVStore, seq: int, rows: list[torch.Tensor]) -> None:
    """`gather`, and what the page table's addresses lead to."""
    for layer_idx, (heads, dim) in enumerate(HEADS):
        found = torch.stack(store.gather(seq, layer_idx)).transpose(1, 2)
        assert torch.equal(found, rows[layer_idx])
        num_bytes = 2 * heads * PAGE_TOKENS * dim * 2
        for page in range(store.kv_len(seq) // PAGE_TOKENS):
            address = int(store.page_table(seq)[layer_idx, page])
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
            of_page = torch.from_numpy(raw).view(torch.bfloat16).view(2, heads, PAGE_TOKENS, dim)
            tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            assert torch.equal(of_page.transpose(1, 2), rows[layer_idx][:, tokens])


def test_rows_come_back_and_forks_share_pages() -> None:
    store = make_store()
    seq = store.new_sequence()
    rows = fill(store, seq, LEN)
    check(store, seq, rows)
    of_token = 2 * sum(heads * dim for heads, dim in HEADS) * 2
    assert store.token_bytes == of_token
    assert store.host_bytes_used == 3 * PAGE_TOKENS * of_token
    child = store.fork(seq)
    added = fill(store, child, 20)  # its tail is copied
    assert store.host_bytes_used == (3 + 2) * PAGE_TOKENS * of_token
    check(store, seq, rows)
    both = [torch.cat(pair, dim=1) for pair in zip(rows, added, strict=True)]
    check(store, child, both)
    store.truncate(child, LEN - 10)
    more = fill(store, child, 5)
    check(store, seq, rows)
    kept = [x[:, : LEN - 10] for x in rows]
    check(store, child, [torch.cat(pair, dim=1) for pair in zip(kept, more, strict=True)])
    store.free(seq)
    store.free(child)
    assert store.host_bytes_used == 0


def test_exchange_and_unshare() -> None:
    store = make_store()
    seq = store.new_sequence()
    rows = fill(store, seq, LEN)
    copy = store.fork(seq)
    store.unshare(seq, LEN)
    store.truncate(copy, 20)
    new = fill(store, copy, 16)
    store.exchange(seq, copy, 20, 36)
    check(
        store,
        seq,
        [torch.cat([x[:, :20], y, x[:, 36:]], dim=1) for x, y in zip(rows, new, strict=True)],
    )


def test_what_has_one_number_of_heads_refuses() -> None:
    store = make_store()
    for name in ("num_kv_heads", "head_dim"):
        with pytest.raises(NotImplementedError, match=r"layer 1 has .*\(4, 16\), layer 0 has"):
            getattr(store, name)
    with pytest.raises(NotImplementedError, match="pages of each KV head"):
        make_store(per_head_pages=True)
    with pytest.raises(ValueError, match="expected 4 head_dim, got 2"):
        make_store(head_dim=(32, 32))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8, got 20"):
        make_store(head_dim=(32, 20, 32, 32))
    seq = store.new_sequence()
    store.reserve([seq], [3])
    with pytest.raises(ValueError, match=r"keys must be .* = \[3, 4, 16\], got \[3, 2, 32\]"):
        store.append(seq, 1, *random_rows(0, 3))
