"""A real model under many policies, looked at while it decodes a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.bench.eval.perplexity import teacher_forced
from offload.bench.selection.measure import STABILITY_WINDOW
from offload.bench.selection.metrics import ReferenceBudget
from offload.bench.selection.observer import SelectionObserver
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import ReadPrompt, SharedModel

MODEL = "smollm2-135m-instruct-32k"


def open_model(policies: Sequence[Policy], threads: int) -> SharedModel:
    """The 32K model: prompts are read on a GPU if there is one, all else is the CPU's."""
    config = runtime_config(dtype="bfloat16", device="cpu", num_threads=threads)
    reads_on = "cuda" if torch.cuda.is_available() else None
    return SharedModel(MODEL, policies, config, reads_on=reads_on)


def observer_of(model: SharedModel, index: int, capacity_tokens: int) -> SelectionObserver:
    """Of a policy's decode steps, beside exact top-k of its budget."""
    runtime = model.runtimes[index]
    topk, policy = make_policy("exact_topk"), runtime.config.policy
    reference = None
    if policy.selects:
        reference = ReferenceBudget(policy.budget_tokens, topk.sink_tokens, topk.recent_tokens)
    return SelectionObserver(
        runtime.attention,
        reference=reference,
        dense_layers=topk.dense_layers,
        sm_scale=runtime.lean.sm_scale,
        capacity_tokens=capacity_tokens,
        window=STABILITY_WINDOW,
    )


def observe_text(
    model: SharedModel,
    index: int,
    prompt: ReadPrompt,
    following: Sequence[int],
    *,
    sample_every: int,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Decode what follows a prompt in its text.

    Args:
        sample_every: n-th step is compared with exact attention.

    Returns:
        The observer's means, candidate_share (keys scored exactly, of all) and build_seconds; and
        the logits [steps, vocab_size].
    """
    runtime = model.runtimes[index]
    observer = observer_of(model, index, len(prompt.tokens) + len(following))
    logits = []
    with teacher_forced(model, index, prompt) as decode:
        runtime.attention.on_attended = observer.attended
        runtime.attention.start_profile()
        for step, token in enumerate(following):
            observer.sampling = step % sample_every == 0
            logits.append(decode(token))
        runtime.attention.on_attended = None
        scored = runtime.attention.profile()["scored_tokens"] / observer.possible_tokens
        seconds = runtime.stats.index_seconds
    row: dict[str, Any] = {**observer.measured(), "candidate_share": scored}
    return row | {"build_seconds": seconds}, torch.stack(logits)
