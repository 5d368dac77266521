"""pydantic-ai, by both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import QUESTION, main, task


class Place(BaseModel):
    """Where it is."""

    city: Literal["Rome", "Oslo"]  # a small model might not end a string


def agents_of(url, model, **options):
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        made = kind(model, provider=OpenAIProvider(base_url=url, api_key="none"))
        settings = {"max_tokens": 64, "temperature": 0.0}
        yield Agent(made, instructions="Be brief.", model_settings=settings, **options)


@task
def chat(url: str, model: str) -> None:
    for agent in agents_of(url, model):
        assert agent.run_sync(QUESTION).output


@task
def stream(url: str, model: str) -> None:
    async def run(agent):
        async with agent.run_stream(QUESTION) as result:
            assert [text async for text in result.stream_text(delta=True)]

    for agent in agents_of(url, model):
        asyncio.run(run(agent))


@task
def tools(url: str, model: str) -> None:
    """The answer is a call that must be."""
    for agent in agents_of(url, model, output_type=Place):
        assert isinstance(agent.run_sync("Where is the Colosseum?").output, Place)


@task
def structured(url: str, model: str) -> None:
    for agent in agents_of(url, model, output_type=NativeOutput(Place)):
        assert isinstance(agent.run_sync("Where is the Colosseum?").output, Place)


@task
def history(url: str, model: str) -> None:
    turns = [
        ModelRequest([UserPromptPart("How is the weather?")]),
        ModelResponse([TextPart("Let me see."), ToolCallPart("weather", "", "call_1")]),
        ModelRequest([ToolReturnPart("weather", "It snows.", "call_1")]),
        ModelResponse([TextPart("It snows.")]),
    ]
    for agent in agents_of(url, model):
        assert agent.run_sync("Where?", message_history=turns).output


main()
