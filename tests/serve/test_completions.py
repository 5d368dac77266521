"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest
import torch

FEW: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
ASCII = {str(token): -100.0 for token in [*range(94, 320)]}


def ask(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(prompt=prompt, **(FEW | options))


def text(client: openai.OpenAI, prompt: Any, **options: Any) -> str:
    return ask(client, prompt, **options).choices[0].text


def test_prompts_of_all_kinds(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "hello you"}).json()["tokens"]
    others = http.post("/tokenize", json={"prompt": "good day"}).json()
    assert others["count"] == len(others["tokens"]) == 8
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello you"}
    one, two = text(client, "hello you"), text(client, "good day")
    assert text(client, ids) == one
    for prompts in (
        ["hello you", "good day"],
        [ids, others["tokens"]],
        [ids, "good day"],
        ["hello you", others["tokens"]],
    ):
        answer = ask(client, prompts)
        assert [choice.text for choice in answer.choices] == [one, two]
        assert answer.usage.prompt_tokens == len(ids) + 8
    four = ask(client, ["hello you", "good day"], n=2, temperature=1, seed=1, logit_bias=ASCII)
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in four.choices}) == 4
    assert four.usage.prompt_tokens == len(ids) + 8
    assert four.usage.completion_tokens == 4 * 8


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [5000]}, "prompt: id 5000 is outside the vocabulary"),
        ({"prompt": [-1]}, "-1 is outside the vocabulary"),
        ({"prompt": [10**30]}, "vocabulary"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20, got 21"),
        ({"prompt": "a", "logprobs": True}, "valid integer, got True"),
        ({"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias: token id 5000 is outside the"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, "at most 100"),
        ({"prompt": "a", "logit_bias": {"5": -1e300}}, "at most 100"),
        ({"prompt": "a", "temperature": -1e-6}, "temperature"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": ["a"] * 129}, "at most 128"),
        ({"prompt": [[1]] * 100, "n": 3}, "100 prompts with n=3"),
        ({"prompt": "a", "stop": ["a"] * 65}, "at most 64 items"),
        ({"prompt": "a", "max_tokens": 0}, "0 needs echo=true"),
        ({"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens must be at least 1, got -1"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1}, "exceeds max_tokens=0"),
        ({"prompt": "a", "stop_token_ids": [5] * 65}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [5000]}, "stop_token_ids: token id 5000 is outside the"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "-1 is outside the vocabulary"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_bodies_that_are_refused(http: httpx.Client, body: Any, words: str) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_values_that_others_take_for_none(client: openai.OpenAI) -> None:
    greedy = text(client, "hello")
    assert text(client, "hello", temperature=1e-300) == greedy
    assert text(client, "hello", extra_body={"top_k": -1, "stop": None}) == greedy
    options = {"temperature": 1.0, "seed": 3}
    off = text(client, "hello", extra_body={"top_k": -1}, **options)
    assert off == text(client, "hello", **options)


LARGE = [
    ("completions", b'{"prompt": [%s]}', b"[]"),
    ("completions", b'{"prompt": [%s]}', b"1"),
    ("completions", b'{"prompt": [1, %s]}', b'""'),
    ("completions", b'{"prompt": "a", "stop": [%s]}', b'""'),
    ("completions", b'{"prompt": "a", "metadata": {%s}}', b'"%d": 1'),
    ("completions", b"{%s}", b'"%d": 1'),
    ("chat/completions", b'{"messages": [%s]}', b"1"),
    ("chat/completions", b'{"messages": [{"role": "user", "content": [%s]}]}', b"1"),
    ("chat/completions", b'{"messages": [], "tools": [%s], "n": 0}', b"1"),
    ("chat/completions", b'{"messages": [], "modalities": [%s]}', b"1"),
]


@pytest.mark.parametrize(
    ("path", "body", "item"),
    [
        ("completions", b'{"prompt": [%s]}', b"[1]"),
        ("completions", b'{"prompt": "a", "logit_bias": {%s}}', b'"%d": ""'),
        ("completions", b'{"prompt": "a", "structured_outputs": {"choice": [%s]}}', b'""'),
        ("chat/completions", b'{"messages": [{"role": "user", "tool_calls": [%s]}]}', b"1"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in LARGE),
    ],
)
def test_a_large_body_holds_nobody_up(
    http: httpx.Client, path: str, body: bytes, item: bytes
) -> None:
    number = 7 * 2**20 // (len(item) + 7)
    many = b",".join(item % i if b"%" in item else item for i in range(number))
    headers = {"Content-Type": "application/json"}
    start = time.monotonic()
    answer = http.post(f"/v1/{path}", content=body % many, headers=headers)
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert time.monotonic() - start < 5.0


def test_tokenize_refuses(http: httpx.Client) -> None:
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"content": "a"}),
        ("/detokenize", {"tokens": [5000]}),
        ("/detokenize", {"tokens": "a"}),
    ):
        assert http.post(path, json=body).status_code == 400


