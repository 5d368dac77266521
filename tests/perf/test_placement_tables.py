"""Tables of placements, from results that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import report, results_file
from perf.results_file import write_results
from perf.tables.placement_tables import (
    gpu_gather_table,
    gpu_heads_table,
    gpu_plan_table,
    gpu_retrieval_table,
    gpu_tp_table,
)

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
        "gpu-gather": [
            {
                "engine": "GPU",
                "tokens": 256,
                "heads": 8,
                "gather_microseconds": 24.0,
                "microseconds": microseconds,
                "gather_gigabytes_per_second": 43.1,
            }
            for microseconds in (40.0, 30.0)
        ]
        + [
            {
                "engine": "CPU",
                "tokens": 256,
                "heads": 8,
                "threads": threads,
                "microseconds": microseconds,
                "microseconds_p10": microseconds - 2,
                "microseconds_p90": microseconds + 2,
            }
            for threads, microseconds in ((4, 60.0), (15, 20.0))
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
        "gpu-gather": {"kv_len": 131072},
    }
    return {
        name: {
            "machine": MACHINE,
            "settings": shared | settings.get(name, {}),
            "rows": of_rows,
        }
        for name, of_rows in rows.items()
    }


def test_tables() -> None:
    results = made_results()
    heads = gpu_heads_table(results["gpu-heads"])
    assert "| offload, `lychee_decode` | CPU | 0 |  | 9.00 ± 0.90 | 1.00 GiB |" in heads
    assert "| offload, `lychee_decode` | GPU | 4 | 6.00 ± 0.60 | 6.50 ± 0.65 | 1.00 GiB |" in heads
    assert "| all on the GPU, one graph |  |  |  | 8.00 ± 0.80 |  |" in heads
    assert heads.endswith("commit 0123456789ab, 2026-01-01, run 1.*")
    gather = gpu_gather_table(results["gpu-gather"])
    assert (
        f"| 256 | 8 | 43.1 | 24.0 | 30.0 | 60.0 ± 2.0, GPU 2.00{TIMES} "
        f"| 20.0 ± 2.0, CPU 1.50{TIMES} |" in gather
    )
    assert gather.endswith("commit 0123456789ab, 2026-01-01.*")
    retrieved = gpu_retrieval_table(results["gpu-retrieval"])
    assert "| 131,072 | 8 |  |  | 150.0 | 150.0 |  | 80% |" in retrieved
    assert "of 4,000 GB/s" in retrieved
    assert (
        "| `lychee_decode` | 131,072 | 1,027 | 15 | G 40 g 116 . 100 | 0.86 | 1.00 ± 0.10 "
        "| -14.0% | +1.3% |" in gpu_plan_table(results["gpu-plan"])
    )
    of_two = gpu_tp_table(results["gpu-tp"])
    assert "| `quest` | 2 | 2 | 1.00 ± 0.10 | 161.0 | 16 | 1.00 GiB | 2.00 GiB |" in of_two
    assert f"faster: `quest` 1.61{TIMES}. An all-reduce of 16,384 bytes takes 13.7 µs" in of_two
    assert "the same tokens under 2 of 2 policies" in of_two


def test_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    section = "<!-- perf:{0} -->\n\n<!-- /perf:{0} -->"
    assert report.NOT_MEASURED in report.render(section.format("gpu-plan"))
    for name, result in made_results().items():
        write_results(name, **result)
        assert "0123456789ab" in report.render(section.format(name))
