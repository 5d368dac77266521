"""`offload bench latency` on small caches."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from offload.bench.latency.run import SHAPES
from offload.cli.bench.latency import latency
from offload.cli.bench.options import DTYPE_NAMES, LAYER_SHAPE_NAMES
from offload.measuring.machine.other_load import LoadWatch, OtherLoad, load_warnings
from offload.models.dtypes import DTYPES
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


def test_table() -> None:
    result = runner.invoke(app, SMALL)
    assert result.exit_code == 0, result.output
    assert "smollm2-135m, bfloat16, batch 1, budget 256 tokens" in result.stdout
    assert "1 thread: memory" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[1] for line in lines if line and line[0] == "quest"] == ["600", "1,100"]


def test_the_table_fits_80_columns() -> None:
    """Seven columns; all of them, however narrow the terminal is, with --wide."""
    few = [*SMALL, "--context", "600"]
    result = runner.invoke(app, few, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = _table(result.stdout)
    assert max(map(len, lines)) <= 80
    shown = "policy context µs over full over top-k memory mass"
    assert " ".join(lines[0].split()) == shown
    assert [line.split()[0] for line in lines[1:]] == ["full", "exact_topk", "quest"]
    assert "…" not in "".join(lines)
    lines = _table(runner.invoke(app, [*few, "--wide"], env={"COLUMNS": "80"}).stdout)
    names = "policy context µs over full over top-k predict score select attend update other MB "
    assert lines[0].split() == (names + "GB/s memory scored overlap mass growth").split()
    assert "…" not in "".join(lines)


def _table(shown: str) -> list[str]:
    """The lines of the first table, its header first."""
    lines = [line.rstrip() for line in shown.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("policy"))
    return lines[first : lines.index("", first)]


def test_threads() -> None:
    if available_cpus() < 2:
        pytest.skip("this process may use one CPU only")
    result = runner.invoke(app, [*SMALL, "--threads", "1,2"])
    assert result.exit_code == 0, result.output
    assert "2 threads: memory" in result.stdout
    assert "vs 1 thread" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--shape", "gpt-2"], 2, "unknown 'gpt-2'; available: llama-3.1-8b"),
        (["--policy", "qest"], 2, "unknown 'qest'; available: exact_topk, full"),
        (["--dtype", "int8"], 2, "unknown 'int8'; available: bfloat16"),
        (["--context", "4096,x"], 2, "integers of at least 1"),
        (["--option", "lfps.alpha"], 2, "expected key=value"),
        (["--option", "alpha=1"], 2, "no option 'alpha' in"),
        (["--option", "streaming_llm.sink_tokens=4"], 2, "'streaming_llm' is not among"),
        (["--option", "quest.pages=4"], 2, "no option 'pages' in quest"),
        (["--option", "quest.sink_tokens=300"], 1, "budget_tokens=256 cannot hold"),
        (["--threads", "4096"], 1, "--threads 4096: this process may use"),
        (["--context", "200"], 1, "a depth of 200 tokens is within the budget of 256 tokens"),
        (["--option", "quest.dense_until=900"], 1, "dense_until=900 of quest, where it"),
        (["--context", "900000000"], 1, "lower the batch size or the depth"),
    ],
)
def test_bad_options(arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_names_are_those_of_the_library() -> None:
    assert tuple(SHAPES) == LAYER_SHAPE_NAMES
    assert tuple(DTYPES) == DTYPE_NAMES


def test_a_busy_machine_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.bench.latency.run.load_warnings", load_warnings)
    monkeypatch.setattr(LoadWatch, "seen", lambda self: OtherLoad(0.95, 0.0))
    result = runner.invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 0, result.output
    said = "the machine was busy: other programs took 95% of its CPUs; times are too long"
    assert f"warning: {said}" in " ".join(result.stderr.split())
    assert any(line.startswith(said) for line in json.loads(result.stdout)["warnings"])


def test_the_footer_is_short_lines() -> None:
    result = runner.invoke(app, [*SMALL, "--context", "600", "--wide"], env={"COLUMNS": "80"})
    footer = result.stdout[result.stdout.index("\nµs: ") :].splitlines()
    assert max(map(len, footer)) <= 76
    for begins in ("µs: ", "over full, ", "memory: ", "mass: ", "scored: ", "growth: "):
        assert sum(line.startswith(begins) for line in footer) == 1
