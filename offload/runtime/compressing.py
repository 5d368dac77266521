"""KV compression of a model with `host_bytes_per_sequence`, and what it chooses by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention, shares_positions
from offload.kv.store import KVStore
from offload.kv_compression.base import KVCompression
from offload.kv_compression.bound import CONDENSED_SHARE, SequenceBound
from offload.kv_compression.by_attention import CompressionByAttention
from offload.kv_compression.by_reconstruction import CompressionByReconstruction, OnAttended
from offload.kv_compression.window import QueryWindow
from offload.models import LeanModel, ModelShape
from offload.models.batch import pack
from offload.models.rope import follows_length
from offload.prefill.forward import prefill
from offload.runtime.config import RuntimeConfig
from offload.selection.sequence_state import capacity_for
from offload.selection.state_bytes import StateBytes
from offload.system.torch_threads import torch_threads

# Of one KV head: the heads share a bound page by page, and the tokens that are left over of a
# page, half of it on average, are not those that would have stayed.
_PAGE_TOKENS = 64


def reconstructs(config: RuntimeConfig, shape: ModelShape) -> bool:
    """Whether sequences are condensed by reconstruction; their heads then have different lengths.

    Raises:
        ValueError: it was asked for, and the device or the policy cannot.
    """
    if config.host_bytes_per_sequence is None or config.condense_by == "attention":
        return False
    reason, policy = "", config.policy
    if config.condensed_share != CONDENSED_SHARE:
        reason = f"condensed_share={config.condensed_share} is for slots that all heads have"
    elif config.device != "cpu" or config.backend is not None:
        reason = f"device={config.device!r} attends to windows that all heads have"
    elif policy.selects:
        num_units = shape.num_qo_heads if policy.per_query_head else shape.num_kv_heads
        if what := shares_positions(policy, shape.num_layers, num_units):
            reason = f"policy={policy.name!r} {what}"
    if reason and config.condense_by == "reconstruction":
        raise ValueError(
            f"condense_by='reconstruction' leaves each KV head tokens of its own, but {reason}; "
            "use condense_by='attention', or none of device, backend and condensed_share and "
            "policy='full' or 'exact_topk'"
        )
    return not reason


def page_tokens_of(config: RuntimeConfig, shape: ModelShape) -> int:
    """Tokens in a page of the KV store."""
    return min(
        config.page_tokens, _PAGE_TOKENS if reconstructs(config, shape) else config.page_tokens
    )


def check_bound(
    config: RuntimeConfig, shape: ModelShape, of_model: Mapping[str, Any], item_bytes: int
) -> None:
    """Refuse a bound that is too small, or not for this model, before weights are read.

    Args:
        of_model: its config.json.

    Raises:
        ValueError: `reconstructs`; `SequenceBound.of`, with the policy in layers but dense ones;
            or a rope type whose frequencies follow the longest position.
    """
    if config.host_bytes_per_sequence is None:
        return
    rope = of_model.get("rope_parameters") or of_model.get("rope_scaling") or {}
    _check_rope(rope.get("rope_type") or rope.get("type") or "default")
    by_reconstruction = reconstructs(config, shape)
    store = KVStore(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32 if item_bytes >= 4 else torch.bfloat16,
        kv_dtype=config.kv_dtype,
        host_budget_bytes=0,
        page_tokens=page_tokens_of(config, shape),
        per_head_pages=by_reconstruction,
    )
    if by_reconstruction:
        _bound_of_pages(config, store)
        return
    layers = range(config.policy.dense_layers, shape.num_layers) if config.policy.selects else ()
    heads = [(shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)] * shape.num_layers
    policy = config.policy
    state = StateBytes(policy, policy.state, store, layer_heads=heads, layers=layers)
    _bound_of_slots(config, store, state, shape.num_qo_heads)


def compression_for(
    config: RuntimeConfig, lean: LeanModel, attention: DecodeAttention, pool: WorkerPool
) -> KVCompression[Any] | None:
    """None without a bound.

    Raises:
        ValueError: as `check_bound`.
    """
    if config.host_bytes_per_sequence is None:
        return None
    _check_rope(getattr(lean.rotary_emb, "rope_type", "default"))
    store, states = attention.store, attention.states
    compression: KVCompression[Any]
    if store.per_head_pages:
        compression = CompressionByReconstruction(
            _bound_of_pages(config, store),
            store,
            sm_scale=lean.sm_scale,
            reconstruct=_Reconstruct(lean, store, pool, config.num_threads),
        )
    else:
        compression = CompressionByAttention(
            _bound_of_slots(config, store, states.bytes, attention.num_qo_heads),
            store,
            num_qo_heads=attention.num_qo_heads,
            rotary=lean.rotary_emb,
            sm_scale=lean.sm_scale,
            num_threads=config.num_threads,
            device=config.device,
        )
    store.ledger.add("kept to condense by", lambda: compression.held_bytes)
    store.fit_slabs(compression.bound.slots)
    return compression


class _Reconstruct:
    """`offload.kv_compression.by_reconstruction.Reconstruct` by a model."""

    def __init__(
        self, lean: LeanModel, store: KVStore, pool: WorkerPool, num_threads: int | None
    ) -> None:
        self._lean, self._store, self._pool = lean, store, pool
        self._num_threads = num_threads or torch.get_num_threads()

    def __call__(
        self, seq: int, tokens: torch.Tensor, position: int, on_attended: OnAttended
    ) -> None:
        positions = torch.arange(position, position + len(tokens))
        with torch_threads(self._num_threads):
            prefill(
                self._lean,
                self._lean.embed_tokens(tokens),
                pack((1, len(tokens)), None, positions[None]),
                store=self._store,
                seqs=[seq],
                slice_tokens=len(tokens),
                pool=self._pool,
                keeps=False,
                on_attended=on_attended,
            )


def _bound_of_slots(
    config: RuntimeConfig, store: KVStore, state: StateBytes, num_qo_heads: int
) -> SequenceBound:
    """The bound in slots that all heads have, beside a window of queries and the policy's state.

    `state` makes no more room than for these from now on.
    """
    assert config.host_bytes_per_sequence is not None
    policy = config.policy
    of_window = QueryWindow.bytes_for(
        num_layers=store.num_layers,
        num_qo_heads=num_qo_heads,
        head_dim=store.head_dim,
        dtype=store.dtype,
    )

    def other_bytes(slots: int) -> int:
        state.most_tokens = slots
        # While arrays grow, and after a draft, there are two of them; in a pass, of queries. Heads
        # that a GPU holds now may come back to the CPU.
        of_policy = 2 * (state.most_at(slots) + state.of_queries)
        return of_window + of_policy + capacity_for(slots) * policy.state.reads_text

    bound = SequenceBound.of(
        config.host_bytes_per_sequence,
        token_bytes=store.token_bytes,
        page_tokens=store.page_tokens,
        policy=policy,
        condensed_share=config.condensed_share,
        other_bytes=other_bytes,
    )
    state.most_tokens = bound.slots
    return bound


def _bound_of_pages(config: RuntimeConfig, store: KVStore) -> SequenceBound:
    """The bound in pages of single heads, beside the scores of their tokens."""
    assert config.host_bytes_per_sequence is not None
    num_units = store.num_layers * store.num_kv_heads
    return SequenceBound.of(
        config.host_bytes_per_sequence,
        token_bytes=store.token_bytes,
        page_tokens=store.page_tokens,
        policy=config.policy,
        condensed_share=0.0,
        by_page=True,
        other_bytes=lambda slots: CompressionByReconstruction.other_bytes(
            num_units, slots, store.page_tokens
        ),
    )


def _check_rope(rope_type: str) -> None:
    if follows_length(rope_type):
        raise ValueError(
            f"host_bytes_per_sequence is not for a model with rope_type={rope_type!r}, whose "
            "frequencies follow the longest position, but a long prompt is read in slices; leave "
            "host_bytes_per_sequence out"
        )
