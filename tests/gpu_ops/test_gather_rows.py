"""gather_rows: which rows arrive where, bit by bit, and that nothing else is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.host_pages import HostPages, Selections
from cases.operands import DTYPES, poisoned
from cases.seeded import new_rng
from cases.slowly import combinations

from gpu_ops.gather_rows import GatherLaunch, gather_rows
from offload.kv.page_pool import DEFAULT_SLAB_BYTES
from offload.kv.store import KVStore

LAUNCH = GatherLaunch(programs=3, tile_bytes=2048)


class Step:
    """Rows of one step, their selections and a poisoned buffer."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        kv_lens: list[int],
        middle: list[list[int]],
        *,
        capacity: int = 20,
        heads: tuple[int, ...] = (2, 0),
        num_kv_heads: int = 3,
        head_dim: int = 64,
        page_tokens: int = 16,
        launch: GatherLaunch = LAUNCH,
    ) -> None:
        rng = self.rng = new_rng()
        sizes = {"num_kv_heads": num_kv_heads, "page_tokens": page_tokens}
        self.host = HostPages(rng, device, dtype, kv_lens, head_dim=head_dim, **sizes)
        self.device, self.kv_lens, self.capacity, self.heads = device, kv_lens, capacity, heads
        self.lists = Selections(rng, device, kv_lens, middle, capacity)
        self.head_indices = torch.tensor(heads, dtype=torch.int32, device=device)
        self.positions = torch.tensor(kv_lens, device=device) - 1
        shape = (len(kv_lens), 2, len(heads), capacity, head_dim)
        self.out = poisoned(*shape, dtype=dtype, device=device)
        self.options: dict[str, Any] = sizes | self.lists.options() | {"launch": launch}

    def run(self, **options: Any) -> None:
        gather_rows(
            self.lists.selection,
            self.lists.counts,
            self.host.table,
            self.positions,
            self.head_indices,
            out=self.out,
            **self.options | options,
        )

    def check(self) -> None:
        expected = torch.full(self.out.shape, float("nan"), dtype=self.out.dtype)
        for row, position in enumerate(self.positions.tolist()):
            for slot, kv_head in enumerate(self.heads if position >= 0 else ()):
                tokens = self.lists.of_head(row, kv_head)
                expected[row, :, slot, : len(tokens)] = self.host.kv[row][:, kv_head, tokens]
        actual = self.out.cpu()
        assert torch.equal(actual.nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.parametrize(("dtype", "head_dim"), combinations(DTYPES, [64, 96, 128]))
def test_shapes(device: str, dtype: torch.dtype, head_dim: int) -> None:
    step = Step(device, dtype, [50, 0, 37], [[20, 7, 12], [0, 0, 0], [1, 2, 3]], head_dim=head_dim)
    step.run()
    step.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_alone(device: str, dtype: torch.dtype) -> None:
    kv_lens, sizes = [50, 0, 37], {"num_kv_heads": 3, "head_dim": 64, "page_tokens": 16}
    step = Step(device, dtype, kv_lens, [[20, 7, 12], [0, 0, 0], [1, 2, 3]])
    keys = [kv[:1] for kv in step.host.kv]
    step.host = HostPages(step.rng, device, dtype, kv_lens, kv=keys, **sizes)
    step.out = step.out[:, :1].contiguous()
    step.run()
    step.check()


@pytest.mark.parametrize(
    ("middle", "shared"), combinations([0, 1, 7, 8, 9, 19, 20, -1, -7], [True, False])
)
def test_counts(device: str, middle: int, shared: bool) -> None:
    """Around the tiles of eight tokens, up to the capacity; and lists of less than a window."""
    step = Step(device, torch.float32, [60], [[middle] if shared else [3, 5, middle]])
    step.run()
    step.check()


@pytest.mark.parametrize("programs", [1, 2, 5, 50])
def test_programs(device: str, programs: int) -> None:
    launch = GatherLaunch(programs=programs, tile_bytes=2048)
    middle = [[20, 9, 1], [0, 0, 0], [-2, 0, 20], [0, 0, 0], [4, 20, 11]]
    kv_lens = [70, 9, 40, 0, 33]
    step = Step(device, torch.bfloat16, kv_lens, middle, heads=(0, 1, 2), launch=launch)
    step.run()
    step.check()


def test_tiles_of_one_token(device: str) -> None:
    step = Step(device, torch.float32, [40], [[5]], launch=GatherLaunch(tile_bytes=1))
    step.run()
    step.check()


def test_inactive_rows_are_not_looked_at(device: str) -> None:
    """Whatever is left in their lists and tables."""
    step = Step(device, torch.float32, [40, 40], [[9], [9]])
    step.positions[1] = -1
    step.host.table[1] = 0
    step.lists.selection[1] = 2**30
    step.run()
    step.check()


def test_a_store_s_pages(device: str) -> None:
    """The layout is that of the host KV store."""
    store = KVStore(
        num_layers=2,
        num_kv_heads=3,
        head_dim=64,
        dtype=torch.float32,
        host_budget_bytes=DEFAULT_SLAB_BYTES,
        page_tokens=16,
        slab_bytes=2**20,
        pinned=device == "cuda",
    )
    try:
        step = Step(device, torch.float32, [40, 23], [[9, 20, 3], [1, 2, 10]])
        tables = []
        for row, kv_len in enumerate(step.kv_lens):
            seq = store.new_sequence()
            store.reserve([seq], [kv_len])
            keys, values = step.host.kv[row].transpose(1, 2)
            store.append(seq, 0, values, keys)
            store.append(seq, 1, keys, values)
            store.commit([seq], [kv_len])
            tables.append(np.resize(store.page_table(seq)[1], 3))
        step.host.table = torch.from_numpy(np.stack(tables)).to(device)
        step.run()
        step.check()
    finally:
        store.close()


@pytest.mark.cuda
def test_graph_replays_with_other_lists() -> None:
    kv_lens, middle = [131072, 0, 5000, 3001], [[4096] * 8, [0] * 8, [1] * 8, [2000] * 8]
    sizes = {"capacity": 4096, "num_kv_heads": 8, "head_dim": 128, "page_tokens": 256}
    step = Step(
        "cuda",
        torch.bfloat16,
        kv_lens,
        middle,
        heads=(7, 0, 3, 4, 1),
        launch=GatherLaunch(),
        **sizes,
    )
    step.run()  # compiles
    step.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for numbers in ((0, 33, 4096, 1), (4095, 0, 32, 31), (100, 7, 2500, 0)):
        lists = Selections(
            step.rng, "cuda", kv_lens, [[n] * 4 + [n // 2] * 4 for n in numbers], 4096
        )
        step.lists.selection.copy_(lists.selection)
        step.lists.counts.copy_(lists.counts)
        step.lists.chosen = lists.chosen
        step.out.fill_(float("nan"))
        graph.replay()
        step.check()


def test_wrong_operands() -> None:
    step = Step("cpu", torch.float32, [40], [[5, 5, 5]])
    with pytest.raises(ValueError, match=r"selection must be \[1, 3, 26\], got \[1, 3, 27\]"):
        step.run(sink_tokens=1)
    with pytest.raises(ValueError, match=r"must not be negative, got -1 and 5"):
        step.run(sink_tokens=-1)
    with pytest.raises(ValueError, match=r"counts must be \[n, 1\] or .*=4\], got \[1, 3\]"):
        step.run(num_kv_heads=4)
    with pytest.raises(ValueError, match=r"page_tokens must be a power of two .* got 24"):
        step.run(page_tokens=24)
    step.out = step.out[:, :0]
    with pytest.raises(ValueError, match=r"keys and values, or keys alone, got \[1, 0, 2, 20, 64"):
        step.run()


def test_wrong_launches() -> None:
    with pytest.raises(ValueError, match="programs must be at least 1, got 0"):
        GatherLaunch(programs=0)
    with pytest.raises(ValueError, match="tile_bytes must be at least 1, got 0"):
        GatherLaunch(tile_bytes=0)
    with pytest.raises(ValueError, match="num_warps must be 1, 2, 4, 8 or 16, got 3"):
        GatherLaunch(num_warps=3)
    assert GatherLaunch(tile_bytes=16384).tile_tokens(256) == 32
