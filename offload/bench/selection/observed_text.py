"""A model under many policies (`SharedModel`), looked at while it decodes what follows a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.bench.eval.perplexity import teacher_forced
from offload.bench.selection.measure import STABILITY_WINDOW
from offload.bench.selection.metrics import ReferenceBudget
from offload.bench.selection.observer import SeenLayer, SelectionObserver, looked_at
from offload.policies.registry import make_policy
from offload.runtime.shared_model import ReadPrompt, SharedModel


def observe_text(
    model: SharedModel,
    index: int,
    prompt: ReadPrompt,
    following: Sequence[int],
    *,
    sample_every: int,
    dense_layers: int,
    on_seen: Callable[[SeenLayer], None] | None = None,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Decode what follows a prompt in its text.

    Args:
        sample_every: n-th step is compared with exact attention.
        dense_layers: first layers that are left out.
        on_seen: as `SelectionObserver` calls it.
        on_progress: called with the number of steps done since the last call.

    Returns:
        The observer's means, and kv_host_bytes and policy_host_bytes as `OffloadStats` has them;
        and the logits [steps, vocab_size].
    """
    runtime = model.runtimes[index]
    topk, policy = make_policy("exact_topk"), runtime.config.policy
    reference = None
    if policy.selects:
        reference = ReferenceBudget(policy.budget_tokens, topk.sink_tokens, topk.recent_tokens)
    observer = SelectionObserver(
        runtime.attention,
        reference=reference,
        dense_layers=dense_layers,
        sm_scale=runtime.lean.sm_scale,
        capacity_tokens=len(prompt.tokens) + len(following),
        window=STABILITY_WINDOW,
        on_seen=on_seen,
    )
    logits = []
    with (
        teacher_forced(model, index, prompt) as decode,
        looked_at(runtime.attention, observer.attended),
    ):
        for step, token in enumerate(following):
            observer.sampling = step % sample_every == 0
            logits.append(decode(token))
            on_progress(1)
        stats = runtime.stats
    row: dict[str, Any] = {
        **observer.measured(),
        "kv_host_bytes": stats.kv_host_bytes,
        "policy_host_bytes": stats.policy_host_bytes,
    }
    return row, torch.stack(logits)
