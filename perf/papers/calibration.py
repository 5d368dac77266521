"""HARD-KV's logits calibration of Quest's page bounds: `python -m perf.papers.calibration`.

Two things on real text. Of the prompt's last 128 queries the first 64 are the window from which
each KV head gets its temperature, as `hard_kv` calibrates; how many tokens that selects for the 64
after them, against how many exact top-p takes, or the pages in Quest's order need. Beside it,
selecting for each head as many tokens as it needed in the window on average. And decode steps
behind the prompt under fixed budgets and under shares: tokens attended, and what they lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from offload.bench.eval.perplexity import teacher_forced
from offload.policies import HardKV, Policy, Quest
from offload.policies.base import BuildContext, State
from offload.policies.block_share import past_blocks
from offload.policies.logits_calibration import (
    CALIBRATE,
    SHARE_OF_TOKENS,
    WINDOW_QUERIES,
    inverse_temperatures,
    needed_tokens,
    selected_tokens,
)
from offload.policies.registry import make_policy
from perf.papers.hard_kv import measured, share_options
from perf.papers.lychee_cluster import text_window
from perf.papers.observed import MODEL, open_model
from perf.results_file import Run, hide_loading_bars

BUDGETS = (256, 512, 1024, 1536)
SHARES = (0.9, 0.95)  # of exact attention
TEXTS = ("prose", "code")
Row = dict[str, Any]
_KEPT: dict[int, tuple[BuildContext, State]] = {}  # of the layers of the prompt that was last read


@dataclass(frozen=True)
class KeepsQueries(Quest):
    """Quest, of which what it was built from is looked at."""

    observed_queries: ClassVar[int] = 2 * WINDOW_QUERIES

    def build(self, context: BuildContext) -> State:
        arrays = super().build(context)
        _KEPT[context.layer_idx] = context, arrays
        return arrays


def compared(most: int) -> list[tuple[Row, Policy]]:
    """What each row of the steps says of its policy, and the policy: full attention first."""
    found: list[tuple[Row, Policy]] = [({"inner": "full"}, make_policy("full"))]
    found += [({"inner": "quest", "budget_tokens": n}, Quest(budget_tokens=n)) for n in BUDGETS]
    for calibrate in CALIBRATE:
        for p in SHARES:
            policy = HardKV(Quest(budget_tokens=most), p, calibrate=calibrate)
            found.append(({"inner": f"quest, {calibrate}", "top_p": p}, policy))
    return found


def counts_of(top_p: float) -> Iterator[Row]:
    """Per kind of calibration the errors of its counts after the window, over KV heads."""
    errors: dict[tuple[str, float], list[Tensor]] = {}
    ratios: dict[tuple[str, float], list[Tensor]] = {}
    for layer_idx in sorted(_KEPT):
        for kind, selected, needed in _layer_counts(*_KEPT[layer_idx], top_p):
            errors.setdefault(kind, []).append((selected / needed - 1).abs())
            ratios.setdefault(kind, []).append(torch.stack([selected, needed]))
    for (calibrate, share), found in errors.items():
        of_heads = torch.cat(found).numpy()
        selected, needed = torch.cat(ratios[calibrate, share], dim=1).mean(1).tolist()
        yield {
            "calibrate": calibrate,
            "share": share,  # 0: none, as many tokens as in the window
            "median": float(np.median(of_heads)),
            "p90": float(np.quantile(of_heads, 0.9)),
            "selected": selected,
            "needed": needed,
        }


def _layer_counts(
    context: BuildContext, arrays: State, top_p: float
) -> Iterator[tuple[tuple[str, float], Tensor, Tensor]]:
    """Kind, and [num_kv_heads] mean tokens selected and needed after the window, all of them."""
    quest, kv_len = Quest(), context.keys.shape[1]
    always = quest.sink_tokens + quest.recent_tokens
    ends = {"window": kv_len - WINDOW_QUERIES, "later": kv_len}
    queries = {
        "window": context.queries[:, :WINDOW_QUERIES],
        "later": context.queries[:, WINDOW_QUERIES:],
    }
    sizes: dict[str, Any] = {
        "sink_tokens": quest.sink_tokens,
        "recent_tokens": quest.recent_tokens,
        "sm_scale": context.sm_scale,
        "top_p": top_p,
    }
    blocks = {
        when: past_blocks(quest, arrays, queries[when], end, context.sm_scale)
        for when, end in ends.items()
    }
    for calibrate in CALIBRATE:
        window, later = (
            needed_tokens(
                context.keys[:, :end],
                queries[when],
                blocks[when],
                in_order=calibrate == "mass",
                **sizes,
            )
            for when, end in ends.items()
        )
        needed = always + later.mean(-1)
        yield (calibrate, 0.0), always + window.mean(-1), needed
        for share in (SHARE_OF_TOKENS, top_p):
            betas = inverse_temperatures(blocks["window"], window, kv_len, share)
            ranked, order = blocks["later"].ranked
            tokens = blocks["later"].tokens.expand_as(order).gather(-1, order).float()
            selected = selected_tokens(ranked, tokens, betas.float(), share)
            everything = tokens.sum(-1)
            selected = torch.where(betas[:, None] > 0, selected, everything)
            yield (calibrate, share), always + selected.mean(-1), needed


def main() -> None:
    options = share_options(__doc__, "paper-calibration").parse_args()
    hide_loading_bars()
    run = Run(options)
    kinds = compared(options.most)
    model = open_model([*(policy for _, policy in kinds), KeepsQueries()], options.threads)
    rows: list[Row] = []
    for length in sorted(options.lengths):
        for text in options.texts:
            for window in range(options.windows):
                tokens = text_window(text, length + options.steps + 1, window)
                of_text = {"length": length, "text": text, "window": window}
                with (
                    model.read(tokens[:length]) as prompt,
                    teacher_forced(model, len(kinds), prompt) as decode,
                ):
                    decode(tokens[length])  # builds
                for p in SHARES:
                    rows += [of_text | {"part": "counts", "top_p": p} | x for x in counts_of(p)]
                _KEPT.clear()
                for row in measured(model, tokens, length, options.sample_every, range(len(kinds))):
                    said, _ = kinds[row.pop("index")]
                    rows.append(of_text | {"part": "steps"} | said | row)
                settings = run.named("lengths", "windows", "steps", "most") | {"model": MODEL}
                run.write(settings | {"window_queries": WINDOW_QUERIES}, rows)


if __name__ == "__main__":
    main()
