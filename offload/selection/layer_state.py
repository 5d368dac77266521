"""What a policy keeps of one layer of one sequence: its own arrays, from when they are built on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from cpu_ops.worker_pool import WorkerPool
    from offload.selection.layouts import StateLayout
    from offload.selection.revised import Revised

# The arrays, by the names of `LayerState.layout`.
State = dict[str, "npt.NDArray[Any]"]


@dataclass(frozen=True)
class BuildContext:
    """What a policy may build its state of one layer of one sequence from.

    Attributes:
        keys, values: [num_kv_heads, kv_len, head_dim], the store's dtype.
        queries: [num_qo_heads, n, head_dim], the last n <= `observed_queries`, rotated, oldest
            first; the last one belongs to token kv_len - 1. n is 0 where none were kept.
        capacity_tokens: the arrays must serve so many tokens before `grow` is asked for more.
        text_marks: uint8 [kv_len] where the state `reads_text` (see
            `offload.selection.text_marks`), or None.
        pool: threads to build with.
        num_layers: of the model.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    sm_scale: float
    capacity_tokens: int
    text_marks: npt.NDArray[np.uint8] | None
    pool: WorkerPool
    num_layers: int = 1


@dataclass(frozen=True)
class StateShape:
    """What the size of a policy's arrays depends on, where they serve `capacity_tokens` tokens.

    Attributes:
        layer_idx, num_layers: as in `BuildContext`.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    item_bytes: int
    capacity_tokens: int
    layer_idx: int = 0
    num_layers: int = 1


class LayerState:
    """The state of `policy`; this one has no arrays.

    Attributes:
        layout: the arrays that `build` makes; None: there are none.
        observed_queries: the runtime keeps the last so many queries of each (sequence, layer)
            while it attends densely, for `build`.
        reads_text: callbacks and `build` get text marks, if the runtime knows the text.
        catches_up: a step takes in all tokens that are new to the arrays, not only the last one.
    """

    layout: StateLayout | None = None
    observed_queries: int = 0
    reads_text: bool = False
    catches_up: bool = False

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @property
    def has_arrays(self) -> bool:
        """Whether `build` makes any."""
        return self.layout is not None

    def build(self, context: BuildContext) -> State:
        """The policy's own arrays for one layer of one sequence, C-contiguous.

        Called once per (sequence, layer), before its first sparse decode step; forks copy them.
        """
        return {}

    def num_bytes(self, shape: StateShape) -> int:
        """At most so many bytes are in the arrays of one layer of one sequence.

        0 where it is not known; memory budgets leave no room for them then.
        """
        return 0

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        """The arrays, for `capacity_tokens` tokens. Called between steps, when they get too few.

        Those given stay as they are: the step that needs the room may fail. `pool` is for what
        takes long.
        """
        return arrays

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Adapt the arrays in place to a sequence cut to `kv_len` tokens.

        False: it cannot be done; the state is built again when it is needed.
        """
        return False

    def rewind(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Take back, in place, what the callbacks of one step did that failed, after `kv_len`
        tokens: of some units, of all, or of none; `prepare` may have run without the others.

        What follows must be as if the step had not been, bit for bit. False: it cannot be done;
        the state is built again when it is needed.
        """
        policy = self.policy
        return policy.observe is None and policy.append is None and policy.prepare is None

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """As `truncate`: in place, to keys that were written anew."""
        return False

    def compile_revise(self) -> None:
        """Have machine code for `revise` ready, so that no step waits for it."""

    def read_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """For estimates: what is read of one KV head to select, and whether keys are read again
        to attend.

        Args:
            chosen_tokens: of a head, without sinks and recent window; row_bytes: of a key.
            state_bytes: that the policy keeps of the head.
        """
        if self.policy.scans_keys:
            return kv_len * (row_bytes + 4), False  # keys, and their importance
        return state_bytes, True
