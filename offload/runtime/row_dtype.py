"""What `--kv-dtype auto` comes to: int8 where the host's memory would refuse otherwise."""

from __future__ import annotations

from typing import Any

from offload.models.base import stock_context_limit
from offload.models.missing_features import has_alibi
from offload.runtime.generic_loading import GenericRuntime
from offload.runtime.placing import longest_context
from offload.system.memory import format_bytes


def takes_int8(loaded: Any, kv_dtype: str) -> bool:
    """Whether what a model has no room for in its dtype may be tried in int8."""
    runtime = loaded._offload
    has_kernels = not isinstance(runtime, GenericRuntime) or (
        runtime.device.type == "cpu" or runtime.steps is not None
    )
    alone = runtime.ranks is None  # ranks would have to agree
    may_round = not (runtime.store.format.is_int8 or has_alibi(loaded.config.to_dict()))
    return alone and kv_dtype == "auto" and may_round and has_kernels


def lack_of_room(loaded: Any, reading_bytes: int) -> str:
    """What part of a context the host has no room for, for messages; "": it has room for all, or
    the model has no number of positions.

    Args:
        reading_bytes: of the host's budget, that reading prompts takes.
    """
    runtime = loaded._offload
    store, (most, _) = runtime.store, stock_context_limit(loaded.config)
    left = max(0, store.host_budget_bytes - reading_bytes)
    fits = left // store.token_bytes
    if not isinstance(runtime, GenericRuntime):  # of layers with windows a long one takes less
        most = runtime.max_context
        sizes = runtime.lean.shape, store.dtype, left
        fits = longest_context(runtime.config, *sizes)
    if not runtime.has_positions or fits >= most:
        return ""
    budget = format_bytes(left)
    return f"{budget} of host KV cache have room for {fits:,} of the context's {most:,} tokens"
