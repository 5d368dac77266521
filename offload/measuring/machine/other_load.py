"""Whether something else ran while this process measured: what it timed is of two programs then."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq, softirq; of the first line, by proc_stat(5)
_STEAL = 7
MOST_SHARE = 0.1  # of the CPUs, that others may take before a measurement is worth nothing
MOST_SPREAD = 0.1  # ± half of p10 to p90


@dataclass(frozen=True)
class OtherLoad:
    """Shares of all the CPUs of this machine.

    Attributes:
        others: taken by other processes.
        stolen: taken by the hypervisor for other machines.
    """

    others: float
    stolen: float


class LoadWatch:
    """Starts to watch when it is made."""

    def __init__(self) -> None:
        self._start = _reading()

    def seen(self) -> OtherLoad | None:
        """Since it was made; None where the system does not tell, or too little time passed."""
        now, start = _reading(), self._start
        if now is None or start is None:
            return None
        seconds, busy, stolen, own = (b - a for a, b in zip(start, now, strict=True))
        cpu_seconds = seconds * (os.cpu_count() or 1)
        if seconds < 0.1:  # the clock of /proc/stat ticks a hundred times a second
            return None
        return OtherLoad(max(0.0, busy - own) / cpu_seconds, max(0.0, stolen) / cpu_seconds)


def _reading() -> tuple[float, float, float, float] | None:
    """Seconds: the time, of CPUs busy and stolen, and of this process."""
    try:
        fields = [int(x) for x in _STAT.read_text("ascii").split("\n", 1)[0].split()[1:]]
        tick = os.sysconf("SC_CLK_TCK")
        busy = sum(fields[i] for i in _BUSY) / tick
        return time.monotonic(), busy, fields[_STEAL] / tick, time.process_time()
    except (OSError, ValueError, IndexError):
        return None


def load_warnings(load: OtherLoad | None, spread: float) -> list[str]:
    """What to say of a measurement that is not to be trusted.

    Args:
        spread: of repeated measurements: half of p10 to p90, as a share of the median.
    """
    warnings = []
    if load is not None and load.others + load.stolen > MOST_SHARE:
        stolen = f", and the hypervisor {load.stolen:.0%}" if load.stolen > 0.01 else ""
        warnings.append(
            f"the machine was busy: other programs took {load.others:.0%} of its CPUs"
            f"{stolen}; times are too long and ratios mislead. Stop them and measure again"
        )
    if spread > MOST_SPREAD:
        warnings.append(
            f"times of the same step differ by ±{spread:.0%} (half of p10 to p90, median of the "
            "rows); measure again on a quiet machine, or with more --repeats"
        )
    return warnings
