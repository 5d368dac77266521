"""A model on real text that reads each prompt once for all policies, as `offload eval` does.

What is timed is what was judged: the runtimes are those of `SharedModel`. Beside them the peers of
`measure_engines` run on the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from offload.bench.decode.models import OnDone, Opener, check_length, ignore, release
from offload.measuring.steps.session import DecodeSession
from offload.policies import Policy
from offload.runtime.budgets import weight_bytes_of
from offload.runtime.cache import OffloadedCache
from offload.runtime.shared_model import SharedModel


class SharedText:
    """`TextModel` over a model that is open already.

    Args:
        policies: of the runtimes of `shared`, in order: the very objects.
        tokens: int64, the text.
    """

    def __init__(self, shared: SharedModel, policies: Sequence[Policy], tokens: Tensor) -> None:
        self._shared, self._policies, self._tokens = shared, list(policies), tokens
        self.stock, self.device, self.batch_size = shared.stock, shared.device, 1

    @contextmanager
    def sessions(
        self, kv_len: int, policies: Sequence[Policy], *, num_steps: int, on_done: OnDone = ignore
    ) -> Iterator[Opener]:
        """As `RandomModel.sessions`.

        Raises:
            ValueError: more tokens than the model has positions, or the text has.
        """
        check_length(kv_len, num_steps, self._shared.max_context, len(self._tokens))
        try:
            with self._shared.read(self._tokens[:kv_len].tolist()) as prompt:

                def opened(policy: Policy) -> DecodeSession:
                    index = next(i for i, x in enumerate(self._policies) if x is policy)
                    runtime, (parent,) = self._shared.runtimes[index], prompt.cache.seqs
                    own = OffloadedCache(runtime.sequences)
                    own.take(runtime.sequences.fork(parent))
                    # Where no GPU has built it: once, and not in every repeat.
                    runtime.attention.build_states(own.seqs, [kv_len + 1])
                    weight_bytes = weight_bytes_of(self.stock)
                    return DecodeSession(
                        runtime, own, self._tokens, num_steps, weight_bytes=weight_bytes
                    )

                yield opened
        finally:
            release(self.device)
