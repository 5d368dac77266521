"""Every key as a sketch of 1 or 2 bits a dimension; see `policy`."""

from offload.policies.sketch.policy import Sketch

__all__ = ["Sketch"]
