"""openai-agents, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from tasks import QUESTION, main, task

set_tracing_disabled(True)
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]  # a small model might not end a string


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def agents_of(url, model, settings=None, **options):
    for kind in MODELS:
        made = kind(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none"))
        settings = settings or ModelSettings(max_tokens=48, temperature=0)
        yield Agent("one", instructions="Be brief.", model=made, model_settings=settings, **options)


@task
def chat(url: str, model: str) -> None:
    for agent in agents_of(url, model):
        assert Runner.run_sync(agent, QUESTION).final_output


@task
def stream(url: str, model: str) -> None:
    async def run(agent):
        result = Runner.run_streamed(agent, QUESTION)
        assert [event async for event in result.stream_events()]
        assert result.final_output

    for agent in agents_of(url, model):
        asyncio.run(run(agent))


@task
def tools(url: str, model: str) -> None:
    settings = ModelSettings(max_tokens=64, temperature=0, tool_choice="required")
    for agent in agents_of(url, model, settings, tools=[weather]):
        result = Runner.run_sync(agent, "How is the weather in Rome?", max_turns=4)
        assert "It rains" in str(result.to_input_list())


@task
def structured(url: str, model: str) -> None:
    for agent in agents_of(url, model, output_type=Place):
        assert isinstance(Runner.run_sync(agent, "Where is the Colosseum?").final_output, Place)


@task
def history(url: str, model: str) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ""}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "It snows."}
    turns = [{"role": "user", "content": "How is the weather?"}, call, result]
    for agent in agents_of(url, model):
        assert Runner.run_sync(agent, turns).final_output


main()
