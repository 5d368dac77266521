"""What schemathesis makes of /openapi.json: requests that keep to it, and others."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cases.tiny_models import make_tiny_model
from serve.conftest import serving

from offload import OffloadedModel
from offload.engine.sessions import Sessions
from offload.serve.server import Access

SECONDS = float(os.environ.get("OFFLOAD_SOAK_SECONDS", "30"))
# Not positive_data_acceptance: a schema does not say which fields exclude each other.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
# Among them 413, which schemathesis does not expect by itself.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = ["4XX"]
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None,
    reason="schemathesis is not installed; CONTRIBUTING.md says how",
)
def test_no_request_is_a_5xx(tmp_path: Path) -> None:
    """Answers are as documented, and nothing is left running. A context of 256 tokens is quick."""
    make_tiny_model("llama", max_position_embeddings=256).save_pretrained(tmp_path / "model")
    model = OffloadedModel.from_pretrained(tmp_path / "model", dtype="float32", num_threads=1)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "run", "--no-color", "--workers", "4"]
    options = ["--max-time", str(max(1, round(SECONDS))), "--checks", ",".join(CHECKS)]
    options += ["--continue-on-failure", "--request-timeout", "60", "--generation-database", "none"]
    with (
        serving(model, Access(port=0), sessions=Sessions(tmp_path / "sessions")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        result = subprocess.run(
            [*command, *options, f"{server.url}/openapi.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=2 * SECONDS + 120,
        )
        told = "\n".join(line[:500] for line in (result.stdout + result.stderr).splitlines())
        assert result.returncode == 0, told
        cases = re.search(r"(\d+) generated", result.stdout)
        assert cases is not None, result.stdout
        print(f"{cases[1]} cases in {SECONDS:g} seconds")
        assert int(cases[1]) >= 100
        assert http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        assert http.get("/load").json()["server_load"] == 0
