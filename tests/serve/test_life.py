"""Load, those who leave, keys and limits, and how a server ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.tiny_models import byte_tokenizer
from serve.conftest import Serve, metric, serving_process
from typer.testing import CliRunner

from offload import AsyncEngine, Engine
from offload.cli import app
from offload.engine.request import Request
from offload.engine.sessions import SessionInUseError
from offload.engine.steps import Steps
from offload.serve.app import Served
from offload.serve.chat import Texts
from offload.serve.server import Access, Server

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}


def until(holds: Callable[[], bool], seconds: float = 10.0) -> float:
    """Seconds until it holds."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)
    return time.monotonic() - start


def engine_of(server: Server) -> Engine:
    assert server.served is not None
    return server.served.engine.engine


def raw(server: Server, body: str) -> socket.socket:
    """A connection on which a completion is asked for."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_who_leaves_is_not_served_on(server: Server, stream: bool, half: bool) -> None:
    engine = engine_of(server)
    until(lambda: not engine.has_work)
    body = json.dumps(LONG | {"stream": stream})
    with raw(server, body) as connection:
        until(lambda: engine.num_running == 1)
        if half:
            connection.shutdown(socket.SHUT_WR)
            assert until(lambda: not engine.has_work) < 1.0
    assert until(lambda: not engine.has_work) < 1.0


def test_who_does_not_read_is_not_served_on(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.serve.streaming.SEND_SECONDS", 0.5)
    with serve() as server:
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with raw(server, json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 4})):
            until(lambda: engine_of(server).num_running == 4)
            until(lambda: not engine_of(server).has_work)
        assert engine_of(server).stats.cancelled == 4


def test_many_who_leave(server: Server, http: httpx.Client) -> None:
    for _ in range(200):
        raw(server, json.dumps(LONG)).close()
    start = time.monotonic()
    assert http.post("/v1/completions", json=SHORT).status_code == 200
    assert time.monotonic() - start < 5.0
    assert until(lambda: not engine_of(server).has_work) < 5.0


def test_a_full_queue_is_a_429(serve: Serve) -> None:
    with serve(max_num_seqs=1, max_queued=1) as server, httpx.Client(base_url=server.url) as http:
        with raw(server, json.dumps(LONG | {"n": 2})):
            until(lambda: http.get("/load").json()["server_load"] == 2)
            answer = http.post("/v1/completions", json=SHORT)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        until(lambda: http.get("/load").json()["server_load"] == 0)
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        for body in ({"n": 3}, {"prompt": ["a", "b", "c"]}):  # for which there is never room
            refused = http.post("/v1/completions", json=SHORT | body)
            assert refused.status_code == 400
            assert "at most 2 answers" in refused.json()["error"]["message"]
        assert http.get("/load").json()["server_load"] == 0


def test_more_load_than_there_is_room_for(serve: Serve) -> None:
    """Every answer is the one that its prompt gets alone, or a 429."""
    with serve(max_num_seqs=3, max_queued=6) as server:
        url = f"{server.url}/v1/completions"
        bodies = [
            {"prompt": f"number {i % 10}, of some length", "max_tokens": 30, "temperature": 0}
            for i in range(80)
        ]
        wanted = [httpx.post(url, json=body).json()["choices"] for body in bodies[:10]]
        with ThreadPoolExecutor(40) as pool:
            found = [*pool.map(lambda body: httpx.post(url, json=body, timeout=30), bodies)]
        for i, answer in enumerate(found):
            assert answer.status_code in (200, 429)
            assert answer.status_code == 429 or answer.json()["choices"] == wanted[i % 10]
        codes = [answer.status_code for answer in found]
        assert codes.count(200) >= 9
        assert 429 in codes


def test_keys_and_limits(serve: Serve) -> None:
    access = Access(
        port=0,
        api_keys=("first", "second"),
        max_body_bytes=1000,
        cors_origins=("http://a.example",),
    )
    with serve(access) as server, httpx.Client(base_url=server.url) as http:
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "first"}):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
            assert http.post("/v1/completions", json=SHORT, headers=headers).status_code == 401
        for path in ("/health", "/ping", "/"):
            assert http.get(path).status_code == 200
        http.headers["Authorization"] = "Bearer second"
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        large = b'{"prompt": "' + b"x" * 1000 + b'"}'
        assert http.post("/v1/completions", content=large).status_code == 413
        kind = {"Content-Type": "application/json"}
        chunked = http.post("/v1/completions", content=iter([large]), headers=kind)
        assert chunked.status_code == 413
        assert chunked.json()["error"]["message"] == "the body has more than 1000 bytes"
        for origin, allowed in (("http://a.example", True), ("http://b.example", False)):
            answer = http.get("/health", headers={"Origin": origin})
            assert ("access-control-allow-origin" in answer.headers) == allowed
    with serve(Access(port=0, api_keys=("first",), public_models=True)) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_keys_are_ascii() -> None:
    with pytest.raises(ValueError, match="not ASCII"):
        Access(api_keys=("plain", "schlüssel"))


def test_a_chat_has_the_servers_most_tokens(serve: Serve) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}

    def num_tokens(server: Server, **fields: Any) -> int:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | fields, timeout=30)
        return int(answer.json()["usage"]["completion_tokens"])

    with serve(default_max_tokens=5) as server:
        assert num_tokens(server) == 5
        assert num_tokens(server, max_tokens=3) == 3
        assert num_tokens(server, max_completion_tokens=7) == 7
        assert num_tokens(server, min_tokens=6) == 6
    with serve(default_max_tokens=10**9) as server:
        long = [{"role": "user", "content": "x" * 4060}]
        assert 1 < num_tokens(server, messages=long) < 30


def test_what_a_server_says_of_itself(server: Server, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    props = http.get("/props").json()
    assert (props["model"], props["n_ctx"], props["max_num_seqs"]) == ("tiny", 4096, 32)
    prompt = "metrics count what was shared with an earlier prompt"
    for _ in range(2):
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})

    assert metric(http, "offload_cached_tokens_total") >= len(prompt) - 2
    assert metric(http, 'offload_requests_total{end="finished"}') >= 2
    assert metric(http, "offload_first_token_seconds_count") >= 2
    assert metric(http, "offload_requests_running") == 0
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=["']?https?:""", page.text)


