"""How well policies select, on a real model and real text.

`SharedModel` reads a prompt once, and every policy decodes the next tokens of its text, whatever it
would have said, so that the next-token distributions of all can be compared position by position.
Full attention is the reference and runs first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.eval.bounds import Bound, read_within
from offload.bench.eval.labels import policy_label, policy_options
from offload.bench.eval.perplexity import teacher_forced
from offload.bench.quality.metrics import (
    ReferenceBudget,
    kl_divergence,
    mean,
    mean_by_rows,
    negative_log_likelihood,
    relative_error,
)
from offload.bench.quality.observer import SelectionObserver, looked_at
from offload.policies import ExactTopK, HardKV, Policy
from offload.runtime.shared_model import ContinuesPrompts, ReadPrompt, SharedModel

STABILITY_WINDOW = 32
TIMED_STEPS = 32  # decoded after the observed steps, which are not observed

Progress = Callable[[int], None]


@dataclass(frozen=True)
class QualitySettings:
    """What is measured.

    Attributes:
        context: tokens that are read.
        steps: decode steps after them, whose next-token distributions count.
        sample_every: every n-th of them is compared with exact attention.
        timed_steps: further steps that are timed.
        exact_topk: what selections are compared with, at their own budget; layers that are dense in
            it are left out for all policies.
    """

    context: int = 6144
    steps: int = 1000
    sample_every: int = 20
    timed_steps: int = TIMED_STEPS
    exact_topk: Policy = field(default_factory=ExactTopK)

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
class QualityMeasurement:
    """One policy on the text, or full attention within a bound on its bytes. Means over sampled
    steps, sparse layers and selecting units, or over all steps. None: does not apply, or too few
    steps.

    Attributes:
        policy: its name.
        label: the name with the options that are not the defaults, or with the bound.
        options: those of the policy.
        budget_tokens: attended tokens per unit, at most: the slots of a bound; None for full
            attention.
        attended_tokens: per unit, also of those that attend to everything.
        selecting_share: share of the units that selected; others attend to everything (retrieval
            heads, full layers) or answer without attention (LFPS's bypass).
        candidate_share: keys scored exactly, of all keys of the sparse layers.
        overlap: of the selection with the equally many most important tokens.
        recall: the same, with sinks and recent tokens.
        mass_kept: attention mass of what was attended, sinks excluded.
        mass_of_topk: that, relative to exact top-k at the same budget.
        output_error: relative L2 error of a layer's attention output: against exact attention to
            all tokens of the same run; of a bound against that of a run without it.
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
    output_error: float | None
    kl: float
    perplexity: float
    perplexity_change: float
    tokens_per_second: float
    attended_tokens: float | None = None
    selecting_share: float | None = None
    candidate_share: float | None = None
    overlap: float | None = None
    recall: float | None = None
    mass_kept: float | None = None
    mass_of_topk: float | None = None
    jaccard: float | None = None
    window_hit: float | None = None


class _Observer(Protocol):
    sampling: bool

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None: ...


@dataclass
class _BoundObserver:
    """Compares attention's output with that of a run without a bound.

    Args:
        exact: outputs of the other run, as `SelectionObserver` has them.
        dense_layers: that it leaves out.
    """

    exact: Sequence[Tensor]
    dense_layers: int
    sampling: bool = False
    errors: list[float] = field(default_factory=list)

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """See one layer of a step of one sequence with one new token."""
        if self.sampling and layer_idx >= self.dense_layers:
            exact = self.exact[len(self.errors)]
            self.errors.append(relative_error(out[0, : exact.numel()], exact))


def measure_quality(
    model: SharedModel,
    policies: Sequence[Policy],
    tokens: Sequence[int],
    settings: QualitySettings,
    bounds: Sequence[Bound] = (),
    *,
    on_policy: Callable[[str], None] = lambda label: None,
    on_progress: Progress = lambda steps: None,
) -> list[QualityMeasurement]:
    """Measure policies on one text, and full attention within each bound.

    Args:
        policies: those of `model.runtimes`, as they were before they were calibrated; full
            attention first.
        tokens: the text, at least `settings.text_tokens`.
        on_progress: called with the number of decode steps done since the last call.

    Raises:
        ValueError: as `check_quality`.
    """
    check_quality(policies, len(tokens), settings, model.max_context)
    text = tokens[: settings.text_tokens]
    context, following = text[: settings.context], text[settings.context : -1]
    predicted = torch.tensor(text[settings.context + 1 :][: settings.steps])
    full_logits: Tensor | None = None
    full_loss = 0.0
    exact: list[Tensor] = []
    measured: list[QualityMeasurement] = []

    def add(logits: Tensor, **seen: Any) -> None:
        nonlocal full_logits, full_loss
        loss = mean_by_rows(negative_log_likelihood, logits, predicted)
        if full_logits is None:
            full_logits, full_loss = logits, loss
        measured.append(
            QualityMeasurement(
                context=settings.context,
                steps=settings.steps,
                kl=mean_by_rows(kl_divergence, logits, full_logits),
                perplexity=float(np.exp(loss)),
                perplexity_change=float(np.exp(loss - full_loss)) - 1.0,
                **seen,
            )
        )

    with model.read(context) as prompt:
        for index, policy in enumerate(policies):
            label = policy_label(policy)
            on_policy(f"{label} {policy.budget_tokens:,}" if policy.selects else label)
            observer = _observer(model, index, settings)
            logits, seen = _decode(model, index, prompt, following, settings, observer, on_progress)
            exact = exact or observer.exact
            if policy.selects:
                seen["candidate_share"] = seen["scored_tokens"] / observer.possible_tokens
            del seen["scored_tokens"]
            add(
                logits,
                policy=policy.name,
                label=label,
                options=policy_options(policy),
                budget_tokens=policy.budget_tokens if policy.selects else None,
                **observer.measured(),
                **seen,
            )
    for bound in bounds:
        on_policy(label := bound.label("full"))
        against = _BoundObserver(exact, settings.exact_topk.dense_layers)
        with read_within(bound, model, 0, context, len(following)) as read:
            logits, seen = _decode(
                read.model, 0, read.prompt, following, settings, against, on_progress
            )
            slots = read.measured()["slots"]
        add(
            logits,
            policy="full",
            label=label,
            options={},
            budget_tokens=slots,
            output_error=mean(against.errors),
            tokens_per_second=seen["tokens_per_second"],
        )
    return measured


def check_quality(
    policies: Sequence[Policy], num_tokens: int, settings: QualitySettings, max_context: int
) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Args:
        num_tokens: of the text.
        max_context: positions of the model.

    Raises:
        ValueError: a text that is too short, a context that the model does not have, a budget that
            leaves nothing to select.
    """
    sizes = (
        f"context={settings.context:,} + steps={settings.steps:,} + {settings.timed_steps} timed "
        "steps"
    )
    if num_tokens < settings.text_tokens:
        raise ValueError(
            f"the text has {num_tokens:,} tokens, but {sizes} + 1 need {settings.text_tokens:,}; "
            "give a longer --text, or lower --context or --steps"
        )
    if settings.text_tokens - 1 > max_context:
        raise ValueError(
            f"{sizes} are {settings.text_tokens - 1:,} tokens, but this model has {max_context:,} "
            "positions; lower --context or --steps"
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


def exact_topk_of(options: Mapping[str, Sequence[Any]]) -> Policy:
    """With those options of all policies that it has and that have one value."""
    known = {*ExactTopK.option_names()} - {"budget_tokens"}
    return ExactTopK(**{k: x[0] for k, x in options.items() if k in known and len(x) == 1})


def _observer(model: SharedModel, index: int, settings: QualitySettings) -> SelectionObserver:
    """Observer of a policy's decode steps, which compares them with exact top-k of the same
    budget."""
    runtime, topk = model.runtimes[index], settings.exact_topk
    policy, reference, dense_layers = runtime.config.policy, None, topk.dense_layers
    if policy.selects:
        reference = ReferenceBudget(policy.budget_tokens, topk.sink_tokens, topk.recent_tokens)
        dense_layers = max(dense_layers, policy.dense_layers)
    return SelectionObserver(
        runtime.attention,
        reference=reference,
        dense_layers=dense_layers,
        sm_scale=runtime.lean.sm_scale,
        capacity_tokens=settings.text_tokens,
        window=STABILITY_WINDOW,
    )


def _decode(
    model: ContinuesPrompts,
    index: int,
    prompt: ReadPrompt,
    following: Sequence[int],
    settings: QualitySettings,
    observer: _Observer,
    on_progress: Progress,
) -> tuple[Tensor, dict[str, Any]]:
    """Logits [steps, vocab_size]; scored_tokens of all these steps, and tokens_per_second."""
    attention = model.runtimes[index].attention
    logits, seconds = [], []
    with teacher_forced(model, index, prompt) as decode:
        with looked_at(attention, observer.attended):
            attention.start_profile()
            for step, token in enumerate(following[: settings.steps]):
                observer.sampling = step % settings.sample_every == 0
                logits.append(decode(token))
                on_progress(1)
            scored = attention.profile()["scored_tokens"]
        for token in following[settings.steps :]:
            start = time.perf_counter()
            decode(token)
            seconds.append(time.perf_counter() - start)
            on_progress(1)
    rates = {"scored_tokens": scored, "tokens_per_second": 1.0 / float(np.median(seconds))}
    return torch.stack(logits), rates
