"""Forward passes over sequences of any lengths: the only driver, of `generate()` and of the engine.

After a pass all sequences have its tokens, or none has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.decode.attention import DecodeAttention
from offload.decode.cpu import capped
from offload.decode.decoder import Decoder
from offload.decode.sampling import Draws, Sampler, check_chosen
from offload.kv_compression.base import Exposed
from offload.models.batch import RaggedBatch, tokens_each
from offload.prefill.forward import OnTokens, is_all_on_pool
from offload.runtime.correcting import Correction
from offload.runtime.corrector import Corrector, give_back
from offload.runtime.model_loading import LoadedModel
from offload.runtime.prompt_reading import prefill_for
from offload.runtime.sequences import Sequences
from offload.runtime.stats import OffloadStats
from offload.system.autocast import current_device, without_autocast
from offload.system.interrupts import finish, shielded
from offload.system.torch_threads import torch_threads


class Pass:
    """Reserve, compute, then commit or roll back.

    Args:
        seqs: handles, all distinct.
        num_new_tokens: of each; what its correction reads again is not counted.

    Attributes:
        seqs: those that get the tokens: copies in the place of sequences that are corrected.
        num_begun: tokens of each that the policy has not seen yet.
        at_once: as of `KVStore.reserve`.
    """

    def __init__(
        self,
        sequences: Sequences,
        seqs: Sequence[int],
        num_new_tokens: Sequence[int],
        correction: Correction | None = None,
    ) -> None:
        self.seqs = list(seqs)
        self.num_begun = num_new_tokens
        if correction is not None:
            self.num_begun = correction.batch.num_new_tokens
        self.at_once = False
        self._sequences, self._store = sequences, sequences.store
        self._num_new_tokens, self._correction = num_new_tokens, correction
        self._lens_before: list[int] = []
        self._lens_after: list[int] = []
        self._corrected: dict[int, int] = {}  # place to the sequence for which another stands

    def reserve(self, exposed: Exposed = contextlib.nullcontext) -> None:
        """Make room. Ctrl-C comes in what is `exposed`, as an error does.

        Raises:
            HostBudgetError: if it does not fit; nothing has changed then, but that sequences may
                have been condensed.
            RuntimeError: as `KVCompression.check_usable`.
        """
        num_read = self._num_new_tokens
        try:
            self._sequences.make_room(self.seqs, num_read, exposed)
            if self._correction is not None:
                num_read = self._correction.batch.num_new_tokens
                self._set_aside(self._correction)
            self._store.reserve(self.seqs, num_read, at_once=self.at_once)
        except BaseException:
            self._take_back()
            raise
        before = self._lens_before = [self._store.kv_len(seq) for seq in self.seqs]
        self._lens_after = [n + new for n, new in zip(before, num_read, strict=True)]

    def commit(self) -> None:
        """The tokens are in every layer of the store; of some it may know already."""
        ends = zip(self._lens_after, self.seqs, strict=True)
        self._store.commit(self.seqs, [after - self._store.kv_len(seq) for after, seq in ends])

    def end(self) -> None:
        """What comes after `commit` went well, too."""
        self._sequences.free(self._corrected.values())
        self._corrected.clear()
        self._store.free_behind(self.seqs)

    def roll_back(self) -> None:
        """As before `reserve`, which went well, after anything that did not."""
        for seq, kv_len in zip(self.seqs, self._lens_before, strict=True):
            self._sequences.roll_back(seq, kv_len)
        self._take_back()

    def _set_aside(self, correction: Correction) -> None:
        """Go on with copies of sequences that are corrected."""
        for place, first in correction.firsts.items():
            copy = self._sequences.fork_to_read_again(self.seqs[place], first)
            self._corrected[place], self.seqs[place] = self.seqs[place], copy

    def _take_back(self) -> None:
        """Undo `_set_aside`."""
        for place, seq in self._corrected.items():
            self._sequences.free([self.seqs[place]])
            self.seqs[place] = seq
        self._corrected.clear()


@dataclass
class PassCounter:
    """Counts forward passes, those of a `generate()` or others.

    Attributes:
        prefill_threads: of torch while a prompt is prefilled; None: as torch has it.
        is_running: they are those of a `generate()`.
        stats: what is counted; outside of a `generate()` also what the last one has counted.
    """

    prefill_threads: int | None
    is_running: bool = False
    stats: OffloadStats = field(default_factory=OffloadStats)
    _start: float = 0.0
    _last_end: float | None = None

    def restart_watch(self) -> None:
        """The next decode step counts from its own start: something else ran in between."""
        self._last_end = None

    def begin_pass(self, seconds: float = 0.0) -> None:
        """A pass begins, or something that counts as one has, so many seconds ago."""
        self._start = time.perf_counter() - seconds

    def count_index(self, seconds: float) -> None:
        """`seconds` of building what the policy keeps, which do not count as decoding."""
        self.stats.index_seconds += seconds
        self._leave_out(seconds)

    def count_setup(self, seconds: float) -> None:
        """`seconds` of the decoder's set-up, which do not count as decoding."""
        self.stats.setup_seconds += seconds
        self._leave_out(seconds)

    def _leave_out(self, seconds: float) -> None:
        self._start += seconds
        if self._last_end is not None:
            self._last_end += seconds

    def count_correction(self, num_tokens: int) -> None:
        """So many were read again, which the thread that decodes had to do with from `begin_pass`
        to now."""
        self.stats.corrected_tokens += num_tokens
        self.stats.correction_seconds += time.perf_counter() - self._start
        self.count_pass("decode", 0)

    def count_pass(self, phase: str, num_tokens: int) -> None:
        """A forward pass of `num_tokens` tokens from `begin_pass` to now."""
        stats, end = self.stats, time.perf_counter()
        if phase != "prefill":
            stats.decode_tokens += num_tokens
            stats.decode_seconds += end - (self._last_end or self._start)
        else:
            stats.prefill_tokens += num_tokens
            stats.prefill_seconds += end - self._start
        # Between the passes of a generation tokens are chosen; between others, anything may happen.
        self._last_end = end if self.is_running else None


