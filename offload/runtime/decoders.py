"""Which decoder runs a model: native kernels without a GPU, the pipeline with one."""

from __future__ import annotations

import functools
import logging

import torch

from offload.decode.cpu import NativeDecoder
from offload.decode.decoder import Decoder
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.runtime.budgets import device_kv_budget_bytes
from offload.runtime.config import RuntimeConfig, check_backend
from offload.system.memory import worker_threads

from gpu_ops.flags import why_no_flags

logger = logging.getLogger(__name__)


def choose_backend(backend: str | None, device: torch.device) -> str:
    """The backend to use; `backend` None chooses the fastest that the device can do."""
    if backend is not None:
        check_backend(backend, device)
    if device.type == "cpu" or backend == "stream":
        return backend or "inline"
    reason = why_no_flags(device)
    if reason is None:
        return "graph"
    _say_once(f"{reason}: using backend='stream', which is slower")
    return "stream"


@functools.cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)


logger = logging.getLogger(__name__)


def _make_decoder(
    lean: LeanModel, store: KVStore, config: RuntimeConfig, weight_bytes: int
) -> Decoder:
    """Native kernels without a GPU; with one, or for backend="inline", the GPU's step."""
    device = torch.device(config.device)
    num_threads = worker_threads(
        config.num_threads,
        with_gpu=device.type == "cuda",
        num_cpus=None if lean.ranks is None else lean.ranks.num_cpus,
    )
    if device.type == "cpu" and config.backend is None:
        return NativeDecoder(lean, store, config.policy, num_threads)
    from offload.decode.gpu.decoder import DeviceDecoder
    from offload.runtime.placing import placement_for

    return DeviceDecoder(
        lean,
        store,
        config.policy,
        device=device,
        backend=decode_backend(lean, config.backend, device),
        num_threads=num_threads,
        deadline_seconds=config.deadline_seconds,
        device_budget_bytes=device_kv_budget_bytes(config, weight_bytes),
        placement=placement_for(config, lean, store, weight_bytes),
        keeps_placement=config.placement is not None,
    )


def decode_backend(lean: LeanModel, backend: str | None, device: torch.device) -> str:
    """`handshake.choose_backend` for a model.

    Raises:
        NotImplementedError: a graph of a model whose rotary embedding it cannot capture.
    """
    from offload.runtime.decoders import choose_backend

    chosen = choose_backend(backend, device)
    rope_type = getattr(lean.rotary_emb, "rope_type", "default")
    # Their frequencies follow the longest position: Python looks at that in every step.
    if chosen != "graph" or not ("dynamic" in rope_type or rope_type == "longrope"):
        return chosen
    reason = f"the model's rope_type={rope_type!r} cannot be captured in a CUDA graph"
    if backend == "graph":
        raise NotImplementedError(f"backend='graph': {reason}; use backend='stream'")
    logger.warning("%s: using backend='stream', which is slower", reason)
    return "stream"
