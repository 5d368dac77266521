"""What a bound on a sequence's host memory costs: `python -m perf.papers.cascade`.

A text is read and its next tokens are decoded, teacher-forced, with all keys and values and within
a share of their bytes (`host_bytes_per_sequence`). What is looked up when the text is read again
stays, the rest is dropped ("reread"); or what attention has left behind is merged into condensed
tokens whose keys are fitted to weigh as much ("fitted"), merged with keys that are means ("means"),
or dropped ("dropped"); or SnapKV or R-KV say what is dropped ("snapkv", "rkv") or merged
("snapkv-fitted", "rkv-fitted"). KL, perplexity and the error of attention's output are against full
attention on the same tokens. A long generation:

    python -m perf.papers.cascade --name paper-cascade-long --length 4096 --steps 4096 \\
        --windows 0 --shares 0.25 --kinds reread fitted dropped snapkv rkv snapkv-fitted
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.bench.budget.bounded_text import compare_eviction, decode_text
from offload.bench.budget.evictions import EVICTIONS
from offload.cascade.bound import CONDENSED_SHARE
from offload.system.memory import available_cpus
from perf.papers.lychee_cluster import text_window
from perf.papers.observed import MODEL
from perf.results_file import Run, hide_loading_bars, script_options

KINDS = ("reread", "fitted", "means", "dropped")
PAGE_TOKENS = 64
Row = dict[str, Any]


def main() -> None:
    parser = script_options(__doc__, "paper-cascade")
    parser.add_argument("--length", type=int, default=6144, help="tokens that are read")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--text", default="prose", choices=("prose", "code"))
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--condensed", type=float, nargs="+", default=[CONDENSED_SHARE])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=EVICTIONS)
    parser.add_argument("--sample-every", type=int, default=16, help="steps: outputs of attention")
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    hide_loading_bars()
    run, rows = Run(options), []
    for window in options.windows:
        tokens = text_window(options.text, options.length + options.steps + 1, window)
        loaded: Row = {
            "dtype": "bfloat16",
            "num_threads": options.threads,
            "page_tokens": PAGE_TOKENS,
            "sample_every": options.sample_every,
        }
        full = decode_text(MODEL, tokens, options.length, **loaded)
        for share in options.shares:
            for kind, condensed in variants(options.kinds, options.condensed):
                bound: Row = {"share": share, "condensed_share": condensed}
                row = {"window": window, "kind": kind, **bound}
                row |= compare_eviction(
                    full, MODEL, tokens, options.length, eviction=kind, **bound, **loaded
                )
                rows.append(row)
                run.say(f"{ {**row, 'error_of_layers': '...'} }")
        named = run.named("length", "steps", "text", "windows", "sample_every")
        settings = named | {"model": MODEL}
        run.write(settings, rows)


def variants(kinds: Sequence[str], shares: Sequence[float]) -> list[tuple[str, float]]:
    """Kinds, each with the shares of condensed tokens that make a difference to it."""
    merging = {kind: EVICTIONS[kind].merges for kind in kinds}
    return [(kind, x) for kind in kinds for x in (shares if merging[kind] else [0.0])]


if __name__ == "__main__":
    main()
