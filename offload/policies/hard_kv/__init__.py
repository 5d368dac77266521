"""HARD-KV: one share of the attention for all heads (see `policy`)."""

from offload.policies.hard_kv.policy import HardKV

__all__ = ["HardKV"]
