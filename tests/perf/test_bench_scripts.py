"""The scripts of perf/ run at tiny shapes on a CPU, and write what their tables read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model

from perf import bench_gpu, bench_plan, bench_tradeoff
from perf.tables.gpu_tables import gpu_decode_table, gpu_overlap_table, gpu_prefill_table
from perf.tables.tradeoff_tables import tradeoff_table

pytestmark = pytest.mark.slow
TINY = ["--shape", "tiny", "--backend", "inline", "--repeats", "1", "--commit", "a" * 40]


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def test_bench_gpu(tmp_path: Path) -> None:
    given = "--kv-lens 1200 2400 --steps 14 --threads 1 --prefill-lengths 1200 1500"
    given += f" --prefill-slice-tokens 512 --only decode,peers,prefill --output {tmp_path}"
    assert bench_gpu.main([*TINY, *given.split()]) == 0
    results = {part: read(tmp_path / f"gpu-{part}.json") for part in ("decode", "peers", "prefill")}
    rows = results["decode"]["rows"]
    assert len(rows) == 8
    assert rows[0]["milliseconds"] > 0
    assert sum(rows[0]["shares"].values()) == pytest.approx(1)
    assert "| offload, `lfps` |" in gpu_decode_table(results)
    assert "| `lychee_cluster` | 2,400 |" in gpu_overlap_table(results)
    assert "| without offload | 1,500 |" in gpu_prefill_table(results)


def test_bench_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.measuring.machine.host._KV_LEN", 4096)
    monkeypatch.setattr("offload.measuring.machine.host._MAX_CACHE_BYTES", 16 * 2**20)
    given = f"--longest 6000 --steps 8 --output {tmp_path} --tolerance 1000 --bytes-tolerance 10"
    assert bench_plan.main([*TINY, *given.split()]) == 0
    rows = read(tmp_path / "gpu-plan.json")["rows"]
    assert len(rows) >= 6
    assert all(row["milliseconds"] > 0 < row["predicted_milliseconds"] for row in rows)


def test_bench_tradeoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    make_tiny_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    given = f"--out {tmp_path}/t.json --model {folder} --dtype float32 --commit none"
    given += " --policies full,exact_topk,lfps --budgets 96 --option lfps.alpha=0.4"
    given += " --lengths 1100,1200 --tasks niah_single_1 --samples 2 --quality-threads 1"
    given += " --device cpu --threads 1 --steps 6 --repeats 1 --peer-steps 1"

    def run(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bench_tradeoff", *given.split(), *more])
        bench_tradeoff.main()

    run()
    found = read(tmp_path / "t.json")
    labels = ["full", "exact_topk 96", "lfps 96 alpha=0.4"]
    judged = [row["label"] for row in found["rows"] if row["part"] == "quality"]
    assert judged == labels * 2
    timed = [row for row in found["rows"] if row["part"] == "speed" and row["label"] in labels]
    assert len(timed) == 6
    assert all(row["milliseconds"] > 0 for row in timed)
    assert "`lfps 96 alpha=0.4`" in tradeoff_table(found)
    run()  # nothing is measured twice
    assert read(tmp_path / "t.json")["rows"] == found["rows"]
    with pytest.raises(ValueError, match=r"t\.json was made with policies"):
        run("--budgets", "97")
