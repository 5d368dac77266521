"""LycheeDecode: a few retrieval heads find tokens, the other heads reuse what they found.

Source: LycheeDecode: Accelerating Long-Context LLM Inference via Hybrid-Head Sparse Decoding (ICLR
2026, arXiv 2602.04541). A retrieval head attends to everything and publishes a set of tokens, by
its exact weights, for the same-indexed KV head of the layers below; a sparse head attends to the
set it inherits and passes it on unchanged. In layer 0 all heads retrieve. Which heads do is in a
`HeadRoles`: of a `calibration`, or of a training as in the paper (`offload train-heads`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from offload.policies.base import SparsePolicy
from offload.selection.callback import (
    Callback,
    callback,
    heaviest,
    read_context,
    view_float32,
    view_int32,
)
from offload.selection.compiled import cached_njit
from offload.selection.device_support import DeviceSupport, DeviceTopK
from offload.selection.head_roles import (
    HeadRoles,
    check_retrieval_heads,
    default_retrieval_heads,
    evenly_spaced_heads,
    roles_from,
)
from offload.selection.kept_roles import RolesCalibration
from offload.selection.layouts import NumberLayout
from offload.selection.policy import RETRIEVE, REUSE

if TYPE_CHECKING:
    from offload.models.base import LeanModel

RULES = ("top_k", "top_p", "threshold", "ratio")
_TOP_P, _THRESHOLD, _RATIO = 1, 2, 3
_FIRST_LAYERS = 1  # in which all heads retrieve
NUMBERS = NumberLayout("rule_index", "rule_number")
read_numbers = NUMBERS.read


@cached_njit()
def enough_for_share(importance: Any, chosen: Any, first: Any, missing: Any) -> Any:
    """Keep the most important of `chosen` until their importance reaches `missing`.

    Args:
        importance: float32, of tokens.
        chosen: ascending positions; token = first + position. The kept ones come to its front,
            ascending.
        missing: what they have to sum up to; all are kept if they do not.

    Returns:
        how many are kept: the fewest that suffice. Equal ones are kept from the lowest position.
    """
    weights = importance[first + chosen]
    order = np.argsort(-weights, kind="mergesort")  # stable
    total, count = 0.0, 0
    while count < len(order) and total < missing:
        total += weights[order[count]]
        count += 1
    kept = np.sort(chosen[order[:count]])
    for i in range(count):  # as a slice it took Numba seconds: the error of another shape
        chosen[i] = kept[i]
    return count


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    numbers = read_numbers(ctx.parameters)
    rule, number = int(numbers.rule_index), numbers.rule_number
    num_tokens = ctx.last - ctx.first
    budget = min(ctx.budget_tokens, num_tokens)
    if rule == _RATIO:  # of all tokens, and those that are attended anyway are among them
        anyway = ctx.kv_len - num_tokens
        budget = min(budget, max(0, np.int64(np.ceil(number * ctx.kv_len)) - anyway))
    count = heaviest(pointer, ctx, budget) if budget > 0 else 0
    chosen = view_int32(ctx.indices, max(count, 0))
    importance = view_float32(ctx.importance, ctx.kv_len)
    if rule == _TOP_P and count > 0:
        missing = number * ctx.group_size
        for i in range(ctx.first):
            missing -= importance[i]
        for i in range(ctx.last, ctx.kv_len):
            missing -= importance[i]
        count = enough_for_share(importance, chosen, ctx.first, missing)
    elif rule == _THRESHOLD and count > 0:
        kept = 0
        for i in range(count):
            if importance[ctx.first + chosen[i]] > number * ctx.group_size:
                chosen[kept] = chosen[i]
                kept += 1
        count = kept
    for i in range(max(count, 0)):
        chosen[i] += ctx.first
    return count


class RuleOnDevice(DeviceSupport):
    """The rule."""

    policy: LycheeDecode

    def top_k(self) -> DeviceTopK | None:
        """The rule: all of them end the order by weight."""
        policy = self.policy
        return DeviceTopK(policy.ratio, policy.top_p, policy.threshold)


class LycheeDecodeCalibration(RolesCalibration):
    """Which heads retrieve."""

    policy: LycheeDecode
    first_retrieve = True

    def wanted(self, num_layers: int, num_kv_heads: int) -> tuple[int, int]:
        count = self.policy.retrieval_heads
        if count is None:
            count = default_retrieval_heads(num_layers, num_kv_heads)
        return count, _FIRST_LAYERS

    def find(
        self, lean: LeanModel, model_type: str, load_tokenizer: Callable[[], Any]
    ) -> HeadRoles | None:
        from offload.policies.lychee_decode.calibration import calibrated_roles

        return calibrated_roles(lean, model_type, load_tokenizer, self.policy.retrieval_heads)


@dataclass(frozen=True)
class LycheeDecode(SparsePolicy):
    """Retrieval heads attend to everything; the others to the tokens of the one above them.

    Args:
        dense_layers: so many first layers consist of retrieval heads, whatever the roles say; layer
            0 always does.
        head_roles: a roles file or `HeadRoles`. None: `OffloadedModel` calibrates when it loads;
            without a model the retrieval heads are evenly spaced.
        retrieval_heads: how many KV heads after layer 0 a calibration makes retrieval heads; None
            is a sixth of all (the paper's share is an eighth). Not beside `head_roles`.
        rule: which tokens a retrieval head publishes, all by weights averaged over its query heads
            and never more than budget_tokens (sinks and recent window included). A context of no
            more tokens than that is attended whole, as under every policy: with the last three set
            budget_tokens below the contexts that they are meant for.
            "top_k": the budget_tokens of largest weight;
            "top_p": the fewest whose weights sum up to top_p, sinks and recent window included;
            "threshold": all with a weight above `threshold`;
            "ratio": the ratio * kv_len of largest weight, sinks and recent window included.
        top_p, threshold, ratio: the rule's number; given for another rule it is refused.
    """

    name: ClassVar[str] = "lychee_decode"
    scans_keys: ClassVar[bool] = True
    select: ClassVar[Callback | None] = select
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    device = cached_property(RuleOnDevice)
    calibration = cached_property(LycheeDecodeCalibration)

    dense_layers: int = 0
    head_roles: str | Path | HeadRoles | None = None
    retrieval_heads: int | None = None
    rule: str = "top_k"
    top_p: float | None = None
    threshold: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        roles = roles_from(self.head_roles, self.retrieval_heads)
        if roles is not None:
            roles.check_first_layer()
        object.__setattr__(self, "head_roles", roles)
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}; available: {', '.join(RULES)}")
        for name in RULES[1:]:
            self._check_number(name)

    @property
    def rule_index(self) -> int:
        """In RULES."""
        return RULES.index(self.rule)

    @property
    def rule_number(self) -> float:
        """That the rule compares with."""
        return getattr(self, self.rule, None) or 0.0

    def check_model(self, *, num_qo_heads: int, **shape: int) -> None:
        """Refuse roles of another model."""
        if isinstance(self.head_roles, HeadRoles):
            self.head_roles.check(**shape)  # type: ignore[arg-type]
        elif self.retrieval_heads is not None:
            num_heads = shape["num_layers"], shape["num_kv_heads"]
            check_retrieval_heads(self.retrieval_heads, *num_heads)

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
        """RETRIEVE or REUSE of each [layer, KV head]."""
        if isinstance(self.head_roles, HeadRoles):
            retrieval = self.head_roles.array
        else:
            retrieval = evenly_spaced_heads(num_layers, num_units, self.retrieval_heads)
        roles = np.where(retrieval, RETRIEVE, REUSE).astype(np.uint8)
        roles[: self.dense_layers] = RETRIEVE
        return roles

    def of_heads(
        self, heads: range, *, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> LycheeDecode:
        """With these heads' part of the whole model's roles."""
        roles = self.head_roles
        if not isinstance(roles, HeadRoles):
            spaced = evenly_spaced_heads(num_layers, num_kv_heads, self.retrieval_heads)
            roles = HeadRoles.of(spaced, head_dim=head_dim)
        return self.with_roles(roles.of_heads(heads))

    def with_roles(self, roles: HeadRoles) -> LycheeDecode:
        """The same policy with roles that were made for its model."""
        return replace(self, head_roles=roles, retrieval_heads=None)

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if name != self.rule:
            if value is not None:
                raise ValueError(f"{name}={value} is for rule={name!r}, but rule={self.rule!r}")
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise ValueError(f"rule={name!r} needs {name} in (0, 1], got {value!r}")
