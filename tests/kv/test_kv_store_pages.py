"""The KV store case by case: pages shared by forks, budgets and who has how much of them."""

from __future__ import annotations

import gc
import mmap
import signal
import threading

import numpy as np
import psutil
import pytest
import torch
from cases.kv_store_cases import (
    LAYERS,
    PAGE_TOKENS,
    assert_same,
    bytes_per_column,
    joined,
    make_store,
    random_rows,
    read_tokens,
    write_tokens,
)

import offload.kv.page_pool
import offload.kv.store
import offload.system.huge_pages
from offload.kv.ledger import MemoryLedger
from offload.kv.page_pool import PagePool
from offload.kv.store import HostBudgetError, KVStore
from offload.system.memory import HostMemory


class TestSharing:
    def test_fork_does_not_take_reserved_pages_and_ends_the_reservation(self):
        store = make_store()
        parent = store.new_sequence()
        write_tokens(store, parent, 3)
        store.reserve([parent], [9])
        child = store.fork(parent)
        assert (store.page_table(child) != 0).sum() == LAYERS
        rows = random_rows(1, store)
        with pytest.raises(ValueError, match="not reserved"):
            store.append(parent, 0, rows, rows)

    def test_unshare_copies_what_a_fork_has_of_the_first_tokens(self):
        store = make_store()
        parent = store.new_sequence()
        written = write_tokens(store, parent, 3 * store.page_tokens)
        child = store.fork(parent)
        used = store.host_bytes_used
        store.unshare(child, store.page_tokens + 1)
        assert store.host_bytes_used == used + 2 * store.num_layers * store.page_bytes
        assert store.num_unshared_pages(child) == store.num_unshared_pages(parent) == 2 * LAYERS
        assert_same(read_tokens(store, child), written)
        rows = random_rows(store.page_tokens + 1, store)
        store.append(child, 0, rows, rows, start=0)
        assert_same(read_tokens(store, parent), written)
        store.unshare(child, store.page_tokens + 1)
        assert store.host_bytes_used == used + 2 * store.num_layers * store.page_bytes

    def test_rewriting_a_shared_page_in_place_is_refused(self):
        store = make_store()
        parent = store.new_sequence()
        written = write_tokens(store, parent, 10)
        child = store.fork(parent)
        rows = random_rows(1, store)
        with pytest.raises(ValueError, match=r"positions 1..2 .* shared with a fork; truncate"):
            store.append(child, 0, rows, rows, start=1)
        assert_same(read_tokens(store, parent), written)
        store.free(parent)
        store.append(child, 0, rows, rows, start=1)


