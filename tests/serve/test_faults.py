"""Disks, clocks, clients and signals that do what they should not: what was promised is kept, the
rest gets an error, and nobody has to help."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve.conftest import Serve, metric, serving_process
from serve.test_life import SHORT, engine_of, until
from serve.test_served_sessions import QUESTION, ask, keeping, saved, sessions_of, turn

MESSAGES = [turn("user", QUESTION)]
DAY = 86400.0


@pytest.fixture(params=["full", "away", "stale"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Callable[[], None], Callable[[], None]]]:
    """A folder of sessions, what breaks it, and what mends it."""
    folder, elsewhere = tmp_path / "sessions", tmp_path / "elsewhere"
    patched = pytest.MonkeyPatch()

    def fails(*args: Any, **options: Any) -> Any:
        number = errno.ENOSPC if request.param == "full" else errno.ESTALE
        raise OSError(number, os.strerror(number))

    def breaks() -> None:
        if request.param == "away":
            folder.rename(elsewhere)
        else:
            patched.setattr("offload.system.checked_file._write_all", fails)
        if request.param == "stale":
            patched.setattr(Path, "exists", fails)

    def mends() -> None:
        patched.undo()
        if request.param == "away":
            elsewhere.rename(folder)

    monkeypatch.setattr("offload.engine.sessions._RETRY_SECONDS", 0.2)
    yield folder, breaks, mends
    patched.undo()


def test_a_disk_that_fails_and_comes_back(serve: Serve, disk: Any) -> None:
    folder, breaks, mends = disk
    with keeping(serve, folder) as http:
        wanted = ask(http, MESSAGES)[0]
        saved(folder, "s")
        breaks()
        for session_id in ("s", "t"):
            assert ask(http, MESSAGES, session_id=session_id)[0] == wanted
        assert {i: each["where"] for i, each in sessions_of(http).items()} == dict.fromkeys(
            "st", "memory"
        )
        assert ask(http, MESSAGES, session_id="t")[::2] == (wanted, 1)
        time.sleep(0.5)  # it is tried again, in vain
        mends()
        until(lambda: metric(http, "offload_sessions_saved_total") == 3)
        saved(folder, "s", "t")
        assert http.get("/health").status_code == 200
    with keeping(serve, folder) as http:
        for session_id in ("s", "t"):
            assert ask(http, MESSAGES, session_id=session_id)[::2] == (wanted, 1)


def test_a_disk_that_fails_and_no_memory(serve: Serve, disk: Any) -> None:
    """Sessions that cannot be kept anywhere are read again."""
    folder, breaks, mends = disk
    with keeping(serve, folder, host_limit_bytes=0) as http:
        wanted = ask(http, MESSAGES)[0]
        until(lambda: metric(http, "offload_session_host_bytes") == 0)
        breaks()
        for session_id in ("s", "t", "t"):
            assert ask(http, MESSAGES, session_id=session_id)[0] == wanted
            until(lambda: metric(http, "offload_session_host_bytes") == 0)
        mends()
        for session_id, cached in (("s", True), ("t", False), ("t", True)):
            found = ask(http, MESSAGES, session_id=session_id)
            assert (found[0], found[1] > 0) == (wanted, cached)
            until(lambda: metric(http, "offload_session_host_bytes") == 0)
        assert not [*folder.glob(".*")]


@pytest.mark.slow
def test_a_full_disk_of_a_process_that_is_killed(serve_folder: Path, tmp_path: Path) -> None:
    """What the kernel refuses to write is written when there is room, and is there after -9."""
    options = ("--session-dir", tmp_path / "sessions")
    with (
        serving_process(serve_folder, *options) as (process, url),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        server = psutil.Process(process.pid)
        server.rlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        wanted = ask(http, MESSAGES)[0]
        assert "File too large" in next(
            line for line in process.stderr or () if "not saved" in line
        )
        assert os.listdir(tmp_path / "sessions") == []
        assert ask(http, MESSAGES)[::2] == (wanted, 1)
        server.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        until(lambda: os.listdir(tmp_path / "sessions") == ["s.safetensors"], 20)
        process.kill()
    with (
        serving_process(serve_folder, *options) as (_, url),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        assert ask(http, MESSAGES)[::2] == (wanted, 1)


def test_a_clock_that_jumps(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day, and back by two: the oldest sessions still go first, and nothing ends early."""
    now, now_ns, moved = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + moved[-1])
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(moved[-1] * 1e9))
    with keeping(serve, tmp_path) as http:
        wanted = ask(http, MESSAGES)[0]
        saved(tmp_path, "s")
        size = (tmp_path / "s.safetensors").stat().st_size
    names = list[str]()
    with keeping(serve, tmp_path, disk_limit_bytes=3 * size + 99) as http:
        for session_id, jump in (("a", DAY), ("b", -DAY), ("c", -DAY), ("d", 0.0)):
            moved.append(jump)
            assert ask(http, MESSAGES, session_id=session_id)[0] == wanted
            names = [*names, session_id][-3:]
            until(lambda: metric(http, "offload_sessions_saved_total") >= len(moved) - 1)
            assert (tmp_path / f"{session_id}.safetensors").exists()
        saved(tmp_path, *names)
        for session_id in "abcd":  # in memory, all of them
            assert ask(http, MESSAGES, session_id=session_id)[::2] == (wanted, 1)
        with ThreadPoolExecutor() as pool:
            body = SHORT | {"max_tokens": 1000, "ignore_eos": True}
            long = pool.submit(http.post, "/v1/completions", json=body)
            until(lambda: http.get("/load").json()["running"] == 1)
            moved.append(DAY)
            until(lambda: http.get("/load").json()["running"] == 1)
            moved.append(-DAY)
            assert long.result().json()["usage"]["completion_tokens"] == 1000


