"""What most policies begin with: the options that all that select have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from offload.selection.policy import BUDGET_OPTIONS, MAX_ESTIMATE_CLUSTERS, Policy

__all__ = ["Policy", "SparsePolicy", "in_every_layer"]


@dataclass(frozen=True)
class SparsePolicy(Policy):
    """Options that every selecting policy shares.

    Args:
        budget_tokens: tokens attended per KV head, sinks and recent ones included.
        sink_tokens: first tokens, always attended.
        recent_tokens: last tokens, always attended (the newest one included).
        dense_layers: first layers that attend to everything.
        dense_until: sequences of at most so many tokens attend to all of them; None: budget_tokens.
            At least sinks and recent window. A GPU takes no other number than budget_tokens.
        estimate_clusters: of each KV head, which stand for the tokens that are not chosen
            (`estimate`), up to 255; 0: those are dropped.
    """

    budget_tokens: int = 1024
    sink_tokens: int = 4
    recent_tokens: int = 64
    dense_layers: int = 2
    dense_until: int | None = None
    estimate_clusters: int = 0

    def __post_init__(self) -> None:
        for name in BUDGET_OPTIONS:
            value = getattr(self, name)
            if name == "dense_until" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an int, got {value!r}")
            if value >= 2**63:  # kernels have 64 bits for it
                raise ValueError(f"{name} must be less than 2**63, got {value}")
        if self.sink_tokens < 0 or self.dense_layers < 0:
            raise ValueError(
                "sink_tokens and dense_layers must not be negative,"
                f" got {self.sink_tokens} and {self.dense_layers}"
            )
        if not 0 <= self.estimate_clusters <= MAX_ESTIMATE_CLUSTERS:
            raise ValueError(
                f"estimate_clusters must be in [0, {MAX_ESTIMATE_CLUSTERS}], got "
                f"{self.estimate_clusters}"
            )
        if self.recent_tokens < 1:
            raise ValueError(
                f"recent_tokens must be at least 1 (the newest token), got {self.recent_tokens}"
            )
        if self.budget_tokens < self.sink_tokens + self.recent_tokens:
            raise ValueError(
                f"budget_tokens={self.budget_tokens} cannot hold sink_tokens={self.sink_tokens}"
                f" + recent_tokens={self.recent_tokens}; raise budget_tokens or lower the others"
            )
        if self.dense_tokens < self.sink_tokens + self.recent_tokens:
            raise ValueError(
                f"dense_until={self.dense_until} cannot hold sink_tokens={self.sink_tokens}"
                f" + recent_tokens={self.recent_tokens}; raise dense_until or lower the others"
            )


def in_every_layer(policy: Policy) -> Policy:
    """The same without dense first layers, for benches."""
    changed: dict[str, Any] = {}
    for option in fields(policy):
        value = getattr(policy, option.name)
        if option.name == "dense_layers":
            changed[option.name] = 0
        elif isinstance(value, Policy):
            changed[option.name] = in_every_layer(value)
    return replace(policy, **changed)
