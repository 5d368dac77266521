"""What the runtime asks of a policy, apart from what it selects and its three other parts.

Sink tokens, the recent window and the first dense layers belong to the runtime: a policy chooses
among tokens [sink_tokens, kv_len - recent_tokens) only. While kv_len <= dense_tokens (budget_tokens
unless `dense_until` says otherwise) every policy is exactly full attention; beyond, it may have to
choose among fewer tokens than the budget has room for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from offload.policies.selection import Selection

if TYPE_CHECKING:
    import numpy.typing as npt

# What a unit does in a layer where its sequence is longer than `dense_tokens`: Role of
# cpp/attention/policy.h.
DENSE = 0  # full attention
RETRIEVE = 1  # full attention, and publishes the policy's selection
SELECT = 2  # attends to the policy's selection and publishes it
REUSE = 3  # attends to what the same unit of a layer above last published in this step

NO_MEMBER = 255  # of `Policy.unit_members`
MAX_ESTIMATE_CLUSTERS = 255
# Options that every selecting policy has, and that are the same for all parts of one.
BUDGET_OPTIONS = (
    *("budget_tokens", "sink_tokens", "recent_tokens"),
    *("dense_layers", "dense_until", "estimate_clusters"),
)


@dataclass(frozen=True)
class Policy(Selection):
    """Base of all policies: a `Selection`, and which units it is for.

    Attributes:
        selects: False means dense attention in every layer.
        shares_selection: units of a layer that RETRIEVE publish one selection, by the sum of their
            importance.
        selection_top_p: a selection by weights ends where it has this share of them.
        selection_mean_tokens: or a smaller one, so that selections have so many tokens on the mean.
    A policy that selects also has the options of `SparsePolicy`, or properties of these names.
    """

    selects: ClassVar[bool] = True
    shares_selection: ClassVar[bool] = False
    selection_top_p: ClassVar[float] = 1.0
    selection_mean_tokens: ClassVar[int | None] = None

    if TYPE_CHECKING:

        @property
        def budget_tokens(self) -> int: ...
        @property
        def sink_tokens(self) -> int: ...
        @property
        def recent_tokens(self) -> int: ...
        @property
        def dense_layers(self) -> int: ...
        @property
        def dense_until(self) -> int | None: ...
        @property
        def estimate_clusters(self) -> int: ...

    def __reduce__(self) -> tuple[Any, ...]:
        """By its options: callbacks of a policy that this is made of cannot be pickled."""
        return type(self), tuple(getattr(self, option.name) for option in fields(self))

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options that `from_options` takes."""
        return [field.name for field in fields(cls)]

    @classmethod
    def from_options(cls, **options: Any) -> Policy:
        """The policy with these options; policies made of others also take those' options."""
        return cls(**options)

    @property
    def dense_tokens(self) -> int:
        """Sequences of at most so many tokens attend to all of them."""
        return self.budget_tokens if self.dense_until is None else self.dense_until

    @property
    def members(self) -> tuple[Policy, ...]:
        """Policies whose callbacks, numbers and arrays select for some units each, by
        `unit_members`; a policy that is not made of others selects for all.

        The arrays of `state` are theirs, one member's after the other's.
        """
        return (self,)

    def unit_members(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        """Which of `members` selects for each [layer, unit]; NO_MEMBER where none does.

        A member's arrays count its own units of a layer only. None: the first member, for all.
        """
        return None

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        """DENSE, RETRIEVE, SELECT or REUSE of each [layer, unit].

        None: DENSE in the first dense_layers, SELECT from there on. RETRIEVE needs `scans_keys`,
        and above a unit that reuses, one publishes.
        """
        return None

    def check_model(
        self, *, num_layers: int, num_qo_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Refuse a model that the options do not fit, before anything is allocated.

        Raises:
            ValueError: names the option, its value and what the model has.
        """

    def of_heads(
        self, heads: range, *, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> Policy:
        """The policy for a process that has only these KV heads of a model.

        Raises:
            NotImplementedError: it needs all heads of a layer in one process.
        """
        return self


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
