"""Starts a command as several ranks of one model (see `offload.ranks.group`).

Under torchrun the ranks are there already. Otherwise this process starts itself once per rank, each
on its part of the CPUs. Rank 0 has the terminal; the others are silent unless one of them is the
only one that knows what went wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any

from offload.system.memory import available_cpus

# Ranks find out by themselves when one of them fails, and say why; then they are ended.
_GRACE_SECONDS = 12.0
# Without the working directory on the path, where a torch.py may lie; Python 3.10 has no -P.
_PROGRAM = """import sys
sys.path = [folder for folder in sys.path if folder]
from offload.cli import app
app(prog_name="offload")"""
_COMMAND = (sys.executable, "-c", _PROGRAM)


def is_rank() -> bool:
    """Whether this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_silent_rank() -> bool:
    """Whether another rank prints the results."""
    return is_rank() and os.environ["RANK"] != "0"


def run_ranks(
    world_size: int,
    arguments: Sequence[str],
    *,
    command: Sequence[str] = _COMMAND,
    stdin: str | None = None,
) -> int:
    """Run `command` with `arguments` as so many ranks; the exit code of the first that failed.

    Args:
        stdin: what each of them reads there; None: nothing.
    """
    port = free_port()
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        try:
            for rank, cpus in enumerate(cpu_slices(allowed, world_size)):
                os.sched_setaffinity(0, cpus)  # a child begins with what its parent has
                ranks.append(
                    subprocess.Popen(
                        [*command, *arguments],
                        env=os.environ | rank_environment(rank, world_size, port),
                        stdin=_stdin(stack, stdin),
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=None if rank == 0 else errors[rank],
                    )
                )
        finally:
            os.sched_setaffinity(0, allowed)
        failed = _wait(ranks)
        if failed is None:
            return 0
        was_told = ranks[0].returncode not in (None, 0) and ranks[0].returncode > 0
        _end(ranks)
        if failed != 0 and not was_told:
            errors[failed].seek(0)
            sys.stderr.write(errors[failed].read().decode(errors="replace"))
        code = ranks[failed].returncode
        if code < 0:
            name = signal.Signals(-code).name
            print(f"error: rank {failed} was ended by {name}", file=sys.stderr)
        return code if code > 0 else 128 - code


def cpu_slices(allowed: Sequence[int], world_size: int) -> list[list[int]]:
    """The CPUs of each rank: neighbours, and no more of them than a quota lets all keep busy."""
    if len(allowed) < world_size:
        return [list(allowed)] * world_size
    width = len(allowed) // world_size
    most = max(1, available_cpus() // world_size)
    return [list(allowed[width * rank : width * (rank + 1)][:most]) for rank in range(world_size)]


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Until all ranks have ended, or some time after one has failed; the first that failed."""
    failed: int | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if failed is None:
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                deadline = time.monotonic() + _GRACE_SECONDS
        if all(code is not None for code in codes):
            break
        time.sleep(0.05)
    return failed


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for ask, seconds in ((subprocess.Popen.terminate, 3.0), (subprocess.Popen.kill, 10.0)):
        left = [process for process in ranks if process.poll() is None]
        for process in left:
            ask(process)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(0.02)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _stdin(stack: ExitStack, text: str | None) -> int | IO[Any]:
    if text is None:
        return subprocess.DEVNULL
    file: IO[Any] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack is one)
    file.write(text.encode())
    file.seek(0)
    return file


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
