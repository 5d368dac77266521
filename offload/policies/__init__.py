"""Selection policies: which tokens of the host KV store a decode step attends to.

One file per method. Policies are imported when they are asked for, so that `full` never loads
Numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.policies.base import Policy

if TYPE_CHECKING:
    from offload.policies.exact_topk import ExactTopK
    from offload.policies.full import Full
    from offload.policies.lfps import LFPS
    from offload.policies.lychee_cluster import LycheeCluster
    from offload.policies.lychee_decode import LycheeDecode
    from offload.policies.quest import Quest
    from offload.policies.streaming_llm import StreamingLLM
    from offload.policies.tidal_decode import TidalDecode

__all__ = [
    "LFPS",
    "ExactTopK",
    "Full",
    "LycheeCluster",
    "LycheeDecode",
    "Policy",
    "Quest",
    "StreamingLLM",
    "TidalDecode",
    "available_policies",
    "make_policy",
]

_CLASSES = {
    "exact_topk": "ExactTopK",
    "full": "Full",
    "lychee_cluster": "LycheeCluster",
    "lfps": "LFPS",
    "lychee_decode": "LycheeDecode",
    "quest": "Quest",
    "streaming_llm": "StreamingLLM",
    "tidal_decode": "TidalDecode",
}


def available_policies() -> list[str]:
    """Names that `make_policy` takes, sorted."""
    return sorted(_CLASSES)


def make_policy(policy: str | Policy, **options: Any) -> Policy:
    """The policy of that name with the given options; a Policy object is returned as it is.

    Raises:
        ValueError: unknown name (lists what exists), unknown option, or an option out of range.
    """
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options {sorted(options)} given beside a policy object {policy}")
        return policy
    if policy not in _CLASSES:
        names = ", ".join(available_policies())
        raise ValueError(f"unknown policy {policy!r}; available: {names}")
    cls: type[Policy] = getattr(import_module(f"{__name__}.{policy}"), _CLASSES[policy])
    unknown = sorted(set(options) - set(cls.option_names()))
    if unknown:
        known = ", ".join(cls.option_names()) or "none"
        raise ValueError(f"policy {policy!r} has no option {unknown[0]!r}; its options: {known}")
    return cls.from_options(**options)


def __getattr__(name: str) -> Any:
    for module, cls in _CLASSES.items():
        if name == cls:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
