"""What every client is to do, each in a process of its own environment.

A script registers its tasks and calls `main`: arguments are the server's URL and the model's name,
and each task has a line of JSON on stdout, with its error or null.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

QUESTION = "What is the capital of France? Answer in one word."
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "call_1", "type": "function"}
CALL |= {"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It snows."},
]
TASKS: dict[str, Callable[[str, str], Any]] = {}


def task(function: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """A task under the function's name."""
    TASKS[function.__name__] = function
    return function


def main() -> None:
    """Run all of them."""
    for name, function in TASKS.items():
        error = None
        try:
            function(*sys.argv[1:3])
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"task": name, "error": error}), flush=True)
