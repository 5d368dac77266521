"""How well the policies select on SmolLM2 and real text: `python -m perf.bench_quality`.

`offload bench quality` with budgets of 1,024 tokens and of 2 % of the context; more options are
those of the command.
"""

from __future__ import annotations

import json
import subprocess
import sys

from offload.system.memory import available_cpus
from perf.results_file import ROOT, Run, script_options

CONTEXT = 6144
BUDGETS = (1024, round(0.02 * CONTEXT))


def main() -> None:
    options, more = script_options(__doc__, "selection").parse_known_args()
    run = Run(options)
    command = [sys.executable, "-m", "offload", "bench", "quality", "--json"]
    command += ["--context", f"{CONTEXT}", "--budget-tokens", ",".join(map(str, BUDGETS))]
    command += ["--threads", f"{available_cpus()}", *more]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    document = json.loads(done.stdout)
    settings = document["settings"]
    settings["text"] = settings["text"]["path"] or "docstrings of the standard library"
    run.write(settings, [{"part": "quality"} | row for row in document["rows"]])


if __name__ == "__main__":
    main()
