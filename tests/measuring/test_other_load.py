"""A machine on which something else ran is told from a quiet one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload.measuring.machine import other_load
from offload.measuring.machine.other_load import LoadWatch, OtherLoad, load_warnings


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system has no /proc/stat")
def test_what_others_take_is_seen() -> None:
    """A process that spins takes a CPU; this one, which spins as well, is not among the others."""
    spins = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch, until = LoadWatch(), time.monotonic() + 1.0
        while time.monotonic() < until:
            pass
        load = watch.seen()
    finally:
        spins.kill()
        spins.wait()
    assert load is not None
    cpus = other_load.os.cpu_count() or 1
    assert 0.3 / cpus < load.others <= 1.05
    assert load.stolen >= 0


def _stat(busy: int, stolen: int) -> str:
    return f"cpu  {busy} 0 0 900 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n"


@pytest.mark.parametrize(
    ("busy", "stolen", "own", "expected"),
    [(1000, 0, 10.0, (0.0, 0.0)), (1000, 0, 4.0, (0.3, 0.0)), (1000, 500, 10.0, (0.0, 0.25))],
)
def test_shares(
    busy: int,
    stolen: int,
    own: float,
    expected: tuple[float, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds of two CPUs, whose clock ticks a hundred times a second."""
    stat, clock = tmp_path / "stat", [0.0, 0.0]
    monkeypatch.setattr(other_load, "_STAT", stat)
    monkeypatch.setattr(other_load.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(other_load.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(other_load.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(other_load.time, "process_time", lambda: clock[1])
    stat.write_text(_stat(0, 0))
    watch = LoadWatch()
    stat.write_text(_stat(busy, stolen))
    clock[:] = 10.0, own
    assert watch.seen() == OtherLoad(*map(pytest.approx, expected))


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_load, "_STAT", tmp_path / "none")
    assert LoadWatch().seen() is None
    assert load_warnings(None, 0.05) == []


def test_what_is_said() -> None:
    assert load_warnings(OtherLoad(0.05, 0.02), 0.05) == []
    (busy,) = load_warnings(OtherLoad(0.4, 0.2), 0.05)
    assert busy.startswith(
        "the machine was busy: other programs took 40% of its CPUs, and the hypervisor 20%;"
    )
    (spread,) = load_warnings(OtherLoad(0.0, 0.0), 0.23)
    assert spread.startswith("times of the same step differ by ±23%")
