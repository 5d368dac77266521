"""What the command says about itself, and how fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload import __version__
from offload.cli import app
from offload.cli.bench.options import DTYPE_NAMES, LAYER_SHAPE_NAMES
from offload.policies.registry import policy_names

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], ["generate", "plan", "env", "bench", "--version", "offload generate --demo"]),
        (["generate"], ["--policy", "--needle", "--max-memory", "offload generate --demo", "| jq"]),
        (["plan"], ["--profile", "--remeasure", "--budget-tokens", "--json", "offload plan"]),
        (["env"], ["OFFLOAD_ISA", "OFFLOAD_CACHE", "--json"]),
        (["bench"], ["decode", "latency", "quality"]),
        (["eval"], ["ruler", "needle", "structured", "perplexity"]),
        (["inspect"], ["heads"]),
        (["train-heads"], ["--target-heads", "--method", "--resume", "offload train-heads"]),
        (["roles"], ["import"]),
        (["inspect", "heads"], ["--text", "--context", "--budget-tokens", "--json", "--picture"]),
    ],
    ids=lambda value: " ".join(value) or "offload",
)
def test_help(command: list[str], taught: list[str]) -> None:
    for flag in ("--help", "-h"):
        result = runner.invoke(app, [*command, flag])
        assert result.exit_code == 0
        for text in taught:
            assert text in result.stdout


def test_help_names_every_policy() -> None:
    result = runner.invoke(app, ["generate", "--help"])
    for policy in policy_names():
        assert policy in result.stdout


def test_no_arguments_show_the_help() -> None:
    assert "Usage: offload" in runner.invoke(app, []).output


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "plan", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "Usage: offload plan" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gen"], "'gen'. Did you mean 'generate'?"),
        (["genrate"], "'genrate'. Did you mean 'generate'?"),
        (["bench", "lat"], "'lat'. Did you mean 'latency'?"),
        (["eval", "ppl"], "'ppl'. Available: ruler, needle, structured, perplexity"),
    ],
)
def test_an_unknown_command_names_the_near_one(arguments: list[str], said: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert f"No such command {said}" in result.stderr


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"offload {__version__}\n"


def test_names_that_bench_offers_are_those_of_the_benchmark() -> None:
    from offload.bench.latency.run import SHAPES
    from offload.models.dtypes import DTYPES

    assert tuple(SHAPES) == LAYER_SHAPE_NAMES
    assert tuple(DTYPES) == DTYPE_NAMES


def test_the_default_model_is_the_embedded_one() -> None:
    from offload.cli.options import DEFAULT_MODEL
    from offload.loading.embedded_package import EMBEDDED_MODEL

    assert DEFAULT_MODEL == EMBEDDED_MODEL
