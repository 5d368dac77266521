"""Parts of an `offload eval`, each in a process of its own, as many at a time as CPUs allow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offload.bench.eval.record_file import Record
from offload.system.memory import available_cpus
from perf.results_file import ROOT, Run

Found = tuple[dict[str, Any], list[Record]]


def read_records(path: Path) -> Found:
    """Options and whole records of a --resume file, which may not be there."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return (whole[0]["options"], whole[1:]) if whole else ({}, [])


def answered_parts(
    arguments: Sequence[str], parts: Sequence[Sequence[str]], run: Run, limit_seconds: float
) -> list[Found]:
    """What each part has answered when it is done or the time of the run is over.

    Args:
        arguments: of `offload eval`, for all parts.
        parts: further arguments of each. Each part has its share of the CPUs.
    """
    threads = max(1, available_cpus() // len(parts))
    command = [sys.executable, "-c", "from offload.cli import app; app()", "eval", *arguments]
    command.append(f"--threads={threads}")

    def answer(part: Sequence[str], file: Path) -> None:
        left = limit_seconds - run.seconds
        if left <= 0:
            run.say(f"{' '.join(part)}: the time was over")
            return
        with file.with_suffix(".err").open("wb") as errors:
            try:
                done = subprocess.run(
                    [*command, *part, f"--resume={file}"],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    timeout=left,
                    check=False,
                )
            except subprocess.TimeoutExpired:  # it loses the answer that it was at
                run.say(f"{' '.join(part)}: the time is over")
                return
        if done.returncode > 0:
            run.say(f"{' '.join(part)}: {file.with_suffix('.err').read_text()[-400:]}")

    with (
        TemporaryDirectory() as folder,
        ThreadPoolExecutor(max(1, available_cpus() // threads)) as threads_of_parts,
    ):
        files = [Path(folder) / f"{i}.jsonl" for i in range(len(parts))]
        list(threads_of_parts.map(answer, parts, files))
        return [read_records(file) for file in files]


def write_answers(
    found: Sequence[Found],
    rows_of: Callable[[list[Record]], list[dict[str, Any]]],
    run: Run,
    *names: str,
) -> None:
    """Rows of all records, beside the parts' options and those of the run that have `names`."""
    records = [record for _, of_part in found for record in of_part]
    run.say(f"samples: {dict(Counter((r['task'], r['length']) for r in records))}")
    if not records:
        sys.exit("nothing was answered")
    settings = next(settings for settings, of_part in found if of_part)
    of_all = {name: x for name, x in settings.items() if name not in ("tasks", "seed")}
    run.write(of_all | run.named(*names), rows_of(records))
