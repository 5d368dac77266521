"""Long-context LLM decoding whose KV cache lives in host memory.

>>> from offload import OffloadedModel
>>> model = OffloadedModel.from_pretrained("smollm2-135m-instruct", policy="exact_topk")

The public names below are imported when they are first used: importing `offload` alone is cheap.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.system.version import __version__

# Threads of torch's OpenMP (GNU's) spin for milliseconds behind every operator, on CPUs that ours
# need: `offload serve` took 19.3 s to read 4,000 tokens on two, and 14.9 s with this. It has to be
# there when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from offload.engine.async_engine import AsyncEngine
    from offload.engine.engine import Engine, QueueFullError
    from offload.engine.request import RequestOutput
    from offload.engine.sampling_params import SamplingParams
    from offload.kv.store import HostBudgetError, KVStore
    from offload.loading.names import load_tokenizer
    from offload.policies import ExactTopK, Full, Policy, StreamingLLM
    from offload.policies.registry import available_policies, make_policy
    from offload.runtime.cache import OffloadedCache
    from offload.runtime.config import RuntimeConfig
    from offload.runtime.model import OffloadedModel
    from offload.system.errors import DeviceMemoryError, SessionMiss

__all__ = [
    "AsyncEngine",
    "DeviceMemoryError",
    "Engine",
    "ExactTopK",
    "Full",
    "HostBudgetError",
    "KVStore",
    "OffloadedCache",
    "OffloadedModel",
    "Policy",
    "QueueFullError",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "SessionMiss",
    "StreamingLLM",
    "__version__",
    "available_policies",
    "load_tokenizer",
    "make_policy",
]

_MODULES = {
    "AsyncEngine": "engine.async_engine",
    "DeviceMemoryError": "system.errors",
    "Engine": "engine.engine",
    "ExactTopK": "policies",
    "Full": "policies",
    "HostBudgetError": "system.errors",
    "KVStore": "kv.store",
    "OffloadedCache": "runtime.cache",
    "OffloadedModel": "runtime.model",
    "Policy": "policies",
    "QueueFullError": "engine.engine",
    "RequestOutput": "engine.request",
    "RuntimeConfig": "runtime.config",
    "SamplingParams": "engine.sampling_params",
    "SessionMiss": "system.errors",
    "StreamingLLM": "policies",
    "available_policies": "policies",
    "load_tokenizer": "loading.names",
    "make_policy": "policies",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
