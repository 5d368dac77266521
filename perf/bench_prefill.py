"""Where a prefill's time goes: `python -m perf.bench_prefill`, under a minute on an H200.

    attention  one layer's attention by every function of torch that could do it
    layers     a few layers of the model, ours by cuDNN and by FLASH, and transformers
    index      LycheeCluster's index of a layer, on a device that does nothing else

It writes no results: it is there to choose by. With `--profile` the kernels of the layers follow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cpu_ops.worker_pool import WorkerPool
from offload.bench.decode.peers.transformers_decode import prefill_seconds
from offload.bench.made.random_model import random_model
from offload.models import lean_model_maker
from offload.models.batch import pack
from offload.models.shape import MODEL_SHAPES, ModelShape
from offload.policies.base import BuildContext
from offload.policies.registry import make_policy
from offload.prefill import attention as prefill_attention
from offload.prefill.attention import attend
from offload.prefill.forward import prefill

PARTS = ("attention", "layers", "index")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
NEVER = 1 << 62


def main(arguments: list[str] | None = None) -> int:
    """Print the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--slice-tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; available: {', '.join(PARTS)}")
    bench = Bench(options)
    with torch.inference_mode():
        for part in options.parts:
            print(f"== {part}", flush=True)
            getattr(bench, part)()
    return 0


