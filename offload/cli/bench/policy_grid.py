"""Policies with several budgets and option values, from what a user writes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import typer

from offload.cli.options import Scalar, key_values, scalar

if TYPE_CHECKING:
    from offload.policies import Policy


def option_values(pairs: list[str], *, option: str) -> dict[str, list[Scalar]]:
    """`["lfps.alpha=0.1,0.2"]` -> `{"lfps.alpha": [0.1, 0.2]}`.

    A value that has commas itself stands in quotes: `tidal_decode.select_layers='2,13'`.
    """
    return {
        key: [scalar(value) for value in next(csv.reader([values], quotechar="'"))]
        for key, values in key_values(pairs, option=option).items()
    }


def policy_grid(
    names: Sequence[str], budgets: Sequence[int], options: dict[str, list[Scalar]], *, option: str
) -> list[Policy]:
    """Each policy with each budget and each combination of its option values.

    Args:
        options: values by "policy.option", or by "option" for all policies that have it.
        option: how the command calls them, for messages.

    Raises:
        typer.BadParameter: an option that none of the policies has.
        ValueError: a value out of range, such as a budget below sinks + recent tokens.
    """
    from offload.policies.registry import make_policy

    classes = {name: type(make_policy(name)) for name in names}
    for key in options:
        policy, _, name = key.rpartition(".")
        if policy and policy not in names:
            raise typer.BadParameter(
                f"{key}: {policy!r} is not among the policies {', '.join(names)}",
                param_hint=option,
            )
        of = [policy] if policy else list(names)
        if not any(name in classes[each].option_names() for each in of):
            available = sorted({o for each in of for o in classes[each].option_names()})
            raise typer.BadParameter(
                f"no option {name!r} in {', '.join(of)}; available: {', '.join(available)}",
                param_hint=option,
            )
    policies = []
    for policy, cls in classes.items():
        known = cls.option_names()
        values: dict[str, list[Scalar]] = {}
        if "budget_tokens" in known:
            values["budget_tokens"] = list(budgets)
        for key, choices in options.items():
            owner, _, name = key.rpartition(".")
            if owner in ("", policy) and name in known:
                values[name] = choices
        for combination in product(*values.values()):
            policies.append(make_policy(policy, **dict(zip(values, combination, strict=True))))
    return policies


def policy_with_budget(name: str, budget_tokens: int, options: Mapping[str, Any]) -> Policy:
    """One policy; `budget_tokens` unless it has none, or `options` say otherwise."""
    from offload.policies.registry import make_policy

    has_budget = "budget_tokens" in type(make_policy(name)).option_names()
    given = {"budget_tokens": budget_tokens} if has_budget else {}
    return make_policy(name, **{**given, **options})
