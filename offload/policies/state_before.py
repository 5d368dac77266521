"""A sequence's state as it was before a forward pass, in case that fails or is cropped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from offload.policies.sequence_state import LayerArrays, RecentQueries

Queries = dict[int, RecentQueries]  # of a sequence, by layer


@dataclass
class Before:
    """A sequence as it was before a forward pass.

    Attributes:
        arrays: where they were; they have changed since, unless they were grown or built anew.
        copied: what was in them; None where `rewind` has to do.
        queries: unchanged, but for those of a step of one token.
        draft, spare, built: what the pass before left, for a crop.
        rows: of a pass that decodes several tokens: the queries [rows, heads * head_dim] of each
            layer.
    """

    kv_len: int
    arrays: LayerArrays | None
    copied: LayerArrays | None
    queries: Queries | None
    num_marks: int
    rewinds: bool = False
    rows: dict[int, list[Tensor]] | None = None
    draft: Before | None = None
    spare: LayerArrays | None = None
    built: tuple[int, Queries | None] | None = None

    def copy(self) -> Before:
        copied = self.copied or self.arrays
        rows = {layer: list(queries) for layer, queries in (self.rows or {}).items()}
        return replace(
            self,
            arrays=None if copied is None else copied.copy(),
            copied=None,
            queries=copies_of(self.queries),
            rows=rows,
        )


@dataclass(frozen=True)
class DraftRows:
    """Rows that stay of a draft, for the state that is now as it was before them.

    Attributes:
        first_kv_len: of the first row, itself included.
        queries: [num_rows, num_qo_heads * head_dim] of each layer that asks the policy.
    """

    first_kv_len: int
    queries: dict[int, Tensor] = field(default_factory=dict)


def copies_of(queries: Queries | None) -> Queries | None:
    return None if queries is None else {layer: q.copy() for layer, q in queries.items()}


def rows_of(draft: Before, num_rows: int) -> DraftRows:
    queries = {i: torch.stack(rows[:num_rows]) for i, rows in (draft.rows or {}).items()}
    return DraftRows(draft.kv_len + 1, queries)
