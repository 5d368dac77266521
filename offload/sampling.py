"""Choosing the next token from logits, with torch operations that a CUDA graph can capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in this order
_KEPT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class SamplingOptions:
    """How a step chooses. temperature 0 takes the likeliest token; top_k 0 and top_p 1 keep all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def fast_options(
    logits_processor: Any, stopping_criteria: Any, generation_config: Any
) -> SamplingOptions | None:
    """What `choose` needs to choose as the stock sampling loop would; None if it cannot.

    It cannot if something wants the logits, or looks at more than the last token to stop.
    """
    if generation_config.return_dict_in_generate or any(
        getattr(generation_config, name, None) for name in _KEPT_OUTPUTS
    ):
        return None
    if any(type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in stopping_criteria):
        return None
    kinds = [type(processor) for processor in logits_processor]
    if kinds != [kind for kind in _WARPERS if kind in kinds]:
        return None
    if not generation_config.do_sample:
        return None if kinds else SamplingOptions()
    options: dict[str, Any] = {"temperature": 1.0}
    for processor in logits_processor:
        if isinstance(processor, TemperatureLogitsWarper):
            options["temperature"] = float(processor.temperature)
        elif isinstance(processor, TopKLogitsWarper):
            options["top_k"] = int(processor.top_k)
        elif processor.min_tokens_to_keep != 1:
            return None
        else:
            options["top_p"] = float(processor.top_p)
    return SamplingOptions(**options)


def choose(logits: Tensor, options: SamplingOptions) -> Tensor:
    """One token per row: logits [n, vocab_size] -> int64 [n].

    Top-k is cut before top-p, as transformers does it; of tokens that tie at the k-th place, those
    that `torch.topk` prefers are kept. Randomness is torch's default generator of the device.
    """
    if options.temperature == 0.0:
        return logits.argmax(dim=-1)
    scores = logits.float() / options.temperature
    ids = None
    if options.top_k and options.top_k < scores.shape[-1]:
        scores, ids = scores.topk(options.top_k, dim=-1)  # descending
    elif options.top_p < 1.0:
        scores, ids = scores.sort(dim=-1, descending=True)
    probabilities = scores.softmax(dim=-1)
    if options.top_p < 1.0:
        # A token goes if those above it have top_p of the mass already; the first one stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        goes = before >= options.top_p
        goes[:, 0] = False
        probabilities = probabilities.masked_fill(goes, 0.0)
    # The first to arrive of exponential clocks with these rates: no sum, no host synchronisation.
    arrival = torch.empty_like(probabilities).exponential_()
    place = (probabilities / arrival).argmax(dim=-1, keepdim=True)
    return (place if ids is None else ids.gather(-1, place))[:, 0]
