"""What a benchmarked engine's process speaks: one JSON object per line on stdin and stdout.

Standard library only, because peers run it from environments without offload. Arguments of the
process are the model and a JSON object of settings.

    -> {"prefill": [token ids]}   <- {"seconds": s}                  forgets what was before
    -> {"decode": [token ids]}    <- {"seconds": [s per step], "argmax": [token per step]}

Decoding feeds the given tokens one by one, so that all engines do the same work on the same text
whatever they would have answered. A step is timed from a token id to the most likely next one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """One model in one runtime."""

    @property
    def versions(self) -> dict[str, str]:
        """Of the engine, and what it was built with."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start over and read the tokens."""

    def step(self, token: int) -> int:
        """Append one token; returns the most likely next one."""


def serve(make_engine: Callable[..., Engine]) -> None:
    """Make the engine of the command line, describe it, and answer requests until stdin ends."""
    # What libraries print goes to stderr; only answers go to the pipe.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    engine = make_engine(model, **settings)
    answers.write(json.dumps({**engine.versions, **settings}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_answer(engine, request)) + "\n")


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if "prefill" in request:
        start = time.perf_counter()
        engine.prefill(request["prefill"])
        return {"seconds": time.perf_counter() - start}
    seconds, argmax = [], []
    for token in request["decode"]:
        start = time.perf_counter()
        argmax.append(engine.step(token))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "argmax": argmax}