class Runner:
    """Runs the layers of one model over its sequences, whose `run_lock` the caller has.

    Args:
        counter: gives what counts the passes that run now.

    Attributes:
        corrector: reads again what was decoded sparsely.
    """

    def __init__(
        self,
        opened: LoadedModel,
        sequences: Sequences,
        decoder: Decoder,
        counter: Callable[[], PassCounter],
    ) -> None:
        self.lean, self.device, self.config = opened.lean, opened.device, opened.config
        self.sequences, self.decoder, self.attention = sequences, decoder, decoder.attention
        self.corrector = Corrector(opened, sequences, decoder)
        self.counter = counter

    def prefill(self, *args: Any, **options: Any) -> Tensor:
        """`prefill_by_layer` to its end."""
        return finish(self.prefill_by_layer(*args, **options))

    def prefill_by_layer(
        self,
        hidden: Tensor,
        batch: RaggedBatch,
        seqs: list[int],
        *,
        attentions: Sequence[DecodeAttention] | None = None,
        builds: bool = True,
        on_tokens: OnTokens | None = None,
    ) -> Generator[None, None, Tensor]:
        """Embeddings [num_tokens, hidden_size] of new tokens through all layers, overwritten; it
        stops between them.

        Args:
            seqs: with room reserved in the store, which the caller commits; none: nothing is kept.
            attentions: of the policies that will decode after it; None: the decoder's.
            builds: what policies build on a GPU during a prefill; False: more of the prompt comes.
            on_tokens: hears of every slice after every layer.
        """
        store = self.sequences.store
        self.sequences.background.give_up()  # for room
        if self.attention.top_p_controller is not None:
            self.attention.top_p_controller.restart()
        alone = is_all_on_pool(self.lean, hidden, store, self.decoder.pool)
        with torch_threads(1 if alone else self.counter().prefill_threads):
            self.decoder.trim()
            for seq in seqs:
                self.decoder.rebase(seq, store.kv_len(seq), seq)
            hidden, seconds = yield from prefill_for(
                [self.attention] if attentions is None else attentions,
                hidden,
                batch,
                seqs,
                builds=builds,
                model=self.lean,
                store=store if seqs else None,
                slice_tokens=self.config.prefill_slice_tokens,
                pool=self.decoder.pool,
                on_tokens=on_tokens,
                device_budget_bytes=self.config.max_memory.get(self.device.index or 0),
                give_back=partial(give_back, self.decoder, seqs),
            )
        self.counter().stats.index_seconds += seconds
        return hidden

    def read(
        self, this: Pass, batch: RaggedBatch, tokens: Tensor, *, builds: bool
    ) -> Generator[None, None, Tensor]:
        """`prefill_by_layer` of the ids `tokens` [num_tokens], in a pass. Between two layers other
        sequences may have passes; after `close` those of this one are as they were before."""
        hidden = self.lean.embed_tokens(tokens.to(self.device))

        def compute(seqs: list[int]) -> Generator[None, None, Tensor]:
            self.sequences.note_text(batch, seqs, tokens, batch.position_ids)
            return self.prefill_by_layer(hidden, batch, seqs, builds=builds)

        this.at_once = True
        on_device = builds and self.attention.builds_in_prefill(self.device)
        return (yield from self.extend_by_layer(this, compute, prefill=True, builds=on_device))

    def decode(self, hidden: Tensor, batch: RaggedBatch, seqs: list[int]) -> Tensor:
        """As `Decoder.decode`, with what the policy keeps built before it."""
        self._build_index(seqs)
        before = self.decoder.setup_seconds
        hidden = self.decoder.decode(hidden, batch, seqs)
        self._count_setup(before)
        return hidden

    def decode_tokens(self, this: Pass, batch: RaggedBatch, tokens: Tensor) -> Tensor:
        """Decode the ids `tokens` [num_tokens] in a pass: logits [num_tokens, vocab_size]."""

        def compute(seqs: list[int]) -> Tensor:
            self.sequences.note_decoded(batch, seqs, tokens, batch.position_ids)
            embedded = self.lean.embed_tokens(tokens.to(self.device))
            return self.decoder.logits(self.decode(embedded, batch, seqs))

        return self.extend(this, compute, prefill=False)

    def choose_tokens(
        self,
        begin: Callable[[RaggedBatch], Pass],
        seqs: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        samplers: Sequence[Sampler],
        most: int,
        take: Callable[[Tensor, int], bool],
        *,
        several: bool = False,
        checks: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Decode steps that follow each other, from the last token of each sequence to the next.

        Args:
            begin: makes the pass of a batch of `seqs`.
            tokens, positions: int64 [num_sequences], of the last token of each, on the host.
            samplers: as `Draws.of` takes them.
            most: steps, where several had best follow each other.
            take: told of the tokens of each pass, int64 [num_sequences, count], -1 where logits
                were not finite, and how many passes are to follow; whether one may. It must not
                wait for a GPU.
            several: a pass may be of several tokens.
            checks: logits that are not finite are an error.
            beside: as of `Decoder.choose_tokens`.

        Raises:
            As `Decoder.choose_tokens`, and RuntimeError if it `checks`; all sequences are as before
            the step that failed.
        """

        def compute(seqs: list[int]) -> Tensor:
            self.sequences.count_condensed(self.counter().stats)
            if count == 1:
                self.sequences.note_decoded(batch, seqs, tokens, positions)
            self._build_index(seqs)
            before, step = self.decoder.setup_seconds, (seqs, tokens, positions, draws)
            if count > 1:
                chosen = self.decoder.choose_several(*step, count)
                # Nobody has read their delimiter classes meanwhile.
                fed = torch.cat([tokens[:, None], chosen[:, :-1]], dim=1)
                self.sequences.note_text(batch, seqs, fed.flatten())
            else:
                chosen = self.decoder.choose_tokens(*step, ahead=left > 0, beside=beside)[:, None]
            self._count_setup(before)
            return check_chosen(chosen, len(self.lean.layers)) if checks else chosen

        corrections, before = self.sequences.corrections, self.decoder.setup_seconds
        count = in_turn = 1
        try:
            # Several, where nothing has to see the result of each; corrections know each token.
            if self.sequences.compression is None and not self.attention.is_probed:
                if corrections is not None:
                    most = min(most, corrections.steps_left(seqs))
                elif several:
                    count = self.decoder.tokens_at_once(seqs, most)
                in_turn = 1 if count > 1 else self.decoder.begin_steps(seqs, most)
            self._count_setup(before)
            batch, draws = tokens_each(len(seqs), count), Draws.of(samplers, max(count, in_turn))
            for left in reversed(range(in_turn)):
                chosen = self.extend(begin(batch), compute, prefill=False)
                if not take(chosen, left):
                    break
                tokens, positions = chosen[:, -1], positions + 1
        finally:
            self.decoder.end_steps()

    def first_tokens(self, logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
        """The choice after a prompt: logits [n, vocab_size] -> int64 [n], -1 if not finite."""
        with current_device(self.device), without_autocast(self.device):
            return self.decoder.first_tokens(logits, Draws.of(samplers))

    def logits(self, hidden: Tensor, phase: str) -> Tensor:
        """[..., hidden_size] before the final norm -> [..., vocab_size]."""
        with without_autocast(self.device):
            if phase == "decode":
                return self.decoder.logits(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
            with torch_threads(self.counter().prefill_threads):
                rows = self.lean.final_norm(hidden).flatten(0, -2)
                outputs = self.lean.lm_head(rows, self.decoder.pool)
                logits = capped(outputs, self.lean.logit_cap)
            return logits.view(*hidden.shape[:-1], -1)

    def extend(self, *args: Any, **options: Any) -> Tensor:
        """`extend_by_layer` to its end."""
        return finish(self.extend_by_layer(*args, **options))

    def extend_by_layer(
        self,
        this: Pass,
        compute: Callable[[list[int]], Tensor | Generator[None, None, Tensor]],
        *,
        prefill: bool,
        builds: bool = False,
    ) -> Generator[None, None, Tensor]:
        """What `compute`, or a generator that it gives, makes of the sequences of a pass, which
        have room for its tokens then. Afterwards they have these tokens, or after an error, `close`
        or ctrl-C they are as they were before.

        Args:
            prefill, builds: as of `PolicyStates.begin`.
        """
        self.decoder.check_usable()
        states = self.attention.states
        with shielded() as exposed:
            this.reserve(exposed)
            seqs = list(this.seqs)
            try:
                states.begin(seqs, this.num_begun, prefill=prefill, builds=builds)
                with exposed():
                    result = compute(seqs)
                    if not isinstance(result, Tensor):
                        result = yield from result
                this.commit()
            except BaseException:
                this.roll_back()
                raise
            this.end()
            states.commit(seqs)
        return result

    def _build_index(self, seqs: list[int]) -> None:
        """What the policy keeps of sequences that come past its budget with their next token."""
        kv_lens = [self.sequences.store.kv_len(seq) + 1 for seq in seqs]
        counter = self.counter()
        with torch_threads(counter.prefill_threads):
            counter.count_index(self.attention.build_states(seqs, kv_lens))

    def _count_setup(self, before: float) -> None:
        """Seconds that the decoder took for set-up, since they were `before`."""
        self.counter().count_setup(self.decoder.setup_seconds - before)
