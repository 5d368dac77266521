"""TidalDecode: selections of a few layers are reused by the layers below (see `policy`)."""

from offload.policies.tidal_decode.policy import TidalDecode
from offload.policies.tidal_decode.select_layers import (
    SelectLayers,
    default_select_layers,
    parse_layers,
)

__all__ = ["SelectLayers", "TidalDecode", "default_select_layers", "parse_layers"]
