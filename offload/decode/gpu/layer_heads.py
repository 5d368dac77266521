"""Who attends to which KV heads of a layer in a decode step.

Four ways: the CPU attends to rows of the host's pages; the GPU attends to all tokens of a head
whose KV it keeps; the GPU fetches the rows that a head above published, and attends to those; the
GPU keeps a set of rows, which the CPU chooses a layer ahead or it finds itself. A head that stays
on the GPU and retrieves publishes its selection there. For heads of the CPU whose keys have codes
on the GPU it lists candidates (`placement.Place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from cpu_ops.coprocessor import Request
from offload.decode.gpu.placement import Place, awaited_heads
from offload.selection.policy import REUSE


@dataclass(frozen=True)
class LayerHeads:
    """KV heads of one layer by who attends to them; each is in one of the first four.

    Attributes:
        resident: the GPU, to all tokens.
        gathered: the GPU, to rows that it fetches from the host.
        host: the CPU.
        hot: the GPU, to rows that the CPU chooses a layer ahead, or it finds itself; then none is
            the CPU's.
        publishing: of the resident ones, those whose selection heads elsewhere reuse: all or none.
        num_early: gathered ones whose selection is known before the layer above attends, the first
            so many; the others wait for what is published there.
        coded: of the host's, those for which the GPU lists candidates; or all hot ones.
        finds: whether hot heads' rows are found by codes.
        predicts: whether the choice for some hot heads needs a query, or all reuse one from above.
        window: tokens that the layer sees, the last ones, of which the GPU has no others; 0: all.
    """

    resident: tuple[int, ...]
    gathered: tuple[int, ...]
    host: tuple[int, ...]
    hot: tuple[int, ...] = ()
    publishing: tuple[int, ...] = ()
    num_early: int = 0
    coded: tuple[int, ...] = ()
    finds: bool = False
    predicts: bool = False
    window: int = 0

    @cached_property
    def is_resident(self) -> bool:
        """All that all heads see is on the GPU, and no layer waits for a selection."""
        return not (self.gathered or self.host or self.hot or self.publishing)

    @cached_property
    def asks_ahead(self) -> bool:
        """The CPU chooses hot rows."""
        return bool(self.hot) and not self.finds

    @property
    def has_window(self) -> bool:
        """Some heads need the sink tokens and the recent window on the GPU."""
        return bool(self.gathered or self.host or self.hot)

    def num_pages(self, kv_len: int, page_tokens: int) -> int:
        """GPU pages of a sequence's resident heads."""
        return -(-min(kv_len, self.window or kv_len) // page_tokens)


def layer_heads(
    places: npt.NDArray[np.uint8],
    roles: npt.NDArray[np.uint8] | None,
    *,
    shares_selection: bool = False,
    windows: Sequence[int] = (),
) -> tuple[LayerHeads, ...]:
    """The heads of each layer.

    Args:
        places: Place of each [layer, KV head].
        roles: of `Policy.roles` for units that are KV heads; None: none retrieves.
        shares_selection: the policy's; what one head publishes is for all.
        windows: tokens that each layer sees, 0: all; (): of all of them.
    """
    layers: list[LayerHeads] = []
    awaited = np.zeros(places.shape, np.bool_)
    if roles is not None:
        awaited = awaited_heads(roles, places, shares_selection=shares_selection)
    publishing = (awaited & (places == Place.GPU)).any(axis=1).tolist()
    predicts = places == Place.HOT
    if roles is not None:
        predicts &= roles != REUSE
    windows = windows or [0] * len(places)
    queries = predicts.any(axis=1).tolist()
    of_layers = zip(places.tolist(), publishing, queries, windows, strict=True)
    for of_layer, publishes, needs_query, window in of_layers:
        above = layers[-1].publishing if layers else ()
        late = tuple(range(len(of_layer))) if above and shares_selection else above
        layers.append(_heads_of(tuple(of_layer), publishes, late, needs_query, window))
    return tuple(layers)


@lru_cache(maxsize=1024)  # most layers are alike, and so are placements that are compared
def _heads_of(
    of_layer: tuple[int, ...], publishes: bool, late: tuple[int, ...], predicts: bool, window: int
) -> LayerHeads:
    """The heads of one layer; fetched ones that are in `late` wait for the layer above."""

    def heads(*of: Place) -> tuple[int, ...]:
        return tuple(head for head, place in enumerate(of_layer) if place in of)

    resident, gathered = heads(Place.GPU), heads(Place.GATHER)
    early = tuple(head for head in gathered if head not in late)
    return LayerHeads(
        resident,
        early + tuple(head for head in gathered if head in late),
        heads(Place.CPU, Place.CODES),
        heads(Place.HOT, Place.FOUND),
        resident if publishes else (),
        len(early),
        heads(Place.CODES, Place.FOUND),
        Place.FOUND in of_layer,
        predicts,
        window,
    )


def requests_of(
    layers: Sequence[LayerHeads],
    micro_batches: Sequence[slice],
    host_experts: Sequence[Sequence[int]] = (),
) -> list[Request]:
    """What a step asks the CPU, in the order in which it does (`DeviceStep.all_layers`): of a layer
    with hot rows while the layer above is projected.

    Args:
        host_experts: numbers of layers whose experts are on the host, of those that are computed
            before the attention of each of `layers`, and behind the last; (): there are none.
    """
    requests = []
    for layer_idx in range(len(layers) + 1):
        here, ahead = layers[layer_idx : layer_idx + 1], layers[layer_idx + 1 : layer_idx + 2]
        asked = [(number, True) for of in host_experts[layer_idx : layer_idx + 1] for number in of]
        asked += [(layer_idx, False)] * any(layer.host for layer in here)
        asked += [(layer_idx + 1, False)] * any(layer.asks_ahead for layer in ahead)
        for rows in micro_batches:
            of_rows = rows.start, rows.stop - rows.start
            requests += [Request(layer, *of_rows, of_experts) for layer, of_experts in asked]
    return requests


def scores_tokens(layers: Sequence[LayerHeads]) -> bool:
    """Whether steps keep a score of every token, of heads that publish or have codes."""
    return any(layer.publishing or layer.coded for layer in layers)


def most_heads(layers: Sequence[LayerHeads], name: str) -> int:
    """The most heads of a layer in its list `name`."""
    return max((len(getattr(layer, name)) for layer in layers), default=0)
