"""Decode: a few new tokens per sequence, on the native kernels.

`decode_layer` is the hot path; read it first. A step over more rows than the kernels take at once
runs block by block, each through all layers: rows of one sequence are in order, so a later row
finds the K/V of the earlier ones in the store whichever block they were in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpu_ops.native import Linear, WorkerPool, rope_append
from offload.attention import DecodeAttention, DecodeStep
from offload.batch import RaggedBatch
from offload.kv_store import KVStore
from offload.models import DecoderLayer, LeanModel
from offload.policies import Policy

Norm = tuple[torch.Tensor, float]  # RMSNorm weight and eps


@dataclass(frozen=True)
class NativeLayer:
    """A decoder layer's weights as the native operators take them; nothing is copied."""

    input_norm: Norm
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qk_norm_eps: float
    o_proj: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """Decode steps of one model over one store."""

    max_rows = Linear.max_rows

    def __init__(
        self, model: LeanModel, store: KVStore, policy: Policy, num_threads: int | None
    ) -> None:
        self.model = model
        self.store = store
        self.pool = WorkerPool(num_threads)
        self.attention = DecodeAttention(
            policy,
            store,
            num_qo_heads=model.attention.num_qo_heads,
            pool=self.pool,
            sm_scale=model.attention.sm_scale,
        )
        self.layers = [_native_layer(layer) for layer in model.layers]
        self.final_norm = _norm(model.final_norm)
        self.lm_head = _linear(model.lm_head)

    def decode(self, hidden: torch.Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> torch.Tensor:
        """Run all layers over the new tokens of `batch`, for which room is reserved in the store.

        Args:
            hidden: [num_tokens, hidden_size], the embeddings; overwritten.
            seqs: the store's sequence of each sequence of `batch`.

        Returns:
            [num_tokens, hidden_size], before the final norm.

        Raises:
            ValueError: for keys or values that are not finite.
        """
        cos, sin = (table[0] for table in self.model.rotary_emb(hidden, batch.position_ids[None]))
        rows = [
            (seq, position)
            for seq, num_new in zip(seqs, batch.num_new_tokens, strict=True)
            for position in range(self.store.kv_len(seq), self.store.kv_len(seq) + num_new)
        ]
        for start in range(0, batch.num_tokens, self.max_rows):
            block = slice(start, start + self.max_rows)
            step = self.attention.begin_step(
                [seq for seq, _ in rows[block]], [position + 1 for _, position in rows[block]]
            )
            rope = (cos[block], sin[block])
            for layer_idx, layer in enumerate(self.layers):
                self.decode_layer(layer_idx, layer, hidden[block], rope, step)
        return hidden

    def decode_layer(
        self,
        layer_idx: int,
        layer: NativeLayer,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        step: DecodeStep,
    ) -> None:
        """x [n, hidden_size] through one layer, in place; rope = cos, sin: [n, head_dim]."""
        shape, pool = self.model.attention, self.pool

        # The policy's `prepare` runs inside `attend`: on a CPU there is nothing to overlap it with.
        qkv = layer.qkv(pool, x, norm=layer.input_norm)
        rope_append(
            qkv,
            *rope,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_tokens=self.store.page_tokens,
            page_tables=step.page_tables,
            table_strides=step.table_strides,
            layer_idx=layer_idx,
            positions=step.positions,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=layer.qk_norm_eps,
        )
        o = x.new_empty(x.shape[0], shape.num_qo_heads * shape.head_dim)
        self.attention.attend(layer_idx, step, qkv, o)
        layer.o_proj(pool, o, out=x, residual=x)
        gate_up = layer.gate_up(pool, x, norm=layer.mlp_norm)
        layer.down(pool, gate_up, out=x, silu_mul=True, residual=x)

    def forget(self, seq: int) -> None:
        """`seq` was changed or freed: there is no copy of it here that could be out of date."""

    @property
    def device_bytes(self) -> int:
        """Of the KV cache that is on a device."""
        return 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] before the final norm -> [n, vocab_size]."""
        logits = hidden.new_empty(hidden.shape[0], self.lm_head.out_features)
        hidden = hidden.contiguous()
        for start in range(0, hidden.shape[0], self.max_rows):
            rows = slice(start, start + self.max_rows)
            self.lm_head(self.pool, hidden[rows], out=logits[rows], norm=self.final_norm)
        return logits


def _native_layer(layer: DecoderLayer) -> NativeLayer:
    has_qk_norm = layer.q_norm is not None and layer.k_norm is not None
    q_norm, eps = _norm(layer.q_norm) if has_qk_norm else (None, 0.0)
    return NativeLayer(
        input_norm=_norm(layer.input_norm),
        qkv=_linear(layer.q_proj, layer.k_proj, layer.v_proj),
        q_norm=q_norm,
        k_norm=_norm(layer.k_norm)[0] if has_qk_norm else None,
        qk_norm_eps=eps,
        o_proj=_linear(layer.o_proj),
        mlp_norm=_norm(layer.mlp_norm),
        gate_up=_linear(layer.gate_proj, layer.up_proj),
        down=_linear(layer.down_proj),
    )


def _linear(*modules: nn.Linear) -> Linear:
    weights = [module.weight.detach() for module in modules]
    biases = [None if module.bias is None else module.bias.detach() for module in modules]
    return Linear(weights, biases)


def _norm(module: Any) -> Norm:
    return module.weight.detach(), float(module.variance_epsilon)