class TestBudget:
    def test_reserve_is_all_or_nothing(self):
        column = bytes_per_column(make_store())
        store = make_store(host_budget_bytes=8 * column)
        first, second = store.new_sequence(), store.new_sequence()
        written = write_tokens(store, first, 6)
        fork = store.fork(first)
        table = store.page_table(first).copy()
        with pytest.raises(HostBudgetError):
            store.reserve([first, fork, second], [1, 1, 6 * PAGE_TOKENS])
        assert store.host_bytes_used == 2 * column
        assert (store.page_table(first) == table).all()
        assert (store.page_table(fork) == table).all()
        assert store.page_table(second).shape == (LAYERS, 0)
        rows = random_rows(1, store)
        with pytest.raises(ValueError, match="not reserved"):
            store.append(first, 0, rows, rows)
        store.reserve([first, fork, second], [1, 1, 5 * PAGE_TOKENS])
        assert store.host_bytes_used == store.host_bytes_reserved == 8 * column
        assert_same(read_tokens(store, first), written)

    def test_message(self):
        store = make_store(
            num_layers=2, num_kv_heads=8, head_dim=128, page_tokens=64, host_budget_bytes=3 << 20
        )
        assert store.page_bytes == 1 << 19
        seq = store.new_sequence()
        store.reserve([seq], [64])
        message = (
            r"needs 4.00 MiB more \(8 pages of 524288 bytes\) and uses 1.00 MiB of its budget of "
            r"3.00 MiB; raise max_memory=\{'cpu': ...\} or shorten the context"
        )
        with pytest.raises(HostBudgetError, match=message) as error:
            store.reserve([seq], [5 * 64])
        assert isinstance(error.value, MemoryError)

    def test_the_last_slab_may_be_smaller(self):
        store = make_store(host_budget_bytes=(3 << 16) + 5000)
        seq = store.new_sequence()
        reserved = set()
        sizes = [1 << 16, 2 << 16, 3 << 16, (3 << 16) + mmap.PAGESIZE]
        for _ in range(sizes[-1] // bytes_per_column(store)):
            write_tokens(store, seq, PAGE_TOKENS)
            reserved.add(store.host_bytes_reserved)
        assert sorted(reserved) == sizes
        with pytest.raises(HostBudgetError):
            store.reserve([seq], [1])

    def test_budgets_smaller_than_a_slab(self):
        store = make_store(slab_bytes=1 << 40, host_budget_bytes=mmap.PAGESIZE)
        seq = store.new_sequence()
        write_tokens(store, seq, 1)
        assert store.host_bytes_reserved == mmap.PAGESIZE

    def test_budget_of_nothing(self):
        store = make_store(host_budget_bytes=0)
        seq = store.new_sequence()
        store.reserve([seq], [0])
        with pytest.raises(HostBudgetError, match="uses 0 B of its budget of 0 B"):
            store.reserve([seq], [1])

    def test_a_request_of_many_slabs_maps_one(self, monkeypatch):
        sizes = []
        map_slab = offload.system.huge_pages.map_slab
        monkeypatch.setattr(
            offload.kv.page_pool, "map_slab", lambda size: sizes.append(size) or map_slab(size)
        )
        store = make_store()
        seq = store.new_sequence()
        write_tokens(store, seq, 200 * PAGE_TOKENS)
        assert sizes == [5 << 16]
        assert len(np.unique(np.diff(store.page_table(seq)[1]))) == 1  # one run of pages per layer

    def test_memory_that_went_away_after_the_store_was_made(self, monkeypatch):
        store = make_store()
        seq = store.new_sequence()
        monkeypatch.setattr(offload.kv.page_pool, "host_memory_limit_bytes", lambda: 5000)
        with pytest.raises(HostBudgetError, match=r"budget of 1.00 MiB, but only 4.00 KiB of host"):
            store.reserve([seq], [40])
        assert store.host_bytes_reserved == 0
        store.reserve([seq], [4])
        assert store.host_bytes_reserved == mmap.PAGESIZE

    def test_mappings_that_the_system_refuses(self, monkeypatch):
        def refuse(size):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(offload.kv.page_pool, "map_slab", refuse)
        store = make_store()
        with pytest.raises(
            HostBudgetError, match=r"system refused to map 64.00 KiB; raise max_mem"
        ):
            store.reserve([store.new_sequence()], [1])
        assert store.host_bytes_used == store.host_bytes_reserved == 0

    def test_the_default_budget_is_what_the_process_may_use(self, monkeypatch):
        monkeypatch.setattr(offload.kv.store, "host_memory", lambda: HostMemory(16, True, 16, 0))
        assert make_store(host_budget_bytes=None).host_budget_bytes == 16 - 1 - 4

    def test_reserved_bytes_are_resident_and_go_back(self):
        process = psutil.Process()
        store = make_store(
            num_kv_heads=8,
            head_dim=64,
            page_tokens=64,
            slab_bytes=1 << 26,
            host_budget_bytes=1 << 28,
        )
        gc.collect()
        before = process.memory_info().rss
        seq = store.new_sequence()
        store.reserve([seq], [64 * 150])
        resident = process.memory_info().rss - before
        assert store.host_bytes_reserved == 2 << 26
        assert resident == pytest.approx(store.host_bytes_reserved, rel=0.06)
        store.close()
        assert process.memory_info().rss - before < 0.06 * resident

    @pytest.mark.parametrize("pages", [1, 16, 17, 40])
    def test_slabs_that_a_sequence_fills(self, pages):
        store = make_store(num_layers=2, slab_bytes=1 << 16)
        of_slab = (1 << 16) // store.page_bytes
        store.fit_slabs(pages * store.page_tokens)
        seq = store.new_sequence()
        for page in range(pages):
            store.reserve([seq], [1])
            store.commit([seq], [1])
            store.reserve([seq], [store.page_tokens - 1])
            store.commit([seq], [store.page_tokens - 1])
            assert store.host_bytes_used == 2 * (page + 1) * store.page_bytes
        slabs = -(-2 * pages // of_slab)
        most = 2 * pages * store.page_bytes + slabs * (mmap.PAGESIZE - 1)
        assert 2 * pages * store.page_bytes <= store.host_bytes_reserved <= most

    @pytest.mark.parametrize("pages", [7, 80, 180])
    @pytest.mark.parametrize("step", [1, 5])
    def test_large_pages_fill_the_slabs_of_sequences(self, pages, step):
        """12 and 4/5 of them in a slab: of what sequences are full with, none is without use."""
        options = {"page_tokens": 64, "head_dim": 128, "host_budget_bytes": 1 << 28}
        store = make_store(num_layers=2, **options)
        store = make_store(num_layers=2, slab_bytes=store.page_bytes * 64 // 5, **options)
        assert store.page_bytes % mmap.PAGESIZE == 0
        store.fit_slabs(pages * store.page_tokens)
        seqs = [store.new_sequence() for _ in range(3)]
        for num_full, seq in enumerate(seqs):
            for first in range(0, pages, step):
                num_new = store.page_tokens * min(step, pages - first)
                store.reserve([seq], [num_new])
                store.commit([seq], [num_new])
                full_bytes = 2 * pages * store.page_bytes
                assert store.host_bytes_reserved <= (num_full + 1) * full_bytes
            assert store.host_bytes_reserved == (num_full + 1) * full_bytes
        store.free(seqs[1])
        store.trim()
        again = store.new_sequence()
        store.reserve([again], [pages * store.page_tokens])
        assert store.host_bytes_reserved == 3 * full_bytes

    def test_ids_of_slabs_that_went_are_used_again(self):
        store = make_store(slab_bytes=8 * bytes_per_column(make_store()))
        lasting = store.new_sequence()
        written = write_tokens(store, lasting, 9 * PAGE_TOKENS)  # the first slab is large
        for cycle in range(1000):
            seq = store.new_sequence()
            write_tokens(store, seq, (5 + 10 * (cycle % 3)) * PAGE_TOKENS)
            store.free(seq)
            store.trim()
        assert store.host_bytes_reserved == 2 * 8 * bytes_per_column(store)
        assert_same(read_tokens(store, lasting), written)
        pool, most_ids = store._pool, LAYERS * 8 * (2 + 4)
        arrays = pool.addresses, pool.refcounts, pool._slab_of_page, pool._free_ids
        assert [len(array) <= most_ids for array in arrays] == [True] * 4
        assert len(pool._slabs) == 1

    def test_memory_goes_back_when_the_store_is_collected(self):
        process = psutil.Process()
        store = make_store(slab_bytes=1 << 26, host_budget_bytes=1 << 26)
        store.reserve([store.new_sequence()], [1])
        held = process.memory_info().rss
        del store
        gc.collect()
        # Most of the slab: the test process's own heap moves by some MiB between the two readings.
        assert held - process.memory_info().rss > 48 << 20


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("kv_len", [9, 10, 12, 15])
@pytest.mark.parametrize(("first", "last"), [(4, 8), (4, 9), (3, 8), (5, 9), (5, 7), (1, 9)])
def test_exchange(first: int, last: int, kv_len: int, is_committed: bool) -> None:
    """Wherever pages end; a fork keeps what it has, and all pages are free at the end."""
    store = make_store()
    seq = store.new_sequence()
    old = write_tokens(store, seq, kv_len)
    fork, copy = store.fork(seq), store.fork(seq)
    store.truncate(copy, first)
    store.reserve([copy], [last - first])
    new = [torch.stack([random_rows(last - first, store) for _ in range(2)]) for _ in old]
    for layer_idx, (keys, values) in enumerate(new):
        store.append(copy, layer_idx, keys, values)
    if is_committed:
        store.commit([copy], [last - first])
    store.exchange(seq, copy, first, last)
    expected = [
        torch.cat([x[:, :first], y, x[:, last:]], dim=1) for x, y in zip(old, new, strict=True)
    ]
    store.free(copy)
    assert_same(read_tokens(store, seq), expected)
    assert_same(read_tokens(store, fork), old)
    more = write_tokens(store, seq, 6)
    assert_same(read_tokens(store, seq), joined(expected, more))
    assert_same(read_tokens(store, fork), old)
    store.free(seq)
    store.free(fork)
    assert store.host_bytes_used == 0


def test_exchange_of_what_is_not_there() -> None:
    store = make_store()
    seq = store.new_sequence()
    old = write_tokens(store, seq, 9)
    copy = store.fork(seq)
    store.truncate(copy, 3)
    store.reserve([copy], [2])
    for first, last in ((3, 6), (3, 3), (-1, 4), (8, 10)):
        with pytest.raises(ValueError, match="cannot exchange"):
            store.exchange(seq, copy, first, last)
    assert_same(read_tokens(store, seq), old)
    apart = make_store(per_head_pages=True)
    seqs = apart.new_sequence(), apart.new_sequence()
    with pytest.raises(ValueError, match="here heads are apart"):
        apart.exchange(*seqs, 0, 1)


def test_tenants_of_one_limit() -> None:
    ledger, held = MemoryLedger(100), {"arrays": 10, "queries": 5}
    assert not ledger.is_shared
    ledger.add("policy", lambda: held["arrays"])
    ledger.add("policy", lambda: held["queries"])
    ledger.add("sessions", lambda: 20)
    assert ledger.by_tenant() == {"policy": 15, "sessions": 20}
    assert ledger.left_bytes == 65
    held["arrays"] = 0
    assert ledger.left_bytes == 75


def test_pages_leave_what_tenants_have() -> None:
    """All tenants count, not the last that came, and the error names them."""
    store = KVStore(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32, page_tokens=16,
                    host_budget_bytes=64 << 10)  # fmt: skip
    seq = store.new_sequence()
    store.ledger.add("what the policy keeps", lambda: 30 << 10)
    store.ledger.add("sessions", lambda: 30 << 10)
    with pytest.raises(HostBudgetError, match=r"30.00 KiB are what the policy .*, 30.* sessions"):
        store.reserve([seq], [1024])
    assert store.left_bytes() == 4 << 10


class Registered:
    """What a driver knows; `refuses` all that comes."""

    def __init__(self) -> None:
        self.slabs, self.refuses = dict[int, int](), False

    def register(self, address: int, num_bytes: int) -> None:
        if self.refuses:
            raise OSError("a memlock limit")
        self.slabs[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.slabs[address]


def pool_of(num_pages: int) -> tuple[PagePool, Registered]:
    driver, page_bytes = Registered(), 2 * 16 * 64 * 4
    pool = PagePool(
        page_shape=(2, 1, 16, 64),
        dtype=torch.float32,
        budget_bytes=num_pages * page_bytes,
        slab_bytes=4 * page_bytes,
        registration=driver,
    )
    return pool, driver


def test_pages_that_were_prepared() -> None:
    pool, driver = pool_of(40)
    pool.prepare(10)
    assert pool.reserved_bytes == 12 * pool.page_bytes  # from the start
    pool.prepare(30)  # some are on their way
    assert pool.allocate(10).tolist() == list(range(10))
    assert (pool.num_free, pool.reserved_bytes) == (2, 12 * pool.page_bytes)
    pool.prepare(2)  # they are there
    assert [*driver.slabs.values()] == [12 * pool.page_bytes]
    pool.prepare(6)
    assert len(pool.allocate(9)) == 9  # and as many more as that was too few
    assert pool.reserved_bytes == sum(driver.slabs.values()) == 20 * pool.page_bytes
    pool.prepare(30)  # beyond the budget
    assert pool.reserved_bytes == 20 * pool.page_bytes
    pool.prepare(5)
    pool.trim()
    assert pool.reserved_bytes == sum(driver.slabs.values()) == 20 * pool.page_bytes
    pool.close()
    assert not driver.slabs


def test_what_a_driver_refuses_to_prepare() -> None:
    pool, driver = pool_of(40)
    driver.refuses = True
    pool.prepare(10)
    with pytest.raises(HostBudgetError, match="but a memlock limit; raise max_memory"):
        pool.allocate(10)
    assert pool.reserved_bytes == 0
    driver.refuses = False
    assert len(pool.allocate(10)) == 10
    pool.close()


def test_where_no_thread_can_be_started_nothing_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, driver = pool_of(40)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        pool.prepare(10)
    assert pool.reserved_bytes == 0
    pool.prepare(10)
    assert len(pool.allocate(10)) == 10
    pool.close()
    assert not driver.slabs


def test_a_dropped_pool_gives_back_what_was_prepared() -> None:
    pool, driver = pool_of(40)
    registered = threading.Event()
    register = driver.register

    def register_late(address: int, num_bytes: int) -> None:
        registered.wait()
        register(address, num_bytes)

    driver.register = register_late  # type: ignore[method-assign]
    pool.prepare(10)
    (coming,) = pool._coming
    del pool
    registered.set()
    coming.wait()
    del coming
    gc.collect()
    assert not driver.slabs


def test_ctrl_c_while_waiting_for_what_is_prepared() -> None:
    pool, driver = pool_of(40)
    register, goes_on = driver.register, threading.Event()

    def register_late(address: int, num_bytes: int) -> None:
        goes_on.wait()
        register(address, num_bytes)

    driver.register = register_late  # type: ignore[method-assign]
    pool.prepare(10)
    main = threading.get_ident()
    interrupt = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(10)
    interrupt.join()
    assert pool.num_used == 0
    goes_on.set()
    assert len(pool.allocate(10)) == 10
    assert pool.reserved_bytes == sum(driver.slabs.values()) == 12 * pool.page_bytes
    pool.close()
    assert not driver.slabs
