"""Which next tokens a decode step can choose by itself, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_ops.greedy import SamplingBuffers, greedy_tokens
from gpu_ops.layout import Layout, allocate
from gpu_ops.sampling import sample_tokens

MOST_STEPS = 64  # that random numbers are drawn for at a time
# Whatever the process's defaults are.
_HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True)
class SamplingOptions:
    """How a step chooses. temperature 0 takes the likeliest token; top_k 0 and top_p 1 keep all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Draws:
    """What rows choose by in a step, and in those that follow without the host.

    Attributes:
        options: of each row.
        uniform: float32 [num_rows, num_steps <= MOST_STEPS], in [0, 1), on the host.
    """

    options: Sequence[SamplingOptions]
    uniform: Tensor

    @staticmethod
    def of(samplers: Sequence[Sampler], num_steps: int = 1) -> Draws | None:
        """Draws for the rows of all samplers; None if all are greedy."""
        options = [options for sampler in samplers for options in sampler.options]
        if not any(of_row.temperature > 0.0 for of_row in options):
            return None
        return Draws(options, torch.cat([sampler.uniform(num_steps) for sampler in samplers]))


class Sampler:
    """How rows choose their tokens: by `options`, and random numbers of their own. These do not
    depend on how many steps come at a time.

    Args:
        options: of each row.
        generator: of the random numbers, on the CPU; None: a new one, for whose seed one number is
            drawn from torch's own.
    """

    def __init__(
        self,
        options: SamplingOptions,
        num_rows: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        self.options = (options,) * num_rows
        self._generator = generator
        self._next: list[Tensor] = []  # of each step to come [num_rows]

    def uniform(self, num_steps: int = 1) -> Tensor:
        """[num_rows, num_steps] for the next steps; the same again until these are `taken`."""
        num_rows = len(self.options)
        if self.options[0].temperature == 0.0:
            return torch.zeros(num_rows, num_steps, **_HOST)
        if self._generator is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
            self._generator = torch.Generator().manual_seed(seed)
        while len(self._next) < num_steps:
            self._next.append(torch.rand(num_rows, generator=self._generator, **_HOST))
        return torch.stack(self._next[:num_steps], dim=1)

    def take(self, num_steps: int = 1) -> None:
        """The next steps' tokens were chosen."""
        del self._next[:num_steps]


class BurstError(RuntimeError):
    """One of several steps has failed: single ones tell where, if it fails again.

    Attributes:
        chosen: int64 [n, num_steps], in the steps before it, which are done; None: in none.
    """

    def __init__(self, message: str, chosen: Tensor | None = None) -> None:
        super().__init__(message)
        self.chosen = chosen


def check_chosen(tokens: Tensor, num_layers: int) -> Tensor:
    """`tokens` [n, num_steps] on the host, of `TokenChooser` or `likeliest`.

    Raises:
        RuntimeError: one is -1. What went wrong in a layer shows in the keys of the next, so it was
            the last layer, or came after it.
        BurstError: one of several steps.
    """
    if int(tokens.min()) < 0:
        if tokens.dim() > 1 and tokens.shape[1] > 1:
            raise BurstError("non-finite logits in one of several steps")
        raise RuntimeError(
            f"non-finite logits in row {int(tokens.argmin())} of the step: NaN or inf in layer "
            f"{num_layers - 1}, the last, or in the weights after it"
        )
    return tokens


class TokenChooser:
    """Chooses one token per row in a step that a CUDA graph may capture.

    Args:
        max_rows: of the logits of one call.

    Attributes:
        tokens: int64 [max_rows], the choice of the last call.
    """

    @staticmethod
    def layout(max_rows: int, vocab_size: int) -> Layout:
        """Layout of all buffers, the scratch of `SamplingBuffers` among them."""
        return {
            "tokens": ((max_rows,), torch.int64),
            # Each line from 16 bytes on, for kernels that are compiled for that.
            "draws": ((3 + MOST_STEPS, -(-max_rows // 4) * 4), torch.float32),
        } | SamplingBuffers.layout(max_rows, vocab_size)

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        buffers = allocate(self.layout(max_rows, vocab_size), device)
        self.tokens, self._draws = buffers.pop("tokens"), buffers.pop("draws").zero_()
        self._buffers = SamplingBuffers(vocab_size, **buffers)
        # Temperature, top_p, top_k; in row 3 + position % MOST_STEPS the random numbers.
        self._host_draws = torch.zeros(self._draws.shape, **_HOST, pin_memory=device.type == "cuda")

    def use(self, draws: Draws, rows: Sequence[int], positions: Sequence[int]) -> None:
        """From the next step on. Not inside a step: it is not captured.

        Args:
            rows: of the logits; others take the likeliest token.
            positions: of each in the first step.
        """
        host = self._host_draws.numpy()
        host[0] = 0.0
        for row, options in zip(rows, draws.options, strict=True):
            top_k = min(options.top_k, self._buffers.vocab_size)
            host[:3, row] = options.temperature, options.top_p, top_k
        steps = np.arange(draws.uniform.shape[1])
        at = (np.asarray(positions)[:, None] + steps) % MOST_STEPS
        host[3 + at, np.asarray(rows)[:, None]] = draws.uniform.numpy()
        self._draws.copy_(self._host_draws, non_blocking=True)

    def choose(self, logits: Tensor, positions: Tensor | None = None) -> Tensor:
        """int64 [n] of logits [n, vocab_size]: part of `tokens`; -1 where the logits are not finite
        (`greedy_tokens` and `sample_tokens` say which).

        Args:
            positions: int64 [n], by which `use` has the random numbers; None: all rows take the
                largest, the first of equals.
        """
        n = len(logits)
        tokens = self.tokens[:n]
        if positions is None:
            greedy_tokens(logits, tokens, self._buffers)
            return tokens
        temperature, top_p, top_k = self._draws[:3, :n]
        sample_tokens(
            logits,
            temperature=temperature,
            top_k=top_k.long(),
            top_p=top_p,
            uniform=self._draws[3:].gather(0, positions[None] % MOST_STEPS)[0],
            out=tokens,
            buffers=self._buffers,
        )
        return tokens
