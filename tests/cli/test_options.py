"""Strings of the command line become values, or usage errors; an option has one spelling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from offload.cli import app
from offload.cli.bench.options import option_values, policy_grid
from offload.cli.options import comma_separated, counts, key_values, memory_budgets, policy_options
from offload.policies import ExactTopK


def test_policy_options_become_numbers_booleans_and_text() -> None:
    pairs = ["budget_tokens=512", "share=0.5", "exact=true", "roles=heads.json", "name=None"]
    assert policy_options(pairs) == {
        "budget_tokens": 512,
        "share": 0.5,
        "exact": True,
        "roles": "heads.json",
        "name": "None",
    }


def test_memory_budgets_have_device_indices_and_sizes() -> None:
    assert memory_budgets(["0=20GiB", "cpu=1024"]) == {0: "20GiB", "cpu": 1024}
    assert memory_budgets([]) is None


@pytest.mark.parametrize("pair", ["cpu", "=8GiB", "cpu=", ""])
def test_pairs_without_key_or_value_are_refused(pair: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected key=value"):
        key_values([pair], option="--max-memory")


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'cpu' is given twice"):
        memory_budgets(["cpu=1GiB", "cpu=2GiB"])


def test_comma_separated_names() -> None:
    names = ("dense", "topk")
    assert comma_separated(" topk,dense", option="--kernel", available=names) == ["topk", "dense"]
    with pytest.raises(typer.BadParameter, match="unknown 'tpok'; available: dense, topk"):
        comma_separated("tpok", option="--kernel", available=names)
    with pytest.raises(typer.BadParameter, match="give one of"):
        comma_separated(",", option="--kernel", available=names)


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1,,2", "1.5"])
def test_counts_refuses(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="integers of at least 1"):
        counts(text, option="--threads")


def test_counts() -> None:
    assert counts("1,2", option="--threads") == [1, 2]


def test_grid() -> None:
    options = option_values(["exact_topk.sink_tokens=2,4", "dense_layers=1"], option="--option")
    assert options == {"exact_topk.sink_tokens": [2, 4], "dense_layers": [1]}
    quoted = option_values(["tidal_decode.select_layers='2,13',5"], option="--option")
    assert quoted == {"tidal_decode.select_layers": ["2,13", 5]}
    policies = policy_grid(["full", "exact_topk"], [100, 200], options, option="--option")
    assert policies[0].name == "full"
    assert policies[1:] == [
        ExactTopK(budget_tokens=budget, sink_tokens=sinks, dense_layers=1)
        for budget in (100, 200)
        for sinks in (2, 4)
    ]
    with pytest.raises(typer.BadParameter, match="no option 'depth'"):
        policy_grid(["full"], [100], {"depth": [1]}, option="--option")


# calibrate's policy is whose heads or layers it chooses: it has no options.
WITH_POLICY = {
    *("generate", "plan", "serve"),
    *(f"bench {x}" for x in ("decode", "latency")),
    *(f"eval {x}" for x in ("perplexity", "ruler")),
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
    if not name.startswith("sessions ") and name != "download"
}


def _options(name: str) -> list[Any]:
    return [p for p in COMMANDS[name].params if p.param_type_name == "option" and not p.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_its_one_spelling(name: str) -> None:
    spellings = [spelling for option in _options(name) for spelling in option.opts]
    has_cpu = name != "env"
    has_context = has_cpu and name != "serve"  # its prompts and answers have lengths
    assert ("--context" in spellings) == has_context
    assert ("--threads" in spellings) == has_cpu
    assert ("--option" in spellings) == (name in WITH_POLICY)
    with_budget = WITH_POLICY | {"calibrate", "train-heads"}
    assert ("--budget-tokens" in spellings) == (name in with_budget)
    assert ("--policy" in spellings) == (name in WITH_POLICY or name == "calibrate")
    assert ("--json" in spellings) == (name != "serve")
    arguments = [p.name for p in COMMANDS[name].params if p.param_type_name == "argument"]
    assert arguments == ([] if name in ("env", "bench latency") else ["model"])
