"""How well policies select, on a real model and real text.

Every policy reads the same `context` tokens (prefill is exact, and computed once) and is then fed
the same next tokens of the text, one by one, so that the next-token distributions of all policies
can be compared position by position. Full attention is the reference and runs first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from offload.bench.selection.metrics import (
    ReferenceBudget,
    kl_divergence,
    mean_by_rows,
    negative_log_likelihood,
)
from offload.bench.selection.observer import SelectionObserver
from offload.bench.selection.shared_prefill import SharedPrefill
from offload.policies import HardKV, Policy
from offload.policies.registry import make_policy
from offload.system.torch_threads import torch_threads

STABILITY_WINDOW = 32
TIMED_STEPS = 32  # decoded after the observed steps, with nobody looking on

Progress = Callable[[int], None]


@dataclass(frozen=True)
class SelectionSettings:
    """What is measured.

    Attributes:
        context: tokens that are prefilled.
        steps: decode steps after them, whose next-token distributions count.
        sample_every: every n-th of them is compared with exact attention.
        timed_steps: further steps that are timed.
        reference_options: options of the exact top-k that selections are compared with; layers
            that are dense in it are left out for all policies.
    """

    context: int = 6144
    steps: int = 1000
    sample_every: int = 20
    timed_steps: int = TIMED_STEPS
    reference_options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("context", "steps", "sample_every", "timed_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def decode_steps(self) -> int:
        """Observed and timed ones."""
        return self.steps + self.timed_steps

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are needed: the last one is only predicted."""
        return self.context + self.decode_steps + 1


@dataclass(frozen=True)
class SelectionMeasurement:
    """One policy on the text. Means over sampled steps, sparse layers and selecting units, or over
    all steps. None: does not apply, or too few steps.

    Attributes:
        policy: its name.
        label: the name with the options that are not the defaults.
        options: those of the policy.
        budget_tokens: attended tokens per unit, at most; None for full attention.
        attended_tokens: per unit, also of those that attend to everything.
        selecting_share: share of the units that selected; others attend to everything (retrieval
            heads, full layers) or answer without attention (LFPS's bypass).
        candidate_share: keys scored exactly, of all keys of the sparse layers.
        overlap: of the selection with the equally many most important tokens.
        recall: the same, with sinks and recent tokens.
        mass_kept: attention mass of what was attended, sinks excluded.
        mass_of_topk: that, relative to exact top-k at the same budget.
        output_error: relative L2 error of a layer's attention output.
        kl: of the next-token distribution against full attention's, in nats.
        perplexity: of the text after the context.
        perplexity_change: relative to full attention.
        jaccard, window_hit: stability of the selected tokens (LycheeCluster, Eq. 3 and 4).
        tokens_per_second: of decoding, median over the timed steps.
    """

    policy: str
    label: str
    options: dict[str, Any]
    budget_tokens: int | None
    context: int
    steps: int
    attended_tokens: float | None
    selecting_share: float | None
    candidate_share: float | None
    overlap: float | None
    recall: float | None
    mass_kept: float | None
    mass_of_topk: float | None
    output_error: float | None
    kl: float
    perplexity: float
    perplexity_change: float
    jaccard: float | None
    window_hit: float | None
    tokens_per_second: float


def measure_selection(
    load: Callable[[Policy], Any],
    policies: Sequence[Policy],
    tokens: Sequence[int],
    settings: SelectionSettings,
    *,
    on_policy: Callable[[str], None] = lambda label: None,
    on_progress: Progress = lambda steps: None,
) -> list[SelectionMeasurement]:
    """Measure policies on one text, full attention first.

    Args:
        load: makes the model under a policy (`OffloadedModel.from_pretrained`).
        tokens: the text, at least `settings.text_tokens`.
        on_progress: called with the number of steps done since the last call.

    Raises:
        ValueError: a text that is too short, a context the model does not have, a budget that
            leaves nothing to select.
    """
    check_settings(policies, len(tokens), settings)
    text = torch.tensor(tokens[: settings.text_tokens])
    predicted = text[settings.context + 1 : settings.context + 1 + settings.steps]
    runs = [make_policy("full"), *(policy for policy in policies if policy.name != "full")]
    shared = SharedPrefill()
    full_logits: torch.Tensor | None = None
    full_loss = 0.0
    measurements = []
    for policy in runs:
        budget = f" {policy.budget_tokens:,}" if policy.selects else ""
        on_policy(policy_label(policy) + budget)
        logits, seen = _run(load, shared, policy, text, settings, on_progress)
        gc.collect()  # the model is gone: its cache and weights leave the memory
        loss = mean_by_rows(negative_log_likelihood, logits, predicted)
        if full_logits is None:
            full_logits, full_loss = logits, loss
        measurements.append(
            SelectionMeasurement(
                policy=policy.name,
                label=policy_label(policy),
                options=policy_options(policy),
                budget_tokens=policy.budget_tokens if policy.selects else None,
                context=settings.context,
                steps=settings.steps,
                kl=mean_by_rows(kl_divergence, logits, full_logits),
                perplexity=float(np.exp(loss)),
                perplexity_change=float(np.exp(loss - full_loss)) - 1.0,
                **seen,
            )
        )
    return measurements


