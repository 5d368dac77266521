"""Passes of an engine over the sequences of a model that runs on its own stock modules.

Prompts are read one after the other; a decode step is one pass over all sequences, padded on the
left to the longest, as rows of `generate()` are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.decode.cpu import likeliest
from offload.decode.sampling import Sampler
from offload.models.batch import RaggedBatch, tokens_each
from offload.runtime.runner import Pass


class GenericRunner:
    """The `Runner` of a generic model, as far as an engine calls one.

    Args:
        runtime: the `GenericRuntime` that has it.
        arguments: that the stock `forward` takes.
    """

    def __init__(self, runtime: Any, arguments: Sequence[str]) -> None:
        self._runtime, self.arguments = runtime, frozenset(arguments)

    def read(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        between: Callable[[], None],
    ) -> tuple[Tensor, ...]:
        """Logits [1, vocab_size] behind the next tokens of each sequence.

        Args:
            parts: sequences, and their next tokens.
            between: called between two layers of the store; others may have passes in there.

        Raises:
            As `GenericCache.forward_pass`; all sequences are as before, also where `between` fails.
        """
        runtime, read = self._runtime, list[tuple[int, int]]()
        runtime.check_modules()
        with runtime.states.kept([seq for seq, _ in parts]):
            try:
                logits = list[Tensor]()
                for seq, tokens in parts:
                    before = runtime.store.kv_len(seq)
                    with self.phase(reads_prompt=True):
                        of_last = self._run([seq], torch.tensor([tokens]), between)
                    logits.append(of_last.cpu())
                    read.append((seq, before))
                return tuple(logits)
            except BaseException:
                for seq, kv_len in read:
                    runtime.sequences.truncate(seq, kv_len)
                raise

    def decode_tokens(self, this: Pass, batch: RaggedBatch, tokens: Tensor) -> Tensor:
        """Logits [num_sequences, vocab_size] behind `tokens` int64 [num_sequences], one of each
        sequence of a pass.

        Raises:
            As `GenericCache.forward_pass`. A pass that fails in its middle loses the states of
            sequences, if layers have some: later passes of these are refused.
        """
        with self.phase(reads_prompt=False):
            return self._run(this.seqs, tokens[:, None]).cpu()

    def choose_tokens(
        self,
        begin: Callable[[RaggedBatch], Pass],
        seqs: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        samplers: Sequence[Sampler],
        most: int,
        take: Callable[[Tensor, int], bool],
    ) -> None:
        """One step to the likeliest tokens, as `Runner.choose_tokens`."""
        batch = tokens_each(len(seqs))
        this = begin(batch)
        with self.phase(reads_prompt=False):
            logits = self._run(this.seqs, tokens[:, None])
        take(likeliest(logits).cpu()[:, None], 0)

    def first_tokens(self, logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
        """The likeliest of logits [n, vocab_size]."""
        return likeliest(logits)

    @contextlib.contextmanager
    def phase(self, *, reads_prompt: bool) -> Iterator[None]:
        """Around a pass; a step may come in the middle of a prompt's pass."""
        runtime = self._runtime
        before = runtime.reads_prompt, runtime.decodes, runtime.is_in_engine
        runtime.reads_prompt, runtime.is_in_engine = reads_prompt, True
        try:
            yield
        finally:
            runtime.reads_prompt, runtime.decodes, runtime.is_in_engine = before

    def _run(
        self, seqs: Sequence[int], ids: Tensor, between: Callable[[], None] | None = None
    ) -> Tensor:
        """The stock model over new ids [batch_size, n]: logits of the last, [batch_size, vocab]."""
        runtime, n = self._runtime, ids.shape[1]
        cache = runtime.states.cache_of(seqs, runtime.new_cache)
        lens = torch.tensor(cache.kv_lens)[:, None]
        columns, mask = int(lens.max()) + n, None
        if int(lens.min()) + n < columns:
            mask = (torch.arange(columns) >= columns - n - lens).long()
        given: dict[str, Any] = {
            "position_ids": lens + torch.arange(n),
            "logits_to_keep": 1,
            "attention_mask": mask,
        }
        given = {name: x for name, x in given.items() if name in self.arguments}
        given |= {"input_ids": ids, "past_key_values": cache, "use_cache": True}
        given = {
            name: x.to(runtime.device) if isinstance(x, Tensor) else x for name, x in given.items()
        }
        cache.between = between
        try:
            out = runtime.stock(**given)
        finally:
            cache.between = None
        logits: Tensor = out.logits[:, -1]
        return logits
