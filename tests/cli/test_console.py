"""What every command runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer
from cases.processes import run_program

from offload.cli.console import running


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("latin-1", b"caf\xe9 \\u2603"), ("ascii", b"caf\\xe9 \\u2603"), ("utf-8", "café ☃".encode())],
)
def test_characters_that_stdout_has_not(encoding: str, shown: bytes) -> None:
    script = "from offload.cli.console import running\nwith running(): print('caf\\xe9 \\u2603')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert result.stdout == shown + b"\n"


def test_no_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """torch raises a RuntimeError where its allocator gets none."""
    message = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: y"
    with pytest.raises(typer.Exit), running():
        raise RuntimeError(message)
    assert capsys.readouterr().err == f"error: {message}\n"
    with pytest.raises(RuntimeError, match="a defect"), running():
        raise RuntimeError("a defect")


LONG = "a line that is longer than the forty columns that there are"


@pytest.mark.parametrize("log_format", [None, "text", "json"])
@pytest.mark.parametrize("raises", ["ValueError", "KeyError"])
def test_nothing_is_wrapped_for_who_is_no_terminal(log_format: str | None, raises: str) -> None:
    """Logs of all levels, refusals, and as JSON defects, too."""
    script = f"""if True:
        import logging, sys, typer
        from offload.cli.console import running
        try:
            with running(log_format={log_format!r}):
                logging.getLogger("offload.a").info({LONG!r})
                logging.getLogger("other").warning({LONG!r})
                raise {raises}({LONG!r})
        except typer.Exit:
            sys.exit(1)
    """
    done = run_program(script, COLUMNS="40")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert sum(LONG in line for line in lines) == 3
    if log_format == "json":
        *_, last = records = [json.loads(line) for line in lines]
        assert [each["level"] for each in records] == ["INFO", "WARNING", "ERROR"]
        assert ("exception" in last) == (raises == "KeyError")
    elif raises == "ValueError":
        assert len(lines) == 3
        assert lines[-1] == f"error: {LONG}"
