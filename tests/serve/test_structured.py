"""Answers that a grammar binds: a random model knows nothing of JSON, so that the mask does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serve.conftest import Serve

from offload.serve.grammars import SchemaLimits

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
    "$defs": {"pet": {"enum": ["cat", "dog"]}},
}


def is_person(answer: Any) -> bool:
    return (
        {*answer} == {"name", "age", "pets"}
        and len(answer["name"]) <= 6
        and isinstance(answer["age"], int)
        and 0 <= answer["age"] <= 130
        and len(answer["pets"]) <= 2
        and {*answer["pets"]} <= {"cat", "dog"}
    )


def body(**fields: Any) -> dict[str, Any]:
    made = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300}
    return made | {"seed": 5, "n": 4, "temperature": 1.0} | fields


def schema(given: Any) -> dict[str, Any]:
    named = {"name": "it", "schema": given, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def outputs(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": given}


def texts(http: httpx.Client, **fields: Any) -> list[str]:
    """Texts of choices that have ended by themselves."""
    answer = http.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        (schema(PERSON), lambda text: is_person(json.loads(text))),
        (outputs(json=PERSON), lambda text: is_person(json.loads(text))),
        (schema({"const": {"a": [1, None]}}), lambda text: json.loads(text) == {"a": [1, None]}),
        (schema({"enum": ["x", 7, False]}), lambda text: json.loads(text) in ("x", 7, False)),
        (outputs(regex="[a-c]{3}-é?[0-9]+z"), re.compile("[a-c]{3}-é?[0-9]+z").fullmatch),
        (outputs(choice=[f"a{i}" for i in range(4_000)]), re.compile("a[0-9]{1,4}").fullmatch),
        (outputs(choice=['say "yes"', "né\n"]), lambda text: text in ('say "yes"', "né\n")),
        (
            outputs(grammar='start: pair+\npair: "(" pair? ")"'),
            lambda text: not text.replace("(", "").replace(")", ""),
        ),
    ],
)
def test_the_answer_is_right(
    http: httpx.Client, fields: dict[str, Any], is_right: Callable[[str], Any]
) -> None:
    for text in texts(http, **fields):
        assert is_right(text), text


def test_any_object(http: httpx.Client) -> None:
    fields = {"response_format": {"type": "json_object"}, "logit_bias": {"92": 100.0}}
    fields["logit_bias"]["93"] = 5.0  # "}"
    for text in texts(http, n=2, **fields):
        assert isinstance(json.loads(text), dict)


def test_choices_have_states_of_their_own(http: httpx.Client) -> None:
    fields = schema(PERSON)
    four = texts(http, **fields)
    assert len({*four}) > 1
    assert texts(http, n=1, **fields) == four[:1]
    prompts = {"prompt": ["hello", "good day"], "max_tokens": 300, "n": 2, "seed": 1}
    answer = http.post("/v1/completions", json=prompts | fields).json()
    assert all(is_person(json.loads(choice["text"])) for choice in answer["choices"])


def test_it_streams(http: httpx.Client) -> None:
    fields = schema(PERSON)
    (whole,) = texts(http, n=1, **fields)
    lines = http.post("/v1/chat/completions", json=body(n=1, stream=True, **fields)).text
    events = [json.loads(line[6:]) for line in lines.split("\n\n") if line.startswith("data: {")]
    parts = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(parts) == whole


def test_what_is_cut_says_so(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=body(max_tokens=2, **schema(PERSON))).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (schema({"type": "wrong"}), "response_format: .*Invalid type: wrong"),
        (schema({"not": {}}), "Unimplemented keys"),
        (schema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no answer"),
        (schema({"type": "integer", "minimum": 2**60}), "beyond 2"),
        (schema({"type": "object", "minProperties": 2}), "minProperties"),
        (schema({"$ref": "http://127.0.0.1/schema"}), "does not fetch"),
        (schema({"pattern": "(", "type": "string"}), "unclosed group"),
        (schema({"title": "x" * 70_000}), "more than 65536"),
        (schema(nested(65)), "more than 64 levels"),
        (schema("x"), "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is needed"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "unknown field 'schema'"),
        (outputs(regex="("), "structured_outputs: .*unclosed group"),
        (outputs(regex="a", choice=["a"]), "one of"),
        (outputs(), "one of"),
        (outputs(choice=[]), "structured_outputs"),
        (outputs(grammar="start: x"), 'unknown name: "x"'),
        (outputs(grammar="start: " + "(" * 30_000), "structured_outputs"),
        (outputs(regex="a") | schema({}), "exclude each other"),
        (outputs(regex="a") | {"ignore_eos": True}, "ignore_eos"),
        (outputs(regex="a") | {"min_tokens": 3}, "min_tokens"),
        ({"guided_json": {}}, "unknown field 'guided_json'"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json=body(stream=stream, **fields))
        assert answer.status_code == 400, answer.text
        assert re.search(words, answer.json()["error"]["message"])


def test_what_llguidance_would_die_of(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level of a grammar is a level of recursion, and intersections grow without bounds."""
    monkeypatch.setattr("offload.serve.grammars._TRIAL_SECONDS", 1)
    rules = "".join(f"a{i}:a{i + 1}\n" for i in range(5_000))
    patterns = [{"type": "string", "pattern": f"x{i}"} for i in range(50)]
    for fields, words in (
        (outputs(grammar=f'start:a0\n{rules}a5000:"x"'), "too complex"),
        (schema({"allOf": patterns}), "more than 1 seconds"),
        (outputs(regex="\ud800"), "structured_outputs"),
        (outputs(grammar='start: "\ud800"'), "structured_outputs"),
    ):
        text, headers = json.dumps(body(**fields)), {"Content-Type": "application/json"}
        answer = http.post("/v1/chat/completions", content=text, headers=headers)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
    assert texts(http, **outputs(regex="ab")) == ["ab"] * 4


@pytest.mark.parametrize("depth", [200, 400, 900, 5_000, 100_000])
def test_deep_schemas_are_refused(http: httpx.Client, depth: int) -> None:
    deep = '{"items":' * depth + "{}" + "}" * depth
    tools = [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]
    for fields in (
        schema("DEEP"),
        outputs(json="DEEP"),
        {"tools": tools},
        {"tools": tools, "tool_choice": "required"},
    ):
        text = json.dumps(body(max_tokens=1, **fields)).replace('"DEEP"', deep)
        headers = {"Content-Type": "application/json"}
        answer = http.post("/v1/chat/completions", content=text, headers=headers)
        is_auto = fields == {"tools": tools}  # of which nothing is compiled
        assert answer.status_code == 400 or (is_auto and answer.status_code == 200)


def test_limits_are_options(serve: Serve) -> None:
    limits = SchemaLimits(max_bytes=500, max_depth=3)
    with serve(limits=limits) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert len(texts(http, **schema({"enum": [[1]]}))) == 4
        for given in (nested(4), {"const": "x" * 500}):
            assert http.post("/v1/chat/completions", json=body(**schema(given))).status_code == 400
