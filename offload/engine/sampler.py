"""The next token of one request from its logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.engine.sampling_params import SamplingParams

# Of so many likeliest tokens top_p is tried first: to sort a vocabulary takes 20 times as long.
_TRIED = (256, 4096)


@dataclass(frozen=True)
class Chosen:
    """A token, and where they were asked for natural logarithms of probabilities.

    Attributes:
        logprob: of `token`, by the model's own logits; None: not asked for.
        likeliest: (token, logprob), the likeliest first.
    """

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


def choose(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    uniform: float,
    ends: Collection[int],
) -> Chosen:
    """The next token.

    Args:
        logits: [vocab_size], of any dtype and device; not changed.
        answer: the tokens chosen so far.
        uniform: as of `sample_tokens`.
        ends: tokens that `min_tokens` keeps from being chosen.

    Raises:
        RuntimeError: logits that are not finite, or that a processor leaves without a choice.
        Whatever a processor raises.
    """
    given = logits.float().cpu()
    is_bad = given.isnan().any() if params.temperature == 0.0 else ~given.amax().isfinite()
    if bool(is_bad):
        raise RuntimeError("non-finite logits")
    changed = given
    if params.changes_logits or ends:
        changed = _changed(given.clone(), params, prompt, answer, ends)
    if params.temperature == 0.0:
        token = int(changed.argmax())
    else:
        token = _sample(changed / params.temperature, params, uniform)
    return Chosen(token) if params.logprobs is None else score(given, token, params.logprobs)


def score(logits: Tensor, token: int, num_likeliest: int) -> Chosen:
    """A token with its logprob by `logits` [vocab_size], and the likeliest tokens with it."""
    logprobs = logits.float().cpu().log_softmax(dim=-1)
    values, tokens = logprobs.topk(num_likeliest)
    likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Chosen(token, float(logprobs[token]), likeliest)


def _changed(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    ends: Collection[int],
) -> Tensor:
    """Before temperature, in place."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *answer}))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        counted = Counter(answer)
        tokens, counts = torch.tensor([*counted]), torch.tensor([*counted.values()])
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for processor in params.logits_processors:
        result = processor([*prompt, *answer], logits)
        if not isinstance(result, Tensor):
            raise RuntimeError(f"a logits processor returned {type(result).__name__}, not a tensor")
        if result.shape != logits.shape:
            raise RuntimeError(
                f"a logits processor returned shape {list(result.shape)}, not {list(logits.shape)}"
            )
        logits = result
    if ends:
        logits[list(ends)] = -torch.inf
    largest = float(logits.amax())  # NaN if there is one
    if (
        math.isnan(largest)
        or largest == -math.inf
        or (params.temperature > 0.0 and largest == math.inf)
    ):
        raise RuntimeError("a logits processor left NaN, inf, or no token that may be chosen")
    return logits


def _sample(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """By top_k, top_p and min_p, in the order in which transformers' warpers apply. As in
    `sample_tokens`, tokens that tie for the last place are kept."""
    tokens: Tensor | None = None  # of `logits`; None: all
    largest = logits.amax()
    if 0 < params.top_k < len(logits):
        logits, tokens = _kept(logits, tokens, logits.topk(params.top_k).values[-1])
    masses = (logits - largest).exp()
    if params.top_p < 1.0:
        enough = params.top_p * masses.sum(dtype=torch.float64)
        for tried in (*_TRIED, len(masses)):
            likeliest = masses.topk(min(tried, len(masses))).values
            if likeliest.sum(dtype=torch.float64) >= enough:
                break
        sums = likeliest.cumsum(0, dtype=torch.float64)
        last = min(int((sums < enough).sum()), len(likeliest) - 1)
        masses, tokens = _kept(masses, tokens, likeliest[last])
    if params.min_p > 0.0:
        masses, tokens = _kept(masses, tokens, params.min_p * masses.amax())
    sums = masses.cumsum(0, dtype=torch.float64)
    at = int(torch.searchsorted(sums, uniform * sums[-1], right=True))
    return at if tokens is None else int(tokens[at])


def _kept(x: Tensor, tokens: Tensor | None, least: Tensor) -> tuple[Tensor, Tensor]:
    at = (x >= least).nonzero()[:, 0]
    return x[at], at if tokens is None else tokens[at]
