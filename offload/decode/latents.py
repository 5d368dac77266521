"""Multi-head latent attention with absorbed queries (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are products of one latent c of a token: k_h = [W_UK_h c, k_rope] and
v_h = W_UV_h c. A cache has [c, k_rope] in their place, as of one KV head, and c is the value, too:
q_h k_h = (W_UK_h^T q_nope) c + q_rope k_rope, and W_UV_h multiplies the output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops.native import MAX_GROUP_SIZE, MAX_HEAD_DIM
from cpu_ops.routed_linear import RoutedLinear
from cpu_ops.worker_pool import WorkerPool
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
        self._made: tuple[RoutedLinear, RoutedLinear, Tensor] | None = None
        self._address = 0

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

    def absorb(self, query: Tensor, pool: WorkerPool | None = None) -> Tensor:
        """[batch_size, num_heads, n, rank + rope_dim] of a query [.., num_heads, n, k_dim].

        Args:
            pool: multiplies a decode step's, with weights that were transposed for it; None: torch
                does, where the query is.
        """
        to_multiply = query[..., : self._nope]
        if pool is None:
            to_latents = _by_heads(to_multiply, self._weight[:, : self._nope])
        else:
            rows = to_multiply.reshape(-1, self._nope).contiguous()
            into, _, heads = self._on_pool()
            to_latents = into(pool, rows, heads.repeat(len(rows) // len(heads))[:, None])
            to_latents = to_latents.view(*query.shape[:-1], self._rank)
        return torch.cat((to_latents, query[..., self._nope :]), dim=-1)

    def values_of(self, out: Tensor, pool: WorkerPool | None = None) -> Tensor:
        """[batch_size, 1, num_heads, v_dim] of a step's attention to latents [.., rank]."""
        if pool is None:
            of_values = self._weight[:, self._nope :].transpose(1, 2)
            return _by_heads(out.transpose(1, 2), of_values).transpose(1, 2)
        rows = out.reshape(-1, self._rank).contiguous()
        _, out_of, heads = self._on_pool()
        of_head, first = self._parts
        parts = heads[:, None] * of_head + torch.arange(first, of_head)
        values = out_of(pool, rows, parts.repeat(len(rows) // len(heads), 1))
        return values.view(*out.shape[:-1], -1)

    @property
    def v_dim(self) -> int:
        """Of a head's values."""
        return int(self._module.v_head_dim)

    @property
    def expanded_dim(self) -> int:
        """Elements of a token's keys and values of all heads."""
        rope_dim = int(self._module.qk_rope_head_dim)
        num_heads, of_head = self._weight.shape[:2]
        return int(num_heads * (of_head + rope_dim))

    @property
    def _parts(self) -> tuple[int, int]:
        """In how many equal parts the rows of a head are cut, and which is the first of values."""
        size = math.gcd(self._nope, self.v_dim)
        return (self._nope + self.v_dim) // size, self._nope // size

    def _on_pool(self) -> tuple[RoutedLinear, RoutedLinear, Tensor]:
        """W_UK of heads, transposed; all of the weight in `_parts`; numbers of heads. Made anew
        where the module's weight is replaced."""
        weight = self._weight
        if self._made is None or self._address != weight.data_ptr():
            num_heads, of_head = len(weight), self._parts[0]
            transposed = weight[:, : self._nope].transpose(1, 2).contiguous()
            self._made = (
                RoutedLinear(transposed, weight.dtype, num_heads),
                RoutedLinear(
                    weight.view(num_heads * of_head, -1, self._rank),
                    weight.dtype,
                    num_heads * of_head,
                ),
                torch.arange(num_heads),
            )
            self._address = weight.data_ptr()
        return self._made

    @property
    def _weight(self) -> Tensor:
        """[num_heads, nope_dim + v_dim, rank]."""
        weight: Tensor = self._module.kv_b_proj.weight
        return weight.detach().view(-1, self._nope + self.v_dim, self._rank)


def _by_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """[batch_size, num_heads, n, out_dim] of rows [batch_size, num_heads, n, in_dim].

    Args:
        weight: [num_heads, in_dim, out_dim].
    """
    batch_size, _, n, _ = rows.shape
    of_heads = torch.bmm(rows.transpose(0, 1).flatten(1, 2), weight)
    return of_heads.view(len(weight), batch_size, n, -1).transpose(0, 1)


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


def expanded_bytes(stock: Any) -> int:
    """Of a token's keys and values of all heads, the most that a module which caches latents makes
    of them while it reads a prompt; 0: none does."""
    kept = filter(None, map(latents_of, stock.modules()))
    return max((x.expanded_dim for x in kept), default=0) * int(stock.dtype.itemsize)


def transposed_bytes(stock: Any) -> int:
    """What decode steps of a CPU multiply queries with, beside the weights of these modules."""
    modules = map(stock.get_submodule, latent_modules(stock))
    rows = sum(
        x.kv_b_proj.out_features
        * x.qk_nope_head_dim
        * x.kv_lora_rank
        // (x.qk_nope_head_dim + x.v_head_dim)
        for x in modules
    )
    return int(rows) * int(stock.dtype.itemsize)


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
