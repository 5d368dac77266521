"""What a bound on a sequence's host memory costs: `python -m perf.papers.cascade`.

A text is read and its next tokens are decoded, teacher-forced, with all keys and values and within
a share of their bytes (`host_bytes_per_sequence`). What attention has left behind is merged into
condensed tokens whose keys are fitted to weigh as much ("fitted"), merged with keys that are means
("means"), or dropped ("dropped"). KL and perplexity are against full attention on the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from offload import OffloadedModel
from offload.bench.selection.metrics import kl_divergence, negative_log_likelihood
from offload.cascade.bound import CONDENSED_SHARE
from offload.cascade.condense import condense
from offload.system.memory import available_cpus
from perf.papers.lychee_cluster import text_window
from perf.papers.observed import MODEL
from perf.results_file import Run, hide_loading_bars, script_options

KINDS = ("fitted", "means", "dropped")
PAGE_TOKENS = 64
QUARTERS = 4
Row = dict[str, Any]


def main() -> None:
    parser = script_options(__doc__, "paper-cascade")
    parser.add_argument("--length", type=int, default=6144, help="tokens that are read")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--text", default="prose", choices=("prose", "code"))
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--condensed", type=float, nargs="+", default=[CONDENSED_SHARE])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    hide_loading_bars()
    run, rows = Run(options), []
    for window in options.windows:
        tokens = text_window(options.text, options.length + options.steps + 1, window)
        full = decoded(tokens, options.length, options.threads)
        for share in options.shares:
            for kind, condensed in variants(options.kinds, options.condensed):
                row = {"window": window, "share": share, "kind": kind, "condensed_share": condensed}
                row |= compared(tokens, options, full, row)
                rows.append(row)
                run.say(f"{row}")
        settings = run.named("length", "steps", "text", "windows") | {"model": MODEL}
        run.write(settings, rows)


def variants(kinds: Sequence[str], shares: Sequence[float]) -> list[tuple[str, float]]:
    """Kinds, each with the shares of condensed tokens that make a difference to it."""
    merged = [(kind, share) for kind in kinds if kind != "dropped" for share in shares]
    return merged + [("dropped", 0.0)] * ("dropped" in kinds)


def compared(tokens: Sequence[int], options: Any, full: Row, row: Row) -> Row:
    """Of one bound against `full`: means over all steps and over each quarter of them."""
    every_byte = full["bytes_per_token"] * (options.length + options.steps)
    bounded = decoded(
        tokens,
        options.length,
        options.threads,
        host_bytes_per_sequence=int(row["share"] * every_byte),
        condensed_share=row["condensed_share"],
        fits=row["kind"] != "means",
    )
    targets = torch.tensor(tokens[options.length : options.length + options.steps])
    logits = bounded.pop("logits")
    loss, of_full = (negative_log_likelihood(x, targets) for x in (logits, full["logits"]))
    kl = kl_divergence(logits, full["logits"])
    return {
        "kl": float(kl.mean()),
        "kl_of_quarters": [float(part.mean()) for part in kl.chunk(QUARTERS)],
        "loss": float(of_full.mean()),
        "loss_change": float((loss - of_full).mean()),
        "full_decode_seconds": full["decode_seconds"],
        **bounded,
    }


def decoded(
    tokens: Sequence[int], length: int, threads: int, *, fits: bool = True, **bound: Any
) -> Row:
    """Logits [steps, vocab_size] after `length` tokens and each that follows but the last two."""
    model = OffloadedModel.from_pretrained(
        MODEL, dtype="bfloat16", num_threads=threads, page_tokens=PAGE_TOKENS, **bound
    )
    cascade = model._offload.sequences.cascade
    if cascade is not None:
        cascade.condense_heads = functools.partial(condense, fits=fits)
    ids, cache = torch.tensor([tokens]), model.new_cache()
    with torch.no_grad():
        prompt = model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
        logits, start = [prompt.logits[0, -1]], time.perf_counter()
        before = dataclasses.replace(model.offload_stats())
        for position in range(length, len(tokens) - 2):
            step = model(ids[:, position : position + 1], past_key_values=cache)
            logits.append(step.logits[0, -1])
    (row,) = cache.tokens
    store = cache.store
    found: Row = {
        "logits": torch.stack(logits),
        "decode_seconds": time.perf_counter() - start,
        "seen": row.seen,
        "kept": row.kept,
        "condensed": row.condensed,
        "bytes_per_token": store.num_layers * store.page_bytes // store.page_tokens,
    }
    if cascade is not None:
        stats = model.offload_stats()
        found["slots"] = cascade.bound.slots
        found["prompt_condense_seconds"] = before.condense_seconds
        found["condense_seconds"] = stats.condense_seconds - before.condense_seconds
        found["condensed_tokens"] = stats.condensed_tokens - before.condensed_tokens
    return found


if __name__ == "__main__":
    main()
