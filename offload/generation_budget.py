"""Whether all that a generation will need fits, before any of it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from offload.kv_store import HostBudgetError, KVStore
from offload.memory import format_bytes
from offload.policy_state import PolicyStates, capacity_for


def check_generation_budget(
    store: KVStore,
    states: PolicyStates,
    *,
    num_prompts: int,
    copies: int,
    prompt_tokens: int,
    max_tokens: int,
    cached_seqs: Sequence[int] = (),
    drafts: bool = False,
) -> None:
    """Refuse a generation that could outgrow the host budget on its way.

    Args:
        num_prompts: different prompts of `prompt_tokens` tokens, whose whole pages the `copies`
            sequences that continue each of them share.
        max_tokens: of a sequence at its end.
        cached_seqs: that it continues.
        drafts: tokens are proposed, and verified several at a time.

    Raises:
        HostBudgetError: names what it needs, what is free and the options.
    """
    page_tokens = store.page_tokens
    shared = prompt_tokens // page_tokens if copies > 1 else 0
    own = -(-max_tokens // page_tokens) - shared
    cached_pages = sum(-(-store.kv_len(seq) // page_tokens) for seq in cached_seqs)
    pages = (num_prompts * (shared + copies * own) - cached_pages) * store.num_layers
    # A second copy is needed while the state grows, is forked, or a draft is being verified.
    twice = drafts or copies > 1 or capacity_for(prompt_tokens) < max_tokens
    state = num_prompts * copies * states.bytes_at(max_tokens) * (2 if twice else 1)
    state = max(0, state - states.bytes_of(cached_seqs))
    need, free = pages * store.page_bytes + state, store.left_bytes(pages)
    if need > free:
        kept = f" ({format_bytes(state)} of it for what the policy keeps)" if state else ""
        raise HostBudgetError(
            f"{num_prompts * copies} sequences of up to {max_tokens} tokens need "
            f"{format_bytes(need)} more of host KV cache{kept}, but {format_bytes(max(0, free))} "
            f"of its budget of {format_bytes(store.host_budget_bytes)} are free; raise "
            "max_memory={'cpu': ...} or lower max_new_tokens"
        )
