"""`perf.bench_gpu` at tiny shapes on the CPU, and the tables of its results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from perf.bench_gpu import PARTS, main
from perf.tables.gpu_tables import (
    gpu_decode_table,
    gpu_overlap_table,
    gpu_prefill_table,
)

pytestmark = pytest.mark.slow

TINY = ["--shape", "tiny", "--backend", "inline", "--kv-lens", "1200", "2400", "--steps", "14"]
TINY += ["--repeats", "1", "--threads", "1", "--prefill-lengths", "1200", "1500"]
TINY += ["--prefill-slice-tokens", "512", "--commit", "a" * 40]


def run(folder: Path, only: str) -> dict[str, Any]:
    assert main([*TINY, "--only", only, "--output", str(folder)]) == 0
    return {part: json.loads((folder / f"gpu-{part}.json").read_text()) for part in only.split(",")}


def engines(result: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    return [(row["engine"], row["policy"], row["kv_len"]) for row in result["rows"]]


def test_decode_and_peers(tmp_path: Path) -> None:
    results = run(tmp_path, "decode,peers")
    assert engines(results["decode"]) == [
        (engine, policy, kv_len)
        for kv_len in (1200, 2400)
        for engine, policy in (
            ("offload", "lychee_cluster"),
            ("offload", "lfps"),
            ("offload", "tidal_decode"),
            ("all on the GPU, one graph", None),
        )
    ]
    assert engines(results["peers"]) == [("transformers", None, kv_len) for kv_len in (1200, 2400)]
    assert results["decode"]["machine"]["commit"] == "a" * 40
    assert results["decode"]["settings"]["run"] == results["peers"]["settings"]["run"]
    row = results["decode"]["rows"][0]
    assert row["milliseconds"] > 0
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert "| offload, `lfps` |" in gpu_decode_table(results)
    assert "| `lychee_cluster` | 2,400 |" in gpu_overlap_table(results)


def test_prefill(tmp_path: Path) -> None:
    results = run(tmp_path, "prefill")
    assert engines(results["prefill"])[:4] == [
        ("without offload", None, 1200),
        ("streamed out", None, 1200),
        ("streamed out, with index", "lychee_cluster", 1200),
        ("transformers, KV on the GPU", None, 1200),
    ]
    assert len(results["prefill"]["rows"]) == 7
    table = gpu_prefill_table(results)
    assert "| without offload | 1,500 |" in table
    assert "slices of 512 tokens" in table


def test_a_part_that_fails_does_not_take_the_others_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*TINY, "--only", "prefill,peers", "--prefill-slice-tokens", "0"]
    assert main([*arguments, "--output", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-peers.json"]
    assert "failed: prefill" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "decode,pears"])
    assert f"unknown 'pears'; available: {', '.join(PARTS)}" in capsys.readouterr().err


def row(engine: str, kv_len: int, milliseconds: float, **more: Any) -> dict[str, Any]:
    return {
        "engine": engine,
        "policy": None,
        "kv_len": kv_len,
        "batch_size": 1,
        "milliseconds": milliseconds,
        "milliseconds_p10": 0.9 * milliseconds,
        "milliseconds_p90": 1.1 * milliseconds,
        "tokens_per_second": 1e3 / milliseconds,
        **more,
    }


def made_results() -> dict[str, Any]:
    machine = {
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
    shared = {
        "run": "1",
        "shape": "llama-3.1-8b",
        "dtype": "bfloat16",
        "budget_tokens": 1024,
        "lfps_alpha": 0.2,
    }
    memory = {"device": 2**30}
    rows = {
        "decode": [
            row("offload", 4096, 5.0, policy="lychee_cluster", memory=memory),
            row("offload", 131072, 5.5, policy="lychee_cluster", memory=memory),
            row("offload", 131072, 9.5, policy="lfps", memory=memory),
            row("all on the GPU, one graph", 131072, 8.8),
        ],
        "peers": [
            row("transformers, KV on the GPU", 131072, 44.0),
            row("transformers, KV offloaded", 131072, 1100.0),
        ],
        "prefill": [
            row("without offload", 32768, 1000.0),
            row("streamed out", 32768, 1040.0),
            row(
                "streamed out, with index",
                32768,
                1200.0,
                policy="lychee_cluster",
                weight_bytes=15 * 2**30,
                device_peak_bytes=21 * 2**30,
                device_reserved_bytes=22 * 2**30,
            ),
        ],
    }
    of_part: dict[str, dict[str, Any]] = {
        "prefill": {"slice_tokens": 8192, "memory_cap_bytes": 24 * 2**30},
    }
    return {
        part: {
            "machine": machine,
            "settings": shared | of_part.get(part, {}),
            "rows": of_rows,
        }
        for part, of_rows in rows.items()
    }


def test_memory_of_a_prefill() -> None:
    table = gpu_prefill_table(made_results())
    assert "memory capped at 24.00 GiB" in table
    assert "1.200 | 21.00 GiB | 6.00 GiB |" in table


def test_peers_of_another_run_are_dated_and_of_another_machine_left_out() -> None:
    results = copy.deepcopy(made_results())
    assert "another run" not in gpu_decode_table(results)
    results["peers"]["settings"]["run"] = "2"
    date = results["peers"]["machine"]["date"]
    assert f"transformers: another run on the same kind of machine, {date}" in gpu_decode_table(
        results
    )
    results["peers"]["machine"] = {**results["peers"]["machine"], "gpus": ["another"]}
    assert "transformers" not in gpu_decode_table(results).split("*NVIDIA")[0]
    assert "NVIDIA H200, driver 580" in gpu_decode_table(results)
