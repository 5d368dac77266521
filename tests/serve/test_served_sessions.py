"""A conversation goes on where it was, after a restart, too, and reads only what is new."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.conftest import Serve, metric, serving_process
from serve.test_life import LONG, engine_of, raw, until

from offload.engine.session_folder import SessionFolder
from offload.engine.sessions import Sessions

QUESTION = "a question that is as long as those of people are, and not only a word"


def ask(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, int]:
    """The answer, and how many tokens of its prompt were there, and were read."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body | {"session_id": "s"} | fields)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    text = answer.json()["choices"][0]["message"]["content"]
    return text, cached, usage["prompt_tokens"] - cached


def ask_on_disk(
    http: httpx.Client, messages: list[dict[str, str]], **fields: Any
) -> tuple[str, int, int]:
    """`ask`, after which no session is in memory any more."""
    found = ask(http, messages, **fields)
    until(lambda: metric(http, "offload_session_host_bytes") == 0)
    return found


def error_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return answer.status_code, error["message"]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sessions_of(http: httpx.Client) -> dict[str, Any]:
    return {each["id"]: each for each in http.get("/v1/sessions").json()["data"]}


@contextmanager
def keeping(serve: Serve, folder: Path, **limits: int) -> Iterator[httpx.Client]:
    """A server with sessions; what prompts share otherwise does not count."""
    options = {"sessions": Sessions(folder, **limits), "prefix_caching": False}
    with serve(**options) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def saved(folder: Path, *names: str) -> None:
    """Wait for the files."""
    until(lambda: sorted(os.listdir(folder)) == sorted(f"{name}.safetensors" for name in names))


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_conversation_goes_on_after_a_restart(
    serve_folder: Path, tmp_path: Path, end: signal.Signals
) -> None:
    options = ("--session-dir", tmp_path, "--session-memory", "64MiB", "--session-disk", "1GiB")
    messages = [turn("user", QUESTION)]
    with (
        serving_process(serve_folder, *options) as (process, url),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        first, cached, _ = ask(http, messages)
        assert cached == 0
        second = [*messages, turn("assistant", first), turn("user", "and then?")]
        wanted, cached, read = ask(http, second)
        assert cached > len(QUESTION)
        assert read < 60  # the end of the answer, and the new turn
        until(lambda: metric(http, "offload_sessions_saved_total") >= (end == signal.SIGKILL))
        process.send_signal(end)
        assert process.wait(10) == (0 if end == signal.SIGTERM else -end)
    with (
        serving_process(serve_folder, *options) as (_, url),
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        assert sessions_of(http)["s"]["where"] == "disk"
        found, cached, read = ask(http, second)
        assert found == wanted
        assert cached > len(QUESTION)
        assert read == 1 or end == signal.SIGKILL
        assert metric(http, 'offload_session_hits_total{where="disk"}') == 1


def test_memory_before_disk_and_what_is_counted(serve: Serve, tmp_path: Path) -> None:
    messages = [turn("user", QUESTION)]
    with keeping(serve, tmp_path) as http:
        answer = ask(http, messages)
        saved(tmp_path, "s")
        (tmp_path / "s.safetensors").write_bytes(b"nobody reads this")
        again = ask(http, messages)
        assert again[::2] == (answer[0], 1)
        assert metric(http, 'offload_session_hits_total{where="memory"}') == 1
        assert metric(http, "offload_session_misses_total") == 1
        found = sessions_of(http)["s"]
        assert (found["where"], found["tokens"]) == ("memory", sum(answer[1:]) + 7)
        assert metric(http, "offload_session_host_bytes") == found["bytes"] > 0
    with keeping(serve, tmp_path, host_limit_bytes=0) as http:
        assert sessions_of(http)["s"]["tokens"] == found["tokens"]
        assert ask_on_disk(http, messages)[::2] == (answer[0], 1)
        assert metric(http, 'offload_session_hits_total{where="disk"}') == 1
        assert metric(http, "offload_sessions_spilled_total") == 1
        assert metric(http, "offload_session_host_bytes") == 0


def test_the_source_of_a_copy_is_untouched(serve: Serve, tmp_path: Path) -> None:
    messages = [turn("user", QUESTION)]
    with keeping(serve, tmp_path, host_limit_bytes=0) as http:
        ask_on_disk(http, messages)
        source = tmp_path / "s.safetensors"
        before = source.read_bytes()
        SessionFolder(tmp_path).import_(source, "copy")
        other = [turn("user", QUESTION + ", which goes another way")]
        _, cached, _ = ask_on_disk(http, other, session_id="copy")
        assert cached > len(QUESTION)
        assert source.read_bytes() == before
        assert ask_on_disk(http, messages)[2] == 1


def test_names_that_are_refused(serve: Serve, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    folder = tmp_path / "sessions"
    with keeping(serve, folder) as http:

        def post(fields: dict[str, Any], *headers: str) -> tuple[int, str]:
            given = [("X-Session-ID", header) for header in headers]
            return error_of(http.post("/v1/completions", json=body | fields, headers=given))

        for bad in ("", "../x", "..", "/x", "a/b", "a\0b", "é", "x" * 129, 7, True, ["x"], {}):
            status, message = post({"session_id": bad})
            assert status == 400
            assert "session" in message
        for bad in ("", "../x", "x" * 129):
            assert post({}, bad)[0] == 400
            assert error_of(http.delete(f"/v1/sessions/{bad.replace('/', '%2F')}"))[0] in (400, 404)
        assert error_of(http.delete("/v1/sessions/..%2Fx"))[0] == 400
        assert error_of(http.delete("/v1/sessions/unknown"))[0] == 404
        assert post({"session_id": "a"}, "b") == (
            400,
            "session_id and the header X-Session-ID differ",
        )
        assert post({}, "a", "b")[0] == 400
        for more in ({"n": 2}, {"prompt": ["hello", "hello"]}, {"echo": True, "logprobs": 0}):
            assert post({"session_id": "a"} | more)[0] == 400
        assert os.listdir(folder) == [] == [*sessions_of(http)]
        for given in ({"session_id": "a"}, {"session_id": "a"}, {"session_id": None}):
            headers = {"X-Session-ID": "a"}
            answer = http.post("/v1/completions", json=body | given, headers=headers)
            assert answer.status_code == 200
        assert [*sessions_of(http)] == ["a"]


def test_a_server_without_sessions_says_so(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    for answer in (
        http.post("/v1/completions", json=body | {"session_id": "a"}),
        http.post("/v1/completions", json=body, headers={"X-Session-ID": "a"}),
        http.get("/v1/sessions"),
        http.delete("/v1/sessions/a"),
    ):
        status, message = error_of(answer)
        assert status == 400
        assert "--session-dir" in message


def test_one_request_of_a_session_at_a_time(serve: Serve, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "session_id": "a"}
    sessions = Sessions(tmp_path)
    with serve(sessions=sessions) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        with raw(server, json.dumps(LONG | {"session_id": "a", "stream": True})):
            until(lambda: engine_of(server).num_running == 1)
            for refused in (http.post("/v1/completions", json=body), http.delete("/v1/sessions/a")):
                status, message = error_of(refused)
                assert status == 409
                assert "session 'a' has a request that has not ended" in message
            other = http.post("/v1/completions", json=body | {"session_id": "b"})
            assert other.status_code == 200
            assert http.delete("/v1/sessions/b").json()["deleted"]  # between two steps
            assert [*sessions_of(http)] == []
        assert until(lambda: not engine_of(server).has_work) < 1.0
        assert http.post("/v1/completions", json=body).status_code == 200


def test_what_is_removed_is_gone(serve: Serve, tmp_path: Path) -> None:
    messages = [turn("user", QUESTION)]
    with keeping(serve, tmp_path) as http:
        ask(http, messages)
        assert http.delete("/v1/sessions/s").json() == {
            "id": "s",
            "object": "session",
            "deleted": True,
        }
        assert os.listdir(tmp_path) == []
        assert ask(http, messages)[1] == 0


def test_the_end_does_not_wait_for_a_slow_disk(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: SessionFolder, *args: Any) -> Iterator[None]:
        while True:
            time.sleep(0.05)
            yield

    monkeypatch.setattr(SessionFolder, "write", slow)
    sessions = Sessions(tmp_path)
    with serve(sessions=sessions) as server:
        server.served.flush_seconds = 0.5
        body = {"prompt": QUESTION, "max_tokens": 2, "session_id": "a"}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        start = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: not sessions.entries())
        assert 0.5 <= time.monotonic() - start < 3.0
