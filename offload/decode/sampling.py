"""Which next tokens a decode step can choose by itself, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.greedy import SamplingBuffers, greedy_tokens
from gpu_ops.layout import Layout, allocate
from gpu_ops.sampling import sample_tokens


@dataclass(frozen=True)
class SamplingOptions:
    """How a step chooses. temperature 0 takes the likeliest token; top_k 0 and top_p 1 keep all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


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
            "uniform": ((max_rows,), torch.float32),
            "top_k": ((max_rows,), torch.int64),
            "temperature": ((max_rows,), torch.float32),
            "top_p": ((max_rows,), torch.float32),
        } | SamplingBuffers.layout(max_rows, vocab_size)

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        buffers = allocate(self.layout(max_rows, vocab_size), device)
        self.tokens, self._uniform = buffers.pop("tokens"), buffers.pop("uniform")
        self._top_k = buffers.pop("top_k")
        self._temperature = buffers.pop("temperature").fill_(1.0)
        self._top_p = buffers.pop("top_p").fill_(1.0)
        self._buffers = SamplingBuffers(vocab_size, **buffers)
        self._options = SamplingOptions()

    def use(self, options: SamplingOptions) -> None:
        """From the next step on, in all rows. Not inside a step: it is not captured."""
        if options != self._options and options.temperature > 0.0:
            self._temperature.fill_(options.temperature)
            self._top_k.fill_(options.top_k)
            self._top_p.fill_(options.top_p)
            self._options = options

    def choose(self, logits: Tensor, *, samples: bool) -> Tensor:
        """int64 [n] of logits [n, vocab_size]: part of `tokens`; -1 where the logits are not finite
        (`greedy_tokens` and `sample_tokens` say which).

        Args:
            samples: by the options in use, with torch's default generator of the device; else the
                largest, the first of equals.
        """
        n = len(logits)
        tokens = self.tokens[:n]
        if not samples:
            greedy_tokens(logits, tokens, self._buffers)
            return tokens
        uniform = self._uniform[:n].uniform_()
        sample_tokens(
            logits,
            temperature=self._temperature[:n],
            top_k=self._top_k[:n],
            top_p=self._top_p[:n],
            uniform=uniform,
            out=tokens,
            buffers=self._buffers,
        )
        return tokens
