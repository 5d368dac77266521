"""The fast path of `generate()`: tokens are chosen inside the decode step.

The stock sampling loop runs a step, brings the logits to Python and chooses, with much bookkeeping
around it. Where all it would do with the logits is argmax, or temperature, top-k and top-p, the
step does that itself (without a GPU: argmax only). With one, embedding, layers, logits and choice
are then a captured graph, and the host reads one token id per row.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from offload.decode.sampling import BurstError, Sampler, SamplingOptions

if TYPE_CHECKING:
    from offload.runtime.runtime import Runtime


def generate_tokens(
    runtime: Runtime,
    outputs: Any,
    options: SamplingOptions,
    input_ids: Tensor,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Tensor:
    """As the stock `_sample` does it, with the choice in the step.

    Args:
        outputs: `CausalLMOutputWithPast` of the prompt.

    Returns:
        int64 [batch_size, tokens], prompt and new tokens.
    """
    ids = [c.eos_token_id.cpu() for c in stopping_criteria if isinstance(c, EosTokenCriteria)]
    eos = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    pad = int(generation_config._pad_token_tensor) if ids else 0
    batch_size, length = input_ids.shape
    text = torch.empty(batch_size, stopping_criteria.max_length, dtype=torch.int64)
    text[:, :length] = input_ids
    unfinished = torch.ones(batch_size, dtype=torch.bool)
    cache, positions = outputs.past_key_values, _last_positions(model_kwargs, batch_size, length)
    positions -= length
    sampler = Sampler(options, batch_size)
    chosen = runtime.first_tokens(outputs.logits[:, -1], sampler)[:, None]
    del outputs  # the logits may be of a whole prompt
    failed = False  # the last step that was tried

    def ends(tokens: Tensor) -> bool:
        return bool((torch.isin(tokens, eos) & unfinished).any())

    while True:
        ended = torch.isin(chosen, eos) & unfinished[:, None]
        if bool(ended[:, :-1].any()):  # what follows an answer's end is padding
            kept = int(ended.any(dim=0).int().argmax()) + 1
            surplus = chosen.shape[1] - kept
            chosen, ended = chosen[:, :kept], ended[:, :kept]
            cache.crop(-surplus)
            runtime.current_generation.stats.decode_tokens -= surplus * batch_size
        sampler.take(chosen.shape[1])
        chosen = torch.where(unfinished[:, None], chosen, pad)
        text[:, length : length + chosen.shape[1]] = chosen
        length += chosen.shape[1]
        if streamer is not None:
            for tokens in chosen if batch_size == 1 else chosen.T:
                streamer.put(tokens)
        unfinished &= ~ended[:, -1]
        if length == text.shape[1] or not bool(unfinished.any()):
            break
        # Steps that feed themselves would feed an answer that has ended other tokens than padding.
        most = text.shape[1] - length if bool(unfinished.all()) and not failed else 1
        last = chosen[:, -1].contiguous()
        step = functools.partial(
            runtime.choose_tokens, cache, last, positions + length, sampler=sampler
        )
        try:
            chosen = step(most, ends)
            failed = False
        except BurstError as error:
            failed = error.chosen is not None
            chosen = step() if error.chosen is None else error.chosen
    if streamer is not None:
        streamer.end()
    return text[:, :length].to(input_ids.device)


def _last_positions(model_kwargs: dict[str, Any], batch_size: int, length: int) -> Tensor:
    """int64 [batch_size]: the position id of the prompt's last token of each row."""
    position_ids = model_kwargs.get("position_ids")
    if position_ids is None:
        return torch.full((batch_size,), length - 1)
    last: Tensor = position_ids[:, -1].cpu().expand(batch_size).clone()
    return last


_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in this order


_KEPT_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def fast_options(
    logits_processor: Any, stopping_criteria: Any, generation_config: Any
) -> SamplingOptions | None:
    """What a `TokenChooser` needs to choose as the stock sampling loop would; None if it cannot.

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
