"""The cascade of a model that is loaded with `host_bytes_per_sequence`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.cascade.bound import SequenceBound
from offload.cascade.cascade import Cascade
from offload.cascade.window import QueryWindow
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.models import LeanModel, ModelShape
from offload.policies.sequence_state import capacity_for
from offload.policies.state_bytes import StateBytes
from offload.runtime.config import RuntimeConfig


def check_bound(
    config: RuntimeConfig, shape: ModelShape, of_model: Mapping[str, Any], item_bytes: int
) -> None:
    """Refuse a bound that is too small, or not for this model, before weights are read.

    Args:
        of_model: its config.json.

    Raises:
        ValueError: `SequenceBound.of`, with the policy in all layers that are not dense; or a rope
            type whose frequencies follow the longest position.
    """
    if config.host_bytes_per_sequence is None:
        return
    rope = of_model.get("rope_parameters") or of_model.get("rope_scaling") or {}
    _check_rope(rope.get("rope_type") or rope.get("type") or "default")
    store = KVStore(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32 if item_bytes >= 4 else torch.bfloat16,
        host_budget_bytes=0,
        page_tokens=config.page_tokens,
    )
    layers = range(config.policy.dense_layers, shape.num_layers) if config.policy.selects else ()
    num_qo_heads = shape.num_qo_heads
    state = StateBytes(config.policy, store, num_qo_heads=num_qo_heads, layers=layers)
    _bound(config, store, state, num_qo_heads)


def cascade_for(
    config: RuntimeConfig, lean: LeanModel, attention: DecodeAttention
) -> Cascade | None:
    """None without a bound.

    Raises:
        ValueError: as `check_bound`.
    """
    if config.host_bytes_per_sequence is None:
        return None
    _check_rope(getattr(lean.rotary_emb, "rope_type", "default"))
    store, states = attention.store, attention.states
    cascade = Cascade(
        _bound(config, store, states.bytes, attention.num_qo_heads),
        store,
        num_qo_heads=attention.num_qo_heads,
        rotary=lean.rotary_emb,
        sm_scale=attention.sm_scale,
        num_threads=config.num_threads,
        device=config.device,
    )
    store.share_budget(lambda: states.held_bytes + cascade.held_bytes)
    store.fit_slabs(cascade.bound.slots)
    return cascade


def _bound(
    config: RuntimeConfig, store: KVStore, state: StateBytes, num_qo_heads: int
) -> SequenceBound:
    assert config.host_bytes_per_sequence is not None
    policy = config.policy
    of_window = QueryWindow.bytes_for(
        num_layers=store.num_layers,
        num_qo_heads=num_qo_heads,
        head_dim=store.head_dim,
        dtype=store.dtype,
    )

    def beside(slots: int) -> int:
        # While arrays grow, and after a draft, there are two of them; in a pass, of queries.
        of_policy = 2 * (state.at(slots) + state.of_queries)
        return of_window + of_policy + capacity_for(slots) * policy.reads_text

    return SequenceBound.of(
        config.host_bytes_per_sequence,
        token_bytes=store.token_bytes,
        page_tokens=store.page_tokens,
        policy=policy,
        condensed_share=config.condensed_share,
        beside=beside,
    )


def _check_rope(rope_type: str) -> None:
    if "dynamic" in rope_type or rope_type == "longrope":
        raise ValueError(
            f"host_bytes_per_sequence is not for a model with rope_type={rope_type!r}, whose "
            "frequencies follow the longest position, but a long prompt is read in slices; leave "
            "host_bytes_per_sequence out"
        )
