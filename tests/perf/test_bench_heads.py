"""`perf.bench_heads`: what it measures is right, and what it prints; times need a GPU."""

from __future__ import annotations

import argparse

import pytest
import torch

from gpu_ops.launch import has_triton
from perf import bench_heads
from perf.bench_heads import VARIANTS, HeadsCase, main, other_launches, result
from perf.gpu_timing import READ_BLOCK, read_all

ATTENTION = argparse.Namespace(
    per_sm=[2, 3], launch=["tile_tokens=64", "num_stages=3,5"], top_k_launch=[]
)
TOP_K = argparse.Namespace(launch=[], top_k_launch=["chunk_tokens=512", "segments=8,16"])


def case(num_heads: int = 2, tokens: int = 1000) -> HeadsCase:
    return HeadsCase(num_heads, tokens, 200, spread=2.0, device="cpu", copies=2)


@pytest.mark.parametrize(("num_heads", "tokens"), [(1, 1000), (8, 300), (2, 100)])
def test_results_are_checked(num_heads: int, tokens: int) -> None:
    case(num_heads, tokens).check()


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = case()
    monkeypatch.setattr(wrong, "attend", lambda copy: HeadsCase.attend(wrong, copy + 1))
    with pytest.raises(ArithmeticError, match="out is off by"):
        wrong.check()

    wrong = case()
    wrong.check()
    monkeypatch.setattr(wrong, "top_k", lambda shared=False: None)
    wrong.host_lists[False][0][0, 7, 16:-64] -= 1
    with pytest.raises(ArithmeticError, match="the list on the host differs"):
        wrong.check()
    wrong.lists[False][0].copy_(wrong.host_lists[False][0])
    with pytest.raises(ArithmeticError, match="a list"):
        wrong.check()


def test_every_variant_runs() -> None:
    runs = case()
    runs.check()
    for variant in VARIANTS:
        runs.run(variant, 1)


def test_copies_are_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_heads, "COLD_BYTES", 3 * 2**20)
    assert len(HeadsCase(1, 1024, 200, spread=1.0, device="cpu").copies) == 6
    assert len(HeadsCase(8, 1024, 200, spread=1.0, device="cpu").copies) == 2


def test_rows() -> None:
    measured = case()
    attention, top_k = (result(measured, variant, 2.0) for variant in VARIANTS[2:4])
    assert attention["gigabytes_per_second"] == 2 * 2 * 1000 * 128 * 2 / 2e3
    assert top_k["gigabytes_per_second"] is None


@pytest.mark.parametrize("options", [ATTENTION, TOP_K])
def test_sweeps_run_other_launches(options: argparse.Namespace) -> None:
    swept = case()
    found = list(other_launches(swept, options))
    assert len({name for _, name, _ in found}) == (4 if options.launch else 2)
    for what, _, run in found:
        swept.out.fill_(float("nan"))
        swept.lists[False][1].fill_(-7)
        run(1)
        if what == "attention":
            assert not swept.out.view(8, -1)[6:].isnan().any()
        else:
            assert swept.lists[False][1][0, 6:].tolist() == [200, 200]


def test_heads_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--heads", "9"])
    assert "--heads must be in 1..8, got 9" in capsys.readouterr().err


@pytest.mark.skipif(not has_triton, reason="triton is not installed")
def test_the_plain_read_reads_everything() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.arange(6 * READ_BLOCK, device=device).remainder(7).float()
    out = torch.empty(3, device=device)
    read_all(x, out)
    assert torch.equal(out, x.view(3, -1).sum(1))


@pytest.mark.cuda
def test_measures_on_a_gpu(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--heads", "1", "--tokens", "8192", "--output", str(tmp_path), "--profile"]
    assert main([*arguments, "--commit", "none"]) == 0
    printed = capsys.readouterr().out
    assert "select_tokens_kernel" in printed
    assert "| 8,192 | 1 |" in printed
