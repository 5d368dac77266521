"""Attention of bloom, falcon and mpt, whose modules do not ask for an attention function, and ALiBi
(Press et al., arXiv:2108.12409) as a part of keys and queries.

ALiBi adds slope_h * (j - i) to the score of query i and key j. A softmax is the same where all
scores of a query have one more summand, so slope_h * j does, too, with j counted from anywhere: it
is a product of further dimensions. The key has the three digits of j to the base 256, which are
exact in 16 bits; the query has slope_h / sm_scale for each of them, as a sum of three numbers of
its dtype. No kernel, policy or page knows of it. Scores grow with j: in float32 they are rounded by
2^-24 of slope_h * j, which is 0.001 at 30,000 tokens and a slope of 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OWN_FORWARD = "offload_own_forward"  # the attention's name in a taken model's config
_DIGITS, _PARTS = 3, 3
ALIBI_DIMS = _DIGITS * _PARTS  # of a key or a query
# Of digit k the key has 2^(4k - 4) times as much and the query 2^(4k + 4): both are in float16.
_OF_KEYS, _OF_QUERIES = (1 / 16, 1.0, 16.0), (16.0, 256.0, 4096.0)
# query, key, value [batch_size, num_heads, n, dim], mask, sm_scale to [batch_size, n, num_heads,
# dim].
Attention = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def bloom_slopes(num_heads: int) -> Tensor:
    """float64 [num_heads], as those of the paper: powers of 2^(-8 / n) for n heads, a power of two;
    of other numbers those of the next smaller one, then every other one of twice that."""
    n = 2 ** int(math.log2(num_heads))
    of_power = 2.0 ** (-8.0 / n * _numbers(1, n + 1))
    others = 2.0 ** (-4.0 / n * _numbers(1, 2 * n, 2))
    return torch.cat([of_power, others])[:num_heads]


def mpt_slopes(num_heads: int, bias_max: float) -> Tensor:
    """float64 [num_heads], of the next larger power of two: every other one first."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-bias_max / n * _numbers(1, n + 1))
    if n != num_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])
    return slopes[:num_heads]


def _numbers(*of_range: int) -> Tensor:
    return torch.arange(*of_range, dtype=torch.float64, device="cpu")


