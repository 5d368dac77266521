"""What a run of `offload bench pipeline` is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.decode.gpu.placement import HeadPlacement
from offload.policies import Policy
from offload.system.memory import worker_threads


@dataclass(frozen=True)
class PipelineSettings:
    """What is decoded, and how.

    Attributes:
        shape: a name of `MODEL_SHAPES`.
        num_steps: decode steps that caches are made for.
        num_threads: of the worker pool; None: see `worker_threads`.
        distinct_layers: see `structured_model_cache`.
        host_work: "attend"; or "none", a step without attention on the host and without the
            handshake for it: what remains when both cost nothing.
        num_parts: parts that a batch is cut into, which take turns.
        placement: of KV heads, where a GPU decodes; None: as `DeviceDecoder` has it.
        as_shipped: steps come as a model's own do: without a `placement` as many heads are on the
            GPU as fit, and several steps at once where all are. Else each step is for itself.
        device_bytes: of the GPU for weights and KV cache; None: all.
    """

    shape: str
    kv_len: int
    policy: Policy
    backend: str
    batch_size: int = 1
    num_steps: int = 64
    num_threads: int | None = None
    dtype: torch.dtype = torch.bfloat16
    distinct_layers: int | None = None
    seed: int = 0
    host_work: str = "attend"
    num_parts: int = 1
    placement: HeadPlacement | None = None
    as_shipped: bool = False
    device_bytes: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device("cpu" if self.backend == "inline" else "cuda")

    @property
    def worker_threads(self) -> int:
        """Of the worker pool."""
        return worker_threads(self.num_threads, with_gpu=self.device.type == "cuda")
