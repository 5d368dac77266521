"""PerHead: a few heads look at everything, a policy selects for the others (see `policy`)."""

from offload.policies.per_head.policy import PerHead

__all__ = ["PerHead"]
