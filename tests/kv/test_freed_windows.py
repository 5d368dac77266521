"""Layers with windows have no pages before them, and all that may be read is as without windows."""

import numpy as np
import pytest
import torch
from cases.kv_store_cases import LAYERS, PAGE_TOKENS, make_store, random_rows

from offload.kv import page_pool, sequence_pages
from offload.kv.store import KVStore

WINDOWS, SLACK = (9, 0, 5), 3


@pytest.fixture(autouse=True)
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (page_pool, sequence_pages):
        monkeypatch.setattr(module, "WINDOW_SLACK", SLACK)


def add(stores: tuple[KVStore, KVStore], seq: int, n: int, *, at_once: bool) -> None:
    """The same tokens to both, in one pass."""
    rows = [(random_rows(n, stores[0]), random_rows(n, stores[0])) for _ in range(LAYERS)]
    for store in stores:
        store.reserve([seq], [n], at_once=at_once)
    check_readable(stores, seq)  # by the queries that come
    for store in stores:
        for layer_idx, of_layer in enumerate(rows):
            store.append(seq, layer_idx, *of_layer)
    for store in stores:
        store.commit([seq], [n])
    check_readable(stores, seq)  # by what is decoded in the same pass
    for store in stores:
        store.free_behind([seq])


def check_readable(stores: tuple[KVStore, KVStore], seq: int) -> None:
    lean, full = stores
    kv_len = lean.kv_len(seq)
    assert kv_len == full.kv_len(seq)
    for layer_idx, window in enumerate(WINDOWS):
        first = max(0, kv_len - window + 1) if window else 0
        found, expected = (store.gather(seq, layer_idx, first) for store in stores)
        assert all(map(torch.equal, found, expected))
        assert (lean.page_table(seq)[layer_idx, first // 4 : -(-kv_len // 4)] != 0).all()


def test_at_random() -> None:
    rng = np.random.default_rng(int(torch.randint(2**31, ()).item()))
    stores = make_store(windows=WINDOWS), make_store()
    lean, _ = stores
    seqs: list[int] = []
    longest: dict[int, int] = {}
    for _ in range(200):
        kind = rng.integers(5) if seqs else 0
        seq = int(rng.choice(seqs)) if seqs else -1
        if kind == 0 and len(seqs) < 6:
            seqs.append({store.new_sequence() for store in stores}.pop())
        elif kind == 1 and len(seqs) < 6:
            seqs.append({store.fork(seq) for store in stores}.pop())
            longest[seqs[-1]] = longest.get(seq, 0)
        elif kind == 2 and rng.integers(4) == 0:
            seqs.remove(seq)
            for store in stores:
                store.free(seq)
        elif kind == 3:
            kv_len = lean.kv_len(seq)
            cut = max(0, kv_len - int(rng.integers(2 * SLACK + 4)))
            if 0 < cut < lean.least_kv_len(seq):
                assert longest[seq] - cut > SLACK
                with pytest.raises(ValueError, match=f"window of 9 tokens.*read the first {cut}"):
                    lean.truncate(seq, cut)
                continue
            for store in stores:
                store.truncate(seq, cut)
            longest[seq] = longest.get(seq, 0) if cut else 0
        elif lean.kv_len(seq) < 150:
            n = int(rng.choice([1, 2, 40]))
            add(stores, seq, n, at_once=n > 2 or bool(rng.integers(2)))
            longest[seq] = max(longest.get(seq, 0), lean.kv_len(seq))
        pages = [lean._sequences[seq].page_ids for seq in seqs]
        owned = np.concatenate([ids[ids >= 0] for ids in pages]) if pages else np.empty(0)
        assert lean.host_bytes_used == len(np.unique(owned)) * lean.page_bytes
        for seq in seqs:
            check_readable(stores, seq)
            num_pages = -(-lean.kv_len(seq) // PAGE_TOKENS)
            assert (lean._sequences[seq].page_ids[1, :num_pages] >= 0).all()
            assert lean.num_unshared_pages(seq) <= lean.num_present_pages(seq)
            assert lean.num_present_pages(seq) <= lean.pages_at(lean.kv_len(seq))
    for seq in seqs:
        for store in stores:
            store.free(seq)
    assert all(store.host_bytes_used == 0 for store in stores)


def test_room_that_a_prompt_takes() -> None:
    """Layers with windows have only what they keep, also while it is written."""
    store = make_store(windows=WINDOWS)
    seq = store.new_sequence()
    store.reserve([seq], [200], at_once=True)
    assert store.host_bytes_used <= store.pages_at(200) * store.page_bytes < 66 * store.page_bytes
    with pytest.raises(ValueError, match=f"sequence {seq} has tokens that are written at once"):
        store.reserve([seq], [201])
    store.truncate(seq, 0)
    assert store.host_bytes_used == 0
    store.reserve([seq], [200])
    assert store.host_bytes_used == 150 * store.page_bytes


def test_what_is_refused() -> None:
    store, full = stores = make_store(windows=WINDOWS), make_store()
    seq = store.new_sequence()
    assert full.new_sequence() == seq
    add(stores, seq, 60, at_once=True)
    assert store.starts(seq)[:, 0].tolist() == [48, 0, 52]
    for refused in (
        lambda: store.page_views(seq, 0),
        lambda: store.append(seq, 0, *[random_rows(1, store)] * 2, start=40),
        lambda: store.exchange(seq, store.fork(seq), 50, 56),
        lambda: store.check_starts([53, 0, 52], 60),
        lambda: store.check_starts([48, 4, 52], 60),
    ):
        with pytest.raises(ValueError, match=r"lack|not for layers with windows"):
            refused()
    with pytest.raises(NotImplementedError, match="windows of 9 tokens"):
        make_store(windows=WINDOWS, per_head_pages=True)
