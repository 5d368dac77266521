"""Selections over host pages, for the tests of gather_rows and gathered_attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cases.operands import random

SINK_TOKENS, RECENT_TOKENS = 2, 5


class HostPages:
    """Keys and values of several rows in shuffled host pages, pinned if `device` is a GPU.

    Args:
        kv_lens: tokens of each row; 0 for none, whose entries of the page table are 0.
        kv: of each row, perhaps keys alone; None: random numbers.

    Attributes:
        kv: per row [K|V, num_kv_heads, kv_len, head_dim] on the CPU.
        table: int64 [n, max_pages] on `device`.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        device: str,
        dtype: torch.dtype,
        kv_lens: list[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        page_tokens: int,
        kv: list[torch.Tensor] | None = None,
    ) -> None:
        counts = [-(-kv_len // page_tokens) for kv_len in kv_lens]
        parts = 2 if kv is None else len(kv[0])
        shape = (max(1, sum(counts)), parts, num_kv_heads, page_tokens, head_dim)
        empty = -128 if dtype == torch.int8 else float("nan")
        self.pages = torch.full(shape, empty, dtype=dtype)
        if device == "cuda":
            self.pages = self.pages.pin_memory()
        self.kv = kv or [
            random(rng, 2, num_kv_heads, n, head_dim, dtype=dtype, device="cpu") for n in kv_lens
        ]
        page_bytes = self.pages[0].numel() * dtype.itemsize
        order = rng.permutation(sum(counts)).tolist()
        table = torch.zeros(len(kv_lens), max(1, *counts), dtype=torch.int64)
        for row, kv in enumerate(self.kv):
            for page in range(counts[row]):
                page_id = order.pop()
                tokens = kv[:, :, page * page_tokens : (page + 1) * page_tokens]
                self.pages[page_id, :, :, : tokens.shape[2]] = tokens
                table[row, page] = self.pages.data_ptr() + page_id * page_bytes
        self.table = table.to(device)


class Selections:
    """Lists [sinks, chosen ascending, recent] of each row and unit, and their lengths.

    Args:
        middle: per row and unit how many tokens are between sinks and recent ones; negative ones
            leave some of those away, as in a row that is shorter.

    Attributes:
        chosen: per row and unit the tokens in the middle.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        device: str,
        kv_lens: list[int],
        middle: list[list[int]],
        capacity: int,
    ) -> None:
        budget_tokens = SINK_TOKENS + capacity + RECENT_TOKENS
        shape = (len(middle), len(middle[0]), budget_tokens)
        # What is beyond a list is no token: it would be far outside of every page.
        selection = torch.full(shape, 2**30, dtype=torch.int32)
        counts = torch.zeros(shape[:2], dtype=torch.int32)
        self.chosen: list[list[torch.Tensor]] = []
        for row, kv_len in enumerate(kv_lens):
            self.chosen.append([])
            for unit, num_tokens in enumerate(middle[row]):
                between = np.arange(SINK_TOKENS, max(SINK_TOKENS, kv_len - RECENT_TOKENS))
                chosen = np.sort(rng.permutation(between)[: max(0, num_tokens)])
                tokens = np.r_[:SINK_TOKENS, chosen, kv_len - RECENT_TOKENS : kv_len]
                tokens = torch.from_numpy(tokens[: len(tokens) + min(0, num_tokens)].copy())
                selection[row, unit, : len(tokens)] = tokens.int()
                counts[row, unit] = len(tokens)
                self.chosen[-1].append(torch.from_numpy(chosen))
        self.selection, self.counts = selection.to(device), counts.to(device)

    def of_head(self, row: int, kv_head: int) -> torch.Tensor:
        """Tokens that are to be gathered of a KV head."""
        of_row = self.chosen[row]
        return of_row[kv_head if len(of_row) > 1 else 0]

    def options(self) -> dict[str, Any]:
        """What the operators are told of the lists."""
        return {"sink_tokens": SINK_TOKENS, "recent_tokens": RECENT_TOKENS}
