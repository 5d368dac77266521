"""Our own engine for `perf.bench_decode`: the model's forward pass, as users call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from offload import OffloadedModel, __version__
from perf.baselines.stock_transformers import StockTransformers
from perf.engines.engine_protocol import serve


class OffloadEngine(StockTransformers):
    """One model under one policy, which is called as the stock model is."""

    versions: ClassVar = {"version": f"offload {__version__}"}

    def __init__(self, folder: str, *, threads: int, policy: str, dtype: str) -> None:
        self._model = OffloadedModel.from_pretrained(
            folder, policy=policy, dtype=dtype, num_threads=threads
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        self._past = self._model.new_cache()
        self._forward(tokens)


if __name__ == "__main__":
    serve(OffloadEngine)
