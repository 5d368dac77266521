"""PerHead: a few retrieval heads look at everything, another policy selects for all others.

What LFPS and LycheeCluster lose sits in a handful of heads, those that fetch a fact from afar.
Given the best of all tokens (`Sketch()`, `ExactTopK()`), or all (`Full()`), these cost little, as
they are few, and on a GPU that has room for their KV nothing of the CPU's time. The others go on
with `rest`, which does not know of it: its arrays and callbacks see a model without those heads.

The heads are those of a roles file (LycheeDecode's format, arXiv 2602.04541), or calibrated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from offload.policies.full import Full
from offload.policies.lychee_cluster.policy import LycheeCluster
from offload.policies.per_head.heads import (
    check_retrieval_heads,
    default_retrieval_heads,
    spaced_heads,
)
from offload.policies.per_head.parts import REST, RETRIEVAL, PerHeadDevice, PerHeadState
from offload.policies.sketch.policy import Sketch
from offload.policies.union.policy import Union
from offload.policies.wrapped import forwards
from offload.selection.head_roles import BoolArray, HeadRoles, roles_from
from offload.selection.kept_roles import RolesCalibration
from offload.selection.policy import BUDGET_OPTIONS, DENSE, NO_MEMBER, SELECT, Policy

if TYPE_CHECKING:
    from offload.models.base import LeanModel

logger = logging.getLogger(__name__)

# Options that hold for all heads: the runtime's share of the budget, and what a unit is.
_SHARED = (*BUDGET_OPTIONS, "per_query_head")


class PerHeadCalibration(RolesCalibration):
    """Which heads retrieve."""

    policy: PerHead

    def wanted(self, num_layers: int, num_kv_heads: int) -> tuple[int, int]:
        count, dense_layers = self.policy.retrieval_heads, self.policy.dense_layers
        if count is None:
            count = default_retrieval_heads(num_layers, num_kv_heads, dense_layers)
        return count, dense_layers

    def find(
        self, lean: LeanModel, model_type: str, load_tokenizer: Callable[[], Any]
    ) -> HeadRoles | None:
        from offload.policies.per_head.calibration import calibrated_roles

        wanted = self.wanted(lean.shape.num_layers, lean.shape.num_kv_heads)
        return calibrated_roles(lean, model_type, load_tokenizer, *wanted)


@forwards("rest", *_SHARED)
@dataclass(frozen=True)
class PerHead(Policy):
    """`retrieval` for the retrieval heads, `rest` for the others.

    In the first `dense_layers` all heads retrieve: with Full they are dense, and what they look at
    broadly a sketch finds as well (docs/notes/retrieval-heads.md).

    Args:
        retrieval: Full, or a policy that selects in every layer, such as ExactTopK. None takes
            Sketch with what must be the same, or Full where rest selects per query head.
        rest: a policy that selects in every layer; budget, sinks, recent window and dense layers
            are its own, and those of `retrieval` must be the same.
        head_roles: a roles file, or what is in one, of the layers after the dense ones. None: heads
            are calibrated when a model is loaded, or else evenly spaced.
        retrieval_heads: how many to calibrate; None takes an eighth of the model's KV heads. At
            most a sixth, as of head_roles.
        is_part: head_roles are a rank's part of a model's, whose number was checked.

    Raises:
        ValueError: policies that do not go together, or both head_roles and retrieval_heads.
    """

    name: ClassVar[str] = "per_head"
    state = cached_property(PerHeadState)
    device = cached_property(PerHeadDevice)
    calibration = cached_property(PerHeadCalibration)

    retrieval: Policy = None  # type: ignore[assignment]
    rest: Policy = field(default_factory=LycheeCluster)
    head_roles: str | Path | HeadRoles | None = None
    retrieval_heads: int | None = None
    is_part: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        _check_member("rest", self.rest)
        if cast("Policy | None", self.retrieval) is None:
            object.__setattr__(self, "retrieval", _default_retrieval(self.rest))
        _check_member("retrieval", self.retrieval)
        for name in _SHARED:
            ours = getattr(self.rest, name)
            theirs = getattr(self.retrieval, name) if self.retrieval.selects else ours
            if ours != theirs:
                raise ValueError(
                    f"per_head: {name} must be the same for all heads, but rest "
                    f"({self.rest.name}) has {ours} and retrieval ({self.retrieval.name}) {theirs}"
                )
        roles = roles_from(self.head_roles, self.retrieval_heads)
        object.__setattr__(self, "head_roles", roles)

    @classmethod
    def option_names(cls) -> list[str]:
        """Its own, and those of any policy that `rest` may be."""
        from offload.policies.registry import options_of

        return options_of(
            ["rest", "retrieval", "head_roles", "retrieval_heads"],
            lambda rest: rest is not cls and rest.selects and rest.roles is Policy.roles,
        )

    @classmethod
    def from_options(
        cls,
        rest: str | Policy = "lychee_cluster",
        retrieval: str | Policy | None = None,
        head_roles: str | Path | HeadRoles | None = None,
        retrieval_heads: int | None = None,
        **options: Any,
    ) -> PerHead:
        """From what a user writes: rest="lfps", retrieval="full"; the others are for rest."""
        from offload.policies.registry import make_policy, policy_named

        of_rest = make_policy(rest, **options)
        if isinstance(retrieval, str):
            shared = {}
            if of_rest.selects and policy_named(retrieval).selects:
                shared = _shared(of_rest)
            retrieval = make_policy(retrieval, **shared)
        chosen = _default_retrieval(of_rest) if retrieval is None else retrieval
        return cls(chosen, of_rest, head_roles, retrieval_heads)

    @property
    def members(self) -> tuple[Policy, ...]:
        """rest, and retrieval if it selects: those whose callbacks and arrays they use."""
        both = (self.rest, self.retrieval) if self.retrieval.selects else (self.rest,)
        return tuple(policy.members[0] for policy in both)

    def unit_members(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
        """Member of each unit; units are KV heads, or equally many query heads of each."""
        roles = self.head_roles
        if isinstance(roles, HeadRoles):
            retrieves = roles.array
        elif self.rest.per_query_head:
            raise ValueError(
                f"per_head: rest ({self.rest.name}) selects per query head, so that head_roles "
                "must say which KV heads retrieve; give them, or let a unit be a KV head"
            )
        else:
            retrieves = self._spaced(num_layers, num_units)
        retrieves = retrieves.repeat(num_units // retrieves.shape[1], axis=1)
        retrieves[: self.dense_layers] = True
        retrieving = RETRIEVAL if self.retrieval.selects else NO_MEMBER
        return np.where(retrieves, retrieving, REST).astype(np.uint8)

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
        """DENSE where no member selects."""
        members = self.unit_members(num_layers, num_units)
        return np.where(members == NO_MEMBER, DENSE, SELECT).astype(np.uint8)

    def check_model(self, *, num_qo_heads: int, **shape: int) -> None:
        """Refuse roles of another model, and more retrieval heads than a sixth."""
        for member in self.members:
            member.check_model(num_qo_heads=num_qo_heads, **shape)
        roles, count = self.head_roles, self.retrieval_heads
        if isinstance(roles, HeadRoles):
            roles.check(**shape)  # type: ignore[arg-type]
            count = int(roles.array[max(1, self.dense_layers) :].sum())
        if count is not None and not self.is_part:
            num_heads = shape["num_layers"], shape["num_kv_heads"]
            check_retrieval_heads(count, *num_heads, self.dense_layers)

    def of_heads(self, heads: range, **shape: int) -> PerHead:
        """With these heads' part of the whole model's roles."""
        roles = self.head_roles
        if not isinstance(roles, HeadRoles):
            spaced = self._spaced(shape["num_layers"], shape["num_kv_heads"])
            roles = HeadRoles.of(spaced, head_dim=shape["head_dim"])
        return replace(
            self.with_roles(roles.of_heads(heads)),
            rest=self.rest.of_heads(heads, **shape),
            retrieval=self.retrieval.of_heads(heads, **shape),
            is_part=True,
        )

    def _spaced(self, num_layers: int, num_kv_heads: int) -> BoolArray:
        return spaced_heads(num_layers, num_kv_heads, self.dense_layers, self.retrieval_heads)

    def with_roles(self, roles: HeadRoles) -> PerHead:
        return replace(self, head_roles=roles, retrieval_heads=None)


def _shared(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in BUDGET_OPTIONS}


def _default_retrieval(rest: Policy) -> Policy:
    if not rest.selects or rest.per_query_head:
        return Full()
    return Sketch(**_shared(rest))


def _check_member(role: str, policy: Policy) -> None:
    selects = isinstance(policy, Policy) and policy.selects and type(policy).roles is Policy.roles
    is_full = role == "retrieval" and isinstance(policy, Full)
    if role == "retrieval" and isinstance(policy, (LycheeCluster, Union)):
        raise ValueError(
            f"per_head: retrieval must not be {policy.name}: heads of lychee_cluster share an "
            "index, but a GPU may hold some of them; give sketch, exact_topk or full"
        )
    if not selects and not is_full:
        name = policy.name if isinstance(policy, Policy) else repr(policy)
        or_full = "full or " if role == "retrieval" else ""
        raise ValueError(
            f"per_head: {role} must be {or_full}a policy that selects in every layer, such as "
            f"exact_topk or lfps, got {name}"
        )
