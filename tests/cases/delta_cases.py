"""Operands of a step of the gated delta rule, and what comes of them in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_ops.delta_rule import DeltaHeads

# Relative L2. Values are rounded between operators, where only those near a tie may differ.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def expected(
    heads: DeltaHeads, rule: dict[str, Tensor], rows: Tensor, conv_state: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, conv_state and state of rows of [queries, keys, values, gates, betas, alphas], each of
    all heads; float64, with the dtype's rounding where transformers rounds."""
    n, dtype = len(rows), rows.dtype
    key_width, value_width = heads.num_k_heads * heads.k_dim, heads.num_v_heads * heads.v_dim

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    sizes = [heads.channels, value_width, heads.num_v_heads, heads.num_v_heads]
    newest, gate, beta, alpha = rows.double().split(sizes, 1)
    conv_state = torch.cat([conv_state.double(), newest[..., None]], 2)[..., 1:]
    mixed = rounded(F.silu(rounded((conv_state * rule["conv"].double()).sum(2))))
    q, k, v = mixed.split([key_width, key_width, value_width], 1)
    each = heads.num_v_heads // heads.num_k_heads
    q, k = (
        (x / (x.pow(2).sum(2, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1)
        for x in (y.view(n, heads.num_k_heads, heads.k_dim) for y in (q, k))
    )
    v, gate = (x.view(n, heads.num_v_heads, heads.v_dim) for x in (v, gate))
    rate = rule["a_log"].double().exp()
    decay = (-rate * F.softplus(alpha + rule["dt_bias"].double())).exp()
    state = state.double() * decay[..., None, None]
    delta = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * rounded(beta.sigmoid())[..., None]
    state = state + k[..., None] * delta[..., None, :]
    out = rounded(torch.einsum("nhkv,nhk->nhv", state, q) / heads.k_dim**0.5)
    normed = rounded(out / (out.pow(2).mean(2, keepdim=True) + 1e-5).sqrt())
    out = rounded(rounded(rule["norm"].double() * normed) * F.silu(gate))
    return out.view(n, -1), conv_state, state


Tensors = dict[str, Tensor]


def made(heads: DeltaHeads, width: int, n: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    # A state that decays to nothing becomes k (x) delta, and the output (q k) delta, which the norm
    # makes large whatever q k is: of this seed no q and k are all but orthogonal (of the one
    # before, by 0.001), or the rounding of q k would count a thousandfold.
    generator = torch.Generator().manual_seed(n * width + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rule = {
        "conv": normal(heads.channels, width).to(dtype),
        "norm": (1 + 0.3 * normal(heads.v_dim)).to(dtype),
        "a_log": normal(heads.num_v_heads).to(dtype),
        "dt_bias": normal(heads.num_v_heads).to(dtype),
    }
    inputs = {
        "rows": normal(n, heads.row_size).to(dtype),
        "conv_state": normal(n, heads.channels, width).to(dtype),
        "state": normal(n, heads.num_v_heads, heads.k_dim, heads.v_dim),
    }
    return rule, inputs


def ordered(heads: DeltaHeads, rows: Tensor, *, by_key_head: bool) -> Tensor:
    """Rows as the kernel finds them."""
    if not by_key_head:
        return rows
    n, groups = len(rows), heads.num_k_heads
    widths = [groups * heads.k_dim] * 2 + [heads.num_v_heads * heads.v_dim] * 2
    parts = rows.split([*widths, heads.num_v_heads, heads.num_v_heads], 1)
    by_head = [x.reshape(n, groups, -1) for x in parts]
    return torch.cat([torch.cat(x, 2).view(n, -1) for x in (by_head[:4], by_head[4:])], 1)
