"""Union: the heaviest tokens of what two policies propose.

A policy that looks at history finds what was looked at before and goes on from there; one that
looks at content finds what was not read before. Beside each other each makes up for what the
other cannot see: LFPS alone cannot look up what the prompt did not look at, LycheeCluster alone
loses single tokens between their neighbours.

Both name candidates, as they would alone. The runtime scores all of them exactly, and the heaviest
are attended, whoever named them: LycheeCluster's newest tokens, which it always attends, have to be
among them. What a member notes of the weights when it selects (LycheeCluster, what it carries into
the next step) it notes of its own candidates, by weights over those of both. Both see what was
attended and which tokens are new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from cpu_ops.worker_pool import WorkerPool
from offload.policies.lfps.policy import LFPS
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.union import step
from offload.policies.union.step import FOUND, OWN
from offload.policies.wrapped import forwards
from offload.selection.callback import Callback
from offload.selection.layer_state import State, StateShape
from offload.selection.layouts import NumberLayout
from offload.selection.member_calls import MemberNumbers
from offload.selection.members import MembersDevice, MembersState
from offload.selection.policy import BUDGET_OPTIONS, Policy

NAMES = ("first", "second")  # of the members


class UnionState(MembersState):
    """The arrays of both, and room for their candidates."""

    policy: Union

    def __init__(self, policy: Union) -> None:
        super().__init__(policy, policy.parts, OWN)

    def joined(self, states: Mapping[str, State], num_units: int, capacity_tokens: int) -> State:
        return _own_arrays(num_units, capacity_tokens) | super().joined(
            states, num_units, capacity_tokens
        )

    def num_bytes(self, shape: StateShape) -> int:
        own = shape.num_kv_heads * (8 * FOUND + 4 * shape.capacity_tokens)
        return super().num_bytes(shape) + own

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        grown = super().grow(layer_idx, arrays, capacity_tokens, pool)
        return grown | _own_arrays(len(arrays["found"]), capacity_tokens)

    def read_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """What each looks at; what is kept counts by their shares of it."""
        shape = StateShape(1, 1, row_bytes // 2, 2, kv_len)
        kept = {name: part.state.num_bytes(shape) for name, part in self.policy.parts.items()}
        looked_at, rereads_keys = 0.0, False
        for name, part in self.policy.parts.items():
            num_bytes, reconstructs = part.state.read_bytes(
                kv_len=kv_len,
                chosen_tokens=chosen_tokens,
                row_bytes=row_bytes,
                state_bytes=state_bytes * kept[name] / max(1, self.num_bytes(shape)),
            )
            looked_at += num_bytes
            rereads_keys |= reconstructs
        return looked_at, rereads_keys


def _of_either(name: str) -> Any:
    """The callback of this name, if either has one."""
    return property(
        lambda self: (
            getattr(step, name)
            if any(getattr(part, name) is not None for part in self.parts.values())
            else None
        )
    )


@forwards("first", *BUDGET_OPTIONS)
@dataclass(frozen=True)
class Union(Policy):
    """The best of both's candidates.

    Args:
        first, second: policies that propose candidates for each KV head (lfps, lychee_cluster,
            sketch) with the same budget, sinks, recent window and dense layers. Where one
            has the sinks that it has by default, and the other more, it gets as many.

    Raises:
        ValueError: policies that do not propose, or do not go together.
    """

    name: ClassVar[str] = "union"
    propose: ClassVar[Callback | None] = step.propose
    number_layout: ClassVar[NumberLayout | None] = MemberNumbers(OWN)
    prepare: ClassVar[Any] = _of_either("prepare")
    select: ClassVar[Any] = _of_either("select")
    observe: ClassVar[Any] = _of_either("observe")
    append: ClassVar[Any] = _of_either("append")
    state = cached_property(UnionState)
    device = cached_property(MembersDevice)

    first: Policy = field(default_factory=LFPS)
    second: Policy = field(default_factory=LycheeCluster)

    def __post_init__(self) -> None:
        for name in NAMES:
            _check_member(name, getattr(self, name))
        first, second = self.parts.values()
        object.__setattr__(self, "first", _with_sinks_of(second, first))
        object.__setattr__(self, "second", _with_sinks_of(first, second))
        for name in BUDGET_OPTIONS:
            ours, theirs = (getattr(part, name) for part in self.parts.values())
            if ours != theirs:
                raise ValueError(
                    f"union: {name} must be the same for both, but first ({first.name}) has {ours} "
                    f"and second ({second.name}) {theirs}; give both the same {name}"
                )

    @classmethod
    def option_names(cls) -> list[str]:
        """first and second, and the options of any policy that they may be."""
        from offload.policies.registry import options_of

        return options_of(NAMES, lambda part: part is not cls and part.propose is not None)

    @classmethod
    def from_options(
        cls, first: str | Policy = "lfps", second: str | Policy = "lychee_cluster", **options: Any
    ) -> Union:
        """From what a user writes: second="sketch"; other options are for those that have them."""
        from offload.policies.registry import make_policy, policy_named

        parts: list[Policy] = []
        unknown = set(options)
        for role, chosen in zip(NAMES, (first, second), strict=True):
            if not isinstance(chosen, str):
                _check_member(role, chosen)
            known = policy_named(chosen).option_names() if isinstance(chosen, str) else []
            of_part = {name: value for name, value in options.items() if name in known}
            unknown -= set(of_part)
            parts.append(make_policy(chosen, **of_part))
        if unknown:
            names = " and ".join(repr(part.name) for part in parts)
            raise ValueError(
                f"union of {names} has no option {min(unknown)!r}; give one of theirs, those of "
                "a policy object to that itself"
            )
        return cls(*parts)

    @property
    def parts(self) -> dict[str, Policy]:
        return {name: getattr(self, name) for name in NAMES}

    def check_model(self, **shape: int) -> None:
        for part in self.parts.values():
            part.check_model(**shape)

    def of_heads(self, heads: range, **shape: int) -> Union:
        return replace(
            self, **{name: part.of_heads(heads, **shape) for name, part in self.parts.items()}
        )


def _own_arrays(num_units: int, capacity_tokens: int) -> State:
    found = np.zeros((num_units, FOUND), np.int64)
    found[:, FOUND - 1] = capacity_tokens
    return {"found": found, "candidates": np.zeros((num_units, capacity_tokens), np.int32)}


def _with_sinks_of(other: Policy, policy: Policy) -> Policy:
    """With the other's sinks, if those are more than what it has by default."""
    has_default = any(
        option.name == "sink_tokens" and option.default == policy.sink_tokens
        for option in fields(policy)
    )
    if has_default and other.sink_tokens > policy.sink_tokens:
        raised: Policy = replace(policy, sink_tokens=other.sink_tokens)  # type: ignore[call-arg]
        return raised
    return policy


def _check_member(role: str, policy: Policy) -> None:
    if not isinstance(policy, Policy):
        raise ValueError(f"union: {role} must be a policy, got {policy!r}")
    proposes = policy.selects and policy.propose is not None and not policy.scans_keys
    if not proposes or isinstance(policy, Union) or type(policy).roles is not Policy.roles:
        raise ValueError(
            f"union: {role} must be a policy that proposes candidates in every layer, such as "
            f"lfps, lychee_cluster or sketch, got {policy.name}; give one of these"
        )
    if policy.per_query_head:
        raise ValueError(
            f"union: {role} ({policy.name}) selects per query head, but a union proposes for a KV "
            "head and its group; leave granularity at 'kv_head'"
        )
