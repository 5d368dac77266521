"""What a step is asked to do, as a plan sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offload.decode.gpu.placement import UInt8Array, kv_head_roles
from offload.decode.gpu.resident_kv import window_of
from offload.models.shape import ModelShape
from offload.policies.base import DENSE, Policy


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        kv_len: tokens of each sequence.
        item_bytes: of an element of weights and cache.
        state_bytes: what the policy keeps of one sequence and layer that asks it.
    """

    shape: ModelShape
    policy: Policy
    kv_len: int
    batch_size: int = 1
    item_bytes: int = 2
    state_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_len", "batch_size", "item_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def row_bytes(self) -> int:
        """Of a key of one KV head."""
        return self.shape.head_dim * self.item_bytes

    @property
    def is_sparse(self) -> bool:
        """Whether the policy has a say at this length."""
        return self.policy.selects and self.kv_len > self.policy.budget_tokens

    @property
    def window_tokens(self) -> int:
        """Sinks and recent tokens of a head, which a GPU attends to itself."""
        return min(self.kv_len, sum(window_of(self.policy)))

    @property
    def chosen_tokens(self) -> int:
        """Tokens of a head that the policy chooses beside the window."""
        if not self.is_sparse:
            return self.kv_len - self.window_tokens
        return max(0, self.policy.budget_tokens - self.window_tokens)

    def roles(self) -> UInt8Array:
        """Of each [layer, KV head]; DENSE everywhere if the policy selects nothing."""
        shape = self.shape
        roles = kv_head_roles(self.policy, shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
        if roles is None:
            return np.full((shape.num_layers, shape.num_kv_heads), DENSE, np.uint8)
        return roles


def policy_key(policy: Policy) -> str:
    """Names what a policy does in a layer in which it selects: its name and options."""
    return repr(policy.selecting)
