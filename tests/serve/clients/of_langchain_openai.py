"""langchain-openai."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tasks import QUESTION, main, task


class Place(BaseModel):
    """Where it is."""

    city: Literal["Rome", "Oslo"]  # a small model might not end a string


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def model_of(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=48, temperature=0)


@task
def chat(url: str, model: str) -> None:
    assert "Paris" in model_of(url, model).invoke(QUESTION).content


@task
def stream(url: str, model: str) -> None:
    chunks = [chunk.content for chunk in model_of(url, model).stream(QUESTION)]
    assert len(chunks) > 1
    assert "Paris" in "".join(chunks)


@task
def tools(url: str, model: str) -> None:
    bound = model_of(url, model).bind_tools([weather], tool_choice="any")
    turns = [HumanMessage("How is the weather in Rome?")]
    turns.append(bound.invoke(turns))
    turns.append(weather.invoke(turns[-1].tool_calls[0]))
    assert model_of(url, model).bind_tools([weather]).invoke(turns)


@task
def structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        made = model_of(url, model).with_structured_output(Place, method=method)
        assert isinstance(made.invoke("Where is the Colosseum?"), Place)


@task
def history(url: str, model: str) -> None:
    calls = [{"name": "weather", "args": {"city": "Oslo"}, "id": "call_1"}]
    turns = [
        SystemMessage("Be brief."),
        HumanMessage("How is the weather in Oslo?"),
        AIMessage("Let me see.", tool_calls=calls),
        ToolMessage("It snows.", tool_call_id="call_1", name="weather"),
    ]
    assert model_of(url, model).invoke(turns).content


main()
