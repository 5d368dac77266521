"""The protocol between a benchmark and the processes of the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from perf import bench_decode
from perf.bench_decode import Times, contestants, row
from perf.engines import engine_protocol, forced_isa
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
    monkeypatch.setattr("perf.bench_decode.converted_folder", lambda *_: Path("converted"))
    monkeypatch.setattr("perf.bench_decode.embedded_gguf", lambda: Path("model.gguf"))
    chosen = contestants(threads=2)
    assert len({contestant.name for contestant in chosen}) == len(chosen)
    assert "offload full, float32" in {contestant.name for contestant in chosen}
    for contestant in chosen:
        path = contestant.module.replace(".", "/") + ".py"
        assert (engine_protocol.ROOT / path).is_file()


def test_the_peers_of_a_forced_isa_have_an_environment_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_decode, "resolve_folder", lambda name: Path("folder"))
    monkeypatch.setattr(bench_decode, "converted_folder", lambda *_: Path("converted"))
    monkeypatch.setattr(bench_decode, "embedded_gguf", lambda: Path("model.gguf"))
    for isa, folder in ((None, ".venv-peers"), ("avx2", ".venv-peers-avx2")):
        pythons = {c.python for c in contestants(2, isa) if c.name.startswith("llama.cpp")}
        assert pythons == {engine_protocol.ROOT / folder / "bin" / "python"}
        command = ["make", "--dry-run", "--always-make", "peers", f"PEERS_ISA={isa or ''}"]
        made = subprocess.run(command, cwd=engine_protocol.ROOT, capture_output=True, text=True)
        assert f" -m venv {folder}\n" in made.stdout, made.stderr


def test_an_isa_without_compiler_options_is_refused() -> None:
    command = ["make", "--dry-run", "peers", "PEERS_ISA=sse9"]
    made = subprocess.run(command, cwd=engine_protocol.ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert "PEERS_ISA=sse9 is unknown; known: avx2" in made.stderr


TELLING_BENCHMARK = '''
import os, sys
from pathlib import Path
from perf import bench_decode
from perf.engines.engine_protocol import serve
from perf.engines.forced_isa import VARIABLES

class Telling:
    """An engine that tells the variables of its process."""
    versions = {name: os.environ.get(name) for name in VARIABLES["avx2"]}
    def __init__(self, model):
        pass
    def prefill(self, tokens):
        pass
    def step(self, token):
        return token

if len(sys.argv) > 1 and sys.argv[1] == "model":
    serve(Telling)
else:
    class Words:
        def __call__(self, text):
            return {"input_ids": list(range(600))}
    bench_decode.load_tokenizer = lambda name: Words()
    bench_decode.contestants = lambda threads, isa: [
        bench_decode.Contestant(bench_decode.REFERENCE, "telling", "model", {})
    ]
    bench_decode.main()
'''


def test_a_forced_isa_reaches_every_engine_and_the_results(tmp_path: Path) -> None:
    if "avx2" not in forced_isa.available_isas():
        pytest.skip("this CPU has no avx2")
    (tmp_path / "telling.py").write_text(TELLING_BENCHMARK, encoding="utf-8")
    paths = f"{engine_protocol.ROOT}{os.pathsep}{tmp_path}"
    command = [sys.executable, "-m", "telling", "--isa", "avx2", "--contexts", "512"]
    command += ["--rounds", "1", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": paths}
    subprocess.run(command, env=environment, check=True, timeout=120)
    result = json.loads((tmp_path / "decode-avx2.json").read_text("utf-8"))
    assert result["machine"]["isa"] == result["machine"]["isa_forced"] == "avx2"
    assert result["settings"]["isa"] == "avx2"
    assert result["settings"]["engines"] == {"transformers": forced_isa.VARIABLES["avx2"]}


def test_an_isa_that_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced_isa, "available_isas", lambda: ["scalar"])
    with pytest.raises(ValueError, match="this CPU lacks avx2; it has scalar"):
        forced_isa.force_isa("avx2")
