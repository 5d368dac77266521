"""A model on real text that reads each prompt once for all policies, as `offload eval` does.

What is timed is what was judged: the runtimes are those of `SharedModel`. Beside them the peers of
`measure_engines` run on the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.bench.decode.models import OnDone, Opener, ignore, release
from offload.measuring.steps.measure import DecodeSession
from offload.measuring.steps.text_session import TextSession
from offload.policies import Policy
from offload.runtime.shared_model import ReadPrompt, SharedModel


class SharedText:
    """`TextModel` over a model that is open already.

    Args:
        policies: of the runtimes of `shared`, in order: the very objects.
        tokens: int64, the text.
    """

    def __init__(self, shared: SharedModel, policies: Sequence[Policy], tokens: Tensor) -> None:
        self._shared, self._policies, self._tokens = shared, list(policies), tokens
        self.stock, self.device = shared.stock, shared.device

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """As `RandomModel.sessions`.

        Raises:
            ValueError: more tokens than the model has positions, or the text has.
        """
        needed = kv_len + num_steps
        for name, most in (
            ("the model has positions", self._shared.max_context),
            ("the text has", len(self._tokens)),
        ):
            if needed > most:
                raise ValueError(
                    f"a context of {kv_len} tokens and {num_steps} steps are more than {name}: "
                    f"{most}; lower the length"
                )
        try:
            with self._shared.read(self._tokens[:kv_len].tolist()) as prompt:

                def opened(policy: Policy) -> DecodeSession:
                    index = next(i for i, x in enumerate(self._policies) if x is policy)
                    return _SharedSession(self._shared, index, prompt, self._tokens, num_steps)

                yield opened
        finally:
            release(self.device)


class _SharedSession(TextSession):
    """Behind a prompt that was read for all; the runtime stays open."""

    def __init__(
        self, shared: SharedModel, index: int, prompt: ReadPrompt, tokens: Tensor, num_steps: int
    ) -> None:
        (self._read_seq,) = prompt.cache.seqs
        weight_bytes = sum(weight.nbytes for weight in shared.stock.parameters())
        runtime, kv_len = shared.runtimes[index], len(prompt.tokens)
        super().__init__(runtime, weight_bytes, tokens, kv_len, num_steps)

    @torch.no_grad()
    def _read(self, prompt: Tensor) -> None:
        runtime = self._runtime
        self._prompt.take(runtime.sequences.fork(self._read_seq))
        # Where no GPU has built it: once, and not in every repeat.
        runtime.attention.build_states(self._prompt.seqs, [len(prompt) + 1])

    def close(self) -> None:
        for cache in (self._cache, self._prompt):
            if cache is not None:
                cache.reset()
