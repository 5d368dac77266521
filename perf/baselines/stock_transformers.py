"""transformers in bf16, as it comes and with the attention and cache that are faster on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from perf.engines.engine_protocol import serve

_DECODE_TOKENS = 128


class StockTransformers:
    """One model; prefill always uses SDPA, which is the faster one for many queries."""

    versions: ClassVar = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}"
    }

    def __init__(self, folder: str, *, threads: int, attention: str, cache: str) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        self._attention = attention
        self._has_static_cache = cache == "static"
        self._past: Any = None

    def prefill(self, tokens: Sequence[int]) -> None:
        config = self._model.config
        if self._has_static_cache:
            # Attention reads the whole of it, so it is not larger than the benchmark needs.
            self._past = StaticCache(config=config, max_cache_len=len(tokens) + _DECODE_TOKENS)
        else:
            self._past = DynamicCache(config=config)
        self._model.set_attn_implementation("sdpa")
        self._forward(tokens)
        self._model.set_attn_implementation(self._attention)

    def step(self, token: int) -> int:
        return int(self._forward([token])[0, -1].argmax())

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            torch.tensor([tokens]), past_key_values=self._past, logits_to_keep=1
        ).logits
        return logits


if __name__ == "__main__":
    serve(StockTransformers)
