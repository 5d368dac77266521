"""An embedding that reads the rows of a packed head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpu_ops.packed import PackedWeight
from offload.models.packed_linear import PackedModule


class PackedEmbedding(nn.Module):
    """In the place of the `nn.Embedding` that a head is tied to: memory holds the rows once.

    Args:
        head: its parameters are this module's, too, as transformers ties them.
    """

    minimums: nn.Parameter | None

    def __init__(self, head: PackedModule) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self.dtype = head.dtype
        self.codes, self.scales, self.minimums = head.codes, head.scales, head.minimums

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...] of any shape -> their rows [..., embedding_dim] in `dtype`."""
        ids = tokens.flatten()
        minimums = self.minimums
        rows = PackedWeight(
            self.codes.index_select(0, ids),
            self.scales.index_select(0, ids).view(torch.float16),
            None if minimums is None else minimums.index_select(0, ids).view(torch.float16),
            self.embedding_dim,
        )
        return rows.dequantise(self.dtype).view(*tokens.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"