def test_streamed_text_is_the_whole(client: openai.OpenAI) -> None:
    prompts = ["hello you", "good day"]
    whole = ask(client, prompts, n=2, temperature=1.0, seed=5, max_tokens=30, echo=True)
    streamed = [""] * 4
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 30, "echo": True}
    for chunk in ask(client, prompts, n=2, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]
    assert all(text.startswith(prompts[i // 2]) for i, text in enumerate(streamed))


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "a beginning that nobody else has, of some length"
    first = ask(client, prompt).usage
    second = ask(client, prompt + " more").usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens - 1


def test_logprobs(client: openai.OpenAI) -> None:
    assert ask(client, "hello").choices[0].logprobs is None
    for k in (0, 3):
        (choice,) = ask(client, "hello", logprobs=k, logit_bias=ASCII).choices
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert {len(top) for top in logprobs.top_logprobs} <= {max(k, 1), k + 1}
        assert logprobs.text_offset == [*range(8)]


def test_offsets_are_of_the_text_where_a_character_is_several_tokens(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"logprobs": 0, "echo": True, "logit_bias": ASCII}
    (choice,) = ask(client, "\u00e9\U0001f642x", **options).choices
    offsets = [0, 0, 1, 1, 1, 1, 2, *range(3, 11)]
    assert choice.logprobs.text_offset == offsets
    stream = ask(client, "\u00e9\U0001f642x", stream=True, **options)
    assert [at for chunk in stream for at in chunk.choices[0].logprobs.text_offset] == offsets


def test_the_chosen_token_is_among_its_alternatives(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 50.0, "seed": 1, "logprobs": 2, "logit_bias": ASCII}
    logprobs = ask(client, "hello", **options).choices[0].logprobs
    chosen = [*zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)]
    assert all(logprob in top.values() for logprob, top in chosen)
    assert 3 in {len(top) for _, top in chosen}


@pytest.mark.parametrize(
    ("path", "content", "kind", "message", "param"),
    [
        ("completions", b'{"prompt": ', "application/json", "is not JSON: Expecting value", None),
        ("completions", b"", "application/json", "must be a JSON object", None),
        ("completions", b"[]", "application/json", "must be a JSON object", None),
        ("completions", b'{"prompt": "a"}', "text/plain", "Content-Type: application/json", None),
        (
            "completions",
            b"prompt=a",
            "application/x-www-form-urlencoded",
            "Content-Type: app",
            None,
        ),
        ("completions", b"{}", "application/json", "prompt: Field required", "prompt"),
        ("completions", b'{"prompt": "a", "stop": [""]}', "application/json", "stop.0: ", "stop"),
        ("completions", b'{"prompt": "a", "stop": {}}', "application/json", "stop: ", "stop"),
        ("completions", b'{"prompt": "\xff"}', "application/json", "not JSON: 'utf-8' codec", None),
        ("completions", b'{"seed": %s}' % (b"1" * 5000), "application/json", "5000 digits", None),
        ("completions", b"[" * 10**5, "application/json", "nested too deeply", None),
        ("completions", b'{"prompt": [9999]}', "application/json", "prompt: id 9999", "prompt"),
        ("responses", b'{"input": []}', "application/json", "at least 1 item", "input"),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "x"}}',
            "application/json",
            "tool_choice",
            "tool_choice",
        ),
        (
            "chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "application/json",
            "messages.0.content.0: Input tag 'image_url' found using 'type' does not match",
            "messages",
        ),
    ],
)
def test_errors_say_where_the_body_is_wrong(
    http: httpx.Client, path: str, content: bytes, kind: str, message: str, param: str | None
) -> None:
    answer = http.post(f"/v1/{path}", content=content, headers={"Content-Type": kind})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_stop_tokens(client: openai.OpenAI, http: httpx.Client, stream: bool) -> None:
    """They are no part of the answer, nor of its logprobs."""
    options: dict[str, Any] = {"logprobs": 1, "logit_bias": ASCII}
    (whole,) = ask(client, "hello", **options).choices
    last = whole.logprobs.tokens[3]
    at = whole.logprobs.tokens.index(last)  # the first of its kind
    (token,) = http.post("/tokenize", json={"prompt": last}).json()["tokens"]
    extra = {"stop_token_ids": [token, 93]}
    answer = ask(client, "hello", **options, extra_body=extra, stream=stream)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == whole.text[:at]
    assert choices[-1].finish_reason == "stop"
    scored = [t for choice in choices if choice.logprobs for t in choice.logprobs.tokens]
    assert scored == whole.logprobs.tokens[:at]


