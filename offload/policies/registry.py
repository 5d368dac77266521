"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from offload.selection.policy import Policy

_CLASSES = {
    "auto": "Auto",
    "exact_topk": "ExactTopK",
    "full": "Full",
    "hard_kv": "HardKV",
    "lychee_cluster": "LycheeCluster",
    "lfps": "LFPS",
    "lychee_decode": "LycheeDecode",
    "per_head": "PerHead",
    "quest": "Quest",
    "sketch": "Sketch",
    "streaming_llm": "StreamingLLM",
    "tidal_decode": "TidalDecode",
    "union": "Union",
}


def policy_class(class_name: str) -> Any:
    """The class of that name, imported when it is asked for.

    Raises:
        AttributeError: no policy has it.
    """
    for name, of_policy in _CLASSES.items():
        if of_policy == class_name:
            return getattr(import_module(f"offload.policies.{name}"), class_name)
    raise AttributeError(f"module 'offload.policies' has no attribute {class_name!r}")


def available_policies() -> list[str]:
    """Names of the policies that decode, sorted. "auto" comes to one of them."""
    return sorted(name for name in _CLASSES if name != "auto")


def policy_names() -> list[str]:
    """What `make_policy` takes: "auto", and the names of all policies."""
    return ["auto", *available_policies()]


def policy_named(name: str) -> type[Policy]:
    """The class of the policy of that name.

    Raises:
        ValueError: there is none; lists what exists.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown policy {name!r}; available: {', '.join(policy_names())}")
    of_name: type[Policy] = policy_class(_CLASSES[name])
    return of_name


def options_of(own: Iterable[str], may_be: Callable[[type[Policy]], bool]) -> list[str]:
    """`own`, and the options of all policies that a part of a policy may be."""
    policies = map(policy_named, available_policies())
    others = (name for policy in policies if may_be(policy) for name in policy.option_names())
    return list(dict.fromkeys([*own, *others]))


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """The policy of that name with the given options; a Policy object is returned as it is.

    Raises:
        ValueError: unknown name (lists what exists), unknown option, or an option out of range.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} given beside a policy object {policy}")
        return policy
    if not isinstance(policy, str):
        raise ValueError(
            "policy must be a name or a policy object, such as LFPS(budget_tokens=512), got "
            f"{policy!r}"
        )
    cls = policy_named(policy)
    unknown = sorted(set(options) - set(cls.option_names()))
    if unknown:
        known = ", ".join(cls.option_names()) or "none"
        raise ValueError(f"policy {policy!r} has no option {unknown[0]!r}; its options: {known}")
    return cls.from_options(**options)
