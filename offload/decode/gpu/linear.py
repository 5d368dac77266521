"""The linear layers of a decode step on the device, and the norms and activations between them.

One row goes through `gemv` kernels that do the norm, SwiGLU and residual sum themselves; several
rows go through matrix products with kernels in between. Both work on static buffers, and round
where transformers rounds.

With ranks, attention's and the MLP's last projections are sums over them. One row is projected to
float32 and rounded once, when the sum is added to the residual stream: that takes one kernel more.
Several rows are summed in the model's dtype, and added by the norm that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cpu_ops.decoder_layers import FusedLayer, Norm
from gpu_ops.gemv import gemv
from gpu_ops.layout import Layout, allocate
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.silu_mul import silu_mul
from offload.models import LeanModel, ModelShape
from offload.models.weights import fuse_layer, fuse_rows, norm_of
from offload.ranks.group import TensorParallel

Weights = tuple[Tensor, Tensor | None]  # [out_features, in_features], bias
DeviceLayer = FusedLayer[Weights]


@dataclass(frozen=True)
class DeviceWeights:
    """A model's weights."""

    shape: ModelShape
    layers: tuple[DeviceLayer, ...]
    final_norm: Norm
    lm_head: Weights
    ranks: TensorParallel | None = None

    @classmethod
    def of(cls, model: LeanModel) -> DeviceWeights:
        return cls(
            shape=model.shape,
            layers=tuple(fuse_layer(layer, fuse_rows) for layer in model.layers),
            final_norm=norm_of(model.final_norm),
            lm_head=fuse_rows([model.lm_head]),
            ranks=model.ranks,
        )


class LinearPath(Protocol):
    """The residual stream x [n, hidden_size] of one step, from projection to projection.

    x is whole only after `finish`; in between a part of it may wait to be added.
    """

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        """Queries, keys and values of x: [n, (num_qo_heads + 2 num_kv_heads) * head_dim]."""

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        """Queries of x alone, [n, num_qo_heads * head_dim]; after `qkv` of the same x."""

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        """x += o_proj(attended)."""

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        """x += down(silu(gate) * up)."""

    def finish(self, x: Tensor) -> None:
        """After the last layer."""

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        """[n, vocab_size], after `finish`."""


class OneRow:
    """A `LinearPath` for n = 1."""

    def __init__(self, weights: DeviceWeights) -> None:
        self._qkv, self._query, self._gated, self._logits, self._summand = _allocate(weights, 1)
        self._ranks = weights.ranks

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        weight, bias = layer.qkv
        gemv(x, weight, self._qkv, bias=bias, norm=layer.input_norm)
        return self._qkv

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        weight, bias = rows_of_query(layer, self._query.shape[1])
        gemv(x, weight, self._query, bias=bias, norm=layer.input_norm)
        return self._query

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        self._project_and_add(attended, layer.o_proj, x)

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        weight, bias = layer.gate_up
        gemv(x, weight, self._gated, bias=bias, norm=layer.mlp_norm, glu=True)
        self._project_and_add(self._gated, layer.down, x)

    def finish(self, x: Tensor) -> None:
        """Nothing waits."""

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        weight, bias = weights.lm_head
        gemv(x, weight, self._logits, bias=bias, norm=weights.final_norm)
        return self._logits

    def _project_and_add(self, row: Tensor, weights: Weights, x: Tensor) -> None:
        weight, bias = weights
        if self._ranks is None:
            gemv(row, weight, x, bias=bias, residual=x)
            return
        gemv(row, weight, self._summand, bias=bias)
        x += self._ranks.all_reduce(self._summand)


class ManyRows:
    """A `LinearPath` for any n up to `max_rows`."""

    def __init__(self, weights: DeviceWeights, max_rows: int) -> None:
        self._normed, self._gated = _allocate(weights, max_rows)
        self._query_width = weights.shape.query_width
        self._waiting: Tensor | None = None  # what the next norm adds to x
        self._ranks = weights.ranks

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        return functional.linear(self._add_and_norm(x, layer.input_norm), *layer.qkv)

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        normed = self._add_and_norm(x, layer.input_norm)
        return functional.linear(normed, *rows_of_query(layer, self._query_width))

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        self._waiting = self._sum(functional.linear(attended, *layer.o_proj))

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        gate_up = functional.linear(self._add_and_norm(x, layer.mlp_norm), *layer.gate_up)
        gated = self._gated[: len(x)]
        silu_mul(gate_up, gated)
        self._waiting = self._sum(functional.linear(gated, *layer.down))

    def finish(self, x: Tensor) -> None:
        if self._waiting is not None:
            x += self._waiting
            self._waiting = None

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        return functional.linear(self._add_and_norm(x, weights.final_norm), *weights.lm_head)

    def _sum(self, x: Tensor) -> Tensor:
        return x if self._ranks is None else self._ranks.all_reduce(x)

    def _add_and_norm(self, x: Tensor, norm: Norm) -> Tensor:
        normed = self._normed[: len(x)]
        add_rms_norm(x, self._waiting, *norm, normed)
        self._waiting = None
        return normed


def rows_of_query(layer: DeviceLayer, width: int) -> Weights:
    """The rows of the fused projection that make queries: the first `width`."""
    weight, bias = layer.qkv
    return weight[:width], None if bias is None else bias[:width]


def linear_path(weights: DeviceWeights, num_rows: int) -> LinearPath:
    """The fastest for steps of `num_rows` rows."""
    return OneRow(weights) if num_rows == 1 else ManyRows(weights, num_rows)


def linear_layout(shape: ModelShape, num_rows: int, dtype: torch.dtype) -> Layout:
    """Buffers of `linear_path`."""
    if num_rows == 1:
        return {
            "qkv": ((1, shape.qkv_width), dtype),
            "query": ((1, shape.query_width), dtype),
            "gated": ((1, shape.intermediate_size), dtype),
            "logits": ((1, shape.vocab_size), dtype),
            "summand": ((1, shape.hidden_size), torch.float32),
        }
    return {
        "normed": ((num_rows, shape.hidden_size), dtype),
        "gated": ((num_rows, shape.intermediate_size), dtype),
    }


def _allocate(weights: DeviceWeights, num_rows: int) -> Iterable[Tensor]:
    like = weights.lm_head[0]
    layout = linear_layout(weights.shape, num_rows, like.dtype)
    return allocate(layout, like.device, torch.empty).values()
