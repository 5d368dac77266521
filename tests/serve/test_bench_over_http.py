"""`offload bench serve URL`: a program asks servers, and its records become our rows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload.bench.serve import over_http
from offload.bench.serve.load import Load
from offload.bench.serve.over_http import find_generator, served_name
from offload.cli import app
from offload.serve.server import Server

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
# Records of aiperf 0.13, less what we do not read; the last request is refused.
RECORDED = """\
#!{python}
import json, sys
options = dict(arg.split("=", 1) for arg in sys.argv if "=" in arg)
lines = open(options["--input-file"]).read().splitlines()
json.dump([sys.argv[1:], [json.loads(line) for line in lines]], open({said!r}, "w"))
metrics = {{"time_to_first_token": 100.0, "inter_chunk_latency": [20.0, 30.0],
    "usage_prompt_tokens": 41, "usage_completion_tokens": 4, "usage_prompt_cache_read_tokens": 8}}
with open(options["--artifact-dir"] + "/profile_export.jsonl", "w") as out:
    for i in range(len(lines)):
        record = {{"metadata": {{"request_start_ns": (10 + i) * 10**9}}}}
        if i == len(lines) - 1 and i:
            record["error"] = {{"code": 429, "message": "full"}}
            record["metrics"] = {{}}
        else:
            record["metrics"] = {{k: {{"value": v, "unit": "x"}} for k, v in metrics.items()}}
        print(json.dumps(record), file=out)
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """In the place of aiperf; what it was asked is in said.json beside it."""
    path = tmp_path / "recorded"
    path.write_text(RECORDED.format(python=sys.executable, said=str(tmp_path / "said.json")))
    path.chmod(0o755)
    return path


