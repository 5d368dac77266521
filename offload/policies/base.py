"""What a policy is.

A policy is a frozen dataclass of options plus up to four native callbacks (see `callback`), which
the C++ worker pool calls without the GIL for every query row and selection unit:

    prepare   before the query is known: may overlap the linear layers
    select    write the chosen token indices, sorted and unique, and return how many
    observe   see the attention weights of what was attended
    append    the newest token has entered the cache

Sink tokens, the recent window and the first dense layers belong to the runtime: a policy chooses
among tokens [sink_tokens, kv_len - recent_tokens) only. While kv_len <= budget_tokens every policy
is exactly full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from offload.policies.callback import Callback


@dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Class attributes tell the runtime what to do for it:
        selects: False means dense attention in every layer.
        scans_keys: score every key first and hand over `importance`, the exact attention weights
            summed over the unit's query heads.
        per_query_head: a selection unit is one query head instead of a KV head with its group.
    """

    name: ClassVar[str]
    selects: ClassVar[bool] = True
    scans_keys: ClassVar[bool] = False
    per_query_head: ClassVar[bool] = False
    prepare: ClassVar[Callback | None] = None
    select: ClassVar[Callback | None] = None
    observe: ClassVar[Callback | None] = None
    append: ClassVar[Callback | None] = None

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options the constructor takes."""
        return [field.name for field in fields(cls)]

    def build(self, layer_idx: int, keys: Tensor, values: Tensor) -> Sequence[npt.NDArray[Any]]:
        """The policy's own arrays for one layer of one sequence, at most 8, C-contiguous.

        Called once per (sequence, layer), before its first sparse decode step, with all keys and
        values so far ([num_kv_heads, kv_len, head_dim]). Callbacks find them in
        `ctx.arrays`, in this order; forks copy them. A policy without state returns ().
        """
        return ()

    @classmethod
    def has_state(cls) -> bool:
        """Whether `build` keeps arrays."""
        return cls.build is not Policy.build


@dataclass(frozen=True)
class SparsePolicy(Policy):
    """Options that every selecting policy shares.

    Args:
        budget_tokens: tokens attended per KV head, sinks and recent ones included.
        sink_tokens: first tokens, always attended.
        recent_tokens: last tokens, always attended (the newest one included).
        dense_layers: first layers that attend to everything.
    """

    budget_tokens: int = 1024
    sink_tokens: int = 4
    recent_tokens: int = 64
    dense_layers: int = 2

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "sink_tokens", "recent_tokens", "dense_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be an int, got {value!r}")
        if self.sink_tokens < 0 or self.dense_layers < 0:
            raise ValueError(
                "sink_tokens and dense_layers must not be negative,"
                f" got {self.sink_tokens} and {self.dense_layers}"
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
