"""The default: a policy that is chosen when a model is opened, by what the machine has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offload.policies.base import SparsePolicy
from offload.selection.policy import Policy

# Every policy that auto may come to takes so many: lychee_cluster's sinks and recent window.
_LEAST_TOKENS = 80


@dataclass(frozen=True)
class Auto(Policy):
    """Exact attention while nothing else is faster, else what a table of measured losses says;
    `offload.runtime.auto_policy` has the rule.

    Args:
        budget_tokens: of the policy that it comes to, if that one selects.

    Raises:
        ValueError: as of any policy that selects, or less than one of them takes.
    """

    name: ClassVar[str] = "auto"
    selects: ClassVar[bool] = False

    budget_tokens: int = 1024

    def __post_init__(self) -> None:
        budget = self.budget_tokens
        if isinstance(budget, int) and not isinstance(budget, bool) and budget < _LEAST_TOKENS:
            raise ValueError(
                f"budget_tokens={budget} is too few for what 'auto' may come to; give at least "
                f"{_LEAST_TOKENS}"
            )
        SparsePolicy(budget_tokens=budget)
