"""What the command says about itself, and how fast."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from offload import __version__
from offload.cli import app
from offload.cli.bench.options import DTYPE_NAMES, LAYER_SHAPE_NAMES
from offload.policies.registry import policy_names

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
ROOT = Path(__file__).parents[2]


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, (*path, name))


COMMANDS = dict(_commands(get_command(app)))


def _examples(text: str) -> list[list[str]]:
    """The words of each command that is shown, as a shell would get them."""
    shown = re.findall(r"(?:^    .*\n?)+", re.split("\n(Argu|Opt)", text)[0], re.MULTILINE)
    return [shlex.split(example.replace("\\\n", "")) for example in shown]


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], ["generate", "plan", "env", "bench", "--version", "offload generate --demo"]),
        (["generate"], ["--policy", "--needle", "--max-memory", "offload generate --demo", "| jq"]),
        (["plan"], ["--profile", "--remeasure", "--budget-tokens", "--json", "offload plan"]),
        (["env"], ["OFFLOAD_ISA", "OFFLOAD_CACHE", "--json"]),
        (["bench"], ["decode", "latency"]),
        (["eval"], ["ruler", "perplexity"]),
        (["eval", "ruler"], ["--policy", "--resume", "Examples", "offload eval ruler"]),
        (["bench", "decode"], ["--context", "--engines", "transformers-offloaded"]),
        (["train-heads"], ["--target-heads", "--resume", "offload train-heads"]),
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
        (["eval", "ppl"], "'ppl'. Available: ruler, perplexity"),
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


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: "-".join(path) or "offload")
def test_names_are_whole_in_any_width(path: tuple[str, ...], columns: int) -> None:
    shown = runner.invoke(app, [*path, "--help"], env={"COLUMNS": str(columns)}).stdout
    command = COMMANDS[path]
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            for name in (*param.opts, *param.secondary_opts):
                assert re.search(rf"^  (.*[ ,])?{name}\b", shown, re.MULTILINE), name
    for name, inner in getattr(command, "commands", {}).items():
        assert inner.hidden or re.search(rf"^  {name}  ", shown, re.MULTILINE)
    assert not re.search("<[a-z ]+>", shown.replace("<->", ""))
    assert max(map(len, shown.splitlines())) <= columns
    assert not re.search(r" $", shown, re.MULTILINE)


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: "-".join(path) or "offload")
def test_examples_can_be_copied(path: tuple[str, ...], columns: int) -> None:
    """They break behind backslashes alone, and name commands and options that there are."""
    shown = runner.invoke(app, [*path, "--help"], env={"COLUMNS": str(columns)}).stdout
    written = re.split(r"\n\n", inspect.cleandoc(COMMANDS[path].help or ""))
    examples = [shlex.split(x.replace("\n", " ")) for x in written if x.startswith("    ")]
    assert _examples(shown) == examples
    for words in examples:
        words = words[words.index("offload") + 1 :]
        words = words[: next((i for i, x in enumerate(words) if x in ("|", ">")), None)]
        named = max((x for x in COMMANDS if tuple(words[: len(x)]) == x), key=len)
        options = {name for param in COMMANDS[named].params for name in param.opts}
        assert {x for x in words if re.match("--?[a-z]", x)} <= options


def test_flags_have_no_value_and_short_names_come_first() -> None:
    shown = runner.invoke(app, ["generate", "--help"], env={"COLUMNS": "80"}).stdout
    for line in ("--demo  ", "-p, --prompt TEXT  ", "--chat / --no-chat  ", "--budget-tokens N  "):
        assert f"\n  {line}" in shown
    assert "\n  --host-bytes-per-sequence SIZE\n" in shown
