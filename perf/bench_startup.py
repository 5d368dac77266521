"""From a fresh process to the first token, and to `--help`: `python -m perf.bench_startup`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from offload.loading.gguf import EMBEDDED_MODEL
from offload.loading.names import resolve_folder
from perf.results_file import ROOT, start_machine, write_results

_HELP = "import sys; sys.argv = ['offload', '--help']; from offload.cli import app; app()"


def run_python(arguments: Sequence[str]) -> tuple[float, str]:
    """(seconds, stdout) of a Python process."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats

    machine = start_machine()
    folder = str(resolve_folder(EMBEDDED_MODEL))
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in tqdm(range(repeats), desc="start-up", unit="round"):
        elapsed, _ = run_python(["-c", _HELP])
        seconds.setdefault(("offload", "offload --help"), []).append(elapsed)
        for engine in ("offload", "transformers"):
            _, printed = run_python(["-m", "perf.startup_probe", engine, folder])
            for phase, elapsed in json.loads(printed).items():
                phase_name = phase.removesuffix("_seconds").replace("_", " ")
                seconds.setdefault((engine, phase_name), []).append(elapsed)
    rows: list[dict[str, Any]] = []
    for (engine, phase), values in seconds.items():
        p10, median, p90 = (float(t) for t in np.percentile(values, [10, 50, 90]))
        rows.append(
            {
                "engine": engine,
                "phase": phase,
                "seconds": median,
                "seconds_p10": p10,
                "seconds_p90": p90,
            }
        )
    settings = {"model": EMBEDDED_MODEL, "dtype": "bfloat16", "repeats": repeats}
    print(write_results("startup", machine=machine, settings=settings, rows=rows))


if __name__ == "__main__":
    main()
