"""Tokens given to a policy whatever it would have said, and how far its logits are from others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from offload.bench.eval.selections import SelectionJudge
from offload.runtime.runtime import Runtime
from offload.runtime.shared_model import ContinuesPrompts, ReadPrompt


@contextmanager
def teacher_forced(
    model: ContinuesPrompts, index: int, prompt: ReadPrompt
) -> Iterator[Callable[[int], torch.Tensor]]:
    """What decodes the next token of a prompt's text under a policy: logits [vocab_size] after it.

    Args:
        index: of the policy's runtime.
    """
    runtime, position = model.runtimes[index], len(prompt.tokens)
    with (
        runtime.generation(has_assistant=False),
        model.continued(index, prompt) as cache,
        torch.inference_mode(False),
        torch.no_grad(),
    ):

        def decode(token: int) -> torch.Tensor:
            nonlocal position
            logits = runtime.step_logits(cache, token, position)
            position += 1
            return logits

        yield decode


def measure_forced(
    model: ContinuesPrompts,
    index: int,
    prompt: ReadPrompt,
    following: Sequence[int],
    full: list[torch.Tensor],
    judge: SelectionJudge | None = None,
) -> dict[str, Any]:
    """What a policy makes of tokens that follow a prompt, each given whatever it would have said.

    Args:
        full: of full attention, log probabilities [vocab_size] of each step; filled by the first
            call.
        judge: of some steps, whose seconds do not count.
    """
    is_full = not full
    runtime = model.runtimes[index]
    # The first of them needs no decode step: it is the prompt's, and the same for all.
    targets, losses, divergences, seconds = torch.tensor(following[1:]), [], [], []
    with teacher_forced(model, index, prompt) as decode:
        runtime.attention.start_profile()
        stats = runtime.current_generation.stats
        for step, (token, target) in enumerate(zip(following, targets, strict=False)):
            before = stats.decode_seconds
            with nullcontext() if judge is None else judge.looking(step):
                probable = decode(token).double().log_softmax(-1).cpu()
            if judge is None or not judge.judges(step):
                seconds.append(stats.decode_seconds - before)
            losses.append(-float(probable[target]))
            rounded = probable.float()
            if is_full:
                full.append(rounded)
            divergences.append(float(kl_divergence(rounded, full[step])))
        attended = attended_tokens(runtime, len(losses))
        scored = attended_tokens(runtime, len(losses), "scored_tokens")
    return {
        "nll": math.fsum(losses),
        "kl": math.fsum(divergences),
        "tokens": len(losses),
        "attended_tokens": attended,
        "scored_tokens": scored,
        "decode_seconds": round(math.fsum(seconds), 4),
        "decoded_tokens": len(seconds),
        "build_seconds": round(stats.index_seconds, 4),
        **({} if judge is None else judge.measured()),
    }


def kl_divergence(logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL(reference || other), in nats, of each row of logits [n, vocab_size]: float64 [n]."""
    other = torch.log_softmax(logits.double(), -1)
    reference = torch.log_softmax(reference_logits.double(), -1)
    return (reference.exp() * (reference - other)).sum(-1).clamp_(min=0.0)


def attended_tokens(runtime: Runtime, steps: int, count: str = "attended_tokens") -> float | None:
    """Per step, layer and unit, dense layers included, since the profile was started.

    Args:
        count: of `NativeAttention.profile`, in tokens x units.
    """
    attention = runtime.attention
    if not steps or runtime.device.type != "cpu":
        return None
    per_query_head = attention.policy.selects and attention.policy.per_query_head
    num_units = sum(heads[0 if per_query_head else 1] for heads in attention.layer_heads)
    counted: float = attention.profile()[count] / num_units
    return counted / steps
