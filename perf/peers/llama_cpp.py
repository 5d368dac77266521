"""llama.cpp through llama-cpp-python, on the GGUF file as it is, with an f16 KV cache."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from perf.engines.engine_protocol import serve


class LlamaCpp:
    """One model; `flash_attention` chooses llama.cpp's attention kernel."""

    def __init__(self, gguf: str, *, context: int, threads: int, flash_attention: bool) -> None:
        self._llama = llama_cpp.Llama(
            gguf,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash_attention,
            verbose=False,
        )
        self._settings = {"threads": threads, "flash_attention": flash_attention}

    def describe(self) -> dict[str, Any]:
        """Versions, what llama.cpp was compiled with, and settings."""
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "build": llama_cpp.llama_print_system_info().decode(),
            **self._settings,
        }

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start over and read the tokens."""
        self._llama.reset()
        self._llama.eval(tokens)

    def step(self, token: int) -> int:
        """Append one token; returns the most likely next one."""
        self._llama.eval([token])
        logits = llama_cpp.llama_get_logits(self._llama.ctx)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._llama.n_vocab(),))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--flash-attention", action="store_true")
    arguments = parser.parse_args()
    serve(
        LlamaCpp(
            arguments.gguf,
            context=arguments.context,
            threads=arguments.threads,
            flash_attention=arguments.flash_attention,
        )
    )
