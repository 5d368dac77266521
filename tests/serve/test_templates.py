"""Chat templates: whatever a request says is in the prompt, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
from cases.tiny_models import byte_tokenizer
from pydantic import ValidationError
from serve.conftest import TEMPLATE, Serve

from offload.serve.chat import Texts
from offload.serve.errors import ApiError
from offload.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Sampled,
    Sampling,
    TokenizeRequest,
)
from offload.serve.responses import ResponseRequest

TURN = "<|{{ m.role }}|>{{ m.content }}\n"
END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
TEMPLATES = {
    # ChatML as SmolLM2 has it: any role, no tools, no calls.
    "any role": "{% for m in messages %}" + TURN + "{% endfor %}" + END,
    # As Qwen2.5: roles by name, others vanish.
    "named roles": (
        "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}\n"
        "{% else %}<|system|>You help.\n{% endif %}"
        "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call>{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' or m.role == 'system' and not loop.first %}" + TURN + "{% endif %}"
        "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}" + CALLS + "\n{% endif %}"
        "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>\n{% endif %}"
        "{% endfor %}" + END
    ),
    # As Qwen3: what was thought stays after the last question, and is in the content before that.
    "thinks": (
        "{% set ns = namespace(last=0) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>"
        "{% if m.reasoning_content is string and loop.index0 > ns.last %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content.split('</think>')[-1] }}" + CALLS + "\n"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + END
    ),
    # As Llama 3: one call, beside which content is ignored.
    "one call": (
        "{% for m in messages %}"
        "{% if 'tool_calls' in m %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('only one call') }}{% endif %}"
        "<|assistant|>{{ m.tool_calls[0].function | tojson }}\n"
        "{% else %}" + TURN + "{% endif %}{% endfor %}" + END
    ),
    # As Gemma: two roles, in turns.
    "no system": (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}" + END
    ),
    # As Mistral: ids of nine characters, names of arguments by themselves.
    "short ids": (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "[{{ m.tool_call_id }}: {{ m.content }}]\n"
        "{% elif m.tool_calls %}{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}\n"
        "{% elif m.role in ['user', 'assistant', 'system'] %}" + TURN + "{% endif %}"
        "{% endfor %}" + END
    ),
    # As gpt-oss: it knows the role.
    "developer": (
        "{% for m in messages %}{% if m.role == 'developer' %}# Instructions\n{% endif %}"
        + TURN
        + "{% endfor %}"
        + END
    ),
}
USER = {"role": "user", "content": "hello"}
CALL = {"id": "call_0001", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_0001", "content": "rain"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def of(template: str) -> Texts:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return Texts(tokenizer, 320, [])


def prompt(template: str, messages: list[Any], **fields: Any) -> str:
    """What the model gets."""
    texts, request = of(template), ChatRequest.model_validate({"messages": messages} | fields)
    return texts.decode(texts.chat_ids(request.messages, request.usable_tools))


def of_responses(template: str, given: Any, **fields: Any) -> str:
    texts = of(template)
    chat = ResponseRequest.model_validate({"input": given} | fields).chat
    return texts.decode(texts.chat_ids(chat.messages, chat.usable_tools, field="input"))


def refusal(template: str, messages: list[Any], **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        prompt(template, messages, **fields)
    assert caught.value.status_code == 400
    return str(caught.value.body["error"]["message"])


@pytest.mark.parametrize("template", ["any role", "named roles", "thinks", "one call"])
def test_a_developer_is_the_system_where_nobody_knows_them(template: str) -> None:
    for before in ([], [USER, {"role": "assistant", "content": "hi"}]):
        said = [*before, {"role": "developer", "content": "be brief"}, USER]
        system = [*before, {"role": "system", "content": "be brief"}, USER]
        assert prompt(template, said) == prompt(template, system)
        assert "be brief" in prompt(template, said)
        assert of_responses(template, said) == prompt(template, system)
    assert of_responses(template, [USER], instructions="be brief") == prompt(
        template, [{"role": "system", "content": "be brief"}, USER]
    )


def test_a_developer_whom_the_template_knows() -> None:
    said = prompt("developer", [{"role": "developer", "content": "be brief"}, USER])
    assert said.startswith("# Instructions\n<|developer|>be brief")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_template_that_refuses_a_role(role: str) -> None:
    said = refusal("no system", [{"role": role, "content": "be brief"}, USER])
    assert said == "messages: the chat template says: System role not supported"


def test_a_role_that_is_ignored(serve: Serve) -> None:
    only_users = (
        "{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}"
    )
    for role in ("system", "developer", "assistant", "tool"):
        said = refusal(only_users, [{"role": role, "content": "x"}, USER])
        shown = "system" if role == "developer" else role
        assert said == (
            "messages.0.content: the chat template ignores content of messages of " + repr(shown)
        )
    with serve(template=only_users) as server, httpx.Client(base_url=server.url) as http:
        body: dict[str, Any] = {"messages": [{"role": "system", "content": "x"}, USER]}
        for path in ("/v1/chat/completions", "/tokenize"):
            error = http.post(path, json=body).json()["error"]
            assert (error["param"], "ignores" in error["message"]) == ("messages", True)
        answer = http.post("/v1/responses", json={"input": "hello", "instructions": "x"})
        assert "the chat template ignores" in answer.json()["error"]["message"]


def test_content_beside_calls() -> None:
    turns = [USER, CALLING | {"content": "Let me see."}, RESULT]
    assert "Let me see." in prompt("named roles", turns)
    assert "content of messages of 'assistant' that have tool_calls" in refusal("one call", turns)
    assert refusal("any role", turns).startswith("messages.1.tool_calls.0.function.name: ")


def test_marks_do_not_change_what_a_template_decides() -> None:
    """A text that looks ignored beside other marks has a try of its own."""
    ends = (
        "{% set ns = namespace(open=true) %}{% for m in messages %}"
        "{% if not m.content.endswith('.') %}{% set ns.open = false %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{{ m.note if ns.open }}{% endfor %}"
    )
    assert "why" in prompt(ends, [{"role": "user", "content": "hello.", "note": "why"}])
    assert "note" in refusal(ends, [{"role": "user", "content": "hello", "note": "why"}])
    cut = "{% for m in messages %}{{ m.content[:3] }}{% endfor %}"
    assert prompt(cut, [USER]) == "hel"


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}"])
@pytest.mark.parametrize("template", ["named roles", "thinks", "one call", "short ids"])
def test_a_call_without_arguments(template: str, arguments: str) -> None:
    called = deepcopy(CALLING)
    called["tool_calls"][0]["function"]["arguments"] = "{}"
    wanted = prompt(template, [USER, called, RESULT])
    called["tool_calls"][0]["function"]["arguments"] = arguments
    assert prompt(template, [USER, called, RESULT]) == wanted
    call = {"type": "function_call", "call_id": CALL["id"], "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": CALL["id"], "output": "rain"}
    assert of_responses(template, [USER, call, result]) == wanted


def test_fields_of_other_models() -> None:
    """As `message.model_dump()` has them."""
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    answer = {"role": "assistant", "content": "hi", "tool_calls": None} | nothing
    wanted = prompt("named roles", [USER, {"role": "assistant", "content": "hi"}, USER])
    assert prompt("named roles", [USER, answer, USER]) == wanted
    for refused in (
        {"role": "assistant", "content": None, "refusal": "hi"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "hi"}]},
    ):
        assert prompt("named roles", [USER, refused, USER]) == wanted
    for name, value in (
        ("annotations", [{"type": "url_citation", "url_citation": {"url": "x"}}]),
        ("audio", {"id": "x"}),
        ("reasoning_content", "because"),
        ("reasoning", "because"),
        ("refusal", "no"),
        ("function_call", {"name": "f", "arguments": "{}"}),
    ):
        said = refusal("named roles", [USER, answer | {name: value}, USER])
        assert said == (
            f"messages.1.{name}: the chat template ignores {name} of messages of 'assistant'; "
            "leave it out"
        )
    with pytest.raises(ValidationError, match="needs content, beside reasoning_content"):
        prompt("thinks", [USER, {"role": "assistant", "reasoning_content": "x"}, USER])


def test_what_was_thought() -> None:
    turns = [USER, CALLING | {"reasoning_content": "because"}, RESULT]
    assert "<think>because</think>" in prompt("thinks", turns)
    assert "messages.1.reasoning_content" in refusal("thinks", [*turns, USER])
    items: list[Any] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "because"}]},
        {"type": "function_call", "call_id": "call_0001", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call_output", "call_id": "call_0001", "output": "rain"},
    ]
    assert of_responses("thinks", items) == prompt("thinks", turns)
    with pytest.raises(ApiError, match="input: the chat template ignores reasoning_content"):
        of_responses("named roles", items)
    said = {"role": "assistant", "content": "so"}
    assert of_responses("thinks", [USER, items[2], said]) == prompt(
        "thinks", [USER, said | {"reasoning_content": "because"}]
    )
    with pytest.raises(ValidationError, match="encrypted_content"):
        of_responses("thinks", [USER, items[1] | {"encrypted_content": "x"}, said])
    with pytest.raises(ValidationError, match="needs content, beside reasoning_content"):
        of_responses("thinks", [items[2], USER])


def test_results_are_those_of_their_calls() -> None:
    other = deepcopy(CALL) | {"id": "call_0002"}
    calling = CALLING | {"tool_calls": [CALL, other]}
    results = [RESULT, {"role": "tool", "tool_call_id": "call_0002", "content": "sun"}]
    wanted = prompt("named roles", [USER, calling, *results])
    assert prompt("named roles", [USER, calling, *results[::-1]]) == wanted
    for odd in ("", "toolu_01|fc_2", "1"):
        turns = [USER, CALLING | {"tool_calls": [CALL | {"id": odd}]}]
        turns.append(RESULT | {"tool_call_id": odd, "name": "f"})
        assert "rain" in prompt("named roles", turns)
        assert "9 characters" in refusal("short ids", turns)
    without = {"role": "tool", "content": "rain"}
    assert "rain" in prompt("named roles", [USER, CALLING, without])
    said = refusal("named roles", [USER, CALLING, RESULT | {"tool_call_id": "x"}])
    assert said == (
        "messages.2: tool_call_id 'x' is that of no call before it; there are ['call_0001']"
    )
    assert "messages.2.name" in refusal("named roles", [USER, CALLING, RESULT | {"name": "g"}])


def test_a_prefix_is_continued() -> None:
    said = {"role": "assistant", "content": "Once"}
    wanted = prompt("named roles", [USER, said])
    assert wanted.endswith("<|assistant|>Once")
    assert prompt("named roles", [USER, said | {"prefix": True}]) == wanted
    assert "messages.1.prefix" in refusal("named roles", [USER, said | {"prefix": True}, USER])


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "now"}},
        {"function": {"strict": True, "parameters": {}, "name": "f"}, "type": "function"},
        {"type": "function", "function": {"name": "f", "description": None, "strict": None}},
    ],
)  # fmt: skip
def test_the_template_gets_tools_as_they_were_sent(tool: dict[str, Any]) -> None:
    said = prompt("named roles", [USER], tools=[tool])
    assert json.dumps(tool) in said
    flat = {"type": "function"} | tool["function"]
    of_flat = of_responses("named roles", [USER], tools=[flat])
    assert json.dumps(tool["function"]) in of_flat


def test_tokenize_takes_tools(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
    count = http.post("/tokenize", json=body).json()["count"]
    used = http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["usage"]
    assert (
        count
        == used["prompt_tokens"]
        > http.post("/tokenize", json={"messages": [USER]}).json()["count"]
    )
    for wrong in ({"prompt": "x", "tools": [TOOL]}, body | {"tools": [TOOL, TOOL]}):
        answer = http.post("/tokenize", json=wrong)
        assert (answer.status_code, "tools" in answer.json()["error"]["message"]) == (400, True)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there is text."""
    if isinstance(value, str):
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list):
        for name, inner in enumerate(value):
            yield from leaves(inner, (*path, name))


