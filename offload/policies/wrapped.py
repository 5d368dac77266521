"""Policies around others: a subclass of `WrappedPolicy` overrides what it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from offload.selection.calibration import Calibration
from offload.selection.policy import BUDGET_OPTIONS, Policy

_Class = TypeVar("_Class", bound=type)
_OF_INNER = (
    *BUDGET_OPTIONS,
    *("selects", "scans_keys", "per_query_head", "shares_selection"),
    *("selection_top_p", "selection_mean_tokens", "members", "state", "device"),
)


def forwards(to: str, *names: str) -> Callable[[_Class], _Class]:
    """Class decorator: attributes of these names are those of the attribute `to`."""

    def add(cls: _Class) -> _Class:
        for name in names:
            setattr(cls, name, property(attrgetter(f"{to}.{name}")))
        return cls

    return add


class WrappedCalibration(Calibration):
    """What the inner policy learns."""

    policy: WrappedPolicy

    def learn(self, *args: Any, **of_model: Any) -> Policy:
        return self._around(self.policy.inner.calibration.learn(*args, **of_model))

    def with_kept(self, *args: Any, **of_model: Any) -> Policy:
        return self._around(self.policy.inner.calibration.with_kept(*args, **of_model))

    def _around(self, inner: Policy) -> Policy:
        return self.policy if inner is self.policy.inner else replace(self.policy, inner=inner)


@forwards("inner", *_OF_INNER)
@dataclass(frozen=True)
class WrappedPolicy(Policy):
    """Says what `inner` says."""

    inner: Policy

    calibration = cached_property[Calibration](WrappedCalibration)

    def unit_members(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        return self.inner.unit_members(num_layers, num_units)

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8] | None:
        return self.inner.roles(num_layers, num_units)

    def check_model(self, **shape: int) -> None:
        self.inner.check_model(**shape)

    def of_heads(self, heads: range, **shape: int) -> Policy:
        return replace(self, inner=self.inner.of_heads(heads, **shape))
