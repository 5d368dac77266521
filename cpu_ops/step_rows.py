"""A decode step as attention sees it: which rows, and where their pages are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_ops import _native

Int64Array = npt.NDArray[np.int64]

ATTENDS_TO_ALL = -1  # in place of a budget


@dataclass(frozen=True)
class DecodeStep:
    """Where the query rows of one decode step find their pages. Row i is one new token.

    Attributes:
        seqs: store handle of each row; a sequence may own several rows.
        kv_lens: int64 [n], tokens each row attends to, itself included.
        positions: int64 [n], kv_lens - 1: the slot of the row's own key and value.
        page_tables, table_strides: int64 [n], address of and pages per layer in the page table, of
            all KV heads where they have pages of their own.
        starts: where KV heads have pages of their own, int64 [n], address of the first slot that
            each has [num_layers, num_kv_heads], a multiple of page_tokens below all kv_lens of the
            sequence; else empty. What a policy calls token t of a head is its slot
            starts + t.
        native: the rows as the C++ side takes them: these, the address of each row's policy arrays
            and text marks, and its budget in tokens or ATTENDS_TO_ALL.
        kept: what the addresses point into; a step's memory lives as long as the step.
        in_turns: rows must run one after the other, as they share their sequence's policy state.
        keeps_queries: somebody wants the queries of its sparse layers when they have attended.
        prepared: layers whose `prepare` has run.
    """

    seqs: Sequence[int]
    kv_lens: Int64Array
    positions: Int64Array
    page_tables: Int64Array
    table_strides: Int64Array
    starts: Int64Array
    native: _native.StepRows
    kept: tuple[Any, ...]
    in_turns: bool
    keeps_queries: bool
    prepared: set[int]
