"""perf/results/*.json: what was measured, on which machine and commit; and a script that does."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from offload.system.machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results"


def start_machine(commit: str | None = None) -> dict[str, Any]:
    """The machine, the commit and the load before a benchmark starts.

    Args:
        commit: that this tree is a copy of, on a machine that has no repository.
    """
    changed = commit is None and bool(_git("status", "--porcelain", "--", ":!perf/results"))
    return describe_machine() | {
        "commit": commit or _git("rev-parse", "HEAD") or "none",
        "uncommitted_changes": changed,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def write_results(
    name: str,
    *,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    folder: Path | None = None,
) -> Path:
    """Write FOLDER/NAME.json, by default in perf/results; returns its path."""
    folder = RESULTS if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    result = {"benchmark": name, "machine": machine, "settings": settings, "rows": rows}
    # Whole or not at all: a run that is killed while it writes keeps what was there.
    written = path.with_suffix(".json.new")
    written.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written.replace(path)
    return path


def read_results(name: str) -> dict[str, Any] | None:
    """What `write_results` wrote, or None if this was never measured."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def script_options(description: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with the options that every script has which writes results.

    Args:
        description: of the script.
        name: of its results file, if no other is given.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=name, help="of the results file, without .json")
    parser.add_argument("--output", type=Path, help="its folder; default: perf/results")
    parser.add_argument("--commit", help="of this tree, where there is no repository")
    return parser


class Run:
    """One run of a script, from now on.

    Args:
        options: those of `script_options`.

    Attributes:
        machine: as `start_machine` found it.
        started: on `time.monotonic()`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.started = time.monotonic()
        self.machine = start_machine(options.commit)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def named(self, *names: str) -> dict[str, Any]:
        """Options by name, for the settings of the results."""
        return {name: getattr(self._options, name) for name in names}

    def say(self, line: str) -> None:
        """Print a line with the time."""
        print(f"[{self.seconds:6.1f} s] {line}", flush=True)

    def write(
        self, settings: dict[str, Any], rows: list[dict[str, Any]], *, part: str = ""
    ) -> dict[str, Any]:
        """Write the results, of a part into a file of its own; returns what is in it."""
        name = self._options.name + (f"-{part}" if part else "")
        path = write_results(
            name, machine=self.machine, settings=settings, rows=rows, folder=self._options.output
        )
        self.say(f"wrote {path}")
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


@contextmanager
def progress_bar(name: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """What shows how much is done, and of how much."""
    with tqdm(desc=name, unit=unit) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
