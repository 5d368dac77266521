"""How long it takes to the first token of a prompt, by what was measured of a machine.

Products take a layer as long for each token; attention takes as long for each pair of a token and
one that it attends to, of which a prompt of n tokens has half of n * n. With a GPU the keys
and values of a layer leave while the next one computes, so the slower of both counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload.models.shape import ModelShape
from offload.planning.placement_bytes import store_bytes
from offload.planning.profile import MachineProfile, shape_key
from offload.planning.workload import Workload


@dataclass(frozen=True)
class PrefillTime:
    """A predicted prompt, in seconds.

    Attributes:
        tokens: of all prompts that are read together.
        products: linear layers and all else that grows with the tokens.
        attention: of all layers.
        leaving: what the GPU waits for keys and values on their way to the host.
        last: the last projection and choosing the token.
    """

    tokens: int
    products: float
    attention: float
    leaving: float
    last: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.leaving + self.last

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    def as_json(self) -> dict[str, Any]:
        """Plain values; seconds."""
        return {
            "tokens": self.tokens,
            "products": self.products,
            "attention": self.attention,
            "leaving": self.leaving,
            "last": self.last,
            "total": self.total,
            "tokens_per_second": self.tokens_per_second,
        }


def prefill_key(device: torch.device, shape: ModelShape, dtype: torch.dtype) -> str:
    """Names what prompts of a model take on a kind of device: equal keys take equally long."""
    heads = f"{shape.num_qo_heads}x{shape.num_kv_heads}x{shape.head_dim}"
    name = str(dtype).removeprefix("torch.")
    return f"{device.type}:{shape_key(shape, dtype.itemsize)}:{heads}:{name}"


def prefill_time(
    profile: MachineProfile, work: Workload, last_us: float, *, on_gpu: bool
) -> PrefillTime | None:
    """To the first tokens of prompts of `work.kv_len` tokens; None: not measured for such a model.

    Args:
        last_us: of the last projection and choosing the token.
    """
    key = prefill_key(torch.device("cuda" if on_gpu else "cpu"), work.shape, work.dtype)
    if key not in profile.prefill_token_us:
        return None
    tokens, layers = work.batch_size * work.kv_len, work.shape.num_layers
    products = 1e-6 * layers * tokens * profile.prefill_token_us[key]
    attention = 1e-6 * layers * tokens * work.kv_len / 2 * profile.prefill_pair_us[key]
    # Few tokens take as long as launching the layer does.
    least = 1e-6 * layers * profile.prefill_least_us.get(key, 0.0)
    products = max(products, least - attention)
    leaving = 0.0
    if on_gpu and profile.device is not None:
        copying = store_bytes(work) / profile.device.to_host_bandwidth
        leaving = max(0.0, copying - products - attention)
    return PrefillTime(tokens, products, attention, leaving, 1e-6 * last_us)
