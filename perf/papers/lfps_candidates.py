"""Keys that LFPS scores, by alpha and context: `python -m perf.papers.lfps_candidates`.

Table 4 of its paper, which keeps the sinks elsewhere and has no recent window: tokens nearby are
candidates as others are, where the slash table names them. The recent window is the newest token
here, too, and what lies before it counts.
"""

from __future__ import annotations

import itertools
from typing import Any

from offload import load_tokenizer
from offload.bench.selection.observed_text import observe_text
from offload.policies import Policy
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs
from perf.papers.lfps_replay import AsInThePaper
from perf.papers.observed import MODEL, open_model
from perf.results_file import Run, hide_loading_bars, script_options

ALPHAS = (0.1, 0.2, 0.3, 0.4)
LENGTHS = (4096, 8192, 16384, 32640)
STEPS = 64
BUDGET = 0.02  # of the context


def _policy(length: int, alpha: float) -> Policy:
    budget = round(BUDGET * length)
    return AsInThePaper(alpha=alpha, budget_tokens=budget, recent_tokens=1)


def main() -> None:
    parser = script_options(__doc__, "paper-lfps-candidates")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    hide_loading_bars()
    run, threads = Run(options), available_cpus()
    text = "\n\n".join(stdlib_paragraphs())
    tokens = load_tokenizer(MODEL)(text, verbose=False)["input_ids"]
    settings = {"model": MODEL, "text": "docstrings of the standard library", "threads": threads}
    settings |= run.named("lengths", "steps")
    grid = list(itertools.product(options.lengths, ALPHAS))
    model = open_model([_policy(*point) for point in grid], threads)
    rows: list[dict[str, Any]] = []
    for length, points in itertools.groupby(enumerate(grid), lambda point: point[1][0]):
        following = tokens[length : length + options.steps]
        with model.read(tokens[:length]) as prompt:
            for index, (_, alpha) in points:
                row, _ = observe_text(model, index, prompt, following, sample_every=options.steps)
                policy = model.runtimes[index].config.policy
                named = {"alpha": alpha, "length": length, "budget_tokens": policy.budget_tokens}
                rows.append(named | {"sink_tokens": policy.sink_tokens} | row)
                run.say(f"{length:,} tokens, alpha {alpha}: {row['candidate_share']:.1%}")
        run.write(settings, rows)  # after each length, should the next take too long


if __name__ == "__main__":
    main()
