"""RULER within a bound on each sequence (`host_bytes_per_sequence`), beside all keys and values.

Full attention and policies answer the prompts of `offload eval ruler` with all of them, and
within shares of their bytes: what stays is chosen by rereading ("reread") or by attention
("fitted"); rereading is not for every policy. A process of its own answers each task and seed; what
is answered when the time is over counts.
"""

from __future__ import annotations

from typing import Any

from offload.bench.eval.record_file import Record
from offload.bench.eval.ruler import RULER_TASKS
from offload.loading.gguf import LONG_CONTEXT_MODEL
from perf.eval_parts import answered_parts, write_answers
from perf.results_file import Run, script_options

MEASURES = ("score", "slots", "condensed_tokens", "attended_tokens", "prefill_seconds")


def answer_rows(records: list[Record]) -> list[dict[str, Any]]:
    """A row of each task and policy, with `MEASURES` of its samples: the same as other rows'."""
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    return [
        {
            "task": task,
            "policy": label,
            **{
                measure: [_measured(record, label, measure) for record in of_task]
                for measure in MEASURES
            },
        }
        for task, of_task in sorted(tasks.items())
        for label in of_task[0]["answers"]
    ]


def _measured(record: Record, label: str, measure: str) -> Any:
    """Of an answer; its prompt was read for it, within a bound, or for all policies."""
    answer = record["answers"][label]
    return answer.get(measure, record.get(measure) if measure == "prefill_seconds" else None)


def main() -> None:
    parser = script_options(__doc__, "bounded-ruler")
    parser.add_argument("--model", default=LONG_CONTEXT_MODEL)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tasks", nargs="+", default=[*RULER_TASKS], choices=[*RULER_TASKS])
    parser.add_argument("--policies", default="full")
    parser.add_argument("--budget-tokens", type=int, default=512)
    parser.add_argument("--option", nargs="*", default=[])
    parser.add_argument("--host-share", default="0.5,0.25")
    parser.add_argument("--evictions", default="auto,fitted")
    parser.add_argument("--page-tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1, help="of each task and seed")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, default=3600.0)
    options = parser.parse_args()
    run = Run(options)
    asked = run.named("budget_tokens", "host_share", "evictions", "page_tokens", "samples")
    arguments = ["ruler", options.model, f"--context={options.length}"]
    arguments += [f"--policy={options.policies}", *(f"--option={x}" for x in options.option)]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    found = answered_parts(
        arguments,
        [
            [f"--tasks={t}", f"--seed={seed}"]
            for seed in range(options.seeds)
            for t in options.tasks
        ],
        run,
        options.limit_seconds,
    )
    write_answers(found, answer_rows, run, "seeds", "length")


if __name__ == "__main__":
    main()
