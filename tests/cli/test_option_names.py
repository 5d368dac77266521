"""Each option has one spelling in all commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from offload.cli import app

# calibrate's policy is whose heads or layers it chooses: it has no options.
WITH_POLICY = {
    *("generate", "plan", "serve"),
    *(f"bench {x}" for x in ("decode", "latency", "serve")),
    *(f"eval {x}" for x in ("needle", "perplexity", "ruler", "structured")),
}


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


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_its_one_spelling(name: str) -> None:
    spellings = [spelling for option in _options(name) for spelling in option.opts]
    has_cpu = name != "env"
    # Prompts and answers of servers have lengths.
    has_context = has_cpu and name not in ("serve", "bench serve")
    assert ("--context" in spellings) == has_context
    assert ("--threads" in spellings) == has_cpu
    assert ("--option" in spellings) == (name in WITH_POLICY)
    with_budget = WITH_POLICY | {"calibrate", "inspect heads", "train-heads"}
    assert ("--budget-tokens" in spellings) == (name in with_budget)
    assert ("--policy" in spellings) == (name in WITH_POLICY or name == "calibrate")
    assert ("--json" in spellings) == (name != "serve")
    arguments = [p.name for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert arguments == ([] if name in ("env", "bench latency") else ["model"])