def with_text(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    made = deepcopy(value)
    inner = made
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = change(inner[path[-1]])
    return made


# Every field that is sent; what a template shows of a message is the messages' own test.
WITHOUT_TEXT = {
    *Sampling.model_fields, *Sampled.model_fields,
    # Limits, switches, and what has only one value.
    *("max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs", "tool_choice"),
    *("parallel_tool_calls", "functions", "function_call", "modalities", "audio", "prediction"),
    *("reasoning_effort", "verbosity", "web_search_options", "echo", "best_of", "suffix"),
    *("include", "stream_options", "previous_response_id", "conversation", "truncation"),
    *("background", "access_programs", "background_options", "context_management", "image"),
    *("max_tool_calls", "moderation", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "text", "add_special_tokens"),
    "chat_template_kwargs",  # a template ignores those that it does not know, as documented
}  # fmt: skip
WITH_TEXT = {"messages", "tools", "input", "instructions", "prompt"}


@pytest.mark.parametrize(
    "model", [ChatRequest, ResponseRequest, CompletionRequest, TokenizeRequest]
)
def test_every_field_is_known_to_these_tests(model: Any) -> None:
    assert {*model.model_fields} <= WITHOUT_TEXT | WITH_TEXT


PARTS = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
HISTORIES = [
    *([{"role": role, "content": "said"}, USER] for role in ("system", "developer", "user")),
    [USER, {"role": "assistant", "content": "said"}],
    [USER, {"role": "assistant", "content": PARTS, "refusal": "three"}, USER],
    [USER, {"role": "assistant", "content": None, "refusal": "three"}, USER],
    [USER | {"name": "Ann"}],
    [USER, CALLING, RESULT],
    [USER, CALLING | {"content": "said"}, RESULT | {"name": "f"}],
    [USER, CALLING | {"reasoning_content": "because", "reasoning": "why"}, RESULT, USER],
    [USER, {"role": "assistant", "content": "x", "annotations": [{"url": "y"}]}, USER],
    [USER, {"role": "assistant", "content": "x", "audio": {"id": "y"}}, USER],
]
ITEMS: list[list[Any]] = [
    *([{"role": role, "content": "said"}, USER] for role in ("system", "developer", "assistant")),
    [USER | {"content": [{"type": "input_text", "text": "said"}]}],
    [
        {"role": "assistant", "content": [
            {"type": "output_text", "text": "one"}, {"type": "refusal", "refusal": "two"},
        ]},
        USER,
    ],
    [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "because"}]},
        {"type": "function_call", "call_id": "call_0001", "name": "f", "arguments": '{"a": "b"}'},
        {"type": "function_call_output", "call_id": "call_0001", "output": "rain"},
    ],
    [{"type": "reasoning", "encrypted_content": "xyz", "summary": []}, USER],
]  # fmt: skip


