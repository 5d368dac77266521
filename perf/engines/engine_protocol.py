"""Engines as child processes, each with its own libraries, threads and environment.

Standard library only, because peers speak from environments without offload: one JSON object per
line on stdin and stdout. Arguments of the process are the model and a JSON object of settings.

    -> {"prefill": [token ids]}   <- {"seconds": s}                  forgets what was before
    -> {"decode": [token ids]}    <- {"seconds": [s per step], "argmax": [token per step]}

Decoding feeds the given tokens one by one, so that all engines do the same work on the same text
whatever they would have answered. A step is timed from a token id to the most likely next one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]


def peers_python(isa: str | None = None) -> Path:
    """Python of the environment that `make peers` makes, with PEERS_ISA where an ISA is given."""
    return ROOT / (f".venv-peers-{isa}" if isa else ".venv-peers") / "bin" / "python"


class Engine(Protocol):
    """One model in one runtime."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the engine, and of what it was built with."""

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


class EngineProcess:
    """A running engine; a context manager that ends it.

    Raises:
        RuntimeError: it ended instead of answering; what it wrote to stderr was shown above.
    """

    def __init__(
        self, module: str, model: str, settings: dict[str, Any], python: Path | None = None
    ) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", module, model, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self._answer()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def prefill(self, tokens: Sequence[int]) -> float:
        """Start over and read the tokens; seconds."""
        return float(self._ask({"prefill": list(tokens)})["seconds"])

    def decode(self, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Feed the tokens one by one; (seconds, most likely next token) of each step."""
        answer = self._ask({"decode": list(tokens)})
        return answer["seconds"], answer["argmax"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended with exit code {self._end()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> int:
        self._process.communicate()  # which closes its stdin
        return self._process.returncode
