"""The native decoder and the GPU's step, with heads anywhere, agree for every policy."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from cases.agreement import Case, Outcome
from cases.slowly import slow_but

from offload.policies.registry import available_policies

PLACED = ("full", "lychee_decode", "per_head", "tidal_decode")  # those whose heads may be elsewhere


def compare(folder: Path, name: str, seed: int, num_placements: int, **options: int) -> Outcome:
    """Where the decoder puts heads by itself, and in random places."""
    outcome = Outcome()
    case = Case(folder, name, seed, **options)
    case.compare(outcome)
    for _ in range(num_placements if name in PLACED else 0):
        case.place_anywhere()
        case.compare(outcome)
    gc.collect()
    assert case.native.kv_store.host_bytes_used == case.inline.kv_store.host_bytes_used == 0
    return outcome


@pytest.mark.parametrize(
    "name", slow_but(available_policies(), "full", "lychee_cluster", "lfps", "tidal_decode")
)
def test_short(name: str, tmp_path: Path) -> None:
    outcome = compare(tmp_path, name, 3, 2, num_threads=1)
    assert not outcome.failures
    assert outcome.steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", available_policies())
def test_long(name: str, tmp_path: Path) -> None:
    """A few of many cases have ties; more would hide something."""
    total = Outcome()
    for seed in range(1, 41):
        outcome = compare(tmp_path / str(seed), name, seed, 3, num_threads=1 + seed % 2)
        total.steps += outcome.steps
        total.ties += outcome.ties
        total.failures += outcome.failures
    assert not total.failures, "\n".join(total.failures)
    print(f"{name}: {total.steps} steps agree, {total.ties} comparisons end at a tie")
    assert total.ties <= 8
