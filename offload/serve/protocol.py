"""What requests may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from offload.engine.sampling_params import MOST_LOGPROBS, SamplingParams
from offload.engine.sessions import check_session_id
from offload.serve.bodies import Body, at_most, described, only
from offload.serve.structured import Constraint, ResponseFormat, StructuredOutputs, calls_grammar
from offload.serve.tools import CallBlocks, NamedTool, Tool, ToolCall

Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
MaxTokens = Annotated[int, described(minimum=1)]
Penalty = Annotated[float, described(minimum=-2, maximum=2)]
IdPattern = described(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, described(minimum=0)]
Ids = Annotated[list[TokenId], at_most(2**21)]
_MOST_MESSAGES = 2**14
# Of the chat template and the tokenizer, which the server gives or leaves as they are.
_OURS = {
    "messages",
    *signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *signature(render_jinja_template).parameters,
    *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    "raise_exception",
    "strftime_now",
}


def _not_ours(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in _OURS:
            raise ValueError(f"{name!r} is the server's to give; leave it out")
    return given


ChatTemplateKwargs = Annotated[dict[str, Any], AfterValidator(_not_ours)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, only(False)] = False


class Sampling(Body):
    """What all answers have in common."""

    model: str | None = None
    stream: bool = False
    min_tokens: Annotated[int, described(minimum=0)] = 0
    temperature: Annotated[float, described(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, described(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[int, described(minimum=-1)] = 0
    min_p: Annotated[float, described(minimum=0, maximum=1)] = 0.0
    seed: Annotated[int, described(minimum=-(2**63), maximum=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], at_most(64)] = []
    stop_token_ids: Annotated[list[TokenId], at_most(64)] = []
    logit_bias: dict[str, Annotated[float, described(minimum=-100, maximum=100)]] = {}
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, described(minimum=1e-6, maximum=100)] = 1.0
    ignore_eos: bool = False
    exact: bool = False
    budget_tokens: Annotated[int, described(minimum=1)] | None = None
    session_id: Annotated[str, AfterValidator(check_session_id), IdPattern] | None = None
    # Labels of the client's.
    user: str | None = None
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    service_tier: Annotated[str, only("auto", "default")] = "auto"
    prompt_cache_key: str | None = None  # beginnings are shared anyway
    structured_outputs: StructuredOutputs | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, biases: dict[str, float]) -> dict[str, float]:
        for token in biases:
            if not token.isdecimal():
                raise ValueError(f"token ids are the keys, got {token!r}")
        return biases

    def take_defaults(self, values: Mapping[str, float]) -> None:
        """For the fields that the request does not give."""
        for name in values.keys() - self.model_fields_set:
            setattr(self, name, values[name])


class Sampled(Sampling):
    """What chat and completions have in common."""

    stream_options: StreamOptions | None = None
    return_progress: bool = False
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    store: Annotated[bool, only(False)] = False
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _streamed(self) -> Sampled:
        if not self.stream and (self.stream_options or self.return_progress):
            raise ValueError("stream_options and return_progress need stream=true")
        return self

    @model_validator(mode="after")
    def _may_end(self) -> Sampled:
        constraints = self.constraints()
        if len(constraints) > 1:
            raise ValueError(
                f"{constraints[0].field} and {constraints[1].field} exclude each other"
            )
        if constraints and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                f"ignore_eos and min_tokens exclude {constraints[0].field}, which says where the "
                "answer ends"
            )
        return self

    def constraints(self) -> list[Constraint]:
        """What the answer must be, of which there may be one."""
        made = [
            None if field is None else field.constraint()
            for field in (self.response_format, self.structured_outputs)
        ]
        return [constraint for constraint in made if constraint is not None]

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that an answer may have; None: no limit of its own."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """Whether the prompt is part of the answer."""
        return False

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt is all of the answer."""
        return self.echoes and self.most_tokens == 0

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives given with the logprob of each token; None: no logprobs."""
        raise NotImplementedError

    def sampling(self, number: int) -> SamplingParams:
        """Sampling parameters of answer `number` of the `n` answers: each has a seed of its own.

        Raises:
            ValueError: names what is out of range.
        """
        params = SamplingParams(
            max_tokens=1 if self.only_echoes else self.most_tokens,  # an engine chooses one
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stops,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_logprobs if self.echoes else None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            exact=self.exact,
            budget_tokens=self.budget_tokens,
        )
        if params.seed is None or number == 0:
            return params
        return replace(params, seed=(params.seed + number + 2**63) % 2**64 - 2**63)


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """As said."""
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Discriminator("type")]


class Message(BaseModel):
    """Further fields are the template's."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], at_most(_MOST_MESSAGES)] | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], at_most(1024)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not self.tool_calls and not self.refusal:
            beside = "".join(f", beside {name}" for name in self.model_extra or ())
            raise ValueError(f"a message needs content{beside}")
        return self

    def plain(self) -> dict[str, Any]:
        """As templates take it: content is a string, of a message that only calls tools, too."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        plain: dict[str, Any] = {"role": self.role, "content": content}
        if self.refusal and content:
            plain["refusal"] = self.refusal
        elif self.refusal:
            plain["content"] = self.refusal
        further = self.model_extra or {}
        plain |= {name: value for name, value in further.items() if value is not None}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        return plain


def _distinct(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise ValueError("two of the tools have one name")
    return tools


Tools = Annotated[list[Tool], at_most(128), AfterValidator(_distinct)]


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], at_most(_MOST_MESSAGES, least=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: Tools = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: ChatTemplateKwargs = {}
    functions: Annotated[list[Any], only([])] = []
    function_call: Annotated[Any, only("none")] = None
    modalities: Annotated[list[str], at_most(1), only(["text"])] = ["text"]
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if len(self.messages) > 1 and {m.role for m in self.messages[-2:]} == {"assistant"}:
            raise ValueError("messages end with two of the assistant; one can be continued")
        if self.messages[-1].role == "assistant" and self.messages[-1].tool_calls:
            raise ValueError("messages end with tool_calls; their results must follow")
        return self

    @model_validator(mode="after")
    def _tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        choice = self.tool_choice
        if not self.tools and choice not in ("none", "auto"):
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which tools lack")
        if self.reads_calls and super().constraints():
            raise ValueError(
                "tools and a format of the answer exclude each other; tool_choice='none' goes with "
                "both"
            )
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def reads_calls(self) -> bool:
        """Whether the model may call, and need not."""
        return self.tool_choice == "auto" and bool(self.tools)

    @property
    def forced_tools(self) -> list[Tool]:
        """One of which must be called."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return self.tools if choice == "required" else []

    def constraints(self) -> list[Constraint]:
        """As `Sampled.constraints`; a call that must be is one, too."""
        functions = [tool.function for tool in self.forced_tools]
        if not functions:
            return super().constraints()
        schemas = [(function.name, function.parameters) for function in functions]
        made = Constraint("tools", [each for _, each in schemas], lambda: calls_grammar(schemas))
        return [*super().constraints(), made]

    def sampling(self, number: int) -> SamplingParams:
        """As `Sampled.sampling`; a single call ends the answer."""
        params = super().sampling(number)
        if not self.reads_calls or self.parallel_tool_calls:
            return params
        reader = self.call_blocks()

        def has_call(text: str) -> bool:
            reader.take(text, None)
            return bool(reader.calls)

        return replace(params, ends_after=has_call)

    def call_blocks(self) -> CallBlocks:
        """What reads an answer in which the model may call."""
        names = [tool.function.name for tool in self.usable_tools]
        return CallBlocks(names, most=None if self.parallel_tool_calls else 1)

    @property
    def most_tokens(self) -> int | None:
        """By its newer name, or its older."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def num_logprobs(self) -> int | None:
        """As `Sampled.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind(prompt: Any) -> str:
    """By the first item: that of a union tries all."""
    if not isinstance(prompt, list):
        return "text"
    return "ids" if prompt and isinstance(prompt[0], int) else "prompts"


_Prompts = Annotated[list[str | Ids], at_most(128)]


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[_Prompts, Tag("prompts")],
        Discriminator(_kind),
    ]
    max_tokens: Annotated[int, described(minimum=0)] | None = 16
    echo: bool = False
    logprobs: Logprobs | None = None
    best_of: Annotated[int, only(1)] = 1
    suffix: Annotated[str, only()] = ""

    @model_validator(mode="after")
    def _no_answer(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, got 0; 0 needs echo=true")
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens=0")
        return self

    @property
    def echoes(self) -> bool:
        """As `Sampled.echoes`."""
        return self.echo

    @property
    def prompts(self) -> list[str | Ids]:
        """Those that were given, of which there may be one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if _kind(self.prompt) == "ids":
            return [cast("Ids", self.prompt)]
        return cast("list[str | Ids]", self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        """As `Sampled.num_logprobs`."""
        return self.logprobs


class TokenizeRequest(Body):
    """POST /tokenize, as vLLM has it: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], at_most(_MOST_MESSAGES)] | None = None
    tools: Tools = []
    add_special_tokens: bool = True
    chat_template_kwargs: ChatTemplateKwargs = {}

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("chat_template_kwargs needs messages")
        if self.tools and self.messages is None:
            raise ValueError("tools needs messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
