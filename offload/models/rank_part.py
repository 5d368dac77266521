"""A rank's part of a model's weights, and its view of the model."""

from __future__ import annotations

from dataclasses import replace

from offload.models import LayerSpec, LeanModel
from offload.ranks.group import TensorParallel
from offload.ranks.shares import head_ranges, mlp_ranges


def rank_view(model: LeanModel, ranks: TensorParallel | None) -> LeanModel:
    """The lean view of a model whose weights `keep_own_weights` has cut: its own heads only."""
    if ranks is None:
        return model
    shape = model.shape
    heads = head_ranges(shape.num_kv_heads, ranks.world_size)[ranks.rank]
    own = replace(
        shape,
        num_kv_heads=len(heads),
        num_qo_heads=len(heads) * shape.group_size,
        intermediate_size=model.layers[0].dense_mlp[1].in_features,
    )

    def own_heads(spec: LayerSpec) -> LayerSpec:
        return replace(spec, num_qo_heads=own.num_qo_heads, num_kv_heads=own.num_kv_heads)

    layers = tuple(replace(layer, spec=own_heads(layer.spec)) for layer in model.layers)
    return replace(model, layers=layers, shape=own, ranks=ranks)


def keep_own_weights(model: LeanModel, ranks: TensorParallel) -> None:
    """Cut the stock modules behind the view of a whole model down to what this rank computes.

    q, k, v, gate and up lose rows, o and down lose columns; each keeps a copy of its part, so that
    the whole is freed. Biases that are added after the sum over ranks stay on rank 0.

    Raises:
        ValueError: more ranks than KV heads.
    """
    shape = model.shape
    heads = head_ranges(shape.num_kv_heads, ranks.world_size)[ranks.rank]
    key_rows = range(heads.start * shape.head_dim, heads.stop * shape.head_dim)
    group = shape.group_size
    query_rows = range(key_rows.start * group, key_rows.stop * group)
    for layer in model.layers:
        gate_up, down = layer.dense_mlp
        inner = mlp_ranges(down.in_features, ranks.world_size)[ranks.rank]
        layer.qkv.keep_rows(query_rows, key_rows, key_rows)
        layer.o_proj.keep_columns(query_rows, keeps_bias=ranks.rank == 0)
        gate_up.keep_rows(inner, inner)
        down.keep_columns(inner, keeps_bias=ranks.rank == 0)
