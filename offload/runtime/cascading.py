"""The cascade of a model that is loaded with `host_bytes_per_sequence`."""

from __future__ import annotations

from offload.cascade.bound import SequenceBound
from offload.cascade.cascade import Cascade
from offload.cascade.window import QueryWindow
from offload.decode.attention import DecodeAttention
from offload.models import LeanModel, ModelShape
from offload.runtime.config import RuntimeConfig


def check_bound(config: RuntimeConfig, shape: ModelShape, item_bytes: int) -> None:
    """Refuse a bound that is too small, from what is known before weights are read.

    Raises:
        ValueError: `SequenceBound.of`.
    """
    if config.host_bytes_per_sequence is not None:
        row_bytes = shape.head_dim * item_bytes
        SequenceBound.of(
            config.host_bytes_per_sequence,
            token_bytes=2 * shape.num_layers * shape.num_kv_heads * row_bytes,
            page_tokens=config.page_tokens,
            policy=config.policy,
            condensed_share=config.condensed_share,
        )


def cascade_for(
    config: RuntimeConfig, lean: LeanModel, attention: DecodeAttention
) -> Cascade | None:
    """None without a bound.

    Raises:
        ValueError: as `check_bound`, what the policy keeps of a sequence counted.
    """
    if config.host_bytes_per_sequence is None:
        return None
    store, state = attention.store, attention.states.bytes
    of_window = QueryWindow.bytes_for(
        num_layers=store.num_layers,
        num_qo_heads=attention.num_qo_heads,
        head_dim=store.head_dim,
        dtype=store.dtype,
    )
    bound = SequenceBound.of(
        config.host_bytes_per_sequence,
        token_bytes=store.num_layers * store.page_bytes // store.page_tokens,
        page_tokens=store.page_tokens,
        policy=config.policy,
        condensed_share=config.condensed_share,
        beside=lambda slots: state.at(slots) + state.of_queries + of_window,
    )
    return Cascade(
        bound,
        store,
        num_qo_heads=attention.num_qo_heads,
        rotary=lean.rotary_emb,
        sm_scale=attention.sm_scale,
    )
