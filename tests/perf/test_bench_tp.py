"""`perf.bench_tp` at a tiny shape on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.results_file import ROOT

pytestmark = pytest.mark.slow


def test_one_rank_and_two(tmp_path: Path) -> None:
    sizes = ["--shape", "tiny", "--kv-len", "1200", "--steps", "8", "--repeats", "1"]
    sizes += ["--batch-size", "2", "--distinct-layers", "2", "--policies", "exact_topk"]
    command = [sys.executable, "-m", "perf.bench_tp", "--device", "cpu", *sizes]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--grow-memory", "4MiB"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu-tp.json").read_text())["rows"]
    decoded = [row for row in rows if row["part"] == "decode"]
    assert [(row["world_size"], row["num_parts"]) for row in decoded] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    one, two = decoded[0], decoded[2]
    assert two["memory"]["kv_host"] * 2 == one["memory"]["kv_host"]
    assert two["weight_bytes_of_rank"] < one["weight_bytes_of_rank"]
    assert [row["policy"] for row in rows if row["part"] == "ratio"] == ["exact_topk"]
    assert all(row["equal"] for row in rows if row["part"] == "tokens")
    assert all(row["microseconds"] > 0 for row in rows if row["part"] == "all_reduce")
