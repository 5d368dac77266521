"""Exact top-k: score every key, keep the best. The upper bound of every approximate selection.

A KV head's importance of a token is the sum over its query heads of the exact attention weight, so
the selection keeps the most attention mass that any set of that size can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from offload.policies.base import SparsePolicy
from offload.selection.callback import Callback, callback, heaviest, read_context, view_int32
from offload.selection.device_support import DeviceSupport, DeviceTopK


@callback
def select(pointer: Any) -> int:
    ctx = read_context(pointer)
    count: int = heaviest(pointer, ctx, ctx.budget_tokens)
    indices = view_int32(ctx.indices, max(count, 0))
    for i in range(len(indices)):
        indices[i] += ctx.first
    return count


class TopKOnDevice(DeviceSupport):
    """The same rule."""

    def top_k(self) -> DeviceTopK | None:
        return DeviceTopK()


@dataclass(frozen=True)
class ExactTopK(SparsePolicy):
    """The `budget_tokens` tokens of largest exact attention weight per KV head.

    Reads all keys (half of what full attention reads) and the values of the selection.
    """

    name: ClassVar[str] = "exact_topk"
    scans_keys: ClassVar[bool] = True
    select: ClassVar[Callback | None] = select
    device = cached_property(TopKOnDevice)
