"""Which heads and which part of the MLP each rank has."""

from __future__ import annotations

import itertools


def head_ranges(num_kv_heads: int, world_size: int) -> list[range]:
    """The KV heads of each rank: as even as can be, the first ranks may have one more.

    Raises:
        ValueError: more ranks than KV heads.
    """
    if world_size > num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={world_size}: this model has {num_kv_heads} KV heads, and each "
            f"rank needs one; use at most {num_kv_heads} ranks"
        )
    return _ranges(num_kv_heads, world_size)


def mlp_ranges(intermediate_size: int, world_size: int) -> list[range]:
    """The rows of gate and up of each rank, in multiples that matrix products like."""
    multiple = next(m for m in (64, 32, 16, 8, 1) if intermediate_size % m == 0)
    parts = _ranges(intermediate_size // multiple, world_size)
    return [range(multiple * part.start, multiple * part.stop) for part in parts]


def _ranges(count: int, parts: int) -> list[range]:
    """0 .. count cut into parts of sizes that differ by at most 1, larger ones first."""
    small, larger = divmod(count, parts)
    sizes = [small + (part < larger) for part in range(parts)]
    bounds = [0, *itertools.accumulate(sizes)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