def outcome(ask: Any, *args: Any, **fields: Any) -> str | None:
    """The prompt, or None: it is refused."""
    try:
        return str(ask(*args, **fields))
    except (ApiError, ValidationError):
        return None


@pytest.mark.parametrize("template", [*TEMPLATES, TEMPLATE])
@pytest.mark.parametrize("ask", [prompt, of_responses])
def test_what_is_said_is_in_the_prompt_or_refused(template: str, ask: Any) -> None:
    """The whole kind: any text of any message or item, of any role, and of tools."""
    asked: list[tuple[Any, dict[str, Any]]] = [
        (history, {}) for history in (HISTORIES if ask is prompt else ITEMS)
    ]
    tool = TOOL if ask is prompt else {"type": "function"} | TOOL["function"]
    asked.append(([USER], {"tools": [tool]}))
    if ask is of_responses:
        asked.append(([USER], {"instructions": "be brief"}))
    taken = 0
    for given, fields in asked:
        whole = {"given": given} | fields
        before = outcome(ask, template, given, **fields)
        taken += before is not None
        for path in leaves(whole):
            if path[-1] in ("type", "role") or "parameters" in path:
                continue
            change = (lambda text: '{"a": "c"}') if path[-1] == "arguments" else (lambda t: t + "s")
            other = with_text(whole, path, change)
            after = outcome(ask, template, other.pop("given"), **other)
            assert before is None or before != after, (path, given)
    assert taken
