"""openai: chat and responses."""

from __future__ import annotations

import json

from openai import OpenAI
from tasks import HISTORY, QUESTION, WEATHER, main, task

USER = {"role": "user", "content": QUESTION}
SETTINGS = {"max_tokens": 24, "temperature": 0}
SCHEMA = WEATHER["function"]["parameters"]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0)


@task
def chat(url: str, model: str) -> None:
    made = client(url).chat.completions.create(model=model, messages=[USER], **SETTINGS)
    assert "Paris" in made.choices[0].message.content
    developer = [{"role": "developer", "content": "Be brief."}, USER]
    more = client(url).chat.completions.create(model=model, messages=developer, **SETTINGS)
    assert more.usage.prompt_tokens != made.usage.prompt_tokens
    assert client(url).responses.create(model=model, input=QUESTION, temperature=0).output_text


@task
def stream(url: str, model: str) -> None:
    chunks = client(url).chat.completions.create(
        model=model, messages=[USER], stream=True, **SETTINGS
    )
    assert "Paris" in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@task
def tools(url: str, model: str) -> None:
    turns = [{"role": "user", "content": "How is the weather in Rome?"}]
    options = {"model": model, "tools": [WEATHER], "temperature": 0}
    made = client(url).chat.completions.create(
        messages=turns, tool_choice="required", max_tokens=64, **options
    )
    message = made.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."}
    turns += [message.model_dump(), result]
    made = client(url).chat.completions.create(messages=turns, max_tokens=24, **options)
    assert made.choices[0].message.content or made.choices[0].message.tool_calls


@task
def structured(url: str, model: str) -> None:
    schema = {"name": "place", "schema": SCHEMA, "strict": True}
    made = client(url).chat.completions.create(
        model=model,
        messages=[USER],
        response_format={"type": "json_schema", "json_schema": schema},
        **SETTINGS,
    )
    assert json.loads(made.choices[0].message.content)["city"] in ("Rome", "Oslo")


@task
def history(url: str, model: str) -> None:
    made = client(url).chat.completions.create(model=model, messages=HISTORY, **SETTINGS)
    assert made.choices[0].message.content


main()
