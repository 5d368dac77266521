"""Our own engine for `perf.bench_decode`: the model's forward pass, as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from offload import OffloadedModel, __version__
from perf.engines.engine_protocol import serve


class OffloadEngine:
    """One model under one policy."""

    versions: ClassVar = {"version": f"offload {__version__}"}

    def __init__(self, folder: str, *, threads: int, policy: str) -> None:
        self._model = OffloadedModel.from_pretrained(
            folder, policy=policy, dtype="bfloat16", num_threads=threads
        )
        self._past: Any = None

    def prefill(self, tokens: Sequence[int]) -> None:
        self._past = self._model.new_cache()
        self._forward(tokens)

    def step(self, token: int) -> int:
        return int(self._forward([token])[0, -1].argmax())

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            torch.tensor([tokens]), past_key_values=self._past, logits_to_keep=1
        ).logits
        return logits


if __name__ == "__main__":
    serve(OffloadEngine)
