"""/v1/chat/completions, through OpenAI's client where it can say it."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest
from serve.conftest import TEMPLATE, Serve

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FEW: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
ASCII = {str(token): -100.0 for token in [*range(94, 320)]}  # no halves of characters, no ends


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **(FEW | options))


def text(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> str:
    return ask(client, messages, **options).choices[0].message.content


def refusal(http: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """The error object of a request that is refused with a 400."""
    if path.endswith("chat/completions"):
        body = {"messages": HELLO} | body
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (choice.message.role, choice.logprobs) == ("assistant", None)
    usage = answer.usage
    assert usage.prompt_tokens == len("[user]hello\n[assistant]") - 1  # "he" is one token
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_messages(client: openai.OpenAI, http: httpx.Client) -> None:
    whole = text(client)
    parts = [{"type": "text", "text": "hello"}]
    assert text(client, [{"role": "user", "content": parts}]) == whole
    for name, value in (("name", "Ann"), ("x", 1)):
        error = refusal(http, messages=[HELLO[0] | {name: value}])
        assert f"messages.0.{name}: the chat template ignores" in error["message"]
    turns = [*HELLO, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert ask(client, turns).usage.prompt_tokens == 48
    continued = [*HELLO, {"role": "assistant", "content": "ab"}]
    tokens = http.post("/tokenize", json={"messages": continued}).json()["tokens"]
    told = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert told == "[user]hello\n[assistant]ab"
    assert text(client, continued) == text(client, continued)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        None,
        "hello",
        [None],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": 5}],
        [*HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "developer", "content": "the template refuses"}],
    ],
)
def test_messages_that_are_refused(http: httpx.Client, messages: Any) -> None:
    error = refusal(http, messages=messages)
    assert "messages" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("foo", 1),
        ("foo", None),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_completion_tokens", -1),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop", ["a" * 1025]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "x"}),
        ("top_logprobs", 5),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "xml"}),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("store", True),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
    ],
)
def test_fields_that_are_refused(http: httpx.Client, field: str, value: Any) -> None:
    assert field in refusal(http, **{field: value})["message"]


def test_fields_without_effect(http: httpx.Client) -> None:
    labels = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    defaults = {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    nulls = {"stop": None, "temperature": None, "audio": None, "functions": None}
    body = {"messages": HELLO, "max_tokens": 2} | labels | defaults | nulls
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_the_cap_has_two_names(client: openai.OpenAI) -> None:
    longer = text(client, extra_body={"ignore_eos": True})
    both = ask(client, max_tokens=9, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert both.choices[0].finish_reason == "length"
    assert both.usage.completion_tokens == 3
    assert longer.startswith(both.choices[0].message.content)


def test_what_a_request_attends_to(client: openai.OpenAI, http: httpx.Client) -> None:
    assert text(client, extra_body={"exact": True}) == text(client)  # as the model's policy is
    assert "policy 'full' attends to all" in refusal(http, budget_tokens=64)["message"]


def test_choices_are_distinct_and_repeatable(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 2**63 - 1, "logit_bias": ASCII}
    first, second = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({*texts}) == 3
    assert [choice.message.content for choice in second.choices] == texts
    assert text(client, **(options | {"n": 1})) == texts[0]
    assert first.usage.completion_tokens == 36


def test_logprobs(client: openai.OpenAI, http: httpx.Client) -> None:
    options = {"logit_bias": ASCII}
    for k in (None, 0, 4, 20):
        answer = ask(client, logprobs=True, **options, **({} if k is None else {"top_logprobs": k}))
        (choice,) = answer.choices
        entries = choice.logprobs.content
        assert len(entries) == 12
        assert "".join(entry.token for entry in entries) == choice.message.content
        for entry in entries:
            assert bytes(entry.bytes).decode() == entry.token
            assert len(entry.top_logprobs) == (k or 0)
            assert all(math.isfinite(top.logprob) for top in [entry, *entry.top_logprobs])
    assert "top_logprobs" in refusal(http, logprobs=True, top_logprobs=21)["message"]
    streamed = [
        entry.token
        for chunk in ask(client, logprobs=True, stream=True, **options)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert "".join(streamed) == choice.message.content


def test_penalties_and_biases_reach_the_engine(client: openai.OpenAI) -> None:
    assert text(client, logit_bias={"64": 100}) == 12 * "a"
    whole = text(client, max_tokens=40, logit_bias=ASCII)
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        penalised = text(client, max_tokens=40, logit_bias=ASCII, extra_body={penalty: 2})
        assert penalised != whole
    always_ends = {"257": 100.0}
    answer = ask(client, logit_bias=always_ends)
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("", 1)
    longer = ask(client, logit_bias=always_ends, extra_body={"min_tokens": 4})
    assert longer.usage.completion_tokens == 5
    ignoring = ask(client, logit_bias=always_ends, extra_body={"ignore_eos": True})
    assert ignoring.choices[0].finish_reason == "length"


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist") as caught:
        ask(client, model="other")
    assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, n=2, temperature=1.0, seed=3)
    options: dict[str, Any] = {"include_usage": True}
    chunks = [*ask(client, n=2, temperature=1.0, seed=3, stream=True, stream_options=options)]
    assert len({(chunk.id, chunk.model, chunk.created, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    *parts, last = chunks
    assert (last.choices, last.usage) == (
        [],
        whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details}),
    )
    assert all(chunk.usage is None for chunk in parts)
    for choice in whole.choices:
        of_choice = [c for chunk in parts for c in chunk.choices if c.index == choice.index]
        assert [c.delta.role for c in of_choice if c.delta.role] == ["assistant"]
        assert of_choice[0].delta.role
        ends = [c.finish_reason for c in of_choice if c.finish_reason]
        assert ends == [choice.finish_reason]
        assert of_choice[-1].finish_reason
        streamed = "".join(c.delta.content or "" for c in of_choice)
        assert streamed == choice.message.content
    without = [*ask(client, stream=True)]
    assert all(chunk.usage is None and chunk.choices for chunk in without)


def test_usage_and_progress_while_it_streams(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "x" * 3000}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": long, "max_tokens": 8, "stream": True, "stream_options": options}
    body |= {"return_progress": True, "logit_bias": ASCII}
    lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    read = [each["processed"] for each in progress]
    assert read == sorted(read)
    assert read[-1] == progress[-1]["total"] == chunks[-1]["usage"]["prompt_tokens"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    whole = text(client, max_tokens=40, logit_bias=ASCII)
    for stop in (whole[7:10], whole[20:26], [whole[30:33], "never"]):
        first = stop if isinstance(stop, str) else stop[0]
        wanted = whole[: whole.index(first)]
        options: dict[str, Any] = {"max_tokens": 40, "logit_bias": ASCII, "stop": stop}
        answer = ask(client, **options)
        assert answer.choices[0].message.content == wanted
        assert answer.choices[0].finish_reason == "stop"
        chunks = ask(client, **options, stream=True, logprobs=True)
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(c.delta.content or "" for c in choices) == wanted
        tokens = [e.token for c in choices if c.logprobs for e in c.logprobs.content]
        assert "".join(tokens) == wanted


def test_a_context_that_overflows_is_a_400_before_the_stream(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    for stream in (False, True):
        error = refusal(http, messages=long, stream=stream)
        assert error["code"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (5018, 4096)
    assert refusal(http, max_tokens=4096)["code"] == "exceed_context_size_error"


def test_variables_of_the_template(serve: Serve) -> None:
    """All routes with messages take them."""
    thinks = "{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}"
    counts = "{% if of is defined %}{{ 1 // of }}{% endif %}"
    off = {"chat_template_kwargs": {"enable_thinking": False, "nobody_reads_this": [None]}}
    with (
        serve(template=TEMPLATE + thinks + counts) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        tokens = http.post("/tokenize", json={"messages": HELLO} | off).json()["tokens"]
        told = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert told == "[user]hello\n[assistant][no]"
        assert ask(client, extra_body=off).usage.prompt_tokens == len(tokens)
        continued = [*HELLO, {"role": "assistant", "content": "[no]"}]
        assert text(client, extra_body=off) == text(client, continued)
        response = client.responses.create(model="tiny", input="hello", extra_body=off)
        assert response.usage.input_tokens == len(tokens)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        with_tools = ask(client, tools=[tool], extra_body=off)
        without = ask(client, tools=[tool])
        assert with_tools.usage.prompt_tokens == without.usage.prompt_tokens + len("[no]")
        zero = refusal(http, chat_template_kwargs={"of": 0})
        assert "the chat template says" in zero["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_variables_that_are_the_servers(http: httpx.Client, path: str) -> None:
    needed = {"input": "hello"} if path == "/v1/responses" else {"messages": HELLO}
    for name in (
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "self"),
    ):
        error = refusal(http, path, **needed, chat_template_kwargs={name: "x"})
        assert f"chat_template_kwargs: {name!r} is the server's" in error["message"]
        assert error["param"] == "chat_template_kwargs"
    assert "dictionary" in refusal(http, path, **needed, chat_template_kwargs=[1])["message"]
    error = refusal(http, "/tokenize", prompt="a", chat_template_kwargs={"x": 1})
    assert "needs messages" in error["message"]
