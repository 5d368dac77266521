"""From a fresh process to the first token, and to `--help`: `python -m perf.bench_startup`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from offload.loading.embedded_package import EMBEDDED_MODEL, embedded_gguf
from offload.loading.gguf import converted_folder
from perf.results_file import ROOT, Run, script_options

_COMMANDS = {
    "offload --help": ["--help"],
    "offload generate": ["generate", EMBEDDED_MODEL, "--prompt", "hi", "--max-new-tokens", "1"],
}
_RUN = ["-c", "from offload.cli import app; app()"]


def run_python(arguments: Sequence[str]) -> tuple[float, str]:
    """(seconds, stdout) of a Python process, its modules compiled as those of a package are."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = script_options(__doc__, "startup")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()

    run = Run(options)
    folder = str(converted_folder(embedded_gguf(), EMBEDDED_MODEL))
    for arguments in _COMMANDS.values():  # compiles what was not, once
        run_python([*_RUN, *arguments])
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in tqdm(range(options.repeats), desc="start-up", unit="round"):
        for command, arguments in _COMMANDS.items():
            elapsed, _ = run_python([*_RUN, *arguments])
            seconds.setdefault(("offload", command), []).append(elapsed)
        for engine in ("offload", "transformers"):
            _, printed = run_python(["-m", "perf.startup_probe", engine, folder])
            for phase, elapsed in json.loads(printed).items():
                seconds.setdefault((engine, phase), []).append(elapsed)
    rows: list[dict[str, Any]] = []
    for (engine, phase), values in seconds.items():
        p10, median, p90 = (float(t) for t in np.percentile(values, [10, 50, 90]))
        times = {"seconds": median, "seconds_p10": p10, "seconds_p90": p90}
        rows.append({"engine": engine, "phase": phase, **times})
    run.write({"model": EMBEDDED_MODEL, "dtype": "bfloat16", "repeats": options.repeats}, rows)


if __name__ == "__main__":
    main()
