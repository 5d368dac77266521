"""Tools in chat: what the model is told, and calls in answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.conftest import Serve

from offload.serve.protocol import ChatRequest
from offload.serve.structured import Constraint
from offload.serve.tools import CallBlocks, ForcedCall

CITY = {"enum": ["Rome", "Oslo"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": CITY},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS: list[Any] = [WEATHER, TIME]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 99}
    return client.chat.completions.create(**(fields | {"seed": 1} | options))


def refusal(http: httpx.Client, **fields: Any) -> str:
    body = {"messages": HELLO, "tools": TOOLS} | fields
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def joined(chunks: Iterator[Any], index: int = 0) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Content, calls and reasons to finish of a choice."""
    content, calls, reasons = "", {}, []
    for chunk in chunks:
        for choice in [choice for choice in chunk.choices if choice.index == index]:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or []:
                call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    assert [*calls] == [*range(len(calls))]
    assert all(call["id"].startswith("call_") and len(call["id"]) == 29 for call in calls.values())
    return content, [(call["name"], call["arguments"]) for call in calls.values()], reasons


@contextmanager
def answering(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    """A model that says just this."""
    grammar = f"start: {json.dumps(text)}"
    with monkeypatch.context() as patched:
        patched.setattr(
            ChatRequest, "constraints", lambda self: [Constraint("tools", None, lambda: grammar)]
        )
        yield


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tool_choice=choice, n=3)
    names = set()
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
        (call,) = each.message.tool_calls
        arguments = json.loads(call.function.arguments)
        names.add(call.function.name)
        if call.function.name == "weather":
            assert arguments["city"] in CITY["enum"]
        else:
            assert (call.function.name, arguments) == ("time", {})
    assert choice == "required" or names == {"weather"}
    chunks = [*ask(client, tool_choice=choice, n=3, stream=True)]
    for each in answer.choices:
        called = each.message.tool_calls[0].function
        told = joined(iter(chunks), each.index)
        assert told == ("", [(called.name, called.arguments)], ["tool_calls"])


def test_a_call_that_is_cut(client: openai.OpenAI) -> None:
    """What there is of its arguments comes, and never the brace after them."""
    answer = ask(client, tool_choice=NAMED)
    whole, size = (
        answer.choices[0].message.tool_calls[0].function.arguments,
        answer.usage.completion_tokens,
    )
    for most in (*range(1, size - 1, 4), size - 1):
        (choice,) = ask(client, tool_choice=NAMED, max_tokens=most).choices
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        streamed = joined(ask(client, tool_choice=NAMED, max_tokens=most, stream=True))
        assert streamed == ("", calls, ["length"])
        assert all(whole.startswith(arguments) for _, arguments in calls)
    assert calls == [("weather", whole)]


def test_what_the_model_is_told(client: openai.OpenAI) -> None:
    def size(**options: Any) -> int:
        return int(ask(client, max_tokens=1, **options).usage.prompt_tokens)

    without = size(tools=[])
    assert size(tool_choice="none") == without
    assert size() == size(tool_choice="auto") == size(tool_choice="required") > without + 100
    call = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "it rains"},
    ]
    assert size(messages=turns, tools=[]) > without + 80


def test_a_call_without_content(serve: Serve) -> None:
    called = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "a", "content": "it rains"}
    template = "{% for m in messages %}{{ m['role'] + m['content'] }}{{ m.tool_calls }}{% endfor %}"
    with serve(template=template) as server, httpx.Client(base_url=server.url) as http:
        body = {"messages": [*HELLO, turn, result], "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


def test_none(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    block = f"<tool_call>{ROME}</tool_call>"
    with answering(monkeypatch, block):
        (choice,) = ask(client, tool_choice="none").choices
        assert (choice.message.content, choice.message.tool_calls) == (block, None)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ("It is <b>late</b> \n", "It is <b>late</b> \n", 0),
        (f"<tool_call>\n{ROME}\n</tool_call>", "", 1),
        (f"Sure.\n<tool_call>{ROME}</tool_call>\n<tool_call>{ROME}</tool_call>\n", "Sure.", 2),
        (f"<tool_call>{ROME}</tool_call> So.", " So.", 1),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", 0),
        ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": ["x"], "arguments": {}}</tool_call>', None, 0),
        ("a <tool_call>{", None, 0),
        ("So:\n<tool_call>\nx</tool_call>\n", None, 0),
        ("a <tool", None, 0),
    ],
)
def test_auto(
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    content: str | None,
    calls: int,
) -> None:
    content = said if content is None else content
    with answering(monkeypatch, said):
        (choice,) = ask(client, max_tokens=300).choices
        streamed = joined(ask(client, max_tokens=300, stream=True))
    made = choice.message.tool_calls or []
    assert choice.message.content == (content or None)
    assert [(c.function.name, json.loads(c.function.arguments)) for c in made] == calls * [
        ("weather", {"city": "Rome"})
    ]
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    pairs = [(c.function.name, c.function.arguments) for c in made]
    assert streamed == (content, pairs, [choice.finish_reason])


