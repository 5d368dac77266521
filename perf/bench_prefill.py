"""Where a prefill's time goes: `python -m perf.bench_prefill`, under a minute on an H200.

    attention  one layer's attention by every function of torch that could do it
    layers     a few layers of the model, ours by cuDNN and by FLASH (on a CPU: by our own kernels
               and by torch's), and transformers
    index      LycheeCluster's index of a layer, on a device that does nothing else

It writes no results: it is there to choose by. With `--profile` the kernels of the layers follow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cpu_ops.worker_pool import WorkerPool
from offload.bench.decode.models import lean_model, synchronize
from offload.bench.decode.peers.transformers_decode import prefill_seconds
from offload.bench.made.random_model import random_model
from offload.models.shape import MODEL_SHAPES
from offload.policies.base import BuildContext
from offload.policies.registry import make_policy
from offload.prefill import attention as prefill_attention
from offload.prefill.forward import prefill
from perf.gpu_steps import one_prompt
from perf.gpu_timing import print_kernels

PARTS = ("attention", "layers", "index")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [heads, n, head_dim] each
# No slice has so many queries: FLASH takes all of them.
_only_flash = partial(patch.object, prefill_attention, "_CUDNN_QUERIES", 1 << 62)


def main(arguments: list[str] | None = None) -> int:
    """Print the chosen parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        self.options = options
        self.device = torch.device(options.device)
        self.whole_shape = MODEL_SHAPES[options.shape]
        self.shape = replace(self.whole_shape, num_layers=options.layers)
        self.pool = None if self.device.type == "cuda" else WorkerPool(torch.get_num_threads())

    def attention(self) -> None:
        """Milliseconds of a layer, seconds of the first call, and the error against float32."""
        shape, n = self.shape, self.options.tokens
        heads = (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (self.random(n, count, shape.head_dim).transpose(0, 1) for count in heads)
        operations = 2 * n * n * shape.num_qo_heads * shape.head_dim
        last = slice(max(0, n - 64), n)
        mask = torch.ones(n - last.start, n, device=self.device).tril(last.start).bool()
        with sdpa_kernel(SDPBackend.MATH):
            queries, keys, values = (x[None].float() for x in (q[:, last], k, v))
            expected = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=True
            )[0]
        for name, attention in self._attentions().items():
            try:
                first, seconds = self.seconds(partial(attention, q, k, v))
                off = attention(q, k, v)[:, last].float() - expected
            except RuntimeError as error:
                print(f"{name:32} {str(error).splitlines()[0][:100]}", flush=True)
                continue
            print(
                f"{name:32} {1e3 * seconds:9.3f} ms {operations / seconds / 1e12:7.1f} TFLOP/s,"
                f" first call {first:.2f} s, error {off.norm() / expected.norm():.1e}",
                flush=True,
            )

    def _attentions(self) -> dict[str, Attention]:
        """What there is on this device."""

        def sliced(q: Tensor, k: Tensor, v: Tensor, pool: WorkerPool | None = None) -> Tensor:
            o = torch.empty_like(q)
            for start in range(0, q.shape[1], self.options.slice_tokens):
                stop = min(start + self.options.slice_tokens, q.shape[1])
                new = k[:, :stop], v[:, :stop]
                queries, sm_scale = q[:, start:stop], q.shape[2] ** -0.5
                attended = prefill_attention.attend(queries, None, new, sm_scale, pool)
                o[:, start:stop] = attended.transpose(0, 1)
            return o

        def public(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )[0]

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            operands = (x[None] for x in (q, k, v))
            o: Tensor
            o, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*operands, 0.0, True, False)
            return o[0]

        def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o: Tensor
            o, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *(x[None] for x in (q, k, v)), None, True, 0.0, True
            )
            return o[0]

        found: dict[str, Attention] = {
            "slices, as chosen": partial(sliced, pool=self.pool),
            "whole, public function": public,
        }
        if self.device.type == "cpu":
            found |= {"slices, torch": sliced}
        if self.device.type == "cuda":
            found |= {"slices, FLASH": _only_flash()(sliced), "whole, FLASH": flash}
            found |= {"whole, cuDNN": cudnn}
        return found

    def layers(self) -> None:
        """Milliseconds of all layers, from those of a few."""
        num_tokens = self.options.tokens
        stock = random_model(self.shape, device=self.device, dtype=torch.bfloat16)
        lean = lean_model(stock)
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        tokens.random_(self.shape.vocab_size)
        batch = one_prompt(num_tokens, self.device)

        def ours(pool: WorkerPool | None = self.pool) -> None:
            prefill(
                lean,
                lean.embed_tokens(tokens),
                batch,
                store=None,
                seqs=[],
                slice_tokens=self.options.slice_tokens,
                pool=pool,
            )

        on_gpu = self.device.type == "cuda"
        other = (
            {"ours, FLASH": _only_flash()(ours)} if on_gpu else {"ours, torch": partial(ours, None)}
        )
        theirs = partial(prefill_seconds, stock, num_tokens=num_tokens)
        runs: dict[str, Callable[[], object]] = {"ours": ours, **other, "transformers": theirs}
        few, all_layers = self.shape.num_layers, self.whole_shape.num_layers
        for name, run in runs.items():
            first, seconds = self.seconds(run)
            print(
                f"{name:32} {1e3 * seconds:9.3f} ms of {few} layers,"
                f" {1e3 * seconds * all_layers / few:9.1f} ms of {all_layers},"
                f" first call {first:.2f} s",
                flush=True,
            )
            if self.options.profile:
                self.print_kernels(run)

    def index(self) -> None:
        """Milliseconds of the device and of the host, and the kernels, of a layer."""
        policy = make_policy("lychee_cluster", budget_tokens=1024)
        pool = WorkerPool(1)
        for num_tokens in (self.options.tokens, 4 * self.options.tokens):
            keys = self.random(num_tokens, self.shape.num_kv_heads, self.shape.head_dim)
            keys = keys.transpose(0, 1)
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
            build = partial(policy.build_on_device, context)
            _, seconds = self.seconds(build)
            start = time.perf_counter()
            finish = build()
            queued = time.perf_counter() - start
            synchronize(self.device)
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
            self.print_kernels(build)
        pool.close()

    def random(self, *shape: int) -> Tensor:
        """Normally distributed values on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def seconds(self, run: Callable[[], object]) -> tuple[float, float]:
        """(of the first call, the least of the repeats)."""
        found = []
        for _ in range(1 + self.options.repeats):
            synchronize(self.device)
            start = time.perf_counter()
            run()
            synchronize(self.device)
            found.append(time.perf_counter() - start)
        return found[0], min(found[1:])

    def print_kernels(self, run: Callable[[], object]) -> None:
        """The kernels that take the most time, on a GPU."""
        if self.device.type == "cuda":
            print_kernels([run])


if __name__ == "__main__":
    sys.exit(main())
