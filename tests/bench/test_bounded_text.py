"""A text within a bound on its bytes, against all keys and values: what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import random_tokens

from offload.bench.budget import bounded_text
from offload.bench.budget.bounded_text import (
    compare_eviction,
    decode_text,
    measure_evictions,
)
from offload.bench.budget.evictions import EVICTIONS

LENGTH, STEPS = 300, 60
LOADED: dict[str, Any] = {
    "sample_every": 3,
    "dtype": "float32",
    "num_threads": 1,
    "page_tokens": 16,
}


@pytest.fixture(scope="module")
def folder(tiny_folders: dict[str, Path]) -> str:
    return str(tiny_folders["llama"])


def text() -> list[int]:
    tokens: list[int] = random_tokens(LENGTH + STEPS + 1).tolist()
    return tokens


def test_evictions_on_the_same_tokens(folder: str) -> None:
    names, progress = list(EVICTIONS), []
    rows = measure_evictions(
        folder, text(), LENGTH, names, share=0.6, on_progress=progress.append, **LOADED
    )
    assert [row["eviction"] for row in rows] == names
    assert sum(progress) == (1 + len(names)) * (STEPS - 1)
    for row in rows:
        assert row["seen"] == LENGTH + STEPS - 1
        assert row["kept"] + row["condensed"] <= row["slots"] <= 0.6 * (LENGTH + STEPS)
        assert (row["condensed"] > 0) == EVICTIONS[row["eviction"]].merges
        quarters = row["error_of_quarters"]
        assert min(quarters) > 1e-3
        for quarter, error in enumerate(quarters):
            of_layers = [layer[quarter] for layer in row["error_of_layers"]]
            assert len(of_layers) == 3
            assert error == pytest.approx(sum(of_layers) / 3)
        assert row["kl"] == pytest.approx(sum(row["kl_of_quarters"]) / 4)
        assert row["kl_max"] >= max(row["kl_of_quarters"])
        assert row["kl"] > 0
    # Each drops, or merges, other tokens, or merges them in another way.
    assert len({row["kl"] for row in rows}) == len(names)


def test_what_does_not_merge_drops(folder: str) -> None:
    """Without being told to; and without a bound there is nothing to tell."""
    bound: dict[str, Any] = {"host_bytes_per_sequence": "400KiB", **LOADED}
    for name, eviction in EVICTIONS.items():
        condensed = decode_text(folder, text(), LENGTH, eviction=name, **bound).row["condensed"]
        assert (condensed > 0) == eviction.merges
    row = decode_text(folder, text(), LENGTH, eviction="dropped", **LOADED).row
    assert row["kept"] == LENGTH + STEPS - 1


def test_before_the_bound_is_reached_there_is_no_error(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is once, in the second quarter."""
    calls: list[int] = []
    condense = bounded_text.EVICTIONS["rkv"].condense_heads(3)

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return condense(*arguments)

    monkeypatch.setattr(
        type(bounded_text.EVICTIONS["rkv"]), "condense_heads", lambda self, group_size: counted
    )
    full = decode_text(folder, text(), 260, **LOADED)
    row = compare_eviction(full, folder, text(), 260, eviction="rkv", share=0.95, **LOADED)
    assert row["slots"] == 304  # 342, less the window of queries: after 44 of 100 steps
    assert len(calls) == 3  # once: layers
    first, second, third, last = row["error_of_quarters"]
    assert first < 1e-5 < 1e-3 < third
    assert row["kl_of_quarters"][0] < 1e-6 < row["kl_of_quarters"][3]
    assert second < last


def test_what_cannot_be_compared_is_refused(folder: str) -> None:
    available = "reread, fitted, means, dropped, snapkv, rkv, snapkv-fitted, rkv-fitted"
    with pytest.raises(ValueError, match=f"unknown eviction 'h2o'; available: {available}"):
        decode_text(folder, text(), LENGTH, eviction="h2o", **LOADED)
    with pytest.raises(ValueError, match="301 tokens are too few to read 300 and decode one"):
        decode_text(folder, text()[:301], LENGTH, **LOADED)
    tokens = text()[: LENGTH + 14]
    full = decode_text(folder, tokens, LENGTH, **LOADED)
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"share": 0.0}, "must be above 0 and below 1, got 0"),
        ({"share": 1.0}, "must be above 0 and below 1, got 1"),
        ({"eviction": "h2o"}, "unknown eviction 'h2o'"),
        ({"sample_every": 2}, "sample_every=2, but .* with sample_every=3; give the same"),
        ({"share": 0.1}, "is too little: 4 sink tokens, 64 recent ones"),
    )
    for options, message in bad:
        options = {"eviction": "rkv", "share": 0.5, **LOADED} | options
        with pytest.raises(ValueError, match=message):
            compare_eviction(full, folder, tokens, LENGTH, **options)
    for steps, samples in ((11, 3), (2, 0)):
        tokens = text()[: LENGTH + steps + 1]
        few = decode_text(folder, tokens, LENGTH, **LOADED)
        with pytest.raises(ValueError, match=f"looked at {samples} times in {steps} steps, less"):
            compare_eviction(few, folder, tokens, LENGTH, eviction="rkv", share=0.5, **LOADED)
