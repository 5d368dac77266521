"""Budgets of heads on a real model and text: what they are, what was needed, and what that costs.

Every policy continues the same prompt (`SharedModel` reads it once) with the text's next tokens:
first in turns with nobody looking on, which is timed, then alone, and then with tokens of its own.
Full attention is the reference and runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from offload.bench.budget.drift import QUARTERS, Drift, measure_drift
from offload.bench.budget.equal_error import tokens_of_equal_error
from offload.bench.budget.head_counts import HeadCounter, HeadCounts, over_heads
from offload.bench.budget.timing import STEPS_IN_TURN, step_seconds
from offload.bench.selection.measure import TIMED_STEPS, policy_label, policy_options
from offload.bench.selection.metrics import kl_divergence, mean_by_rows, negative_log_likelihood
from offload.bench.selection.observed_text import observe_text
from offload.models.shape import ModelShape
from offload.policies import HardKV, Policy
from offload.policies.logits_calibration import WINDOW_QUERIES
from offload.runtime.shared_model import ReadPrompt, SharedModel

Progress = Callable[[int], None]
_KEPT = ("attended_tokens", "output_error", "mass_kept")  # of what is observed


@dataclass(frozen=True)
class BudgetSettings:
    """What is measured.

    Attributes:
        length: tokens that are read.
        steps: next tokens of the text that are decoded and looked at.
        sample_every: every n-th of them is compared with exact attention.
        timed_steps: of each policy, in turns; they and one before each turn decode the first of
            these tokens, or more.
        generate: tokens that are then generated; 0 for none.
        temperature_every: of these, after so many temperatures are solved for again.
        top_p: share of the attention that fixed budgets are asked for.
    """

    length: int = 4096
    steps: int = 64
    sample_every: int = 4
    timed_steps: int = TIMED_STEPS
    generate: int = 64
    temperature_every: int = WINDOW_QUERIES
    top_p: float = 0.95

    def __post_init__(self) -> None:
        for name in ("length", "steps", "sample_every", "timed_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature_every < WINDOW_QUERIES:
            raise ValueError(
                f"temperature_every must be at least {WINDOW_QUERIES}, the queries that "
                f"temperatures are solved for, got {self.temperature_every}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.generate and self.generate < QUARTERS:
            raise ValueError(
                f"generate must be 0 or at least {QUARTERS}, one token a quarter, got "
                f"{self.generate}"
            )

    @property
    def timing_tokens(self) -> int:
        """Timed steps, and one before each turn of them."""
        return self.timed_steps + -(-self.timed_steps // STEPS_IN_TURN)

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are needed: the last one is only predicted."""
        return self.length + max(self.steps, self.timing_tokens) + 1

    @property
    def positions(self) -> int:
        """That the model must have: what is timed, observed and generated begins at `length`."""
        return max(self.text_tokens - 1, self.length + self.generate)

    @property
    def decode_steps(self) -> int:
        """Of each policy."""
        return self.steps + self.timing_tokens + self.generate


@dataclass(frozen=True)
class BudgetMeasurement:
    """One policy on the text. None: does not apply.

    Attributes:
        label: `curve_label`: policies of one label are one curve of tokens and error.
        budget_tokens: attended tokens per unit at most, a share's cap; None for full attention.
        top_p: where it cuts; None for a fixed budget.
        needed_top_p: the share that `heads` are asked for: top_p, or the settings'.
        attended_tokens: mean per unit, of sampled steps and layers that are not dense.
        output_error: relative L2 error of a layer's attention output.
        mass_kept: attention mass of what was attended, sinks excluded.
        kl, perplexity_change: of the next token, against full attention; KL in nats.
        tokens_share: by the labels of fixed budgets: tokens attended, of those that such a budget
            takes for the same error; without those whose errors do not enclose it.
        seconds, seconds_p10, seconds_p90: of a decode step; the median, and around it.
        kv_bytes, policy_bytes: host memory of the sequence, and what the policy keeps of it.
        heads: of each unit of each layer that is not dense; none for full attention.
        over_heads: `head_counts.over_heads` of them.
        drift: of generated tokens; empty lists where none were.
    """

    policy: str
    label: str
    options: dict[str, Any]
    budget_tokens: int | None
    top_p: float | None
    needed_top_p: float
    attended_tokens: float
    output_error: float
    mass_kept: float | None
    kl: float
    perplexity_change: float
    seconds: float
    seconds_p10: float
    seconds_p90: float
    kv_bytes: int
    policy_bytes: int
    heads: list[HeadCounts]
    over_heads: dict[str, float]
    drift: Drift
    tokens_share: dict[str, float] = field(default_factory=dict)

    @property
    def byte_seconds(self) -> float:
        """Host memory after the last step x the median time of a step."""
        return (self.kv_bytes + self.policy_bytes) * self.seconds

    @property
    def utilisation(self) -> float | None:
        """Tokens attended, of the cap of all heads (HARD-KV, Figure 9); None without a cap."""
        return None if self.budget_tokens is None else self.attended_tokens / self.budget_tokens

    def as_json(self) -> dict[str, Any]:
        """All fields, byte_seconds and utilisation."""
        derived = {"byte_seconds": self.byte_seconds, "utilisation": self.utilisation}
        return asdict(self) | derived


