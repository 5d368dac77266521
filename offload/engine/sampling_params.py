"""How the tokens of one request are chosen, what they attend to, and where it ends."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# (ids of prompt and answer so far, float32 logits [vocab_size]) -> logits; may write in place.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]

MOST_LOGPROBS = 20
_MOST_STOPS = 64
_GREEDY_BELOW = 1e-5
_MOST_BIAS = 100.0
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "budget_tokens")
_INTEGERS = ("min_tokens", "top_k", *_MAY_BE_NONE)
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass
class SamplingParams:
    """How one request is answered. Names and defaults are vLLM's, except that max_tokens has no
    default.

    Attributes:
        max_tokens: of the answer; None: as many as the context has room for.
        min_tokens: before which nothing but `max_tokens` ends the answer.
        temperature: 0 takes the likeliest token.
        top_k: 0, and -1 as in vLLM, keep all.
        top_p, min_p: 1 and 0 keep all.
        seed: of this request's own random numbers; None: another each time.
        stop: one string or several before which the answer ends; they are not part of it.
        stop_token_ids: in addition to the model's end-of-sequence tokens.
        ends_after: told each new piece of the answer's text; the answer ends where it says True.
        ignore_eos: those do not end the answer.
        logprobs: of each token, and so many of the likeliest with it; None: none.
        prompt_logprobs: as `logprobs`, of the prompt's tokens after the first.
        repetition_penalty: of tokens of prompt and answer, as in transformers.
        presence_penalty, frequency_penalty: of tokens of the answer, as OpenAI defines them.
        logit_bias: added to the logits of tokens.
        logits_processors: called in turn, before temperature.
        exact: decode steps attend to all tokens, whatever the model's policy.
        budget_tokens: that each KV head attends to, where the policy selects; None: the policy's.

    Raises:
        ValueError: names what is out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ends_after: Callable[[str], bool] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logits_processors: Sequence[LogitsProcessor] = ()
    exact: bool = False
    budget_tokens: int | None = None

    def __post_init__(self) -> None:
        self.stop = _items("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        if not all(isinstance(text, str) for text in self.stop):
            raise ValueError(f"stop must be strings, got {self.stop!r}")
        self.stop_token_ids = _items("stop_token_ids", self.stop_token_ids)
        self.stop_token_ids = tuple(_integer("stop_token_ids", i) for i in self.stop_token_ids)
        self.logits_processors = _items("logits_processors", self.logits_processors)
        if not all(map(callable, self.logits_processors)):
            raise ValueError(f"logits_processors must be callable, got {self.logits_processors!r}")
        self.logit_bias = self.logit_bias or {}
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict of token ids, got {self.logit_bias!r}")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                setattr(self, name, _integer(name, value))
        for name in _NUMBERS:
            if not isinstance(value := getattr(self, name), numbers.Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
        self.top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's "keep all"
        if 0.0 < self.temperature < _GREEDY_BELOW:  # to divide by it would overflow
            self.temperature = 0.0
        limits: dict[str, tuple[float, float]] = {
            "max_tokens": (1, math.inf),
            "min_tokens": (0, math.inf),
            "temperature": (0.0, 100.0),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "seed": (-(2**63), 2**63 - 1),
            "logprobs": (0, MOST_LOGPROBS),
            "prompt_logprobs": (0, MOST_LOGPROBS),
            "repetition_penalty": (1e-6, 100.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "budget_tokens": (1, math.inf),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # NaN is not, either
                upto = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"{name} must be at least {least:g}{upto}, got {value!r}")
        if self.top_p == 0.0:
            raise ValueError("top_p must be more than 0; temperature=0 takes the likeliest token")
        if len(self.stop) > _MOST_STOPS or not all(self.stop):
            raise ValueError(
                f"stop must be at most {_MOST_STOPS} strings that are not empty, got {self.stop!r}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact must be True or False, got {self.exact!r}")
        if self.exact and self.budget_tokens is not None:
            raise ValueError("exact and budget_tokens exclude each other")
        for token, bias in self.logit_bias.items():
            _integer("a token of logit_bias", token)
            if not isinstance(bias, numbers.Real) or not abs(bias) <= _MOST_BIAS:
                raise ValueError(
                    f"logit_bias of token {token} must be at most {_MOST_BIAS:g} either way, got "
                    f"{bias!r}"
                )

    @property
    def changes_logits(self) -> bool:
        """Whether anything is done to all logits of an answer before temperature."""
        penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalised != (1.0, 0.0, 0.0) or bool(self.logit_bias or self.logits_processors)


def _items(name: str, given: Any) -> tuple[Any, ...]:
    """Those of a sequence; none of None."""
    try:
        return () if given is None else tuple(given)
    except TypeError:
        raise ValueError(f"{name} must be a list, got {given!r}") from None


def _integer(name: str, given: Any) -> int:
    """As a Python integer; numpy's and torch's are taken, too."""
    try:
        return int(operator.index(given))
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {given!r}") from None
