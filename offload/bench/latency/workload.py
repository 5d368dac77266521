"""What `offload bench latency` runs on: sequences in a host KV store, and steps after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kv.store import HostBudgetError, KVStore
from offload.measuring.synthetic.one_slab import num_pages, one_slab_store, page_bytes
from offload.measuring.synthetic.structured_cache import (
    PROMPT_QUERIES,
    StructuredLayer,
    structured_layer,
)
from offload.models import ModelShape
from offload.system.memory import format_bytes, host_memory_limit_bytes


@dataclass
class LatencyWorkload:
    """Sequences of `kv_len` tokens in `store`, and what `num_steps` decode steps add and ask.

    The store's handles are `seqs`. A step is: `advance`, whatever reads it, `commit`.

    Attributes:
        steps: of each sequence and layer; their keys and values are of the tokens after the prompt.
        shape: of the model whose `num_layers` layers stand for all.
    """

    store: KVStore
    seqs: list[int]
    steps: list[list[StructuredLayer]]
    shape: ModelShape

    def __post_init__(self) -> None:
        self.num_layers, self.batch_size = self.store.num_layers, len(self.seqs)
        self.sm_scale = self.shape.head_dim**-0.5
        self.kv_len = self.store.kv_len(self.seqs[0])
        first = self.steps[0][0]
        self.num_qo_heads, self.num_steps = len(first.queries), first.keys.shape[1]
        # [num_qo_heads, batch_size, queries, head_dim] of each layer
        self._rows = [
            torch.stack([layer.queries for layer in layers], 1)
            for layers in zip(*self.steps, strict=True)
        ]

    def prompt_queries(self, row: int, layer_idx: int) -> Tensor:
        """[num_qo_heads, PROMPT_QUERIES, head_dim]: those of the prompt's last tokens."""
        return self._rows[layer_idx][:, row, :PROMPT_QUERIES]

    def queries(self, layer_idx: int, step: int) -> Tensor:
        """[batch_size, num_qo_heads * head_dim] of a step, contiguous."""
        rows = self._rows[layer_idx][:, :, PROMPT_QUERIES + step]
        return rows.transpose(0, 1).flatten(1).contiguous()

    def advance(self, step: int) -> list[int]:
        """Write the step's keys and values; returns each sequence's length with them."""
        self.store.reserve(self.seqs, [1] * self.batch_size)
        for row, seq in enumerate(self.seqs):
            for layer_idx, layer in enumerate(self.steps[row]):
                new = layer.keys.transpose(0, 1)[step], layer.values.transpose(0, 1)[step]
                self.store.append(seq, layer_idx, new[0][None], new[1][None])
        return [self.store.kv_len(seq) + 1 for seq in self.seqs]

    def commit(self) -> None:
        """The step's tokens belong to the sequences from now on."""
        self.store.commit(self.seqs, [1] * self.batch_size)

    def rewind(self) -> None:
        """Back to the prompts."""
        for seq in self.seqs:
            self.store.truncate(seq, self.kv_len)


def structured_workload(
    shape: ModelShape,
    *,
    kv_len: int,
    num_steps: int,
    num_layers: int,
    batch_size: int,
    dtype: torch.dtype,
    seed: int,
    on_layer: Callable[[], None] = lambda: None,
) -> LatencyWorkload:
    """Sequences of `structured_layer`s, each with its own seed; `num_layers` of the shape's.

    Raises:
        HostBudgetError: before anything is made, if it does not fit.
    """
    pages = batch_size * num_layers * num_pages(kv_len + num_steps)
    # Beside the store: one layer as it is made, and the policies' own arrays.
    need = (pages + 3 * num_pages(kv_len)) * page_bytes(shape, dtype)
    if need > host_memory_limit_bytes():
        raise HostBudgetError(
            f"{batch_size} sequences of {kv_len} tokens in {num_layers} layers need "
            f"{format_bytes(need)}, but this process may use only "
            f"{format_bytes(host_memory_limit_bytes())}; lower the batch size or the depth"
        )
    store = one_slab_store(shape, dtype, num_layers=num_layers, pages=pages)
    steps, seqs = [], []
    for row in range(batch_size):
        seq = store.new_sequence()
        store.reserve([seq], [kv_len])
        of_sequence = []
        for layer_idx in range(num_layers):
            layer = structured_layer(
                shape,
                kv_len=kv_len,
                num_steps=num_steps,
                dtype=dtype,
                seed=seed + row,
                layer_idx=layer_idx,
            )
            keys, values = (x.transpose(0, 1)[:kv_len] for x in (layer.keys, layer.values))
            store.append(seq, layer_idx, keys, values)
            keys, values = (x[:, kv_len:].clone() for x in (layer.keys, layer.values))
            of_sequence.append(StructuredLayer(keys, values, layer.queries))
            on_layer()
        store.commit([seq], [kv_len])
        seqs.append(seq)
        steps.append(of_sequence)
    return LatencyWorkload(store, seqs, steps, shape)
