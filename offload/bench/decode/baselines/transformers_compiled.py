"""transformers as its documentation makes it fast: a static cache, and the decode step compiled.

The whole step, from a token to the likeliest next one, is one graph of `torch.compile`, which with
"reduce-overhead" runs it as one CUDA graph. The cache holds exactly the context and the steps:
attention reads all of it, whatever is in use. Source: transformers, "Static kv-cache and
torch.compile", option 2 of https://huggingface.co/docs/transformers/llm_optims.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from offload.bench.decode.baselines.transformers_decode import fill

# Compiling, recording the CUDA graph, replaying it, and one more.
WARM_UP_STEPS = 4
OPTIONS: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True}
# By what was measured of one layer of llama-3.1-8b at 128K: see docs/performance.md.
ATTENTION = "sdpa"


class CannotCompileError(RuntimeError):
    """torch cannot compile the model's step here."""


@dataclass(frozen=True)
class CompiledDecode:
    """What `decode_compiled` measured.

    Attributes:
        seconds: of each step, from one token on the host to the next; those to warm up left out.
        compile_seconds: of the steps to warm up, beyond what as many others take.
        tokens: of every step, those to warm up too, of each sequence.
    """

    seconds: list[float]
    compile_seconds: float
    tokens: list[list[int]]


def decode_compiled(
    stock: Any, *, kv_len: int, num_steps: int, batch_size: int = 1
) -> CompiledDecode:
    """Greedy decode steps after `kv_len` random tokens.

    Raises:
        CannotCompileError: no compiler for this device, or a step that is not one graph.
        torch.OutOfMemoryError: it does not fit.
    """
    _check_compiler(stock.device)
    cache = StaticCache(config=stock.config, max_cache_len=kv_len + WARM_UP_STEPS + num_steps)
    with _attention_of(stock, ATTENTION):
        try:
            fill(cache, stock, kv_len=kv_len, batch_size=batch_size)
            return _decoded(stock, cache, kv_len, batch_size, num_steps)
        except torch._dynamo.exc.TorchDynamoException as error:
            lines = str(error).strip().splitlines()
            raise CannotCompileError(
                f"torch.compile failed: {lines[0] if lines else type(error).__name__}"
            ) from error
        finally:
            torch._dynamo.reset()  # what was compiled for these tensors keeps them


@torch.no_grad()  # not inference_mode, whose tensors a CUDA graph must not write to
def _decoded(
    stock: Any, cache: StaticCache, kv_len: int, batch_size: int, num_steps: int
) -> CompiledDecode:
    def likeliest(tokens: Tensor, positions: Tensor) -> Tensor:
        logits = stock(
            input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
            position_ids=positions,
            logits_to_keep=1,
        ).logits
        return torch.argmax(logits[:, -1:], -1)

    compiled = torch.compile(likeliest, **OPTIONS)
    tokens = torch.zeros(batch_size, 1, dtype=torch.int64, device=stock.device)
    positions = torch.full_like(tokens, kv_len)
    seconds, chosen = [], []
    for _ in range(WARM_UP_STEPS + num_steps):
        start = time.perf_counter()
        tokens.copy_(compiled(tokens, positions))  # the next replay writes to the same output
        positions += 1
        chosen.append(tokens[:, 0].tolist())  # the token is needed to go on, and to be shown
        seconds.append(time.perf_counter() - start)
    rest = sorted(seconds[WARM_UP_STEPS:])
    warm_up = sum(seconds[:WARM_UP_STEPS]) - WARM_UP_STEPS * rest[len(rest) // 2]
    return CompiledDecode(seconds[WARM_UP_STEPS:], max(0.0, warm_up), chosen)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise CannotCompileError(
                "torch.compile needs triton for this GPU; install it, or leave this engine out"
            )


@contextmanager
def _attention_of(stock: Any, name: str) -> Iterator[None]:
    """The model attends with the implementation `name`."""
    before = stock.config._attn_implementation
    stock.set_attn_implementation(name)
    try:
        yield
    finally:
        stock.set_attn_implementation(before)
