"""What prefill takes of a device's memory, counted before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.kv.transfer import STAGING_BYTES, STAGINGS
from offload.models import ModelShape
from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes

# cuBLAS's workspaces (32 MiB per stream on Hopper), and what the allocator rounds up and keeps.
_MARGIN_BYTES = 256 * 2**20
_FLOAT32 = 4
# Of a policy's build on a device, beside what grows with the tokens of one head
# (`selection.device_build`).
INDEX_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PrefillMemory:
    """Bytes of device memory at the peak of a prefill, without the weights.

    Attributes:
        hidden_bytes: hidden states and rotary tables of all new tokens.
        kv_bytes: keys and values of two layers: one computes while the other is copied out.
        slice_bytes: activations of the tokens that go through a layer at one time.
        copy_bytes: pages under way to the host.
        index_bytes: what building a policy's index of a layer takes.
        rotary_bytes: making the rotary tables in float32, before K/V and activations exist.
    """

    hidden_bytes: int
    kv_bytes: int
    slice_bytes: int
    copy_bytes: int
    index_bytes: int
    rotary_bytes: int

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        *,
        item_bytes: int,
        num_tokens: int,
        slice_tokens: int,
        past_tokens: int = 0,
        page_tokens: int = 256,
        builds_index: bool = True,
        copied_heads: int = 0,
    ) -> PrefillMemory:
        """The memory of `num_tokens` new tokens behind `past_tokens` cached ones.

        Args:
            builds_index: a policy builds from each layer's keys while they are on the device.
            copied_heads: KV heads of a layer whose keys and values it copies for that.
        """
        n = min(slice_tokens, num_tokens)
        total_tokens = num_tokens + past_tokens
        hidden_size, head_dim = shape.hidden_size, shape.head_dim
        q_width, kv_width = shape.num_qo_heads * head_dim, shape.num_kv_heads * head_dim
        phases = (
            # An upper bound where kernels of our own do it. RMSNorm: the input and its scaled copy,
            # in float32.
            2 * _FLOAT32 * hidden_size,
            # Queries, two halves of products and the rotated queries; keys and values.
            item_bytes * (3 * q_width + 2 * kv_width),
            # Queries, attention's output in parts and whole, its rows in order, the projection; the
            # log-sum-exp.
            item_bytes * (3 * q_width + hidden_size) + _FLOAT32 * (q_width + shape.num_qo_heads),
            # The input, gate and up.
            item_bytes * (hidden_size + 2 * shape.intermediate_size),
        )
        page_bytes = 2 * kv_width * page_tokens * item_bytes
        index_bytes = INDEX_WORKSPACE_BYTES + 4 * _FLOAT32 * total_tokens * head_dim
        index_bytes += 2 * item_bytes * total_tokens * copied_heads * head_dim
        return cls(
            hidden_bytes=num_tokens * item_bytes * (hidden_size + 2 * head_dim),
            kv_bytes=2 * 2 * total_tokens * kv_width * item_bytes,
            slice_bytes=n * max(phases),
            copy_bytes=STAGINGS * max(STAGING_BYTES, page_bytes),
            index_bytes=index_bytes if builds_index else 0,
            rotary_bytes=4 * _FLOAT32 * num_tokens * head_dim,
        )

    @property
    def total_bytes(self) -> int:
        """At the peak, with what torch's allocator and cuBLAS take in addition."""
        # An index is built while the next layer computes, from memory of its own.
        layers = self.kv_bytes + self.copy_bytes + self.slice_bytes + self.index_bytes
        return self.hidden_bytes + max(self.rotary_bytes, layers) + _MARGIN_BYTES

    def __str__(self) -> str:
        index = f", {format_bytes(self.index_bytes)} to build an index" if self.index_bytes else ""
        return (
            f"{format_bytes(self.total_bytes)}: {format_bytes(self.hidden_bytes)} of hidden states,"
            f" {format_bytes(self.kv_bytes)} of keys and values of two layers,"
            f" {format_bytes(self.slice_bytes)} of activations of a slice{index}"
        )


def available_bytes(device: torch.device, budget_bytes: int | None = None) -> int:
    """What torch may still take of `device`.

    Args:
        budget_bytes: what it may have there altogether; None: as much as there is.
    """
    free_bytes, _ = torch.cuda.mem_get_info(device)
    allocated_bytes = torch.cuda.memory_allocated(device)
    # What torch's allocator keeps for itself is as good as free.
    available = free_bytes + torch.cuda.memory_reserved(device) - allocated_bytes
    if budget_bytes is not None:
        available = min(available, budget_bytes - allocated_bytes)
    return max(0, available)


def check_fits(memory: PrefillMemory, available_bytes: int, *, already_there: int = 0) -> None:
    """Refuse `memory`, of which `already_there` is allocated, if the rest exceeds what is free.

    Raises:
        DeviceMemoryError: names the sizes and the options that change them.
    """
    need = memory.total_bytes - already_there
    if need > available_bytes:
        raise DeviceMemoryError(
            f"prefill needs {format_bytes(need)} more of device memory ({memory}), but "
            f"{format_bytes(available_bytes)} are available; lower prefill_slice_tokens, shorten "
            "the prompt or raise max_memory of the device"
        )