def test_the_schema_describes_answers_and_errors(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert {*operation["responses"]} == {"200", "4XX", "5XX"}
            (content, *_) = operation["responses"]["200"]["content"].values()
            assert "$ref" in content["schema"] or path == "/metrics"
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["top_p"]["anyOf"][0]["maximum"] == 1
    assert fields["best_of"]["anyOf"][0]["enum"] == [1, None]
    refused = http.post("/health")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert refused.json()["error"]["message"] == "Method Not Allowed"


def test_a_head_is_as_a_get_without_body(server: Server, http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/v1/models", "/metrics", "/"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == http.get(path).headers["content-type"]
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/nowhere").status_code == 404


def test_docs_need_nothing_from_elsewhere(http: httpx.Client) -> None:
    page, schema = http.get("/docs"), http.get("/openapi.json").json()
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)
    for path, methods in schema["paths"].items():
        assert all(f"{method.upper()} {path}<" in page.text for method in methods)
    for name in schema["components"]["schemas"]:
        assert f'id="{name}"' in page.text
    links = {*re.findall(r'href="#([^"]+)"', page.text)}
    assert links == {*schema["components"]["schemas"]} & links
    assert "≤ 1" in page.text  # of top_p


@pytest.mark.parametrize("taken", ["port", "host"])
def test_an_address_that_cannot_be_had_is_an_error(taken: str) -> None:
    """Before anything is loaded."""

    def load() -> Served:
        pytest.fail("it loads")

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        access = Access(port=port) if taken == "port" else Access("203.0.113.1", 0)
        named = f"port {port}" if taken == "port" else access.host
        with pytest.raises(OSError, match=f"{named}.*--{taken}"):
            Server(load, access).run()


def test_a_dead_engine_is_a_503(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Engine) -> None:
        raise OSError("the device is gone")

    with serve() as server, httpx.Client(base_url=server.url, timeout=20) as http:
        monkeypatch.setattr(Engine, "step", fails)
        for _ in range(2):
            answer = http.post("/v1/completions", json=SHORT)
            assert answer.status_code == 503
            assert "the device is gone" in answer.json()["error"]["message"]
        for path in ("/health", "/ping"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert http.get("/metrics").status_code == 200
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("error", "status"), [(SessionInUseError("s is in use"), 409), (RecursionError(), 400)]
)
def test_errors_of_others_are_the_clients(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise error

    late = isinstance(error, SessionInUseError)
    with serve() as server:
        if late:
            monkeypatch.setattr("offload.engine.steps.choose", fails)
        else:
            monkeypatch.setattr(Texts, "chat_ids", fails)
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0.5}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_ping_answers_while_a_long_prompt_is_tokenised(server: Server, http: httpx.Client) -> None:
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "he is a word " * 30_000}
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        longest = 0.0
        while not asked.done():
            start = time.monotonic()
            assert http.get("/ping").status_code == 200
            longest = max(longest, time.monotonic() - start)
        assert asked.result().json()["error"]["code"] == "exceed_context_size_error"
    assert longest < 1.0


