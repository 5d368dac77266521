"""`offload bench latency` on small caches."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from offload.cli.bench.latency import latency
from offload.measuring.machine.other_load import LoadWatch, OtherLoad, load_warnings
from offload.system.memory import available_cpus

app = typer.Typer()
app.command()(latency)


@app.callback()
def bench() -> None:
    """A group, as `offload bench` is."""


runner = CliRunner(env={"COLUMNS": "240", "TERM": "dumb"})
SMALL = ["latency", "--shape", "smollm2-135m", "--context", "600,1100", "--budget-tokens", "256"]
SMALL += ["-r", "2", "--threads", "1", "--policy", "full,exact_topk,quest"]


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick outgrows the CPU's caches; a test need not."""
    monkeypatch.setattr("offload.bench.latency.yardstick.last_level_cache_bytes", lambda: 0)
    monkeypatch.setattr("offload.bench.latency.yardstick._MIN_BYTES", 2**21)
    monkeypatch.setattr("offload.bench.latency.run.load_warnings", lambda load, spread: [])


def test_json() -> None:
    arguments = [*SMALL, "--option", "exact_topk.sink_tokens=8", "--json", "--batch-size", "2"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["shape"] == "smollm2-135m"
    assert document["machine"]["isa"]
    assert document["layers"] == {"600": 4, "1100": 4}
    rows = {(row["policy"], row["kv_len"]): row for row in document["rows"]}
    assert list(rows) == [(p, d) for d in (600, 1100) for p in ("full", "exact_topk", "quest")]
    assert rows["exact_topk", 1100]["options"]["sink_tokens"] == 8
    assert rows["exact_topk", 1100]["attended_tokens"] == 256
    assert rows["full", 1100]["growth"] > 0
    assert rows["quest", 600]["speedup_over_full"] > 0
    assert rows["quest", 600]["batch_size"] == 2


@pytest.mark.parametrize("threads", [["1"], ["1", "2"][: available_cpus()]])
def test_tables_fit_80_columns(threads: list[str]) -> None:
    arguments = [*SMALL, "--threads", ",".join(threads)]
    result = runner.invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "smollm2-135m, bfloat16, batch 1, budget 256 tokens, " + lines[0].split()[-1]
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    lasts = {"1": "", "2": " vs 1 thread"}
    headers = [" ".join(line.split()) for line in lines if line.startswith("policy")]
    shown = "policy context µs over full over top-k memory"
    assert headers == [shown + lasts[count] for count in threads]
    cells = [line.split() for line in lines]
    assert [x[1] for x in cells if x and x[0] == "quest"] == ["600", "1,100"] * len(threads)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "gpt-2"], 2, "unknown 'gpt-2'; available: llama-3.1-8b"),
        (["--policy", "qest"], 2, "unknown 'qest'; available: exact_topk, full"),
        (["--option", "quest.pages=4"], 2, "no option 'pages' in quest"),
        (["--option", "quest.sink_tokens=300"], 1, "budget_tokens=256 cannot hold"),
        (["--threads", "4096"], 1, "--threads 4096: this process may use"),
        (["--context", "200"], 1, "a depth of 200 tokens is within the budget of 256 tokens"),
        (["--option", "quest.dense_until=900"], 1, "dense_until=900 of quest, where it"),
        (["--context", "900000000"], 1, "lower --context or the batch size"),
    ],
)
def test_bad_options(arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_busy_machine_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.bench.latency.run.load_warnings", load_warnings)
    monkeypatch.setattr(LoadWatch, "seen", lambda self: OtherLoad(0.95, 0.0))
    result = runner.invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 0, result.output
    said = "the machine was busy: other programs took 95% of its CPUs; times are too long"
    assert f"warning: {said}" in " ".join(result.stderr.split())
    assert any(line.startswith(said) for line in json.loads(result.stdout)["warnings"])
