"""Which layers select, and the JSON file that says so of one model.

`offload calibrate --policy tidal_decode` finds them by a sweep (`training.layer_sweep`); else a
`calibration` does when a model of unknown shape is loaded. Both keep them in the cache folder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from offload.models.checkpoint_names import key_part
from offload.selection.made_files import COMMON_KEYS, MadeFile
from offload.system.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# (num_layers, num_kv_heads): select layers. Llama-3-8B and Llama-2-7B: the paper, Figure 5.
# SmolLM2-135M: layers of heads that copy, by right answers; mass misleads:
# (2, 7, 14, 21) keeps as much and loses one of many keys (docs/papers/tidal-and-lychee-decode.md).
_SELECT_LAYERS = {(32, 8): (2, 13), (32, 32): (2, 7), (30, 3): (2, 6, 17, 21)}
_MIDDLE = 13 / 32  # of the depth, where nothing is known: Llama-3's

_CALIBRATION = "1"  # change it when other layers are found than by older versions
_SWEEP = "calibrate MODEL --policy tidal_decode"


@dataclass(frozen=True)
class SelectLayers(MadeFile):
    """The select layers of one model.

    Attributes:
        select_layers: ascending.
        dense_layers: so many first layers attended to everything beside them.
        The others: see `MadeFile`.

    Raises:
        ValueError: layers that such a model does not have, or `checked_layers` refuses.
    """

    kind: ClassVar[str] = "layers file"
    bare_kind: ClassVar[str] = "select layers"
    remedy: ClassVar[str] = f"find layers for it with `offload {_SWEEP}`, or give their numbers"
    command: ClassVar[str] = f"{_SWEEP} -o"
    format: ClassVar[str] = "offload-select-layers-1"
    keys: ClassVar[tuple[str, ...]] = (*COMMON_KEYS, "dense_layers", "select_layers")

    select_layers: tuple[int, ...]
    dense_layers: int = 2

    def __post_init__(self) -> None:
        self._check_made()
        dense = self.dense_layers
        if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
            raise ValueError(
                f"{self._name}: dense_layers must be an integer of at least 0, got {dense!r}"
            )
        try:
            layers = checked_layers(self.select_layers, dense)
            check_depth(layers, self.num_layers)
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from None
        object.__setattr__(self, "select_layers", layers)

    def __str__(self) -> str:
        return ",".join(map(str, self.select_layers))


def default_select_layers(num_layers: int, num_kv_heads: int, dense_layers: int) -> tuple[int, ...]:
    """The first layer after the dense ones and one at 13/32 of the depth, as in Llama-3-8B.

    Models whose shape (num_layers, num_kv_heads) is known have layers of their own. There are no
    select layers if all layers are dense.
    """
    middle = _SELECT_LAYERS.get((num_layers, num_kv_heads), (round(_MIDDLE * num_layers),))
    layers = {dense_layers, *middle}
    return tuple(sorted(layer for layer in layers if dense_layers <= layer < num_layers))


def known_by_shape(model_type: str, num_layers: int, num_kv_heads: int) -> bool:
    """Whether `default_select_layers` are those of this very model, by its own answers."""
    return model_type == "llama" and (num_layers, num_kv_heads) in _SELECT_LAYERS


def parse_layers(
    layers: str | int | Path | SelectLayers | Sequence[int] | None,
) -> tuple[int, ...] | SelectLayers | None:
    """`"2,13"`, `2` or `[2, 13]` as a tuple, a path as the layers file there; None stays None.

    Raises:
        FileNotFoundError, ValueError: a text that is neither numbers nor the path of such a file.
    """
    if layers is None or isinstance(layers, SelectLayers):
        return layers
    if isinstance(layers, int):
        return (layers,)
    if isinstance(layers, Path) or (isinstance(layers, str) and layers.endswith(".json")):
        return SelectLayers.load(layers)
    if not isinstance(layers, str):
        return tuple(layers)
    try:
        return tuple(int(part) for part in layers.split(",") if part.strip())
    except ValueError:
        raise ValueError(
            f"select_layers must be layer numbers, separated by commas, got {layers!r}; or a file "
            "that ends in .json"
        ) from None


def checked_layers(layers: Sequence[int], dense_layers: int) -> tuple[int, ...]:
    """Ascending.

    Raises:
        ValueError: a layer that is negative, given twice or inside the dense layers; none at all.
    """
    if not isinstance(layers, Sequence) or not all(
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
    inside = [layer for layer in layers if layer < dense_layers]
    if inside:
        raise ValueError(
            f"select_layers={layers}: layer {inside[0]} is not after the first dense_layers="
            f"{dense_layers} layers, which attend to everything and select nothing"
        )
    return tuple(sorted(layers))


def check_depth(layers: Sequence[int], num_layers: int) -> None:
    """Refuse select layers that a model does not have."""
    beyond = [layer for layer in layers if layer >= num_layers]
    if beyond:
        raise ValueError(
            f"select_layers={tuple(layers)} names layer {beyond[0]}, but this model has "
            f"layers 0 to {num_layers - 1}"
        )


def kept_layers(checkpoint: str, dense_layers: int, **model: Any) -> SelectLayers | None:
    """What a sweep has found, else a calibration; None where none are kept, or what lies there is
    not it.

    Args:
        checkpoint: as `loading.names.checkpoint_name` has it; "": unknown.
        model: the rest of what `SelectLayers.check` takes.
    """
    for place in (kept_path, _calibrated_path):
        try:
            file = place(checkpoint, dense_layers)
            if file is None or not file.is_file():
                continue
            layers = SelectLayers.load(file)
            layers.check(**model, checkpoint=checkpoint)
        except (OSError, ValueError, RuntimeError) as error:  # or there is no home
            logger.warning("%s; it is left", error)
            continue
        if layers.dense_layers == dense_layers:
            return layers
        logger.warning("layers file %s was changed; it is left", file)
    return None


def keep_calibrated(layers: SelectLayers) -> None:
    """Have `kept_layers` find them for their checkpoint. Where the cache cannot be written to, they
    are not kept."""
    try:
        path = _calibrated_path(layers.checkpoint, layers.dense_layers)
        if path is not None:
            layers.keep(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.info(
            "calibrated layers are not kept (%s); set OFFLOAD_CACHE to a folder that can be "
            "written to",
            error,
        )


def kept_path(checkpoint: str, dense_layers: int) -> Path | None:
    """Where those of a sweep are; None for a checkpoint that is unknown.

    Raises:
        RuntimeError: there is no home.
    """
    return _path("layers", checkpoint, dense_layers)


def _calibrated_path(checkpoint: str, dense_layers: int) -> Path | None:
    return _path(f"layers/calibrated-{_CALIBRATION}", checkpoint, dense_layers)


def _path(folder: str, checkpoint: str, dense_layers: int) -> Path | None:
    key = key_part(checkpoint)
    return cache_folder() / folder / f"{key}-after-{dense_layers}.json" if key else None
