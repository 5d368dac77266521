"""Selection policies: which tokens of the host KV store a decode step attends to.

One file or folder per method, the registry, and three bases: `base`, `blocks` and `wrapped`.
Policies are imported when they are asked for, so that `full` never loads Numba.

Imports `selection`, `prefill` and what is below; `training` stands beside it, and neither knows the
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.policies.registry import available_policies as available_policies
from offload.policies.registry import make_policy as make_policy
from offload.policies.registry import policy_class
from offload.selection.numba_cache import drop_stale
from offload.selection.policy import Policy as Policy

if TYPE_CHECKING:
    from offload.policies.auto import Auto as Auto
    from offload.policies.exact_topk import ExactTopK as ExactTopK
    from offload.policies.full import Full as Full
    from offload.policies.hard_kv.policy import HardKV as HardKV
    from offload.policies.lfps.policy import LFPS as LFPS
    from offload.policies.lychee_cluster.policy import LycheeCluster as LycheeCluster
    from offload.policies.lychee_decode.policy import LycheeDecode as LycheeDecode
    from offload.policies.per_head.policy import PerHead as PerHead
    from offload.policies.quest.policy import Quest as Quest
    from offload.policies.sketch.policy import Sketch as Sketch
    from offload.policies.streaming_llm import StreamingLLM as StreamingLLM
    from offload.policies.tidal_decode import TidalDecode as TidalDecode
    from offload.policies.union.policy import Union as Union

_folder = Path(__file__).parent
drop_stale(_folder, [_folder.parent / "selection", _folder.parents[1] / "cpu_ops"])


def __getattr__(name: str) -> Any:
    return policy_class(name)