def test_a_stream_is_never_silent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first byte comes at once, and others every second while nothing is chosen."""
    step = Engine.step

    def slow(self: Engine) -> Any:
        time.sleep(2.5)
        return step(self)

    with serve() as server:
        monkeypatch.setattr(Engine, "step", slow)
        start, came, lines = time.monotonic(), [], []
        body = SHORT | {"stream": True, "max_tokens": 1}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as answer:
            came.append(time.monotonic() - start)
            for line in answer.iter_lines():
                came.append(time.monotonic() - start)
                lines.append(line)
        monkeypatch.undo()
    assert came[0] < 1.0
    assert max(b - a for a, b in pairwise(came)) < 2.0
    assert any(line.startswith(": ping, 0 of 4 prompt tokens read") for line in lines)


def test_the_end_of_a_server(serve: Serve) -> None:
    """What runs is finished, what comes is refused."""
    with serve() as server, httpx.Client(base_url=server.url, timeout=30) as http:
        body = LONG | {"max_tokens": 1500}
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            )
        )
        thread.start()
        until(lambda: engine_of(server).num_running == 1)
        server.handle_exit(signal.SIGTERM, None)
        refused = http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        for path in ("/health", "/ping"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["status"] == answer.json()["error"]["code"] == "draining"
        assert http.get("/load").json()["running"] == 1
        assert metric(http, "offload_requests_running") == 1
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 1500


@pytest.mark.parametrize("layer_seconds", [0.1, 3.0])
def test_the_end_while_prompts_are_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, layer_seconds: float
) -> None:
    """Within two seconds, even in the middle of a layer; each client gets an error as OpenAI's."""

    def slow(self: Steps, own: list[Request]) -> None:
        time.sleep(seconds[-1])
        pause(self, own)

    pause, seconds = Steps._pause, [0.1]
    monkeypatch.setattr(Steps, "_pause", slow)
    lines = list[str]()
    with serve() as server, ThreadPoolExecutor() as pool:
        # As where the signal is handled in the main thread.
        monkeypatch.setattr("sse_starlette.sse._get_uvicorn_server", lambda: server)
        monkeypatch.setattr(server, "_say", lines.append)

        def post(route: str, body: dict[str, Any]) -> Any:
            return pool.submit(httpx.post, f"{server.url}/v1/{route}", json=body, timeout=30)

        prompt = "a long prompt " * 250
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        whole = post("completions", {"prompt": "b" + prompt})
        streamed = [
            post("completions", {"prompt": "c" + prompt, "stream": True}),
            post("chat/completions", chat | {"stream": True}),
            post("responses", {"input": "d" + prompt, "stream": True}),
        ]
        engine = engine_of(server)
        until(lambda: engine.num_running == 4)
        seconds.append(layer_seconds)  # in which nobody else would come
        time.sleep(0.6)  # streams are watched
        start = time.monotonic()
        server.handle_exit(signal.SIGINT, None)
        until(lambda: not server.servers[0].is_serving(), 4.0)
        texts = [answer.result().text for answer in streamed]
        until(lambda: server.servers[0]._waiters is None, 4.0)
        assert time.monotonic() - start < 2.2
        assert (whole.result().status_code, whole.result().headers["retry-after"]) == (503, "1")
        assert whole.result().json()["error"]["type"] == "server_error"
        for text in texts[:2]:
            error = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["error"]
            assert (error["message"], error["type"]) == (
                "the server is shutting down",
                "server_error",
            )
            assert text.endswith("data: [DONE]\n\n")
        failed = json.loads(texts[2].split("\n\n")[-2].split("data: ")[1])
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["message"] == "the server is shutting down"
        assert lines == [
            "stopping: ending 4 requests whose prompt is still read; Ctrl-C again stops at once"
        ]
    until(lambda: engine._thread is None or not engine._thread.is_alive(), 20.0)
    assert engine.stats.cancelled == 4


def test_a_second_signal_ends_answers_with_an_error(serve: Serve) -> None:
    lines = list[str]()
    with serve() as server, ThreadPoolExecutor() as pool:
        server._say = lines.append
        url = f"{server.url}/v1/completions"
        parts = pool.submit(httpx.post, url, json=LONG | {"stream": True}, timeout=30)
        until(lambda: engine_of(server).stats.answer_tokens > 0)
        server.handle_exit(signal.SIGINT, None)
        until(lambda: bool(lines))
        assert lines == [
            "stopping: waiting up to 30 s for 1 answer to finish; Ctrl-C again stops at once"
        ]
        start = time.monotonic()
        server.handle_exit(signal.SIGINT, None)
        assert "the server is shutting down" in parts.result().text
        assert parts.result().text.endswith("data: [DONE]\n\n")
        assert time.monotonic() - start < 2.0


