"""Quest: pages of keys, searched by their upper bound (see `policy`)."""

from offload.policies.quest.policy import Quest

__all__ = ["Quest"]
