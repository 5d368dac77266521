"""POST /v1/responses: what a request may have, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from offload.serve.bodies import Body, at_most, only
from offload.serve.protocol import ChatRequest, ChatTemplateKwargs, Logprobs, RefusalPart, Sampling
from offload.serve.structured import Constraint, JsonSchema, ResponseFormat
from offload.serve.tools import Arguments, Function, FunctionName, Given, Name, NamedTool, ToolCall

_LOGPROBS = "message.output_text.logprobs"
_MOST_ITEMS = 2**14
_UNSTORED = (
    "responses are not stored; send the whole conversation as input, with a session_id so that it "
    "is not read again"
)
_ENCRYPTED = "this server cannot read it; leave it out"
Ignored = Annotated[Any, only()]


class TextPart(Body):
    """A part of a message; an earlier answer's have more, which is not read."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], only([])] = []
    logprobs: list[Any] | None = None


Part = Annotated[TextPart | RefusalPart, Field(union_mode="left_to_right")]
Parts = str | Annotated[list[Part], at_most(_MOST_ITEMS)]


class _Item(Body):
    """As an earlier answer has it: names and states of items are not read."""

    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: str | None = None


class ReasoningText(Body):
    """A part of what was thought."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """What was thought before the next item: `reasoning_content` of the template's messages."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], at_most(_MOST_ITEMS)] = []
    content: Annotated[list[ReasoningText], at_most(_MOST_ITEMS)] = []
    encrypted_content: Annotated[str, only("", reason=_ENCRYPTED)] = ""

    @property
    def text(self) -> str:
        """All of it, or else its summary."""
        return "\n".join(part.text for part in self.content or self.summary)


class CallItem(_Item):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments


class ResultItem(_Item):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


def _kind(item: Any) -> str:
    """As `type` says."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Given, Function):
    """`Tool` without its inner object."""

    type: Literal["function"]


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


class TextFormat(Body):
    """`ResponseFormat` without its inner object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        needed = self.type == "json_schema"
        if {needed} != {self.name is not None, self.schema_ is not None}:
            raise ValueError("name and schema are needed with the type json_schema, and only there")
        return self


class Text(Body):
    """The format of the answer's text."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Ignored = None


class _Format(ResponseFormat):
    def constraint(self) -> Constraint | None:
        """Under the name that it has here."""
        made = super().constraint()
        return made and Constraint("text.format", made.schemas, made.grammar)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_obfuscation: Annotated[bool, only(False)] = False


class ResponseRequest(Sampling):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], at_most(_MOST_ITEMS, least=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: Text = Text()
    tools: Annotated[list[FunctionTool], at_most(128)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: ChatTemplateKwargs = {}
    include: Annotated[list[Literal["message.output_text.logprobs"]], at_most(1)] = []
    top_logprobs: Logprobs = 0
    stream_options: StreamOptions | None = None
    store: Annotated[bool, only(False, reason=_UNSTORED)] = False
    previous_response_id: Annotated[Any, only(reason=_UNSTORED)] = None
    conversation: Annotated[Any, only(reason=_UNSTORED)] = None
    truncation: Annotated[str, only("disabled")] = "disabled"
    background: Annotated[bool, only(False)] = False
    access_programs: Ignored = None
    background_options: Ignored = None
    context_management: Ignored = None
    image: Ignored = None
    max_tool_calls: Ignored = None
    moderation: Ignored = None
    prompt: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    reasoning: Ignored = None
    _chat: ChatRequest

    @property
    def chat(self) -> ChatRequest:
        """The same request to /v1/chat/completions."""
        return self._chat

    def take_defaults(self, values: Mapping[str, float]) -> None:
        """As `Sampling.take_defaults`; `chat`, too."""
        super().take_defaults(values)
        self._chat.take_defaults(values)

    @model_validator(mode="after")
    def _consistent(self) -> ResponseRequest:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.top_logprobs and not self.include:
            raise ValueError(f"top_logprobs needs include={[_LOGPROBS]}")
        if self.include and self.tools and self.tool_choice != "none":
            raise ValueError("include and tools exclude each other: calls have no logprobs")
        try:
            self._chat = self._as_chat()
        except ValidationError as error:  # of what fields are together
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(message.replace("messages", "input", 1)) from error
        return self

    def _as_chat(self) -> ChatRequest:
        form = self.text.format
        functions = [
            {name: value for name, value in tool.given.items() if name != "type"}
            for tool in self.tools
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        schema = None
        if form.schema_ is not None:
            schema = JsonSchema(name=form.name or "", schema=form.schema_)
        given = self.model_fields_set & Sampling.model_fields.keys()
        fields: dict[str, Any] = {name: getattr(self, name) for name in given}
        fields |= {
            "messages": [*self._messages()],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _Format(type=form.type, json_schema=schema),
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs if self.include else None,
        }
        return ChatRequest(**fields)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        said: dict[str, Any] | None = None  # by the assistant: calls that follow are its
        for item in self.input:
            if isinstance(item, ReasoningItem) and not item.text:
                continue
            if isinstance(item, CallItem):
                said = said or {"role": "assistant"}
                function = {"name": item.name, "arguments": item.arguments}
                call = ToolCall.model_validate({"id": item.call_id, "function": function})
                said.setdefault("tool_calls", []).append(call)
                continue
            thought = said if said and said.keys() == {"role", "reasoning_content"} else None
            if said and not (thought and _is_said(item)):
                yield said
            said = None
            if isinstance(item, ReasoningItem):
                said = {"role": "assistant", "reasoning_content": item.text}
            elif isinstance(item, ResultItem):
                content = _plain(item.output)
                yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
            elif _is_said(item):
                said = (thought or {"role": "assistant"}) | {"content": _plain(item.content)}
            else:
                yield {"role": item.role, "content": _plain(item.content)}
        if said:
            yield said


def _is_said(item: Any) -> bool:
    return isinstance(item, MessageItem) and item.role == "assistant"


def _plain(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
