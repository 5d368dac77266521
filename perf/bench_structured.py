"""Does it help to select along the text's structure? Quest over fixed pages and over chunks.

LycheeCluster's pilot study (arXiv 2603.08453, section 3.1, Figure 2) asks that of StrucText-Eval.
Here the questions are those of `offload eval structured`. A process of its own answers each kind
of text and each seed, with its share of the CPUs; what is answered when the time is over counts.
"""

from __future__ import annotations

from typing import Any

from offload.bench.eval.record_file import Record
from offload.bench.eval.structured import STRUCTURED_TASKS
from offload.loading.gguf import LONG_CONTEXT_MODEL
from perf.eval_parts import answered_parts, write_answers
from perf.results_file import Run, script_options

POLICIES = ("--policy", "exact_topk,quest,lychee_cluster", "--option", "quest.chunks=false,true")


def score_rows(records: list[Record]) -> list[dict[str, Any]]:
    """A row of each kind, length and policy; its scores are of the same samples as other rows'."""
    cells: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record["length"], record["task"]), []).append(record)
    return [
        {
            "task": task,
            "length": length,
            "policy": label,
            "scores": [record["answers"][label]["score"] for record in cells[length, task]],
        }
        for length, task in sorted(cells)
        for label in cells[length, task][0]["answers"]
    ]


def main() -> None:
    parser = script_options(__doc__, "structured")
    parser.add_argument("--model", default=LONG_CONTEXT_MODEL)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--budget-tokens", default="128,256,512")
    parser.add_argument("--fields", type=int, default=1)
    parser.add_argument("--samples", type=int, default=10, help="of each kind, length and seed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit-seconds", type=float, default=3600.0)
    options = parser.parse_args()
    run = Run(options)
    parts = [(task, seed) for seed in range(options.seeds) for task in STRUCTURED_TASKS]
    asked = run.named("lengths", "budget_tokens", "fields", "samples", "device")
    arguments = ["structured", options.model, *POLICIES]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    found = answered_parts(
        arguments,
        [[f"--tasks={task}", f"--seed={seed}"] for task, seed in parts],
        run,
        options.limit_seconds,
    )
    write_answers(found, score_rows, run, "seeds")


if __name__ == "__main__":
    main()
