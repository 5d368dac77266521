"""TidalDecode: a few layers select tokens, the layers between them reuse the selection.

Source: Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse
Attention (ICLR 2025). A token-selection layer computes full attention and publishes the top tokens
of its exact weights, summed over all heads; the layers after it attend to those only. With an inner
policy that does not scan all keys (Quest, LFPS …) a selection layer attends to that policy's
selection, too, and each KV head hands its own to the same-indexed heads below.

One selection for all KV heads of a layer beats one for each, although the select layer's own heads
lose by it: what a head finds, others need further down. SmolLM2-135M, mean attention mass kept by
the reusing layers at 6-7K tokens of prose with 1,024 tokens (with 2 %), and the mass kept on a
needle while the model answers (with 1,024 tokens, retrieving layers included):

    select layers        shared                   per KV head
    2, 14                0.948 (0.773)   0.94     0.914 (0.723)   0.81
    2, 7, 14, 21         0.952 (0.791)   0.99     0.928 (0.755)   0.91
    2, 3, 14, 23         0.955 (0.810)   0.91     0.940 (0.798)   0.84

Quest keeps 0.937 (0.661) of the mass of prose, exact top-k in every layer 0.987 (0.882).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from offload.policies.base import DENSE, RETRIEVE, REUSE, SELECT, DeviceTopK, Policy
from offload.policies.exact_topk import ExactTopK

# (num_layers, num_kv_heads): select layers. Llama-3-8B and Llama-2-7B: the paper, Figure 5.
# SmolLM2-135M: layers of heads that copy (`head_calibration`), by right answers; mass misleads:
# (2, 7, 14, 21) keeps as much and loses one of many keys (docs/papers/tidal-and-lychee-decode.md).
_SELECT_LAYERS = {(32, 8): (2, 13), (32, 32): (2, 7), (30, 3): (2, 6, 17, 21)}
# What the runtime asks of a policy object, and is the inner policy's.
_OF_INNER = (
    *("budget_tokens", "sink_tokens", "recent_tokens", "dense_layers", "dense_until"),
    *("scans_keys", "per_query_head", "observed_queries", "reads_text"),
    *("prepare", "propose", "select", "observe", "append"),
)
_MIDDLE = 13 / 32  # of the depth, where nothing is known: Llama-3's


@dataclass(frozen=True)
class TidalDecode(Policy):
    """`inner` selects in `select_layers`; the layers below each of them reuse its selection.

    Args:
        inner: a policy that selects in every layer; its budget, sinks, recent window and dense
            layers hold for all layers.
        select_layers: ascending; None takes `default_select_layers` of the model.

    Raises:
        ValueError: a select layer that is negative, given twice or inside the dense layers; none at
            all; an inner policy that has no selection of its own.
    """

    name: ClassVar[str] = "tidal_decode"
    shares_selection: ClassVar[bool] = True

    inner: Policy = field(default_factory=ExactTopK)
    select_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        inner = self.inner
        if (
            not isinstance(inner, Policy)
            or not inner.selects
            or type(inner).roles is not Policy.roles
        ):
            name = inner.name if isinstance(inner, Policy) else repr(inner)
            raise ValueError(
                f"tidal_decode needs an inner policy that selects in every layer, such as "
                f"exact_topk or quest, got {name}"
            )
        for name in _OF_INNER:
            object.__setattr__(self, name, getattr(inner, name))
        if self.select_layers is not None:
            object.__setattr__(self, "select_layers", self._checked(self.select_layers))

    @classmethod
    def option_names(cls) -> list[str]:
        """inner and select_layers, and the options of the default inner policy."""
        return ["inner", "select_layers", *ExactTopK.option_names()]

    @classmethod
    def from_options(
        cls,
        inner: str | Policy = "exact_topk",
        select_layers: str | int | Sequence[int] | None = None,
        **options: Any,
    ) -> TidalDecode:
        """From what a user writes: inner="quest", select_layers="2,13"; the rest is for `inner`."""
        from offload.policies.registry import make_policy

        return cls(make_policy(inner, **options), parse_layers(select_layers))

    def check_model(self, *, num_layers: int, **heads: int) -> None:
        """Refuse select layers that the model does not have."""
        beyond = [layer for layer in self.select_layers or () if layer >= num_layers]
        if beyond:
            raise ValueError(
                f"select_layers={self.select_layers} names layer {beyond[0]}, but this model has "
                f"layers 0 to {num_layers - 1}"
            )
        self.inner.check_model(num_layers=num_layers, **heads)

    def of_heads(
        self, heads: range, *, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> TidalDecode:
        """With the whole model's select layers; only where no selection is shared by all heads."""
        if self.scans_keys:
            raise NotImplementedError(
                f"tidal_decode with inner={self.inner.name!r} shares one selection among all heads "
                "of a layer, which tensor_parallel_size splits over processes; use an inner policy "
                "that selects for each head, such as quest, or lychee_decode"
            )
        layers = self.select_layers
        if layers is None:
            layers = default_select_layers(num_layers, num_kv_heads, self.dense_layers)
        inner = self.inner.of_heads(
            heads, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        return replace(self, inner=inner, select_layers=layers or None)

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
        """Dense layers, select layers (RETRIEVE if the inner policy scans keys), reuse between."""
        layers = self.select_layers
        if layers is None:
            layers = default_select_layers(num_layers, num_units, self.dense_layers)
        roles = np.full((num_layers, num_units), REUSE, np.uint8)
        # Layers before the first that selects have nothing to reuse.
        roles[: min((*layers, num_layers))] = DENSE
        roles[list(layers)] = RETRIEVE if self.inner.scans_keys else SELECT
        return roles

    def device_top_k(self) -> DeviceTopK | None:
        """The inner policy's."""
        return self.inner.device_top_k()

    @property
    def selecting(self) -> Policy:
        """The inner policy's; only select layers are asked for its arrays."""
        return self.inner.selecting

    def _checked(self, layers: Sequence[int]) -> tuple[int, ...]:
        if isinstance(layers, (str, int)) or not all(
            isinstance(layer, int) and not isinstance(layer, bool) for layer in layers
        ):
            raise ValueError(f"select_layers must be layer numbers, got {layers!r}")
        layers = tuple(layers)
        if not layers:
            raise ValueError(
                "select_layers is empty: without a token-selection layer there is nothing to reuse"
            )
        twice = [layer for layer in layers if layers.count(layer) > 1]
        if twice:
            raise ValueError(f"select_layers={layers} names layer {twice[0]} twice")
        inside = [layer for layer in layers if layer < self.dense_layers]
        if inside:
            raise ValueError(
                f"select_layers={layers}: layer {inside[0]} is not after the first dense_layers="
                f"{self.dense_layers} layers, which attend to everything and select nothing"
            )
        return tuple(sorted(layers))


def default_select_layers(num_layers: int, num_kv_heads: int, dense_layers: int) -> tuple[int, ...]:
    """The first layer after the dense ones and one at 13/32 of the depth, as in Llama-3-8B.

    Models whose shape (num_layers, num_kv_heads) is known have layers of their own. There are no
    select layers if all layers are dense.
    """
    middle = _SELECT_LAYERS.get((num_layers, num_kv_heads), (round(_MIDDLE * num_layers),))
    layers = {dense_layers, *middle}
    return tuple(sorted(layer for layer in layers if dense_layers <= layer < num_layers))


def parse_layers(layers: str | int | Sequence[int] | None) -> tuple[int, ...] | None:
    """`"2,13"`, `2` or `[2, 13]` as a tuple; None stays None."""
    if layers is None:
        return None
    if isinstance(layers, int):
        return (layers,)
    if not isinstance(layers, str):
        return tuple(layers)
    try:
        return tuple(int(part) for part in layers.split(",") if part.strip())
    except ValueError:
        raise ValueError(
            f"select_layers must be layer numbers, separated by commas, got {layers!r}"
        ) from None
