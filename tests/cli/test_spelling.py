"""Each option has one spelling in all commands, and those it had before are still taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from offload.cli import app
from offload.cli.spelling import OLD_SPELLINGS

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})

# The spellings that commands had before, by the one that all have now.
OLD = {
    "--context": {
        "calibrate": ["--tokens"],
        "bench decode": ["--contexts", "-d"],
        "bench latency": ["--n-depth", "-d"],
        "bench pipeline": ["--kv-len"],
        "eval needle": ["--lengths"],
        "eval perplexity": ["--lengths"],
        "eval ruler": ["--lengths"],
        "eval structured": ["--lengths"],
        "inspect heads": [],
        "generate": [],
        "train-heads": [],
        "plan": [],
    },
    "--threads": {
        "calibrate": ["--num-threads"],
        "generate": ["--num-threads"],
        "serve": ["--num-threads"],
    },
    "--option": {
        "bench serve": ["--policy-option"],
        "generate": ["--policy-option"],
        "plan": ["--policy-option"],
        "serve": ["--policy-option"],
    },
}
VALUES = {"--context": "700", "--threads": "1", "--option": "lfps.alpha=0.5"}
# calibrate's policy is whose heads or layers it chooses: it has no options.
WITH_POLICY = {
    *("generate", "plan", "serve"),
    *(f"bench {x}" for x in ("decode", "latency", "pipeline")),
    "bench serve",
    *(f"eval {x}" for x in ("needle", "perplexity", "ruler", "structured")),
}
OLD_MODEL = ("bench decode", "bench latency")


def _commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name.strip(), command
        return
    for child, of_child in command.commands.items():
        yield from _commands(of_child, f"{name} {child}")


COMMANDS = {  # of files, not of models
    name: command
    for name, command in _commands(typer.main.get_command(app))
    if not name.startswith(("sessions ", "roles ")) and name != "download"
}


def _options(name: str) -> list[Any]:
    return [p for p in COMMANDS[name].params if p.param_type_name == "option" and not p.hidden]


def _parsed(name: str, *arguments: str) -> dict[str, Any]:
    required = {"plan": ["tiny"], "calibrate": ["tiny", "-o", "roles.json"]}.get(name, [])
    command = COMMANDS[name]
    return dict(command.make_context(name, [*required, *arguments]).params)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_its_one_spelling(name: str) -> None:
    """In the help, too."""
    spellings = [spelling for option in _options(name) for spelling in option.opts]
    shown = runner.invoke(app, [*name.split(), "--help"]).stdout.split()
    for old in (*OLD_SPELLINGS, "--model"):
        assert old not in spellings
        assert old not in shown
    has_cpu = name != "env"
    # Prompts and answers of servers have lengths.
    has_context = has_cpu and name not in ("serve", "bench serve")
    assert ("--context" in spellings) == (name in OLD["--context"]) == has_context
    assert ("--threads" in spellings) == has_cpu
    assert ("--option" in spellings) == (name in WITH_POLICY)
    with_budget = WITH_POLICY | {"calibrate", "inspect heads", "train-heads"}
    assert ("--budget-tokens" in spellings) == (name in with_budget)
    assert ("--policy" in spellings) == (name in WITH_POLICY or name == "calibrate")
    assert ("--json" in spellings) == (name != "serve")
    arguments = [p.name for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert arguments == ([] if name == "env" else ["model"])


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        (name, new, old)
        for new, of in OLD.items()
        for name, all_old in of.items()
        for old in all_old
    ],
)
def test_old_spellings_are_taken(name: str, new: str, old: str) -> None:
    value = VALUES[new]
    expected = _parsed(name, new, value)
    assert expected != _parsed(name)
    assert _parsed(name, old, value) == expected
    if old.startswith("--"):
        assert _parsed(name, f"{old}={value}") == expected
    if new == "--option":  # repeatable, and both in one call
        both = _parsed(name, old, value, new, "a=1")
        assert [value, "a=1"] in [x for x in both.values() if isinstance(x, list)]


def test_an_old_spelling_as_a_value_is_a_value() -> None:
    assert _parsed("generate", "-p", "--num-threads")["prompt"] == "--num-threads"


@pytest.mark.parametrize("name", OLD_MODEL)
def test_the_model_as_an_option(name: str) -> None:
    """It is taken as before, but not beside the argument."""
    assert _parsed(name, "--model", "x")["old_model"] == "x"
    command = [*name.split(), "--model", "no/such/model.gguf"]
    result = runner.invoke(app, command)
    assert result.exit_code == 1, result.output
    assert "no such model folder or GGUF file: no/such/model.gguf" in result.stderr
    result = runner.invoke(app, [*command, "other"])
    assert result.exit_code == 2
    assert "the model is 'other' already" in " ".join(result.stderr.replace("│", " ").split())
