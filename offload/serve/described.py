"""What answers have, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict  # typing's is no pydantic's before 3.12

FinishReason = Literal["stop", "length"]


class Error(TypedDict):
    """Some have further fields, as the counts of tokens of one that exceeds the context."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """The body of every answer with a status from 400 on."""

    error: Error


class PromptTokens(TypedDict):
    """Those that were not read again."""

    cached_tokens: int


class Usage(TypedDict):
    """In tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class Likely(TypedDict):
    """A token, and its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(Likely):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens of one message."""

    content: list[ScoredToken]
    refusal: None


class CalledFunction(TypedDict):
    """The arguments are JSON."""

    name: str
    arguments: str


class Call(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """The content is null where there are calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    """One of `n`."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]


class ChatAnswer(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(TypedDict):
    """A first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One of `n` of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(TypedDict):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ResponseUsage(TypedDict):
    """In tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptTokens


class ResponseAnswer(TypedDict):
    """The answer of /v1/responses, with the fields of the request. Items are messages and calls."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ModelCard(TypedDict):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The list of the one model."""

    object: Literal["list"]
    data: list[ModelCard]


class SessionCard(TypedDict):
    """A session that no request uses."""

    id: str
    object: Literal["session"]
    tokens: int | None
    bytes: int
    where: str


class SessionList(TypedDict):
    """The list of all sessions."""

    object: Literal["list"]
    data: list[SessionCard]


class RemovedSession(TypedDict):
    """It is no longer there."""

    id: str
    object: Literal["session"]
    deleted: Literal[True]


class Tokenized(TypedDict):
    """Token ids."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(TypedDict):
    """Their text."""

    prompt: str


class Health(TypedDict):
    """The state of a server that answers."""

    status: Literal["ok"]


class Load(TypedDict):
    """Requests that run, that wait, and both."""

    server_load: int
    running: int
    waiting: int


class Props(TypedDict):
    """The server's limits, whether it keeps sessions, and the model's chat template."""

    model: str
    version: str
    n_ctx: int
    policy: str
    max_num_seqs: int
    max_queued: int
    kv_host_bytes: int
    kv_host_budget_bytes: int | None
    kv_device_bytes: int
    sessions: bool
    chat_template: Any


def answer_or_stream(answer: type[Any]) -> dict[int | str, dict[str, Any]]:
    """What `responses` of a route takes: one JSON, or server-sent events."""
    return {200: {"model": answer, "content": {"text/event-stream": {}}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": "OpenAI's error object"}
    for status in ("4XX", "5XX")
}
