"""One `generate()`: what it asks for, known before anything is computed, and how far it has come.

transformers counts in columns of the rectangle [batch_size, seq_len], cached ones included, and
takes a prompt in several forms: the ids of everything with or without a cache of their beginning,
new ids with a cache and the mask of everything, or embeddings of everything. All come to a number
of columns at which the prompt ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from offload.kv.page_pool import WINDOW_SLACK
from offload.kv.store import HostBudgetError
from offload.prefill.forward import OnTokens
from offload.runtime.cache import OffloadedCache
from offload.runtime.runner import PassCounter
from offload.selection.state import PolicyStates
from offload.system.memory import format_bytes


@dataclass
class Generation(PassCounter):
    """A `generate()` that runs, or forward passes outside of any.

    Attributes:
        cache: what it continues; None until it is known, and with use_cache=False.
        owns_cache: no other code has `cache`.
        prompt_columns: where the prompt ends in `cache`; what comes later is decoded.
        gives_all: the columns that are given begin with those that are cached.
        on_tokens: of its prefills, as of `prefill_by_layer`.
        draft_tokens: that a head of the model proposes at most, of a generic one.
        at_end: of these drafts.
    """

    cache: Any = None  # OffloadedCache, or GenericCache
    owns_cache: bool = False
    prompt_columns: int = 0
    gives_all: bool = False
    on_tokens: OnTokens | None = None
    draft_tokens: int = 1
    at_end: ExitStack = field(default_factory=ExitStack)

    def num_new_columns(self, given_columns: int) -> int | None:
        """How many of the first columns given are new, from the last; None: all are, or the caller
        has seen to it. Assisted generation does not: stock caches would have the prompt twice.
        """
        past_columns = 0 if self.cache is None else self.cache.get_seq_length()
        if self.gives_all and past_columns and given_columns >= self.prompt_columns:
            return given_columns - past_columns
        return None


@dataclass(frozen=True)
class GenerationRequest:
    """The lengths of a generation.

    Attributes:
        prompt_columns: of the prompt, cached ones included.
        gives_all: the cached ones are given again, as ids or embeddings.
        prompt_lens: tokens of each row then, without padding; rows of one prompt are neighbours.
        shared_lens: of these, what the rows of one prompt compute and store only once.
        max_new_tokens: that each row may have in the cache beyond its prompt.
        copies: rows of one prompt.
        drafts: tokens are proposed, and verified several at a time.
        chunked: the prompt comes in several prefills.
        draft_tokens: that are proposed at most; None: the model that drafts chooses how many.
        has_beams: rows are chosen anew at each step.
    """

    prompt_columns: int
    gives_all: bool
    prompt_lens: list[int]
    shared_lens: list[int]
    max_new_tokens: int
    copies: int
    drafts: bool
    chunked: bool = False
    draft_tokens: int | None = None
    has_beams: bool = False

    @property
    def times_states(self) -> int:
        """How often there are states of a row at a time: copies of drafts, or of chosen rows."""
        return 2 if self.drafts or self.has_beams else 1

    @classmethod
    def of(
        cls,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        batch_size: int,
        *,
        drafts: bool,
    ) -> GenerationRequest:
        """What `_prepare_cache_for_generation` gets, of `batch_size` prompts.

        `generation_config._given_ids` are the columns of ids that its max_length counts.
        """
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        mask = model_kwargs.get("attention_mask")
        cache, embeds = model_kwargs.get("past_key_values"), model_kwargs.get("inputs_embeds")
        # transformers drops a mask of ones, and keeps its length.
        columns = int(generation_config._mask_length if mask is None else mask.shape[1])
        # Only rows that start with equal ids are packed once (`pack_rows`).
        shared = generation_config.prefill_chunk_size or columns
        if copies == 1 or embeds is not None or (cache is not None and cache.get_seq_length()):
            shared = 0
        if mask is None:
            prompt_lens = [columns] * batch_size * copies
            shared_lens = [min(shared, columns)] * batch_size * copies
        else:
            attended = mask != 0
            prompt_lens = attended.sum(dim=1).tolist()
            shared_lens = attended[:, :shared].sum(dim=1).tolist()
        # The last token is chosen and not cached. A draft may go beyond the last one.
        draft = generation_config.prompt_lookup_num_tokens or 1
        chosen = max(1, generation_config.max_length - generation_config._given_ids)
        max_new_tokens = chosen - 1 + draft - 1
        gives_all = embeds is not None or generation_config._given_ids == columns
        chunked = 0 < (generation_config.prefill_chunk_size or 0) < columns
        sizes = (columns, gives_all, prompt_lens, shared_lens, max_new_tokens, copies)
        has_beams = (generation_config.num_beams or 1) > 1
        return cls(*sizes, drafts, chunked, generation_config.prompt_lookup_num_tokens, has_beams)

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence at its end."""
        return max(self.prompt_lens) + self.max_new_tokens

    def check(
        self,
        cache: OffloadedCache,
        states: PolicyStates,
        check_context: Callable[[int], None],
        *,
        builds: bool,
        is_draft: bool,
    ) -> None:
        """Refuse what could not be generated to its end.

        Args:
            builds: as of `PolicyStates.begin`.
            is_draft: another model will verify it.

        Raises:
            ValueError: a context that is too long, or a prompt without a token that is not cached.
            HostBudgetError: the host budget does not suffice for KV cache and policy state.
            DeviceMemoryError: the GPU's memory does not suffice for corrections.
        """
        check_context(self.max_tokens)
        of_draft = {
            "host_bytes_per_sequence": cache.bound,
            "cache_correction_every": cache.corrections,
        }
        for name, option in of_draft.items():
            if is_draft and option is not None:
                raise ValueError(f"an assistant_model cannot have {name}; leave it out")
        if cache.bound is not None and self.drafts:
            self._check_draft(cache.bound.most_cropped)
        if self.prompt_columns == 0:
            raise ValueError("the prompt is empty")
        has_windows = cache.store.num_full_rows < cache.store.num_page_rows
        if has_windows and (self.draft_tokens or 0) > WINDOW_SLACK:
            raise ValueError(
                f"prompt_lookup_num_tokens={self.draft_tokens} with layers that see a window: they "
                f"take back up to {WINDOW_SLACK} tokens; lower prompt_lookup_num_tokens"
            )
        if cache.corrections is not None and self.drafts:
            raise ValueError(
                "assistant_model or prompt_lookup_num_tokens with cache_correction_every: tokens "
                "that a draft may take back are not read again; leave one of the two out"
            )
        past_columns = cache.get_seq_length()
        if past_columns >= self.prompt_columns:
            raise ValueError(
                f"the prompt has {self.prompt_columns} columns, but past_key_values holds "
                f"{past_columns} already; give the ids of the whole text, or the new ids with the "
                "attention_mask of the whole text; to go on from the last token, crop(-1) first"
            )
        store = cache.store
        pages = self._pages_needed(cache)
        if cache.corrections is not None:
            pages += cache.corrections.pages(len(self.prompt_lens), self.max_tokens)
            cache.corrections.check_device(len(self.prompt_lens), self.max_tokens)
        state = self._state_bytes_needed(cache, states, builds=builds)
        need = (
            pages * store.page_bytes
            + state
            + cache.condensing_bytes(len(self.prompt_lens), self.max_tokens)
        )
        if need > store.left_bytes(pages):
            store.trim()
        free = store.left_bytes(pages)
        if need > free:
            kept = f" ({format_bytes(state)} of it for what the policy keeps)" if state else ""
            fewer = "lower the batch size, " if len(self.prompt_lens) > 1 else ""
            half = "" if store.format.is_int8 else "load the model with kv_dtype='int8', "
            raise HostBudgetError(
                f"{len(self.prompt_lens)} sequences of up to {self.max_tokens} tokens need "
                f"{format_bytes(need)} more of host KV cache{kept}, but "
                f"{format_bytes(max(0, free))} of its budget of "
                f"{format_bytes(store.host_budget_bytes)} are free; raise "
                f"max_memory={{'cpu': ...}}, {half}{fewer}lower max_new_tokens"
            )

    def _check_draft(self, most: int) -> None:
        """A draft may be taken back whole: its tokens must not have been condensed meanwhile."""
        if self.draft_tokens is None:
            raise ValueError(
                "assistant_model with host_bytes_per_sequence: how many tokens it proposes is not "
                "known before; use prompt_lookup_num_tokens, or leave host_bytes_per_sequence out"
            )
        if self.draft_tokens + 1 > most:
            raise ValueError(
                f"prompt_lookup_num_tokens={self.draft_tokens} with host_bytes_per_sequence: of a "
                f"full sequence {most} tokens can be taken back, fewer than a draft and the token "
                "before it have; lower prompt_lookup_num_tokens or raise "
                "host_bytes_per_sequence"
            )

    def _pages_needed(self, cache: OffloadedCache) -> int:
        """Pages that are added to what is cached."""
        store, bound = cache.store, cache.bound
        page_tokens, num_rows = store.page_tokens, store.num_page_rows
        ends = [-(-(kv_len + self.max_new_tokens) // page_tokens) for kv_len in self.prompt_lens]
        if bound is not None and max(ends) * page_tokens > bound.slots:
            # What is condensed, and stays, is shared no more.
            most = bound.slots // page_tokens
            ends = [min(end, most) for end in ends]
            return num_rows * sum(ends) - sum(map(store.num_unshared_pages, cache.seqs))
        of_ends = sum(store.pages_at(end * page_tokens) for end in ends)
        if cache.seqs:
            return of_ends - sum(map(store.num_own_pages, cache.seqs))
        # Full layers share what the rows of one prompt read once.
        shared = [kv_len // page_tokens for kv_len in self.shared_lens]
        return of_ends - store.num_full_rows * (sum(shared) - sum(shared[:: self.copies]))

    def _state_bytes_needed(
        self, cache: OffloadedCache, states: PolicyStates, *, builds: bool
    ) -> int:
        """What the policy keeps at the end beyond what it keeps of `cache`."""
        # A second copy is needed while the state grows, is forked, or a draft is being
        # verified.
        most = self.max_tokens if cache.bound is None else cache.bound.slots
        grows = states.bytes.capacity(max(self.prompt_lens)) < most
        # Or while a prefill on a GPU builds it anew beside what is there (`PolicyStates.begin`).
        anew = builds and (self.chunked or states.bytes_of(cache.seqs) > 0)
        times = 2 if self.drafts or self.copies > 1 or grows or anew else 1
        ends = [min(kv_len + self.max_new_tokens, most) for kv_len in self.prompt_lens]
        state = sum(map(states.bytes.at, ends))
        state = times * state + len(self.prompt_lens) * states.bytes.of_queries
        return max(0, state - states.bytes_of(cache.seqs))
