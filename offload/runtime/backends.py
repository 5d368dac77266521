"""How GPU and CPU wait for each other: the fastest way that the device and the model can do."""

from __future__ import annotations

import functools
import logging

import torch

from gpu_ops.flags import why_no_flags
from offload.models import LeanModel
from offload.models.rope import follows_length
from offload.runtime.config import check_backend

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


def decode_backend(lean: LeanModel, backend: str | None, device: torch.device) -> str:
    """`choose_backend` for a model.

    Raises:
        NotImplementedError: a graph of a model whose rotary embedding it cannot capture.
    """
    chosen = choose_backend(backend, device)
    rope_types = [getattr(rope, "rope_type", "default") for rope in lean.ropes]
    following = [*filter(follows_length, rope_types)]  # Python looks at these in every step
    if chosen != "graph" or not following:
        return chosen
    reason = f"the model's rope_type={following[0]!r} cannot be captured in a CUDA graph"
    if backend == "graph":
        raise NotImplementedError(f"backend='graph': {reason}; use backend='stream'")
    logger.warning("%s: using backend='stream', which is slower", reason)
    return "stream"
