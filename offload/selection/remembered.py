"""What is remembered of one sequence, now, as it was before a forward pass, and for a file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.selection.layer_state import State
from offload.selection.sequence_state import LayerArrays, RecentQueries, TextMarks

Queries = dict[int, RecentQueries]  # of a sequence, by layer
Built = tuple[int, Queries | None]  # tokens and queries that arrays were built from


@dataclass
class Before:
    """A sequence as it was before a forward pass, in case that fails or is cropped.

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
    built: Built | None = None

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

    def first_rows(self, num_rows: int) -> DraftRows:
        """The first of `rows`."""
        queries = {i: torch.stack(rows[:num_rows]) for i, rows in (self.rows or {}).items()}
        return DraftRows(self.kv_len + 1, queries)


@dataclass(frozen=True)
class DraftRows:
    """Rows that stay of a draft, for the state that is now as it was before them.

    Attributes:
        first_kv_len: of the first row, itself included.
        queries: [num_rows, num_qo_heads * head_dim] of each layer that asks the policy.
    """

    first_kv_len: int
    queries: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class SavedState:
    """What is remembered of one sequence, as named arrays for a file.

    Attributes:
        marks: uint8, of the text of its first tokens.
        layers: the policy's arrays of each layer; none: they were not built.
        capacity_tokens, num_built: as of `LayerArrays`.
        queries: of each layer that keeps recent ones [num_qo_heads, n, head_dim], oldest first, and
            of how many tokens the last is the newest.
    """

    marks: npt.NDArray[np.uint8]
    layers: dict[int, State] = field(default_factory=dict)
    capacity_tokens: int = 0
    num_built: int = 0
    queries: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the policy's arrays."""
        return sum(array.nbytes for arrays in self.layers.values() for array in arrays.values())


@dataclass
class Remembered:
    """All that is remembered of one sequence.

    Attributes:
        before: while a forward pass runs.
        running_draft: while one runs, behind its prompt.
        draft: after one of several rows, until the next.
        spare: memory of a draft's copy.
        built: since the last `begin`.
    """

    arrays: LayerArrays | None = None
    queries: Queries | None = None
    marks: TextMarks = field(default_factory=TextMarks)
    before: Before | None = None
    running_draft: Before | None = None
    draft: Before | None = None
    spare: LayerArrays | None = None
    built: Built | None = None

    def queries_of(self, layer_idx: int, keys: Tensor, num_qo_heads: int) -> Tensor:
        """[num_qo_heads, n, head_dim], the last of them of the last of the tokens of `keys`
        [num_kv_heads, num_tokens, head_dim]; n is 0 where none were ever kept."""
        recorded = (self.queries or {}).get(layer_idx)
        if recorded is None:
            return keys.new_empty(num_qo_heads, 0, keys.shape[2])
        queries = recorded.in_order(keys.shape[1]).to(keys.device)
        if not queries.shape[1]:  # cropped: the newest key asks for what is like it
            queries = keys[:, -1:].repeat_interleave(num_qo_heads // len(keys), dim=0)
        return queries

    def copy(self) -> Remembered:
        """For a fork."""
        return Remembered(
            arrays=None if self.arrays is None else self.arrays.copy(),
            queries=copies_of(self.queries),
            marks=self.marks.copy(),
            draft=None if self.draft is None else self.draft.copy(),
            built=None if self.built is None else (self.built[0], copies_of(self.built[1])),
        )

    def saved(self) -> SavedState:
        """What matters of it between two forward passes. The arrays are its own, not copies."""
        saved = SavedState(self.marks.array[: self.marks.length])
        if self.arrays is not None:
            saved.capacity_tokens = self.arrays.capacity_tokens
            saved.num_built = self.arrays.num_built
            saved.layers = {i: arrays for i, arrays in enumerate(self.arrays.layers) if arrays}
        for layer_idx, recent in (self.queries or {}).items():
            saved.queries[layer_idx] = recent.kept().cpu(), recent.kv_len
        return saved

    def restore(self, before: Before) -> None:
        """The arrays and queries that were there before."""
        self.arrays, self.queries = before.copied or before.arrays, before.queries

    @property
    def all_arrays(self) -> list[LayerArrays | None]:
        """Those of a running pass may be in two places."""
        kept = self._kept()
        spare = None if self.before is None else self.before.spare
        return [self.arrays, self.spare, spare, *(a for x in kept for a in (x.arrays, x.copied))]

    @property
    def all_queries(self) -> list[Queries | None]:
        """As `all_arrays`."""
        built = [self.built, None if self.before is None else self.before.built]
        return [
            self.queries,
            *(x.queries for x in self._kept()),
            *(x[1] for x in built if x is not None),
        ]

    def _kept(self) -> list[Before]:
        nested = None if self.before is None else self.before.draft
        kept = (self.before, self.running_draft, self.draft, nested)
        return [before for before in kept if before is not None]


def copies_of(queries: Queries | None) -> Queries | None:
    return None if queries is None else {layer: q.copy() for layer, q in queries.items()}


def reach(queries: Queries | None, kv_len: int) -> bool:
    """Whether some are left of the first `kv_len` tokens, where any were kept."""
    return all(recent.reaches(kv_len) for recent in (queries or {}).values())
