"""`offload serve`: what is refused before anything is loaded. tests/serve has the rest."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from offload.cli import app


@pytest.mark.parametrize(
    "option", [("--tensor-parallel-size", "2"), ("--host-bytes-per-sequence", "64MiB")]
)
def test_options_of_one_generation(option: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", *option])
    assert result.exit_code == 1
    assert f"{option[0]} is for one generation at a time" in " ".join(result.output.split())
