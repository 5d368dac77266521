"""The simulation of many replicas keeps to what can be said of it by hand."""

from __future__ import annotations

import pytest

from perf.replicas import simulate, table

TIMES = {
    "startup_s": 20.0,
    "bytes_per_token": 25_000.0,
    "save_bytes_per_s": 1e9,
    "restore_bytes_per_s": 1e9,
    "prefill_tokens_per_s": 1000.0,
    "decode_step_s": 0.01,
}


def test_what_is_simulated() -> None:
    rows = [simulate(TIMES, replicas, 400.0) for replicas in (2, 50)]
    few, many = rows
    assert (few["sessions"], many["points on the ring"]) == ("32", "5,000")
    # A session turns every 60 s of pause + 0.77 s of work.
    assert float(many["turns a second"]) == pytest.approx(800 / 60.77, rel=0.1)
    assert (few["rolling update, s"], many["rolling update, s"]) == ("40", "100")
    # Of 192 tokens each, every fourth fills a part of 16 MiB: 480 are written on average.
    assert float(many["written, mean, GB/s"]) == pytest.approx(800 / 60.77 * 0.012, rel=0.15)
    # All replicas are new after the update, and no session is where it was.
    assert int(many["turns on another replica than the last"].replace(",", "")) >= 700
    assert float(many["first token, median and p99, ms"].split(", ")[0]) == 128
    assert table(rows).splitlines()[0] == "| replicas | 2 | 50 |"


def test_what_is_slow_shows() -> None:
    slow = simulate(TIMES | {"save_bytes_per_s": 1e5}, 10, 400.0)
    assert int(slow["of these, before the state was written"]) > 100
