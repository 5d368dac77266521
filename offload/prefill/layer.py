"""A decoder layer over a prefill slice, but for its attention.

On a GPU the steps between the projections are kernels of `gpu_ops`: torch's operators would read
and write the slice a dozen times where once will do. On a CPU, where there is a pool for them,
RMSNorm and the rotation are kernels of `cpu_ops`, and so are the projections where torch's are slow
(`Linear.prefers_cpu_ops`); the others are torch's. All kernels round where transformers rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cpu_ops.rms_norm import rms_norm
from cpu_ops.rope import rotate_heads
from cpu_ops.worker_pool import WorkerPool
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.rotate import rotate_tokens
from gpu_ops.silu_mul import activate
from offload.models import DecoderLayer, LeanModel
from offload.models.base import norm_of
from offload.models.linear import Linear


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels of `gpu_ops` are for `x`."""
    return x.is_cuda


def project_qkv(
    layer: DecoderLayer, x: Tensor, pool: WorkerPool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [n, num_heads, head_dim] of x [n, hidden_size], not yet rotated."""
    x = x if layer.input_norm is None else _norm(layer.input_norm, x, pool)
    spec, head_dim = layer.spec, layer.spec.head_dim
    q, k, v = (
        y.view(len(x), -1, head_dim)
        for y in _outputs(layer.qkv, x, pool, (spec.num_qo_heads, *[spec.num_kv_heads] * 2))
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (
            _norm(norm, y.reshape(len(x), -1, len(norm_of(norm)[0])), pool).view(y.shape)
            for norm, y in ((layer.q_norm, q), (layer.k_norm, k))
        )
    if layer.v_norm is not None:
        v = _norm(layer.v_norm, v, pool)
    return q, k, v


def _outputs(
    linear: Linear, x: Tensor, pool: WorkerPool | None, shares: Sequence[int]
) -> list[Tensor]:
    """What each projection of `linear` makes of x; of one that is several in one, by `shares`."""
    if len(linear.parts) == len(shares):
        return [projection(x, pool) for projection in linear.parts]
    unit = linear.out_features // sum(shares)
    return [*torch.split(linear(x, pool), [unit * share for share in shares], dim=-1)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pool: WorkerPool | None = None) -> Tensor:
    """Rotary embedding: x [n, num_heads, head_dim] -> [num_heads, n, head_dim].

    x * cos + rotate_half(x) * sin, with the rounding points of transformers. In memory heads come
    first, tokens on a GPU: so do the projections have it, and so attention takes it.
    """
    if has_kernels(x):
        return rotate_tokens(x, cos, sin).transpose(0, 1)
    if pool is not None:
        return rotate_heads(pool, x, cos, sin)
    width = cos.shape[-1]  # the elements behind stay as they are
    half = width // 2
    x = x.transpose(0, 1)
    x1, x2 = x[..., :half], x[..., half:width]
    rotated = x.clone(memory_format=torch.contiguous_format)
    torch.sub(x1 * cos[:, :half], x2 * sin[:, :half], out=rotated[..., :half])
    torch.add(x2 * cos[:, half:], x1 * sin[:, half:], out=rotated[..., half:width])
    return rotated


def add_mlp(
    layer: DecoderLayer,
    x: Tensor,
    delta: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor],
    pool: WorkerPool | None = None,
) -> None:
    """x += delta, the output projection of attention; x += the MLP of that: [n, hidden_size].

    Of layers with `attention_out_norm`, delta's norm is added.
    """
    if layer.attention_out_norm is not None:
        delta = _norm(layer.attention_out_norm, delta, pool)
    if layer.mlp_norm is None:
        x += delta
        normed = x
    elif has_kernels(x):
        normed = delta  # its memory does for both
        add_rms_norm(x, delta, *norm_of(layer.mlp_norm), normed)
    else:
        x += delta
        normed = _norm(layer.mlp_norm, x, pool)
    if layer.routed is not None:
        down = layer.routed(normed, pool)
    else:
        down = _dense_mlp(layer, normed, pool)
    down = sum_over_ranks(down)
    x += down if layer.mlp_out_norm is None else _norm(layer.mlp_out_norm, down, pool)
    if layer.out_scale != 1.0:
        x *= layer.out_scale


def _dense_mlp(layer: DecoderLayer, normed: Tensor, pool: WorkerPool | None) -> Tensor:
    gate_up, down = layer.dense_mlp
    if pool is not None and gate_up.prefers_cpu_ops(normed):
        return down.on_cpu()(
            pool,
            gate_up(normed, pool),
            silu_mul=layer.gate == "silu",
            gelu_mul=layer.gate == "gelu_tanh",
        )
    gate, up = (y.contiguous() for y in _outputs(gate_up, normed, pool, (1, 1)))
    activate(gate, up, layer.gate)
    return down(gate, pool)


def attend_to_nothing(model: LeanModel, x: Tensor, pool: WorkerPool | None = None) -> Tensor:
    """All layers over x [n, hidden_size], overwritten, where the mask lets no token see any.

    The attention of the stock layers (torch's `scaled_dot_product_attention`) is zero then.
    """
    for layer in model.layers:
        delta = layer.o_proj(x.new_zeros(len(x), layer.o_proj.in_features), pool)
        add_mlp(layer, x, model.sum_over_ranks(delta), model.sum_over_ranks, pool)
    return x


def _norm(norm: nn.Module, x: Tensor, pool: WorkerPool | None) -> Tensor:
    """RMSNorm over the last dimension."""
    if not has_kernels(x):
        normed: Tensor = norm(x) if pool is None else rms_norm(pool, x, *norm_of(norm))
        return normed
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    add_rms_norm(x.reshape(-1, width), None, *norm_of(norm), out.view(-1, width))
    return out
