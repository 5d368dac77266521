"""`perf.bench_prefill` at a tiny shape on the CPU."""

from __future__ import annotations

import pytest

from perf.bench_prefill import main

TINY = ["--shape", "tiny", "--device", "cpu", "--tokens", "300", "--slice-tokens", "128"]


def test_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--layers", "2", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("==")] == [
        "== attention",
        "== layers",
        "== index",
    ]
    for name in ("slices, as chosen", "whole, public function"):
        (line,) = (line for line in lines if line.startswith(name))
        assert float(line.rsplit(" ", 1)[1]) < 1e-2
    assert any(line.startswith("transformers") and "ms of 4" in line for line in lines)
    assert any("1,200 tokens" in line for line in lines)


def test_an_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "attenton"])
    assert "available: attention, layers, index" in capsys.readouterr().err
