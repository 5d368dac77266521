"""What a slot holds of its sequence: sinks, the recent window, and whole resident layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases.seeded import new_rng

from offload.decode.gpu.layer_heads import LayerHeads
from offload.decode.gpu.pages import DEVICE_SLAB_PAGES, DevicePages, PageBudget
from offload.decode.gpu.resident_kv import ResidentKV
from offload.kv.store import KVStore
from offload.system.errors import DeviceMemoryError

HEADS, HEAD_DIM, PAGE_TOKENS = 2, 8, 4
SINKS, RECENT = 2, 5


@pytest.fixture
def store() -> KVStore:
    return KVStore(
        num_layers=3,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        page_tokens=PAGE_TOKENS,
    )


def sequence_of(store: KVStore, kv_len: int) -> int:
    seq = store.new_sequence()
    extend(store, seq, kv_len)
    return seq


def extend(store: KVStore, seq: int, num_tokens: int) -> None:
    rng = new_rng()
    store.reserve([seq], [num_tokens])
    for layer_idx in range(store.num_layers):
        rows = rng.standard_normal((2, num_tokens, HEADS, HEAD_DIM), dtype="float32")
        keys, values = torch.from_numpy(rows) + store.kv_len(seq)
        store.append(seq, layer_idx, keys, values)
    store.commit([seq], [num_tokens])


ON_GPU, ON_CPU = LayerHeads((0, 1), (), ()), LayerHeads((), (), (0, 1))
MIXED = LayerHeads((1,), (), (0,))


def resident_of(
    store: KVStore,
    num_slots: int = 2,
    layers: Sequence[LayerHeads] = (ON_GPU, ON_CPU, ON_CPU),
    budget_bytes: int | None = None,
    **options: Any,
) -> ResidentKV:
    return ResidentKV(
        store,
        layers,
        sink_tokens=SINKS,
        recent_tokens=RECENT,
        num_slots=num_slots,
        **({"max_context": 64} | options),
        device=torch.device("cpu"),
        budget=PageBudget(budget_bytes),
    )


def check_slot(resident: ResidentKV, store: KVStore, slot: int, seq: int) -> None:
    """The slot holds what the store has: all of layer 0, sinks and recent tokens of the others."""
    kv_len = store.kv_len(seq)
    for layer_idx in (1, 2):
        keys, values = store.gather(seq, layer_idx, kept=True)
        window = resident.windows[layer_idx][slot]
        for token in {*range(min(SINKS, kv_len)), *range(max(SINKS, kv_len - RECENT), kv_len)}:
            place = token if token < SINKS else SINKS + (token - SINKS) % RECENT
            assert torch.equal(window[0, :, place], keys[:, token])
            assert torch.equal(window[1, :, place], values[:, token])
    keys, values = store.gather(seq, 0, kept=True)
    for number, address in enumerate(resident.page_tables[0][slot].tolist()):
        first = number * PAGE_TOKENS
        if first >= kv_len:
            continue
        page = resident.page(0, address)
        stop = min(first + PAGE_TOKENS, kv_len)
        assert torch.equal(page[0, :, : stop - first], keys[:, first:stop])
        assert torch.equal(page[1, :, : stop - first], values[:, first:stop])


@pytest.mark.parametrize("kv_len", [1, SINKS, SINKS + RECENT, SINKS + RECENT + 1, 16, 41])
def test_binding_copies_what_the_gpu_needs(store, kv_len):
    resident = resident_of(store)
    seqs = [sequence_of(store, kv_len), sequence_of(store, 7)]
    assert resident.bind(seqs) == [0, 1]
    for slot, seq in enumerate(seqs):
        check_slot(resident, store, slot, seq)


def test_a_bound_sequence_is_copied_again_only_if_it_changed(store):
    resident = resident_of(store)
    seq = sequence_of(store, 12)
    (slot,) = resident.bind([seq])
    resident.windows[1][slot] = 77.0
    resident.bind([seq])
    assert bool((resident.windows[1][slot] == 77.0).all())
    extend(store, seq, 1)  # as a decode step does it: the slot hears of it
    resident.advance([slot], [13])
    resident.bind([seq])
    assert bool((resident.windows[1][slot] == 77.0).all())
    store.truncate(seq, 9)
    extend(store, seq, 4)  # as long as before, with other tokens
    resident.forget(seq)
    (slot,) = resident.bind([seq])
    check_slot(resident, store, slot, seq)


@pytest.mark.parametrize("kept", [3, 8, 11, 14])
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_rebased_sequence_keeps_its_first_pages(store, kept: int, is_copy: bool) -> None:
    """Only what is new of whole heads is copied, into the slot that there is."""
    resident = resident_of(store, layers=(ON_GPU, ON_CPU, MIXED))
    seq = sequence_of(store, 11)
    (slot,) = resident.bind([seq])
    to = store.fork(seq) if is_copy else seq
    kept = min(kept, 11)
    if is_copy:
        store.truncate(to, kept)
    resident.rebase(seq, kept if is_copy else 11, to)
    extend(store, to, 9)
    known = (kept if is_copy else 11) // PAGE_TOKENS * PAGE_TOKENS
    pages = {i: resident._addresses[slot][i][: known // PAGE_TOKENS] for i in (0, 2)}
    for layer_idx, addresses in pages.items():
        for address in addresses:
            resident.page(layer_idx, address).mul_(2)
    assert resident.bind([to]) == [slot]
    for layer_idx, addresses in pages.items():
        for address in addresses:  # it was not copied again
            resident.page(layer_idx, address).div_(2)
    resident.reserve([slot], [store.kv_len(to)])
    check_slot(resident, store, slot, to)
    resident.forget(to)
    assert not resident.is_bound


def test_nothing_is_kept_of_a_sequence_without_tokens(store) -> None:
    resident = resident_of(store)
    seq = sequence_of(store, 11)
    resident.bind([seq])
    resident.rebase(seq, 0, seq)
    assert not resident.is_bound


def test_the_slot_used_longest_ago_gives_way(store):
    resident = resident_of(store)
    a, b, c = (sequence_of(store, n) for n in (9, 10, 11))
    assert resident.bind([a]) == [0]
    assert resident.bind([b]) == [1]
    assert resident.bind([a]) == [0]
    assert resident.bind([c]) == [1]
    check_slot(resident, store, 1, c)
    assert resident.bind([c, a]) == [1, 0]


def test_pages_of_a_forgotten_sequence_are_used_again(store):
    resident = resident_of(store)
    seqs = [sequence_of(store, 60) for _ in range(2)]
    resident.bind(seqs)
    held = resident.num_bytes
    for _ in range(5):
        resident.forget(seqs[0])
        resident.bind(seqs)
    assert resident.num_bytes == held


def test_a_growing_sequence_gets_pages_before_it_needs_them(store):
    resident = resident_of(store)
    seq = sequence_of(store, PAGE_TOKENS)
    (slot,) = resident.bind([seq])
    assert int(resident.page_tables[0][slot, 1]) == 0
    resident.reserve([slot], [PAGE_TOKENS + 1])
    assert int(resident.page_tables[0][slot, 1]) != 0


def test_a_budget_that_is_too_small_is_refused_and_nothing_is_bound(store):
    page_bytes = 2 * HEADS * PAGE_TOKENS * HEAD_DIM * 4
    resident = resident_of(store, budget_bytes=3 * page_bytes)
    seq = sequence_of(store, 4 * PAGE_TOKENS)
    with pytest.raises(DeviceMemoryError, match=r"budget is 1.50 KiB; raise max_memory"):
        resident.bind([seq])
    assert resident.slots[0].seq is None
    store.truncate(seq, 2 * PAGE_TOKENS)
    (slot,) = resident.bind([seq])
    check_slot(resident, store, slot, seq)


def test_device_pages_are_distinct():
    pages = DevicePages((2, 4), torch.float32, torch.device("cpu"), PageBudget())
    first, second = pages.allocate(3), pages.allocate(40)
    assert len({*first, *second}) == 43
    pages.release(first)
    assert set(pages.allocate(3)) == set(first)
    addresses = [*first, *second[30:], *second[:30]]
    for number, address in enumerate(addresses):
        pages.page(address).fill_(number)
    runs = list(pages.runs(addresses))
    assert [number for first, stop, _ in runs for number in range(first, stop)] == list(range(43))
    assert torch.equal(torch.cat([run[:, 0, 0] for *_, run in runs]), torch.arange(43.0))
    assert len(runs) <= 4  # of two slabs


def test_memory_of_finished_sequences_goes_back(store):
    resident = resident_of(store, max_context=200)
    empty = resident.num_bytes
    short, long = sequence_of(store, 5), sequence_of(store, 40 * PAGE_TOKENS)
    resident.bind([short])
    of_short = resident.num_bytes
    resident.bind([short, long])
    of_both = resident.num_bytes
    resident.forget(long)
    assert resident.num_bytes == of_both  # as long as nobody else needs it
    resident.trim()
    assert empty < of_short <= resident.num_bytes < of_both
    (slot,) = resident.bind([short])
    check_slot(resident, store, slot, short)
    for slot, seq in zip(resident.bind([short, long]), (short, long), strict=True):
        check_slot(resident, store, slot, seq)
    for seq in (short, long):
        resident.forget(seq)
    resident.trim()
    assert resident.num_bytes == empty


def test_pages_of_some_heads_hold_those_heads(store):
    layers = (MIXED, ON_GPU, ON_CPU)
    resident = resident_of(store, layers=layers)
    kv_len = 3 * PAGE_TOKENS + 1
    (slot,) = resident.bind([sequence_of(store, 5), sequence_of(store, kv_len)])[1:]
    seq = resident.slots[slot].seq
    for layer_idx, heads in ((0, [1]), (1, [0, 1])):
        rows = torch.stack(store.gather(seq, layer_idx))[:, heads]
        addresses = resident.page_tables[layer_idx][slot].tolist()
        pages = [resident.page(layer_idx, address) for address in addresses[:4]]
        assert torch.equal(torch.cat(pages, dim=2)[:, :, :kv_len], rows)
    assert set(resident.page_tables) == {0, 1}
    page_bytes = 2 * PAGE_TOKENS * HEAD_DIM * 4
    windows = sum(window.nbytes for window in resident.windows.values())
    tables = sum(table.nbytes for table in resident.page_tables.values())
    assert resident.num_bytes == windows + tables + DEVICE_SLAB_PAGES * page_bytes * (1 + 2)


def test_pages_of_all_shapes_share_one_budget(store):
    layers = (MIXED, ON_GPU, ON_CPU)
    page_bytes = 2 * PAGE_TOKENS * HEAD_DIM * 4
    resident = resident_of(store, layers=layers, budget_bytes=6 * page_bytes)
    a, b = sequence_of(store, PAGE_TOKENS + 1), sequence_of(store, 3 * PAGE_TOKENS)
    resident.bind([a])  # 2 pages of one head, 2 of two
    with pytest.raises(DeviceMemoryError, match=r"budget is 1.50 KiB"):
        resident.bind([a, b])
    assert resident.slots[1].seq is None
    resident.bind([a])


def test_a_budget_below_one_page_of_each_head_is_refused(store):
    layers = (MIXED, ON_GPU, ON_CPU)
    page_bytes = 2 * PAGE_TOKENS * HEAD_DIM * 4
    with pytest.raises(DeviceMemoryError, match=r"each of the 3 KV heads .* needs 768 B, but"):
        resident_of(store, layers=layers, budget_bytes=3 * page_bytes - 1)
    resident_of(store, layers=layers, budget_bytes=3 * page_bytes)


def test_the_addresses_of_host_pages_follow_a_copy_on_write(store):
    layers = (ON_CPU, *(LayerHeads((), (1,), (0,)),) * 2)
    resident = resident_of(store, layers=layers)
    seq = sequence_of(store, PAGE_TOKENS + 1)

    def check(seq: int) -> None:
        (slot,) = resident.bind([seq])
        num_pages = -(-store.kv_len(seq) // PAGE_TOKENS)
        for layer_idx in (1, 2):
            table = resident.host_pages.tables[layer_idx][slot, :num_pages]
            assert table.tolist() == store.page_table(seq)[layer_idx, :num_pages].tolist()

    check(seq)
    child = store.fork(seq)
    old = int(store.page_table(seq)[1, 1])
    extend(store, seq, 1)  # copies the page that the child shares
    resident.advance([0], [store.kv_len(seq)])
    assert int(store.page_table(seq)[1, 1]) != old
    check(seq)
    extend(store, seq, PAGE_TOKENS)
    resident.advance([0], [store.kv_len(seq)])
    check(seq)
    check(child)
