"""A prefill for the policies that will decode after it: one, or several that share a prompt."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor

from offload.decode.attention import DecodeAttention
from offload.models.batch import RaggedBatch
from offload.prefill.forward import OnQueries, prefill_by_layer
from offload.selection.prefill_build import PrefillBuild
from offload.system.memory import give_back_free_memory

_MANY_TOKENS = 2048  # reading them takes seconds, and leaves free memory that decoding never uses


def prefill_for(
    attentions: Sequence[DecodeAttention],
    hidden: Tensor,
    batch: RaggedBatch,
    seqs: Sequence[int],
    *,
    builds: bool,
    **options: Any,
) -> Generator[None, None, tuple[Tensor, float]]:
    """`prefill_by_layer`, whose queries the policies see, and during which they build on a GPU.

    Args:
        attentions: of the policies, all of one store.
        seqs: no policy hears of none.
        builds: False: policies build nothing, as more of the prompt comes.
        options: of `prefill_by_layer`.

    Returns:
        [num_tokens, hidden_size], and the seconds of the host that building took.
    """
    observers, running = list[OnQueries](), list[PrefillBuild]()
    if seqs and attentions:
        observers = [x for x in (a.on_prefill_queries for a in attentions) if x is not None]
        news = zip(seqs, batch.num_new_tokens, strict=True)
        kv_lens = [attentions[0].store.kv_len(seq) + num_new for seq, num_new in news]
        building = [a for a in attentions if builds and a.builds_in_prefill(hidden.device)]
        found = [attention.prefill_build(seqs, kv_lens) for attention in building]
        running = [build for build in found if build is not None]
    hidden = yield from prefill_by_layer(
        hidden=hidden,
        batch=batch,
        seqs=seqs,
        on_queries=_in_turn(observers),
        on_layer=_in_turn([build.on_layer for build in running]),
        copied_heads=max((build.copied_heads for build in running), default=0),
        **options,
    )
    if hidden.device.type == "cpu" and len(hidden) >= _MANY_TOKENS:
        give_back_free_memory()
    for build in running:
        build.finish()
    for attention in attentions:
        for seq in seqs:
            attention.states.end_prefill(seq)
    return hidden, sum(build.host_seconds for build in running)


def _in_turn(called: Sequence[Callable[..., None]]) -> Callable[..., None] | None:
    """None for none; one is called by itself."""

    def call(*arguments: Any) -> None:
        for function in called:
            function(*arguments)

    return call if len(called) > 1 else next(iter(called), None)
