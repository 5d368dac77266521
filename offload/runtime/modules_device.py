"""The device that a stock model's own modules are on, where that is not where attention decodes.

Modules, windows and recurrent states are there; keys and values of the layers in the host store are
on the host. With `backend="inline"` it is the CPU: the same copies, from host memory to host
memory, so that tests pass through this code without a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.decode.latents import expanded_bytes
from offload.kv.transfer import STAGING_BYTES, STAGINGS
from offload.models.packed_experts import ExpertMatrix
from offload.models.packed_linear import PackedMatrix
from offload.prefill.memory import available_bytes
from offload.runtime.config import RuntimeConfig
from offload.system.errors import DeviceMemoryError
from offload.system.memory import format_bytes

LEAST_SLICE = 256  # tokens
MARGIN_BYTES = 256 * 2**20  # workspaces of cuBLAS, and what torch's allocator rounds up
_FLOAT32 = 4


@dataclass(frozen=True)
class PassBytes:
    """Memory of passes on the modules' device.

    Attributes:
        token_bytes: of activations of a token.
        kv_bytes: of a token, the most that one layer of the store has, and what is made of that.
        most_tokens: new columns of a pass.
    """

    token_bytes: int
    kv_bytes: int
    most_tokens: int

    def of_slice(self, batch_size: int, n: int, columns: int) -> int:
        """Of a pass over n new columns, the last of `columns`: activations, masks of a byte for
        each query and key, one layer's keys and values of a row, and pages under way."""
        of_layer = columns * self.kv_bytes
        masks = 4 * batch_size * n * columns
        return batch_size * n * self.token_bytes + of_layer + masks + STAGINGS * STAGING_BYTES

    def need(self, batch_size: int, n: int, columns: int, state_bytes: int) -> int:
        """Of a pass beside states, with a margin."""
        return self.of_slice(batch_size, n, columns) + state_bytes + MARGIN_BYTES

    def resident_need(self, batch_size: int, columns: int, kv_bytes: int) -> int:
        """Of all keys and values, and states, of `kv_bytes` beside whole slices; one layer is there
        twice where a step makes it longer."""
        longer = batch_size * columns * self.kv_bytes
        return self.need(batch_size, min(self.most_tokens, columns), columns, kv_bytes + longer)

    def slice_tokens(self, batch_size: int, columns: int, state_bytes: int, left: int) -> int:
        """How many columns of a prompt that ends at `columns` may fit `left` bytes at a time."""
        n = self.most_tokens
        while n > LEAST_SLICE and self.need(batch_size, n, columns, state_bytes) > left:
            n //= 2
        return n


