"""Bytes of a sequence as slots."""

from __future__ import annotations

import pytest

from offload.kv_compression.bound import SequenceBound
from offload.policies.registry import make_policy

FULL = make_policy("full")


def bound(num_bytes: int, **changes: object) -> SequenceBound:
    options = {"token_bytes": 100, "page_tokens": 16, "policy": FULL} | changes
    return SequenceBound.of(num_bytes, **options)  # type: ignore[arg-type]


def test_whole_pages_within_the_bytes() -> None:
    assert bound(100 * 1000).slots == 992
    assert bound(100 * 1008).slots == 1008
    assert bound(100 * 1008 - 1).slots == 992


@pytest.mark.parametrize("num_bytes", [9600, 20_000, 1_234_567])
@pytest.mark.parametrize("share", [0.0, 0.0625, 1.0])
def test_tiers_fit(num_bytes: int, share: float) -> None:
    found = bound(num_bytes, condensed_share=share)
    assert found.slots * 100 <= num_bytes < (found.slots + 16) * 100
    assert found.sinks + found.recent + found.condensed <= found.low < found.slots
    assert found.new_condensed <= found.condensed
    assert found.freed <= found.slots // 4


def test_what_is_kept_beside_the_pages_counts() -> None:
    found = bound(100_000, other_bytes=lambda slots: 5000 + 20 * slots)
    assert found.slots * 120 + 5000 <= 100_000 < (found.slots + 16) * 120 + 5000


def test_too_few_bytes() -> None:
    message = r"9599 \(9.37 KiB\) is too little: 4 sink tokens, 64 recent ones and a page of 16 "
    with pytest.raises(ValueError, match=message + "tokens need 9600 bytes"):
        bound(9599)
    assert bound(9600).slots == 96
    policy = make_policy("exact_topk", sink_tokens=8, recent_tokens=100)
    with pytest.raises(ValueError, match="8 sink tokens, 100 recent ones"):
        bound(9600, policy=policy)
    with pytest.raises(ValueError, match="need 14600 bytes"):
        bound(9600, other_bytes=lambda slots: 5000)
