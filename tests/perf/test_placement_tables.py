"""Tables of placements, from results that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import report, results_file
from perf.results_file import write_results
from perf.tables.placement_tables import gpu_plan_table

TIMES = "\N{MULTIPLICATION SIGN}"
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


def timed(milliseconds: float, **more: Any) -> dict[str, Any]:
    return {
        "milliseconds": milliseconds,
        "milliseconds_p10": 0.9 * milliseconds,
        "milliseconds_p90": 1.1 * milliseconds,
        "kv_len": 131072,
        **more,
    }


def ours(policy: str, gathered: int, milliseconds: float, kv_len: int = 131072) -> dict[str, Any]:
    row = timed(milliseconds, engine="offload", policy=policy, gathered_heads=gathered)
    return row | {"kv_len": kv_len, "memory": {"kv_device": 2**30}}


def retrieval(variant: str, heads: int, share: float | None) -> dict[str, Any]:
    return {
        "variant": variant,
        "tokens": 131072,
        "heads": heads,
        "microseconds": 150.0,
        "bandwidth_share": share,
    }


def plan(number: int, error: float, planned: int) -> dict[str, Any]:
    row = timed(
        1.0,
        policy="lychee_decode",
        budget_tokens=1024 + number,
        threads=15,
        placement="chosen",
        heads={"CPU": 100, "GPU": 40, "GATHER": 116},
        predicted_milliseconds=1.0 + error,
        error=error,
    )
    for name in ("kv_device", "device", "host"):
        row |= {f"planned_{name}_bytes": 1000, f"{name}_bytes": 1000}
    return row | {"planned_device_bytes": planned}


def tp(world_size: int, parts: int, speed: float) -> dict[str, Any]:
    return timed(
        1.0,
        part="decode",
        policy="quest",
        world_size=world_size,
        num_parts=parts,
        tokens_per_second=speed,
        cpus_of_rank=16,
        weight_bytes_of_rank=2**30,
        memory={"kv_host": 2**31},
    )


def made_results() -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {
        "gpu-heads": [
            ours("lychee_decode", -1, 9.0),
            ours("lychee_decode", 4, 6.0, kv_len=4096),
            ours("lychee_decode", 4, 6.5),
            ours("tidal_decode", 0, 7.0),
            timed(8.0, engine="all on the GPU, one graph", policy=None),
            timed(13.0, engine="transformers, KV on the GPU", policy=None),
        ],
        "gpu-plan": [plan(n, -0.14 if n == 3 else 0.05, 1010 + n) for n in range(12)],
        "gpu-retrieval": [
            *(retrieval("attention, top-k", heads, share) for heads, share in ((1, 0.5), (8, 0.8))),
            retrieval("top-k alone", 8, None),
        ],
        "gpu-tp": [
            tp(1, 1, 100.0),
            tp(1, 2, 90.0),
            tp(2, 1, 150.0),
            tp(2, 2, 161.0),
            {"part": "all_reduce", "bytes": 16384, "microseconds": 13.7},
            {"part": "tokens", "policy": "full", "equal": True},
            {"part": "tokens", "policy": "quest", "equal": True},
        ],
    }
    shared = {"shape": "llama-3.1-8b", "dtype": "bfloat16"}
    settings: dict[str, dict[str, Any]] = {
        "gpu-heads": {
            "run": "1",
            "names": ["lychee_decode", "tidal_decode"],
            "budgets": {"lychee_decode": 2048, "tidal_decode": 1024},
        },
        "gpu-retrieval": {
            "budget_tokens": 2048,
            "bandwidth_gigabytes_per_second": {"read": 4000.0, "copy": 3900.0},
        },
        "gpu-tp": {"device": "cuda", "batch_size": 4, "kv_len": 65536},
    }
    return {
        name: {
            "machine": MACHINE,
            "settings": shared | settings.get(name, {}),
            "rows": of_rows,
        }
        for name, of_rows in rows.items()
    }


def test_plan_table() -> None:
    assert (
        "| `lychee_decode` | 131,072 | 1,027 | 15 | G 40 g 116 . 100 | 0.86 | 1.00 ± 0.10 "
        "| -14.0% | +1.3% |" in gpu_plan_table(made_results()["gpu-plan"])
    )


def test_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    section = "<!-- perf:{0} -->\n\n<!-- /perf:{0} -->"
    assert report.NOT_MEASURED in report.render(section.format("gpu-plan"))
    for name, result in made_results().items():
        write_results(name, **result)
    assert "0123456789ab" in report.render(section.format("gpu-plan"))