def of_positions(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What keys at `positions` int64 [batch_size, n], less than 2^24, have of these:
    [batch_size, 1, n, ALIBI_DIMS]."""
    digits = [(positions >> 8 * k & 255) * factor for k, factor in enumerate(_OF_KEYS)]
    return torch.stack(digits * _PARTS, dim=-1).to(dtype)[:, None]


def of_slopes(slopes: Tensor, sm_scale: float, dtype: torch.dtype, device: Any) -> Tensor:
    """What queries have, which multiplies `of_positions` to slope * position / sm_scale:
    [1, num_heads, 1, ALIBI_DIMS]."""
    left, parts = slopes.double() / sm_scale, list[Tensor]()
    for _ in range(_PARTS):
        part = left.to(dtype)
        left = left - part.double()
        parts += [part * factor for factor in _OF_QUERIES]
    return torch.stack(parts, dim=-1)[None, :, None].to(device)


class _OwnForward:
    """In the place of the `forward` of an attention module, while the config names `OWN_FORWARD`.

    A cache may say at which `new_positions` int64 [batch_size, n] its new tokens are; else these
    are its columns.
    """

    def __init__(self, module: Any, config: Any, attention: Attention) -> None:
        self._module, self._config, self._attention = module, config, attention
        self._stock = module.forward
        self._alibi, self._of_slopes = self._slopes(), dict[Any, Tensor]()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._config._attn_implementation != OWN_FORWARD:
            return self._stock(hidden_states, *args, **kwargs)
        return self._forward(hidden_states, *args, **kwargs), None

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def _slopes(self) -> Tensor | None:
        """[num_heads]; None: there is no ALiBi."""
        raise NotImplementedError

    def _attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cache: Any,
        mask: Tensor | None,
        sm_scale: float,
    ) -> Tensor:
        """[batch_size, n, hidden_size] of heads [batch_size, num_heads, n, head_dim].

        Args:
            mask: True where a query attends.
        """
        (q, k, v), module = qkv, self._module
        if self._alibi is not None:
            key = q.dtype, q.device
            if key not in self._of_slopes:
                self._of_slopes[key] = of_slopes(self._alibi, sm_scale, *key)
            of_keys = of_positions(_new_positions(cache, k, module.layer_idx), k.dtype)
            q = torch.cat([q, self._of_slopes[key].expand(*q.shape[:3], -1)], dim=-1)
            k = torch.cat([k, of_keys.expand(*k.shape[:3], -1)], dim=-1)
        if cache is not None:
            k, v = cache.update(k, v, module.layer_idx)
        return self._attention(module, q, k, v, mask, sm_scale).flatten(2)


class _Bloom(_OwnForward):
    def _forward(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        **_: Any,
    ) -> Tensor:
        module = self._module
        qkv = module._reshape(module.query_key_value(x))
        out = self._attend(qkv, layer_past, attention_mask, module.inv_norm_factor)
        projected: Tensor = module.dense(out)
        return projected + residual

    def _slopes(self) -> Tensor:
        return bloom_slopes(self._module.num_heads)


class _Mpt(_OwnForward):
    def _forward(
        self, x: Tensor, *, attention_mask: Tensor | None, past_key_values: Any = None, **_: Any
    ) -> Tensor:
        module = self._module
        qkv = module.Wqkv(x)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = qkv.view(*x.shape[:2], 3, module.n_heads, module.head_dim).permute(2, 0, 3, 1, 4)
        out = self._attend((q, k, v), past_key_values, attention_mask, module.softmax_scale)
        projected: Tensor = module.out_proj(out)
        return projected

    def _slopes(self) -> Tensor:
        return mpt_slopes(self._module.n_heads, 8)  # transformers reads no alibi_bias_max


class _Falcon(_OwnForward):
    def _forward(
        self,
        x: Tensor,
        *,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        module = self._module
        fused, mask = module.query_key_value(x), attention_mask
        groups = fused.view(*x.shape[:2], module.num_kv_heads, -1, module.head_dim)
        q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        if alibi is None:
            from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

            q, k = apply_rotary_pos_emb(q, k, *(position_embeddings or ()))
        elif mask is not None:  # of biases, which are never less than 0
            mask = mask >= 0
        out = self._attend((q, k, v), layer_past, mask, module.inv_norm_factor)
        projected: Tensor = module.dense(out)
        return projected

    def _slopes(self) -> Tensor | None:
        if not self._config.alibi:
            return None
        # The model rounds slopes, and scales biases with the scores.
        return bloom_slopes(self._module.num_heads).bfloat16() * self._module.inv_norm_factor


_FORWARDS = {"BloomAttention": _Bloom, "FalconAttention": _Falcon, "MptAttention": _Mpt}


def take_over(stock: Any, attention: Attention) -> bool:
    """Let a stock model's modules use `attention`, if they are of a type above; whether they are.
    Their own is still there: `config._attn_implementation` says which one.

    Args:
        attention: its mask is True where a query attends, or None.
    """
    found = False
    for module in stock.modules():
        kind = _FORWARDS.get(type(module).__name__)
        if kind is None:
            continue
        found = True
        if not isinstance(vars(module).get("forward"), _OwnForward):
            module.forward = kind(module, stock.config, attention)
            num_kv_heads = getattr(module, "num_kv_heads", 0)
            if num_kv_heads:
                module.num_key_value_groups = module.num_heads // num_kv_heads
    if found:
        stock.config._attn_implementation = OWN_FORWARD
    return found


def _new_positions(cache: Any, keys: Tensor, layer_idx: int) -> Tensor:
    known: Tensor | None = getattr(cache, "new_positions", None)
    if known is not None:
        return known
    past = 0 if cache is None else cache.get_seq_length(layer_idx)
    return torch.arange(past, past + keys.shape[2], device=keys.device)[None]
