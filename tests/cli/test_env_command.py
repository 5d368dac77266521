"""`offload env`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from cases.processes import run_program
from typer.testing import CliRunner

from cpu_ops.native import available_isas, isa_name
from offload.cli import app
from offload.system.machine import describe_machine
from offload.system.memory import available_cpus

runner = CliRunner(env={"COLUMNS": "200"})


def test_json() -> None:
    result = runner.invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["isa"] == isa_name()
    assert facts["isas_available"] == available_isas()
    assert facts["cpus_usable"] == available_cpus()
    assert 1 <= facts["cpus_usable"] <= facts["cpus_present"]
    assert 0 < facts["memory_usable_bytes"] <= facts["memory_bytes"]
    assert facts["cache_folder"]


def test_table() -> None:
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 0
    for text in ("torch", "instruction set", isa_name(), "cache folder", "usable of"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("reason", "backend"), [(None, "graph"), ("it cannot wait", "stream: it cannot wait")]
)
def test_gpus_and_the_backend_they_would_use(reason, backend, monkeypatch) -> None:
    monkeypatch.setattr("offload.system.machine.gpus", lambda: ["NVIDIA T4"])
    monkeypatch.setattr("gpu_ops.flags.why_no_flags", lambda device: reason)
    assert describe_machine()["gpu_backends"] == [backend]
    assert backend in runner.invoke(app, ["env"]).stdout


def test_the_description_names_no_host_and_no_path() -> None:
    described = json.dumps(describe_machine())
    assert os.uname().nodename not in described
    assert str(Path.home()) not in described


def test_an_unknown_isa_is_one_line_on_stderr() -> None:
    done = run_program("from offload.cli import app; app()", "env", OFFLOAD_ISA="sse9")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: unknown ISA 'sse9'; available: scalar" in done.stderr
