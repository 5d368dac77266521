"""Roles from the gates that DuoAttention (arXiv 2410.10819) publishes: full_attention_heads.tsv."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from offload.selection.head_roles import BoolArray
from offload.system.text_file import read_text_file

Gates = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def read_gates(path: Path, num_layers: int, num_kv_heads: int) -> Gates:
    """float64 [num_layers, num_kv_heads] of a file of that shape: rows are layers, tabs part heads.

    Raises:
        FileNotFoundError: there is none.
        ValueError: another shape, or something else than finite numbers; names the line.
    """
    rows: list[list[float]] = []
    for number, line in enumerate(read_text_file(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = [float(cell) for cell in line.split("\t")]
        except ValueError:
            row = [math.nan]
        if not all(map(math.isfinite, row)):
            raise ValueError(
                f"{path}, line {number}: expected numbers with tabs between, got {line[:60]!r}"
            )
        if len(row) != num_kv_heads:
            raise ValueError(
                f"{path}, line {number}: {len(row)} columns, but this model has "
                f"num_kv_heads={num_kv_heads}"
            )
        rows.append(row)
    if len(rows) != num_layers:
        raise ValueError(f"{path}: {len(rows)} rows, but this model has num_layers={num_layers}")
    return np.array(rows)


def roles_of_gates(gates: Gates, *, share: float | None, threshold: float | None) -> BoolArray:
    """bool [num_layers, num_kv_heads]: all of layer 0, and below it the largest gates.

    Args:
        share: of the KV heads after layer 0, rounded; of equal gates the first.
        threshold: gates of at least that, instead.
    """
    retrieval = np.ones(gates.shape, np.bool_)
    below = gates[1:]
    if threshold is not None:
        retrieval[1:] = below >= threshold
    elif share is not None:
        retrieval[1:] = False
        order = np.argsort(-below, axis=None, kind="stable")
        retrieval[1:].flat[order[: round(share * below.size)]] = True
    return retrieval