def check_budgets(policies: Sequence[Policy], settings: BudgetSettings, shape: ModelShape) -> None:
    """Refuse what the model has no positions for, or leaves nothing to select, before loading."""
    if settings.positions > shape.max_context:
        raise ValueError(
            f"{settings.positions:,} tokens are more than the {shape.max_context:,} positions of "
            "this model; lower --context, --steps or --generate"
        )
    for policy in policies:
        policy.check_model(**shape.heads)
        if policy.selects and policy.dense_layers >= shape.num_layers:
            raise ValueError(
                f"{policy.name}: dense_layers={policy.dense_layers} are all {shape.num_layers} "
                "layers of this model, so nothing is selected; lower it by --option dense_layers=0"
            )
        if policy.selects and policy.budget_tokens >= settings.length:
            option = "--max-tokens" if isinstance(policy, HardKV) else "--budget-tokens"
            raise ValueError(
                f"{policy.name}: {policy.budget_tokens:,} tokens hold the whole text of "
                f"{settings.length:,}, so nothing is selected; raise --context or lower {option}"
            )


def check_text(num_tokens: int, settings: BudgetSettings) -> None:
    """Refuse a text that is too short, before anything is loaded."""
    if num_tokens < settings.text_tokens:
        raise ValueError(
            f"the text has {num_tokens:,} tokens, but --context {settings.length:,}, --steps "
            f"{settings.steps:,} and {settings.timing_tokens} tokens of timing need "
            f"{settings.text_tokens:,}; give a longer --text, or lower --context or --steps"
        )


def measure_budgets(
    model: SharedModel,
    policies: Sequence[Policy],
    tokens: Sequence[int],
    settings: BudgetSettings,
    *,
    on_policy: Callable[[str], None] = lambda label: None,
    on_progress: Progress = lambda steps: None,
) -> list[BudgetMeasurement]:
    """Measure policies on one text.

    Args:
        policies: those of `model.runtimes`, as they were before they were calibrated; full
            attention first.
        tokens: the text, at least `settings.text_tokens`.
        on_progress: called with the number of decode steps done since the last call.

    Raises:
        ValueError: a text that is too short, a length the model does not have, a budget that
            leaves nothing to select.
    """
    check_budgets(policies, settings, model.runtimes[0].lean.shape)
    check_text(len(tokens), settings)
    following = tokens[settings.length : settings.text_tokens]
    targets = torch.tensor(following[1 : settings.steps + 1])
    dense_layers = max((policy.dense_layers for policy in policies if policy.selects), default=0)
    measured: list[BudgetMeasurement] = []
    with model.read(tokens[: settings.length]) as prompt:
        on_policy("timing")
        seconds = step_seconds(model, prompt, following[: settings.timing_tokens], on_progress)
        for index, policy in enumerate(policies):
            on_policy(_described(policy))
            row, logits = _measured(
                model,
                index,
                policy,
                prompt,
                following[: settings.steps],
                settings,
                dense_layers=dense_layers,
                on_progress=on_progress,
            )
            loss = mean_by_rows(negative_log_likelihood, logits, targets)
            if index == 0:
                full, full_loss = logits, loss
            low, median, high = np.percentile(seconds[index], (10, 50, 90)).tolist()
            measured.append(
                BudgetMeasurement(
                    **row,
                    kl=mean_by_rows(kl_divergence, logits, full),
                    perplexity_change=float(np.expm1(loss - full_loss)),
                    seconds=median,
                    seconds_p10=low,
                    seconds_p90=high,
                )
            )
    return with_tokens_share(measured)


