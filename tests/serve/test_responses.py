"""/v1/responses, through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from serve.conftest import Serve
from serve.test_tools import CITY, HELLO, NAMED, ROME, TOOLS, answering

from offload.engine.sessions import Sessions

FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
TEXT_EVENTS = [
    *("response.created", "response.in_progress", "response.output_item.added"),
    *("response.content_part.added", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done"),
]
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
SCHEMA["additionalProperties"] = False


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def ask(client: openai.OpenAI, given: Any = "hello", **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "tiny", "input": given, "max_output_tokens": 20}
    extra = {"seed": 2} | options.pop("extra_body", {})
    return client.responses.create(**(fields | options), extra_body=extra)


def refusal(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": "hello"} | fields)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


def said_of(client: openai.OpenAI, messages: list[Any], **options: Any) -> str:
    options = {"max_tokens": 20, "seed": 2} | options
    answer = client.chat.completions.create(model="tiny", messages=messages, **options)
    return str(answer.choices[0].message.content)


def without_names(response: Any) -> Any:
    """What two answers to one request have in common."""
    plain = response.model_dump()
    del plain["usage"]["input_tokens_details"]["cached_tokens"]
    for item in plain["output"]:
        del item["id"]
        item.pop("call_id", None)
    return {k: v for k, v in plain.items() if k not in ("id", "created_at", "completed_at")}


def events_of(client: openai.OpenAI, given: Any = "hello", **options: Any) -> list[Any]:
    events = [*ask(client, given, stream=True, **options)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.model_dump(by_alias=True))
    return events


def kinds(events: list[Any]) -> list[str]:
    """Types, runs of one type once."""
    types = [event.type for event in events]
    return [kind for i, kind in enumerate(types) if not i or types[i - 1] != kind]


def test_it_answers_as_chat_does(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"a": "b"})
    Response.model_validate(answer.model_dump(by_alias=True))
    assert answer.output_text == said_of(client, HELLO) != ""
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert (answer.metadata, answer.model, answer.store) == ({"a": "b"}, "tiny", False)
    usage = answer.usage
    assert (usage.output_tokens, usage.total_tokens) == (20, usage.input_tokens + 20)
    warm = ask(client, temperature=0.5, top_p=0.9)
    assert warm.output_text == said_of(client, HELLO, temperature=0.5, top_p=0.9)
    assert (warm.temperature, warm.top_p, warm.max_output_tokens) == (0.5, 0.9, 20)


def test_forms_of_input(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    for given in (HELLO, [{"type": "message", **HELLO[0]}]):
        assert ask(client, given).output_text == said_of(client, HELLO)
    assert ask(client, [{"role": "user", "content": parts}]).output_text == said_of(
        client, [{"role": "user", "content": "hel\nlo"}]
    )
    system = [{"role": "system", "content": "be brief"}, *HELLO]
    answer = ask(client, instructions="be brief")
    assert answer.instructions == "be brief"
    assert answer.output_text == ask(client, system).output_text == said_of(client, system)
    turns: list[Any] = [*HELLO, *answer.output, {"role": "user", "content": "again"}]
    chat = [*HELLO, {"role": "assistant", "content": answer.output_text}, turns[-1]]
    assert ask(client, turns).output_text == said_of(client, chat)


def test_stream(client: openai.OpenAI, http: httpx.Client) -> None:
    whole, events = ask(client), events_of(client)
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert "".join(deltas) == done.text == whole.output_text
    assert len(deltas) > 5
    assert without_names(events[-1].response) == without_names(whole)
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {
        events[-1].response.output[0].id
    }
    with client.responses.stream(
        model="tiny", input="hello", max_output_tokens=20, extra_body={"seed": 2}
    ) as stream:
        assert [event.type for event in stream if event.type == "response.output_text.delta"]
    body = {"input": "hello", "stream": True, "max_output_tokens": 1}
    lines = http.post("/v1/responses", json=body).text.splitlines()
    assert lines[0] == "event: response.created"
    assert "[DONE]" not in lines[-2]


def test_an_end_of_its_own(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(monkeypatch, "It is late."):
        events = events_of(client)
    assert kinds(events) == [*TEXT_EVENTS, "response.completed"]
    response = events[-1].response
    assert (response.status, response.output_text) == ("completed", "It is late.")
    assert response.incomplete_details is None
    assert response.completed_at >= response.created_at
    with answering(monkeypatch, "stop here"):
        stopped = ask(client, extra_body={"stop": "stop"})
    assert (stopped.status, stopped.output_text) == ("completed", "")
    assert len(stopped.output) == 1


def test_formats(client: openai.OpenAI, http: httpx.Client) -> None:
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA}
    options: dict[str, Any] = {"text": {"format": form}, "max_output_tokens": 60}
    for answer in (ask(client, **options), events_of(client, **options)[-1].response):
        assert json.loads(answer.output_text)["city"] in CITY["enum"]
        assert answer.text.format.schema_ == SCHEMA
        assert answer.status == "completed"
    text = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=60).output_text
    assert text.startswith("{")
    bad = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "wrong"}}}
    assert "text.format" in refusal(http, text=bad)["message"]
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert ask(client, extra_body=extra).output_text in ("yes", "no")


def test_logprobs(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer, events = ask(client, **options), events_of(client, **options)
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == 20
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in logprobs)
    read = bytes(byte for each in logprobs for byte in each.bytes)
    assert read.decode(errors="replace") == answer.output_text
    assert without_names(events[-1].response) == without_names(answer)
    told = [each for e in events if e.type == "response.output_text.delta" for each in e.logprobs]
    assert [each.logprob for each in told] == [each.logprob for each in logprobs]
    assert not ask(client).output[0].content[0].logprobs


def test_a_call_that_must_be(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    options: dict[str, Any] = {"tools": FUNCTIONS, "tool_choice": choice, "max_output_tokens": 99}
    answer, events = ask(client, **options), events_of(client, **options)
    (call,) = answer.output
    assert (call.type, call.name, answer.output_text) == ("function_call", "weather", "")
    assert json.loads(call.arguments)["city"] in CITY["enum"]
    assert without_names(events[-1].response) == without_names(answer)
    assert kinds(events)[2:] == [
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it rains"}
    turns = [*HELLO, call, result]
    function = {"name": call.name, "arguments": call.arguments}
    chat = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "it rains"},
    ]
    answer = ask(client, turns, tools=FUNCTIONS, tool_choice="none")
    assert answer.output_text == said_of(client, chat, tools=TOOLS, tool_choice="none")
    assert [tool.name for tool in answer.tools] == ["weather", "time"]


def test_calls_that_may_be(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    block = f"<tool_call>{ROME}</tool_call>"
    options: dict[str, Any] = {"tools": FUNCTIONS, "max_output_tokens": 300}
    with answering(monkeypatch, f"Sure. {block}{block}"):
        answer, events = ask(client, **options), events_of(client, **options)
        single = ask(client, parallel_tool_calls=False, **options)
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert [item.status for item in answer.output] == ["completed"] * 3
    assert answer.output_text == "Sure."
    assert json.loads(answer.output[1].arguments) == {"city": "Rome"}
    assert answer.output[1].call_id != answer.output[2].call_id
    assert without_names(events[-1].response) == without_names(answer)
    assert [item.type for item in single.output] == ["message", "function_call"]
    with answering(monkeypatch, f"Sure. {block} Done."):
        after, told = ask(client, **options), events_of(client, **options)[-1].response
    assert [item.type for item in after.output] == ["message", "function_call", "message"]
    assert without_names(after) == without_names(told)
    opened = [e.output_index for e in events if e.type == "response.output_item.added"]
    assert opened == [e.output_index for e in events if e.type == "response.output_item.done"]
    assert opened == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("foo", 1), ("n", 2), ("max_tokens", 5), ("messages", HELLO), ("response_format", {})),
        *(("store", True), ("previous_response_id", "resp_1"), ("conversation", "conv_1")),
        *(("background", True), ("truncation", "auto"), ("reasoning", {"effort": "high"})),
        *(("prompt", {"id": "x"}), ("max_tool_calls", 1), ("include", ["web_search_call.results"])),
        *(("top_logprobs", 3), ("max_output_tokens", 0), ("temperature", -1), ("top_p", 0)),
        *(("stream_options", {"include_obfuscation": False}), ("service_tier", "flex")),
        *(("text", {"verbosity": "low"}), ("text", {"format": {"type": "json_schema"}})),
        *(("tools", [{"type": "web_search"}]), ("tool_choice", "required")),
        *(("input", []), ("input", [5]), ("input", [{"type": "item_reference", "id": "x"}])),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", [{"role": "developer", "content": "the template refuses"}]),
        ("input", [*HELLO, *[{"role": "assistant", "content": "a"}] * 2]),
        ("input", [*HELLO, CALL | {"arguments": "{"}]),
        ("input", [CALL]),
        ("session_id", "alice"),
    ],
)  # fmt: skip
def test_fields_that_are_refused(http: httpx.Client, field: str, value: Any) -> None:
    assert field in refusal(http, **{field: value})["message"]


@pytest.mark.parametrize(
    "fields",
    [
        '"metadata": {"a": "\\ud800"}',
        '"user": "\\ud800", "stream": true',
        '"tool_choice": "none", "tools": [{"type": "function", "name": "f", "parameters": '
        '{"maximum": NaN}}]',
    ],
)
def test_what_cannot_be_repeated_is_refused(http: httpx.Client, fields: str) -> None:
    body = f'{{"input": "hello", "max_output_tokens": 1, {fields}}}'
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/responses", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "cannot repeat" in answer.json()["error"]["message"]


def test_what_excludes_each_other(http: httpx.Client) -> None:
    assert (
        "exclude"
        in refusal(http, tools=FUNCTIONS, text={"format": {"type": "json_object"}})["message"]
    )
    logprobs = ["message.output_text.logprobs"]
    assert "include" in refusal(http, tools=FUNCTIONS, include=logprobs)["message"]
    assert "tool_choice" in refusal(http, tools=FUNCTIONS, tool_choice=NAMED)["message"]
    nulls = dict.fromkeys(("store", "previous_response_id", "reasoning", "text", "tools"))
    body = {"input": "hello", "max_output_tokens": 1, **nulls}
    assert http.post("/v1/responses", json=body).status_code == 200
    error = refusal(http, input="x" * 5000, stream=True)
    assert error["code"] == "exceed_context_size_error"


def test_a_session(serve: Serve, tmp_path: Any) -> None:
    with (
        serve(sessions=Sessions(tmp_path)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        extra = {"session_id": "alice"}
        first = ask(client, "hello " * 20, extra_body=extra)
        turns = [{"role": "user", "content": "hello " * 20}, *first.output, *HELLO]
        second = ask(client, turns, extra_body=extra)
        assert second.usage.input_tokens_details.cached_tokens > 100
        assert second.output_text == ask(client, turns).output_text


def test_a_stream_that_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serve() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        events = []
        for event in ask(client, stream=True, max_output_tokens=3000):
            events.append(event)
            if event.type == "response.output_text.delta" and not server.should_exit:
                server.should_exit = True
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "shutting down" in events[-1].response.error.message
