"""A decoder's layers in one call of the C++ kernels: what a decode step is without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.attention import NativeAttention
from cpu_ops.linear import GATES, Linear
from cpu_ops.native import check_rotary_dim, check_tensor
from cpu_ops.routed_linear import RoutedMlp
from cpu_ops.step_rows import DecodeStep

Norm = tuple[Tensor, float]  # RMSNorm weight and eps


W = TypeVar("W")
M = TypeVar("M")


@dataclass(frozen=True)
class FusedLayer(Generic[W, M]):
    """A decoder layer's weights, with projections W of which some are fused, and experts M; nothing
    is copied.

    Attributes:
        qkv: hidden_size -> queries ++ keys ++ values. gate_up: hidden_size -> gate ++ up.
        gate_up, down: None where the MLP is `routed`.
        q_norm, k_norm: RMSNorm weights before RoPE, or None: [head_dim] of each head, or of all
            heads at once, [num_qo_heads * head_dim] and [num_kv_heads * head_dim].
        input_norm, mlp_norm: of what attention and the MLP read; None: none.
        attention_out_norm, mlp_out_norm: of what they add, likewise.
        norms_all_heads: q_norm and k_norm are of all heads at once.
        rope_idx: which of a step's ropes rotates the heads.
        gate: "silu" or "gelu_tanh", of gate_up.
        v_norm: RMSNorm weight [head_dim] of each head of values, or None; its eps is qk_norm_eps.
        out_scale: multiplies what the layer returns.
    """

    input_norm: Norm | None
    qkv: W
    q_norm: Tensor | None
    k_norm: Tensor | None
    qk_norm_eps: float
    o_proj: W
    mlp_norm: Norm | None
    gate_up: W | None
    down: W | None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    rope_idx: int = 0
    gate: str = "silu"
    routed: M | None = None
    norms_all_heads: bool = False
    v_norm: Tensor | None = None
    out_scale: float = 1.0


NativeLayer = FusedLayer[Linear, RoutedMlp]


class LayersStep:
    """One step of some rows through `layers`, which has not run yet, and the memory it works in.

    Args:
        hidden: [n, hidden_size], contiguous, n at most `Linear.max_rows`; overwritten.
        rope: cos, sin: [n, rotary_dim], contiguous; of the first elements of each head.
        rows: of `attention.begin_step`.
        keeps_queries: fill `kept_queries`.
        other_ropes: of layers that rotate otherwise; `FusedLayer.rope_idx` counts them from 1.
        query_scale: [n], multiplies rotated queries, which are rounded before and behind it; None:
            nothing does.

    Attributes:
        qkv, attended: what a layer's attention reads and writes, of the widest layer (`of_layer`).
        kept_queries: [num_layers, n, num_qo_heads * head_dim], rotated queries, if they were asked
            for, of layers whose heads are alike.
    """

    def __init__(
        self,
        layers: DecoderLayers,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        rows: DecodeStep,
        *,
        keeps_queries: bool = False,
        other_ropes: Sequence[tuple[Tensor, Tensor]] = (),
        query_scale: Tensor | None = None,
    ) -> None:
        n = len(rows.seqs)
        if not 1 <= n <= Linear.max_rows:
            raise ValueError(f"a step takes 1 to {Linear.max_rows} rows, got {n}")
        check_tensor("hidden", hidden, (n, layers.hidden_size), layers.dtype)
        ropes = (rope, *other_ropes)
        for tables in ropes:
            width = check_rotary_dim(tables[0].shape[-1], max(layers.head_dims))
            for name, table in zip(("cos", "sin"), tables, strict=True):
                check_tensor(name, table, (n, width), layers.dtype)
        if query_scale is not None:
            check_tensor("query_scale", query_scale, (n,), layers.dtype)
        self.rows = rows
        self.hidden = hidden
        self.qkv = hidden.new_empty(n, max(layers.qkv_features))
        self.attended = hidden.new_empty(n, max(layers.query_features))
        self.kept_queries = None
        if keeps_queries:
            width = max(layers.query_features)
            self.kept_queries = hidden.new_empty(layers.num_layers, n, width)
        if len(ropes) < layers.num_ropes:
            raise ValueError(f"the layers take {layers.num_ropes} ropes, got {len(ropes)}")
        gate_up = hidden.new_empty(n, layers.gate_up_features)
        added = torch.empty_like(hidden) if layers.adds_apart else None
        self._kept = (ropes, gate_up, added, query_scale)
        self.native = _native.DecoderStep(
            hidden.data_ptr(),
            [x for cos, sin in ropes for x in (cos.data_ptr(), sin.data_ptr(), cos.shape[-1])],
            self.qkv.data_ptr(),
            self.attended.data_ptr(),
            gate_up.data_ptr(),
            0 if added is None else added.data_ptr(),
            0 if self.kept_queries is None else self.kept_queries.data_ptr(),
            0 if query_scale is None else query_scale.data_ptr(),
            rows.native,
        )
        self._widths = layers.qkv_features, layers.query_features

    def of_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """`qkv` and `attended` of a layer: [n, its elements of a token], contiguous."""
        n = len(self.rows.seqs)
        qkv, attended = (
            buffer.view(-1)[: n * widths[layer_idx]].view(n, widths[layer_idx])
            for buffer, widths in zip((self.qkv, self.attended), self._widths, strict=True)
        )
        return qkv, attended


class DecoderLayers:
    """All layers of a decoder, over the pages, the worker pool and the kernels of its `attention`.

    Attributes:
        layers: as they were given.

    Raises:
        ValueError: layers whose shapes or dtypes do not fit each other or the attention.
    """

    def __init__(self, layers: Sequence[NativeLayer], attention: NativeAttention) -> None:
        if len(layers) != attention.num_layers:
            raise ValueError(f"expected {attention.num_layers} layers, got {len(layers)}")
        self.num_layers = len(layers)
        self.query_features = [*map(attention.query_features, range(len(layers)))]
        self.qkv_features = [*map(attention.qkv_features, range(len(layers)))]
        self.hidden_size = layers[0].qkv.in_features
        self.gate_up_features = max(x.gate_up.out_features if x.gate_up else 0 for x in layers)
        self.dtype, self.head_dims = attention.dtype, [dim for *_, dim in attention.layer_heads]
        self._heads = attention.layer_heads
        self.layers = tuple(layers)
        self.num_ropes = 1 + max(layer.rope_idx for layer in layers)
        self.adds_apart = any(x.attention_out_norm or x.mlp_out_norm or x.routed for x in layers)
        self._attention = attention  # kept alive
        self._native = _native.DecoderLayers(attention.native)
        for layer_idx, sparse in enumerate(attention.sparse_layers.tolist()):
            layer = layers[layer_idx]
            self._check_layer(layer_idx, layer)
            self._native.add(
                _address(layer.input_norm),
                layer.qkv.native,
                0 if layer.q_norm is None else layer.q_norm.data_ptr(),
                0 if layer.k_norm is None else layer.k_norm.data_ptr(),
                0 if layer.v_norm is None else layer.v_norm.data_ptr(),
                layer.qk_norm_eps,
                self._norms_whole(layer_idx, layer),
                layer.o_proj.native,
                _address(layer.mlp_norm),
                None if layer.gate_up is None else layer.gate_up.native,
                None if layer.down is None else layer.down.native,
                None if layer.routed is None else layer.routed.native,
                _address(layer.attention_out_norm),
                _address(layer.mlp_out_norm),
                layer.rope_idx,
                sparse,
                GATES.index(layer.gate),
                layer.out_scale,
            )

    def run(self, step: LayersStep) -> None:
        """All layers; `step.hidden` is then what goes into the final norm.

        One call into C++: ctrl-C is seen after it.

        Raises:
            RuntimeError: NaN or inf in a query or the cache; names the layer.
        """
        self._native.run(step.native)

    def project(self, layer_idx: int, step: LayersStep) -> None:
        """One layer up to its attention: rotated queries in the layer's qkv, K/V in the store."""
        self._native.project(layer_idx, step.native)

    def finish(self, layer_idx: int, step: LayersStep) -> None:
        """One layer from its attended on."""
        self._native.finish(layer_idx, step.native)

    def _norms_whole(self, layer_idx: int, layer: NativeLayer) -> bool:
        """Whether the norms of queries and keys are over all heads at once."""
        if layer.q_norm is None or layer.k_norm is None:
            return False
        _, _, head_dim = self._heads[layer_idx]
        return len(layer.q_norm) != head_dim or len(layer.k_norm) != head_dim

    def _check_layer(self, layer_idx: int, layer: NativeLayer) -> None:
        query_features = self.query_features[layer_idx]
        num_qo_heads, num_kv_heads, head_dim = self._heads[layer_idx]
        q_width = k_width = head_dim
        if self._norms_whole(layer_idx, layer):
            q_width, k_width = num_qo_heads * head_dim, num_kv_heads * head_dim
        for name, linear, shape in (
            ("qkv", layer.qkv, (self.hidden_size, self.qkv_features[layer_idx])),
            ("o_proj", layer.o_proj, (query_features, self.hidden_size)),
            *_mlp_shapes(layer, self.hidden_size, self.gate_up_features),
        ):
            got = (linear.in_features, linear.out_features)
            if got != shape or linear.dtype != self.dtype:
                raise ValueError(
                    f"{name} must be {self.dtype} {shape[0]} -> {shape[1]},"
                    f" got {linear.dtype} {got[0]} -> {got[1]}"
                )
        for name, weight, size in (
            ("input_norm", _weight(layer.input_norm), self.hidden_size),
            ("mlp_norm", _weight(layer.mlp_norm), self.hidden_size),
            ("attention_out_norm", _weight(layer.attention_out_norm), self.hidden_size),
            ("mlp_out_norm", _weight(layer.mlp_out_norm), self.hidden_size),
            ("q_norm", layer.q_norm, q_width),
            ("k_norm", layer.k_norm, k_width),
            ("v_norm", layer.v_norm, head_dim),
        ):
            if weight is not None:
                check_tensor(name, weight, (size,), self.dtype)


def _mlp_shapes(
    layer: NativeLayer, hidden_size: int, gate_up_features: int
) -> list[tuple[str, Linear, tuple[int, int]]]:
    """(name, linear, shape it must have) of the MLP; a routed one has checked what is inside."""
    if layer.routed is not None:
        return [("router", layer.routed.router, (hidden_size, layer.routed.up.num_experts))]
    if layer.gate_up is None or layer.down is None:
        raise ValueError("a layer must have gate_up and down, or a routed MLP")
    return [
        ("gate_up", layer.gate_up, (hidden_size, gate_up_features)),
        ("down", layer.down, (gate_up_features // 2, hidden_size)),
    ]


def _address(norm: Norm | None) -> tuple[int, float]:
    return (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm[0]