class ModulesDevice:
    """Room on the modules' device, and what a decode step copies from it and to it.

    Args:
        stock: the model, on the device.
        kv_bytes: of a token, the most that one layer of the store has.
        held_bytes: what caches have on the device now.
    """

    def __init__(
        self, stock: Any, config: RuntimeConfig, kv_bytes: int, held_bytes: Callable[[], int]
    ) -> None:
        self.device = torch.device(config.device)
        self._is_cuda = self.device.type == "cuda"
        self._key = self.device.index or 0
        self._limit = config.max_memory.get(self._key) if self._is_cuda else None
        self._held_bytes = held_bytes
        kv_bytes += expanded_bytes(stock)
        self.bytes = PassBytes(token_bytes(stock), kv_bytes, config.prefill_slice_tokens)
        self._host: dict[str, Tensor] = {}

    def left_bytes(self) -> int:
        """What may still be allocated."""
        return available_bytes(self.device, self._limit) if self._is_cuda else sys.maxsize

    def has_room(self, batch_size: int, columns: int, kv_bytes: int) -> bool:
        """Whether `resident_need` fits."""
        return self.bytes.resident_need(batch_size, columns, kv_bytes) <= self.left_bytes()

    def slice_tokens(self, batch_size: int, columns: int, state_bytes: int) -> int:
        """How many columns of a prompt that ends at `columns` fit the memory at a time.

        Args:
            state_bytes: of windows and recurrent states that come beside them.

        Raises:
            DeviceMemoryError: not even few do.
        """
        n = self.bytes.slice_tokens(batch_size, columns, state_bytes, self.left_bytes())
        self.check(batch_size, min(n, columns), columns, state_bytes)
        return n

    def check(self, batch_size: int, n: int, columns: int, state_bytes: int) -> None:
        """Refuse a pass that does not fit the memory; a decode step (n = 1) has its activations.

        Raises:
            DeviceMemoryError: names the sizes, and the options that change them.
        """
        need = self.bytes.need(batch_size, n, columns, state_bytes) if n > 1 else state_bytes
        left = self.left_bytes() if need > 0 else 0  # asking takes a part of a step's time
        if need > left:
            raise DeviceMemoryError(
                f"{n} new columns of {batch_size} sequences behind {columns - n} cached ones need "
                f"{format_bytes(need)} more of device memory ({format_bytes(max(0, state_bytes))} "
                f"of it for windows and recurrent states), but {format_bytes(left)} are left "
                f"beside the weights; raise max_memory={{{self._key}: ...}}, or lower the batch "
                "size, prefill_slice_tokens or the prompt's length"
            )

    @property
    def device_bytes(self) -> int:
        """Of windows and recurrent states now."""
        return self._held_bytes()

    def to_host(self, rows: Tensor) -> Tensor:
        """A copy that is there when this returns, in memory that the next call writes to."""
        host = self.host_rows("to", rows.shape, rows.dtype)
        host.copy_(rows, non_blocking=True)
        self.wait()
        return host

    def host_rows(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory of the host, [*shape], the same for each call with a name."""
        shape = tuple(shape)
        size, key = math.prod(shape), f"{name} {dtype}"
        buffer = self._host.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, pin_memory=self._is_cuda)
            self._host[key] = buffer
        return buffer[:size].view(shape)

    def to_device(self, rows: Tensor) -> Tensor:
        """A copy, in the order of the current stream; of `host_rows`, which may be written to again
        after the next `to_host`."""
        if not self._is_cuda:
            return rows.clone()
        return rows.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """For all that the current stream was given."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).synchronize()


def token_bytes(stock: Any) -> int:
    """Activations of a token at one time, an upper bound by the widest matrices of a layer."""
    config = stock.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None) or 1
    widest = hidden = int(config.hidden_size)
    vocab_size = int(config.vocab_size)
    for width, sizes in _matrices(stock):
        if vocab_size not in sizes:
            widest = max(widest, width * (experts if len(sizes) == 3 else 1))
    return int((6 * widest + 4 * hidden) * stock.dtype.itemsize + 4 * _FLOAT32 * hidden)


def _matrices(stock: Any) -> Iterator[tuple[int, Sequence[int]]]:
    """The larger side of each, and its sizes: [out_features, in_features], of experts theirs."""
    for module in stock.modules():
        if isinstance(module, PackedMatrix):
            found: list[tuple[int, ...]] = [(module.out_features, module.in_features)]
            if isinstance(module, ExpertMatrix):
                num_experts = module.num_experts
                found = [(num_experts, module.out_features // num_experts, module.in_features)]
        else:
            found = [tuple(x.shape) for x in module.parameters(recurse=False) if x.dim() > 1]
        yield from ((max(sizes[-2:]), sizes) for sizes in found)


def check_weights_fit(config: RuntimeConfig, weight_bytes: int) -> None:
    """Refuse weights for which a GPU has no room, before they are read.

    Raises:
        DeviceMemoryError: names both sizes.
    """
    device = torch.device(config.device)
    if device.type == "cpu":
        return
    left = available_bytes(device, config.max_memory.get(device.index or 0))
    if weight_bytes + MARGIN_BYTES > left:
        raise DeviceMemoryError(
            f"the weights need {format_bytes(weight_bytes)} and {format_bytes(MARGIN_BYTES)} for "
            f"workspaces, but {format_bytes(left)} of {config.device} are left; raise "
            f"max_memory={{{device.index or 0}: ...}}, choose a smaller dtype or model, or "
            "device='cpu'"
        )
