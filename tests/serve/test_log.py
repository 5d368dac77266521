"""The log of a server: one line for each request, in text or JSON, and what `/metrics` adds."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.slowly import slow_but
from serve.conftest import Serve, serving_process
from serve.test_life import LONG, SHORT, engine_of, raw, until

from offload.serve.chat import Texts
from offload.serve.log_lines import FORMS
from offload.serve.server import Access, Server

SECRET = "nightingale"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}


class Lines(logging.Handler):
    """Takes every record of this process, as JSON and as text."""

    def __init__(self) -> None:
        super().__init__()
        self.json: list[dict[str, Any]] = []
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.json.append(json.loads(FORMS["json"].format(record)))
        self.text.append(FORMS["text"].format(record))

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """Lines of requests, with this id."""
        return [each for each in self.json if "route" in each and each["id"] == request_id]

    def one(self, request_id: str) -> dict[str, Any]:
        """The line of a request, once it is there."""
        until(lambda: bool(self.of(request_id)))
        time.sleep(0.05)  # for a second one
        (line,) = self.of(request_id)
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root, ours = Lines(), logging.getLogger(), logging.getLogger("offload")
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield handler
    ours.setLevel(before)
    root.removeHandler(handler)


def leave(
    server: Server, request_id: str, body: dict[str, Any], is_time: Callable[[], bool] | None = None
) -> None:
    """Ask, and go when it is time, or some tokens have come."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        connection.sendall((head + text).encode())
        engine = engine_of(server)
        answered = engine.stats.answer_tokens
        until(is_time or (lambda: engine.stats.answer_tokens > answered + 20))


