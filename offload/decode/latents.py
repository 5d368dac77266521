"""Multi-head latent attention with absorbed queries (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are products of one latent c of a token: k_h = [W_UK_h c, k_rope] and
v_h = W_UV_h c. A cache has [c, k_rope] in their place, as of one KV head, and c is the value, too:
q_h k_h = (W_UK_h^T q_nope) c + q_rope k_rope, and W_UV_h multiplies the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops.native import MAX_GROUP_SIZE, MAX_HEAD_DIM
from offload.models.packed_linear import PackedModule

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Latents:
    """In the place of `expand_kv` of an attention module of transformers, which gets from it what a
    cache is to have.

    Args:
        attention: where the module asks for another one, its keys and values are expanded.
    """

    def __init__(self, module: Any, attention: str) -> None:
        self._module, self._attention, self._stock = module, attention, module.expand_kv
        self._rank, self._nope = int(module.kv_lora_rank), int(module.qk_nope_head_dim)

    def __call__(self, latents: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """A key [batch_size, 1, n, rank + rope_dim], and its first part, the value."""
        if self._module.config._attn_implementation != self._attention:
            expanded: tuple[Tensor, Tensor] = self._stock(latents, k_rot)
            return expanded
        return torch.cat((latents, k_rot), dim=-1), latents

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch_size, num_heads, n, k_dim or v_dim] of such keys."""
        expanded: tuple[Tensor, Tensor] = self._stock(
            rows[..., : self._rank], rows[..., self._rank :]
        )
        return expanded

    def absorb(self, query: Tensor) -> Tensor:
        """[..., num_heads, n, rank + rope_dim] of a query [..., num_heads, n, k_dim]."""
        to_latents = query[..., : self._nope] @ self._weight[:, : self._nope]
        return torch.cat((to_latents, query[..., self._nope :]), dim=-1)

    def values_of(self, out: Tensor) -> Tensor:
        """[batch_size, n, num_heads, v_dim] of attention to latents [.., rank]."""
        weight = self._weight[:, self._nope :].transpose(1, 2)
        return (out.transpose(1, 2) @ weight).transpose(1, 2)

    @property
    def _weight(self) -> Tensor:
        """[num_heads, nope_dim + v_dim, rank]."""
        weight: Tensor = self._module.kv_b_proj.weight
        return weight.detach().view(-1, self._nope + self._module.v_head_dim, self._rank)


def latents_of(module: Any) -> Latents | None:
    """What an attention module was given by `keep_latents`."""
    found = vars(module).get("expand_kv")
    return found if isinstance(found, Latents) else None


def keep_latents(stock: Any, attention: str) -> None:
    """Let a stock model's modules of latent attention cache latents, where that takes less and is
    within the kernels' limits. Their packed `kv_b_proj` becomes a dense one.

    Args:
        attention: its name in transformers.
    """
    for name in latent_modules(stock):
        module = stock.get_submodule(name)
        up = module.kv_b_proj
        if isinstance(up, PackedModule):
            dense = nn.Linear(up.in_features, up.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(up.packed.dequantise(up.dtype), requires_grad=False)
            module.kv_b_proj = dense
        if latents_of(module) is None:
            module.expand_kv = Latents(module, attention)


def latent_modules(stock: Any) -> list[str]:
    """The names of the modules that can."""
    return [name for name, module in stock.named_modules() if _can_keep(module)]


def _can_keep(module: Any) -> bool:
    up = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or not isinstance(up, nn.Linear | PackedModule):
        return False
    sizes = [getattr(module, size, None) for size in _SIZES]
    if up.bias is not None or not all(isinstance(size, int) for size in sizes):
        return False
    rank, nope_dim, rope_dim, v_dim = map(int, sizes)  # type: ignore[arg-type]
    num_heads, rest = divmod(up.out_features, nope_dim + v_dim)
    fits = rank + rope_dim <= MAX_HEAD_DIM and 0 < num_heads <= MAX_GROUP_SIZE and rest == 0
    expanded = num_heads * max(nope_dim + rope_dim, v_dim)
    return fits and up.in_features == rank and rank + rope_dim < expanded
