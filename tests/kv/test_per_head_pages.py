"""A KV store whose heads are apart: other numbers of tokens in each, against a plain model."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases.kv_store_cases import HEAD_DIM, HEADS, LAYERS, PAGE_TOKENS, make_store, random_rows
from cases.slowly import combinations, slow_but

from offload.kv.store import HostBudgetError, KVStore

SHAPE = (LAYERS, HEADS)
LENS = np.array([[2, 1], [1, 3], [3, 3]]) * PAGE_TOKENS  # of 3 layers of 2 heads
Contents = list[list[torch.Tensor]]  # of layers, of heads: [K|V, tokens that it has, head_dim]


def apart(**options) -> KVStore:
    return make_store(per_head_pages=True, **options)


def empty_contents(dtype: torch.dtype = torch.float32) -> Contents:
    return [[torch.empty(2, 0, HEAD_DIM, dtype=dtype) for _ in range(HEADS)] for _ in range(LAYERS)]


def write(store: KVStore, seq: int, num_tokens: int, contents: Contents) -> Contents:
    """Append random tokens to all heads; what they have then."""
    store.reserve([seq], [num_tokens])
    written = []
    for layer_idx, heads in enumerate(contents):
        rows = torch.stack([random_rows(num_tokens, store) for _ in range(2)])
        cut = num_tokens // 3
        store.append(seq, layer_idx, rows[0, :cut], rows[1, :cut])
        start = store.kv_len(seq) + cut
        store.append(seq, layer_idx, rows[0, cut:], rows[1, cut:], start)
        written.append([torch.cat([old, rows[:, :, h]], dim=1) for h, old in enumerate(heads)])
    store.commit([seq], [num_tokens])
    return written


def random_contents(lens: np.ndarray, dtype: torch.dtype = torch.float32) -> Contents:
    return [[torch.randn(2, n, HEAD_DIM).to(dtype) for n in of_layer] for of_layer in lens.tolist()]


def rows_of(contents: Contents) -> Callable[[int], list[tuple[torch.Tensor, torch.Tensor]]]:
    return lambda layer_idx: [(x[0], x[1]) for x in contents[layer_idx]]


def check(store: KVStore, seq: int, contents: Contents) -> None:
    """What is gathered, and what is where the page table says."""
    kv_len, starts, table = store.kv_len(seq), store.starts(seq), store.page_table(seq)
    assert len(table) == LAYERS * HEADS
    assert all(array.flags.c_contiguous for array in (table, starts))
    for layer_idx, heads in enumerate(contents):
        gathered = torch.stack(store.gather(seq, layer_idx))
        for head, rows in enumerate(heads):
            start = kv_len - rows.shape[1]
            assert starts[layer_idx, head] == start
            assert torch.equal(gathered[:, head, start:], rows)
            assert not gathered[:, head, :start].any()
            addresses = table[layer_idx * HEADS + head]
            first, stop = start // PAGE_TOKENS, -(-kv_len // PAGE_TOKENS)
            assert np.flatnonzero(addresses).tolist() == list(range(first, stop))
            for page in range(first, stop):
                read = at_address(store, int(addresses[page]))
                tokens = min(PAGE_TOKENS, kv_len - page * PAGE_TOKENS)
                position = page * PAGE_TOKENS - start
                assert torch.equal(read[:, 0, :tokens], rows[:, position : position + tokens])


def at_address(store: KVStore, address: int) -> torch.Tensor:
    """A copy of [K|V, 1, page_tokens, head_dim]."""
    raw = bytearray(ctypes.string_at(address, store.page_bytes))
    return torch.frombuffer(raw, dtype=store.dtype).view(2, 1, PAGE_TOKENS, HEAD_DIM)


def check_pages(store: KVStore) -> None:
    """Each page counts its owners, and what has none is free."""
    pool, owned = store._pool, [np.empty(0, np.int64)]
    for seq, sequence in store._sequences.items():
        ids, table = sequence.page_ids, store.page_table(seq)
        np.testing.assert_array_equal(ids >= 0, table != 0)
        np.testing.assert_array_equal(table[ids >= 0], pool.addresses[ids[ids >= 0]])
        owned.append(ids[ids >= 0])
    counts = np.bincount(np.concatenate(owned), minlength=len(pool.addresses))
    np.testing.assert_array_equal(pool.refcounts, counts)
    free_ids = np.sort(pool._free_ids[: pool._num_free])
    np.testing.assert_array_equal(free_ids, np.flatnonzero(counts == 0))
    assert store.host_bytes_used == (counts > 0).sum() * store.page_bytes


def rewritten(store: KVStore, lens: np.ndarray = LENS) -> tuple[int, Contents]:
    """A sequence whose heads have `lens` tokens."""
    seq = store.new_sequence()
    write(store, seq, 17, empty_contents(store.dtype))
    contents = random_contents(lens, store.dtype)
    store.rewrite(seq, lens, rows_of(contents))
    return seq, contents


def snapshot(store: KVStore, seq: int) -> tuple[int, list[torch.Tensor], np.ndarray]:
    """The committed tokens, and where they are."""
    gathered = [torch.stack(store.gather(seq, layer_idx)) for layer_idx in range(LAYERS)]
    num_pages = -(-store.kv_len(seq) // PAGE_TOKENS)
    return store.kv_len(seq), gathered, store.page_table(seq)[:, :num_pages].copy()


def assert_as(store: KVStore, seq: int, before: tuple[int, list[torch.Tensor], np.ndarray]) -> None:
    kv_len, gathered, table = snapshot(store, seq)
    assert kv_len == before[0]
    assert all(map(torch.equal, gathered, before[1]))
    np.testing.assert_array_equal(table, before[2])


def test_bytes_and_rows() -> None:
    together, store = make_store(), apart()
    assert (together.per_head_pages, store.per_head_pages) == (False, True)
    assert store.page_bytes * HEADS == together.page_bytes
    assert store.token_bytes == together.token_bytes == LAYERS * HEADS * 2 * HEAD_DIM * 4
    assert (together.num_page_rows, store.num_page_rows) == (LAYERS, LAYERS * HEADS)
    seq = together.new_sequence()
    assert together.starts(seq).tolist() == [[0] * HEADS] * LAYERS


def test_rewrite_and_go_on() -> None:
    store = apart()
    seq = store.new_sequence()
    starts = store.starts(seq)
    contents = write(store, seq, 18, empty_contents())
    store.reserve([seq], [30])

    def rows(layer_idx: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The last tokens of each head, as it has them before."""
        keys, values = store.gather(seq, layer_idx)
        lens = LENS[layer_idx].tolist()
        return [(keys[h, -n:].clone(), values[h, -n:].clone()) for h, n in enumerate(lens)]

    store.rewrite(seq, LENS, rows)
    assert store.starts(seq) is starts
    assert (starts == LENS.max() - LENS).all()
    assert store.kv_len(seq) == LENS.max() == 12
    contents = [
        [x[:, -n:] for x, n in zip(heads, lens, strict=True)]
        for heads, lens in zip(contents, LENS.tolist(), strict=True)
    ]
    check(store, seq, contents)
    check_pages(store)
    assert store.host_bytes_used == LENS.sum() // PAGE_TOKENS * store.page_bytes
    assert store.num_unshared_pages(seq) == LENS.sum() // PAGE_TOKENS
    with pytest.raises(ValueError, match="not reserved"):
        store.append(seq, 0, random_rows(1, store), random_rows(1, store))
    contents = write(store, seq, 6, contents)
    check(store, seq, contents)
    longer = LENS + 5 * PAGE_TOKENS  # beyond the room of the page table
    contents = random_contents(longer)
    store.rewrite(seq, longer, rows_of(contents))
    check(store, seq, contents)
    store.free(seq)
    assert store.host_bytes_used == 0


