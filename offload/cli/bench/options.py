"""Options, names and policies that the commands of `offload bench` share."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.options import Scalar, key_values, scalar

if TYPE_CHECKING:
    from offload.policies import Policy
    from offload.runtime.config import RuntimeConfig

# offload.bench and offload.models have these, but import torch; tests compare the two.
MODEL_SHAPE_NAMES = (
    "llama-3.1-8b",
    "llama-3.2-1b",
    "qwen3-30b-a3b",
    "gemma-3-12b",
    "gpt-oss-20b",
    "smollm2-135m",
    "tiny",
)
LAYER_SHAPE_NAMES = ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b", "smollm2-135m")
DTYPE_NAMES = ("bfloat16", "float16", "float32")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with the machine.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences that decode together.")]
BudgetTokens = Annotated[int, typer.Option(min=1, help="Tokens that each KV head attends to.")]
DType = Annotated[str, typer.Option(help=f"{', '.join(DTYPE_NAMES)}.")]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="[POLICY.]KEY=VALUES",
        help="An option of one or of all policies; each of several values is measured, such as "
        "lfps.alpha=0.1,0.2. Repeatable.",
    ),
]
ThreadCounts = Annotated[
    str | None,
    typer.Option(
        metavar="COUNTS",
        help=r"Such as 1,2. \[default: 1 and all this process may use]",
    ),
]


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


def resolved_policies(
    policies: Sequence[Policy],
    config: RuntimeConfig,
    model: str | None,
    shape: str,
) -> tuple[list[Policy], str]:
    """The policies, each once, with what `auto` comes to in the place of it, and why, which is
    logged; "" without it.

    Args:
        config: how they run; its policy is not used.
        model: what runs; None: one of this `shape`.
    """
    from offload.loading.checkpoint import check_checkpoint
    from offload.loading.names import resolve_folder
    from offload.loading.planned_model import planned_model
    from offload.policies.auto import Auto
    from offload.runtime.auto_policy import resolved_config, with_resolved_policy

    found, why = [], ""
    for policy in policies:
        if isinstance(policy, Auto):
            asked = replace(config, policy=policy)
            if model is not None:
                checkpoint = check_checkpoint(resolve_folder(model))
                asked, why = with_resolved_policy(checkpoint, asked, None)
            else:
                made = planned_model(shape, str(config.dtype).removeprefix("torch."))
                asked, why = resolved_config(asked, made.shape, made.dtype, made.weight_bytes)
            policy = asked.policy
        found.append(policy)
    return list(dict.fromkeys(found)), why
