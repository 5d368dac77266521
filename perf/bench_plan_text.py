"""What `offload plan` says of a model, beside what `offload bench decode` then measures of it.

`python -m perf.bench_plan_text --device cuda --name gpu-plan-text` calls both commands as a user
would, on real text: the machine is measured first, and the model is then loaded with the placement
that its profile gives; one policy at a time. A few minutes. `perf.bench_plan` does the same with
random weights of a large model.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from offload.bench.decode.engines import OURS
from offload.cli import app
from perf.results_file import Run, script_options
from perf.tables.placement_tables import text_plan_table

POLICIES = ("exact_topk", "lfps", "lychee_cluster", "per_head", "lychee_decode", "tidal_decode")
PEERS = ("graph", "transformers", "transformers-compiled")
Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 if a prediction is off by more than it may be."""
    parser = script_options(__doc__, "plan-text")
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct-32k", help="a model or its folder")
    add("--device", default="cuda")
    add("--threads", type=int)
    add("--contexts", type=int, nargs="+", default=[8192, 32000])
    add("--policies", nargs="+", default=list(POLICIES))
    add("--budget-tokens", type=int, default=1024)
    add("--peers", nargs="*", choices=PEERS, help="default: all on a GPU, else none")
    add("--tolerance", type=float, default=0.15, help="of predicted milliseconds")
    options = parser.parse_args(arguments)
    run = Run(options)
    peers = options.peers
    if peers is None:
        peers = [] if options.device == "cpu" else PEERS
    shared = ["--device", options.device, "--budget-tokens", options.budget_tokens]
    if options.threads is not None:
        shared += ["--threads", options.threads]
    plans: list[Row] = []
    for policy in options.policies:
        for context in options.contexts:
            # Other contexts and policies are planned with the first one's profile.
            anew = ["--remeasure"] if not plans else []
            of_plan = ["--policy", policy, "--context", context, *anew, *shared]
            plans.append(called("plan", options.model, *of_plan))
            run.say(f"{policy}, {context:,} tokens: {plans[-1]['milliseconds_per_step']:.2f} ms")
    decoded = called(
        "bench",
        "decode",
        options.model,
        "--context",
        ",".join(map(str, options.contexts)),
        "--policy",
        ",".join(options.policies),
        "--engines",
        ",".join(["offload", *peers]),
        *shared,
    )
    settings = run.named("model", "device", "budget_tokens", "contexts", "policies")
    document = run.write(
        settings | {"dtype": decoded["settings"]["dtype"], "threads": plans[0]["num_threads"]},
        compared(plans, decoded["rows"]),
    )
    print(text_plan_table(document))
    errors = [abs(row["error"]) for row in document["rows"] if row["engine"] == OURS]
    within = sum(error <= options.tolerance for error in errors)
    run.say(f"{within} of {len(errors)} predictions within {options.tolerance:.0%}")
    return int(within < len(errors))


def called(*arguments: Any) -> Any:
    """What a command of ours prints with --json; its log goes to stderr."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app([*map(str, arguments), "--json"], standalone_mode=False)
    return json.loads(printed.getvalue())


def compared(plans: Sequence[Row], decoded: Sequence[Row]) -> list[Row]:
    """A row of each measured engine; of ours with what its plan predicted."""
    plan_of = {(plan["policy"], plan["context"]): plan for plan in plans}
    rows = []
    for measured in decoded:
        names = ("engine", "policy", "kv_len", "steps")
        times = ("milliseconds", "milliseconds_p10", "milliseconds_p90")
        row = {name: measured.get(name) for name in (*names, *times)}
        plan = plan_of.get((row["policy"], row["kv_len"]))
        if plan is not None:
            predicted = plan["milliseconds_per_step"]
            row |= {
                "predicted_milliseconds": predicted,
                "error": predicted / row["milliseconds"] - 1.0,
                "predicted_microseconds": plan["microseconds"],
                "map": plan["placement"],
                "assumed": plan["assumed"],
            }
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
