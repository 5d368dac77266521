"""The bar: the same layers with all of the KV on the GPU, a token as one CUDA graph.

What a good engine does whose GPU holds the context: the linear layers and kernels of our own decode
step, torch's attention over contiguous keys and values, and the choice of the token, all captured
once. Attention is the fastest that torch has for the
shape, found by trying (`fastest_attention`).

Every step computes the token at position kv_len - 1 anew, over `kv_len` keys with its own among
them. An engine whose lengths grow would have to do a little more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_ops.rope_publish import rope_publish
from offload.decode.gpu.linear import DeviceWeights, linear_path
from offload.decode.sampling import TokenChooser
from offload.models import LeanModel

WARM_UP_STEPS = 3
# (query [n, num_qo_heads * head_dim], cache [n, 2, num_kv_heads, kv_len, head_dim]) -> like query
Attention = Callable[[Tensor, Tensor], Tensor]


class AllOnGPU:
    """Decodes `batch_size` sequences of `kv_len` random tokens, their KV on the model's device.

    Without a GPU (tests) steps run as they are, not captured.

    Attributes:
        attention_name: which of torch's attentions was the fastest.
        caches: of each layer [batch_size, 2, num_kv_heads, kv_len, head_dim].
        tokens: int64 [batch_size], the last ones chosen.
    """

    def __init__(self, lean: LeanModel, *, kv_len: int, batch_size: int = 1) -> None:
        shape = lean.shape
        self._lean = lean
        self._device, dtype = lean.lm_head.device, lean.lm_head.dtype
        self._weights = DeviceWeights.of(lean)
        self._linears = linear_path(self._weights, batch_size)
        self._chooser = TokenChooser(batch_size, lean.lm_head.out_features, self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        cache_shape = (batch_size, 2, shape.num_kv_heads, kv_len, shape.head_dim)
        self.caches = [
            torch.empty(cache_shape, dtype=dtype, device=self._device).normal_(generator=generator)
            for _ in lean.layers
        ]
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=self._device)
        self._positions = torch.full_like(self.tokens, kv_len - 1)
        self._query = torch.empty(
            batch_size, shape.num_qo_heads * shape.head_dim, dtype=dtype, device=self._device
        )
        self.attention_name, self._attend = fastest_attention(
            self._query.normal_(generator=generator), self.caches[0], lean.sm_scale
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
        cos, sin = (t[0].contiguous() for t in lean.rotary_emb(x, self._positions[None]))
        linears = self._linears
        for layer, cache in zip(self._weights.layers, self.caches, strict=True):
            rope_publish(
                linears.qkv(layer, x),
                cos,
                sin,
                self._positions,
                num_kv_heads=shape.num_kv_heads,
                query=self._query,
                window=cache,  # token p at index p, all of them
                sink_tokens=cache.shape[3],
            )
            linears.add_attention(layer, x, self._attend(self._query, cache))
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


def fastest_attention(query: Tensor, cache: Tensor, sm_scale: float) -> tuple[str, Attention]:
    """The fastest of torch's attentions for these tensors, and its name; on a CPU the first."""
    candidates = _attentions(sm_scale)
    if not query.is_cuda:
        name = next(iter(candidates))
        return name, candidates[name]
    times: dict[str, float] = {}
    for name, attend in candidates.items():
        try:
            times[name] = _milliseconds(functools.partial(attend, query, cache))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a backend that does not take the shape says so
            continue
    name = min(times, key=lambda key: times[key])
    return name, candidates[name]


def _attentions(sm_scale: float) -> dict[str, Attention]:
    candidates: dict[str, Attention] = {"default": functools.partial(_sdpa, sm_scale=sm_scale)}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for groups in (False, True):
            name = backend.name.lower() + (", group as queries" if groups else "")
            candidates[name] = functools.partial(
                _sdpa, sm_scale=sm_scale, backend=backend, groups=groups
            )
    return candidates


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
