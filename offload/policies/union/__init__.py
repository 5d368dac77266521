"""Union: two policies propose, the heaviest of both are attended (see `policy`)."""

from offload.policies.union.policy import Union

__all__ = ["Union"]
