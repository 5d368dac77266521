"""HARD-KV: one share of the attention for all heads instead of one number of tokens.

Source: Zeng et al., HARD-KV: Head-Adaptive Regularization for Decoding-time KV Compression
(arXiv 2606.28831). How many tokens matter differs between heads, layers and steps by orders of
magnitude. A fixed budget gives all the same: most get more than they need, a few less. Top-p over
exact weights gives each head the fewest tokens that hold the share p of its attention, and never
more than a cap. A KV head's query heads share one selection: p is of their attention together, and
below the cap each of them keeps at least half of its own.

Any policy that weighs candidates exactly says which tokens there are; the cut is the runtime's
(cpp/attention/top_mass.cpp), after the policy's own choice. These scores need no calibration,
because they are attention weights, of the candidates instead of all tokens. What lies outside them
is not estimated: a policy whose candidates hold less than all of the attention keeps less than p of
it (docs/notes/hard-kv.md has how much). Scores that are no weights, Quest's bounds, are calibrated
(`logits_calibration`), and the cut is `block_share`'s: whole pages in the order of their bounds,
more than the fewest tokens that hold p, or with calibrate="tokens" less of p. Plans predict the
cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from offload.policies.blocks import BlockPolicy
from offload.policies.hard_kv.block_share import BlockShare
from offload.policies.hard_kv.logits_calibration import CALIBRATE, Calibrate
from offload.policies.per_head import PerHead
from offload.policies.wrapped import WrappedPolicy, forwards
from offload.selection.device_support import DeviceSupport
from offload.selection.policy import LEAST_SHARE, Policy
from offload.system.memory import parse_size


@forwards("policy.inner.device", "whole", "codes", "code_state")
@forwards("policy.inner.device", "builds", "build", "copied_heads", "warm_up_kernels")
class CutOnDevice(DeviceSupport):
    """What it can do for the inner policy, but select: nothing cuts what it selects."""


@forwards("_cutting", "members", "state")
@dataclass(frozen=True)
class HardKV(WrappedPolicy):
    """What `inner` selects, cut where it has `top_p` of the attention to what it weighed.

    Args:
        inner: a policy that weighs tokens exactly: exact_topk, lfps, lychee_cluster, sketch, union,
            or a per_head of these; or quest. It names its candidates for the cap.
        top_p: share of the attention weights, sinks and recent window included, in (0, 1].
        max_tokens: the cap; None: inner's budget_tokens, which it must not be above. Up to where
            attention is full says inner's dense_until, or the cap does.
        calibrate: over quest, what temperatures are solved for; see `logits_calibration`.
        mean_tokens: KV heads that select attend to so many on the mean, sinks and recent window
            included: from step to step a share below top_p is found that does, and no query head
            is sure of its half then (`offload.decode.top_p_controller`). None: the share is top_p.
        max_step_bytes: instead of max_tokens, of keys and values that the heads that select attend
            to in a step, of one sequence where a model is loaded and of all where a batch is
            planned, sinks and recent window included: bytes, or "16MiB".
        max_step_us: instead of max_tokens, what `offload plan` predicts of a step, whatever the
            policy selects. Loading a model, or planning, turns either into max_tokens
            (`offload.planning.step_cap`), once; until then the policy is for no model.

    Raises:
        ValueError: numbers out of range, or a policy that scores nothing that can be budgeted
            or that hands selections down.
    """

    name: ClassVar[str] = "hard_kv"
    device = cached_property(
        lambda self: CutOnDevice(self) if self._cutting is self.inner else self._cutting.device
    )

    inner: Policy = field(default_factory=PerHead)
    top_p: float = 0.95
    max_tokens: int | None = None
    calibrate: Calibrate = "mass"
    mean_tokens: int | None = None
    max_step_bytes: int | str | None = None
    max_step_us: float | None = None

    def __post_init__(self) -> None:
        _check_inner(self.inner)
        is_number = isinstance(self.top_p, (int, float)) and not isinstance(self.top_p, bool)
        if not is_number or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be a number in (0, 1], got {self.top_p!r}")
        if self.calibrate not in CALIBRATE:
            given = " or ".join(map(repr, CALIBRATE))
            raise ValueError(f"calibrate must be {given}, got {self.calibrate!r}")
        if self.max_tokens is not None:
            self._check_cap_tokens(self.max_tokens)
        self._check_step_caps()
        self._cutting  # noqa: B018 - refuses an inner policy
        if self.mean_tokens is not None:
            self._check_mean(self.mean_tokens)

    @classmethod
    def option_names(cls) -> list[str]:
        """Its own, and the options of any inner policy."""
        names = [option.name for option in fields(cls)]
        return [*names, *(x for x in PerHead.option_names() if x not in names)]

    @classmethod
    def from_options(
        cls,
        inner: str | Policy = "per_head",
        **options: Any,
    ) -> HardKV:
        """From what a user writes: inner="sketch"; what is none of its own is for `inner`."""
        from offload.policies.registry import make_policy

        own = {x.name: options.pop(x.name) for x in fields(cls) if x.name in options}
        return cls(make_policy(inner, **options), **own)

    @property
    def step_cap(self) -> str:
        """The option that caps a step and its value, until `with_max_tokens`; "": there is none."""
        if self.max_step_bytes is not None:
            return f"max_step_bytes={self.max_step_bytes}"
        return "" if self.max_step_us is None else f"max_step_us={self.max_step_us:g}"

    @property
    def least_max_tokens(self) -> int:
        """What a step's cap must leave: sinks, recent window, and a token, or a page where pages
        are ranked, as far as the budget has room for it."""
        page_tokens: int = getattr(self.inner, "page_tokens", 1)
        return min(self.sink_tokens + self.recent_tokens + page_tokens, self.budget_tokens)

    def with_max_tokens(self, max_tokens: int) -> HardKV:
        """With this cap instead of a step's."""
        return replace(self, max_tokens=max_tokens, max_step_bytes=None, max_step_us=None)

    @property
    def budget_tokens(self) -> int:
        return self.inner.budget_tokens if self.max_tokens is None else self.max_tokens

    @property
    def selection_top_p(self) -> float:  # type: ignore[override]
        return float(self.top_p)

    @property
    def selection_mean_tokens(self) -> int | None:  # type: ignore[override]
        return self.mean_tokens

    @cached_property
    def _cutting(self) -> Policy:
        """Who cuts: over a policy that ranks blocks not the runtime."""
        ranked = self.inner.members[0]
        if not isinstance(self.inner, BlockPolicy) or self.top_p == 1:
            return self.inner
        assert isinstance(ranked, BlockPolicy)
        return BlockShare(ranked, float(self.top_p), self.budget_tokens, self.calibrate)

    def check_model(self, **shape: int) -> None:
        super().check_model(**shape)
        self.check_cap()

    def check_cap(self) -> None:
        """Refuse a cap of a step that was not turned into max_tokens.

        Raises:
            ValueError: names the cap and what to give instead.
        """
        if self.step_cap:
            raise ValueError(
                f"{self.step_cap} of hard_kv is turned into max_tokens where a model is loaded or "
                "planned, which here it is not; give max_tokens"
            )

    def of_heads(self, heads: range, **shape: int) -> Policy:
        if self.mean_tokens is not None:
            raise NotImplementedError(
                f"hard_kv with mean_tokens={self.mean_tokens} needs all heads in one process, "
                "whose mean it holds; leave mean_tokens out, or decode on one GPU"
            )
        return super().of_heads(heads, **shape)

    def _check_cap_tokens(self, max_tokens: int) -> None:
        least, most = self.sink_tokens + self.recent_tokens, self.inner.budget_tokens
        is_count = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        if not is_count or not least <= max_tokens <= most:
            raise ValueError(
                f"max_tokens must be in [{least}, {most}], from sinks and recent window to the "
                f"budget_tokens of {self.inner.name}, got {max_tokens!r}; raise budget_tokens for "
                "more"
            )

    def _check_step_caps(self) -> None:
        names = ("max_tokens", "max_step_bytes", "max_step_us")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        if len(given) > 1:
            both = " and ".join(f"{name}={x}" for name, x in given.items())
            raise ValueError(f"hard_kv takes one cap, got {both}; leave all but one out")
        if self.max_step_bytes is not None:
            num_bytes = parse_size(self.max_step_bytes, name="max_step_bytes")
            object.__setattr__(self, "max_step_bytes", num_bytes)
        us = self.max_step_us
        if us is None:
            return
        if not isinstance(us, (int, float)) or isinstance(us, bool) or not 0 < us < math.inf:
            raise ValueError(f"max_step_us must be a positive number of microseconds, got {us!r}")
        if isinstance(self.inner, BlockPolicy):
            raise ValueError(
                f"max_step_us={us:g} needs a policy that weighs tokens: what {self.inner.name} "
                "takes is measured for one cap only; give max_step_bytes or max_tokens"
            )

    def _check_mean(self, mean_tokens: int) -> None:
        least, most = self.sink_tokens + self.recent_tokens, self.budget_tokens
        is_count = isinstance(mean_tokens, int) and not isinstance(mean_tokens, bool)
        if not is_count or not least < mean_tokens <= most:
            raise ValueError(
                f"mean_tokens must be in [{least + 1}, {most}], more than sinks and recent window "
                f"and at most the cap, got {mean_tokens!r}; raise max_tokens or budget_tokens for "
                "more"
            )
        if self.top_p <= LEAST_SHARE:
            raise ValueError(
                f"mean_tokens={mean_tokens} is held by shares from {LEAST_SHARE} to top_p, which "
                f"is {self.top_p}; raise top_p, or leave mean_tokens out"
            )
        if isinstance(self.inner, BlockPolicy):
            raise ValueError(
                f"mean_tokens={mean_tokens} needs a policy that weighs tokens, and "
                f"{self.inner.name} ranks blocks of them; leave mean_tokens out, or give another "
                "inner policy"
            )


def _check_inner(inner: Policy) -> None:
    if not isinstance(inner, Policy):
        raise ValueError(f"hard_kv: inner must be a policy, got {inner!r}")
    give = "give exact_topk, sketch, lfps, lychee_cluster, union, or a per_head of these, or quest"
    selects_everywhere = isinstance(inner, PerHead) or type(inner).roles is Policy.roles
    if isinstance(inner, HardKV) or inner.shares_selection or not selects_everywhere:
        raise ValueError(
            f"hard_kv: inner must select for each head in every layer, which {inner.name} does "
            f"not; {give}"
        )
    weighs = all(
        not isinstance(x, BlockPolicy) and (x.scans_keys or x.propose is not None)
        for x in inner.members
    )
    if not inner.selects or not (weighs or isinstance(inner, BlockPolicy)):
        raise ValueError(
            f"hard_kv cuts selections by attention weights, which {inner.name} has none of, or "
            f"not for all heads; {give}"
        )
