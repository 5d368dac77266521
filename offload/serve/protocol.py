"""What requests may have. A field that is not here is refused, as is one that is not supported yet
unless it has its default value."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from offload.engine.sampling_params import MOST_LOGPROBS, SamplingParams
from offload.engine.sessions import check_session_id

_T = TypeVar("_T")
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Ids = list[int]


def _only(*values: Any) -> AfterValidator:
    """A field that has no other effect than its default."""

    def check(value: _T) -> _T:
        if not any(value == each and type(value) is type(each) for each in values):
            raise ValueError("this is not supported yet; leave it out")
        return value

    return AfterValidator(check)


class _Body(BaseModel):
    """null is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}


class StreamOptions(_Body):
    """Of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, _only(False)] = False


class Sampled(_Body):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: StopString | list[StopString] = []
    n: Annotated[int, Field(ge=1, le=128)] = 1
    logit_bias: dict[str, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    session_id: Annotated[str, AfterValidator(check_session_id)] | None = None
    # Labels of the client's.
    user: str | None = None
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    store: Annotated[bool, _only(False)] = False
    service_tier: Annotated[str, _only("auto", "default")] = "auto"
    prompt_cache_key: str | None = None  # beginnings are shared anyway
    # Structured output comes here: fields that `sampling` turns into logits_processors.
    response_format: Annotated[dict[str, Any] | None, _only({"type": "text"})] = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, biases: dict[str, float]) -> dict[str, float]:
        for token in biases:
            if not token.isdecimal():
                raise ValueError(f"token ids are the keys, got {token!r}")
        return biases

    @model_validator(mode="after")
    def _streamed(self) -> Sampled:
        if not self.stream and (self.stream_options or self.return_progress):
            raise ValueError("stream_options and return_progress need stream=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Of an answer."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether the prompt is part of the answer."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside the logprob of each token; None: no logprobs."""
        raise NotImplementedError

    def sampling(self, number: int) -> SamplingParams:
        """Of the answer with this number among `n`: each has a seed of its own.

        Raises:
            ValueError: names what is out of range.
        """
        params = SamplingParams(
            max_tokens=self.most_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_logprobs if self.echoes else None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
        )
        if params.seed is None or number == 0:
            return params
        return replace(params, seed=(params.seed + number + 2**63) % 2**64 - 2**63)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Further fields are the template's."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.model_extra or {}).get("tool_calls"):
            raise ValueError("a message needs content")
        return self


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[Any], _only([])] = []
    tool_choice: Annotated[Any, _only("none")] = None
    parallel_tool_calls: Annotated[bool, _only(True)] = True
    functions: Annotated[list[Any], _only([])] = []
    function_call: Annotated[Any, _only("none")] = None
    modalities: Annotated[list[str], _only(["text"])] = ["text"]
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    reasoning_effort: Annotated[Any, _only()] = None
    verbosity: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if len(self.messages) > 1 and {m.role for m in self.messages[-2:]} == {"assistant"}:
            raise ValueError("messages end with two of the assistant; one can be continued")
        return self

    @property
    def most_tokens(self) -> int | None:
        """By its newer name, or its older."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_logprobs(self) -> int | None:
        """As `Sampled.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: str | Ids | list[str | Ids]
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: Logprobs | None = None
    best_of: Annotated[int, _only(1)] = 1
    suffix: Annotated[str, _only()] = ""

    @property
    def echoes(self) -> bool:
        """As `Sampled.echoes`."""
        return self.echo

    @property
    def prompts(self) -> list[str | Ids]:
        """Those that were given, of which there may be one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        if ids:
            return [ids]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def num_logprobs(self) -> int | None:
        """As `Sampled.num_logprobs`."""
        return self.logprobs


class TokenizeRequest(_Body):
    """POST /tokenize, as vLLM has it: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
