"""The embedded model on the GPU and on the CPU: do they say the same?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload import OffloadedModel, load_tokenizer
from offload.policies.registry import make_policy
from offload.system.stdlib_text import stdlib_paragraphs


def compare_devices(
    model: str,
    policies: Sequence[str],
    *,
    context: int,
    new_tokens: int,
    dtype: str,
    num_threads: int | None,
    device: dict[str, Any],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Greedy tokens of every policy from both backends.

    Args:
        model: a folder, or the embedded model's name.
        context: tokens of real text that are read.
        device: options of `OffloadedModel.from_pretrained` that choose the GPU.
    """
    words = "\n\n".join(stdlib_paragraphs())
    prompt = load_tokenizer(model)(words, verbose=False)["input_ids"][:context]
    rows = []
    for name in policies:
        said = []
        for options in ({}, device):
            loaded = OffloadedModel.from_pretrained(
                model, policy=make_policy(name), dtype=dtype, num_threads=num_threads, **options
            )
            said.append(_greedy(loaded, prompt, new_tokens))
            del loaded
        on_cpu, on_gpu = said
        same = 0
        while same < min(len(on_cpu), len(on_gpu)) and on_cpu[same] == on_gpu[same]:
            same += 1
        rows.append(
            {
                "policy": name,
                "context": len(prompt),
                "tokens": len(on_cpu),
                "same_tokens": same,
                "same": on_cpu == on_gpu,
            }
        )
        say(f"{name}: {same} of {len(on_cpu)} tokens are the CPU backend's")
    return rows


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
