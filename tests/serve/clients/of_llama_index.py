"""llama-index, by its class for servers like OpenAI's."""

from __future__ import annotations

from typing import Literal

from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from tasks import HISTORY, QUESTION, main, task


class Place(BaseModel):
    """Where it is."""

    city: Literal["Rome", "Oslo"]  # a small model might not end a string


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


TOOL = FunctionTool.from_defaults(weather)


def llm(url: str, model: str) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=48,
        temperature=0,
    )


@task
def chat(url: str, model: str) -> None:
    assert "Paris" in str(llm(url, model).chat([ChatMessage(QUESTION)]))


@task
def stream(url: str, model: str) -> None:
    assert "Paris" in [*llm(url, model).stream_chat([ChatMessage(QUESTION)])][-1].message.content


@task
def tools(url: str, model: str) -> None:
    turns = [ChatMessage("How is the weather in Rome?")]
    made = llm(url, model).chat_with_tools([TOOL], chat_history=turns, tool_required=True)
    (call,) = llm(url, model).get_tool_calls_from_response(made)
    result = TOOL(**call.tool_kwargs)
    told = {"tool_call_id": call.tool_id, "name": call.tool_name}
    turns += [made.message, ChatMessage(str(result), role=MessageRole.TOOL, additional_kwargs=told)]
    assert llm(url, model).chat_with_tools([TOOL], chat_history=turns)


@task
def structured(url: str, model: str) -> None:
    made = llm(url, model).as_structured_llm(Place).chat([ChatMessage("Where is the Colosseum?")])
    assert isinstance(made.raw, Place)


@task
def history(url: str, model: str) -> None:
    turns = [
        ChatMessage(
            role=each["role"],
            content=each["content"] or "",
            additional_kwargs={k: v for k, v in each.items() if k not in ("role", "content")},
        )
        for each in HISTORY
    ]
    assert llm(url, model).chat(turns).message.content


main()
