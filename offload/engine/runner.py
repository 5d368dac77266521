"""The forward passes of an engine: a slice of a prompt, or one token of each running sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload.decode.sampling import SamplingOptions
from offload.engine.sampler import Chosen, score
from offload.models.batch import pack, tokens_each
from offload.runtime.passes import Pass
from offload.runtime.runtime import Runtime
from offload.system.autocast import current_device, without_autocast
from offload.system.torch_threads import torch_threads


class Runner:
    """Runs sequences of `runtime`, whose `run_lock` the caller has."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._sequences, self._lean = runtime.sequences, runtime.lean

    def new(self) -> int:
        """An empty sequence."""
        return self._sequences.new()

    def fork(self, seq: int, kv_len: int) -> int:
        """A sequence of the first `kv_len` tokens of `seq`, which were read, and not decoded."""
        return self._sequences.fork_prefix(seq, kv_len)

    def free(self, seqs: Sequence[int]) -> None:
        """Give back what sequences have."""
        self._sequences.free(seqs)

    def read(self, seq: int, tokens: Sequence[int]) -> Tensor:
        """Read some more of a prompt: hidden states [num_tokens, hidden_size] for `logits`.

        Raises:
            HostBudgetError, RuntimeError, ValueError: as `Runtime.run`; the sequence is as before.
        """
        runtime, ids = self.runtime, torch.tensor(tokens)
        first = runtime.store.kv_len(seq)
        positions = torch.arange(first, first + len(ids))
        batch = pack((1, len(ids)), None, positions[None])

        def compute(seqs: list[int]) -> Tensor:
            self._sequences.note_text(batch, seqs, ids, positions)
            return runtime.prefill(embedded, batch, seqs)

        with torch.no_grad(), current_device(runtime.device), without_autocast(runtime.device):
            embedded = self._lean.embed_tokens(ids.to(runtime.device))
            this = Pass(self._sequences, [seq], [len(ids)])
            on_device = runtime.attention.builds_in_prefill(runtime.device)
            return runtime.extend(this, compute, prefill=True, builds=on_device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float logits [n, vocab_size] of the tokens after those that were read."""
        device = self.runtime.device
        with torch.no_grad(), current_device(device), without_autocast(device):
            return self.runtime.logits(hidden, "prefill")

    def scores(
        self, hidden: Tensor, tokens: Sequence[int], num_likeliest: int
    ) -> tuple[Chosen, ...]:
        """Of the tokens that follow those that were read, one by one: logits are large."""
        rows = zip(hidden, tokens, strict=False)  # nothing follows the prompt's last
        return tuple(score(self.logits(row[None])[0], token, num_likeliest) for row, token in rows)

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], *, greedy: bool) -> Tensor:
        """The likeliest next tokens int64 [n] if `greedy`, else logits [n, vocab_size].

        Args:
            tokens: the last of each sequence, which are in the cache afterwards.

        Raises:
            As `Decoder.decode`; all sequences are as before.
        """
        runtime, ids = self.runtime, torch.tensor(tokens)
        positions = torch.tensor([runtime.store.kv_len(seq) for seq in seqs])
        batch = replace(tokens_each(len(seqs)), position_ids=positions)

        def compute(seqs: list[int]) -> Tensor:
            self._sequences.note_text(batch, seqs, ids)
            runtime.attention.build_states(seqs, (positions + 1).tolist())
            if greedy:
                return runtime.decoder.choose_tokens(seqs, ids, positions, SamplingOptions())
            embedded = self._lean.embed_tokens(ids.to(runtime.device))
            return runtime.decoder.logits(runtime.decoder.decode(embedded, batch, seqs))

        # Little work of torch's lies between the kernels, and a second thread of its would wait for
        # a CPU on which one of our workers still spins (`Runtime.generation`).
        with (
            torch.no_grad(),
            torch_threads(1),
            current_device(runtime.device),
            without_autocast(runtime.device),
        ):
            this = Pass(self._sequences, seqs, [1] * len(seqs))
            return runtime.extend(this, compute, prefill=False)
