"""instructor, in its modes for this kind of server."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict
from tasks import HISTORY, QUESTION, main, task


class Place(BaseModel):
    """Where it is."""

    model_config = ConfigDict(extra="forbid")  # a small model would add more and more

    city: Literal["Rome", "Oslo"]  # a small model might not end a string


def client(url: str, mode: instructor.Mode = instructor.Mode.TOOLS):
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)


def ask(made, model: str, messages, **options):
    given = {"max_tokens": 64, "temperature": 0, "max_retries": 0} | options
    return made.chat.completions.create(model=model, messages=messages, **given)


USER = {"role": "user", "content": QUESTION}


@task
def chat(url: str, model: str) -> None:
    answer = ask(client(url), model, [USER], response_model=None)
    assert "Paris" in answer.choices[0].message.content


@task
def stream(url: str, model: str) -> None:
    made = client(url).chat.completions.create_partial(
        model=model, messages=[USER], response_model=Place, max_tokens=64, temperature=0
    )
    assert [*made][-1].city


@task
def tools(url: str, model: str) -> None:
    assert isinstance(ask(client(url), model, [USER], response_model=Place), Place)


@task
def structured(url: str, model: str) -> None:
    made = client(url, instructor.Mode.JSON_SCHEMA)
    assert isinstance(ask(made, model, [USER], response_model=Place), Place)


@task
def history(url: str, model: str) -> None:
    turns = [*HISTORY, {"role": "user", "content": "Where?"}]
    assert isinstance(ask(client(url), model, turns, response_model=Place), Place)


main()