class Bench:
    """Settings of all parts: those of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16
        self.shape: ModelShape = replace(MODEL_SHAPES[options.shape], num_layers=options.layers)
        self.all_layers = MODEL_SHAPES[options.shape].num_layers
        self.num_tokens: int = options.tokens
        self.slice_tokens: int = options.slice_tokens
        self.repeats: int = options.repeats
        self.profile: bool = options.profile

    def attention(self) -> None:
        """Milliseconds of a layer, seconds of the first call, and the error against float32."""
        shape, n = self.shape, self.num_tokens
        q = self.random(n, shape.num_qo_heads, shape.head_dim)
        k, v = (self.random(n, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        operations = 2 * n * n * shape.num_qo_heads * shape.head_dim
        last = slice(max(0, n - 64), n)
        expected = _attention_of(q[last].float(), k.float(), v.float())
        for name, attention in self._attentions().items():
            try:
                first, seconds = self.seconds(lambda run=attention: run(q, k, v))
                off = attention(q, k, v)[last].float() - expected
            except RuntimeError as error:
                print(f"{name:32} {str(error).splitlines()[0][:100]}", flush=True)
                continue
            print(
                f"{name:32} {1e3 * seconds:9.3f} ms {operations / seconds / 1e12:7.1f} TFLOP/s,"
                f" first call {first:.2f} s, error {off.norm() / expected.norm():.1e}",
                flush=True,
            )

    def _attentions(self) -> dict[str, Attention]:
        """Functions of queries, keys and values [n, heads, head_dim]."""

        def sliced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = torch.empty_like(q)
            for start in range(0, len(q), self.slice_tokens):
                stop = min(start + self.slice_tokens, len(q))
                new = k[:stop].transpose(0, 1), v[:stop].transpose(0, 1)
                queries = q[start:stop].transpose(0, 1)
                o[start:stop] = attend(queries, None, new, q.shape[2] ** -0.5)
            return o

        def sliced_by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _cudnn_from(NEVER):
                return sliced(q, k, v)

        def public(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o[0].transpose(0, 1)

        found = {"slices, as chosen": sliced, "whole, public function": public}
        if self.device.type == "cuda":
            found |= {"slices, FLASH": sliced_by_flash, "whole, FLASH": _whole_by_flash}
            found |= {
                "whole, cuDNN": lambda q, k, v: _whole_by_cudnn(q, k, v),
                "whole, cuDNN, heads first": lambda q, k, v: _whole_by_cudnn(
                    *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
                ),
                "whole, cuDNN, KV repeated": lambda q, k, v: _whole_by_cudnn(
                    q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
                ),
            }
        return found

    def layers(self) -> None:
        """Milliseconds of all layers, from those of a few."""
        stock = random_model(self.shape, device=self.device, dtype=self.dtype)
        lean = lean_model_maker(stock.config.model_type)(stock)
        tokens = torch.zeros(self.num_tokens, dtype=torch.int64, device=self.device)
        tokens.random_(self.shape.vocab_size)
        batch = pack((1, self.num_tokens), None, torch.arange(self.num_tokens)[None])
        batch = replace(batch, position_ids=batch.position_ids.to(self.device))

        def ours() -> None:
            hidden = lean.embed_tokens(tokens)
            prefill(lean, hidden, batch, store=None, seqs=[], slice_tokens=self.slice_tokens)

        def by_flash() -> None:
            with _cudnn_from(NEVER):
                ours()

        def theirs() -> None:
            prefill_seconds(stock, num_tokens=self.num_tokens)

        for name, run in {"ours": ours, "ours, FLASH": by_flash, "transformers": theirs}.items():
            first, seconds = self.seconds(run)
            whole = 1e3 * seconds * self.all_layers / self.shape.num_layers
            print(
                f"{name:32} {1e3 * seconds:9.3f} ms of {self.shape.num_layers} layers,"
                f" {whole:9.1f} ms of {self.all_layers}, first call {first:.2f} s",
                flush=True,
            )
            if self.profile:
                self.print_kernels(run)

    def index(self) -> None:
        """Milliseconds of the device and of the host, and the kernels, of a layer."""
        policy = make_policy("lychee_cluster", budget_tokens=1024)
        pool = WorkerPool(1)
        shape = self.shape
        for num_tokens in (self.num_tokens, 4 * self.num_tokens):
            keys = self.random(num_tokens, shape.num_kv_heads, shape.head_dim).transpose(0, 1)
            context = BuildContext(
                layer_idx=2,
                keys=keys,
                values=keys,
                queries=keys[:, :0],
                sm_scale=1.0,
                capacity_tokens=num_tokens,
                text_marks=None,
                pool=pool,
            )
            _, seconds = self.seconds(lambda context=context: policy.build_on_device(context))
            start = time.perf_counter()
            finish = policy.build_on_device(context)
            queued = time.perf_counter() - start
            self.synchronize()
            assert finish is not None
            finish()
            start = time.perf_counter()
            finish()
            packed = time.perf_counter() - start
            print(
                f"{num_tokens:9,} tokens: {1e3 * seconds:8.3f} ms, of which the host queues for"
                f" {1e3 * queued:.3f} ms; packing {1e3 * packed:.3f} ms",
                flush=True,
            )
            self.print_kernels(lambda context=context: policy.build_on_device(context))
        pool.close()

    def random(self, *shape: int) -> Tensor:
        """Normally distributed values on the device."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> tuple[float, float]:
        """(of the first call, the least of the repeats)."""
        found = []
        for _ in range(1 + self.repeats):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            found.append(time.perf_counter() - start)
        return found[0], min(found[1:])

    def print_kernels(self, run: Callable[[], object], rows: int = 12) -> None:
        """The kernels that take longest, on a GPU."""
        if self.device.type != "cuda":
            return
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
            self.synchronize()
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(event.self_device_time_total for event in events)
        count = sum(event.count for event in events)
        print(f"    {total / 1e3:9.3f} ms in {count} kernels and copies")
        for event in events[:rows]:
            milliseconds = event.self_device_time_total / 1e3
            print(f"    {milliseconds:9.3f} ms {event.count:6} x {event.key[:90]}")


def _whole_by_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    operands = (x[None].transpose(1, 2) for x in (q, k, v))
    o, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands, 0.0, True, False)
    return o[0].transpose(0, 1)


def _whole_by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    operands = (x[None].transpose(1, 2) for x in (q, k, v))
    o, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*operands, None, True, 0.0, True)
    return o[0].transpose(0, 1)


def _attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last queries [n, heads, head_dim] over all keys, by a softmax."""
    n, group_size = len(q), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], device=q.device).triu(1 + k.shape[1] - n).bool()
    return (scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@contextmanager
def _cudnn_from(num_queries: int) -> Iterator[None]:
    """cuDNN only for slices of so many queries."""
    before = prefill_attention._CUDNN_QUERIES
    prefill_attention._CUDNN_QUERIES = num_queries
    try:
        yield
    finally:
        prefill_attention._CUDNN_QUERIES = before


if __name__ == "__main__":
    sys.exit(main())
