"""The protocol between a benchmark and the processes of the engines."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from perf.bench_decode import Times, contestants, row
from perf.engines import engine_protocol
from perf.engines.engine_protocol import EngineProcess

COUNTING_ENGINE = '''
import sys
sys.path.insert(0, {root!r})
from perf.engines.engine_protocol import serve

class Counting:
    """The next token is the sum of all."""
    versions = {{"version": "1"}}
    def __init__(self, model, *, start):
        self.start = start
    def prefill(self, tokens):
        print("libraries print to stdout")
        self.total = self.start + sum(tokens)
    def step(self, token):
        self.total += token
        return self.total

serve(Counting)
'''


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineProcess:
    source = textwrap.dedent(COUNTING_ENGINE.format(root=str(engine_protocol.ROOT)))
    (tmp_path / "counting.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(engine_protocol, "ROOT", tmp_path)
    return EngineProcess("counting", "model", {"start": 0})


def test_prefill_and_decode(counting: EngineProcess) -> None:
    with counting as engine:
        assert engine.description == {"version": "1", "start": 0}
        assert engine.prefill([1, 2, 3]) > 0
        seconds, argmax = engine.decode([10, 20])
        assert argmax == [16, 36]
        assert len(seconds) == 2
        assert min(seconds) > 0
        engine.prefill([5])
        assert engine.decode([1])[1] == [6]


def test_an_engine_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="no_such_engine ended with exit code 1"):
        EngineProcess("no_such_engine", "model", {})


def test_rows_are_medians_over_steps() -> None:
    reference = Times([2.0], step_seconds=[0.1] * 4, argmax=[1, 2, 3, 4])
    times = Times([1.0, 4.0, 5.0], step_seconds=[0.05, 0.04, 0.06, 0.05], argmax=[1, 2, 3, 5])
    line = row("ours", 512, times, reference)
    assert line["prefill_tokens_per_second"] == 128
    assert line["decode_tokens_per_second"] == pytest.approx(20)
    assert line["same_next_token_as_transformers"] == 0.75
    assert line["step_ms"] == pytest.approx(np.median(times.step_seconds) * 1e3)


def test_every_contestant_is_a_module_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perf.bench_decode.resolve_folder", lambda name: Path("folder"))
    monkeypatch.setattr("perf.bench_decode.embedded_gguf", lambda: Path("model.gguf"))
    chosen = contestants(threads=2)
    assert len({contestant.name for contestant in chosen}) == len(chosen)
    for contestant in chosen:
        path = contestant.module.replace(".", "/") + ".py"
        assert (engine_protocol.ROOT / path).is_file()
