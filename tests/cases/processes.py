"""Programs that run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(
    program: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python in the repository's folder, for at most two minutes, without its warnings."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
