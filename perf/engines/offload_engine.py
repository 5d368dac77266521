"""Our own engine for `perf.bench_decode`: the model's forward pass, as users call it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from offload import OffloadedModel, __version__
from perf.engines.engine_protocol import serve


class OffloadEngine:
    """One model under one policy."""

    def __init__(self, folder: str, *, policy: str, threads: int) -> None:
        self._model = OffloadedModel.from_pretrained(
            folder, policy=policy, dtype="bfloat16", num_threads=threads
        )
        self._settings = {"threads": threads, "policy": policy}
        self._past: Any = None

    def describe(self) -> dict[str, Any]:
        """Versions and settings."""
        return {"version": f"offload {__version__}", **self._settings}

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start over and read the tokens."""
        self._past = self._model.new_cache()
        self._forward(tokens)

    def step(self, token: int) -> int:
        """Append one token; returns the most likely next one."""
        return int(self._forward([token])[0, -1].argmax())

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            torch.tensor([tokens]), past_key_values=self._past, logits_to_keep=1
        ).logits
        return logits


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(OffloadEngine(arguments.folder, policy=arguments.policy, threads=arguments.threads))
