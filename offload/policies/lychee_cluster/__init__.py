"""LycheeCluster: structure-aware chunks in a tree of clusters (see `policy`)."""

from offload.policies.lychee_cluster.policy import LycheeCluster

__all__ = ["LycheeCluster"]