def connection_to(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of 500 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_clients_that_say_nothing_or_a_byte_at_a_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold nobody up, and are sent away."""
    monkeypatch.setattr("offload.serve.connections.REQUEST_SECONDS", 3.0)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = json.dumps(SHORT)
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    with serve() as server, ExitStack() as stack:
        idle = [stack.enter_context(connection_to(server.url)) for _ in range(500)]
        slow = [stack.enter_context(connection_to(server.url)) for _ in range(20)]
        again = stack.enter_context(connection_to(server.url))
        again.sendall(whole.encode())
        answer = again.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        while not answer.endswith(b"}"):  # the body may come in a piece of its own
            answer += again.recv(65536)
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=10))
        for place in range(8):
            for number, connection in enumerate([*slow, again]):
                if place == 0:  # of half of them the body is slow
                    start = len(head) + 22 + number if number % 2 else 1
                    connection.sendall(whole[:start].encode())
                else:
                    connection.sendall(whole[start + place : start + place + 1].encode())
            started = time.monotonic()
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            assert time.monotonic() - started < 2.0
            time.sleep(0.2)
        for connection in [*slow, again]:
            answer = connection.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 408")
        assert all(connection.recv(1) == b"" for connection in idle)
        until(lambda: len(server.server_state.connections) <= 1)  # that of `http`
        assert not engine_of(server).has_work
        assert http.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.slow
def test_a_process_that_is_stopped_and_one_without_descriptors(serve_folder: Path) -> None:
    with (
        serving_process(serve_folder) as (process, url),
        httpx.Client(base_url=url, timeout=60) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        bodies = [
            {"prompt": f"number {i}", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
            for i in range(4)
        ]

        def text(body: dict[str, Any]) -> str:
            if not body.get("stream"):
                return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

        wanted = [text(body) for body in bodies]
        lines: Any = process.stderr
        threading.Thread(target=lambda: [*lines], daemon=True).start()  # a full pipe would block
        answers = [
            pool.submit(text, body | {"stream": i % 2 == 0}) for i, body in enumerate(bodies)
        ]
        until(lambda: http.get("/load").json()["running"] == 4)
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            time.sleep(2)
            assert sum(answer.done() for answer in answers) < 4
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert [answer.result() for answer in answers] == wanted

        before = (server := psutil.Process(process.pid)).rlimit(resource.RLIMIT_NOFILE)
        assert before[0] == before[1]
        server.rlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        with ExitStack() as stack:
            others = [stack.enter_context(connection_to(url)) for _ in range(190)]
            until(lambda: len(select.select(others, [], [], 0)[0]) >= 90)
            closed, _, _ = select.select(others, [], [], 0)  # that waited for the longest time
            assert closed == others[: len(closed)]
            assert len(closed) < 150
            assert closed[0].recv(1) == b""
            assert text(bodies[0]) == wanted[0]
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
