"""What every command runs in."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

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
