"""What a chat template is given: messages and tools, and which of their texts it must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

from offload.serve.errors import ApiError
from offload.serve.protocol import Message

Path = tuple[str | int, ...]
# What ties messages and calls together, which is no text.
_TIES = {"id", "index", "role", "tool_call_id", "type"}


def of_messages(
    messages: Sequence[Message], field: str, *, has_developer: bool
) -> list[dict[str, Any]]:
    """As templates take them, results of calls in the order of the calls.

    Args:
        field: of the request, which the messages are from.
        has_developer: the template knows this role; else it is `system`.

    Raises:
        ApiError: a result is that of no call.
    """
    made: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for is_result, group in groupby(enumerate(messages), lambda each: each[1].role == "tool"):
        run = []
        for i, message in group:
            run.append(message.plain())
            if message.role == "developer" and not has_developer:
                run[-1]["role"] = "system"
            if is_result:
                _check_result(run[-1], calls, f"{field}.{i}" if field == "messages" else field)
            else:
                calls = run[-1].get("tool_calls") or calls
        if is_result:
            numbers = {call.get("id"): i for i, call in enumerate(calls)}
            ids = [result.get("tool_call_id") for result in run]
            if len(numbers) == len(calls) and len({*ids}) == len(ids) and numbers.keys() >= {*ids}:
                run.sort(key=lambda result: numbers[result.get("tool_call_id")])
        made += run
    if made[-1]["role"] == "assistant" and made[-1].get("prefix") is True:
        del made[-1]["prefix"]  # it is continued, as this asks for
    return made


def _check_result(result: dict[str, Any], calls: Sequence[dict[str, Any]], where: str) -> None:
    """A name that is its call's is left out, as the call has it."""
    given = result.get("tool_call_id")
    if given is None:
        return
    mine = [call for call in calls if call.get("id") == given]
    if not mine:
        ids = [call.get("id") for call in calls]
        raise ApiError(
            400,
            f"{where}: tool_call_id {given!r} is that of no call before it; there are {ids}",
            param=where.split(".")[0],
        )
    if result.get("name") == mine[0]["function"]["name"]:
        del result["name"]


def texts(given: dict[str, Any]) -> Iterator[Path]:
    """Where in `messages` and `tools` something is said that the model must see."""
    for i, message in enumerate(given["messages"]):
        for name, value in message.items():
            if name == "tool_calls":
                for j, call in enumerate(value):
                    yield from _fields(call, ("messages", i, name, j))
            elif value and name not in _TIES:
                yield "messages", i, name
    for i, tool in enumerate(given["tools"]):
        for name in ("name", "description", "parameters"):
            if tool["function"].get(name):
                yield "tools", i, "function", name


def _fields(call: dict[str, Any], path: Path) -> Iterator[Path]:
    for name, value in call.items():
        if name == "function":
            yield from _fields(value, (*path, name))
        elif value and name not in _TIES:
            yield *path, name


def changed(
    given: dict[str, Any], paths: Sequence[Path], change: Callable[[Any, int], Any]
) -> dict[str, Any]:
    """A copy with other values at `paths`.

    Args:
        change: of a value, and the number of its path; None: without it.
    """
    made = deepcopy(given)
    for number, (*parents, name) in enumerate(paths):
        inner: Any = made
        for each in parents:
            inner = inner[each]
        value = change(inner[name], number)
        if value is None:
            del inner[name]
        else:
            inner[name] = value
    return made


def marked(value: Any, mark: str) -> Any:
    """With a mark at its end; a schema has one more property."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, list):
        return [*value, mark]
    if not isinstance(value, dict):
        return mark
    if isinstance(value.get("properties"), dict):
        return value | {"properties": value["properties"] | {mark: {"type": "string"}}}
    return value | {mark: mark}


def ignored(given: dict[str, Any], path: Path, field: str) -> ApiError:
    """The text there is not in the prompt.

    Args:
        field: of the request, which the messages are from.
    """
    if path[0] == "tools":
        name = path[-1]
        words = "tools: the chat template ignores them"
        if name != "name":
            words = f"{'.'.join(map(str, path))}: the chat template ignores it; leave it out"
        return ApiError(400, words, param="tools")
    _, number, *names = path
    message = given["messages"][number]
    where = ".".join(map(str, path)) if field == "messages" else field
    what = f"{'.'.join(map(str, names))} of messages of {message['role']!r}"
    if names == ["content"] and message.get("tool_calls"):
        what += " that have tool_calls"
    remedy = "" if names == ["content"] else "; leave it out"
    return ApiError(400, f"{where}: the chat template ignores {what}{remedy}", param=field)
