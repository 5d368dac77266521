"""Select layers that a sweep has found, in the cache folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from offload.policies.checkpoint_names import key_part
from offload.policies.tidal_decode.select_layers import SelectLayers
from offload.system.cache_folder import cache_folder

logger = logging.getLogger(__name__)


def kept_layers(checkpoint: str, dense_layers: int, **model: Any) -> SelectLayers | None:
    """None where none are kept, or what lies there is not it.

    Args:
        checkpoint: as `loading.names.checkpoint_name` has it; "": unknown.
        model: the rest of what `SelectLayers.check` takes.
    """
    try:
        file = kept_path(checkpoint, dense_layers)
        if file is None or not file.is_file():
            return None
        layers = SelectLayers.load(file)
        layers.check(**model, checkpoint=checkpoint)
    except (OSError, ValueError, RuntimeError) as error:  # or there is no home
        logger.warning("%s; it is left", error)
        return None
    if layers.dense_layers != dense_layers:
        logger.warning("layers file %s was changed; it is left", file)
        return None
    return layers


def kept_path(checkpoint: str, dense_layers: int) -> Path | None:
    """Where they are; None for a checkpoint that is unknown.

    Raises:
        RuntimeError: there is no home.
    """
    key = key_part(checkpoint)
    return cache_folder() / "layers" / f"{key}-after-{dense_layers}.json" if key else None
