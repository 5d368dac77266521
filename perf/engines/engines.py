"""Engines as child processes, so that each has its own libraries, threads and environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.results_file import ROOT

PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


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
