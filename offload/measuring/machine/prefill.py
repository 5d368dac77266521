"""Measures how fast a prompt is read: products by tokens, attention by pairs of tokens.

Both by the code that reads prompts (`offload.prefill.forward`), of layers with random weights: some
of the model's shape for its products, and one with its heads but few products for attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace

import torch

from cpu_ops.worker_pool import WorkerPool
from offload.loading.huge_pages import move_to_huge_pages
from offload.measuring.machine.spread import Spread
from offload.measuring.synthetic.random_model import random_model
from offload.models import LeanModel, lean_model_maker
from offload.models.batch import pack
from offload.models.shape import ModelShape, layer_elements
from offload.planning.prefill_time import prefill_key
from offload.planning.profile import MachineProfile
from offload.prefill.forward import prefill
from offload.system.autocast import without_autocast
from offload.system.memory import host_memory_limit_bytes
from offload.system.torch_threads import torch_threads

_LAYERS = {"cpu": 2, "cuda": 8}
_ROWS = {"cpu": 512, "cuda": 8192}
_LENGTHS = {"cpu": (1024, 4096), "cuda": (8192, 32768)}
_FEW_TOKENS = 64  # take as long as launching a layer does, whatever it computes
_NARROW = 32  # of hidden states, for each query head, where attention is all that counts
_SLICE_TOKENS = 8192
_REPEATS, _SECONDS = 5, 4.0  # of one figure: it ends with the repeat in which these are over
_FEWEST = 3


def with_prefill(
    profile: MachineProfile, device: torch.device, shape: ModelShape, dtype: torch.dtype
) -> tuple[MachineProfile, float]:
    """`profile` with what prompts of such a model take on `device`, and how far the timings spread
    (`Spread.most`). It takes some seconds; the same profile and 0 where it has that, or where there
    is no memory for the layers."""
    key = prefill_key(device, shape, dtype)
    if key in profile.prefill_token_us:
        return profile, 0.0
    spread = Spread()
    measured = _measure(device, shape, dtype, profile.num_threads, spread)
    if measured is None:
        return profile, 0.0
    token_us, pair_us, least_us = measured
    changed = replace(
        profile,
        prefill_token_us={**profile.prefill_token_us, key: token_us},
        prefill_pair_us={**profile.prefill_pair_us, key: pair_us},
        prefill_least_us={**profile.prefill_least_us, key: least_us},
    )
    return changed, spread.most


def _measure(
    device: torch.device, shape: ModelShape, dtype: torch.dtype, num_threads: int, spread: Spread
) -> tuple[float, float, float] | None:
    """Microseconds of a layer: by token, by pair of a token and one it attends to, at least."""
    shape, layers = shape.of_a_token, _LAYERS[device.type]
    of_layers = 2 * layers * layer_elements(shape) * dtype.itemsize  # twice while they move
    free = (
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory_limit_bytes()
    )
    rows, lengths = _ROWS[device.type], _LENGTHS[device.type]
    of_rows = 8 * rows * (shape.intermediate_size + shape.qkv_width) * dtype.itemsize
    of_keys = 16 * lengths[-1] * shape.qkv_width * dtype.itemsize
    if of_layers + of_rows + of_keys > free:
        return None
    few = replace(shape, vocab_size=64, rope_theta=10_000.0, max_context=lengths[-1])
    width = _NARROW * shape.num_qo_heads
    narrow = replace(few, num_layers=1, hidden_size=width, intermediate_size=width)
    with closing(WorkerPool(num_threads)) as pool, torch_threads(num_threads):
        fixed, short, long = _prefill_us(
            narrow, device, dtype, (_FEW_TOKENS, *lengths), pool, spread
        )
        first, last = lengths
        by_token = max(0.0, short - fixed) / first, max(0.0, long - fixed) / last
        pair_us = max(0.0, (by_token[1] - by_token[0]) / (last - first) * 2)
        whole = replace(few, num_layers=layers)
        least, us = _prefill_us(whole, device, dtype, (_FEW_TOKENS, rows), pool, spread)
    return max(0.0, us / layers / rows - pair_us * rows / 2), pair_us, least / layers


def _prefill_us(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int],
    pool: WorkerPool,
    spread: Spread,
) -> list[float]:
    """Times of prompts of these lengths in a model of such a shape: the least, since whatever else
    runs only adds to them, and the difference of two must not be its."""
    is_cpu = device.type == "cpu"
    stock = random_model(shape, device=device, dtype=dtype, seed=None if is_cpu else 0)
    if is_cpu:
        move_to_huge_pages(stock)
    lean = lean_model_maker(stock.config.model_type)(stock)
    least = []
    for length in lengths:
        times = _repeated(_prompt(lean, device, dtype, length, pool))
        if length > _FEW_TOKENS:
            spread.median(times)
        least.append(1e6 * min(times))
    return least


def _prompt(
    lean: LeanModel, device: torch.device, dtype: torch.dtype, length: int, pool: WorkerPool
) -> Callable[[], None]:
    batch = pack((1, length), None, torch.arange(length)[None])
    embedded = torch.randn(length, lean.shape.hidden_size, device=device).to(dtype)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def read() -> None:
        with torch.inference_mode(), on_device, without_autocast(device):
            prefill(
                lean,
                embedded.clone(),
                batch,
                store=None,
                seqs=[],
                slice_tokens=_SLICE_TOKENS,
                pool=pool if device.type == "cpu" else None,
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    return read


def _repeated(call: Callable[[], None]) -> list[float]:
    """Seconds of each call but the first one, which also loads code."""
    call()
    times: list[float] = []
    while len(times) < _FEWEST or (len(times) < _REPEATS and sum(times) < _SECONDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