def test_every_request_has_one_line(
    serve: Serve, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answered, streamed, refused, unknown, cancelled and failed ones."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    asked: list[tuple[str, str, Any, int]] = [
        ("POST", chat, CHAT, 200),
        ("POST", chat, CHAT | {"stream": True}, 200),
        ("POST", completions, SHORT | {"prompt": ["a", "b"], "n": 2}, 200),
        ("POST", completions, SHORT | {"stream": True, "n": 2}, 200),
        ("POST", completions, {"prompt": SECRET, "max_tokens": 0, "echo": True}, 200),
        ("POST", "/v1/responses", {"input": SECRET, "max_output_tokens": 3}, 200),
        ("POST", "/v1/responses", {"input": SECRET, "max_output_tokens": 3, "stream": True}, 200),
        ("POST", "/tokenize", {"prompt": SECRET}, 200),
        ("POST", "/detokenize", {"tokens": [7]}, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/other%0Amodel", None, 404),
        ("GET", "/v1/sessions", None, 400),
        ("DELETE", "/v1/sessions/a", None, 400),
        ("GET", "/nowhere?prompt=" + SECRET, None, 404),
        ("GET", chat, None, 405),
        ("POST", chat, {"messages": SECRET}, 400),
        ("POST", chat, {"messages": [{"role": "user", "content": {"a": SECRET}}]}, 400),
        ("POST", chat, {"messages": [{"role": "developer", "content": SECRET}]}, 400),
        ("POST", completions, SHORT | {"prompt": {"text": SECRET}}, 400),
        ("POST", completions, SHORT | {"prompt": "x" * 5000}, 400),
        ("POST", completions, SHORT | {"model": "other"}, 404),
        ("POST", completions, {"prompt": SECRET * 1000}, 413),
        ("GET", "/", None, 200),
        ("GET", "/props", None, 200),
        ("OPTIONS", chat, None, 405),
    ]
    with serve(Access(port=0, max_body_bytes=8000)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            for i, (method, path, body, status) in enumerate(asked):
                answer = http.request(method, path, json=body, headers={"X-Request-Id": f"r{i}"})
                assert answer.headers["x-request-id"] == f"r{i}"
                assert answer.status_code == status, (path, answer.text)
            for path in ("/health", "/ping", "/metrics", "/load"):  # which are polled
                http.get(path, headers={"X-Request-Id": "polled"})
            monkeypatch.setattr(Texts, "chat_ids", lambda *args, **options: 1 / 0)
            failed = http.post(chat, json=CHAT, headers={"X-Request-Id": "failed"})
            assert failed.status_code == 500
            monkeypatch.undo()
        for i, (method, path, _, status) in enumerate(asked):
            line = lines.one(f"r{i}")
            assert (line["method"], line["route"]) == (method, path.split("?")[0])
            assert line["status"] == status
            assert line["seconds"] >= 0
            assert ("error" in line) == (status >= 400)
        assert not lines.of("polled")
        logging.getLogger("offload").setLevel(logging.DEBUG)
        httpx.get(f"{server.url}/health", headers={"X-Request-Id": "polled"})
        assert lines.one("polled")["level"] == "DEBUG"
        line = lines.one("failed")
        assert (line["status"], line["error"], line["level"]) == (500, "ZeroDivisionError", "ERROR")
    (traceback,) = (line for line in lines.json if "exception" in line)
    assert (traceback["id"], traceback["logger"]) == ("failed", "uvicorn.error")
    assert traceback["exception"].endswith("ZeroDivisionError: division by zero")
    assert SECRET not in "".join(lines.text)
    assert SECRET not in json.dumps(lines.json)
    assert len([line for line in lines.json if "route" in line]) == len(asked) + 2


def test_what_a_line_has(server: Server, http: httpx.Client, lines: Lines) -> None:
    prompt = "what a line of the log has to tell of a request"
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True}
    num_tokens = http.post("/tokenize", json={"prompt": prompt}).json()["count"]
    for stream in (False, True):
        request_id = f"told-{stream}"
        answer = http.post(
            "/v1/completions", json=body | {"stream": stream}, headers={"X-Request-Id": request_id}
        )
        assert f'"id":"cmpl-{request_id}"' in answer.text.replace(" ", "")
        line = lines.one(request_id)
        assert (line["status"], line["end"]) == (200, "length")
        assert line["prompt_tokens"] == num_tokens
        assert line["answer_tokens"] == 20
        assert 0 <= line["queued_seconds"] < line["ttft_seconds"] < line["seconds"]
        assert line["tokens_per_second"] > 19 / line["seconds"]
    assert line["cached_tokens"] == num_tokens - 1
    text = next(line for line in lines.text if "id=told-True" in line)
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d INFO     POST /v1/completions 200 "
        rf"seconds=\S+ prompt_tokens={num_tokens} cached_tokens={num_tokens - 1} "
        r"answer_tokens=20 queued_seconds=\S+ ttft_seconds=\S+ "
        r"tokens_per_second=\S+ end=length id=told-True$",
        text,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_told(server: Server, lines: Lines, stream: bool) -> None:
    until(lambda: not engine_of(server).has_work)
    leave(server, f"left-{stream}", LONG | {"stream": stream})
    line = lines.one(f"left-{stream}")
    assert (line["status"], line["end"]) == (200 if stream else 499, "cancelled")
    assert line["prompt_tokens"] == 4
    assert 10 < line["answer_tokens"] < 3000


def test_an_error_in_a_stream_is_told(
    serve: Serve, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("in the sampler")

    with serve() as server:
        monkeypatch.setattr("offload.engine.steps.choose", fails)
        body = SHORT | {"stream": True, "temperature": 0.5}
        headers = {"X-Request-Id": "broke"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        *_, last, end, _ = answer.text.split("\n\n")
        assert "in the sampler" in last
        assert end == "data: [DONE]"
        line = lines.one("broke")
    assert (line["status"], line["end"], line["level"]) == (200, "error", "ERROR")
    assert line["error"] == "KeyError: 'in the sampler'"
    (of_engine,) = (each for each in lines.json if each["logger"] == "offload.engine.steps")
    assert "request broke-" in of_engine["message"]


def test_a_request_that_waits_for_a_full_queue(serve: Serve, lines: Lines) -> None:
    with serve(max_num_seqs=1, max_queued=0) as server, raw(server, json.dumps(LONG)):
        until(lambda: engine_of(server).num_running == 1)
        refused = httpx.post(
            f"{server.url}/v1/completions", json=SHORT, headers={"X-Request-Id": "second"}
        )
        assert refused.status_code == 429
        assert "requests wait already" in lines.one("second")["error"]


def test_how_long_a_request_waits(serve: Serve, lines: Lines) -> None:
    with serve(max_num_seqs=1) as server:
        with raw(server, json.dumps(LONG)), ThreadPoolExecutor() as pool:
            until(lambda: engine_of(server).num_running == 1)
            url, headers = f"{server.url}/v1/completions", {"X-Request-Id": "waits"}
            waits = pool.submit(httpx.post, url, json=SHORT, headers=headers, timeout=30)
            until(lambda: engine_of(server).num_waiting == 1)
            time.sleep(0.3)
            assert not waits.done()
            leave(server, "gone", SHORT, lambda: engine_of(server).num_waiting == 2)
            assert waits.result().is_success
        gone = lines.one("gone")
        assert (gone["end"], gone["read_tokens"]) == ("cancelled", 0)
        assert "queued_seconds" not in gone
        assert 0.3 <= lines.one("waits")["queued_seconds"] <= lines.one("waits")["ttft_seconds"]
        text = httpx.get(f"{server.url}/metrics").text
        assert 'offload_queued_seconds_count{model_name="tiny"} 2.0' in text
        assert 'offload_queued_seconds_bucket{le="0.25",model_name="tiny"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_with_the_server_is_told(serve: Serve, lines: Lines, stream: bool) -> None:
    with serve(Access(port=0, shutdown_seconds=0.2)) as server, ThreadPoolExecutor() as pool:
        url, headers = f"{server.url}/v1/completions", {"X-Request-Id": "cut"}
        cut = pool.submit(httpx.post, url, json=LONG | {"stream": stream}, headers=headers)
        until(lambda: engine_of(server).num_running == 1)
        start = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        assert "shutting down" in cut.result().text
        assert time.monotonic() - start < 3.0
        line = lines.one("cut")
    assert (line["level"], line["status"]) == ("WARNING", 200 if stream else 503)
    assert (line["end"], line["error"]) == ("error", "the server is shutting down")


@pytest.mark.parametrize("given", ["a b", "x" * 129, "", 'a"b', "größe", "a\tb"])
def test_ids_that_are_not_taken(http: httpx.Client, lines: Lines, given: str) -> None:
    headers = {"X-Request-Id": given.encode()}
    answer = http.post("/v1/completions", json=SHORT, headers=headers)
    own = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", own)
    assert answer.json()["id"] == f"cmpl-{own}"
    assert lines.one(own)["status"] == 200


def test_who_may_not_come_in_is_told(serve: Serve, lines: Lines) -> None:
    with serve(Access(port=0, api_keys=("key",), cors_origins=("http://a.example",))) as server:
        headers = {"X-Request-Id": "keyless", "Origin": "http://a.example"}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (401, "keyless")
        assert answer.headers["access-control-expose-headers"].lower() == "x-request-id"
        assert lines.one("keyless")["error"] == "missing or wrong API key"


@pytest.mark.parametrize("form", slow_but(["text", "json"], "json"))
def test_the_command(serve_folder: Path, tmp_path: Path, form: str) -> None:
    """Every line of stderr has the form, and none is wrapped; keys are of a file."""
    keys = tmp_path / "keys.txt"
    keys.write_text("secret\n")
    options = ["--log-format", form, "--host", "127.0.0.1", "--api-key-file", keys]
    with serving_process(serve_folder, *options, columns=40) as (process, url):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for i in range(3):
            headers = {"X-Request-Id": f"{i}" * 100, "Authorization": "Bearer secret"}
            answer = httpx.post(f"{url}/v1/completions", json=SHORT, headers=headers)
            assert answer.json()["model"] == str(serve_folder)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        said = process.stderr.read().splitlines()
        assert process.wait(20) == 0
    assert [each for each in said if "Invalid HTTP request received." in each]
    if form == "json":
        found = [json.loads(each) for each in said]
        assert all({"time", "level", "logger", "message"} <= {*each} for each in found)
        ids = [each["id"] for each in found if each.get("route") == "/v1/completions"]
    else:
        assert all(re.match(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ ", each) for each in said)
        ids = [each.split("id=")[1] for each in said if "/v1/completions" in each]
    assert ids == [f"{i}" * 100 for i in range(3)]


def test_metrics_of_tokens_model_and_version(server: Server, http: httpx.Client) -> None:
    def metric(name: str, **labels: str) -> float:
        given = ",".join(f'{key}="{value}"' for key, value in labels.items())
        text = http.get("/metrics").text
        found = re.search(rf"^{name}{re.escape('{' + given + '}')} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    name, model = "offload_inter_token_seconds_count", {"model_name": "tiny"}
    before = metric(name, **model)
    http.post("/v1/completions", json={"prompt": "gaps", "max_tokens": 9, "ignore_eos": True})
    assert metric(name, **model) == before + 8
    assert metric("offload_first_token_seconds_bucket", le="1800.0", **model) > 0
    text = http.get("/metrics").text
    (info,) = re.findall(r"^offload_build_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', info))
    props = http.get("/props").json()
    assert {*found} == {"version", "model_name", "policy", "isa", "device", "dtype"}
    assert (found["version"], found["policy"]) == (props["version"], props["policy"])
    assert (found["device"], found["dtype"], found["model_name"]) == ("cpu", "float32", "tiny")
    for line in text.splitlines():
        assert line.startswith(("#", "offload_model_loaded ")) or 'model_name="tiny"' in line
