"""What a results file says of the machine that it was measured on."""

from __future__ import annotations

from typing import Any

MACHINE: dict[str, Any] = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
    "cpu": "A CPU",
    "cpus_present": 4,
    "cpus_usable": 2,
    "memory_bytes": 24 * 2**30,
    "isa": "avx2",
    "gpus": [],
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "date": "2026-01-01",
    "load_average": 0.1,
}
