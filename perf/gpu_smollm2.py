"""The embedded model on the GPU and on the CPU: do they say the same?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload import OffloadedModel, load_tokenizer
from offload.policies.registry import make_policy
from offload.system.stdlib_text import stdlib_paragraphs
from perf.gpu_steps import GPUBench, Row


def compare_devices(
    bench: GPUBench,
    *,
    model: str,
    policies: Sequence[str],
    context: int,
    new_tokens: int,
    dtype: str,
) -> Iterator[Row]:
    """Greedy tokens of every policy from both backends.

    Args:
        model: a folder, or the embedded model's name.
        context: tokens of real text that are read.
    """
    words = "\n\n".join(stdlib_paragraphs())
    prompt = load_tokenizer(model)(words, verbose=False)["input_ids"][:context]
    on_gpu: dict[str, Any] = {"device": "cuda", "backend": bench.settings.backend}
    for name in policies:
        said = []
        for device in ({}, on_gpu if bench.is_cuda else {}):
            loaded = OffloadedModel.from_pretrained(
                model,
                policy=make_policy(name),
                dtype=dtype,
                num_threads=bench.settings.num_threads,
                **device,
            )
            said.append(_greedy(loaded, prompt, new_tokens))
            del loaded
        ours, theirs = said
        pairs = enumerate(zip(ours, theirs, strict=True))
        yield {
            "policy": name,
            "context": len(prompt),
            "tokens": len(ours),
            "same_tokens": next((i for i, (a, b) in pairs if a != b), len(ours)),
            "same": ours == theirs,
        }


def _greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
