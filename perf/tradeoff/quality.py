"""RULER under every policy: `offload eval ruler`, several processes at once, each for one cell.

Each keeps its answers in a file of its own, from which the same run goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

from offload.bench.eval.labels import WINDOWS
from offload.bench.eval.record_file import Record
from offload.policies.registry import make_policy

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


def records_of(folder: Path, length: int, policies: Mapping[str, Any]) -> list[Record]:
    """What the files of `folder` have of a length, without lines that are still being written.

    Args:
        policies: options by label; `offload eval` has other labels, by what it takes for usual.
    """
    labels, records = {_as_text(options): label for label, options in policies.items()}, []
    for path in sorted(folder.glob(f"{length}-*.jsonl")):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if not whole:
            continue  # its process has only just begun
        header, *of_file = whole
        named = header["options"]["policies"]
        own = {name: labels[_as_text(options)] for name, options in named.items()}
        for record in of_file:
            answers = {own[name]: answer for name, answer in record["answers"].items()}
            records.append(record | {"answers": answers})
    return records


def _as_text(options: Any) -> str:
    return json.dumps(options, sort_keys=True)


def _default_windows(names: Sequence[str], given: Sequence[str]) -> list[str]:
    """Sinks and recent windows at their defaults, which `offload eval` has to be told."""
    given = [pair.partition("=")[0] for pair in given]
    pairs = []
    for name, key in product(names, WINDOWS):
        policy = make_policy(name)
        # All that the sinks leave.
        derived = (name, key) == ("streaming_llm", "recent_tokens")
        is_given = key in given or f"{name}.{key}" in given
        if key in type(policy).option_names() and not derived and not is_given:
            pairs.append(f"{name}.{key}={getattr(policy, key)}")
    return pairs


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
    pairs = [*options.option, *_default_windows(options.policies, options.option)]
    command += [f"--option={pair}" for pair in pairs]
    left = max(0.0, end - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
    except subprocess.TimeoutExpired:
        return "time is up"
    return "answered" if done.returncode == 0 else done.stderr.strip()[-1000:]
