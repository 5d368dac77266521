"""RULER under every policy: `offload eval ruler`, several processes at once, each for one cell.

Each keeps its answers in a file of its own, from which the same run goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path

from offload.bench.eval.record_file import Record

Cell = tuple[int, str]  # length, task


def answer_all(
    options: argparse.Namespace,
    folder: Path,
    say: Callable[[str], None],
    on_cell: Callable[[int], None],
) -> None:
    """Have answered what the files of `folder` have no record of, until the time is up.

    Args:
        options: of `perf.bench_tradeoff`.
        on_cell: called with the length of a cell that has ended.

    Raises:
        RuntimeError: some cells were not answered; the others are in `folder`.
    """
    end, failures = time.monotonic() + options.seconds, list[str]()
    folder.mkdir(exist_ok=True)
    # The longest first: what is left at the end is short.
    cells = sorted(dict.fromkeys(product(options.lengths, options.tasks)), key=lambda x: -x[0])
    with ThreadPoolExecutor(options.processes) as pool:
        ended = {pool.submit(_answer, options, cell, folder, end): cell for cell in cells}
        for number, each in enumerate(as_completed(ended), 1):
            length, task = ended[each]
            status = each.result()
            if status not in ("answered", "time is up"):
                failures.append(f"{task}, {length:,} tokens: {status}")
            say(f"{number} of {len(cells)} cells: {task}, {length:,} tokens: {status}")
            on_cell(length)
    if failures:
        raise RuntimeError(f"{len(failures)} cells were not answered, the first: {failures[0]}")


def records_of(folder: Path, length: int) -> list[Record]:
    """What the files of `folder` have of a length, without lines that are still being written."""
    lines = [
        line
        for path in sorted(folder.glob(f"{length}-*.jsonl"))
        for line in path.read_text("utf-8").splitlines(keepends=True)[1:]
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _answer(options: argparse.Namespace, cell: Cell, folder: Path, end: float) -> str:
    """How it ended, in words."""
    length, task = cell
    command = [sys.executable, "-m", "offload", "eval", "ruler", options.model, "--json"]
    asked = {
        "policy": ",".join(options.policies),
        "budget-tokens": ",".join(map(str, options.budgets)),
        "context": length,
        "tasks": task,
        "samples": options.samples,
        "seed": options.seed,
        "dtype": options.dtype,
        "device": options.quality_device,
        "reads-on": options.reads_on,
        "threads": options.quality_threads,
        "resume": folder / f"{length}-{task}.jsonl",
    }
    command += [f"--{name}={value}" for name, value in asked.items() if value is not None]
    command += [f"--option={pair}" for pair in options.option]
    left = max(0.0, end - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return "time is up"
    return "answered" if done.returncode == 0 else done.stderr.strip()[-1000:]