def test_a_short_prompt_is_answered_at_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came just before the signal."""
    entered = threading.Event()

    def slow(self: Steps, own: list[Request]) -> None:
        entered.set()
        time.sleep(0.05)

    monkeypatch.setattr(Steps, "_pause", slow)
    with serve() as server, ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=SHORT, timeout=30)
        assert entered.wait(10)
        server.handle_exit(signal.SIGTERM, None)
        assert answer.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_during_the_prompt_is_not_read_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def slow(self: Steps, own: list[Request]) -> None:
        entered.set()
        time.sleep(0.4)
        pause(self, own)

    entered, pause = threading.Event(), Steps._pause
    monkeypatch.setattr(Steps, "_pause", slow)
    with serve() as server:
        engine, store = engine_of(server), engine_of(server).model.kv_store
        before = store.num_sequences, store.host_bytes_used  # of other servers
        with raw(server, json.dumps({"prompt": "a long prompt " * 250, "stream": stream})):
            assert entered.wait(10)
        assert until(lambda: not engine.has_work) < 1.0
        assert (engine.stats.prompt_tokens, engine.stats.cancelled) == (0, 1)
        assert (store.num_sequences, store.host_bytes_used) == before


@pytest.mark.parametrize("is_second", [False, True])
def test_a_step_that_hangs_ends_with_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, is_second: bool
) -> None:
    """After a while, or at once with a second signal."""
    entered, released, step = threading.Event(), threading.Event(), Engine.step

    def hangs(self: Engine) -> Any:
        entered.set()
        released.wait(30)
        return step(self)

    monkeypatch.setattr(Engine, "step", hangs)
    monkeypatch.setattr("offload.serve.app._GRACE_SECONDS", 60.0 if is_second else 0.5)
    with serve(Access(port=0, shutdown_seconds=0.1)) as server:
        server.served.flush_seconds = 0.1
        engine = engine_of(server)
        with raw(server, json.dumps(LONG)):
            assert entered.wait(10)
            server.handle_exit(signal.SIGTERM, None)
            if is_second:
                time.sleep(0.5)
                server.handle_exit(signal.SIGTERM, None)
            until(lambda: server.force_exit and not server.servers[0].is_serving(), 4.0)
    released.set()
    until(lambda: engine._thread is None)


def test_a_server_that_loads_says_so(served_model: Any) -> None:
    goes_on, lines = threading.Event(), list[str]()

    def load() -> Served:
        assert goes_on.wait(20)
        return Served(AsyncEngine(Engine(served_model, byte_tokenizer())), "tiny")

    server = Server(load, Access(port=0, api_keys=("key",)), lines.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: len(lines) == 1)
        with httpx.Client(base_url=server.url, timeout=5) as http:
            assert http.get("/metrics").status_code == 401
            http.headers["Authorization"] = "Bearer key"
            for path in ("/health", "/ping", "/v1/models", "/nowhere"):
                answer = http.get(path)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert answer.json()["error"]["code"] == "loading"
                assert ("status" in answer.json()) == (path in ("/health", "/ping"))
            assert http.post("/v1/completions", json=SHORT).status_code == 503
            metrics = http.get("/metrics")
            assert (metrics.status_code, "offload_model_loaded 0.0" in metrics.text) == (200, True)
            goes_on.set()
            until(lambda: http.get("/health").status_code == 200)
            assert "offload_model_loaded 1.0" in http.get("/metrics").text
            assert http.post("/v1/completions", json=SHORT).status_code == 200
        until(lambda: lines[1:] == [f"serving at {server.url}"])
    finally:
        goes_on.set()
        server.should_exit = True
        thread.join(20)


def test_a_server_that_cannot_load_ends() -> None:
    def load() -> Served:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Server(load, Access(port=0)).run()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_listens_before_it_has_loaded(serve_folder: Path, number: int) -> None:
    with serving_process(serve_folder, says="loading;") as (process, url):
        answer = httpx.get(f"{url}/health", timeout=20)
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        assert httpx.get(f"{url}/metrics", timeout=20).status_code == 200
        process.send_signal(number)
        assert process.wait(10) in (-number, 0)  # 0: it was through


def test_the_command_says_that_its_port_is_in_use(serve_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        runner = CliRunner(env={"COLUMNS": "300"})
        done = runner.invoke(app, ["serve", str(serve_folder), "--port", str(port)])
    wanted = (
        f"error: port {port} of 127.0.0.1 is in use; give another one with --port (0: a free one)"
    )
    assert (done.exit_code, done.stderr.splitlines()) == (1, [wanted])
