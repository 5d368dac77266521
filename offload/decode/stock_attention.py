"""Attention of a stock model's own modules, asked for through transformers' `AttentionInterface`.

The modules of the model stay as they are. Where they ask for the attention named `OFFLOAD`, a
*taker* may answer in the place of torch: `attention_specs` only looks at what each layer asks for,
and a cache of the host store attends with the native kernel. A layer is taken over if all of its
keys and values pass through its cache layer and then, in one call, through the attention function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cpu_ops.native import MAX_GROUP_SIZE, MAX_HEAD_DIM
from cpu_ops.worker_pool import WorkerPool
from offload.decode.alibi import OWN_FORWARD, take_over
from offload.decode.latents import Latents, keep_latents, latents_of
from offload.prefill.attention import (
    attend,
    attend_in_window,
    attend_with_lse,
    without_sinks,
)

OFFLOAD = "offload"  # the attention's name in transformers
_CAPPED_QUERIES = 64  # at a time
HEAD_DIM_MULTIPLE = 16  # narrower heads are padded with zeros, which changes no product
# Cache layers whose keys and values can be kept elsewhere; the second has other states, too.
_TAKEN_CLASSES = (cache_utils.DynamicLayer, cache_utils.LinearAttentionAndFullAttentionLayer)
# Arguments of attention functions that the mask has already, or that change nothing.
_WITHOUT_EFFECT = frozenset(
    """cache_position deterministic is_causal logits_to_keep num_items_in_batch output_attentions
    output_hidden_states output_router_logits position_ids return_dict sliding_window
    use_cache""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention of one layer is.

    Attributes:
        k_dim, v_dim: of the keys and values that the modules have.
        sm_scale: multiplies q @ k.
        softcap: scores are softcap * tanh(score / softcap); 0: not capped.
        has_latents: keys and values are latents of all heads.
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.
    """

    num_qo_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    sm_scale: float
    softcap: float = 0.0
    has_latents: bool = False
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def head_dim(self) -> int:
        """What keys and values are padded to in the store."""
        return -(-max(self.k_dim, self.v_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


@dataclass
class AttentionCall:
    """One call of the attention function.

    Attributes:
        query: [batch_size, num_qo_heads, n, k_dim].
        key, value: [batch_size, num_kv_heads, kv_len, k_dim or v_dim].
        mask: [batch_size, 1 or num_qo_heads, n, kv_len], True or 0 where a query attends; None:
            causal, or a single query that attends to all.
        sinks: logits [num_qo_heads] that take part in the softmax and have no value; or None.
        softcap: as of `AttentionSpec`.
        latents: key and value are those of one KV head, and the query is not absorbed; or None.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sm_scale: float
    sinks: Tensor | None
    is_causal: bool | None
    softcap: float = 0.0
    latents: Latents | None = None

    def in_torch(self) -> Tensor:
        """[batch_size, n, num_qo_heads, v_dim]; of latents, v_dim of what they expand to."""
        if self.latents is not None:
            key, value = self.latents.expand(self.key)
            return replace(self, key=key, value=value, latents=None).in_torch()
        if self.softcap:
            return self._capped()
        if self.sinks is None:
            out: Tensor = sdpa_attention_forward(
                self.module,
                self.query,
                self.key,
                self.value,
                self.mask,
                scaling=self.sm_scale,
                is_causal=self.is_causal,
            )[0]
            return out
        group_size = self.query.shape[1] // self.key.shape[1]
        k, v = (x.repeat_interleave(group_size, 1) for x in (self.key, self.value))
        mask, n = self.mask, self.query.shape[2]
        if mask is not None and mask.dtype == torch.bool:
            # Not infinity: a query of padding attends to nothing.
            least = -torch.inf if mask.is_cpu else torch.finfo(k.dtype).min
            mask = torch.zeros_like(mask, dtype=k.dtype).masked_fill_(~mask, least)
        causal = mask is None and n > 1
        if self.query.is_cuda:
            o, lse = _on_cuda(self.query, k, v, mask, causal, self.sm_scale)
        else:
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                self.query, k, v, 0.0, causal, attn_mask=mask, scale=self.sm_scale
            )
        return without_sinks(o.transpose(1, 2), lse.transpose(1, 2), self.sinks)

    def after(
        self, rows: tuple[Tensor, ...], query: Tensor, pool: WorkerPool, window: int = 0
    ) -> Tensor:
        """Causal attention of a CPU's pool: [n, num_qo_heads, v_dim].

        Args:
            rows: keys and values [num_kv_heads, kv_len, k_dim or v_dim] up to the last query's.
            query: [num_qo_heads, n, k_dim].
            window: tokens that a query sees, itself the last; 0: all.
        """
        v_dim = rows[1].shape[-1]
        width = -(-max(query.shape[-1], v_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        q, keys, values = (widened(x, width).contiguous() for x in (query, *rows))
        sinks = None if self.sinks is None else self.sinks.detach().float()
        if window and window < keys.shape[1]:
            kv = keys, values
            return attend_in_window(q, kv, window, self.sm_scale, pool, sinks)[..., :v_dim]
        return attend(q, None, (keys, values), self.sm_scale, pool, sinks)[..., :v_dim]

    def behind(self, past: tuple[Tensor, Tensor] | None) -> Tensor:
        """[n, num_qo_heads, v_dim] of one sequence without padding: causal attention to its tokens
        `past` and the new ones of this call, which has a batch of one.

        Args:
            past: keys and values [num_kv_heads, kv_len, head_dim], zeros behind k_dim and v_dim,
                of whom the last are for the new ones: they are written here. None: there is
                nothing before the new ones.
        """
        if self.latents is not None:
            return self._behind_latents(self.latents, past)
        k_dim, v_dim = self.key.shape[-1], self.value.shape[-1]
        q, keys, values = self.query[0], self.key[0], self.value[0]
        if past is not None:
            for out, rows in zip(past, (keys, values), strict=True):
                out[:, -rows.shape[1] :, : rows.shape[-1]] = rows
            keys, values = past
        if self.softcap:
            keys, values = keys[None, ..., :k_dim], values[None, ..., :v_dim]
            return replace(self, key=keys, value=values, mask=None)._capped()[0]
        if q.shape[1] == 1 and self.sinks is None:
            whole = keys[None, ..., :k_dim], values[None, ..., :v_dim]
            out = F.scaled_dot_product_attention(
                self.query, *whole, scale=self.sm_scale, enable_gqa=True
            )
            return out[0].transpose(0, 1)
        width = -(-max(k_dim, v_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        q, keys, values = (widened(x, width) for x in (q, keys, values))
        out, lse = attend_with_lse(q, None, (keys, values), self.sm_scale)
        return (out if self.sinks is None else without_sinks(out, lse, self.sinks))[..., :v_dim]

    def _behind_latents(self, latents: Latents, past: tuple[Tensor, Tensor] | None) -> Tensor:
        """`behind`: a single query is absorbed, several meet expanded keys and values."""
        rows, n = self.key, self.query.shape[2]
        if past is not None:
            k_dim = rows.shape[-1]
            past[0][:, -rows.shape[2] :, :k_dim] = rows[0]
            rows = past[0][None, ..., :k_dim]
        if n == 1 and self.sinks is None and not self.softcap:
            q = latents.absorb(self.query).transpose(1, 2)  # the heads are queries of one KV head
            values = rows[..., : self.value.shape[-1]]
            out = F.scaled_dot_product_attention(q, rows, values, scale=self.sm_scale)
            return latents.values_of(out)[0]
        key, value = latents.expand(rows)
        return replace(self, key=key, value=value, latents=None).behind(None)

    def _capped(self) -> Tensor:
        """Some queries at a time, so that there is never a score of each query for each key."""
        if self.sinks is not None:
            raise NotImplementedError("attention asks for sinks beside softcap")
        n, kv_len = self.query.shape[2], self.key.shape[2]
        group_size = self.query.shape[1] // self.key.shape[1]
        k, v = (x.repeat_interleave(group_size, 1) for x in (self.key, self.value))
        columns, mask = torch.arange(kv_len, device=k.device), self.mask
        outs = []
        for first in range(0, n, _CAPPED_QUERIES):
            some = slice(first, first + _CAPPED_QUERIES)
            scores = self.query[:, :, some] @ k.transpose(2, 3) * self.sm_scale
            scores = torch.tanh(scores / self.softcap) * self.softcap
            if mask is None:
                attended = columns <= (columns[kv_len - n :][some])[:, None]
            else:
                attended = mask[:, :, some]
            if attended.dtype == torch.bool:
                scores = scores.masked_fill(~attended, torch.finfo(scores.dtype).min)
            else:
                scores = scores + attended
            weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
            outs.append((weights @ v).transpose(1, 2))
        return torch.cat(outs, dim=1)


def _on_cuda(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Out [batch_size, num_heads, n, v_dim], and the log-sum-exp [batch_size, num_heads, n]."""
    if bias is not None:  # its rows begin at multiples of 16 bytes
        kv_len = bias.shape[-1]
        bias = F.pad(bias, (0, -kv_len % HEAD_DIM_MULTIPLE))[..., :kv_len]
        bias = bias.expand(*q.shape[:3], kv_len)
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=sm_scale
    )
    return o, lse[..., : q.shape[2]]


def widened(x: Tensor, width: int) -> Tensor:
    """[..., dim] with zeros up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


# Answers a call, or leaves it to torch.
Taker = Callable[[AttentionCall], Tensor | None]
_TAKER: ContextVar[Taker | None] = ContextVar("offload_attention_taker", default=None)


@contextlib.contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """Inside, `taker` hears of the attention calls of this thread first."""
    token = _TAKER.set(taker)
    try:
        yield
    finally:
        _TAKER.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it."""
    sm_scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = {name: x for name, x in others.items() if x is not None and x is not False}
    asked = {name: x for name, x in asked.items() if name not in _WITHOUT_EFFECT}
    if asked:
        raise NotImplementedError(
            f"attention asks for {', '.join(sorted(asked))}, which is not supported yet"
        )
    call = AttentionCall(
        *(module, query, key, value, attention_mask, sm_scale, s_aux, is_causal, softcap or 0.0),
        latents_of(module),
    )
    taker = _TAKER.get()
    out = None if taker is None else taker(call)
    return call.in_torch() if out is None else out, None


def _own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """As the modules of `take_over` call it; a taker knows of padding."""
    is_taken = _TAKER.get() is not None
    return _attention(module, query, key, value, None if is_taken else mask, scale)[0]


def _own_mask(*args: Any, **given: Any) -> Tensor:
    """Of the models of `take_over`, which need a mask; for a taker a small one that hides nothing,
    as falcon and mpt would make one of each query and key, and head, of it."""
    if _TAKER.get() is not None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=given.get("device"))
    mask = sdpa_mask(*args, **given | {"allow_is_causal_skip": False})
    assert mask is not None
    return mask


def use_offload_attention(stock: Any) -> None:
    """Let the modules of a stock model ask for the attention of this module.

    Raises:
        NotImplementedError: its class does not use AttentionInterface.
    """
    AttentionInterface.register(OFFLOAD, _attention)
    AttentionMaskInterface.register(OFFLOAD, sdpa_mask)
    AttentionMaskInterface.register(OWN_FORWARD, _own_mask)
    if take_over(stock, _own_attention):
        return
    stock.set_attn_implementation(OFFLOAD)
    configs = [module.config for module in stock.modules() if hasattr(module, "config")]
    if all(config._attn_implementation != OFFLOAD for config in configs):
        raise NotImplementedError("its class does not use transformers' AttentionInterface")


def use_eager_attention(stock: Any) -> None:
    """Let the modules of a stock model compute attention as transformers does, in plain torch."""
    if stock.config._attn_implementation == OWN_FORWARD:
        stock.config._attn_implementation = "eager"
    else:
        stock.set_attn_implementation("eager")


class _Recorder(DynamicCache):
    """Notes keys that cache layers return, and attention calls."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.updated: tuple[int, Tensor] | None = None  # the last cache layer, and its keys
        self.specs: dict[int, AttentionSpec] = {}
        self.reasons: dict[int, str] = {}  # why layers cannot be taken over
        self._attended: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):  # type: ignore[no-untyped-def]
        rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.updated = layer_idx, rows[0]
        self.reasons[layer_idx] = "its attention does not come to the attention function"
        return rows

    def record(self, call: AttentionCall) -> None:
        if self.updated is None:
            for layer_idx, (key, value) in self._attended.items():
                if call.key is key and call.value is not value:
                    self.reasons[layer_idx] = "it attends to the same keys with other values"
            return
        layer_idx, _ = self.updated
        self.updated = None
        self._attended[layer_idx] = call.key, call.value
        reason, num_kv_heads = "", call.key.shape[1]
        if call.key.dim() != 4 or call.key.shape[2] != call.query.shape[2]:
            reason = f"its attention gets keys of another length: {list(call.key.shape)}"
        elif call.query.shape[1] // num_kv_heads > MAX_GROUP_SIZE:
            reason = (
                f"{call.query.shape[1] // num_kv_heads} query heads share a KV head; at most "
                f"{MAX_GROUP_SIZE} are supported"
            )
        elif max(call.key.shape[3], call.value.shape[3]) > MAX_HEAD_DIM:
            reason = f"head_dim={call.key.shape[3]}; at most {MAX_HEAD_DIM} is supported"
        self.reasons[layer_idx] = reason
        self.specs[layer_idx] = AttentionSpec(
            num_qo_heads=call.query.shape[1],
            num_kv_heads=num_kv_heads,
            k_dim=call.key.shape[3],
            v_dim=call.value.shape[3],
            sm_scale=call.sm_scale,
            softcap=call.softcap,
            has_latents=call.latents is not None,
            sinks=None if call.sinks is None else call.sinks.detach().float().flatten(),
        )


def attention_specs(stock: Any) -> tuple[dict[int, AttentionSpec], list[Any]]:
    """What attention is in each cache layer that attends to everything, by a forward pass of three
    tokens; {} if all see a window only, or have other states: those are left to transformers. And
    all cache layers as they are behind it, with two rows. Modules of latent attention cache latents
    from now on (`keep_latents`).

    Raises:
        NotImplementedError: a layer that attends to everything cannot be taken over; says why.
    """
    use_offload_attention(stock)
    keep_latents(stock, OFFLOAD)
    recorder = _Recorder(stock.config)
    ids = torch.tensor([[1, 2, 3]] * 2, device=stock.device)
    with torch.no_grad(), taking(recorder.record):
        stock(input_ids=ids, past_key_values=recorder, use_cache=True)
    specs: dict[int, AttentionSpec] = {}
    for layer_idx, reason in sorted(recorder.reasons.items()):
        layer = recorder.layers[layer_idx]
        if getattr(layer, "is_sliding", False):
            continue
        if type(layer) not in _TAKEN_CLASSES:
            reason = f"its cache layer is a {type(layer).__name__}"
        if reason:
            raise NotImplementedError(f"layer {layer_idx} cannot be taken over: {reason}")
        specs[layer_idx] = recorder.specs[layer_idx]
    return specs, recorder.layers
