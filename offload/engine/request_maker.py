"""Requests from what callers give, refused here if they could not be answered to their end."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from offload.engine.request import Request, RequestOutput
from offload.engine.sampling_params import SamplingParams
from offload.engine.scheduler import Admission
from offload.engine.text import TextStream
from offload.system.errors import HostBudgetError
from offload.system.memory import format_bytes


class RequestMaker:
    """Makes the requests to one model."""

    def __init__(self, model: Any, tokenizer: Any, admission: Admission) -> None:
        self._model, self._tokenizer, self._admission = model, tokenizer, admission
        eos = model.generation_config.eos_token_id
        self._eos = frozenset([] if eos is None else eos if isinstance(eos, list) else [eos])

    def make(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        on_output: Callable[[RequestOutput], None] | None,
        is_ready: Callable[[], bool],
    ) -> Request:
        """A request that waits.

        Raises:
            ValueError, HostBudgetError: as `Engine.add_request`.
        """
        prompt = _token_ids(prompt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if not prompt:
            raise ValueError("the prompt is empty")
        vocab_size = self._model.config.vocab_size
        for name, tokens in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{name}: token id {token} is outside the vocabulary of {vocab_size}"
                    )
        if (params.stop or params.ends_after) and self._tokenizer is None:
            name = "stop strings need" if params.stop else "ends_after needs"
            raise ValueError(f"{name} a tokenizer: Engine(model, tokenizer)")
        runtime = self._model._offload
        runtime.attention.check_budget(params.exact, params.budget_tokens)
        if params.prompt_logprobs is not None and not runtime.scores_prompts:
            raise ValueError(
                "prompt_logprobs is not for models without native layers; leave it out, and echo "
                "with logprobs of a server, too"
            )
        room = runtime.max_context - len(prompt) + 1
        max_tokens = params.max_tokens or max(1, room)
        runtime.check_context(len(prompt) + max_tokens - 1)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        text = None
        if self._tokenizer is not None:
            text = TextStream(self._tokenizer, tuple(params.stop or ()), prompt)
        if params.max_tokens is None:  # as many as the host has room for
            max_tokens = self._admission.most_answer(len(prompt), max_tokens)
        request_id = request_id or f"request-{uuid.uuid4().hex}"
        request = Request(request_id, prompt, params, max_tokens, ends, text, on_output, is_ready)
        budget, whole = self._admission.budget_bytes, runtime.store.host_budget_bytes
        most = self._admission.most_bytes(request.most_tokens)
        if most > budget:
            half = "" if runtime.store.format.is_int8 else ", load the model with kv_dtype='int8'"
            raise HostBudgetError(
                f"{len(prompt)} tokens of prompt and {max_tokens} of answer need "
                f"{format_bytes(most)} of host KV cache, but its budget is {format_bytes(budget)}, "
                f"without what reading prompts takes of {format_bytes(whole)}; "
                f"raise max_memory={{'cpu': ...}}{half} or lower max_tokens"
            )
        return request


def _token_ids(prompt: Any) -> list[int]:
    """Token ids of one sequence; text, or numbers that are no ids, are refused."""
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        return [operator.index(item) for item in items]
    except TypeError:
        raise ValueError(
            "the prompt must be the token ids of one sequence, such as "
            f"tokenizer(text).input_ids, got {type(prompt).__name__}"
        ) from None