@pytest.fixture
def arguments(serve_folder: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("A text of a few hundred bytes, each of which is a token. " * 12)
    return ["--text", str(text), "--served-model-name", str(serve_folder), "--json"]


def invoke(*arguments: object) -> Any:
    result = runner.invoke(app, ["bench", "serve", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_clients(server: Server, recorded: Path, arguments: list[str]) -> None:
    asked = ["--clients", 2, "--requests", 2, "--prompt-tokens", 40, "--answer-tokens", 5]
    document = invoke(
        *(f"{server.url}/v1/", "--generator", recorded, *arguments, *asked, "--good-gap-ms", 20)
    )
    command, lines = json.loads((recorded.parent / "said.json").read_text())
    assert command[0] == "profile"
    assert {f"--url={server.url}", "--model=tiny", "--concurrency=2", "--request-count=4"} < set(
        command
    )
    assert [len(line["text"]) for line in lines] == [40] * 4
    assert len({line["text"] for line in lines}) == 4
    assert all(line["extra"] == {"temperature": 0, "ignore_eos": True} for line in lines)
    assert all(line["output_length"] == 5 for line in lines)
    assert document["settings"]["urls"] == [server.url]
    (row,) = document["rows"]
    assert (row["engine"], row["model"]) == (server.url.removeprefix("http://"), "tiny")
    assert (row["requests"], row["refused"], row["errors"]) == (4, 1, 0)
    assert row["first_error"] == "429 full"
    assert row["seconds"] == pytest.approx(2.15)  # the third's last token
    assert row["answer_tokens_per_second"] == pytest.approx(12 / 2.15)
    assert row["prompt_tokens_per_second"] == pytest.approx(3 * 41 / 2.15)
    assert row["good_requests_per_second"] == pytest.approx(3 / 2.15)  # 50 / 3 ms between tokens
    assert row["answer_tokens_mean"] == 4
    assert row["ttft_ms_median"] == pytest.approx(100)
    assert row["gap_ms_longest"] == pytest.approx(30)
    assert row["cached_tokens"] == 24


def test_a_rate_has_the_times_of_in_process(
    server: Server, recorded: Path, arguments: list[str]
) -> None:
    asked = ["--rate", 20, "--duration", 0.5, "--prompt-tokens", "30-40", "--answer-tokens", 5]
    (row,) = invoke(server.url, "--generator", recorded, *arguments, *asked)["rows"]
    command, lines = json.loads((recorded.parent / "said.json").read_text())
    assert {"--fixed-schedule", "--fixed-schedule-auto-offset"} < set(command)
    sends = Load((30, 40), 5, rate=20, duration_seconds=0.5).first_sends()
    assert [line["timestamp"] for line in lines] == [1e3 * at for at, _, _ in sends]
    assert (row["clients"], row["rate"], row["requests"]) == (None, 20, len(lines))


def test_a_table(server: Server, recorded: Path, arguments: list[str]) -> None:
    asked = [*arguments[:-1], "--clients", "1,2", "--prompt-tokens", "40", "--good-ttft-ms", "99"]
    called = ["bench", "serve", server.url, "--generator", str(recorded), *asked]
    result = runner.invoke(app, called)
    assert result.exit_code == 0, result.output
    _, lines = json.loads((recorded.parent / "said.json").read_text())
    assert len(lines) == 8  # the second load's
    headers = [line.split() for line in result.stdout.splitlines() if "clients" in line]
    assert headers[1] == ["clients", "cached", "refused", "errors", "good", "tokens"]
    assert max(map(len, result.stdout.splitlines())) <= 80


class Listed(BaseHTTPRequestHandler):
    """Lists the models that its server's `models` names; knows no field but those of OpenAI."""

    def do_GET(self) -> None:
        models = self.server.models  # type: ignore[attr-defined]
        self._answer(200, {"data": [{"id": name} for name in models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        unknown = {"ignore_eos", "generation_config"} & body.keys()
        self._answer(422 if unknown else 200, {"detail": sorted(unknown)})

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Not on stderr."""


@contextmanager
def listing(*models: str) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Listed) as server:
        server.models = models  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_which_model_is_asked_for(recorded: Path, arguments: list[str]) -> None:
    with listing("one") as url:
        assert served_name(url) == served_name(url, "other") == "one"
    with listing("one", "two") as url:
        with pytest.raises(ValueError, match=r"2 models, one, two; say which with --served-model"):
            served_name(url)
        assert served_name(url, "other") == "other"
        invoke(url, "--generator", recorded, *arguments, "--clients", 1, "--prompt-tokens", 9)
    _, lines = json.loads((recorded.parent / "said.json").read_text())
    assert lines[0]["extra"] == {"temperature": 0}  # it refused ignore_eos
    with listing() as url, pytest.raises(ValueError, match="lists no models"):
        served_name(url)


def test_what_is_refused(
    server: Server, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_http, "_IN_CHECKOUT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"on the PATH: run make load-generator .* aiperf"):
        find_generator()
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    fails.chmod(0o755)
    for given, words in {
        "": "expected URLs such as",
        "tiny": "got tiny",
        "a b --in-process": "takes one model, got a, b",
        f"{server.url} --pace": "needs --in-process",
        f"{server.url} --policy full": "need it",
        "tiny --in-process --generator x": "are for servers",
        f"{server.url} --generator {tmp_path}/no": "no load generator at",
        f"http://127.0.0.1:9 --generator {fails}": "does not answer",
        f"{server.url}/v2 --generator {fails}": "HTTP Error 404",
        f"{server.url} --generator {fails} --prompt-tokens 40": "ended with 3 and no records: no s",
    }.items():
        of_model = arguments if "fails" in given and "/v2" not in given else []
        result = runner.invoke(app, ["bench", "serve", *given.split(), *of_model])
        assert result.exit_code != 0, given
        assert words in " ".join(result.output.replace("│", "").split()), result.output


@contextmanager
def transformers_serve(folder: Path) -> Iterator[str]:
    """transformers' own server, which refuses fields that OpenAI's does not have."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    options = ["--port", str(port), "--device", "cpu", "--dtype", "float32"]
    url = f"http://localhost:{port}"
    command, nowhere = [program, "serve", folder, *options], subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=nowhere) as run:
        try:
            until = time.monotonic() + 120
            while time.monotonic() < until and run.poll() is None:
                try:
                    httpx.get(f"{url}/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield url
        finally:
            run.kill()


@pytest.mark.slow
def test_aiperf_asks_two_servers(server: Server, serve_folder: Path, arguments: list[str]) -> None:
    try:
        find_generator()
    except FileNotFoundError:
        pytest.skip("aiperf is not installed: make load-generator")
    asked = ["--prompt-tokens", "30-60", "--answer-tokens", 8, "--good-ttft-ms", 60_000]
    with transformers_serve(serve_folder) as theirs:
        for load in (["--clients", 2, "--requests", 2], ["--rate", 4, "--duration", 2]):
            document = invoke(server.url, theirs, *arguments, *asked, *load)
            for row in document["rows"]:
                assert row["requests"] > 3
                assert (row["refused"], row["errors"]) == (0, 0), row
                assert row["answer_tokens_mean"] == 8
                assert 0 <= row["gap_ms_median"] <= row["gap_ms_longest"] > 0
                assert row["ttft_ms_p99"] > 0
                assert row["good_requests_per_second"] == row["requests_per_second"] > 0
            read = [row["prompt_tokens_per_second"] * row["seconds"] for row in document["rows"]]
            assert read[0] == pytest.approx(read[1])
