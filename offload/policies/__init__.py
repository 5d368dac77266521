"""Selection policies: which tokens of the host KV store a decode step attends to.

One file per method. Policies are imported when they are asked for, so that `full` never loads
Numba.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.policies.base import Policy
from offload.policies.numba_cache import drop_stale
from offload.policies.registry import available_policies, make_policy, policy_class

if TYPE_CHECKING:
    from offload.policies.auto import Auto
    from offload.policies.exact_topk import ExactTopK
    from offload.policies.full import Full
    from offload.policies.hard_kv import HardKV
    from offload.policies.lfps.policy import LFPS
    from offload.policies.lychee_cluster.policy import LycheeCluster
    from offload.policies.lychee_decode.policy import LycheeDecode
    from offload.policies.per_head.policy import PerHead
    from offload.policies.quest import Quest
    from offload.policies.sketch.policy import Sketch
    from offload.policies.streaming_llm import StreamingLLM
    from offload.policies.tidal_decode import TidalDecode
    from offload.policies.union.policy import Union

_folder = Path(__file__).parent
drop_stale(_folder, [_folder.parents[1] / "cpu_ops"])

__all__ = [
    "LFPS",
    "Auto",
    "ExactTopK",
    "Full",
    "HardKV",
    "LycheeCluster",
    "LycheeDecode",
    "PerHead",
    "Policy",
    "Quest",
    "Sketch",
    "StreamingLLM",
    "TidalDecode",
    "Union",
    "available_policies",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    try:
        return policy_class(name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