def test_one_call_at_a_time(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    block = f"<tool_call>{ROME}</tool_call>"
    with answering(monkeypatch, block + block):
        assert len(ask(client, max_tokens=300).choices[0].message.tool_calls) == 2
        (choice,) = ask(client, max_tokens=300, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    (choice,) = ask(client, tool_choice="required", parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    said = f"a\n<tool_call>x</tool_call>\n {block}{block} b"
    with answering(monkeypatch, said):
        options: dict[str, Any] = {"max_tokens": 300, "parallel_tool_calls": False}
        answer = ask(client, **options)
        streamed = joined(ask(client, stream=True, **options))
    (choice,) = answer.choices
    assert choice.message.content == streamed[0] == "a\n<tool_call>x</tool_call>"
    assert len(choice.message.tool_calls) == len(streamed[1]) == 1
    assert answer.usage.completion_tokens < len(said) - len(block)


def test_text_in_any_pieces() -> None:
    text = f"Sure. <\n<tool_call>{ROME}</tool_call>\n <tool_call>x</tool_call> <tool"
    for size in range(1, 30):
        reader, said = CallBlocks(["weather"]), ""
        for at in range(0, len(text), size):
            said += reader.take(text[at : at + size], None)[0]
        said += reader.take("", "stop")[0]
        assert said == "Sure. <\n <tool_call>x</tool_call> <tool"
        assert len(reader.calls) == 1
    for size in range(1, len(ROME) + 1):
        forced, told = ForcedCall(), ""
        for at in range(0, len(ROME), size):
            _, deltas = forced.take(ROME[at : at + size], None)
            told += "".join(delta["function"]["arguments"] for delta in deltas)
        _, deltas = forced.take("", "stop")
        assert told == '{"city": "Rome"}'
        assert not deltas
        assert forced.calls[0]["function"]["arguments"] == '{"city": "Rome"}'


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", " ", "\n", "a", "<", "{", '{"name": "weather"', "</tool", "\t"]
)
SAID = st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join)


@given(said=SAID, cuts=st.lists(st.integers(0, 99), max_size=8), stops=st.lists(SAID, max_size=2))
@pytest.mark.parametrize("most", [None, 1])
def test_text_without_calls_stays_what_it_is(
    most: int | None, said: str, cuts: list[int], stops: list[str]
) -> None:
    """Wherever it is cut, by a stop string or by a length, and whichever pieces it comes in."""
    for stop in filter(None, stops):
        said = said.partition(stop)[0]
    edges = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    for reason in ("stop", "length"):
        reader, told = CallBlocks(["weather"], most), ""
        for start, end in pairwise(edges):
            told += reader.take(said[start:end], None)[0]
            assert said.startswith(told)
        told += reader.take("", reason)[0]
        assert CallBlocks(["weather"], most).take(said, reason) == (said, [])
        assert (told, reader.calls) == (said, [])


def test_a_call_that_is_no_text_stays_what_it_was() -> None:
    block = '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>'
    reader = CallBlocks(["weather"])
    assert reader.take(block, "stop") == (block, [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x'"),
        ({"tools": [TIME, TIME]}, "tools: two of the tools have one name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"response_format": {"type": "json_object"}}, "exclude each other"),
        ({"structured_outputs": {"regex": "a"}, "tool_choice": NAMED}, "exclude each other"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(http, **fields)


def test_schemas_and_messages_that_are_refused(http: httpx.Client) -> None:
    bad = {"name": "f", "parameters": {"type": "wrong"}}
    tools = [{"type": "function", "function": bad}]
    assert "tools: " in refusal(http, tools=tools, tool_choice="required")
    for call in ({}, {"function": {"name": "f"}}, {"function": {"name": "f", "arguments": "{"}}):
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert "messages.1" in refusal(http, messages=[*HELLO, turn, *HELLO])
    called = {"function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [called]}
    assert "must follow" in refusal(http, messages=[*HELLO, turn])


def test_templates_that_cannot(serve: Serve) -> None:
    for template, words in (
        ("{{ messages }}", "ignores them"),
        ("{{ messages }}{{ tools }}", "'required'"),
    ):
        with serve(template=template) as server, httpx.Client(base_url=server.url) as http:
            assert words in refusal(http)
            body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            body = {"messages": HELLO, "tools": TOOLS, "tool_choice": NAMED}
            is_able = http.post("/v1/chat/completions", json=body).status_code == 200
            assert is_able == ("tools" in template)
