"""`perf.bench_codes`: what it measures is right, and what it prints; times need a GPU."""

from __future__ import annotations

import pytest
import torch

from gpu_ops.code_scores import CodeLaunch
from gpu_ops.top_k_candidates import TopKLaunch
from perf.bench_codes import BUILT, LISTED, SELECTED, CodesCase, main
from perf.tables.placement_tables import gpu_codes_table


def case(num_heads: int = 2, tokens: int = 4000, bits: int = 2) -> CodesCase:
    return CodesCase(num_heads, tokens, bits, device="cpu", copies=2)


@pytest.mark.parametrize(("num_heads", "tokens", "bits"), [(1, 4000, 1), (3, 5000, 2), (8, 100, 2)])
def test_results_are_checked(num_heads: int, tokens: int, bits: int) -> None:
    case(num_heads, tokens, bits).check()


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = case()
    monkeypatch.setattr(wrong, "list_tokens", lambda copy: CodesCase.list_tokens(wrong, copy + 1))
    with pytest.raises(ArithmeticError, match=r"a list has .*, the 2868th is"):
        wrong.check()
    wrong = case()
    monkeypatch.setattr(wrong, "list_tokens", lambda copy: None)
    with pytest.raises(ArithmeticError, match="a list has 0 tokens"):
        wrong.check()


def test_every_variant_and_launch_runs() -> None:
    runs = case()
    for variant in (LISTED, SELECTED, BUILT):
        runs.run(variant, 1)
    top_k = TopKLaunch(chunk_tokens=512)
    runs.list_tokens(0, launch=CodeLaunch(64), top_k=top_k)
    assert runs.buffers.launch == top_k


def test_table() -> None:
    measured = case()
    rows = [
        measured.row(variant, time)
        for time, variant in enumerate((LISTED, SELECTED, BUILT, f"sweep {LISTED}"), 10)
    ]
    machine = {
        "gpus": ["GPU"],
        "nvidia_driver": "1",
        "cpu": "CPU",
        "cpus_usable": 2,
        "isa": "avx2",
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "abc",
        "uncommitted_changes": False,
        "date": "2026",
    }
    settings = {
        "bandwidth_gigabytes_per_second": {"read": 4000.0, "copy": 3000.0},
        "budget_tokens": 1024,
    }
    text = gpu_codes_table({"machine": machine, "settings": settings, "rows": rows})
    assert "| 4,000 | 2 | 2 | 10.0 | 11.0 | 12.0 | 0.1 |" in text


def test_heads_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--heads", "9"])
    assert "--heads must be in 1..8, got 9" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_measures_on_a_gpu(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--heads", "1", "--tokens", "8192", "--output", str(tmp_path), "--profile"]
    assert main([*arguments, "--commit", "none", "--launch", "tile_tokens=128,256"]) == 0
    printed = capsys.readouterr().out
    assert "score_codes_kernel" in printed
    assert "| 8,192 | 1 | 2 |" in printed
