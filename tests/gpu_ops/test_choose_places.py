"""choose_places: what is hot after lists of many steps, and which rows have to be brought."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from cases.seeded import new_rng

from gpu_ops.choose_places import HotMap, choose_places, fresh
from gpu_ops.layout import allocate

SINKS, RECENT, NUM_KV_HEADS, HEADS = 2, 3, 3, (2, 0)
MAX_TOKENS = 400


class Rows:
    """Two rows, of which the map also has a head of another layer."""

    def __init__(self, device: str, *, fetch_tokens: int, capacity: int, clusters: int) -> None:
        self.device, self.fetch_tokens, self.rng = device, fetch_tokens, new_rng()
        sizes = {"max_tokens": MAX_TOKENS, "capacity": capacity, "clusters": clusters}
        self.map = HotMap(**allocate(HotMap.layout(2, 3, **sizes), torch.device(device)))
        for slot in range(2):
            self.map.clear(slot)
        if clusters:
            cluster_of = torch.from_numpy(self.rng.integers(0, clusters + 1, (2, 3, MAX_TOKENS)))
            cluster_of[cluster_of == clusters] = 255
            self.map.cluster_of.copy_(cluster_of)
            for slot, head in np.ndindex(2, 3):
                counts = torch.bincount(cluster_of[slot, head], minlength=256)[:clusters]
                self.map.cluster_counts[slot, head] = counts.int()
        tokens = {"dtype": torch.int32, "device": device}
        self.scratch = torch.full((2, NUM_KV_HEADS, fetch_tokens), 2**30, **tokens)
        self.held_counts = torch.full((2, NUM_KV_HEADS), -7, **tokens)
        self.logs = torch.full((2, NUM_KV_HEADS, clusters), 7.0, device=device)

    def step(
        self,
        positions: list[int],
        lists: dict[tuple[int, int], list[int]],
        counts: dict[tuple[int, int], int] = MappingProxyType({}),  # type: ignore[assignment]
    ) -> None:
        """Lists of [row, head]; heads that have none are not asked about. Other counts of some."""
        other = counts
        selection = torch.full((2, NUM_KV_HEADS, SINKS + self.fetch_tokens + RECENT), 2**30).int()
        counts = torch.full((2, NUM_KV_HEADS), 2**30).int()
        for (row, head), tokens in lists.items():
            counts[row, head] = len(tokens) + SINKS + RECENT
            selection[row, head, SINKS : SINKS + len(tokens)] = torch.tensor(tokens).int()
        for at, count in other.items():
            counts[at] = count
        choose_places(
            selection.to(self.device),
            counts.to(self.device),
            torch.tensor(positions, device=self.device),
            torch.tensor(HEADS, dtype=torch.int32, device=self.device),
            self.map,
            first_head=1,
            sink_tokens=SINKS,
            recent_tokens=RECENT,
            scratch=self.scratch,
            held_counts=self.held_counts,
            log_counts=self.logs if self.logs.numel() else None,
        )

    def check(
        self, row: int, head: int, listed: list[int], before: dict[int, int]
    ) -> dict[int, int]:
        """The map of a head, which has all that was listed, and what has to be brought for that;
        which then is there."""
        of_map = (row, 1 + HEADS.index(head))
        token_of = self.map.token_of[of_map]
        missing = {int(fresh(x)): i for i, x in enumerate(token_of.cpu()) if x < -1}
        token_of.copy_(torch.where(token_of < -1, fresh(token_of), token_of))
        token_of = token_of.tolist()
        held = {token: place for place, token in enumerate(token_of) if token >= 0}
        places = self.map.place_of[of_map].tolist()
        assert {token: place for token, place in enumerate(places) if place >= 0} == held
        num_hot = int(self.held_counts[row, head]) - SINKS - RECENT
        assert sorted(held.values()) == list(range(num_hot))
        assert sorted(missing) == sorted(set(listed) - before.keys())
        assert set(listed) <= held.keys() <= before.keys() | missing.keys()
        assert all(
            held[token] == place for token, place in (before | missing).items() if token in held
        )
        if self.logs.numel():
            clusters = self.logs.shape[2]
            left = torch.bincount(self.map.cluster_of[of_map].cpu(), minlength=256)[:clusters]
            hot = self.map.cluster_of[of_map].cpu()[sorted(held)]
            left -= torch.bincount(hot, minlength=256)[:clusters]
            assert torch.allclose(self.logs[row, head].cpu(), left.float().log2())
        return held


@pytest.mark.parametrize(
    ("fetch_tokens", "capacity", "clusters"), [(8, 24, 0), (16, 32, 5), (7, 21, 64)]
)
def test_many_steps(device: str, fetch_tokens: int, capacity: int, clusters: int) -> None:
    """Lists that change a little, of one row shorter and at times none; that row ends at last."""
    rows = Rows(device, fetch_tokens=fetch_tokens, capacity=capacity, clusters=clusters)
    held: dict[tuple[int, int], dict[int, int]] = {(r, h): {} for r in range(2) for h in HEADS}
    drawn: dict[tuple[int, int], list[int]] = {key: [] for key in held}
    for step in range(40):
        for row, head in held:
            most = fetch_tokens if row else int(rows.rng.integers(0, fetch_tokens + 1))
            kept = [t for t in drawn[row, head] if rows.rng.random() < 0.7]
            new = rows.rng.integers(SINKS, 150 + step, fetch_tokens).tolist()
            drawn[row, head] = sorted({*kept, *new})[:most]
        last = -1 if step > 35 else 200 + step
        rows.step([last, 300 + step], drawn)
        for (row, head), listed in drawn.items():
            if row == 0 and last < 0:
                assert rows.held_counts[row, head] == 0
                continue
            held[row, head] = rows.check(row, head, listed, held[row, head])
    assert (rows.map.token_of[:, 0] == -1).all()  # of the other layer
    assert (rows.held_counts[:, 1] == -7).all()  # of a head that is not asked about


def test_what_was_not_listed_for_long_goes_first(device: str) -> None:
    rows = Rows(device, fetch_tokens=4, capacity=12, clusters=0)
    lists: list[list[int]] = [[10, 11, 12, 13], [20, 21, 22, 23], [10, 11], [10], [30, 31, 32, 33]]
    lists += [[30], [31], [40, 41, 42, 43]]
    for step, listed in enumerate(lists):
        rows.step([100 + step, -1], {(0, head): listed for head in HEADS})
    held = set(fresh(rows.map.token_of[0, 1]).tolist())  # none was brought
    assert held == {10, 11, *lists[4], *lists[-1], *(20, 21, 22, 23)} - {20, 21} or len(held) == 12
    assert {*lists[4], *lists[-1]} <= held


def test_a_list_that_could_not_be_made_shows(device: str) -> None:
    """What is hot stays, and the output will be no number."""
    rows = Rows(device, fetch_tokens=8, capacity=24, clusters=4)
    rows.step([50, -1], {(0, head): [10, 20] for head in HEADS})
    rows.map.token_of.copy_(fresh(rows.map.token_of))  # none is missing now
    held = rows.map.token_of.clone()
    rows.step([51, -1], {(0, 2): [10, 30]}, counts={(0, 0): -1})
    assert torch.equal(rows.map.token_of[0, 2], held[0, 2])
    assert rows.logs[0, 0].isnan().all()
    assert not rows.logs[0, 2].isnan().any()


def test_operands_that_do_not_fit(device: str) -> None:
    rows: Any = Rows(device, fetch_tokens=8, capacity=15, clusters=0)
    with pytest.raises(ValueError, match="at least 16 places for lists of 8"):
        rows.step([5, 5], {(0, 0): [3]})
