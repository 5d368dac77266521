"""Tiny models on every backend that this machine has."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.flag_handshake import make_flag_handshake
from cases.inside import decoder_of, least_placement_of
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.policies import Policy
from offload.policies.registry import make_policy

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
NATIVE = pytest.param(("cpu", None), id="native")
INLINE = pytest.param(("cpu", "inline"), id="inline")
SLOW_INLINE = pytest.param(*INLINE.values, id="inline", marks=pytest.mark.slow)
# The graph backend's code, but a thread plays the GPU.
FLAGS = pytest.param(("cpu", "flags"), id="flags")
STREAM = pytest.param(("cuda", "stream"), id="stream", marks=[pytest.mark.cuda, NO_GPU])
GRAPH = pytest.param(("cuda", "graph"), id="graph", marks=[pytest.mark.cuda, NO_GPU])


def each_of(*params: Any, scope: Any = "module") -> Any:
    """A fixture: each of these in turn."""

    @pytest.fixture(scope=scope, params=params)
    def param(request: pytest.FixtureRequest) -> Any:
        return request.param

    return param


def small(name: str, budget_tokens: int = 64) -> Policy:
    """A policy that selects from a tiny context."""
    options: dict[str, Any] = {"budget_tokens": budget_tokens, "sink_tokens": 4}
    if name != "streaming_llm":
        options["recent_tokens"] = 16
    if name == "tidal_decode":
        options["select_layers"] = (1,)
    if name == "per_head":
        options |= {"rest": "lfps", "retrieval": "full", "retrieval_heads": 1}
    if name == "hard_kv":
        options |= {"inner": "lfps", "top_p": 0.8}
    if name not in ("full", "lychee_decode", "streaming_llm"):
        options["dense_layers"] = 1
    return make_policy(name, **options)


def load(
    folder: Path, policy: Policy | str, device_and_backend: tuple[str, str | None], **options: Any
) -> Any:
    """A model whose heads are where its policy needs them: a GPU would hold all of a tiny one."""
    device, backend = device_and_backend
    model = OffloadedModel.from_pretrained(
        folder,
        policy=policy,
        dtype="float32",
        device=device,
        backend="inline" if backend == "flags" else backend,
        **{"num_threads": 2, "page_tokens": 16, "prefill_slice_tokens": 64, **options},
    )
    if "placement" not in options:
        keep_least_on_gpu(model)
    if backend == "flags":
        decoder_of(model).captured.make_gpu_sync = make_flag_handshake
    return model


def load_in_room(folder: Path, policy: Policy | str, room_bytes: int | None) -> Any:
    """On the CPU, with so many bytes for KV and what the policy keeps, beside the weights."""
    options: dict[str, Any] = {"policy": policy, "dtype": "float32", "num_threads": 1}
    model = OffloadedModel.from_pretrained(folder, page_tokens=16, **options)
    if room_bytes is None:
        return model
    weights = sum({weight.data_ptr(): weight.nbytes for weight in model.parameters()}.values())
    options["max_memory"] = {"cpu": weights + room_bytes}
    return OffloadedModel.from_pretrained(folder, page_tokens=16, **options)


def keep_least_on_gpu(model: Any) -> None:
    """Keep only the heads on the GPU that the policy needs there."""
    decoder = decoder_of(model)
    if model.device.type == "cuda":
        decoder.placed.choose = None
        decoder.place(least_placement_of(model))


def greedy(model: Any, tokens: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
    tokens = tokens.to(model.device)
    options = {
        key: x.to(model.device) if isinstance(x, torch.Tensor) else x for key, x in options.items()
    }
    out = model.generate(
        tokens,
        **{"do_sample": False, "eos_token_id": None, "max_new_tokens": max_new_tokens, **options},
    )
    return out.cpu()


def steps(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [rows, n, vocab_size] of each column of `tokens`, decoded one by one."""
    columns = tokens.split(1, dim=1)
    return torch.cat([model(x, past_key_values=cache).logits for x in columns], dim=1)


def check_works(model: Any, stock: Any, prompt_tokens: int = 40) -> None:
    """The stock tokens, and nothing left behind."""
    tokens = random_tokens(1, prompt_tokens, seed=5)
    assert torch.equal(greedy(model, tokens, 12), greedy(stock, tokens, 12))
    gc.collect()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0