def test_when_stop_tokens_end_an_answer(client: openai.OpenAI, http: httpx.Client) -> None:
    """On all routes; not before min_tokens."""
    (token,) = http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]
    always: dict[str, Any] = {"logit_bias": {str(token): 100.0}, "stop_token_ids": [token, 257]}
    (choice,) = ask(client, "hello", extra_body=always).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    answer = ask(client, "hello", extra_body=always | {"min_tokens": 6})
    assert answer.usage.completion_tokens == 7
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, **FEW, extra_body=always)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("", "stop")
    response = client.responses.create(model="tiny", input="hello", extra_body=always)
    assert (response.output_text, response.status) == ("", "completed")
    assert response.usage.output_tokens == chat.usage.completion_tokens == 1


def test_echo_with_logprobs_scores_the_prompt(
    client: openai.OpenAI, http: httpx.Client, served_model: Any
) -> None:
    prompt = "a prompt that is long enough to be shared with an earlier one"
    text(client, prompt)
    ids = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3, "logit_bias": ASCII}
    (choice,) = ask(client, prompt, **options).choices
    scores = choice.logprobs
    assert choice.text.startswith(prompt)
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert len(scores.tokens) == len(ids) + 3
    with torch.no_grad():
        logits = served_model(torch.tensor([ids])).logits[0]
    wanted = logits[:-1].log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    torch.testing.assert_close(
        torch.tensor(scores.token_logprobs[1 : len(ids)]), wanted, atol=1e-3, rtol=1e-3
    )
    chunks = [*ask(client, prompt, stream=True, **options)]
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    streamed = [t for c in chunks for t in (c.choices[0].logprobs.token_logprobs or [])]
    assert streamed == scores.token_logprobs


@pytest.mark.parametrize(
    "end",
    [{}, {"logit_bias": {"257": 100.0}}, {"logit_bias": {"97": 100.0}, "stop_token_ids": [97]}],
)
def test_max_tokens_0_scores_only(client: openai.OpenAI, end: dict[str, Any]) -> None:
    """Whatever an answer would begin with."""
    prompts = ["score this", "and that"]
    options: dict[str, Any] = {"echo": True, "logprobs": 2, "extra_body": end}
    scored = ask(client, prompts, max_tokens=0, **options)
    longer = ask(client, prompts, max_tokens=1, echo=True, logprobs=2)
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, 18)
    for prompt, choice, other in zip(prompts, scored.choices, longer.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        scores, wanted = choice.logprobs, other.logprobs
        assert scores.token_logprobs[0] is None
        assert "".join(scores.tokens) == prompt
        assert scores.token_logprobs[1:] == pytest.approx(
            wanted.token_logprobs[1 : len(scores.tokens)], abs=1e-4
        )
    streamed = [*ask(client, "score this", max_tokens=0, stream=True, **options)]
    (chunk,) = (choice for each in streamed for choice in each.choices)
    assert (chunk.text, chunk.finish_reason) == ("score this", "length")
    wanted = scored.choices[0].logprobs.token_logprobs
    assert chunk.logprobs.token_logprobs[1:] == pytest.approx(wanted[1:], abs=1e-4)
    plain = ask(client, "score this", max_tokens=0, echo=True, extra_body=end).choices[0]
    assert (plain.text, plain.logprobs, plain.finish_reason) == ("score this", None, "length")
    parts = [*ask(client, "score this", max_tokens=0, echo=True, stream=True, extra_body=end)]
    assert "".join(each.choices[0].text for each in parts) == "score this"
    assert parts[-1].choices[0].finish_reason == "length"


def test_max_tokens_0_of_a_full_context(client: openai.OpenAI) -> None:
    (choice,) = ask(client, [7] * 4096, max_tokens=0, echo=True, logprobs=0).choices
    assert len(choice.logprobs.token_logprobs) == 4096
    with pytest.raises(openai.BadRequestError, match="exceed the context"):
        ask(client, [7] * 4097, max_tokens=0, echo=True)


@pytest.mark.parametrize(
    "content",
    [
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "stop": ["\\ud800"], "n": 0}',
    ],
)
def test_bodies_that_are_no_request(http: httpx.Client, content: bytes) -> None:
    kind = {"Content-Type": "application/json"}
    answer = http.post("/v1/completions", content=content, headers=kind)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.text)["error"]["type"] == "invalid_request_error"


def test_other_paths_and_methods(http: httpx.Client) -> None:
    for answer, status in (
        (http.get("/nothing"), 404),
        (http.get("/v1/chat/completions"), 405),
        (http.get("/v1/models/other"), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
