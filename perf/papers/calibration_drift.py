"""How long a temperature lasts: `python -m perf.papers.calibration_drift`.

A text is read, and all that follows it is decoded, as the text has it. Page bounds of Quest get
temperatures from the last 64 queries before the first step, as `hard_kv` calibrates, and, beside
that, again from the last 64 decoded ones: whenever their number doubles, every 512, and every 64.
Of each 64 queries, layer and KV head: how many tokens that selects on the mean, against how many
exact top-p takes (`tokens`), or the pages in Quest's order need (`mass`). Without a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from offload.bench.eval.perplexity import teacher_forced
from offload.policies import Quest
from offload.policies.base import BuildContext, State
from offload.policies.block_share import past_blocks
from offload.policies.logits_calibration import (
    CALIBRATE,
    WINDOW_QUERIES,
    Calibrate,
    inverse_temperatures,
    needed_tokens,
    selected_tokens,
    share_of,
)
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from perf.papers.calibration import SHARES, TEXTS
from perf.papers.lychee_cluster import text_window
from perf.results_file import Run, hide_loading_bars, script_options

QUARTERS = 4
# Whether temperatures are solved for again after so many decoded tokens.
REFRESH: dict[str, Callable[[int], bool]] = {
    "never": lambda decoded: False,
    "doubled": lambda decoded: decoded & (decoded - 1) == 0,
    "every 512": lambda decoded: decoded % 512 == 0,
    "every 64": lambda decoded: True,
}
Row = dict[str, Any]
_KEPT: dict[int, tuple[BuildContext, State]] = {}


@dataclass(frozen=True)
class KeepsAll(Quest):
    """Quest, of which what it was built from is kept."""

    observed_queries: ClassVar[int] = WINDOW_QUERIES  # and those that are decoded

    def build(self, context: BuildContext) -> State:
        arrays = super().build(context)
        _KEPT[context.layer_idx] = context, arrays
        return arrays


def layer_errors(
    context: BuildContext, arrays: State, read: int, calibrate: Calibrate, top_p: float
) -> dict[str, Tensor]:
    """By `REFRESH`: |selected / needed - 1|, [num_kv_heads, chunks of decoded queries]."""
    quest = Quest()
    num_kv_heads, kv_len, _ = context.keys.shape
    group_size = len(context.queries) // num_kv_heads
    share = share_of(calibrate, top_p, group_size)
    always = quest.sink_tokens + quest.recent_tokens
    betas: dict[str, Tensor] = {}
    errors: dict[str, list[Tensor]] = {name: [] for name in REFRESH}
    for end in range(read, kv_len + 1, WINDOW_QUERIES):
        first = end - WINDOW_QUERIES - (kv_len - context.queries.shape[1])
        queries = context.queries[:, first : first + WINDOW_QUERIES]
        blocks = past_blocks(quest, arrays, queries, end, context.sm_scale)
        needed = needed_tokens(
            context.keys[:, :end],
            queries,
            blocks,
            in_order=calibrate == "mass",
            sm_scale=context.sm_scale,
            sink_tokens=quest.sink_tokens,
            recent_tokens=quest.recent_tokens,
            top_p=top_p,
        )
        ranked, order = blocks.ranked
        tokens = blocks.tokens.expand_as(order).gather(-1, order).float()
        for name, found in errors.items():
            if name in betas:
                beta = betas[name]
                selected = selected_tokens(ranked, tokens, beta.float(), share)
                selected = torch.where(beta[:, None] > 0, selected, tokens.sum(-1))
                count = always + selected.mean(-1)
                found.append((count / (always + needed.mean(-1)) - 1).abs())
        fresh = inverse_temperatures(blocks, needed, kv_len, share)
        for name, is_due in REFRESH.items():
            if name not in betas or is_due(end - read):
                betas[name] = fresh
    return {name: torch.stack(found, 1) for name, found in errors.items()}


def text_rows(read: int, calibrate: Calibrate, top_p: float) -> Iterator[Row]:
    """Of the text that `_KEPT` has: errors by quarter, over layers, heads and 64 queries each."""
    layers = [
        layer_errors(*_KEPT[layer_idx], read, calibrate, top_p) for layer_idx in sorted(_KEPT)
    ]
    for name in REFRESH:
        quarters = torch.cat([errors[name] for errors in layers]).chunk(QUARTERS, dim=1)
        for quarter, errors in enumerate([*quarters, torch.cat(quarters, 1)], start=1):
            yield {
                "calibrate": calibrate,
                "top_p": top_p,
                "refresh": name,
                "quarter": quarter if quarter <= QUARTERS else 0,  # 0: all
                "median": float(np.median(errors.numpy())),
                "p90": float(np.quantile(errors.numpy(), 0.9)),
            }


def main() -> None:
    parser = script_options(__doc__, "paper-calibration-drift")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--read", type=int, default=2048, help="tokens before the first step")
    parser.add_argument("--decode", type=int, default=2048, help="tokens after them")
    parser.add_argument("--windows", type=int, default=2, help="of each text")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    hide_loading_bars()
    run = Run(options)
    torch.set_num_threads(options.threads)
    KeepsAll.observed_queries = options.decode + WINDOW_QUERIES
    config = runtime_config(dtype="bfloat16", device="cpu", num_threads=options.threads)
    model = SharedModel(options.model, [KeepsAll(dense_until=1024)], config)
    rows: list[Row] = []
    for text in TEXTS:
        for window in range(options.windows):
            tokens = text_window(text, options.read + options.decode + 1, window)
            with model.read(tokens[:-1]) as prompt, teacher_forced(model, 0, prompt) as decode:
                decode(tokens[-1])  # builds
            for calibrate in CALIBRATE:
                for top_p in SHARES:
                    found = list(text_rows(options.read, calibrate, top_p))
                    rows += [{"text": text, "window": window} | row for row in found]
                    run.say(f"{text} {window} {calibrate} {top_p}")
            _KEPT.clear()
            run.write(run.named("model", "read", "decode", "windows", "threads"), rows)


if __name__ == "__main__":
    main()
