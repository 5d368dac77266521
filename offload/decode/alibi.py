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
    of_power: Tensor = 2.0 ** (-8.0 / n * _numbers(1, n + 1))
    others: Tensor = 2.0 ** (-4.0 / n * _numbers(1, 2 * n, 2))
    return torch.cat([of_power, others])[:num_heads]


def mpt_slopes(num_heads: int, bias_max: float) -> Tensor:
    """float64 [num_heads], of the next larger power of two: every other one first."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes: Tensor = 2.0 ** (-bias_max / n * _numbers(1, n + 1))
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


class _OwnAttention:
    """In front of the class of an attention module, whose own `forward` runs where the model's
    config does not name `OWN_FORWARD`.

    A cache may say at which `new_positions` int64 [batch_size, n] its new tokens are; else these
    are its columns.

    Attributes:
        of_model: its config.
        slopes: of ALiBi [num_heads]; None: there is none.
        attention: of queries, keys and values.
        of_queries: what slopes are in queries, by dtype and device.
    """

    of_model: Any
    slopes: Tensor | None
    attention: Attention
    of_queries: dict[Any, Tensor]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.of_model._attn_implementation != OWN_FORWARD:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return self.attended(hidden_states, *args, **kwargs), None

    def attended(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the module gives for hidden states x [batch_size, n, hidden_size]."""
        raise NotImplementedError

    @staticmethod
    def slopes_of(module: Any, config: Any) -> Tensor | None:
        """The `slopes` of a module."""
        raise NotImplementedError

    def attend(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        mask: Tensor | None,
        sm_scale: float,
    ) -> Tensor:
        """[batch_size, n, hidden_size] of new heads [batch_size, num_heads, n, head_dim].

        Args:
            mask: True where a query attends.
        """
        if self.slopes is not None:
            key = q.dtype, q.device
            if key not in self.of_queries:
                self.of_queries[key] = of_slopes(self.slopes, sm_scale, *key)
            positions = getattr(cache, "new_positions", None)
            if positions is None:
                past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
                positions = torch.arange(past, past + k.shape[2], device=k.device)[None]
            of_keys = of_positions(positions, k.dtype)
            q = torch.cat([q, self.of_queries[key].expand(*q.shape[:3], -1)], dim=-1)
            k = torch.cat([k, of_keys.expand(*k.shape[:3], -1)], dim=-1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out: Tensor = self.attention(self, q, k, v, mask, sm_scale)
        return out.flatten(2)


class _Bloom(_OwnAttention):
    def attended(
        self: Any,
        x: Tensor,
        residual: Tensor,
        *,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        **_: Any,
    ) -> Tensor:
        qkv = self._reshape(self.query_key_value(x))
        out = self.attend(*qkv, layer_past, attention_mask, self.inv_norm_factor)
        projected: Tensor = self.dense(out)
        return projected + residual

    @staticmethod
    def slopes_of(module: Any, config: Any) -> Tensor:
        return bloom_slopes(module.num_heads)


class _Mpt(_OwnAttention):
    def attended(
        self: Any,
        x: Tensor,
        *,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor:
        qkv = self.Wqkv(x)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        qkv = qkv.view(*x.shape[:2], 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = self.attend(*qkv, past_key_values, attention_mask, self.softmax_scale)
        projected: Tensor = self.out_proj(out)
        return projected

    @staticmethod
    def slopes_of(module: Any, config: Any) -> Tensor:
        return mpt_slopes(module.n_heads, 8)  # transformers does not read alibi_bias_max


class _Falcon(_OwnAttention):
    def attended(
        self: Any,
        x: Tensor,
        *,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        groups = self.query_key_value(x).view(*x.shape[:2], self.num_kv_heads, -1, self.head_dim)
        q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        mask = attention_mask
        if alibi is None:
            from transformers.models.falcon import modeling_falcon

            rotate: Any = modeling_falcon.apply_rotary_pos_emb
            q, k = rotate(q, k, *(position_embeddings or ()))
        elif mask is not None:  # of biases, which are never less than 0
            mask = mask >= 0
        projected: Tensor = self.dense(self.attend(q, k, v, layer_past, mask, self.inv_norm_factor))
        return projected

    @staticmethod
    def slopes_of(module: Any, config: Any) -> Tensor | None:
        if not config.alibi:
            return None
        # The model rounds slopes, and scales biases with the scores.
        return bloom_slopes(module.num_heads).bfloat16().double() * float(module.inv_norm_factor)


_KINDS = {"BloomAttention": _Bloom, "FalconAttention": _Falcon, "MptAttention": _Mpt}


def take_over(stock: Any, attention: Attention) -> bool:
    """Let a stock model's modules use `attention`, if they are of a type above; whether they are.
    Their own is still there: `config._attn_implementation` says which one.

    Args:
        attention: its mask is True where a query attends, or None.
    """
    modules = [module for module in stock.modules() if type(module).__name__ in _KINDS]
    for module in modules:
        kind: Any = type(module)
        if isinstance(module, _OwnAttention):
            continue
        mixin = _KINDS[kind.__name__]
        module.of_model, module.attention, module.of_queries = stock.config, attention, {}
        module.slopes = mixin.slopes_of(module, stock.config)
        if mixin is _Falcon:  # sdpa_attention_forward asks for it
            module.num_key_value_groups = module.num_heads // module.num_kv_heads
        module.__class__ = type(kind.__name__, (mixin, kind), {})
    if modules:
        stock.config._attn_implementation = OWN_FORWARD
    return bool(modules)
