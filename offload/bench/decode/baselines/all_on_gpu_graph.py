"""The bar: the same layers with all of the KV on the GPU, a token as one CUDA graph.

What a good engine does whose GPU holds the context: the linear layers and kernels of our own decode
step, attention over contiguous keys and values, and the choice of the token, all captured once.
Attention is the fastest that torch and we have for the shape, found by trying
(`fastest_attention`). A layer with a window has a ring of as many tokens.

Every step computes the token at position kv_len - 1 anew, over `kv_len` keys with its own among
them. An engine whose lengths grow would have to do a little more.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_ops.launch import _num_multiprocessors
from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import num_kv_splits, retrieval_attention
from gpu_ops.rope_publish import rope_publish
from offload.decode.gpu.linear import DeviceWeights, linear_path
from offload.decode.sampling import TokenChooser
from offload.models import LeanModel

WARM_UP_STEPS = 3
Attention = Callable[[], Tensor]  # [n, num_qo_heads * head_dim], of a query and a cache


class AllOnGPU:
    """Decodes `batch_size` sequences of `kv_len` random tokens, their KV on the model's device.

    Without a GPU (tests) steps run as they are, not captured.

    Attributes:
        attention_name: which attention was the fastest, in layers without and in those with a
            window.
        caches: of each layer [batch_size, 2, num_kv_heads, tokens, head_dim]; of a layer with a
            window the last tokens alone, token p at p % window.
        tokens: int64 [batch_size], the last ones chosen.
    """

    def __init__(self, lean: LeanModel, *, kv_len: int, batch_size: int = 1) -> None:
        shape = lean.shape
        self._lean, self._kv_len = lean, kv_len
        self._device, dtype = lean.lm_head.device, lean.lm_head.dtype
        self._weights = DeviceWeights.of(lean)
        self._linears = linear_path(self._weights, batch_size)
        self._chooser = TokenChooser(batch_size, lean.lm_head.out_features, self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        kv_lens = [min(window or kv_len, kv_len) for window in lean.each("window")]
        self.caches = [
            torch.empty(
                batch_size,
                2,
                shape.num_kv_heads,
                num_tokens,
                shape.head_dim,
                dtype=dtype,
                device=self._device,
            ).normal_(generator=generator)
            for num_tokens in kv_lens
        ]
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=self._device)
        self._positions = torch.full_like(self.tokens, kv_len - 1)
        self._query = torch.empty(
            batch_size, shape.num_qo_heads * shape.head_dim, dtype=dtype, device=self._device
        )
        self._query.normal_(generator=generator)
        names: dict[int, str] = {}
        self._attend: list[Attention] = []
        for layer, cache in zip(lean.layers, self.caches, strict=True):
            num_tokens, scale = cache.shape[3], layer.spec.sm_scale
            attentions = attentions_over(self._query, cache, scale, layer.sinks)
            if num_tokens not in names:
                names[num_tokens] = fastest_attention(attentions)
            self._attend.append(attentions[names[num_tokens]])
        self.attention_name = "; in windows ".join(
            names[num_tokens] for num_tokens in sorted(names, reverse=True)
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._graph = self._captured()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV caches of all sequences."""
        return sum(cache.nbytes for cache in self.caches)

    def decode_seconds(self, num_steps: int) -> list[float]:
        """Seconds of each step, all queued at once."""
        if self._graph is None:
            seconds = []
            for _ in range(num_steps):
                start = time.perf_counter()
                self.step()
                seconds.append(time.perf_counter() - start)
            return seconds
        events = [_event() for _ in range(num_steps + 1)]
        for _ in range(WARM_UP_STEPS):
            self._graph.replay()
        events[0].record()
        for event in events[1:]:
            self._graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]

    @torch.inference_mode()
    def step(self) -> Tensor:
        """One token of every sequence; returns the logits [batch_size, vocab_size]."""
        lean, shape = self._lean, self._lean.shape
        x: Tensor = lean.embed_tokens(self.tokens)
        tables = [rope(x, self._positions[None]) for rope in lean.ropes]
        tables = [(cos[0].contiguous(), sin[0].contiguous()) for cos, sin in tables]
        linears, layers = self._linears, self._weights.layers
        for layer, cache, attend in zip(layers, self.caches, self._attend, strict=True):
            is_ring = cache.shape[3] < self._kv_len
            rope_publish(
                linears.qkv(layer, x),
                *tables[layer.rope_idx],
                self._positions,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                q_norm=None if layer.norms_all_heads else layer.q_norm,
                k_norm=None if layer.norms_all_heads else layer.k_norm,
                norm_eps=layer.qk_norm_eps,
                query=self._query,
                window=cache,
                sink_tokens=0 if is_ring else cache.shape[3],  # these are at their own index
            )
            linears.add_attention(layer, x, attend())
            linears.add_mlp(layer, x)
        linears.finish(x)
        logits = linears.logits(self._weights, x)
        self.tokens.copy_(self._chooser.choose(logits))
        return logits

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()  # compiles kernels and makes the libraries' handles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.step()
        return graph


