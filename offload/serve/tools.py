"""Tools of a chat, and calls of them in answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    model_validator,
)
from typing_extensions import Self

from offload.serve.bodies import Body

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\{"name": "([\w-]+)", "arguments": ')
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    """A tool; `strict` changes nothing."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = _NOTHING
    strict: bool = False


class Given(Body):
    """A body that templates get as it was sent: its keys in their order, nothing added."""

    _given: dict[str, Any]

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if isinstance(data, dict):
            made._given = data
        return made

    @property
    def given(self) -> dict[str, Any]:
        """As sent."""
        return self._given


class Tool(Given):
    """Functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """One that is named."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


def _json(arguments: str) -> str:
    if arguments.strip() in ("", "null"):  # of models that call without arguments
        return "{}"
    try:
        json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError("it must be JSON") from error
    return arguments


Arguments = Annotated[str, AfterValidator(_json)]


class Called(BaseModel):
    """A function in an earlier answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: Arguments


class ToolCall(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"] = "function"
    function: Called

    def plain(self) -> dict[str, Any]:
        """As templates take it: the arguments are not a string."""
        function = self.function.model_dump()
        function["arguments"] = json.loads(self.function.arguments)
        return self.model_dump() | {"function": function}


class CallReader:
    """An answer as it comes, apart into what is said and what is called.

    Attributes:
        calls: as OpenAI has them, so far.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def take(self, text: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """What is new of both; calls are as in a streamed delta."""
        raise NotImplementedError

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        self.calls.append(call | {"function": function})
        return {"index": len(self.calls) - 1, **call, "function": {**function}}


class ForcedCall(CallReader):
    """An answer by `calls_grammar`; arguments are handed on as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._text, self._start = "", 0

    def take(self, text: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """Without the last brace, which is not of the arguments."""
        self._text += text
        deltas = []
        if not self.calls:
            head = _HEAD.match(self._text)
            if head is None:
                return "", []
            deltas.append(self._call(head[1], ""))
            self._start = head.end()
        stop = len(self._text)
        if finish_reason is None or _is_json(self._text):
            stop -= 1
        new = self._text[self._start : stop]
        if not new:
            return "", deltas
        self._start = stop
        self.calls[0]["function"]["arguments"] += new
        return "", [*deltas, {"index": 0, "function": {"arguments": new}}]


class CallBlocks(CallReader):
    """An answer with <tool_call> blocks, as Hermes and Qwen write them.

    A block that is no call of one of the tools remains text; where none is, all remains as it was.

    Args:
        names: of the tools.
        most: calls after which nothing is read; None: any number.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        super().__init__()
        self._names, self._most = names, most
        self._held, self._is_inside = "", False
        self._gap = ""  # white space before the block, which is said if the block is

    def take(self, text: str, finish_reason: str | None) -> tuple[str, list[dict[str, Any]]]:
        """White space before a call is not said; a call is handed on as a whole."""
        if len(self.calls) == self._most:
            return "", []
        self._held += text
        said = ""
        deltas: list[dict[str, Any]] = []
        while (at := self._held.find(CLOSE if self._is_inside else OPEN)) >= 0:
            before, self._held = self._held[:at], self._held[at:]
            if self._is_inside:
                self._held = self._held.removeprefix(CLOSE)
                more, calls = self._block(before, CLOSE)
                said, deltas = said + more, deltas + calls
                if len(self.calls) == self._most:
                    self._held = ""
            else:
                self._held = self._held.removeprefix(OPEN)
                kept = before.rstrip()
                said, self._gap = said + kept, before[len(kept) :]
            self._is_inside = not self._is_inside
        if finish_reason is not None:
            rest, self._held = self._held, ""
            if self._is_inside:  # ended by a stop string, which `CLOSE` may be, or cut
                more, calls = self._block(rest, "")
                return said + more, deltas + calls
            return said + (rest.rstrip() if self.calls else rest), deltas
        if not self._is_inside:
            size = next(n for n in range(len(OPEN), -1, -1) if self._held.endswith(OPEN[:n]))
            ready = self._held[: len(self._held) - size].rstrip()
            said, self._held = said + ready, self._held[len(ready) :]
        return said, deltas

    def _block(self, block: str, close: str) -> tuple[str, list[dict[str, Any]]]:
        try:
            call = json.loads(block)
            name, arguments = call["name"], call["arguments"]
            if name in self._names and isinstance(arguments, dict):
                text = json.dumps(arguments, ensure_ascii=False)
                text.encode()  # half of a surrogate pair is no text
                return "", [self._call(name, text)]
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        return self._gap + OPEN + block + close, []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
