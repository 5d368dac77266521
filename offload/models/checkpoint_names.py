"""What a name of `loading.names.checkpoint_name` says: NAME@DIGEST-TIME, or a part of it."""

from __future__ import annotations


def embedded_part(checkpoint: str) -> str:
    """NAME of an embedded model; "" of any other."""
    return checkpoint.rpartition("@")[0]


def key_part(checkpoint: str) -> str:
    """DIGEST-TIME of the files; "" where they are unknown."""
    return checkpoint.rpartition("@")[2]


def same_checkpoint(one: str, other: str) -> bool:
    """Whether they may be the same weights; what is unknown fits any.

    An embedded model is the same wherever it was converted, and any other by its digest, wherever
    and since when its files lie.
    """
    names = embedded_part(one), embedded_part(other)
    if all(names):
        return names[0] == names[1]
    digests = [key_part(name).partition("-")[0] for name in (one, other)]
    return not all(digests) or digests[0] == digests[1]
