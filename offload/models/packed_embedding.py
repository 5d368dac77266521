"""An embedding that reads packed rows, often those of the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpu_ops.packed import PackedWeight
from offload.models.packed_linear import PackedMatrix


class PackedEmbedding(PackedMatrix):
    """In the place of an `nn.Embedding`, or of one whose rows are multiplied by a number.

    Args:
        scale: that number.
    """

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(weight, dtype)
        self.scale = scale

    def tie(self, head: PackedMatrix) -> None:
        """Take the head's parameters, as transformers ties them: memory holds the rows once."""
        self.codes, self.scales, self.minimums = head.codes, head.scales, head.minimums
        self.table = head.table

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] of any shape -> their rows [..., embedding_dim] in `dtype`."""
        rows = self.packed.rows(tokens.flatten())
        values = rows.dequantise(self.dtype).view(*tokens.shape, self.in_features)
        return values if self.scale == 1.0 else values * self.scale

    def extra_repr(self) -> str:
        return f"{self.out_features}, {self.in_features}"


def dequantised_state(model: Any) -> dict[str, Tensor] | None:
    """The state dict of a stock model with matrices in its dtype; None: it has no packed ones."""
    state: dict[str, Tensor] = model.state_dict()
    made: dict[int, Tensor] = {}  # of a head and an embedding that are tied, one
    for path, module in model.named_modules():
        if not isinstance(module, PackedMatrix):
            continue
        for name in ("codes", "scales", "minimums", "table"):
            state.pop(f"{path}.{name}", None)
        place = module.codes.data_ptr()
        if place not in made:
            made[place] = module.of_stock()
        state[module.stock_name(path)] = made[place]
    return state if made else None


def embedding_scale(module: nn.Embedding) -> float | None:
    """What an embedding multiplies its rows by; None: it does something else with them."""
    known = module.weight
    rows = torch.randn(4, known.shape[1], dtype=known.dtype)
    scales = getattr(module, "embed_scale", 1.0)
    scale = float(scales.to(rows.dtype) if isinstance(scales, Tensor) else scales)
    tokens = torch.arange(4).view(2, 2)
    try:
        module.weight = nn.Parameter(rows, requires_grad=False)
        found = module(tokens)
    except Exception:  # of any kind: classes of 150 model types
        return None
    finally:
        module.weight = known
    return scale if found.equal((rows * scale).view(2, 2, -1)) else None