def check_settings(
    policies: Sequence[Policy], num_tokens: int, settings: SelectionSettings
) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    if num_tokens < settings.text_tokens:
        raise ValueError(
            f"the text has {num_tokens:,} tokens, but context={settings.context:,} + "
            f"steps={settings.steps:,} + {settings.timed_steps} timed steps + 1 need "
            f"{settings.text_tokens:,}; give a longer --text, or lower --context or --steps"
        )
    for policy in policies:
        if isinstance(policy, HardKV):
            policy.check_cap()
        if policy.selects and policy.dense_tokens >= settings.context:
            option, lower = "budget_tokens", "--budget-tokens"
            if policy.dense_until is not None:
                option = lower = "dense_until"
            raise ValueError(
                f"{policy.name}: {option}={policy.dense_tokens:,} holds the whole context of "
                f"{settings.context:,} tokens, so nothing is selected; raise --context or "
                f"lower {lower}"
            )


def policy_label(policy: Policy) -> str:
    """Its name with the options that differ from the defaults, but for the budget."""
    defaults = policy_options(make_policy(policy.name))
    changed = [
        f"{key}={value}"
        for key, value in policy_options(policy).items()
        if (key not in defaults or value != defaults[key])
        and key != "budget_tokens"
        # StreamingLLM derives it from the budget.
        and (policy.name, key) != ("streaming_llm", "recent_tokens")
    ]
    return " ".join([policy.name, *changed])


def policy_options(policy: Policy) -> dict[str, Any]:
    """All options as JSON can hold them; those of a policy it is made of follow that one's name."""
    options: dict[str, Any] = {}
    for option in fields(policy):
        value = getattr(policy, option.name)
        if isinstance(value, Policy):
            options |= {option.name: value.name, **policy_options(value)}
        else:
            plain = isinstance(value, (bool, int, float, str, list, tuple, type(None)))
            options[option.name] = value if plain else str(value)
    return options


def reference_of(policy: Policy, settings: SelectionSettings) -> ReferenceBudget | None:
    """What exact top-k attends to with this policy's budget."""
    if not policy.selects:
        return None
    topk = _exact_topk(settings, budget_tokens=policy.budget_tokens)
    return ReferenceBudget(topk.budget_tokens, topk.sink_tokens, topk.recent_tokens)


def _exact_topk(settings: SelectionSettings, **options: int) -> Policy:
    return make_policy("exact_topk", **dict(settings.reference_options), **options)


def reference_options(options: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Those of the options of all policies that exact top-k has, for `SelectionSettings`."""
    known = type(make_policy("exact_topk")).option_names()
    return tuple((k, v) for k, v in options.items() if k in known and k != "budget_tokens")


def _run(
    load: Callable[[Policy], Any],
    shared: SharedPrefill,
    policy: Policy,
    text: torch.Tensor,
    settings: SelectionSettings,
    on_progress: Progress,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits [steps, vocab_size], and the fields of a `SelectionMeasurement` that were observed."""
    model = shared.attach(load(policy))
    runtime = model._offload
    needed, positions = len(text) - 1, runtime.lean.shape.max_context
    if needed > positions:
        raise ValueError(
            f"context={settings.context:,} + steps={settings.steps:,} + {settings.timed_steps} "
            f"timed steps are {needed:,} tokens, but this model has {positions:,} positions; "
            "lower --context or --steps"
        )
    attention = runtime.attention
    dense_layers = _exact_topk(settings).dense_layers
    if policy.selects:
        dense_layers = max(dense_layers, policy.dense_layers)
    observer = SelectionObserver(
        attention,
        reference=reference_of(policy, settings),
        dense_layers=dense_layers,
        sm_scale=runtime.lean.sm_scale,
        capacity_tokens=settings.text_tokens,
        window=STABILITY_WINDOW,
    )
    cache = model.new_cache()

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        out: Any = model(tokens[None], past_key_values=cache, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    forward(text[: settings.context])
    rows, seconds = [], []
    with torch_threads(1):  # as in a generation
        attention.on_attended = observer.attended
        attention.start_profile()
        for step in range(settings.steps):
            observer.sampling = step % settings.sample_every == 0
            position = settings.context + step
            rows.append(forward(text[position : position + 1]))
            on_progress(1)
        candidate_share = None
        if policy.selects:
            candidate_share = attention.profile()["scored_tokens"] / observer.possible_tokens
        attention.on_attended = None
        for position in range(settings.context + settings.steps, len(text) - 1):
            start = time.perf_counter()
            forward(text[position : position + 1])
            seconds.append(time.perf_counter() - start)
            on_progress(1)
    cache.reset()
    # Not the observer: it would keep the model's KV store alive.
    return torch.stack(rows), {
        **observer.measured(),
        "candidate_share": candidate_share,
        "tokens_per_second": 1.0 / float(np.median(seconds)),
    }
