"""Lists of a row's most important tokens: what is asked for, checked, and found from importance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.checks import check_reachable, check_tensor
from gpu_ops.top_k_candidates import SCORE_ALIGNMENT, TopKBuffers


@dataclass(frozen=True)
class TopKLists:
    """A list is of the tokens [0, sink_tokens), the chosen ones ascending, and the last
    recent_tokens; of all tokens if there are at most budget_tokens. Chosen are the
    k = budget_tokens - sink_tokens - recent_tokens of largest importance between sinks and recent
    ones; of equal ones the first.

    Args:
        selection: int32 [n, num_kv_heads, budget_tokens], or [n, 1, budget_tokens] for one list of
            all heads. Only the lists of the heads asked for are written, and not what lies beyond
            their length.
        counts: int32 [n, num_kv_heads] or [n, 1]: the lists' lengths; 0 for an inactive row, -1
            where importance could not be told: no list.
        host_selection, host_counts: None, or pinned host memory that gets the same.
        ratio: k is at most ceil(ratio * kv_len) - sink_tokens - recent_tokens, and at least 0.
        top_p: or of the chosen only the first, by importance, until with sinks and recent tokens
            these have this share of the attention of the list's query heads.
        threshold: or only those above this attention weight, the mean of the list's query heads.
    """

    sink_tokens: int
    recent_tokens: int
    budget_tokens: int
    selection: Tensor
    counts: Tensor
    host_selection: Tensor | None = None
    host_counts: Tensor | None = None
    ratio: float | None = None
    top_p: float | None = None
    threshold: float | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As kernels take them."""
        return self.sink_tokens, self.recent_tokens, self.budget_tokens

    def check(
        self,
        n: int,
        num_lists: int,
        out_lists: int,
        max_tokens: int,
        buffers: TopKBuffers,
        device: torch.device,
    ) -> None:
        """ValueError unless `num_lists` of each of n rows fit `buffers`, and `out_lists` there."""
        if min(self.sizes[:2]) < 0 or self.sink_tokens + self.recent_tokens > self.budget_tokens:
            raise ValueError(
                f"sink_tokens and recent_tokens must be at least 0 and within the budget of"
                f" {self.budget_tokens}, got {self.sink_tokens} and {self.recent_tokens}"
            )
        rules = {"ratio": self.ratio, "top_p": self.top_p, "threshold": self.threshold}
        given = {name: number for name, number in rules.items() if number is not None}
        for name, number in given.items():
            if not 0 < number <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {number}")
        if len(given) > 1:
            raise ValueError(f"only one rule can end a list, got {' and '.join(given)}")
        if (self.host_selection is None) != (self.host_counts is None):
            raise ValueError("host_selection and host_counts must be given both, or neither")
        shape = (n, out_lists, self.budget_tokens)
        check_tensor("selection", self.selection, shape, torch.int32, device)
        check_tensor("counts", self.counts, shape[:2], torch.int32, device)
        if self.host_selection is not None and self.host_counts is not None:
            check_reachable("host_selection", self.host_selection, shape, torch.int32, device)
            check_reachable("host_counts", self.host_counts, shape[:2], torch.int32, device)
        max_lists, stride = buffers.importance.shape
        if max_tokens % SCORE_ALIGNMENT or stride % SCORE_ALIGNMENT:
            raise ValueError(
                f"max_tokens must be a multiple of {SCORE_ALIGNMENT},"
                f" got {max_tokens}, and {stride} of the buffers"
            )
        if n * num_lists > max_lists or max_tokens > stride:
            raise ValueError(
                f"buffers must be for {n * num_lists} lists of {max_tokens} tokens,"
                f" got {max_lists} of {stride}"
            )
        if buffers.importance.device != device:
            raise ValueError(f"buffers must be on {device}, got {buffers.importance.device}")

    def write(
        self,
        target: tuple[int, int],
        importance: Tensor,
        *,
        is_known: bool,
        heads_of_list: int = 1,
    ) -> None:
        """One list, by a sort.

        Args:
            target: row and list.
            importance: [kv_len].
            heads_of_list: query heads that it is a sum over.
            is_known: none of it, nor what it comes from, is infinite or no number.
        """
        kv_len, first, last = (
            len(importance),
            self.sink_tokens,
            len(importance) - self.recent_tokens,
        )
        tokens = torch.arange(kv_len, device=importance.device)
        if kv_len > self.budget_tokens:
            k = self.budget_tokens - self.sink_tokens - self.recent_tokens
            if self.ratio is not None:
                share = math.ceil(self.ratio * kv_len)
                k = min(k, max(share - self.sink_tokens - self.recent_tokens, 0))
            order = importance[first:last].argsort(descending=True, stable=True)[:k]
            weights = importance[first:last][order].double()
            if self.threshold is not None:
                order = order[weights > self.threshold * heads_of_list]
            elif self.top_p is not None:
                missing = self.top_p * heads_of_list
                for ends in (importance[:first], importance[last:]):
                    missing -= float(ends.double().sum())
                before = torch.cat((weights[:0].new_zeros(1), weights.cumsum(0)))[: len(order)]
                order = order[before < missing]
            chosen = order.sort().values
            tokens = torch.cat((tokens[:first], first + chosen, tokens[last:]))
        count = len(tokens) if is_known or not kv_len else -1
        self.counts[target] = count
        self.selection[target][: max(count, 0)] = tokens[: max(count, 0)].int()
        if self.host_selection is not None and self.host_counts is not None:
            self.host_selection[target] = self.selection[target]
            self.host_counts[target] = count
