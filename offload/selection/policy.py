"""What the runtime asks of a policy, apart from what it selects and its three other parts.

Sink tokens, the recent window and the first dense layers belong to the runtime: a policy chooses
among tokens [sink_tokens, kv_len - recent_tokens) only. While kv_len <= dense_tokens (budget_tokens
unless `dense_until` says otherwise) every policy is exactly full attention; beyond, it may have to
choose among fewer tokens than the budget has room for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from offload.selection.selection import Selection

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
LEAST_SHARE = 0.5  # of the weight: `selection_mean_tokens` cuts no selection to less
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
