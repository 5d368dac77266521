"""Two replicas of the server under Ray Serve, one of which is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from offload.ranks.launch import free_port

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install '.[ray]'")

pytestmark = pytest.mark.slow
IDS = [f"session-{i}" for i in range(16)]


def replicas_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes of replicas that have loaded their model or do."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "ServeReplica" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture(scope="module")
def ray_server(
    serve_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`serve run` of the config that docs/how-to/server.md has, and its URL."""
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    options = f"--dtype float32 --served-model-name tiny --session-dir {folder / 'sessions'}"
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "offload",
                "import_path": "offload.cli.ray_app:app",
                "args": {
                    "command": f"{serve_folder} {options}",
                    "num_replicas": 2,
                    "num_cpus": 0.5,
                },
            }
        ],
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # which is YAML
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", path]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command)], stdout=log, stderr=log, env=environment, cwd=folder
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_up(url), 180, folder / "log")
            yield process, url
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            for each in [process, *children]:
                with suppress(psutil.Error, ProcessLookupError):
                    each.kill()
            process.wait(10)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(check: Any, seconds: float, log: Path | None = None) -> None:
    until = time.monotonic() + seconds
    while not check():
        said = log.read_text()[-5000:] if log else ""
        assert time.monotonic() < until, f"not within {seconds} s\n{said}"
        assert "failed with exception" not in said, said
        time.sleep(0.5)


def test_sessions_outlive_their_replica(ray_server: tuple[Any, str], client: openai.OpenAI) -> None:
    (process, url), single = ray_server, client
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=5)

    def ask(messages: list[Any], session: str | None, of: openai.OpenAI = client) -> Any:
        headers = {"X-Session-ID": session} if session else {}
        return of.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, extra_headers=headers
        )

    def in_memory(session: str) -> frozenset[str]:
        """Sessions in memory of the replica that this one is sent to."""
        answer = httpx.get(f"{url}/v1/sessions", headers={"X-Session-ID": session}, timeout=20)
        found = answer.json()["data"]
        return frozenset(each["id"] for each in found if each["where"] == "memory")

    def stored() -> bool:
        found = httpx.get(f"{url}/v1/sessions", timeout=20).json()["data"]
        return {each["id"] for each in found if each["tokens"]} >= {*IDS}

    def has_two() -> bool:
        """Whether both replicas answer: one of them has the session "probe"."""
        return len({in_memory(f"probe-{i}") for i in range(20)}) == 2

    ask([{"role": "user", "content": "hello"}], "probe")
    wait_until(has_two, 120)
    turns: dict[str, list[Any]] = {}
    for _ in range(2):
        for session in IDS:
            given = turns.get(session, [])
            given = [*given, {"role": "user", "content": f"I am {session}. " * 8}]
            answer = ask(given, session)
            if len(given) > 1:
                assert answer.usage.prompt_tokens_details.cached_tokens > 100
            reply = {"role": "assistant", "content": answer.choices[0].message.content}
            turns[session] = [*given, reply]
    # Every session is in its replica's memory, and in no other's.
    places = {session: in_memory(session) & {*IDS} for session in IDS}
    assert all(session in place for session, place in places.items())
    assert len({*places.values()}) == 2, places
    first, second = {*places.values()}
    assert not first & second
    assert first | second == {*IDS}
    wait_until(stored, 30)

    # A stream of each replica: one ends with an error, the other as it would.
    replicas, ends = replicas_of(process), dict[str, str]()
    assert len(replicas) == 2

    def stream(name: str, session: str) -> None:
        try:
            made = client.with_options(max_retries=0).chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=2500,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
                extra_headers={"X-Session-ID": session},
            )
            reasons = []
            for chunk in made:
                started[name].set()
                reasons += [each.finish_reason for each in chunk.choices if each.finish_reason]
            ends[name] = reasons[0] if reasons else "cut"
        except (openai.OpenAIError, httpx.HTTPError):
            ends[name] = "cut"

    # Streams are of new sessions, found to be of one replica each.
    names: dict[str, str] = {}
    for i in range(64):
        place = in_memory(f"stream-{i}") & {*IDS}
        names.setdefault("first" if place == first else "second", f"stream-{i}")
    assert len(names) == 2
    started = {name: threading.Event() for name in names}
    threads = [threading.Thread(target=stream, args=each) for each in names.items()]
    for thread in threads:
        thread.start()
    assert all(each.wait(60) for each in started.values())
    replicas[0].kill()

    # All go on: those of the dead replica from their files.
    for session in IDS:
        given = [*turns[session], {"role": "user", "content": "Who am I?"}]
        answer = ask(given, session)
        assert answer.usage.prompt_tokens_details.cached_tokens > 200, session
        alone = ask(given, None, single)  # another server, which has not seen any of it
        text = answer.choices[0].message.content
        assert text == alone.choices[0].message.content
        turns[session] = [*given, {"role": "assistant", "content": text}]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert sorted(ends.values()) == ["cut", "length"], ends

    # Ray has a new replica made, which takes sessions up, too.
    wait_until(lambda: len(replicas_of(process)) == 2, 120)
    wait_until(has_two, 120)
    for session in IDS:
        given = [*turns[session], {"role": "user", "content": "And now?"}]
        assert ask(given, session).usage.prompt_tokens_details.cached_tokens > 200, session


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": "tiny --port 9000"}, "Ray's proxy listens"),
        ({"command": "tiny --polcy full"}, "No such option"),
        ({"command": "tiny", "num_replicas": 0}, "num_replicas"),
        ({"command": "tiny", "num_gpu": 1}, "num_gpu"),
        ({"command": "tiny", "router": "random"}, "'session' or 'prefix'"),
        ({"command": "tiny", "num_replicas": 2, "autoscaling_config": {}}, "not both"),
        ({"command": "tiny", "autoscaling_config": {"max_replica": 2}}, "available: min_replicas"),
        ({"command": "tiny", "autoscaling_config": {"max_replicas": 0}}, "max_replicas"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    from offload.cli.ray_app import Options, app

    with pytest.raises(Exception, match=words):
        app(Options(**options))
