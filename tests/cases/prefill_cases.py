"""A tiny model with its store, and streams that do everything at once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases.tiny_models import make_tiny_model, random_tokens

from offload.kv.store import KVStore
from offload.models import LeanModel, lean_model_maker
from offload.models.batch import pack
from offload.prefill import kv_stream as layer_stream
from offload.prefill.forward import prefill


class ImmediateStream:
    """Stands in for a CUDA stream, its events and its context."""

    def __init__(self, *_: Any, priority: int = 0) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def wait_stream(self, other: Any) -> None:
        assert isinstance(other, ImmediateStream)

    def wait_event(self, event: Any) -> None:
        assert event.recorded

    recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True


def copy_alongside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for CUDA, on CPU tensors."""

    @contextlib.contextmanager
    def as_current(stream: ImmediateStream) -> Iterator[None]:
        yield

    monkeypatch.setattr(layer_stream, "copies_alongside", lambda like: True)
    monkeypatch.setattr(torch.cuda, "Stream", ImmediateStream)
    monkeypatch.setattr(torch.cuda, "Event", ImmediateStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ImmediateStream())
    monkeypatch.setattr(torch.cuda, "stream", as_current)


def tiny_lean_model(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """(stock, lean) of a tiny model."""
    stock = make_tiny_model(name, **changes).to(dtype)
    return stock, lean_model_maker(stock.config.model_type)(stock)


def store_for(lean: LeanModel, dtype: torch.dtype = torch.float32, **options: Any) -> KVStore:
    return KVStore(
        num_layers=len(lean.layers),
        num_kv_heads=lean.shape.num_kv_heads,
        head_dim=lean.shape.head_dim,
        dtype=dtype,
        **{"page_tokens": 16, "host_budget_bytes": 32 << 20, **options},
    )


def run_prefill(
    lean: LeanModel,
    store: KVStore,
    seqs: list[int],
    lengths: list[int],
    *,
    seed: int = 0,
    device: str = "cpu",
    slice_tokens: int = 24,
    **options: Any,
) -> torch.Tensor:
    """Reserve, prefill sequences of random tokens of these lengths, commit."""
    longest = max(lengths)
    columns = torch.arange(longest)
    attended = torch.stack([columns < n for n in lengths])
    past = torch.tensor([[store.kv_len(seq)] for seq in seqs])
    batch = pack((len(lengths), longest), attended, columns + past)
    tokens = random_tokens(len(lengths), longest, seed=seed).flatten()[batch.columns]
    batch = dataclasses.replace(batch, position_ids=batch.position_ids.to(device))
    hidden = lean.embed_tokens(tokens.to(device))
    store.reserve(seqs, lengths)
    with torch.no_grad():
        hidden = prefill(
            lean,
            hidden.detach(),
            batch,
            store=store,
            seqs=seqs,
            slice_tokens=slice_tokens,
            **options,
        )
    store.commit(seqs, lengths)
    return hidden


def reference_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 o [n, num_qo_heads, head_dim] and lse [num_qo_heads, n] of the last n tokens."""
    group_size, (n, kv_len) = len(q) // len(keys), (q.shape[1], keys.shape[1])
    keys, values = (x.double().repeat_interleave(group_size, 0) for x in (keys, values))
    seen = torch.arange(kv_len) <= torch.arange(kv_len - n, kv_len)[:, None]
    scores = (q.double() @ keys.mT * sm_scale).masked_fill(~seen.to(q.device), -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1)


def cached(store: KVStore, seq: int) -> list[torch.Tensor]:
    """[2, num_kv_heads, kv_len, head_dim] of every layer."""
    return [torch.stack(store.gather(seq, layer_idx)) for layer_idx in range(store.num_layers)]
