"""The linear layers of a decode step on the device, and the norms and activations between them.

One row goes through `gemv` kernels that do the norm, SwiGLU and residual sum themselves; several
rows go through matrix products with kernels in between. Both work on static buffers, and round
where transformers rounds.

With ranks, attention's and the MLP's last projections are sums over them. One row is projected to
float32 and rounded once, when the sum is added to the residual stream: that takes one kernel more.
Several rows are summed in the model's dtype, and added by the norm that follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cpu_ops.decoder_layers import FusedLayer, Norm
from cpu_ops.routed_linear import RoutedMlp as CpuRoutedMlp
from gpu_ops.delta_rule import GpuDeltaRule
from gpu_ops.layout import Layout, allocate
from gpu_ops.linear import GpuLinear
from gpu_ops.rms_norm import add_normed, add_rms_norm
from gpu_ops.routed_linear import GpuRoutedMlp
from offload.decode.gpu.hot_experts import HotExperts
from offload.models import LeanModel, ModelShape
from offload.models.base import norm_of
from offload.models.hybrid import HybridModel
from offload.models.stock_view import StockView
from offload.ranks.group import TensorParallel

DeviceLayer = FusedLayer[GpuLinear, GpuRoutedMlp]


class Recurrent(NamedTuple):
    """A layer of a hybrid model whose `qkv` and `o_proj` are before and behind a rule.

    Attributes:
        number: among layers of this kind.
        stock_number: among all layers of the stock model.
    """

    number: int
    stock_number: int
    layer: DeviceLayer
    rule: GpuDeltaRule


@dataclass(frozen=True)
class DeviceWeights:
    """A model's weights.

    Attributes:
        numbers: of `layers` among all layers of the stock model.
        recurrent: of a hybrid model, before each of `layers`, and behind the last.
        host_experts: of layers that have them on the host, at their number in the stock model;
            None: of others.
        hot_experts: what is on the GPU of these; None: there are none.
    """

    shape: ModelShape
    layers: tuple[DeviceLayer, ...]
    final_norm: Norm
    lm_head: GpuLinear
    ranks: TensorParallel | None = None
    numbers: Sequence[int] = ()
    recurrent: tuple[tuple[Recurrent, ...], ...] = ()
    host_experts: tuple[CpuRoutedMlp | None, ...] = ()
    hot_experts: HotExperts | None = None

    @classmethod
    def of(cls, model: LeanModel) -> DeviceWeights:
        if isinstance(model, StockView):  # its modules have them
            nothing: Any = None
            return cls(model.shape, (), nothing, nothing)
        on_host = {number: model.routed[number] for number in sorted(model.host_experts)}
        return cls(
            shape=model.shape,
            layers=tuple(
                layer.on_gpu(has_experts=layer.routed not in on_host.values())
                for layer in model.layers
            ),
            numbers=model.numbers,
            final_norm=norm_of(model.final_norm),
            lm_head=model.lm_head.on_gpu(),
            ranks=model.ranks,
            recurrent=_recurrent(model) if isinstance(model, HybridModel) else (),
            host_experts=tuple(
                on_host[i].on_cpu() if i in on_host else None
                for i in range(max(on_host, default=-1) + 1)
            ),
            hot_experts=HotExperts(on_host, model.hot_experts) if on_host else None,
        )

    @property
    def num_recurrent(self) -> int:
        """Layers that keep a state of each sequence."""
        return sum(map(len, self.recurrent))


class LinearPath(Protocol):
    """The residual stream x [n, hidden_size] of one step, from projection to projection.

    x is whole only after `finish`; in between a part of it may wait to be added.
    """

    def begin(self) -> None:
        """Before the first layer: what waits is of a step that failed in its middle."""

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        """Queries, keys and values of x: [n, (num_qo_heads + 2 num_kv_heads) * head_dim]."""

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        """Queries of x alone, [n, num_qo_heads * head_dim], of a hybrid model each with its gate
        behind it; after `qkv` of the same x."""

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        """x += o_proj(attended), or its norm."""

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        """x += down(f(gate) * up), or the experts' sum of that, or its norm."""

    def mlp_input(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        """What the MLP reads, [n, hidden_size], for one that is computed elsewhere."""

    def add_summed(self, x: Tensor, summed: Tensor) -> None:
        """x += what that gave, which is kept until the next of these calls."""

    def finish(self, x: Tensor) -> None:
        """After the last layer."""

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        """[n, vocab_size], after `finish`."""


class OneRow:
    """A `LinearPath` for n = 1."""

    def __init__(self, weights: DeviceWeights) -> None:
        self._qkv, self._query, self._gated, self._logits, self._summand = _allocate(weights, 1)
        self._ranks = weights.ranks

    def begin(self) -> None:
        """Nothing waits."""

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        out = self._qkv[:, : layer.qkv.out_features]
        return _norm_all_heads(layer, layer.qkv(x, out, norm=layer.input_norm))

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        queries = layer.qkv.first(self._query.shape[1])
        return _norm_all_heads(layer, queries(x, self._query, norm=layer.input_norm))

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        self._project_and_add(attended, layer.o_proj, x, layer.attention_out_norm)

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        if layer.routed is not None:
            layer.routed(x, x, norm=layer.mlp_norm, residual=x)
            return
        gate_up, down = _dense_mlp(layer)
        gate_up(x, self._gated, norm=layer.mlp_norm, glu=True, gate=layer.gate)
        self._project_and_add(self._gated, down, x, layer.mlp_out_norm)

    def mlp_input(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        assert layer.mlp_norm is not None
        normed = torch.empty_like(x)
        add_rms_norm(x, None, *layer.mlp_norm, normed)
        return normed

    def add_summed(self, x: Tensor, summed: Tensor) -> None:
        x += summed

    def finish(self, x: Tensor) -> None:
        """Nothing waits."""

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        return weights.lm_head(x, self._logits, norm=weights.final_norm)

    def _project_and_add(
        self, row: Tensor, linear: GpuLinear, x: Tensor, norm: Norm | None
    ) -> None:
        if norm is not None:  # of families that have no ranks
            add_normed(x, linear(row), *norm)
        elif self._ranks is None:
            linear(row, x, residual=x)
        else:
            x += self._ranks.all_reduce(linear(row, self._summand))


class ManyRows:
    """A `LinearPath` for any n up to `max_rows`."""

    def __init__(self, weights: DeviceWeights, max_rows: int) -> None:
        self._normed, self._gated = _allocate(weights, max_rows)
        self._query_width = _query_width(weights)
        self._waiting: Tensor | None = None  # what the next norm adds to x
        self._ranks = weights.ranks

    def begin(self) -> None:
        self._waiting = None

    def qkv(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        return _norm_all_heads(layer, layer.qkv(self._add_and_norm(x, layer.input_norm)))

    def query(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        normed = self._add_and_norm(x, layer.input_norm)
        return _norm_all_heads(layer, layer.qkv.first(self._query_width)(normed))

    def add_attention(self, layer: DeviceLayer, x: Tensor, attended: Tensor) -> None:
        self._add_later(x, layer.o_proj(attended), layer.attention_out_norm)

    def add_mlp(self, layer: DeviceLayer, x: Tensor) -> None:
        normed = self._add_and_norm(x, layer.mlp_norm)
        if layer.routed is not None:
            self._waiting = layer.routed(normed)
            return
        gate_up, down = _dense_mlp(layer)
        gated = gate_up(normed, self._gated[: len(x)], glu=True, gate=layer.gate)
        self._add_later(x, down(gated), layer.mlp_out_norm)

    def mlp_input(self, layer: DeviceLayer, x: Tensor) -> Tensor:
        return self._add_and_norm(x, layer.mlp_norm).clone()

    def add_summed(self, x: Tensor, summed: Tensor) -> None:
        self._waiting = summed

    def finish(self, x: Tensor) -> None:
        if self._waiting is not None:
            x += self._waiting
            self._waiting = None

    def logits(self, weights: DeviceWeights, x: Tensor) -> Tensor:
        return weights.lm_head(self._add_and_norm(x, weights.final_norm))

    def _add_later(self, x: Tensor, delta: Tensor, norm: Norm | None) -> None:
        """x += delta with the next norm, or its own `norm` now."""
        if norm is not None:  # of families that have no ranks
            add_normed(x, delta, *norm)
        else:
            self._waiting = delta if self._ranks is None else self._ranks.all_reduce(delta)

    def _add_and_norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            self.finish(x)
            return x
        normed = self._normed[: len(x)]
        add_rms_norm(x, self._waiting, *norm, normed)
        self._waiting = None
        return normed


def _norm_all_heads(layer: DeviceLayer, qkv: Tensor) -> Tensor:
    """Queries and keys with their RMSNorm, where that is of all heads at once."""
    start = 0
    for norm in (layer.q_norm, layer.k_norm) if layer.norms_all_heads else ():
        assert norm is not None
        if start < qkv.shape[1]:  # else there are queries alone
            of_heads = qkv[:, start : start + len(norm)]
            rows = of_heads.contiguous()
            add_rms_norm(rows, None, norm, layer.qk_norm_eps, rows)
            of_heads.copy_(rows)
        start += len(norm)
    return qkv


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
    like = weights.lm_head
    layout = linear_layout(weights.shape, num_rows, like.dtype)
    if num_rows == 1 and weights.recurrent:
        of_rules = (x.layer.qkv.out_features for group in weights.recurrent for x in group)
        width = max(weights.layers[0].qkv.out_features, *of_rules)
        layout["qkv"] = (1, width), like.dtype
        layout["query"] = (1, _query_width(weights)), like.dtype
    return allocate(layout, like.device, torch.empty).values()


def _query_width(weights: DeviceWeights) -> int:
    """Elements of a token's queries, with their gates."""
    return weights.shape.query_width * (2 if weights.recurrent else 1)


def _recurrent(model: HybridModel) -> tuple[tuple[Recurrent, ...], ...]:
    groups, number = list[tuple[Recurrent, ...]](), itertools.count()
    for group in model.between:
        made = (
            Recurrent(
                next(number),
                x.number,
                x.layer.on_gpu(has_experts=x.number not in model.host_experts),
                x.rule.on_gpu(),
            )
            for x in group
        )
        groups.append(tuple(made))
    return tuple(groups)


def _dense_mlp(layer: DeviceLayer) -> tuple[GpuLinear, GpuLinear]:
    assert layer.gate_up is not None
    assert layer.down is not None
    return layer.gate_up, layer.down
