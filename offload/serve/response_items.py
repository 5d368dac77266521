"""Answers as OpenAI's JSON: /v1/responses."""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from offload.engine.sampler import Chosen
from offload.serve.answers import Answers, Choice
from offload.serve.chat import Texts
from offload.serve.errors import ApiError
from offload.serve.formats import Chat
from offload.serve.responses import ResponseRequest
from offload.serve.tools import CLOSE

_ECHOED = (
    *("background", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "store", "temperature"),
    *("tool_choice", "top_logprobs", "top_p", "truncation", "user"),
)


class Response(Chat):
    """A response with its items: messages and calls, of which the last is open.

    Events tell how it grows; the answer in one piece is what it has grown to at the end.
    """

    prefix = "resp"

    def __init__(self, body: ResponseRequest, model: str, texts: Texts) -> None:
        super().__init__(body.chat, model, texts)
        self._items: list[dict[str, Any]] = []
        self._numbers, self._is_open = count(), False
        given = body.model_dump(include={*_ECHOED, "text", "tools"}, by_alias=True)
        if body.text.format.type != "json_schema":
            given["text"]["format"] = {"type": body.text.format.type}
        try:  # Python's JSON has NaN, and halves of surrogate pairs
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise ApiError(400, f"the answer cannot repeat the request: {error}") from error
        self._response = given | {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": model,
            "output": self._items,
            "status": "in_progress",
            "service_tier": "default",
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer in one piece."""
        (choice,) = choices
        *before, last = choice.text.split(CLOSE)  # what follows a call is an item of its own
        runs = replace(choice, finish_reason=None)
        for text in before:
            deque(self._grow(runs, text + CLOSE, ()), maxlen=0)
        deque(self._grow(choice, last, choice.shown), maxlen=0)
        return self._response

    async def events(
        self, answers: Answers, choices: Sequence[Choice]
    ) -> AsyncIterator[dict[str, str]]:
        """The answer as server-sent events, while it comes."""
        (choice,) = choices
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)
        try:
            async for _, output in answers:
                for event in self._grow(choice, *choice.take(output)):
                    yield event
        except ApiError as error:
            failure = {"code": "server_error", "message": error.body["error"]["message"]}
            self._response |= {"status": "failed", "error": failure}
            yield self._event("response.failed", response=self._response)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """By other names than a chat's."""
        (choice,) = choices
        cached = {"cached_tokens": choice.num_cached, "cache_write_tokens": 0}
        return {
            "input_tokens": choice.num_prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": choice.num_prompt_tokens + choice.num_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, str]:
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return {"event": kind, "data": json.dumps(data, ensure_ascii=False)}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, str]:
        """An event of what is in the last item."""
        item = self._items[-1]
        if item["type"] == "message":
            fields["content_index"] = 0
        index = len(self._items) - 1
        return self._event(f"response.{kind}", item_id=item["id"], output_index=index, **fields)

    def _grow(
        self, choice: Choice, text: str, tokens: Sequence[Chosen]
    ) -> Iterator[dict[str, str]]:
        text, calls = self._read(choice, text)
        logprobs = (self._logprobs(tokens) or {"content": []})["content"]
        is_last = choice.finish_reason is not None
        if text or logprobs or (is_last and not calls and not self._items):
            yield from self._say(text, logprobs)
        for call in calls:
            yield from self._call(call)
        if not is_last:
            return
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        yield from self._close(status)
        self._response |= {"status": status, "usage": self.usage([choice])}
        if status == "completed":
            self._response["completed_at"] = int(time.time())
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self._response)

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
        if not self._is_open or self._items[-1]["type"] != "message":
            message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
            yield from self._open(message | {"content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._of_item("content_part.added", part=part)
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield self._of_item("output_text.delta", delta=text, logprobs=logprobs)

    def _call(self, delta: dict[str, Any]) -> Iterator[dict[str, str]]:
        """A piece of a call, as chat streams it."""
        function = delta["function"]
        if "id" in delta:
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call"}
            named = {"call_id": delta["id"], "name": function["name"], "arguments": ""}
            yield from self._open(item | named)
        self._items[-1]["arguments"] += function["arguments"]
        if function["arguments"]:
            yield self._of_item("function_call_arguments.delta", delta=function["arguments"])

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, str]]:
        yield from self._close("completed")
        self._items.append(item | {"status": "in_progress"})
        self._is_open = True
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=self._items[-1])

    def _close(self, status: str) -> Iterator[dict[str, str]]:
        if not self._is_open:
            return
        self._is_open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("output_text.done", **done)
            yield self._of_item("content_part.done", part=part)
        else:
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"])
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)