def test_a_range_of_slots_that_some_heads_lack() -> None:
    store = apart()
    seq, contents = rewritten(store)
    for start, stop in [(0, 12), (3, 9), (0, 4), (5, 6), (4, 4), (9, 12)]:
        keys, values = store.gather(seq, 0, start, stop)
        for head, rows in enumerate(contents[0]):
            whole = torch.zeros(2, 12, HEAD_DIM)
            whole[:, 12 - rows.shape[1] :] = rows
            assert torch.equal(torch.stack([keys[head], values[head]]), whole[:, start:stop])
    out = torch.full((2, 12, HEADS, HEAD_DIM), torch.nan).transpose(1, 2)
    store.gather(seq, 1, out=(out[0], out[1]))
    assert torch.equal(out, torch.stack(store.gather(seq, 1)))


def test_append_async_writes_what_append_does() -> None:
    store = apart()
    seq, contents = rewritten(store)
    store.reserve([seq], [7])
    rows = torch.randn(LAYERS, 2, 7, HEADS, HEAD_DIM)
    for layer_idx, (keys, values) in enumerate(rows):
        store.append_async(seq, layer_idx, keys, values)
    store.commit([seq], [7])
    for layer_idx, heads in enumerate(contents):
        of_layer = rows[layer_idx]
        heads[:] = [torch.cat([x, of_layer[:, :, h]], 1) for h, x in enumerate(heads)]
    check(store, seq, contents)


