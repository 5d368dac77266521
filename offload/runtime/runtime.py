"""What runs a model: its lean layers, its KV store, and the two phases of a forward pass."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from offload.decode.sampling import BurstError, Sampler, SamplingOptions, check_chosen
from offload.kv.page_pool import WINDOW_SLACK
from offload.kv.store import KVStore
from offload.models.batch import RaggedBatch, tokens_each
from offload.prefill.forward import OnTokens
from offload.prefill.layer import attend_to_nothing
from offload.runtime.cache import OffloadedCache
from offload.runtime.compressing import page_tokens_of, reconstructs
from offload.runtime.correcting import BackgroundCorrection, corrections_for
from offload.runtime.decoders import make_decoder
from offload.runtime.fingerprint import fingerprint
from offload.runtime.generation import Generation, GenerationRequest
from offload.runtime.model_loading import LoadedModel
from offload.runtime.module_watch import ModuleWatch
from offload.runtime.phases import BatchPart, parts_of, prompt_columns_of, whole_part
from offload.runtime.quality import FloorWatch, Quality, quality_of
from offload.runtime.runner import Pass, Runner
from offload.runtime.sequences import Sequences
from offload.runtime.slices import run_in_slices
from offload.system.autocast import current_device, without_autocast
from offload.system.interrupts import shielded
from offload.system.torch_threads import torch_threads

logger = logging.getLogger(__name__)

_PROBE_SEED = 13


class Runtime:
    """Runs the layers of one stock model.

    Args:
        store: of another runtime of the same model, to share; None: one of its own.

    Attributes:
        decoder: what runs decode steps.
        current_generation: what forward passes belong to. Between two `generate()` it is one that
            does not run, with the statistics of the last.
    """

    scores_prompts = True  # an engine can have logits of every token of a prompt
    reads_at_once = False  # a prompt may be read in parts
    has_positions = True  # whose number bounds a context

    def __init__(self, opened: LoadedModel, store: KVStore | None = None) -> None:
        self.config = config = opened.config
        self.lean, self.device = opened.lean, opened.device
        self.ranks = self.lean.ranks
        shape = self.lean.shape
        self.store = store or KVStore(
            num_layers=len(self.lean.layers),
            num_kv_heads=self.lean.each("num_kv_heads"),
            head_dim=self.lean.each("head_dim"),
            dtype=opened.stock.dtype,
            kv_dtype=config.kv_dtype,
            host_budget_bytes=opened.host_kv_bytes,
            page_tokens=page_tokens_of(config, shape),
            pinned=self.device.type == "cuda",
            per_head_pages=reconstructs(config, shape),
            windows=self.lean.each("window"),
        )
        self.decoder = decoder = make_decoder(
            opened, self.store, lambda: self.sequences.background.give_up()
        )
        self._watch = ModuleWatch(opened.stock)  # after the decoder, which may move weights
        self.attention = self.decoder.attention
        corrections = corrections_for(opened, self.store, decoder)
        if corrections is not None:
            config.policy.state.compile_revise()
        weights, stock_config = dict(opened.stock.named_parameters()), opened.stock.config
        self.sequences = Sequences(
            self.store,
            self.attention,
            decoder,
            self.attention.compression,
            opened.delimiter_classes,
            corrections,
            has_ranks=self.ranks is not None,
            fingerprint=partial(fingerprint, weights, stock_config, config.policy, self.store),
        )
        self.runner = Runner(opened, self.sequences, decoder, lambda: self.current_generation)
        self.run_lock = self.sequences.run_lock
        self.current_generation = Generation(config.num_threads)
        self._floor: FloorWatch | None = None
        if config.quality_probe:
            self.attention.start_probe(config.quality_probe, seed=_PROBE_SEED)
            if config.quality_floor is not None:
                self._floor = FloorWatch(self.attention, config.quality_floor)
        if self.device.type == "cuda":
            from offload.runtime.kernel_warmup import warm_up

            warm_up(self.lean, self.decoder, config.policy, self.store.dtype)

    def run(
        self,
        hidden: torch.Tensor,
        batch: RaggedBatch,
        cache: OffloadedCache | None,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, str]:
        """Embeddings [num_tokens, hidden_size] through all layers: (hidden, phase of the first).

        In a generation the tokens of its prompt are prefilled, and later ones decoded, however many
        they are: a draft is decoded. Outside of one, a token per sequence after a cache is decoded,
        and several are a prompt.

        Args:
            tokens: int64 [num_tokens], the ids behind the embeddings, where they are known.

        Raises:
            HostBudgetError: before anything is computed.
            ValueError, RuntimeError: keys or values that are not finite. The cache is then as it
                was before, or as `run_in_slices` leaves it.
        """
        with current_device(self.device), without_autocast(self.device), self.together():
            compression = self.sequences.compression
            if cache is None or compression is None:
                return self._run(hidden, batch, cache, tokens)
            prompt = prompt_columns_of(batch, cache, self.current_generation)
            return run_in_slices(self._run, hidden, batch, cache, compression, tokens, prompt)

    def run_unattended(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `run`, of tokens [n, hidden_size] that attend to nothing and are not kept."""
        threads = torch_threads(self.current_generation.prefill_threads)
        with current_device(self.device), without_autocast(self.device), threads, self.together():
            return attend_to_nothing(self.lean, hidden, self.decoder.pool)

    def _run(
        self,
        hidden: torch.Tensor,
        batch: RaggedBatch,
        cache: OffloadedCache | None,
        tokens: torch.Tensor | None,
        prompt_columns: int | None = None,
    ) -> tuple[torch.Tensor, str]:
        generation = self.current_generation
        generation.begin_pass()
        if self.ranks is not None:
            inputs = torch.tensor(batch.num_new_tokens) if tokens is None else tokens
            self.ranks.check_same("the input", inputs)
        if cache is None:
            hidden = self.runner.prefill(hidden, batch, [], on_tokens=generation.on_tokens)
            self._record("prefill", batch.num_tokens)
            return hidden, "prefill"
        if prompt_columns is None:
            prompt_columns = prompt_columns_of(batch, cache, generation)
        parts = parts_of(batch, prompt_columns, self.decoder.max_step_tokens)
        decodes = parts[-1].phase == "decode"
        correction, corrections = None, self.sequences.corrections
        if decodes and corrections is not None and tokens is None:
            raise ValueError(
                "inputs_embeds in a decode step with cache_correction_every: what is decoded is "
                "read again by its ids; give input_ids, or leave cache_correction_every out"
            )
        if decodes:
            self._correct(cache, beside=False)
        elif corrections is not None:
            correction = corrections.behind(cache.seqs, batch)
        if correction is not None:
            parts = [whole_part("prefill", correction.batch)]

        def compute(seqs: list[int]) -> torch.Tensor:
            note = self.sequences.note_decoded if decodes else self.sequences.note_text
            note(batch, seqs, tokens, batch.position_ids)
            if correction is None:
                return self._run_parts(hidden, parts, seqs)
            read = correction.embedded(hidden, self.lean.embed_tokens)
            result = self._run_parts(read, parts, seqs)[correction.is_new]
            generation.stats.corrected_tokens += len(correction.ids)
            return result

        phase = parts[0].phase
        # A GPU builds while the keys are there, and a draft behind a prompt needs what is built.
        prefill = phase == "prefill"
        on_device = self.attention.builds_in_prefill(hidden.device)
        builds = prefill and (on_device or parts[-1].phase != phase)
        this = cache.begin(batch, correction)
        # Behind a prompt no more is decoded in the same pass than windows leave room for.
        decoded = [n for part in parts if part.phase == "decode" for n in part.batch.num_new_tokens]
        this.at_once = prefill and max(decoded, default=0) <= WINDOW_SLACK
        return self.runner.extend(this, compute, prefill=prefill, builds=builds), phase

    def _run_parts(
        self, hidden: torch.Tensor, parts: Sequence[BatchPart], seqs: list[int]
    ) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size] through all layers, overwritten."""
        generation = self.current_generation
        for i, part in enumerate(parts):
            generation.begin_pass(self.sequences.count_condensed(generation.stats))
            of_part = [seqs[sequence] for sequence in part.sequences]
            if i > 0 and (parts[i - 1].phase, part.phase) == ("prefill", "decode"):
                self.attention.states.begin_draft(of_part)
            x = hidden[part.tokens]
            if part.phase == "prefill":
                x = self.runner.prefill(x, part.batch, of_part, on_tokens=generation.on_tokens)
            else:
                x = self.runner.decode(x, part.batch, of_part)
            self._record(part.phase, part.batch.num_tokens)
            if len(parts) == 1:
                return x
            hidden[part.tokens] = x
            self.store.commit(of_part, part.batch.num_new_tokens)
        return hidden

    def chooses_tokens(self, options: SamplingOptions) -> bool:
        """Whether `choose_tokens` can be used."""
        return options.temperature == 0.0 or self.decoder.samples

    def first_tokens(self, logits: torch.Tensor, sampler: Sampler | None = None) -> torch.Tensor:
        """The choice after a prompt: logits [batch_size, vocab_size] -> int64 [batch_size].

        RuntimeError for logits that are not finite.
        """
        chosen = self.runner.first_tokens(logits, [] if sampler is None else [sampler])
        return check_chosen(chosen, len(self.lean.layers))

    def step_logits(self, cache: OffloadedCache, token: int, position: int) -> torch.Tensor:
        """Logits [vocab_size] of a decode step with one token of one sequence."""
        ids, batch = torch.tensor([token]), tokens_each(1)
        batch.position_ids[0] = position
        hidden, phase = self.run(self.lean.embed_tokens(ids.to(self.device)), batch, cache, ids)
        logits: torch.Tensor = self.runner.logits(hidden, phase)[0]
        return logits

    @torch.inference_mode(False)  # as in `run_lock.locked`
    @torch.no_grad()
    def choose_tokens(
        self,
        cache: OffloadedCache,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        most: int = 1,
        ends: Callable[[torch.Tensor], bool] = lambda tokens: False,
        sampler: Sampler | None = None,
    ) -> torch.Tensor:
        """Decode steps from the last token of each row to the next, int64 [batch_size, n <= most].

        Args:
            ends: whether there had best be no further step behind tokens [batch_size]; where many
                come at once, nobody asks.
            sampler: who calls lets it `take` the steps whose tokens are used; None: the likeliest.

        Raises:
            As `run`; ValueError for a context that is too long; BurstError where it was not the
            first of several steps that failed.
        """
        chosen: list[torch.Tensor] = []

        def begin(batch: RaggedBatch) -> Pass:
            self.current_generation.begin_pass()
            self.check_context(max(cache.seen_lens) + batch.num_new_tokens[0])
            return cache.begin(batch)

        def take(tokens: torch.Tensor, left: int) -> bool:
            self._record("decode", tokens.numel())
            chosen.append(tokens)
            return left > 0 and not ends(tokens[:, -1])

        samplers = [] if sampler is None else [sampler]
        try:
            with current_device(self.device), without_autocast(self.device), self.together():
                running = self._correct(cache)
                go_on, most = (None, most) if running is None else (running.go_on, 1)
                step = (begin, cache.seqs, tokens, position_ids, samplers, most, take)
                self.runner.choose_tokens(*step, several=True, checks=True, beside=go_on)
        except RuntimeError as error:
            if not chosen:
                raise
            logger.warning("a step has failed and is tried again: %s", error)
            raise BurstError(str(error), torch.cat(chosen, dim=1)) from error
        except BaseException:
            if chosen:  # whoever asked has none of them
                cache.crop(-sum(tokens.shape[1] for tokens in chosen))  # a pass may be of several
            raise
        return torch.cat(chosen, dim=1)

    def _correct(
        self, cache: OffloadedCache, *, beside: bool = True
    ) -> BackgroundCorrection | None:
        """Read again what is due of `cache`, or say what does so beside its next step.

        Args:
            beside: it may go on beside the step, where there is a GPU.
        """
        corrections, corrector = self.sequences.corrections, self.runner.corrector
        if corrections is None or not corrector.has_work(cache.seqs):
            return None
        generation = self.current_generation
        generation.begin_pass()
        with torch_threads(generation.prefill_threads):
            beside = beside and corrections.in_background
            running, num_tokens = corrector.correct(cache.seqs, beside=beside)
        generation.count_correction(num_tokens)
        return running

    def quality(self) -> Quality:
        """As `OffloadedModel.quality`."""
        return quality_of(self.attention)

    def check_modules(self) -> None:
        """Refuse a model that was changed after it was loaded (`ModuleWatch`).

        In a generation that was done when it began.
        """
        if not self.current_generation.is_running:
            self._watch.check()

    def close(self) -> None:
        """Give its threads and the memory of its store back."""
        self.sequences.background.give_up()
        self.decoder.close()
        self.store.close()

    @property
    def max_context(self) -> int:
        """Tokens that a sequence of the model may have."""
        return int(self.lean.shape.max_context)

    def check_context(self, num_tokens: int) -> None:
        """Refuse a sequence of `num_tokens` tokens that the model cannot have."""
        most = self.max_context
        if num_tokens > most:
            raise ValueError(
                f"a context of {num_tokens} tokens exceeds the {most} tokens of this model "
                f"({self.lean.max_context_reason}); shorten the prompt or lower max_new_tokens"
            )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around what all ranks must do together (`TensorParallel.together`)."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together()

    @contextlib.contextmanager
    def generation(
        self, *, has_assistant: bool, on_tokens: OnTokens | None = None
    ) -> Iterator[None]:
        """Around one `generate()`: new statistics, and no cache left behind by an error. One within
        another (a model may be its own assistant) leaves the outer one's as they were.

        Between the forward passes torch runs on one thread. Choosing a token is little work, and
        a second thread would wait for a CPU on which one of our workers still spins (SmolLM2 on
        2 CPUs: 64 tokens/s instead of 82). An assistant computes in between and keeps its threads.
        """
        with shielded() as exposed:
            outer = self.current_generation
            threads = outer.prefill_threads or torch.get_num_threads()
            generation = Generation(threads, is_running=True, on_tokens=on_tokens)
            try:
                self.current_generation = generation
                with torch_threads(None if has_assistant else 1), exposed(), self.together():
                    if self.ranks is not None:
                        self.ranks.share_random_state(self.device)
                    self._watch.check()
                    yield
            except BaseException:
                # The traceback of the error would keep the cache, and so its pages, alive.
                if generation.cache is not None and generation.owns_cache:
                    generation.cache.reset()
                raise
            finally:
                if not outer.is_running:
                    try:
                        self.sequences.background.give_up()
                    finally:
                        self.decoder.end_generation()
                    outer = Generation(self.config.num_threads, stats=generation.stats)
                self.current_generation = outer
                outer.restart_watch()

    def begin_generation(
        self, request: GenerationRequest, cache: OffloadedCache | None, *, is_draft: bool
    ) -> OffloadedCache:
        """Check that a generation is possible to its end, and note where it goes and from where.

        Args:
            cache: to continue; None: a new one, which is reset if the generation fails.
            is_draft: what is new beside a filled `cache` was decoded already, by another model.

        Raises:
            ValueError, HostBudgetError: before anything is computed.
        """
        used = OffloadedCache(self.sequences) if cache is None else cache
        self.sequences.collect()
        builds = self.attention.builds_in_prefill(self.device)
        states, checks = self.attention.states, {"builds": builds, "is_draft": is_draft}
        request.check(used, states, self.check_context, **checks)
        most = request.max_tokens
        if used.bound is not None:
            most = min(most, used.bound.slots)
        self.decoder.begin_generation(len(request.prompt_lens), most)
        generation, past_columns = self.current_generation, used.get_seq_length()
        generation.cache, generation.owns_cache = used, cache is None
        generation.gives_all = request.gives_all
        generation.prompt_columns = request.prompt_columns
        if is_draft and past_columns:
            generation.prompt_columns = past_columns
        return used

    def _record(self, phase: str, num_tokens: int) -> None:
        self.current_generation.count_pass(phase, num_tokens)
        if phase != "prefill" and self._floor is not None:
            self._floor.look()
        stats = self.current_generation.stats
        stats.kv_host_bytes = max(stats.kv_host_bytes, self.store.host_bytes_used)
        stats.kv_device_bytes = max(stats.kv_device_bytes, self.decoder.device_bytes)
        stats.policy_host_bytes = max(stats.policy_host_bytes, self.attention.states.num_bytes)
