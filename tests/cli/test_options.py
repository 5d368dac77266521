"""Strings of the command line become values, or usage errors."""

from __future__ import annotations

import pytest
import typer

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
