"""LycheeDecode: retrieval heads select for the heads below them (see `policy`)."""

from offload.policies.lychee_decode.policy import LycheeDecode

__all__ = ["LycheeDecode"]
