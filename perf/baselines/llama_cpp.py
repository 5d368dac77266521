"""llama.cpp through llama-cpp-python, on the GGUF file as it is, with an f16 KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from perf.engines.engine_protocol import serve

_MAX_CONTEXT = 8192


class LlamaCpp:
    """One model; `flash_attention` chooses llama.cpp's attention kernel."""

    def __init__(self, gguf: str, *, threads: int, flash_attention: bool) -> None:
        self._llama = llama_cpp.Llama(
            gguf,
            n_ctx=_MAX_CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash_attention,
            verbose=False,
        )

    @property
    def versions(self) -> dict[str, str]:
        """The package's version, and what llama.cpp was compiled with."""
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "build": llama_cpp.llama_print_system_info().decode(),
        }

    def prefill(self, tokens: Sequence[int]) -> None:
        self._llama.reset()
        self._llama.eval(tokens)

    def step(self, token: int) -> int:
        self._llama.eval([token])
        logits = llama_cpp.llama_get_logits(self._llama.ctx)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._llama.n_vocab(),))))


if __name__ == "__main__":
    serve(LlamaCpp)
