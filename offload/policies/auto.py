"""The default: a policy that is chosen when a model is opened, by what the machine has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offload.policies.base import Policy, SparsePolicy


@dataclass(frozen=True)
class Auto(Policy):
    """Exact attention while nothing else is faster, else the fastest policy that loses nothing in
    docs/results.md; `offload.runtime.auto_policy` says which.

    Args:
        budget_tokens: of the policy that it comes to, if that one selects.

    Raises:
        ValueError: as of any policy that selects.
    """

    name: ClassVar[str] = "auto"
    selects: ClassVar[bool] = False

    budget_tokens: int = 1024

    def __post_init__(self) -> None:
        SparsePolicy(budget_tokens=self.budget_tokens)
