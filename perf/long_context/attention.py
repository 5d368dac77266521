"""Which of torch's attention kernels a GPU trains with."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_backend(
    wanted: str, config: Any, device: torch.device, length: int
) -> SDPBackend | None:
    """The kernel of causal attention: cuDNN's where it is right and clearly faster, or Flash's.

    None lets torch choose, on a CPU.
    """
    if device.type != "cuda":
        return None
    named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if wanted != "auto":
        return named[wanted]
    shapes = [(1, heads, length, config.head_dim) for heads in
              (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
              ]  # fmt: skip
    inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
              for shape in shapes]  # fmt: skip
    up = torch.randn(shapes[0], device=device, dtype=torch.bfloat16)
    found: dict[str, tuple[float, list[Tensor]]] = {}
    for name, backend in named.items():
        try:
            with sdpa_kernel(backend):
                for _ in range(2):
                    torch.cuda.synchronize()
                    started = time.monotonic()
                    out = functional.scaled_dot_product_attention(
                        inputs[0], inputs[1], inputs[2], is_causal=True, enable_gqa=True
                    )
                    gradients = torch.autograd.grad(out, inputs, up)
                    torch.cuda.synchronize()
                    seconds = time.monotonic() - started
            found[name] = seconds, [out.detach(), *gradients]
        except RuntimeError as error:
            print(f"attention by {name}: {str(error)[:200]}", flush=True)
    chosen = min(found, key=lambda name: found[name][0] * (1.0 if name == "flash" else 1.1))
    if "flash" in found and chosen != "flash":
        pairs = zip(found["flash"][1], found[chosen][1], strict=True)
        errors = [float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs]
        if not max(errors) < 0.02:
            print(f"attention by {chosen} is wrong by {max(errors):.3f}", flush=True)
            chosen = "flash"
    times = ", ".join(f"{name} {of[0] * 1e3:.1f} ms" for name, of in found.items())
    print(f"attention of {length} tokens: {times}; {chosen} is used", flush=True)
    return named[chosen]