def test_forks_share_pages_and_copy_what_they_write_to() -> None:
    store = apart()
    parent, contents = rewritten(store)
    contents = write(store, parent, 2, contents)
    used = store.host_bytes_used
    child = store.fork(parent)
    assert store.host_bytes_used == used
    assert store.starts(child) is not store.starts(parent)
    assert store.num_unshared_pages(child) == 0
    # 4 in each row, of which the last would be copied
    assert store.num_own_pages(child) == 3 * LAYERS * HEADS
    check(store, child, contents)
    rows = random_rows(1, store)
    with pytest.raises(ValueError, match="not reserved"):
        store.append(child, 0, rows, rows)
    of_child = write(store, child, 1, contents)
    assert store.host_bytes_used == used + LAYERS * HEADS * store.page_bytes
    of_parent = write(store, parent, 3, contents)
    assert store.num_unshared_pages(child) == LAYERS * HEADS
    check(store, parent, of_parent)
    check(store, child, of_child)
    check_pages(store)
    store.free(parent)
    check(store, child, of_child)
    store.free(child)
    assert store.host_bytes_used == 0


def test_unshare_copies_pages_that_heads_have() -> None:
    store = apart()
    parent, contents = rewritten(store)
    child = store.fork(parent)
    used = store.host_bytes_used
    store.unshare(child, 2 * PAGE_TOKENS)
    copied = (LENS - PAGE_TOKENS).sum() // PAGE_TOKENS  # all but the last page of each
    assert store.host_bytes_used == used + copied * store.page_bytes
    assert store.num_unshared_pages(child) == copied
    check(store, child, contents)
    check_pages(store)
    with pytest.raises(ValueError, match="a head of layer 0 lacks the first 8"):
        store.append(child, 0, random_rows(1, store), random_rows(1, store), start=7)
    store.unshare(child, 12)
    rows = [random_rows(3, store) for _ in range(2)]
    store.append(child, 0, *rows, start=9)
    check(store, parent, contents)
    for head, x in enumerate(contents[0]):
        contents[0][head] = torch.cat([x[:, :-3], torch.stack([r[:, head] for r in rows])], 1)
    check(store, child, contents)


def test_truncate() -> None:
    store = apart()
    seq, contents = rewritten(store)
    write(store, seq, 6, contents)
    store.truncate(seq, 13)
    first = int(store.starts(seq).max())
    with pytest.raises(ValueError, match=rf"to {first - 1} tokens: a head lacks the first {first}"):
        store.truncate(seq, first - 1)
    with pytest.raises(ValueError, match="cannot truncate"):
        store.truncate(seq, 14)
    starts = store.starts(seq)
    store.truncate(seq, 0)
    assert store.starts(seq) is starts
    assert not starts.any()
    assert store.host_bytes_used == 0


