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

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from offload.policies.exact_topk import ExactTopK
from offload.policies.tidal_decode.select_layers import (
    SelectLayers,
    check_depth,
    checked_layers,
    default_select_layers,
    keep_calibrated,
    kept_layers,
    known_by_shape,
    parse_layers,
)
from offload.policies.wrapped import WrappedPolicy, forwards
from offload.selection.calibration import Calibration
from offload.selection.device_support import DeviceSupport
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT, Policy

if TYPE_CHECKING:
    from offload.models.base import LeanModel

logger = logging.getLogger(__name__)


@forwards("policy.inner.device", "top_k", "builds", "build", "copied_heads", "warm_up_kernels")
class TidalDevice(DeviceSupport):
    """What it can do for the inner policy, but list candidates."""


class LayersCalibration(Calibration):
    """Which layers select."""

    policy: TidalDecode

    def learn(
        self,
        make_lean: Callable[[], LeanModel],
        model_type: str,
        load_tokenizer: Callable[[], Any],
        checkpoint: Callable[[], str],
    ) -> Policy:
        """With select layers of the model, if none were given: those that are kept, else
        calibrated ones, which are kept for the next time. No sweep is made, which takes minutes.

        Raises:
            ValueError: it has a file's layers of another model, or of other weights.
        """
        from offload.policies.tidal_decode.calibration import calibrated_layers

        policy, lean = self.policy, make_lean()
        shape = lean.shape.kv_heads
        layers = policy.select_layers
        if isinstance(layers, SelectLayers):
            layers.check(**shape, model_type=model_type, checkpoint=checkpoint())
        kept = self.with_kept(checkpoint, model_type, **shape)
        if kept is not policy or layers is not None:
            return kept
        found = None
        if not known_by_shape(model_type, shape["num_layers"], shape["num_kv_heads"]):
            found = calibrated_layers(lean, model_type, load_tokenizer, policy.dense_layers)
        if found is None:
            usual = policy.layers_of(shape["num_layers"], shape["num_kv_heads"])
            logger.info(
                "tidal_decode selects in layers %s; `offload calibrate MODEL --policy "
                "tidal_decode` finds those of this model",
                ",".join(map(str, usual)),
            )
            return policy
        found = replace(found, checkpoint=checkpoint())
        keep_calibrated(found)
        return replace(policy, select_layers=found)

    def with_kept(self, checkpoint: Callable[[], str], model_type: str, **shape: Any) -> Policy:
        """With select layers that are kept of the model, if none were given."""
        policy = self.policy
        if policy.select_layers is not None:
            return policy
        kept = kept_layers(checkpoint(), policy.dense_layers, **shape, model_type=model_type)
        return policy if kept is None else replace(policy, select_layers=kept)


@dataclass(frozen=True)
class TidalDecode(WrappedPolicy):
    """`inner` selects in `select_layers`; the layers below each of them reuse its selection.

    Args:
        inner: a policy that selects in every layer; its budget, sinks, recent window and dense
            layers hold for all layers.
        select_layers: their numbers, or a layers file's. None: `OffloadedModel` takes those that
            are kept for the model (`kept_layers`), else calibrates when it loads, if it can and
            does not know the shape; without that they are `default_select_layers`.

    Raises:
        ValueError: a select layer that is negative, given twice or inside the dense layers; none at
            all; an inner policy that has no selection of its own.
    """

    name: ClassVar[str] = "tidal_decode"
    shares_selection: ClassVar[bool] = True
    device = cached_property(TidalDevice)
    calibration = cached_property(LayersCalibration)

    inner: Policy = field(default_factory=ExactTopK)
    select_layers: tuple[int, ...] | SelectLayers | None = None

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
        layers = self.select_layers
        if isinstance(layers, SelectLayers):
            checked_layers(layers.select_layers, self.dense_layers)
        elif layers is not None:
            object.__setattr__(self, "select_layers", checked_layers(layers, self.dense_layers))

    @classmethod
    def option_names(cls) -> list[str]:
        """inner and select_layers, and the options of the default inner policy."""
        return ["inner", "select_layers", *ExactTopK.option_names()]

    @classmethod
    def from_options(
        cls,
        inner: str | Policy = "exact_topk",
        select_layers: str | int | Path | SelectLayers | Sequence[int] | None = None,
        **options: Any,
    ) -> TidalDecode:
        """From what a user writes: inner="quest", select_layers="2,13" or a path; the rest is of
        `inner`."""
        from offload.policies.registry import make_policy

        return cls(make_policy(inner, **options), parse_layers(select_layers))

    def check_model(self, **shape: int) -> None:
        """Refuse select layers that the model does not have, and those of another model."""
        layers = self.select_layers
        if isinstance(layers, SelectLayers):
            of_kv = {name: shape[name] for name in ("num_layers", "num_kv_heads", "head_dim")}
            layers.check(**of_kv)  # type: ignore[arg-type]
        else:
            check_depth(layers or (), shape["num_layers"])
        super().check_model(**shape)

    def layers_of(self, num_layers: int, num_kv_heads: int) -> tuple[int, ...]:
        """Those that select in a model of this shape."""
        layers = self.select_layers
        if layers is None:
            return default_select_layers(num_layers, num_kv_heads, self.dense_layers)
        return layers.select_layers if isinstance(layers, SelectLayers) else layers

    def of_heads(self, heads: range, **shape: int) -> TidalDecode:
        """With the whole model's select layers; only where no selection is shared by all heads."""
        if self.scans_keys:
            raise NotImplementedError(
                f"tidal_decode with inner={self.inner.name!r} shares one selection among all heads "
                "of a layer, which tensor_parallel_size splits over processes; use an inner policy "
                "that selects for each head, such as quest, or lychee_decode"
            )
        layers = self.layers_of(shape["num_layers"], shape["num_kv_heads"])
        inner = self.inner.of_heads(heads, **shape)
        return replace(self, inner=inner, select_layers=layers or None)

    def roles(self, num_layers: int, num_units: int) -> npt.NDArray[np.uint8]:
        """Dense layers, select layers (RETRIEVE if the inner policy scans keys), reuse between."""
        layers = self.layers_of(num_layers, num_units)
        roles = np.full((num_layers, num_units), REUSE, np.uint8)
        # Layers before the first that selects have nothing to reuse.
        roles[: min((*layers, num_layers))] = DENSE
        roles[list(layers)] = RETRIEVE if self.inner.scans_keys else SELECT
        return roles
