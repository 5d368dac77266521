"""litellm, and what aider sends through it."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network

import litellm
from tasks import HISTORY, QUESTION, WEATHER, main, task

SCHEMA = {"name": "place", "schema": WEATHER["function"]["parameters"], "strict": True}


def ask(url, model, messages, **options):
    given = {"max_tokens": 48, "temperature": 0} | options
    return litellm.completion(
        model=f"openai/{model}", api_base=url, api_key="none", messages=messages, **given
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@task
def chat(url: str, model: str) -> None:
    assert "Paris" in ask(url, model, [user(QUESTION)]).choices[0].message.content


@task
def stream(url: str, model: str) -> None:
    chunks = [*ask(url, model, [user(QUESTION)], stream=True)]
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@task
def tools(url: str, model: str) -> None:
    turns = [user("How is the weather in Rome?")]
    made = ask(url, model, turns, tools=[WEATHER], tool_choice="required")
    message = made.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather"}
    turns += [message, result | {"content": "It rains."}]
    assert ask(url, model, turns, tools=[WEATHER]).choices


@task
def structured(url: str, model: str) -> None:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    made = ask(url, model, [user("Where is the Colosseum?")], response_format=form)
    assert json.loads(made.choices[0].message.content)["city"]


@task
def history(url: str, model: str) -> None:
    assert ask(url, model, HISTORY).choices[0].message.content


@task
def aider(url: str, model: str) -> None:
    """Rules, examples, files, what was done, the question, and the rules once more."""
    turns = [
        {"role": "system", "content": "Act as an expert software developer."},
        user("Change get_factorial() to use math.factorial"),
        assistant("mathweb/app.py\n<<<<<<< SEARCH\n=======\n>>>>>>> REPLACE"),
        user("I switched to a new code base. Please don't consider the above files."),
        assistant("Ok."),
        user("Here are summaries of some files.\n\na.py:\n│def f():"),
        assistant("Ok, I won't try and edit those files without asking first."),
        user("I have *added these files to the chat*.\n\na.py\n```\ndef f(): pass\n```"),
        assistant("Ok, any changes I propose will be to those files."),
        user("Rename f to g."),
        {"role": "system", "content": "# *SEARCH/REPLACE block* Rules:\nEvery block has a path."},
    ]
    for stream in (False, True):
        assert ask(url, model, turns, stream=stream)
    cut = ask(url, model, [*turns[:-1], assistant("a.py\n```")], max_tokens=8)
    assert cut.choices[0].message.content is not None
    begun = assistant("a.py\n```") | {"prefix": True}  # an answer that was cut goes on
    assert ask(url, model, [*turns[:-1], begun], max_tokens=8).choices
    assert ask(url, model, [*turns[:-2], user("Rename f."), user("Now.")], max_tokens=8).choices


main()
