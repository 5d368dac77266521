"""What a policy is.

A policy is a frozen dataclass of options plus up to five native callbacks (see `callback`), which
the C++ worker pool calls without the GIL for every query row and selection unit:

    prepare   before the query is known: may overlap the linear layers, and runs beside observe and
              append of the layer before: it touches the arrays of its own layer only
    propose   name candidates, whose keys the runtime then scores on all threads; or answer
    select    write the chosen token indices, sorted and unique, and return how many
    observe   see the attention weights of what was attended
    append    the newest token has entered the cache; earlier ones may have entered without a call

`select` chooses among all tokens by weight (`scans_keys`), among the candidates by weight (with
`propose`; it may be missing then: the heaviest are kept), or by the policy's own means.

Sink tokens, the recent window and the first dense layers belong to the runtime: a policy chooses
among tokens [sink_tokens, kv_len - recent_tokens) only. While kv_len <= dense_tokens (budget_tokens
unless `dense_until` says otherwise) every policy is exactly full attention; beyond, it may have to
choose among fewer tokens than the budget has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from cpu_ops.worker_pool import WorkerPool
    from offload.models.base import LeanModel
    from offload.policies.callback import Callback
    from offload.policies.layouts import NumberLayout, StateLayout
    from offload.policies.revised import Revised

# What a unit does in a layer where its sequence is longer than `dense_tokens`: Role of
# cpp/attention/policy.h.
DENSE = 0  # full attention
RETRIEVE = 1  # full attention, and publishes the policy's selection
SELECT = 2  # attends to the policy's selection and publishes it
REUSE = 3  # attends to what the same unit of a layer above last published in this step

NO_MEMBER = 255  # of `Policy.unit_members`

# Of `Policy.scores`: exact attention weights of all tokens; those of its candidates, as a share of
# theirs; bounds of blocks of tokens (`offload.policies.blocks`).
Scores = Literal["exact", "candidates", "page bound"]
# A policy's own arrays of one layer of one sequence, by the names of its `state_layout`.
State = dict[str, "npt.NDArray[Any]"]
# What `Policy.build_on_device` returns: called once, after the device has done what was queued.
DeviceBuild = Callable[[], State]


@dataclass(frozen=True)
class BuildContext:
    """What a policy may build its state of one layer of one sequence from.

    Attributes:
        keys, values: [num_kv_heads, kv_len, head_dim], the store's dtype.
        queries: [num_qo_heads, n, head_dim], the last n <= `observed_queries`, rotated, oldest
            first; the last one belongs to token kv_len - 1. n is 0 where none were kept.
        capacity_tokens: the arrays must serve so many tokens before `grow` is asked for more.
        text_marks: uint8 [kv_len] of `reads_text` policies (see `offload.policies.text_marks`), or
            None.
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


@dataclass(frozen=True)
class DeviceTopK:
    """A rule of `select` that a GPU can follow: the heaviest tokens by importance, ties to the
    lowest positions, as many as the budget has room for.

    Attributes:
        ratio: of kv_len, at most so many with sinks and recent window; None: no such limit.
        top_p: or the fewest that have this share of the attention with sinks and recent window.
        threshold: or those above this attention weight. Weights are means over the query heads.
    """

    ratio: float | None = None
    top_p: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class DeviceCodes:
    """Codes of keys by which a GPU can list candidates in place of `propose`: of the tokens whose
    codes score most, by `gpu_ops.top_k_codes`.

    Attributes:
        heads: bool [num_layers, num_units], for which units, which are KV heads.
        num_candidates: beside sinks and recent tokens.
        levels: 2 or 4, of a code of 1 or 2 bits a dimension.
        outer: see `gpu_ops.append_codes`.
    """

    heads: npt.NDArray[np.bool_]
    num_candidates: int
    levels: tuple[float, ...]
    outer: float

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1


@dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Class attributes tell the runtime what to do for it:
        selects: False means dense attention in every layer.
        scans_keys: score every key first and hand over `importance`, the exact attention weights
            summed over the unit's query heads.
        per_query_head: a selection unit is one query head instead of a KV head with its group.
        shares_selection: units of a layer that RETRIEVE publish one selection, by the sum of their
            importance.
        observed_queries: the runtime keeps the last so many queries of each (sequence, layer)
            while it attends densely, for `build`.
        reads_text: callbacks and `build` get text marks, if the runtime knows the text.
        state_layout: the arrays that `build` makes; None: the policy keeps none.
        number_layout: the numbers that callbacks read.
        builds_on_device: `build_on_device` is there.
        selection_top_p: a selection by weights ends where it has this share of them.
        selection_mean_tokens: or a smaller one, so that selections have so many tokens on the mean.
    A policy that selects also has the options of `SparsePolicy`, or properties of these names.
    """

    name: ClassVar[str]
    selects: ClassVar[bool] = True
    scans_keys: ClassVar[bool] = False
    per_query_head: ClassVar[bool] = False
    shares_selection: ClassVar[bool] = False
    observed_queries: ClassVar[int] = 0
    reads_text: ClassVar[bool] = False
    state_layout: ClassVar[StateLayout | None] = None
    number_layout: ClassVar[NumberLayout | None] = None
    builds_on_device: ClassVar[bool] = False
    selection_top_p: ClassVar[float] = 1.0
    selection_mean_tokens: ClassVar[int | None] = None
    prepare: ClassVar[Callback | None] = None
    propose: ClassVar[Callback | None] = None
    select: ClassVar[Callback | None] = None
    observe: ClassVar[Callback | None] = None
    append: ClassVar[Callback | None] = None

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
    def scores(self) -> Scores | None:
        """What it ranks by, for wrappers that budget it; None: nothing that can be budgeted.

        Of a policy that selects for itself: ask `members` of one that is made of others.
        """
        if self.scans_keys:
            return "exact"
        return "candidates" if self.propose is not None else None

    @property
    def dense_tokens(self) -> int:
        """Sequences of at most so many tokens attend to all of them."""
        return self.budget_tokens if self.dense_until is None else self.dense_until

    @property
    def selecting(self) -> Policy:
        """Whose callbacks, arrays and numbers these are: another one's, if this is made of it."""
        return self

    @property
    def members(self) -> tuple[Policy, ...]:
        """Policies that each select for some units, by `unit_members`; most have one for all.

        The arrays of `selecting` are theirs, one member's after the other's.
        """
        return (self.selecting,)

    def unit_members(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        """Which of `members` selects for each [layer, unit]; NO_MEMBER where none does.

        A member's arrays count its own units of a layer only. None: the first member, for all.
        """
        return None

    def in_every_layer(self) -> Policy:
        """The same without dense first layers, for benches."""
        has_them = any(option.name == "dense_layers" for option in fields(self))
        return replace(self, dense_layers=0) if has_them else self  # type: ignore[call-arg]

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

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        """DENSE, RETRIEVE, SELECT or REUSE of each [layer, unit].

        None: DENSE in the first dense_layers, SELECT from there on. RETRIEVE needs `scans_keys`,
        and above a unit that reuses, one publishes.
        """
        return None

    def whole_on_device(self, num_layers: int, num_units: int) -> npt.NDArray[np.bool_] | None:
        """Which [layer, unit] may as well attend to everything, on a GPU that holds their KV.

        Beside those that are DENSE or RETRIEVE; None: no others.
        """
        return None

    def device_top_k(self) -> DeviceTopK | None:
        """How units that RETRIEVE choose, if a GPU that holds their KV can do it; else None."""
        return None

    def device_codes(self, num_layers: int, num_units: int) -> DeviceCodes | None:
        """The codes by which a GPU finds the candidates of some units, if it can; else None."""
        return None

    def code_state(self, arrays: State, kv_len: int, load_keys: Callable[[int], Tensor]) -> State:
        """Those of a layer's arrays with codes, scales and mean, as sketch/policy.py has them: for
        the units of `device_codes` in order, and for all of `kv_len` tokens. Asked only of
        policies that have `device_codes`.

        Args:
            load_keys: gives the keys [num_units, n, head_dim] from a token on.
        """
        raise NotImplementedError

    def calibrated(
        self,
        make_lean: Callable[[], LeanModel],
        model_type: str,
        load_tokenizer: Callable[[], Any],
        checkpoint: Callable[[], str],
    ) -> Policy:
        """The policy with what it has to learn from the attention of the model that will run.

        Args:
            make_lean, load_tokenizer: called only if they are needed.
            checkpoint: the same; names the weights, so that what was learnt can be kept.

        Raises:
            ValueError: the policy is for another model.
        """
        return self

    def with_kept(self, checkpoint: Callable[[], str], model_type: str, **shape: Any) -> Policy:
        """With what `calibrated` has kept of the model, if anything: nothing is learnt.

        Args:
            checkpoint: as of `calibrated`.
            shape: num_layers, num_kv_heads and head_dim of the model.
        """
        return self

    def looked_at_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """For estimates: what is read of one KV head to select, and whether keys are read again
        to attend.

        Args:
            chosen_tokens: of a head, beside sinks and recent window; row_bytes: of a key.
            state_bytes: that the policy keeps of the head.
        """
        if self.scans_keys:
            return kv_len * (row_bytes + 4), False  # keys, and their importance
        return state_bytes, True

    def build(self, context: BuildContext) -> State:
        """The policy's own arrays for one layer of one sequence, C-contiguous.

        Called once per (sequence, layer), before its first sparse decode step; forks copy them.
        """
        return {}

    def state_bytes(self, shape: StateShape) -> int:
        """At most so many bytes are in the arrays of one layer of one sequence.

        0 where it is not known; memory budgets leave no room for them then.
        """
        return 0

    def build_on_device(self, context: BuildContext) -> DeviceBuild:
        """`build` alongside a prefill, from tensors on the device that computes it.

        Queues its work to the current stream and does not wait for it: the keys and values are
        overwritten after it. Returns what makes the arrays, for when that work is done.
        """
        raise NotImplementedError

    def copied_heads(self, num_layers: int, num_kv_heads: int) -> int:
        """KV heads of a layer at most of whose keys and values `build_on_device` makes copies."""
        return 0

    def rehearse_on_device(self, keys: Tensor) -> None:
        """Launch the kernels of ours that `build_on_device` launches; `gpu_ops.compile_ahead`.

        Args:
            keys: [num_kv_heads, 64, head_dim], whatever they are.
        """

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int) -> State:
        """The arrays, for `capacity_tokens` tokens. Called between steps, when they get too few.

        Those given stay as they are: the step that needs the room may fail.
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
        return self.observe is None and self.append is None and self.prepare is None

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """As `truncate`: in place, to keys that were written anew and to tokens behind them."""
        return False

    def has_state(self) -> bool:
        """Whether `build` makes arrays."""
        return self.selecting.state_layout is not None


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
    """

    budget_tokens: int = 1024
    sink_tokens: int = 4
    recent_tokens: int = 64
    dense_layers: int = 2
    dense_until: int | None = None

    def __post_init__(self) -> None:
        names = ["budget_tokens", "sink_tokens", "recent_tokens", "dense_layers"]
        if self.dense_until is not None:
            names.append("dense_until")
        for name in names:
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
        if self.dense_tokens < self.sink_tokens + self.recent_tokens:
            raise ValueError(
                f"dense_until={self.dense_until} cannot hold sink_tokens={self.sink_tokens}"
                f" + recent_tokens={self.recent_tokens}; raise dense_until or lower the others"
            )