def with_tokens_share(rows: Sequence[BudgetMeasurement]) -> list[BudgetMeasurement]:
    """The same, where heads differ in their budgets with the tokens of fixed ones for the error."""
    curves: dict[str, list[BudgetMeasurement]] = {}
    for row in rows:
        if row.top_p is None and row.budget_tokens is not None:
            curves.setdefault(row.label, []).append(row)
    return [row if row.top_p is None else _with_share(row, curves) for row in rows]


def _measured(
    model: SharedModel,
    index: int,
    policy: Policy,
    prompt: ReadPrompt,
    following: Sequence[int],
    settings: BudgetSettings,
    *,
    dense_layers: int,
    on_progress: Progress,
) -> tuple[dict[str, Any], torch.Tensor]:
    """The fields of a row that need no other policy, and the logits [steps, vocab_size]."""
    top_p = needed_top_p(policy, settings.top_p)
    counter = HeadCounter(top_p, _window(policy))
    common: dict[str, Any] = {
        "sample_every": settings.sample_every,
        "dense_layers": dense_layers,
        "on_progress": on_progress,
    }
    on_seen = counter.seen if policy.selects else None
    seen, logits = observe_text(model, index, prompt, following, on_seen=on_seen, **common)
    drift = Drift()
    if settings.generate:
        drift = measure_drift(
            model,
            index,
            prompt,
            settings.generate,
            temperature_every=settings.temperature_every,
            **common,
        )
    heads = counter.counted()
    row = {name: seen[name] for name in _KEPT} | {
        "policy": policy.name,
        "label": curve_label(policy),
        "options": policy_options(policy),
        "budget_tokens": policy.budget_tokens if policy.selects else None,
        "top_p": policy.top_p if isinstance(policy, HardKV) else None,
        "needed_top_p": top_p,
        "kv_bytes": _kv_bytes(model, prompt, seen["kv_host_bytes"]),
        "policy_bytes": seen["policy_host_bytes"],
        "heads": heads,
        "over_heads": over_heads(heads),
        "drift": drift,
    }
    return row, logits


def needed_top_p(policy: Policy, top_p: float) -> float:
    """The share that a policy's heads are asked for: its own where it has one."""
    return float(policy.top_p) if isinstance(policy, HardKV) else top_p


def curve_label(policy: Policy) -> str:
    """Name and options that are not the defaults, but for the budget: tokens, a share, a cap."""
    if not isinstance(policy, HardKV):
        return policy_label(policy)
    return f"{policy.name} of {policy_label(policy.inner)}"


def _with_share(
    row: BudgetMeasurement, curves: Mapping[str, Sequence[BudgetMeasurement]]
) -> BudgetMeasurement:
    shares: dict[str, float] = {}
    for label, fixed in curves.items():
        points = [(of_fixed.attended_tokens, of_fixed.output_error) for of_fixed in fixed]
        tokens = tokens_of_equal_error(row.output_error, points)
        if tokens is not None:
            shares[label] = row.attended_tokens / tokens
    return replace(row, tokens_share=shares)


def _described(policy: Policy) -> str:
    """For the progress bar."""
    if not policy.selects:
        return policy.name
    budget = policy.top_p if isinstance(policy, HardKV) else f"{policy.budget_tokens:,}"
    return f"{curve_label(policy)} {budget}"


def _window(policy: Policy) -> tuple[int, int]:
    return (policy.sink_tokens, policy.recent_tokens) if policy.selects else (0, 0)


def _kv_bytes(model: SharedModel, prompt: ReadPrompt, used_bytes: int) -> int:
    """Of a prompt's continuation, where both use `used_bytes`.

    The prompt has its last page, if that is not full, beside the copy that was written to.
    """
    store = model.runtimes[0].store
    has_tail = len(prompt.tokens) % store.page_tokens > 0
    return used_bytes - has_tail * store.num_page_rows * store.page_bytes
