"""Random draws of structured keys: pieces of text, drifts, and numbers that differ over heads.

All of them are made on the generator's device.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor


def stream_generator(
    seed: int, kv_head: int, stream: int, device: torch.device | None = None
) -> Generator:
    """The generator of one stream of one KV head of one sequence; a device has its own numbers."""
    return Generator(device or "cpu").manual_seed((seed * 1009 + kv_head) * 1009 + stream)


def even(n: int, generator: Generator) -> Tensor:
    """A permutation of n numbers spread evenly over (0, 1)."""
    return (torch.randperm(n, generator=generator, device=generator.device) + 0.5) / n


def pieces(n: int, mean_tokens: float, min_tokens: int, generator: Generator) -> Tensor:
    """int64 [n]: which piece of contiguous tokens each token is in; at least min_tokens long."""
    count = n // min_tokens + 1
    lengths = torch.empty(count, device=generator.device).exponential_(
        1 / max(1.0, mean_tokens - min_tokens), generator=generator
    )
    starts = (lengths.long() + min_tokens).cumsum(0)
    of_token = torch.zeros(n, dtype=torch.int64, device=generator.device)
    of_token[starts[starts < n]] = 1
    return of_token.cumsum(0)


def drift(n: int, shape: tuple[int, ...], correlation: float, generator: Generator) -> Tensor:
    """[n, *shape]: normal in every step, with that correlation to the step before."""
    noise = torch.randn(n, *shape, generator=generator, device=generator.device)
    # One product instead of a loop over steps, each of which would be some launches on a GPU.
    ages = torch.arange(n, device=generator.device, dtype=torch.float64)
    ages = ages[:, None] - ages
    weights = torch.where(ages < 0, 0.0, correlation ** ages.clamp_min(0))
    weights[:, 1:] *= math.sqrt(1 - correlation**2)
    return (weights.float() @ noise.view(n, -1)).view(noise.shape)


def normal(generator: Generator) -> float:
    """One number."""
    return float(torch.randn((), generator=generator, device=generator.device))


def lognormal(sigma: float, generator: Generator) -> float:
    """One number; of mean 1."""
    return math.exp(sigma * normal(generator) - sigma * sigma / 2)
