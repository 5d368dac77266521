"""perf/results/*.json: what was measured, on which machine and commit."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def read_results(name: str) -> dict[str, Any] | None:
    """What `write_results` wrote, or None if this was never measured."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
