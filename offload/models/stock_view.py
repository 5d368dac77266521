"""The view of a stock model whose own modules run in a GPU's decode steps, captured as they are.

Its layers are those whose keys and values are in the host store. A step calls `run`, which calls
back for the attention of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload.models.base import DecoderLayer, LayerSpec, LeanModel
from offload.models.shape import ModelShape

# Of a layer, and of its queries, keys and values as `rope_publish` takes them: what attends gives
# [n, num_qo_heads * head_dim]. Or of the queries alone of another layer, which shares its keys.
Attend = Callable[[int, Tensor], Tensor]
Run = Callable[[Tensor, Tensor, Attend], Tensor]


@dataclass(frozen=True)
class StockView(LeanModel):
    """Attributes:
    run: the modules of a step, of positions [n] and the number of earlier tokens of each row [n],
        to what the final norm gives [n, hidden_size]. It does not wait for the GPU.
    state_bytes: what layers outside of the store keep of a sequence.
    """

    run: Run | None = None
    state_bytes: int = 0


def stock_view(
    stock: Any,
    specs: Sequence[LayerSpec],
    sinks: Sequence[Tensor | None],
    shape: ModelShape,
    reason: str,
    run: Run,
    state_bytes: int,
) -> StockView:
    """Args:
    specs, sinks: of the layers in the store, as of `DecoderLayer`.
    shape: of these layers.
    reason: what bounds `shape.max_context`.
    """
    nothing: Any = None  # the modules compute it
    return StockView(
        embed_tokens=stock.get_input_embeddings(),
        layers=tuple(
            DecoderLayer(None, nothing, None, None, nothing, None, None, None, spec, sinks=of_layer)
            for spec, of_layer in zip(specs, sinks, strict=True)
        ),
        final_norm=nothing,
        lm_head=nothing,
        ropes=(),
        shape=shape,
        max_context_reason=reason,
        run=run,
        state_bytes=state_bytes,
    )
