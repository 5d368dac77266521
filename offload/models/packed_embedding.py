"""An embedding that reads packed rows, often those of the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offload.models.packed_linear import PackedMatrix


class PackedEmbedding(PackedMatrix):
    """In the place of an `nn.Embedding`."""

    def tie(self, head: PackedMatrix) -> None:
        """Take the head's parameters, as transformers ties them: memory holds the rows once."""
        self.codes, self.scales, self.minimums = head.codes, head.scales, head.minimums
        self.table = head.table

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] of any shape -> their rows [..., embedding_dim] in `dtype`."""
        rows = self.packed.rows(tokens.flatten())
        return rows.dequantise(self.dtype).view(*tokens.shape, self.in_features)

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
