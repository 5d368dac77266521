"""What one share of the attention for all heads saves: `python -m perf.papers.hard_kv`.

Tokens attended and what they lose, on text that follows a prompt: budgets of a fixed number of
tokens, and HARD-KV's (arXiv 2606.28831) of a share, with the same policies below. The cap of a
share is `--most` tokens. Error and attention mass are of each layer's output against exact
attention, KL and perplexity against full attention's on the same tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from offload.bench.selection.metrics import kl_divergence, negative_log_likelihood
from offload.bench.selection.observed_text import observe_text
from offload.policies import HardKV, Policy
from offload.policies.registry import make_policy
from offload.runtime.shared_model import SharedModel
from offload.system.memory import available_cpus
from perf.papers.lychee_cluster import text_window
from perf.papers.observed import MODEL, open_model
from perf.results_file import Run, hide_loading_bars, script_options

INNER = ("exact_topk", "sketch", "lychee_cluster", "lfps", "union")
BUDGETS = (128, 256, 512, 1024)
SHARES = (0.85, 0.9, 0.95, 0.98)
TEXTS = ("prose", "code")
Row = dict[str, Any]


def compared(most: int) -> list[tuple[Row, Policy]]:
    """What each row says of its policy, and the policy: full attention first."""
    found: list[tuple[Row, Policy]] = [({"inner": "full"}, make_policy("full"))]
    for inner in INNER:
        found += [
            ({"inner": inner, "budget_tokens": n}, make_policy(inner, budget_tokens=n))
            for n in BUDGETS
        ]
        found += [
            ({"inner": inner, "top_p": p}, HardKV(make_policy(inner, budget_tokens=most), p))
            for p in SHARES
        ]
    return found


def main() -> None:
    options = share_options(__doc__, "paper-hard-kv").parse_args()
    hide_loading_bars()
    run = Run(options)
    kinds = compared(options.most)
    model = open_model([policy for _, policy in kinds], options.threads)
    rows: list[Row] = []
    for length in sorted(options.lengths):
        for text in options.texts:
            for window in range(options.windows):
                tokens = text_window(text, length + options.steps + 1, window)
                of_text = {"length": length, "text": text, "window": window}
                for row in measured(model, tokens, length, options.sample_every):
                    said, _ = kinds[row.pop("index")]
                    rows.append(of_text | said | row)
                settings = run.named("lengths", "windows", "steps", "most") | {"model": MODEL}
                run.write(settings, rows)


def share_options(description: str | None, name: str) -> argparse.ArgumentParser:
    """Of scripts that compare shares on texts."""
    parser = script_options(description, name)
    parser.add_argument("--lengths", type=int, nargs="+", default=[7168])
    parser.add_argument("--texts", nargs="+", default=TEXTS, choices=(*TEXTS, "json"))
    parser.add_argument("--windows", type=int, default=2, help="of each text and length")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--sample-every", type=int, default=8)
    parser.add_argument("--most", type=int, default=2048, help="the cap of a share's tokens")
    parser.add_argument("--threads", type=int, default=available_cpus())
    return parser


def measured(
    model: SharedModel,
    tokens: list[int],
    length: int,
    sample_every: int,
    policies: Iterable[int] | None = None,
) -> Iterator[Row]:
    """A row of each policy: the first `length` tokens are read, the others decoded.

    Args:
        policies: of the model's, full attention first; default: all.
    """
    following = tokens[length:]
    full: torch.Tensor | None = None
    with model.read(tokens[:length]) as prompt:
        for index in range(len(model.runtimes)) if policies is None else policies:
            row, logits = observe_text(
                model, index, prompt, following[:-1], sample_every=sample_every
            )
            full = logits if full is None else full
            loss, of_full = (
                float(negative_log_likelihood(x, torch.tensor(following[1:])).mean())
                for x in (logits, full)
            )
            kl = float(kl_divergence(logits, full).mean())
            yield {"index": index, **row, "kl": kl, "loss_change": loss - of_full}


if __name__ == "__main__":
    main()
