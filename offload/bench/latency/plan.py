"""Which roles of a model's layers a few physical layers play.

A policy that reuses selections across layers (TidalDecode, LycheeDecode) gives every layer a role,
or every head of every layer one. A benchmark at 128K tokens holds only a few layers, so it runs
one layer of each kind in the model's order and weights its time by how many layers of the model
are of that kind. Layers are of one kind if the same number of their units scan all keys or select;
where there are more kinds than physical layers, those between two count in parts as both. Dense
layers are left out: they cost the same under every policy, namely what `full` does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offload.policies.base import in_every_layer
from offload.policies.hard_kv import HardKV
from offload.selection.policy import DENSE, REUSE, Policy


@dataclass(frozen=True)
class LayerPlan:
    """A policy made to run on physical layers.

    Attributes:
        policy: with the roles of those layers.
        weights: float64 [num_layers], the share of the model's sparse layers that each physical
            layer stands for; sums to 1.
        dense_share: of the model's layers, that are dense.
    """

    policy: Policy
    weights: npt.NDArray[np.float64]
    dense_share: float


def plan_layers(
    policy: Policy, *, num_model_layers: int, num_layers: int, num_units: int
) -> LayerPlan:
    """How `policy` runs on `num_layers` layers that stand for `num_model_layers`.

    Raises:
        ValueError: too few physical layers for a policy that reuses selections.
    """
    uniform = np.full(num_layers, 1 / num_layers)
    if not policy.selects:
        return LayerPlan(policy, uniform, 0.0)
    roles = policy.roles(num_model_layers, num_units)
    if roles is None:
        dense = np.arange(num_model_layers) < policy.dense_layers
    else:
        dense = (roles == DENSE).all(1)
    if dense.all():
        raise ValueError(f"policy {policy.name!r} leaves all {num_model_layers} layers dense")
    share = float(dense.mean())
    if num_layers == num_model_layers:
        return LayerPlan(policy, ~dense / (~dense).sum(), share)
    if roles is None:
        return LayerPlan(in_every_layer(policy), uniform, share)
    members = policy.unit_members(num_model_layers, num_units)
    if members is None:
        chosen, weights = _choose_rows(roles[~dense] != REUSE, num_layers)
    else:
        chosen, weights = _choose_rows(members[~dense] != 0, num_layers)
        members = members[~dense][chosen]
    return LayerPlan(_with_roles(policy, roles[~dense][chosen], members), weights, share)


def _choose_rows(
    asks: npt.NDArray[np.bool_], num_layers: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """`num_layers` sparse layers, the first one first, and the share of each.

    A layer counts in parts as the two chosen ones whose numbers of asking units are next to its
    own, so that on the average as many ask as in the model.

    Args:
        asks: [sparse layers, units], which scan all keys or select for others; of a policy that
            has members, which are not of the first.
    """
    asking = asks.sum(1)
    others = asking[asking != asking[0]]  # the first publishes for all units
    if others.size and num_layers == 1:
        raise ValueError(
            "a policy that reuses selections needs at least 2 physical layers; "
            "lower the depth or the batch size"
        )
    between = np.linspace(0, 1, num_layers - 1) if others.size else np.empty(0)
    numbers = np.unique([asking[0], *np.quantile(others, between, method="nearest")])
    sizes = [np.interp(asking, numbers, kind).sum() for kind in np.eye(len(numbers))][::-1]
    typical = [int(np.argmax(asking == number)) for number in numbers[::-1]]
    copies, kinds = [1] * len(sizes), list(range(len(sizes)))
    # Layers that are left repeat the most frequent kind: more samples of it.
    while len(kinds) < num_layers:
        most = int(np.argmax(np.divide(sizes, copies)))
        copies[most] += 1
        kinds.append(most)
    shares = np.divide(sizes, copies)[kinds]
    return np.array(typical)[kinds], shares / shares.sum()


def _with_roles(
    policy: Policy, roles: npt.NDArray[np.uint8], members: npt.NDArray[np.uint8] | None
) -> Policy:
    """The same policy with other roles, which takes any depth: the model's was checked before."""
    if isinstance(policy, HardKV):  # it asks its inner policy
        return replace(policy, inner=_with_roles(policy.inner, roles, members))
    planned = copy.copy(policy)
    object.__setattr__(planned, "roles", lambda num_layers, num_units: roles)
    object.__setattr__(planned, "unit_members", lambda num_layers, num_units: members)
    object.__setattr__(planned, "check_model", lambda **shape: None)
    return planned