def fastest_attention(attentions: Mapping[str, Attention]) -> str:
    """The name of the fastest on a GPU; without one of the first."""
    if not torch.cuda.is_available():
        return next(iter(attentions))
    times: dict[str, float] = {}
    for name, attend in attentions.items():
        try:
            times[name] = _milliseconds(attend)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a backend that does not take the shape says so
            continue
    return min(times, key=lambda key: times[key])


def attentions_over(
    query: Tensor, cache: Tensor, sm_scale: float, sinks: Tensor | None = None
) -> dict[str, Attention]:
    """Torch's and our own that can attend with `query` to all of `cache`, by name.

    Args:
        query: [n, num_qo_heads * head_dim].
        cache: [n, 2, num_kv_heads, num_tokens, head_dim].
        sinks: float32 [num_qo_heads], logits that join each softmax and have no value; or None.
    """
    found: dict[str, Attention] = {}
    if sinks is not None:
        found["flash_attention, then sinks"] = partial(
            _with_sinks, query, cache, sm_scale=sm_scale, sinks=sinks
        )
    else:
        found["default"] = partial(_sdpa, query, cache, sm_scale=sm_scale)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            for groups in (False, True):
                name = backend.name.lower() + (", group as queries" if groups else "")
                found[name] = partial(
                    _sdpa, query, cache, sm_scale=sm_scale, backend=backend, groups=groups
                )
    num_tokens = cache.shape[3]
    if num_tokens >= 64 and num_tokens & (num_tokens - 1) == 0:  # a size that pages may have
        found["ours"] = _of_one_page(query, cache, sm_scale, sinks)
    return found


def _of_one_page(query: Tensor, cache: Tensor, sm_scale: float, sinks: Tensor | None) -> Attention:
    """Our kernel, for which each row of `cache` is a page."""
    n, _, num_kv_heads, num_tokens, head_dim = cache.shape
    device, num_qo_heads = query.device, query.shape[1] // head_dim
    splits = 1
    if query.is_cuda:
        splits = num_kv_splits(num_kv_heads, _num_multiprocessors(device))
    partial_out = torch.empty(n, num_qo_heads, splits, head_dim, device=device)
    partial_lse, out = partial_out[..., 0].contiguous(), torch.empty_like(query)
    pages = torch.tensor([[row.data_ptr()] for row in cache], device=device)
    last = torch.full((n,), num_tokens - 1, device=device)

    def attend() -> Tensor:
        retrieval_attention(
            query,
            pages,
            last,
            None,
            group_size=num_qo_heads // num_kv_heads,
            page_tokens=num_tokens,
            sm_scale=sm_scale,
            partial_out=partial_out,
            partial_lse=partial_lse,
            out=out,
            sinks=sinks,
        )
        return out

    return attend


def _sdpa(
    query: Tensor,
    cache: Tensor,
    *,
    sm_scale: float,
    backend: SDPBackend | None = None,
    groups: bool = False,
) -> Tensor:
    """`groups`: query heads of a KV head are queries of one head; there is no mask to tell them."""
    n, _, num_kv_heads, _, head_dim = cache.shape
    heads = (num_kv_heads, -1) if groups else (query.shape[1] // head_dim, 1)
    chosen = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
    with chosen:
        out = functional.scaled_dot_product_attention(
            query.view(n, *heads, head_dim),
            cache[:, 0],
            cache[:, 1],
            scale=sm_scale,
            enable_gqa=not groups,
        )
    return out.reshape(query.shape)


def _with_sinks(query: Tensor, cache: Tensor, *, sm_scale: float, sinks: Tensor) -> Tensor:
    """Query heads of a KV head are queries of one head."""
    n, _, num_kv_heads, _, head_dim = cache.shape
    of_heads = query.view(n, num_kv_heads, -1, head_dim)
    aten = torch.ops.aten
    run: Any = aten._scaled_dot_product_flash_attention
    if not query.is_cuda:
        run = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = run(of_heads, cache[:, 0], cache[:, 1], 0.0, False, scale=sm_scale)
    parts = out.reshape(query.shape).float(), lse.reshape(n, -1).float()
    attended = torch.empty_like(query)
    nothing = torch.full_like(parts[1], -torch.inf)
    merge_state(*parts, parts[0], nothing, attended, sinks)
    return attended


def _milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(2):
        run()
    start, end = _event(), _event()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / repeats


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
