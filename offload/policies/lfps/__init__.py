"""LFPS: vertical and slash patterns, predicted from one step to the next (see `policy`)."""

from offload.policies.lfps.policy import LFPS

__all__ = ["LFPS"]