def test_rewrite_within_a_full_budget() -> None:
    """Layers that give pages come first: it takes no more than at the end."""
    column = LAYERS * HEADS * apart().page_bytes
    lens = np.array([[3, 2], [1, 1], [1, 1]]) * PAGE_TOKENS
    store = apart(host_budget_bytes=4096 * -(-3 * column // 4096), slab_bytes=column)
    seq = store.new_sequence()
    num_pages = store.host_budget_bytes // column
    write(store, seq, num_pages * PAGE_TOKENS, empty_contents())
    fork = store.fork(seq)
    before = snapshot(store, seq)
    asked = []
    with pytest.raises(HostBudgetError, match="host KV cache needs"):
        store.rewrite(seq, lens, lambda layer_idx: asked.append(layer_idx) or [])
    assert not asked
    assert_as(store, seq, before)
    check_pages(store)
    store.free(fork)
    lens[0] += (num_pages - 3) * PAGE_TOKENS
    lens[0, 0] += 2 * PAGE_TOKENS
    reserved = store.host_bytes_reserved
    contents = random_contents(lens)
    store.rewrite(seq, lens, rows_of(contents))
    assert store.host_bytes_reserved == reserved
    check(store, seq, contents)
    check_pages(store)


@pytest.mark.parametrize(
    ("position", "what"), combinations([0, 1], ["nan", "short", "dtype", "heads", "raises"])
)
def test_rewrite_that_fails(position: int, what: str) -> None:
    """Before the first layer was replaced all is as it was, later the sequence is empty."""
    store = apart()
    seq, contents = rewritten(store)
    contents = write(store, seq, 3, contents)
    fork = store.fork(seq)
    store.reserve([seq], [9])
    before = snapshot(store, seq)
    good, calls = rows_of(random_contents(LENS)), []

    def rows(layer_idx: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        calls.append(layer_idx)
        of_layer = good(layer_idx)
        if len(calls) != position + 1:
            return of_layer
        keys, values = of_layer[1]
        if what == "raises":
            raise KeyboardInterrupt
        if what == "nan":
            values[2, 3] = torch.nan
        wrong = {"short": keys[1:], "dtype": keys.half()}.get(what, keys)
        return [of_layer[0], (wrong, values)] if what != "heads" else of_layer[:1]

    error = KeyboardInterrupt if what == "raises" else ValueError
    with pytest.raises(error, match={"nan": "non-finite values of head 1 in"}.get(what)):
        store.rewrite(seq, LENS, rows)
    assert len(calls) == position + 1
    if position == 0:
        assert_as(store, seq, before)
        check(store, seq, contents)
    else:
        assert store.kv_len(seq) == 0
        check(store, seq, empty_contents())
        check(store, seq, write(store, seq, 6, empty_contents()))
    check_pages(store)
    check(store, fork, write(store, fork, 2, contents))
    store.free(seq)
    store.free(fork)
    assert store.host_bytes_used == 0


@pytest.mark.parametrize(
    "lens", [LENS + 1, LENS - PAGE_TOKENS, -LENS, LENS[:2], LENS * 1.0, LENS.ravel()]
)
def test_wrong_lens(lens: np.ndarray) -> None:
    store = apart()
    seq, contents = rewritten(store)
    with pytest.raises(ValueError, match="lens must be"):
        store.rewrite(seq, lens, rows_of(contents))
    check(store, seq, contents)


def test_what_is_refused() -> None:
    store, together = apart(), make_store()
    seq, _ = rewritten(store)
    with pytest.raises(ValueError, match="heads are apart"):
        store.page_views(seq, 0)
    with pytest.raises(ValueError, match="per_head_pages=True"):
        together.rewrite(together.new_sequence(), LENS, lambda layer_idx: [])
    store.free(seq)
    for gone in (store.starts, lambda seq: store.rewrite(seq, LENS, lambda layer_idx: [])):
        with pytest.raises(ValueError, match="unknown sequence handle"):
            gone(seq)


@pytest.mark.parametrize("seed", slow_but(range(12), 0, 1))
def test_random_operations(seed: int) -> None:
    """Steps, forks, cuts, rewrites and ends of several sequences, budgets included."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    store = apart(dtype=dtype, host_budget_bytes=dtype.itemsize * 5 << 10, slab_bytes=1 << 12)
    model: dict[int, Contents] = {}
    num_refused = 0
    for _ in range(120):
        seq = int(rng.choice(list(model))) if model else -1
        kind = rng.choice(["new", "step", "step", "fork", "truncate", "rewrite", "unshare", "free"])
        try:
            if kind == "new" or seq < 0:
                model[store.new_sequence()] = empty_contents(dtype)
            elif kind == "step":
                model[seq] = write(store, seq, int(rng.integers(0, 12)), model[seq])
            elif kind == "fork" and len(model) < 6:
                model[store.fork(seq)] = copy.copy(model[seq])
            elif kind == "truncate":
                kv_len, first = store.kv_len(seq), int(store.starts(seq).max())
                cut = kv_len - int(rng.integers(first, kv_len + 1))
                store.truncate(seq, kv_len - cut)
                if cut == kv_len:
                    model[seq] = empty_contents(dtype)
                model[seq] = [[x[:, : x.shape[1] - cut] for x in heads] for heads in model[seq]]
            elif kind == "rewrite":
                lens = rng.integers(1, 5, SHAPE) * PAGE_TOKENS
                contents = random_contents(lens, dtype)
                store.rewrite(seq, lens, rows_of(contents))
                model[seq] = contents
            elif kind == "unshare":
                store.unshare(seq, int(rng.integers(0, store.kv_len(seq) + 1)))
            elif kind == "free":
                store.free(seq)
                del model[seq]
        except HostBudgetError:
            num_refused += 1
        check_pages(store)
        for other, contents in model.items():
            check(store, other, contents)
    for seq in model:
        store.free(seq)
    assert store.host_bytes_used == 0
    assert num_refused
