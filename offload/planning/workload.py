"""What a step is asked to do, as a plan sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from offload.decode.gpu.placement import UInt8Array, kv_head_roles
from offload.decode.gpu.resident_kv import window_of
from offload.kv.format import KVFormat
from offload.models.shape import ModelShape
from offload.selection.estimate import estimate_bytes
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT, Policy
from offload.selection.sequence_state import capacity_for

_LEAST_TOKENS = 32768
_SHORT_BUDGETS = 16  # lychee_cluster calls contexts of so many budgets short


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        kv_len: tokens of each sequence.
        dtype: of weights and cache.
        page_tokens: of a page of the host store.
        weight_share: bytes of the weights, of those that they would have in `dtype`.
        head_state_bytes: what each of the policy's members keeps of a KV head of one sequence and
            layer; (): nothing that is known.
        kv_dtype: of keys and values, as in `RuntimeConfig`.
    """

    shape: ModelShape
    policy: Policy
    kv_len: int
    batch_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 256
    head_state_bytes: tuple[float, ...] = ()
    weight_share: float = 1.0
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("kv_len", "batch_size", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of weights."""
        return self.dtype.itemsize

    @property
    def pages_per_layer(self) -> int:
        """Pages of all sequences in a layer."""
        return self.batch_size * -(-self.kv_len // self.page_tokens)

    @cached_property
    def kv_format(self) -> KVFormat:
        """That of keys and values in pages, wherever they are."""
        return KVFormat.of(self.kv_dtype, self.dtype, keys_only=self.shape.latent_dim > 0)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a key of one KV head."""
        return self.kv_format.row_bytes(self.shape.head_dim)

    @property
    def pair_bytes(self) -> int:
        """Bytes of a key and its value of one KV head, or of a key that begins with its value."""
        return self.kv_format.num_parts * self.row_bytes

    @cached_property
    def is_sparse(self) -> bool:
        """Whether the policy has a say at this length."""
        return self.policy.selects and self.kv_len > self.policy.dense_tokens

    @cached_property
    def window_tokens(self) -> int:
        """Sinks and recent tokens of a head, which a GPU attends to itself."""
        return min(self.kv_len, sum(window_of(self.policy)))

    @cached_property
    def chosen_tokens(self) -> int:
        """Tokens of a head that the policy chooses in addition to the window."""
        if not self.is_sparse:
            return self.kv_len - self.window_tokens
        return max(0, min(self.kv_len, self.policy.budget_tokens) - self.window_tokens)

    @cached_property
    def selected_roles(self) -> UInt8Array | None:
        """Role of each [layer, KV head], DENSE where it sees a window; None if the policy selects
        nothing."""
        shape = self.shape
        heads = shape.num_layers, shape.num_qo_heads, shape.num_kv_heads
        roles = kv_head_roles(self.policy, *heads)
        if roles is not None:
            roles[np.flatnonzero(shape.windows)] = DENSE
        return roles

    @cached_property
    def unit_members(self) -> UInt8Array:
        """Which of the policy's members selects for each [layer, KV head], if one does."""
        shape = self.shape
        members = None
        if self.policy.selects:
            members = self.policy.unit_members(shape.num_layers, shape.num_kv_heads)
        return np.zeros_like(self.roles()) if members is None else members

    @property
    def kept_bytes(self) -> float:
        """What the policy keeps of one sequence, in all layers, with what estimates the rest."""
        roles = self.roles()
        estimating = 0.0
        if self.is_sparse and self.policy.estimate_clusters:
            heads = int(((roles == SELECT) | (roles == REUSE)).sum())
            estimating = heads * estimate_bytes(
                self.policy.estimate_clusters, self.shape.head_dim, capacity_for(self.kv_len)
            )
        asked = ((roles == SELECT) | (roles == RETRIEVE)).any(axis=1)
        members = self.unit_members[asked]
        return estimating + sum(
            float((members == index).sum()) * num_bytes
            for index, num_bytes in enumerate(self.head_state_bytes)
        )

    def roles(self) -> UInt8Array:
        """`selected_roles`; DENSE everywhere if the policy selects nothing."""
        if self.selected_roles is not None:
            return self.selected_roles
        return np.full((self.shape.num_layers, self.shape.num_kv_heads), DENSE, np.uint8)


def timed_tokens(policy: Policy, kv_len: int) -> int:
    """Tokens of the context in which a policy's selection is timed, for one of `kv_len`."""
    dense = max(policy.budget_tokens, policy.dense_tokens)
    return min(kv_len, max(_LEAST_TOKENS, (_SHORT_BUDGETS + 1) * dense))


def policy_key(policy: Policy, shape: ModelShape, kv_len: int) -> str:
    """Names what a policy does in a layer in which it selects: its name and options, the layer's
    heads, how many layers take its place in caches, and the length as far as it is timed, to the
    next power of two, and whether it is short.
    """
    tokens = 1 << (timed_tokens(policy, kv_len) - 1).bit_length()
    length = "short" if kv_len <= _SHORT_BUDGETS * policy.budget_tokens else "long"
    heads = f"{shape.num_qo_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
    layers = f"{shape.num_layers} layers of {heads}"
    return f"{policy.members[0]!r}, {layers}, {length}, up to {tokens} tokens"
