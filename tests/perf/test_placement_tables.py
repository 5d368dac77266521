"""Tables of placements, from results that were made up."""

from __future__ import annotations

from typing import Any

from perf.tables.placement_tables import gpu_plan_table

MACHINE: dict[str, Any] = {
    "gpus": ["NVIDIA H200"],
    "nvidia_driver": "580",
    "cpu": "A CPU",
    "cpus_usable": 16,
    "isa": "amx",
    "versions": {"torch": "2.11.0", "transformers": "5.17.0"},
    "commit": "0123456789abcdef",
    "uncommitted_changes": False,
    "date": "2026-01-01",
}


ROW: dict[str, Any] = {
    "policy": "lychee_decode",
    "kv_len": 131072,
    "budget_tokens": 1024,
    "threads": 15,
    "heads": {"CPU": 100, "GPU": 40, "GATHER": 116},
    "predicted_milliseconds": 0.86,
    "milliseconds": 1.0,
    "milliseconds_p10": 0.9,
    "milliseconds_p90": 1.1,
    "error": -0.14,
    "planned_kv_device_bytes": 1000,
    "kv_device_bytes": 1000,
    "planned_device_bytes": 1013,
    "device_bytes": 1000,
    "planned_host_bytes": 1000,
    "host_bytes": 1000,
}
RESULT: dict[str, Any] = {
    "machine": MACHINE,
    "settings": {"shape": "llama-3.1-8b", "dtype": "bfloat16"},
    "rows": [ROW],
}


def test_plan_table() -> None:
    assert (
        "| `lychee_decode` | 131,072 | 1,024 | 15 | G 40 g 116 . 100 | 0.86 | 1.00 ± 0.10 "
        "| -14.0% | +1.3% |" in gpu_plan_table(RESULT)
    )
