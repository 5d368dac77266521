"""Answers of engines, and what one alone would be."""

from __future__ import annotations

from typing import Any

import torch
from cases.device_cases import greedy

from offload.engine.engine import Engine
from offload.engine.request import RequestOutput


def alone(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    """The answer of `generate()`."""
    ids = torch.tensor([prompt])
    options["attention_mask"] = torch.ones_like(ids)
    return greedy(model, ids, num_tokens, **options)[0, len(prompt) :].tolist()


def decoded_logits(model: Any, tokens: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """Of all tokens behind the prompt, given one by one."""
    cache = model.new_cache()
    model(tokens[:, :prompt_tokens], past_key_values=cache)
    steps = tokens[:, prompt_tokens:].split(1, dim=1)
    return torch.cat([model(x, past_key_values=cache).logits for x in steps], dim=1)


def outputs_of(engine: Engine) -> list[RequestOutput]:
    """All outputs until there is nothing left to do."""
    outputs = list[RequestOutput]()
    while engine.has_work:
        outputs += engine.step()
    return outputs


def tokens_of(outputs: list[RequestOutput], request_id: str | None = None) -> list[int]:
    """Those of one request, or of the only one."""
    chosen = [x.tokens for x in outputs if request_id is None or x.request_id == request_id]
    return [each.token for tokens in chosen for each in tokens]


def answers(engine: Engine, found: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """The answers to all requests that there are, by id; none fails."""
    found = {} if found is None else found
    while engine.has_work:
        answers_of_step(engine, found)
    return found


def answers_of_step(engine: Engine, found: dict[str, list[int]]) -> dict[str, list[int]]:
    """What a step brings, by id, which is added to `found`."""
    news: dict[str, list[int]] = {}
    for output in engine.step():
        assert output.error is None, output
        tokens = tokens_of([output])
        news.setdefault(output.request_id, []).extend(tokens)
        found.setdefault(output.request_id, []).extend(tokens)
    return news
