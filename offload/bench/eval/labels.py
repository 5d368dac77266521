"""Policies by short names that tell those of one run apart."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offload.policies import Policy
from offload.policies.registry import make_policy

WINDOWS = ("sink_tokens", "recent_tokens")


def windows_of(name: str, budget_tokens: int) -> dict[str, int]:
    """Sinks and recent window of policy `name`: its defaults, of a small budget a 16th and a
    quarter at most. Without those that are no options of it, and without a recent window that is
    all that the sinks leave.
    """
    usual = make_policy(name)
    most = dict(zip(WINDOWS, (budget_tokens // 16, max(1, budget_tokens // 4)), strict=True))
    if name == "streaming_llm":
        del most["recent_tokens"]
    options = type(usual).option_names()
    return {key: min(getattr(usual, key), most[key]) for key in most if key in options}


def label_of(policy: Policy) -> str:
    """Name, budget, and the options that are neither the defaults nor `windows_of` the budget."""
    if not policy.selects:
        return policy.name
    changed = _changed(policy, windows_of(policy.name, policy.budget_tokens))
    return " ".join([policy.name, f"{policy.budget_tokens}", *changed])


def policy_label(policy: Policy) -> str:
    """Its name with the options that differ from the defaults, but for the budget."""
    return " ".join([policy.name, *_changed(policy, {})])


def _changed(policy: Policy, windows: dict[str, Any]) -> list[str]:
    usual = policy_options(make_policy(policy.name)) | windows
    if policy.name == "streaming_llm":  # all that the sinks leave
        usual["recent_tokens"] = policy.budget_tokens - policy.sink_tokens
    return [
        f"{key}={value}"
        for key, value in policy_options(policy).items()
        if key != "budget_tokens" and (key not in usual or usual[key] != value)
    ]


def policy_options(policy: Policy) -> dict[str, Any]:
    """All options as JSON can hold them; those of a policy it is made of follow that one's name."""
    options: dict[str, Any] = {}
    for option in fields(policy):
        value = getattr(policy, option.name)
        if isinstance(value, Policy):
            options |= {option.name: value.name, **policy_options(value)}
        else:
            plain = isinstance(value, (bool, int, float, str, list, tuple, type(None)))
            options[option.name] = value if plain else str(value)
    return options
