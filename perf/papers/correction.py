"""What cache correction brings back in a long answer: `python -m perf.papers.correction`.

A text is read and its next tokens are decoded, teacher-forced: with full attention, and by policies
with a share of the tokens as budget, with `cache_correction_every` and without. KL and perplexity
are against full attention on the same tokens. TidalDecode (ICLR 2025) and LycheeDecode (arXiv
2602.04541) correct their caches so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload import OffloadedModel
from offload.bench.budget.drift import QUARTERS
from offload.bench.selection.metrics import by_rows, kl_divergence, negative_log_likelihood
from offload.policies.registry import make_policy
from offload.system.memory import available_cpus
from perf.papers.lychee_cluster import text_window
from perf.papers.observed import MODEL
from perf.results_file import Run, hide_loading_bars, script_options

POLICIES = ("exact_topk", "lychee_decode", "tidal_decode")
Row = dict[str, Any]


def main() -> None:
    parser = script_options(__doc__, "paper-correction")
    parser.add_argument("--length", type=int, default=2048, help="tokens that are read")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--text", default="prose", choices=("prose", "code"))
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--every", type=int, nargs="+", default=[256])
    parser.add_argument("--budget", type=float, default=0.1, help="share of all tokens")
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    hide_loading_bars()
    run, rows = Run(options), []
    budget_tokens = int(options.budget * (options.length + options.steps))
    for window in options.windows:
        tokens = text_window(options.text, options.length + options.steps + 1, window)
        loaded: Row = {"dtype": "bfloat16", "num_threads": options.threads}
        full, of_full = decode(tokens, options.length, **loaded)
        for name in options.policies:
            policy = make_policy(name, budget_tokens=budget_tokens)
            for every in (None, *options.every):
                logits, row = decode(
                    tokens,
                    options.length,
                    policy=policy,
                    cache_correction_every=every,
                    **loaded,
                )
                row = {"window": window, "policy": name, "every": every} | row
                row |= compare(logits, full, tokens[options.length :])
                row["full_decode_seconds"] = of_full["decode_seconds"]
                rows.append(row)
                run.say(str(row))
        named = run.named("length", "steps", "text", "windows", "budget")
        run.write(named | {"model": MODEL, "budget_tokens": budget_tokens}, rows)


def decode(tokens: Sequence[int], length: int, **options: Any) -> tuple[Tensor, Row]:
    """Logits [steps, vocab_size] behind the first `length` tokens, and what it took.

    Args:
        tokens: the last one is only predicted.
        options: of `OffloadedModel.from_pretrained`.
    """
    model = OffloadedModel.from_pretrained(MODEL, **options)
    ids, cache = torch.tensor([tokens]), model.new_cache()
    with torch.no_grad():
        prompt = model(ids[:, :length], past_key_values=cache, logits_to_keep=1).logits[0]
        logits = prompt.new_empty(len(tokens) - 1 - length, prompt.shape[1])
        # The prompt's logits are exact in every run.
        start = time.perf_counter()
        for step in range(len(logits)):
            token = ids[:, length + step : length + step + 1]
            logits[step] = model(token, past_key_values=cache).logits[0, -1]
        seconds = time.perf_counter() - start
    stats = model.offload_stats()
    return logits, {
        "decode_seconds": seconds,
        "corrected_tokens": stats.corrected_tokens,
        "correction_seconds": stats.correction_seconds,
    }


def compare(logits: Tensor, full: Tensor, tokens: Sequence[int]) -> Row:
    """KL and loss against `full`, of all steps and of each quarter of them.

    Args:
        tokens: those that are decoded, and the one behind them.
    """
    targets = torch.tensor(tokens[1:])
    kl = by_rows(kl_divergence, logits, full)
    loss, of_full = (by_rows(negative_log_likelihood, x, targets) for x in (logits, full))
    return {
        "kl": float(kl.mean()),
        "kl_of_quarters": [float(part.mean()) for part in kl.tensor_split(QUARTERS)],
        "loss": float(of_full.mean()),
        "loss_change": float((loss - of_full).mean()),
    }


if __name__ == "__main__":
    main()
